"""What a worker holds for the broker: leases at work, outcomes not yet settled, and the credit that follows.

Pure bookkeeping: no socket, no clock but the one passed in, no asyncio. The greeting is made on the session's
thread while the event loop works on the table, so every method takes the table's lock for its short time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

from rollmq.messages import Adoption, Reason, TaskEpoch, TaskItem

GREETING_LEASES = 2400
"""Most leases and outcomes together: all of them must fit into one HELLO."""
WINDOW_BYTES = 256 * 1024 * 1024
"""How many bytes of task bodies the broker may have on the way, and how many bytes of outcomes may wait."""
RESEND_S = (15.0, 60.0)


@dataclass(frozen=True, slots=True)
class Finished:
    """A result.

    Attributes:
        body: the encoded episode.
        head, tail: labels of the oldest and newest weights among its generated tokens.
        tokens: generated tokens.
    """

    body: bytes
    head: str
    tail: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Failed:
    """A lease given back."""

    reason: Reason
    detail: str = ""


Outcome = Finished | Failed


@dataclass(slots=True, eq=False)
class Lease:
    """One task in our hands. Identity, not value, tells two leases of one task apart.

    Attributes:
        item: the task's meta as dispatched.
        body: the encoded task; emptied once it has run.
        epoch: the dispatch epoch now; an adoption changes it.
        outcome: set when the work is over.
        started_label: label of the weights it began on; None until its first request.
    """

    item: TaskItem
    body: bytes
    epoch: int
    outcome: Outcome | None = None
    started_label: str | None = None
    _resend_at: float = field(default=0.0, repr=False)
    _resend_pause_s: float = field(default=RESEND_S[0], repr=False)

    @property
    def task_id(self) -> int:
        """The task."""
        return self.item.task_id

    @property
    def key(self) -> TaskEpoch:
        """What names the lease in messages."""
        return TaskEpoch(self.item.task_id, self.epoch)


@dataclass(frozen=True, slots=True)
class Reconciled:
    """What a WELCOME changed.

    Attributes:
        dropped: leases that are over; stop their work.
        orphans: adoptions of leases that are gone here; give them back.
    """

    dropped: tuple[Lease, ...]
    orphans: tuple[TaskEpoch, ...]


class LeaseTable:
    """All leases by task.

    Args:
        places: slots and prefetch: most leases at work.
        outcome_bytes: no credit is granted while unsettled outcomes hold more than this.
        outcome_count: or are more than this; default: what a HELLO can carry beside the places.
    """

    def __init__(self, places: int, outcome_bytes: int = WINDOW_BYTES, outcome_count: int | None = None) -> None:
        self._places = places
        self._outcome_bytes = outcome_bytes
        self._outcome_count = max(16, GREETING_LEASES - places) if outcome_count is None else outcome_count
        self._lock = threading.Lock()
        self._leases: dict[int, Lease] = {}
        self._unsettled: dict[int, Lease] = {}
        self._unsettled_bytes = 0
        self._greeted: frozenset[TaskEpoch] = frozenset()
        self._received_tasks = 0
        self._received_bytes = 0
        self._granted = (0, 0)

    # --- facts --------------------------------------------------------------------------------------------------

    @property
    def held(self) -> int:
        """Leases at work, waiting or running."""
        with self._lock:
            return len(self._leases) - len(self._unsettled)

    @property
    def unsettled(self) -> int:
        """Outcomes that the broker has not settled."""
        with self._lock:
            return len(self._unsettled)

    @property
    def unsettled_bytes(self) -> int:
        """Their size."""
        with self._lock:
            return self._unsettled_bytes

    # --- sessions -----------------------------------------------------------------------------------------------

    def greeting(self) -> tuple[tuple[TaskEpoch, ...], tuple[TaskEpoch, ...]]:
        """(held, unsent) for a HELLO. Remembered: what is not in it cannot survive into that session."""
        with self._lock:
            held = tuple(lease.key for lease in self._leases.values() if lease.outcome is None)
            unsent = tuple(lease.key for lease in self._unsettled.values())
            self._greeted = frozenset(held + unsent)
        return held, unsent

    def opened(self, adopted: Iterable[Adoption], dropped: Iterable[TaskEpoch]) -> Reconciled:
        """Applies a WELCOME: a new session, whose credit starts at nothing and to which no outcome was sent."""
        with self._lock:
            self._received_tasks = self._received_bytes = 0
            self._granted = (0, 0)
            over = set(dropped)
            # A task that came in the old session's last moment, after the HELLO was made, is unknown to the broker.
            gone = [lease for lease in self._leases.values() if lease.key in over or lease.key not in self._greeted]
            for lease in gone:
                self._remove(lease)
            orphans = [TaskEpoch(a.task_id, a.epoch) for a in adopted if not self._adopt(a)]
            for lease in self._unsettled.values():
                lease._resend_at, lease._resend_pause_s = 0.0, RESEND_S[0]
        return Reconciled(tuple(gone), tuple(orphans))

    def _adopt(self, adoption: Adoption) -> bool:
        lease = self._leases.get(adoption.task_id)
        if lease is None or lease.epoch not in (adoption.old_epoch, adoption.epoch):
            return False
        lease.epoch = adoption.epoch
        return True

    # --- leases -------------------------------------------------------------------------------------------------

    def receive(self, item: TaskItem, body: bytes) -> tuple[Lease, Lease | None]:
        """A dispatched task; returns its lease and the older lease of the same task that it replaces, if any."""
        with self._lock:
            older = self._leases.get(item.task_id)
            if older is not None:
                self._remove(older)
            lease = Lease(item, body, item.epoch)
            self._leases[item.task_id] = lease
            self._received_tasks += 1
            self._received_bytes += len(body)
        return lease, older

    def finish(self, lease: Lease, outcome: Outcome) -> bool:
        """The work on a lease is over; False if the lease was dropped meanwhile and the outcome is of no use."""
        with self._lock:
            if self._leases.get(lease.task_id) is not lease or lease.outcome is not None:
                return False
            lease.outcome, lease.body = outcome, b""
            self._unsettled[lease.task_id] = lease
            self._unsettled_bytes += _size(outcome)
        return True

    def drop(self, task_id: int, epoch: int) -> Lease | None:
        """The broker took a lease back; None if it is not the one we hold."""
        return self._take(task_id, epoch)

    def settle(self, task_id: int, epoch: int) -> Lease | None:
        """The broker answered an outcome for good; None if we wait for no such answer."""
        with self._lock:
            waits = task_id in self._unsettled
        return self._take(task_id, epoch) if waits else None

    def _take(self, task_id: int, epoch: int) -> Lease | None:
        with self._lock:
            lease = self._leases.get(task_id)
            if lease is None or lease.epoch != epoch:
                return None
            self._remove(lease)
        return lease

    def _remove(self, lease: Lease) -> None:
        del self._leases[lease.task_id]
        if self._unsettled.pop(lease.task_id, None) is not None and lease.outcome is not None:
            self._unsettled_bytes -= _size(lease.outcome)

    def started(self) -> list[Lease]:
        """Leases at work whose first request has gone to the engine."""
        with self._lock:
            return [
                lease for lease in self._leases.values() if lease.outcome is None and lease.started_label is not None
            ]

    # --- what to send -------------------------------------------------------------------------------------------

    def due(self, now: float) -> list[Lease]:
        """Outcomes to send now, oldest first: new ones, and those that were not settled for a while."""
        with self._lock:
            due = [lease for lease in self._unsettled.values() if lease._resend_at <= now]
            for lease in due:
                lease._resend_at = now + lease._resend_pause_s
                lease._resend_pause_s = min(lease._resend_pause_s * 2, RESEND_S[1])
        return due

    def credit(self) -> tuple[int, int] | None:
        """(tasks, body bytes) to grant as running totals of this session; None if nothing grew."""
        with self._lock:
            full = self._unsettled_bytes >= self._outcome_bytes or len(self._unsettled) >= self._outcome_count
            free = 0 if full else max(0, self._places - (len(self._leases) - len(self._unsettled)))
            tasks = max(self._granted[0], self._received_tasks + free)
            if tasks == self._granted[0]:
                return None
            self._granted = (tasks, self._received_bytes + WINDOW_BYTES)
            return self._granted


def _size(outcome: Outcome) -> int:
    return len(outcome.body) if isinstance(outcome, Finished) else 0
