"""The tasks of a journal with their last results, for `rollmq replay tasks`."""

from __future__ import annotations

from collections.abc import Iterator

from broker.core.machine import Machine
from broker.core.model import BodyRef, Task
from broker.journal.interface import Record
from broker.journal.reader import JournalReader
from broker.replay import replay
from rollmq.bodies import decode_task_spec, decode_trajectory
from rollmq.recorded import RecordedTask


def recorded_tasks(reader: JournalReader) -> Iterator[RecordedTask]:
    """Every task that the journal still knows, by id.

    Raises:
        JournalDamaged: the journal or a body in it is damaged.
        ReplayMismatch: this core decides otherwise than the one that wrote the journal.
    """
    machine = Machine()
    replay(machine, reader.records(check_bodies=True))
    tasks = [task for _, task in sorted(machine.state.tasks.items())]
    wanted = {ref.sequence for task in tasks for ref in (task.body, task.result) if ref is not None}
    records = {record.sequence: record for record in reader.records() if record.sequence in wanted}
    for task in tasks:
        yield _recorded(task, records)


def _recorded(task: Task, records: dict[int, Record]) -> RecordedTask:
    trajectory = None
    if task.result is not None:
        trajectory = decode_trajectory(_body(task.result, records), task_id=task.task_id)
    spec = decode_task_spec(_body(task.body, records))
    return RecordedTask(task.task_id, task.trainer, task.policy, task.state, spec, trajectory)


def _body(ref: BodyRef, records: dict[int, Record]) -> bytes:
    return records[ref.sequence].body(ref.position)
