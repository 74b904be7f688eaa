"""Rebuilding the state from a journal, with every decision compared with the recorded one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from broker.core.events import Effect, WatchDeadline
from broker.core.machine import Machine
from broker.journal.interface import Record
from broker.records import decode_event
from rollmq.errors import ReplayMismatch


@dataclass(slots=True)
class ReplayReport:
    """What a replay did.

    Attributes:
        events: records replayed.
        decisions: decisions compared, all equal.
        deadlines: task deadlines that are still of interest, by task.
        last_ns: the broker's clock at the last event.
    """

    events: int = 0
    decisions: int = 0
    deadlines: dict[int, int] = field(default_factory=dict)
    last_ns: int = 0


def replay(machine: Machine, records: Iterable[Record]) -> ReplayReport:
    """Feeds a journal's events to the machine.

    Raises:
        ReplayMismatch: a decision differs from the recorded one; names the sequence and both.
        JournalDamaged: a record is not an event.
    """
    report = ReplayReport()
    for record in records:
        recorded = decode_event(record)
        outcome = machine.apply(recorded.event, recorded.sequence)
        if outcome.decisions != recorded.decisions:
            raise ReplayMismatch(_describe(recorded.sequence, recorded.decisions, outcome.decisions))
        report.events += 1
        report.decisions += len(outcome.decisions)
        report.last_ns = recorded.event.now_ns
        _note_deadlines(report, outcome.effects)
    open_ids = machine.state.open_ids
    report.deadlines = {task_id: at for task_id, at in report.deadlines.items() if task_id in open_ids}
    return report


def _note_deadlines(report: ReplayReport, effects: list[Effect]) -> None:
    for effect in effects:
        if isinstance(effect, WatchDeadline):
            report.deadlines[effect.task_id] = effect.at_ns


def _describe(sequence: int, recorded: list[tuple[int, int, str]], decided: list[tuple[int, int, str]]) -> str:
    for index in range(max(len(recorded), len(decided))):
        was = recorded[index] if index < len(recorded) else None
        now = decided[index] if index < len(decided) else None
        if was != now:
            return (
                f"journal record {sequence}: decision {index} was recorded as {was} but this core decides {now}; "
                "the journal was written by another version of rollmq, or the core is not deterministic"
            )
    return f"journal record {sequence}: decisions differ"
