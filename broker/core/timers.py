"""What time demands: silent sessions, passed deadlines, the end of the grace after a restart.

Kept apart from the machine, whose state depends only on what is in the journal: the timers turn time into events that
the machine then decides on. Liveness is therefore never replayed, and a renewal costs no record.

Deadlines are on the broker's own clock, which never jumps. When the broker itself stalled for longer than a heartbeat,
every session's deadline is pushed back by the stall, so that it does not take its own absence for theirs.
"""

from __future__ import annotations

import heapq

from broker.core.events import GraceEnded, SessionLost, TasksExpired
from rollmq.messages import Message

TASKS_PER_EVENT = 256


class Timers:
    """Deadlines of sessions and tasks, in nanoseconds of the broker's clock.

    Args:
        heartbeat_s: how often peers speak.
        dead_after_s: silence that ends a session.
        lease_s: how long a worker with running episodes may show no progress.
    """

    def __init__(self, heartbeat_s: float, dead_after_s: float, lease_s: float, now_ns: int) -> None:
        self._heartbeat_ns = int(heartbeat_s * 1e9)
        self._dead_after_ns = int(dead_after_s * 1e9)
        self._lease_ns = int(lease_s * 1e9)
        self._heard: dict[int, int] = {}
        self._progress: dict[int, tuple[int, int]] = {}
        self._tasks: list[tuple[int, int]] = []
        self._grace: tuple[int, int] | None = None
        self._expected_ns = now_ns

    def expect_turn(self, by_ns: int) -> None:
        """The broker will look again by this time at the latest, unless it stalls."""
        self._expected_ns = by_ns

    def heard(self, session: int, now_ns: int) -> None:
        """A peer said something."""
        self._heard[session] = now_ns

    def beat(self, session: int, progress: int, running: int, now_ns: int) -> None:
        """A heartbeat: it renews the leases of a worker only if its episode loop has moved since the last one.

        Heartbeats come from a thread of their own, so a worker whose loop is stuck goes on beating.
        """
        known = self._progress.get(session)
        if not running:
            self._progress.pop(session, None)
        elif known is None or known[0] != progress:
            self._progress[session] = (progress, now_ns)

    def closed(self, session: int) -> None:
        """The session is over."""
        self._heard.pop(session, None)
        self._progress.pop(session, None)

    def expire_task(self, task_id: int, at_ns: int) -> None:
        """The task ends at this time unless it has finished; a task that has is ignored by the machine."""
        heapq.heappush(self._tasks, (at_ns, task_id))

    def start_grace(self, broker_epoch: int, at_ns: int) -> None:
        """Leases of before a restart wait until this time."""
        self._grace = (at_ns, broker_epoch)

    def next_ns(self) -> int | None:
        """When there may be something to do, if anything is set."""
        times = [min(self._heard.values()) + self._dead_after_ns] if self._heard else []
        if self._progress:
            times.append(min(at for _, at in self._progress.values()) + self._lease_ns)
        if self._tasks:
            times.append(self._tasks[0][0])
        if self._grace is not None:
            times.append(self._grace[0])
        return min(times, default=None)

    def due(self, now_ns: int) -> list[Message]:
        """The events that are due. Call only after all input of the turn was drained."""
        self._compensate_stall(now_ns)
        events: list[Message] = []
        for session in sorted(s for s, at in self._heard.items() if now_ns - at > self._dead_after_ns):
            silent_s = (now_ns - self._heard.pop(session)) / 1e9
            self._progress.pop(session, None)
            events.append(SessionLost(session, f"silent for {silent_s:.1f} s"))
        for session in sorted(s for s, (_, at) in self._progress.items() if now_ns - at > self._lease_ns):
            stuck_s = (now_ns - self._progress.pop(session)[1]) / 1e9
            events.append(SessionLost(session, f"its episode loop has not moved for {stuck_s:.1f} s"))
        events += self._expired_tasks(now_ns)
        if self._grace is not None and now_ns >= self._grace[0]:
            events.append(GraceEnded(self._grace[1]))
            self._grace = None
        return events

    def _expired_tasks(self, now_ns: int) -> list[Message]:
        tasks: list[int] = []
        while self._tasks and self._tasks[0][0] <= now_ns:
            tasks.append(heapq.heappop(self._tasks)[1])
        return [
            TasksExpired(tuple(tasks[start : start + TASKS_PER_EVENT]))
            for start in range(0, len(tasks), TASKS_PER_EVENT)
        ]

    def _compensate_stall(self, now_ns: int) -> None:
        stall_ns = now_ns - self._expected_ns
        if stall_ns > self._heartbeat_ns:
            self._heard = {session: at + stall_ns for session, at in self._heard.items()}
            self._progress = {session: (progress, at + stall_ns) for session, (progress, at) in self._progress.items()}
            if self._grace is not None:
                self._grace = (self._grace[0] + stall_ns, self._grace[1])
