"""How much the broker may deliver: running totals of tasks and bytes since the session opened.

The inbox is bounded, but only softly: while the caller is blocked on something that has not come yet, a little more
than the bound is granted, or a full inbox of other trajectories would keep the awaited one out for ever.
"""

from __future__ import annotations

HELD_TASKS = 1024
HELD_BYTES = 256 * 1024 * 1024
BLOCKED_TASKS = 64
BLOCKED_BYTES = 32 * 1024 * 1024


class Credit:
    """Totals of one session.

    Args:
        tasks: trajectories the inbox may hold.
        body_bytes: bytes of bodies it may hold.
    """

    def __init__(self, tasks: int = HELD_TASKS, body_bytes: int = HELD_BYTES) -> None:
        self._tasks_bound, self._bytes_bound = tasks, body_bytes
        self.reset()

    def reset(self) -> None:
        """A new session begins: all totals start at zero."""
        self._received_tasks = self._received_bytes = 0
        self._granted_tasks = self._granted_bytes = 0

    def received(self, tasks: int, body_bytes: int) -> None:
        """Counts what was delivered, duplicates included: the broker counts them too."""
        self._received_tasks += tasks
        self._received_bytes += body_bytes

    def next_grant(self, held_tasks: int, held_bytes: int, blocked: bool) -> tuple[int, int] | None:
        """The totals to grant now, or None while what was granted suffices.

        Args:
            held_tasks: trajectories in the inbox.
            held_bytes: bytes of their bodies.
            blocked: whether the caller waits for something that is not in the inbox.
        """
        free_tasks = max(self._tasks_bound - held_tasks, BLOCKED_TASKS if blocked else 0)
        free_bytes = max(self._bytes_bound - held_bytes, BLOCKED_BYTES if blocked else 0)
        tasks = max(self._granted_tasks, self._received_tasks + free_tasks)
        body_bytes = max(self._granted_bytes, self._received_bytes + free_bytes)
        if not self._is_worth_it(tasks, body_bytes):
            return None
        self._granted_tasks, self._granted_bytes = tasks, body_bytes
        return tasks, body_bytes

    def _is_worth_it(self, tasks: int, body_bytes: int) -> bool:
        """Small rises wait, so that there is no GRANT per trajectory; unless the credit is nearly spent."""
        more_tasks, more_bytes = tasks - self._granted_tasks, body_bytes - self._granted_bytes
        if more_tasks >= self._tasks_bound // 4 or more_bytes >= self._bytes_bound // 4:
            return True
        spent_tasks = self._granted_tasks - self._received_tasks < BLOCKED_TASKS // 2
        spent_bytes = self._granted_bytes - self._received_bytes < BLOCKED_BYTES // 2
        return (more_tasks > 0 and spent_tasks) or (more_bytes > 0 and spent_bytes)
