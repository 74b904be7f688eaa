"""Which prompts are in the pipeline and which groups make the next batch: a plan without I/O.

Prompts have positions, in the order of the user's iterable. A position is *settled* when its group was yielded or
reported as failed; only settled positions are skipped after a restart. Groups leave oldest first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rollmq.errors import ConfigError
from rollmq.messages import EndedItem
from rollmq.rollout import ModelRequest
from trainer_client.positions import Positions
from trainer_client.state import BatchProgress

Prompt = ModelRequest | tuple[ModelRequest, dict[str, Any]]
"""What `batches` takes: a request, or a request with data for its workflow and reward."""


def split_prompt(prompt: Prompt) -> tuple[ModelRequest, dict[str, Any]]:
    """The request and its own data.

    Raises:
        ConfigError: it is neither a request nor a pair of request and data.
    """
    request, data = prompt if isinstance(prompt, tuple) and len(prompt) == 2 else (prompt, {})
    if not isinstance(request, ModelRequest) or not isinstance(data, Mapping):
        raise ConfigError(
            f"a prompt is a {type(prompt).__name__}; it must be a ModelRequest or a pair of (ModelRequest, data)"
        )
    return request, dict(data)


@dataclass(frozen=True, slots=True)
class GroupFailure:
    """A prompt that gave no group; another one took its place.

    Attributes:
        position: of the prompt in the iteration, from 0.
        task_id: the member that ended.
        state: its terminal state: `dead`, `expired`, `stale` or `cancelled`.
        reason: the recorded reason.
    """

    position: int
    task_id: int
    state: str
    reason: str


@dataclass(slots=True)
class PlannedGroup:
    """One prompt in the pipeline; `task_ids` is empty until it is submitted."""

    position: int
    request: ModelRequest
    data: dict[str, Any]
    task_ids: tuple[int, ...] = ()


@dataclass(slots=True)
class BatchPlan:
    """The pipeline of one iteration.

    Attributes:
        batch_size: groups of a batch.
        depth: most groups in the pipeline.
        iteration: number of the iteration, for keys and state.
        settled: positions that are over.
        exhausted: whether the user's iterable has ended.
    """

    batch_size: int
    depth: int
    iteration: int = 0
    settled: Positions = field(default_factory=Positions)
    exhausted: bool = False
    _next: int = 0
    _groups: dict[int, PlannedGroup] = field(default_factory=dict)
    _by_task: dict[int, int] = field(default_factory=dict)
    _complete: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._next = self.settled.floor

    @property
    def progress(self) -> BatchProgress:
        """Data position for the checkpoint."""
        return BatchProgress(self.iteration, self.settled.floor, self.settled.beyond)

    @property
    def skip(self) -> int:
        """How many prompts at the start of the iterable are settled, before any was offered."""
        return self.settled.floor

    @property
    def groups(self) -> list[PlannedGroup]:
        """Groups in the pipeline, oldest first."""
        return list(self._groups.values())

    @property
    def task_ids(self) -> list[int]:
        """Submitted tasks of groups in the pipeline."""
        return list(self._by_task)

    @property
    def complete(self) -> int:
        """How many groups have all their trajectories here."""
        return len(self._complete)

    def wanted(self) -> int:
        """How many more prompts the pipeline takes now."""
        return 0 if self.exhausted else max(0, self.depth - len(self._groups))

    def is_over(self) -> bool:
        """Whether no full batch can come any more."""
        return self.exhausted and len(self._groups) < self.batch_size

    def offer(self, prompt: Prompt) -> PlannedGroup | None:
        """The next prompt of the iterable; None if its position is settled already."""
        request, data = split_prompt(prompt)
        position, self._next = self._next, self._next + 1
        if position in self.settled:
            return None
        group = self._groups[position] = PlannedGroup(position, request, data)
        return group

    def placed(self, group: PlannedGroup, task_ids: Iterable[int]) -> None:
        """Its members are submitted."""
        group.task_ids = tuple(task_ids)
        self._by_task.update(dict.fromkeys(group.task_ids, group.position))

    def touch(self, task_id: int, is_available: Callable[[int], bool]) -> None:
        """Something happened to a task: looks again whether its group is complete."""
        position = self._by_task.get(task_id)
        if position is None:
            return
        if all(is_available(member) for member in self._groups[position].task_ids):
            self._complete.add(position)
        else:
            self._complete.discard(position)

    def fail(self, fate: EndedItem) -> tuple[GroupFailure, tuple[int, ...]] | None:
        """A member ended without a trajectory: its group leaves. Returns what to report and its members."""
        position = self._by_task.get(fate.task_id)
        if position is None:
            return None
        members = self._groups[position].task_ids
        self._leave(position)
        state = fate.state.value if fate.state else "unknown"
        return GroupFailure(position, fate.task_id, state, fate.reason), members

    def next_batch(self, is_available: Callable[[int], bool]) -> list[PlannedGroup] | None:
        """The oldest complete groups, checked once more, if there are enough; they stay until `yielded`.

        Args:
            is_available: whether a task's trajectory is here and fresh; may hand it back.
        """
        batch: list[PlannedGroup] = []
        for position in sorted(self._complete):
            group = self._groups[position]
            # Every member is asked, so that each that is too old is handed back, not just the first.
            fresh = [task_id for task_id in group.task_ids if is_available(task_id)]
            if len(fresh) == len(group.task_ids):
                batch.append(group)
            else:
                self._complete.discard(position)
            if len(batch) == self.batch_size:
                return batch
        return None

    def yielded(self, batch: Iterable[PlannedGroup]) -> None:
        """The user has these groups now."""
        for group in batch:
            self._leave(group.position)

    def _leave(self, position: int) -> None:
        group = self._groups.pop(position)
        for task_id in group.task_ids:
            self._by_task.pop(task_id, None)
        self._complete.discard(position)
        self.settled.add(position)
