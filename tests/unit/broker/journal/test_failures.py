from __future__ import annotations

import errno
import os
import select
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from broker.journal.files import FileOperations
from broker.journal.local import LocalJournal
from rollmq.errors import JournalFailed

DEADLINE_S = 30.0


class FailingOnce:
    """A system call that raises at one call, and works before and after it."""

    def __init__(self, name: str, at_call: int = 1, code: int = errno.EIO) -> None:
        self._real: Callable[..., Any] = getattr(os, name)
        self._at_call = at_call
        self._code = code
        self.calls = 0

    def __call__(self, *arguments: Any) -> Any:
        self.calls += 1
        if self.calls == self._at_call:
            raise OSError(self._code, os.strerror(self._code))
        return self._real(*arguments)


def append_until_failed(journal: LocalJournal) -> int:
    """Append and commit one record after the other; return how many were durable when it failed."""
    for _ in range(100):
        try:
            journal.append(1, b"payload", [b"body"])
            journal.sync(DEADLINE_S)
        except JournalFailed:
            return journal.durable
    raise AssertionError("the journal did not fail")


def test_one_failed_fsync_ends_the_journal_and_is_not_retried(tmp_path: Path) -> None:
    fdatasync = FailingOnce("fdatasync", at_call=3)
    journal = LocalJournal(tmp_path, files=FileOperations(fdatasync=fdatasync))
    assert append_until_failed(journal) == 2
    assert select.select([journal.wakeup_fd], [], [], DEADLINE_S)[0]
    assert isinstance(journal.failed, JournalFailed)
    assert isinstance(journal.failed.__cause__, OSError)
    with pytest.raises(JournalFailed, match=f"{tmp_path}.*Input/output error.*Records up to 2"):
        journal.append(1, b"payload")
    with pytest.raises(JournalFailed):
        journal.commit()
    with pytest.raises(JournalFailed):
        journal.sync(DEADLINE_S)
    assert journal.durable == 2
    assert fdatasync.calls == 3
    journal.close()
    assert journal.durable == 2
    with LocalJournal(tmp_path) as again:
        assert [record.sequence for record in again.records()][:2] == [1, 2]


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_failed_write_ends_the_journal(tmp_path: Path, code: int) -> None:
    journal = LocalJournal(tmp_path, files=FileOperations(writev=FailingOnce("writev", 4, code)))
    assert append_until_failed(journal) == 2  # the first write is the segment header
    journal.close()


@pytest.mark.parametrize("call", [4, 5, 6, 7])  # calls 1 to 3 make the first segment, two make each later one
def test_a_failure_while_a_segment_is_created_ends_the_journal(tmp_path: Path, call: int) -> None:
    fsync = FailingOnce("fsync", at_call=call)
    journal = LocalJournal(tmp_path, segment_bytes=300, files=FileOperations(fsync=fsync))
    durable = append_until_failed(journal)
    assert durable >= 1
    assert fsync.calls == call
    journal.close()
    with LocalJournal(tmp_path) as again:
        assert len(list(again.records())) >= durable


def test_a_failure_while_opening_is_clear_and_releases_the_lock(tmp_path: Path) -> None:
    for call in range(1, 4):
        with pytest.raises(JournalFailed, match=f"{tmp_path} cannot be opened: .*Input/output error"):
            LocalJournal(tmp_path, files=FileOperations(fsync=FailingOnce("fsync", at_call=call)))
        for path in tmp_path.iterdir():
            path.unlink()
    LocalJournal(tmp_path).close()


def test_an_existing_journal_is_synced_before_it_is_read(tmp_path: Path) -> None:
    with LocalJournal(tmp_path) as journal:
        journal.append(1, b"payload")
    (segment,) = tmp_path.glob("*.segment")
    segment.write_bytes(b"damaged, which nobody must notice before the sync")
    with pytest.raises(JournalFailed, match="Input/output error"):
        LocalJournal(tmp_path, files=FileOperations(fsync=FailingOnce("fsync")))


def test_a_failure_while_closing_is_raised_and_releases_everything(tmp_path: Path) -> None:
    fdatasync = FailingOnce("fdatasync", at_call=2)
    journal = LocalJournal(tmp_path, files=FileOperations(fdatasync=fdatasync))
    journal.append(1, b"payload")
    journal.sync(DEADLINE_S)
    with pytest.raises(JournalFailed):
        journal.close()
    assert journal.failed is not None
    LocalJournal(tmp_path).close()


def test_bodies_in_memory_can_be_read_after_a_failure(tmp_path: Path) -> None:
    journal = LocalJournal(tmp_path, files=FileOperations(fdatasync=FailingOnce("fdatasync")))
    append_until_failed(journal)
    assert journal.read_body(1, 0) == b"body"
    journal.close()
