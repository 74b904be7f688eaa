"""The public ledger: how many tasks were submitted and where each is. It always balances."""

from __future__ import annotations

from broker.core.states import STATES
from rollmq.messages import TaskState


class Ledger:
    """Counts per state, kept by every transition.

    The invariant `submitted = queued + leased + ready + delivered + consumed + cancelled + expired + stale + dead`
    holds by construction: a task enters once and each move takes from one counter what it gives to another.
    """

    __slots__ = ("counts", "submitted")

    def __init__(self) -> None:
        self.submitted = 0
        self.counts: dict[TaskState, int] = dict.fromkeys(STATES, 0)

    def enter(self, state: TaskState) -> None:
        """A new task."""
        self.submitted += 1
        self.counts[state] += 1

    def move(self, old: TaskState, new: TaskState) -> None:
        """A task changed its state."""
        self.counts[old] -= 1
        self.counts[new] += 1

    def balances(self) -> bool:
        """Whether the sum holds and no counter is negative."""
        return self.submitted == sum(self.counts.values()) and min(self.counts.values()) >= 0

    def as_dict(self) -> dict[str, int]:
        """The counters by name, `submitted` first."""
        return {"submitted": self.submitted, **{state.value: count for state, count in self.counts.items()}}
