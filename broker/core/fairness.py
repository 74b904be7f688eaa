"""Which queued task of a policy goes next: fair between trainers, oldest first inside one.

Between trainers: start-time fair queueing by cost (each trainer has a virtual time that grows by the cost it was
served; the smallest goes next), which shares a fleet like deficit round robin does without a quantum to choose.
Inside a trainer: evaluation before training, then the oldest task. Heaps are lazy: an entry counts only while
`is_queued` says so.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from rollmq.messages import Priority

RANK = {Priority.EVAL: 0, Priority.TRAIN: 1}


@dataclass(slots=True)
class TrainerQueue:
    """The queued tasks of one trainer.

    Attributes:
        admitted: (rank, task id) of members of groups that already hold a place in the budget.
        fresh: (rank, task id) of members of groups that do not.
    """

    virtual_time: int = 0
    admitted: list[tuple[int, int]] = field(default_factory=list)
    fresh: list[tuple[int, int]] = field(default_factory=list)


class PolicyQueue:
    """All queued tasks of one policy."""

    __slots__ = ("_clock", "trainers")

    def __init__(self) -> None:
        self.trainers: dict[str, TrainerQueue] = {}
        self._clock = 0

    def push(self, trainer: str, task_id: int, priority: Priority, *, admitted: bool) -> None:
        """Queues a task; `admitted` if its group already holds a place."""
        queue = self.trainers.get(trainer)
        if queue is None:
            queue = self.trainers[trainer] = TrainerQueue()
        if not queue.admitted and not queue.fresh:
            # Idle time earns no credit: who comes back starts level with those being served.
            queue.virtual_time = max(queue.virtual_time, self._clock)
        heapq.heappush(queue.admitted if admitted else queue.fresh, (RANK[priority], task_id))

    def next(self, *, fresh_allowed: bool, is_current: Callable[[int, bool], bool]) -> tuple[str, int] | None:
        """(trainer, task id) to serve next, left in place.

        Args:
            fresh_allowed: whether the budget has room for another group.
            is_current: (task id, admitted) -> whether that heap entry still holds.
        """
        best: tuple[int, str, int] | None = None
        for trainer, queue in self.trainers.items():
            head = _head(queue, fresh_allowed, is_current)
            if head is not None and (best is None or (queue.virtual_time, trainer) < best[:2]):
                best = (queue.virtual_time, trainer, head)
        return None if best is None else (best[1], best[2])

    def served(self, trainer: str, cost: int) -> None:
        """A task of this trainer was dispatched; its heap entry lapses by itself."""
        queue = self.trainers[trainer]
        self._clock = max(self._clock, queue.virtual_time)
        queue.virtual_time += max(1, cost)

    def fingerprint(self) -> list[object]:
        """Virtual times, for the state hash (the heaps follow from the tasks)."""
        return [self._clock, sorted((name, queue.virtual_time) for name, queue in self.trainers.items())]


def _head(queue: TrainerQueue, fresh_allowed: bool, is_current: Callable[[int, bool], bool]) -> int | None:
    """The trainer's next task: members of admitted groups first, since a group is only useful complete."""
    admitted = _peek(queue.admitted, True, is_current)
    if admitted is not None:
        return admitted[1]
    fresh = _peek(queue.fresh, False, is_current)
    # Evaluation needs no room in the budget; it sorts before everything else, so looking at the first is enough.
    return fresh[1] if fresh is not None and (fresh_allowed or fresh[0] == RANK[Priority.EVAL]) else None


def _peek(
    heap: list[tuple[int, int]], admitted: bool, is_current: Callable[[int, bool], bool]
) -> tuple[int, int] | None:
    while heap and not is_current(heap[0][1], admitted):
        heapq.heappop(heap)
    return heap[0] if heap else None
