"""The few system calls by which the journal changes the disk, gathered so that tests can make them fail.

Nothing here retries: after a failed fsync the kernel may have dropped the data, and a second call that
succeeds proves nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

_IOV_MAX = 1024
_fdatasync: Callable[[int], None] = getattr(os, "fdatasync", os.fsync)


@dataclass(frozen=True, slots=True)
class FileOperations:
    """The calls used for writing; replace one to inject a fault.

    Attributes:
        writev: as `os.writev`.
        fdatasync: as `os.fdatasync`; called once per batch.
        fsync: as `os.fsync`; called for new and truncated files, and for directories.
    """

    writev: Callable[[int, Sequence[bytes | memoryview]], int] = os.writev
    fdatasync: Callable[[int], None] = _fdatasync
    fsync: Callable[[int], None] = os.fsync

    def write_all(self, descriptor: int, pieces: Sequence[bytes | memoryview]) -> None:
        """Write all pieces at the current position; raises `OSError`."""
        for start in range(0, len(pieces), _IOV_MAX):
            self._write_some(descriptor, pieces[start : start + _IOV_MAX])

    def _write_some(self, descriptor: int, pieces: Sequence[bytes | memoryview]) -> None:
        missing = sum(map(len, pieces))
        while True:
            written = self.writev(descriptor, pieces)
            missing -= written
            if missing == 0:
                return
            if written == 0:
                raise OSError(f"the file system took no byte, {missing} bytes are not written")
            pieces = _without_first(pieces, written)

    def sync_directory(self, directory: Path) -> None:
        """Make creations, renames and removals in `directory` durable; raises `OSError`."""
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.fsync(descriptor)
        finally:
            os.close(descriptor)


SYSTEM_FILES = FileOperations()


def _without_first(pieces: Sequence[bytes | memoryview], count: int) -> list[bytes | memoryview]:
    rest: list[bytes | memoryview] = []
    for piece in pieces:
        if count >= len(piece):
            count -= len(piece)
            continue
        rest.append(memoryview(piece)[count:])
        count = 0
    return rest
