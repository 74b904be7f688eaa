"""Trajectories that were delivered and not yet taken, and which delivery sequences are over: exactly once, without I/O.

The broker delivers at least once: whatever was not acknowledged comes again in the next session under the same
sequence. A sequence is *held* (here, not yet taken), *taken* (the trainer has it), or *released* (handed back or
cancelled; if the broker sends it again all the same, it counts as new). What is below the broker's floor and none of
these is over. Bodies stay encoded until they are taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rollmq.messages import Deliver, DeliverItem

COMPACT_ABOVE = 256


@dataclass(frozen=True, slots=True)
class Arrival:
    """One delivered trajectory, still encoded.

    Attributes:
        vouched: the broker sent it again although it had been handed back at this version, so by the policy's own
            rule it was fresh then; -1 for all others.
    """

    item: DeliverItem
    body: bytes
    vouched: int = -1


class Inbox:
    """See the module. All ids are the broker's task ids."""

    def __init__(self) -> None:
        self.held_bytes = 0
        self._held: dict[int, Arrival] = {}
        self._taken: set[int] = set()
        self._released: dict[int, int] = {}
        self._returning: set[int] = set()
        self._cursor = 0
        self._floor = 1
        self._compact_at = COMPACT_ABOVE

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, task_id: int) -> bool:
        return task_id in self._held

    def __iter__(self) -> Iterator[Arrival]:
        return iter(list(self._held.values()))

    def get(self, task_id: int) -> Arrival | None:
        """What is held for a task."""
        return self._held.get(task_id)

    # --- coming in ------------------------------------------------------------------------------------------------

    def raise_floor(self, floor: int) -> None:
        """The broker says that nothing below this is open any more, but for what is held here."""
        if floor > self._floor:
            self._floor = floor
            self._released = {seq: version for seq, version in self._released.items() if seq >= floor}

    def receive(self, message: Deliver) -> tuple[list[int], list[int]]:
        """Keeps what is new.

        Returns:
            (tasks that are newly held, tasks that had been taken already).
        """
        fresh: list[int] = []
        repeated: list[int] = []
        for item, body in zip(message.items, message.bodies, strict=True):
            if item.sequence in self._returning:
                continue  # It crossed our HANDBACK; what the broker makes of that is still to come.
            if self._is_taken(item.sequence):
                repeated.append(item.task_id)
            elif self._keep(item, body):
                fresh.append(item.task_id)
        self.raise_floor(message.floor)
        return fresh, repeated

    def _is_taken(self, sequence: int) -> bool:
        if sequence in self._released:
            return False
        return sequence <= self._cursor or sequence in self._taken

    def _keep(self, item: DeliverItem, body: bytes) -> bool:
        held = self._held.get(item.task_id)
        if held is not None and held.item.sequence >= item.sequence:
            return False
        if held is not None:
            self._drop(item.task_id)
        vouched = self._released.pop(item.sequence, -1)
        self._held[item.task_id] = Arrival(item, body, vouched)
        self.held_bytes += len(body)
        return True

    # --- going out ------------------------------------------------------------------------------------------------

    def take(self, task_ids: Iterable[int]) -> None:
        """The trainer has these now; they never come back."""
        for task_id in task_ids:
            self._taken.add(self._drop(task_id).item.sequence)
        if len(self._taken) >= self._compact_at:
            self._compact()
            self._compact_at = COMPACT_ABOVE + 2 * len(self._taken)

    def hand_back(self, task_id: int, version: int) -> int:
        """Lets go of one that is too old at this version; returns its sequence, for `handed_back`."""
        sequence = self._drop(task_id).item.sequence
        self._released[sequence] = version
        self._returning.add(sequence)
        return sequence

    def handed_back(self, sequences: Iterable[int]) -> None:
        """The broker has answered: what it sends from now on it has checked itself."""
        self._returning.difference_update(sequences)

    def discard(self, task_id: int) -> None:
        """Lets go of one whose task is over. No error if it is not held."""
        if task_id in self._held:
            self._released[self._drop(task_id).item.sequence] = -1

    def _drop(self, task_id: int) -> Arrival:
        arrival = self._held.pop(task_id)
        self.held_bytes -= len(arrival.body)
        return arrival

    # --- the checkpoint -------------------------------------------------------------------------------------------

    def position(self) -> tuple[int, tuple[int, ...]]:
        """(cursor, taken beyond it): every sequence <= cursor was taken or is over."""
        self._compact()
        return self._cursor, tuple(sorted(self._taken))

    def restore(self, cursor: int, taken: Iterable[int]) -> None:
        """Starts from a stored position; nothing may be held yet."""
        assert not self._held
        self._cursor, self._taken = cursor, set(taken)
        self._floor = cursor + 1
        self._released.clear()
        self._returning.clear()

    def _compact(self) -> None:
        unsettled = [arrival.item.sequence for arrival in self._held.values()]
        cursor = min((self._floor, *unsettled, *self._released)) - 1
        # Nothing below the floor is open, but what was taken right above it moves the cursor too.
        while cursor + 1 in self._taken:
            cursor += 1
        if cursor > self._cursor:
            self._cursor = cursor
            self._taken = {sequence for sequence in self._taken if sequence > cursor}
