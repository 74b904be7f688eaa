"""DELIVER, CONSUMED and HANDBACK: how trajectories reach their trainer, in a stable sequence, never too old."""

from __future__ import annotations

from broker.core.model import SessionState, Task, Trainer
from broker.core.results import is_too_old
from broker.core.transitions import (
    became_stale,
    discard_ready,
    ended_item,
    make_ready,
    move,
    staleness_detail,
)
from broker.core.turn import Turn, chunks, split_by_bytes
from rollmq.messages import (
    Consumed,
    Deliver,
    DeliverItem,
    Done,
    Ended,
    EndedItem,
    HandBack,
    TaskState,
    Watch,
)

ENDED_PER_MESSAGE = 10
"""An ENDED item may carry 300 characters of reason; ten fit a head of 4 KiB."""


def deliver(turn: Turn, trainer: Trainer) -> None:
    """Sends what is ready and fresh, as far as the trainer's credit goes."""
    session = turn.state.sessions.get(trainer.session)
    if session is None:
        return
    batch: list[Task] = []
    while trainer.ready and session.credit.free() > 0:
        task = turn.state.tasks[trainer.deliveries[trainer.ready[0]]]
        if _left_behind(turn, task):
            continue
        trainer.ready.pop(0)
        move(turn, task, TaskState.DELIVERED, trainer.name)
        session.credit.spend(task.result.length if task.result else 0)
        batch.append(task)
    floor = delivery_floor(turn, trainer)
    for piece in split_by_bytes(
        batch, lambda task: task.result.length if task.result else 0, turn.state.settings.max_items
    ):
        items = tuple(_deliver_item(turn, task) for task in piece)
        bodies = tuple(task.result for task in piece if task.result is not None)
        turn.send(session.session, Deliver(session.session, floor, items, ()), bodies)


def _left_behind(turn: Turn, task: Task) -> bool:
    """Whether a ready result turned out too old; then it has left the line."""
    policy = turn.state.policies[task.policy]
    task.stale = policy.staleness.is_stale(task.head_version, policy.versions.version)
    if not is_too_old(policy, task.head_version):
        return False
    became_stale(turn, task, staleness_detail(policy, task.head_version))
    return True


def _deliver_item(turn: Turn, task: Task) -> DeliverItem:
    size = turn.state.groups[task.group].size
    return DeliverItem(
        task.task_id, task.delivery, task.group, task.member, size, task.head_version, task.tail_version, task.stale
    )


def delivery_floor(turn: Turn, trainer: Trainer) -> int:
    """No delivery below this is still open; it moves up over what was consumed or has gone."""
    while trainer.floor < trainer.next_delivery:
        task_id = trainer.deliveries.get(trainer.floor)
        if task_id is not None and turn.state.tasks[task_id].state is not TaskState.CONSUMED:
            break
        trainer.floor += 1
    return trainer.floor


def consumed(turn: Turn, session: SessionState, message: Consumed) -> None:
    """The trainer has used these; repeated acknowledgements change nothing."""
    trainer = turn.state.trainers[session.name]
    for task_id in message.tasks:
        task = turn.state.tasks.get(task_id)
        if task is None or task.trainer != session.name:
            continue
        if task.state in (TaskState.READY, TaskState.DELIVERED):
            discard_ready(trainer.ready, task.delivery)
            move(turn, task, TaskState.CONSUMED, trainer.name)
    turn.answer(Done(session.session, message.request))


def handed_back(turn: Turn, session: SessionState, message: HandBack) -> None:
    """Trajectories that aged in the client's hands; one that is still fresh is delivered again."""
    for task_id in message.tasks:
        task = turn.state.tasks.get(task_id)
        if task is None or task.trainer != session.name or task.state is not TaskState.DELIVERED:
            continue
        if not _left_behind(turn, task):
            make_ready(turn, task, "handed back")
    turn.answer(Done(session.session, message.request))


def return_deliveries(turn: Turn, trainer: Trainer) -> None:
    """A new session of the trainer gets again what the old one had not acknowledged."""
    for task_id in list(trainer.deliveries.values()):
        task = turn.state.tasks[task_id]
        if task.state is TaskState.DELIVERED:
            make_ready(turn, task, "session over")


def watch(turn: Turn, session: SessionState, message: Watch) -> None:
    """Tells which of these tasks are over or unknown. Read only: not in the journal."""
    items = [item for item in (_fate(turn, session, task_id) for task_id in message.tasks) if item is not None]
    for part in chunks(items, ENDED_PER_MESSAGE) or [()]:
        turn.answer(Ended(session.session, message.request, part))


def _fate(turn: Turn, session: SessionState, task_id: int) -> EndedItem | None:
    task = turn.state.tasks.get(task_id)
    if task is None or task.trainer != session.name:
        return EndedItem(task_id, None, "no such task of this trainer is known; it may have ended long ago")
    if task.state in (TaskState.QUEUED, TaskState.LEASED, TaskState.READY, TaskState.DELIVERED):
        return None
    return ended_item(task)
