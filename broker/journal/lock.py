"""The lock that gives a journal directory one writer. The kernel drops it when its holder dies."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from rollmq.errors import JournalLocked

LOCK_FILE = "lock"


class DirectoryLock:
    """Holds `flock` on the lock file of a directory from construction to `release`.

    Raises:
        JournalLocked: another opener, in this or another process, holds it; names directory and pid.
        OSError: the lock file cannot be opened or written.
    """

    def __init__(self, directory: Path) -> None:
        self._descriptor = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)
        except BlockingIOError:
            holder = os.pread(self._descriptor, 32, 0).decode("ascii", "replace").strip()
            os.close(self._descriptor)
            raise JournalLocked(
                f"the journal {directory} is in use by process {holder or '(pid not yet written)'}; "
                "stop that process or choose another directory with --journal"
            ) from None
        except OSError:
            os.close(self._descriptor)
            raise

    def release(self) -> None:
        """Give the lock back; the file stays, since removing it would let two openers lock two files."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
