"""A descriptor that one thread makes readable to wake another one out of its poll."""

from __future__ import annotations

import contextlib
import os


class Wakeup:
    """A non-blocking pipe; many `fire` calls before one `drain` count as one."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    @property
    def fd(self) -> int:
        """The descriptor to poll for reading."""
        return self._reader

    def fire(self) -> None:
        """Make `fd` readable; may be called from any thread."""
        with contextlib.suppress(BlockingIOError):  # a full pipe is readable already
            os.write(self._writer, b"\0")

    def drain(self) -> None:
        """Make `fd` unreadable until the next `fire`."""
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self._reader, 4096)) == 4096:
                pass

    def close(self) -> None:
        """Close both ends; nobody may fire afterwards."""
        os.close(self._reader)
        os.close(self._writer)
