"""The broker's clock: starts at wall time, then follows the monotonic clock, so it never jumps while a broker runs."""

from __future__ import annotations

import time


class BrokerClock:
    """Nanoseconds since 1970 as of the start, advanced by the monotonic clock.

    Args:
        not_before_ns: the last time in the journal; a machine whose wall clock was set back starts from there.
    """

    def __init__(self, not_before_ns: int = 0) -> None:
        self._base_ns = max(time.time_ns(), not_before_ns)
        self._started_ns = time.monotonic_ns()

    def now_ns(self) -> int:
        """The time now."""
        return self._base_ns + time.monotonic_ns() - self._started_ns
