"""A growing set of non-negative integers that are mostly consecutive, kept small: all below a floor, and a few beyond.

Used for which prompts of an iteration are settled.
"""

from __future__ import annotations

from collections.abc import Iterable


class Positions:
    """All integers below `floor`, plus `beyond`.

    Args:
        floor: every integer in [0, floor) is in the set.
        beyond: members >= floor.
    """

    def __init__(self, floor: int = 0, beyond: Iterable[int] = ()) -> None:
        self.floor = floor
        self._beyond = {position for position in beyond if position >= floor}
        self._compact()

    def __contains__(self, position: int) -> bool:
        return position < self.floor or position in self._beyond

    def add(self, position: int) -> None:
        """Adds one; the floor rises over consecutive members."""
        if position >= self.floor:
            self._beyond.add(position)
            self._compact()

    @property
    def beyond(self) -> tuple[int, ...]:
        """Members that are not below the floor, in order."""
        return tuple(sorted(self._beyond))

    def _compact(self) -> None:
        while self.floor in self._beyond:
            self._beyond.discard(self.floor)
            self.floor += 1
