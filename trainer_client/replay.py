"""Submitting a journal's tasks to a live fleet and comparing what comes back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rollmq.errors import TaskFailed
from rollmq.recorded import RecordedTask
from rollmq.rollout import Trajectory
from trainer_client.client import RolloutClient


@dataclass(slots=True)
class ReplayOutcome:
    """How a live fleet compares with a journal.

    Attributes:
        submitted: tasks sent to the fleet.
        identical: greedy or seeded tasks with the same tokens.
        different: ids of those with other tokens.
        other_version: tasks whose recorded tokens came from other weight versions than the fleet's; not compared.
        not_comparable: sampled without a seed, or without a recorded result.
        failed: task id -> why it ended without a trajectory on the fleet.
    """

    submitted: int = 0
    identical: int = 0
    different: list[int] = field(default_factory=list)
    other_version: int = 0
    not_comparable: int = 0
    failed: dict[int, str] = field(default_factory=dict)

    @property
    def agrees(self) -> bool:
        """Whether nothing that can be compared differs, and nothing failed."""
        return not self.different and not self.failed

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "agrees": self.agrees}


def replay_tasks(
    client: RolloutClient,
    tasks: Sequence[RecordedTask],
    log_id: str,
    *,
    timeout_s: float,
    progress: Callable[[], None] = lambda: None,
) -> ReplayOutcome:
    """Submits recorded tasks under keys of their own and compares each result with the recorded one.

    Args:
        client: connected; its bounds must admit all tasks at once.
        tasks: from `broker.recorded.recorded_tasks`.
        log_id: of the journal, so that repeated replays to one broker are the same tasks.
        timeout_s: for each task.
        progress: called after each task.

    Raises:
        DeadlineExceeded: a task did not end in time.
    """
    outcome = ReplayOutcome(submitted=len(tasks))
    ids = [
        client.submit(
            task.spec.request, workflow=task.spec.workflow, data=task.spec.data, key=f"replay/{log_id}/{task.task_id}"
        )
        for task in tasks
    ]
    for task, task_id in zip(tasks, ids, strict=True):
        try:
            _compare(outcome, task, client.wait(task_id, timeout=timeout_s))
        except TaskFailed as error:
            outcome.failed[task.task_id] = str(error)
        progress()
    return outcome


def _compare(outcome: ReplayOutcome, task: RecordedTask, now: Trajectory) -> None:
    recorded = task.trajectory
    gconfig = task.spec.request.gconfig
    if recorded is None or not (gconfig.is_greedy or gconfig.seed is not None):
        outcome.not_comparable += 1
    elif {span[0] for span in recorded.version_spans} != {span[0] for span in now.version_spans}:
        outcome.other_version += 1
    elif recorded.output_ids == now.output_ids:
        outcome.identical += 1
    else:
        outcome.different.append(task.task_id)
