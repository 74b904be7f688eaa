"""A task as a journal has it: what was asked, and what came of it. What replay tools hand to each other."""

from __future__ import annotations

from dataclasses import dataclass

from rollmq.messages import TaskState
from rollmq.rollout import TaskSpec, Trajectory


@dataclass(frozen=True, slots=True)
class RecordedTask:
    """One task of a journal.

    Attributes:
        task_id: its id in that journal.
        trainer: who submitted it.
        policy: for which policy.
        state: its last state there.
        spec: what was asked.
        trajectory: its last accepted result, or None.
    """

    task_id: int
    trainer: str
    policy: str
    state: TaskState
    spec: TaskSpec
    trajectory: Trajectory | None
