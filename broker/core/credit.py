"""Credit as running totals: what a peer allowed since its session opened, and what was sent to it.

Totals make a lost or repeated GRANT harmless; a total that goes backwards is ignored.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class CreditAccount:
    """One session's credit.

    Attributes:
        granted_tasks: items the peer has allowed in all.
        granted_bytes: body bytes the peer has allowed in all.
        sent_tasks: items sent in all.
        sent_bytes: body bytes sent in all.
    """

    granted_tasks: int = 0
    granted_bytes: int = 0
    sent_tasks: int = 0
    sent_bytes: int = 0

    def grant(self, tasks: int, body_bytes: int) -> None:
        """The peer's newest totals."""
        self.granted_tasks = max(self.granted_tasks, tasks)
        self.granted_bytes = max(self.granted_bytes, body_bytes)

    def free(self) -> int:
        """Items that may be sent now; the one that crosses the byte bound is still sent."""
        if self.sent_bytes >= self.granted_bytes:
            return 0
        return max(0, self.granted_tasks - self.sent_tasks)

    def spend(self, body_bytes: int) -> None:
        """One item of this size was sent."""
        self.sent_tasks += 1
        self.sent_bytes += body_bytes
