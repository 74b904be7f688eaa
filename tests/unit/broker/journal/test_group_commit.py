from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from broker.journal.durability import NONE, parse_durability_mode
from broker.journal.files import FileOperations
from broker.journal.local import LocalJournal
from broker.journal.writer import MAX_BATCH_BYTES
from rollmq.errors import DeadlineExceeded

DEADLINE_S = 30.0


class GatedSync:
    """An fdatasync that waits at a gate; `entered` tells that a call is waiting, `calls` how many there were."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.entered = threading.Semaphore(0)
        self.calls = 0

    def __call__(self, descriptor: int) -> None:
        self.calls += 1
        self.entered.release()
        assert self.gate.wait(DEADLINE_S), "the test never opened the gate"
        os.fdatasync(descriptor)

    @property
    def files(self) -> FileOperations:
        return FileOperations(fdatasync=self)

    def await_call(self) -> None:
        assert self.entered.acquire(timeout=DEADLINE_S), "fdatasync was not called"


@pytest.fixture
def gated_sync() -> GatedSync:
    return GatedSync()


def await_durable(journal: LocalJournal, sequence: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while journal.durable < sequence:
        select.select([journal.wakeup_fd], [], [], max(0.0, deadline - time.monotonic()))
        assert time.monotonic() < deadline, f"record {sequence} did not become durable"
        journal.drain_wakeup()


def test_appends_during_a_sync_share_the_next_one(tmp_path: Path, gated_sync: GatedSync) -> None:
    with LocalJournal(tmp_path, files=gated_sync.files) as journal:
        journal.append(1, b"first")
        journal.commit()
        gated_sync.await_call()
        for _ in range(100):
            last = journal.append(1, b"while the sync runs")
            journal.commit()
        assert gated_sync.calls == 1
        assert journal.durable == 0
        gated_sync.gate.set()
        await_durable(journal, last)
        assert gated_sync.calls == 2


def test_a_record_is_durable_only_after_its_own_sync(tmp_path: Path) -> None:
    trace: list[str] = []
    journal: LocalJournal | None = None

    def writev(descriptor: int, pieces: Sequence[bytes | memoryview]) -> int:
        trace.append("write")
        return os.writev(descriptor, pieces)

    def fdatasync(descriptor: int) -> None:
        assert journal is not None
        trace.append(f"sync at durable {journal.durable}")
        os.fdatasync(descriptor)

    journal = LocalJournal(tmp_path, files=FileOperations(writev=writev, fdatasync=fdatasync))
    trace.clear()
    for _ in range(3):
        journal.append(1, b"payload")
        journal.sync(DEADLINE_S)
        trace.append(f"durable {journal.durable}")
    assert trace == [
        "write", "sync at durable 0", "durable 1",
        "write", "sync at durable 1", "durable 2",
        "write", "sync at durable 2", "durable 3",
    ]  # fmt: skip
    journal.close()


def test_a_large_backlog_is_acknowledged_in_parts(tmp_path: Path, gated_sync: GatedSync) -> None:
    body = bytes(1024 * 1024)
    count = 4 * MAX_BATCH_BYTES // len(body)
    with LocalJournal(tmp_path, files=gated_sync.files) as journal:
        for _ in range(count):
            last = journal.append(1, b"", [body])
        journal.commit()
        gated_sync.gate.set()
        await_durable(journal, last)
        assert 3 <= gated_sync.calls <= 6


def test_sync_ends_at_its_deadline_and_names_the_disk(tmp_path: Path, gated_sync: GatedSync) -> None:
    journal = LocalJournal(tmp_path, files=gated_sync.files)
    journal.append(1, b"payload")
    with pytest.raises(DeadlineExceeded, match=r"record 1 .* not on the device after 0\.05 s"):
        journal.sync(0.05)
    gated_sync.gate.set()
    journal.close()


def test_close_ends_at_its_deadline_and_keeps_the_lock(tmp_path: Path, gated_sync: GatedSync) -> None:
    journal = LocalJournal(tmp_path, files=gated_sync.files)
    journal.append(1, b"payload")
    with pytest.raises(DeadlineExceeded, match="did not end"):
        journal.close(timeout_s=0.05)
    assert journal._lock._descriptor >= 0
    gated_sync.gate.set()
    journal._committer.stop(DEADLINE_S)
    journal._release()


def test_commit_never_waits_for_the_disk(tmp_path: Path, gated_sync: GatedSync) -> None:
    with LocalJournal(tmp_path, segment_bytes=500, files=gated_sync.files) as journal:
        for number in range(50):  # over several segments, which only the committer creates
            journal.append(1, b"payload", [b"body %d" % number])
            journal.commit()
        gated_sync.await_call()
        assert journal.read_body(50, 0) == b"body 49"
        gated_sync.gate.set()


def test_mode_none_acknowledges_what_is_written_and_syncs_at_the_end(tmp_path: Path, gated_sync: GatedSync) -> None:
    journal = LocalJournal(tmp_path, NONE, files=gated_sync.files)
    for _ in range(5):
        last = journal.append(1, b"payload")
        journal.commit()
    await_durable(journal, last)
    assert gated_sync.calls == 0
    assert journal.stat().synced_sequence == 0
    gated_sync.gate.set()
    journal.close()
    assert gated_sync.calls >= 1


def test_mode_none_syncs_a_full_segment(tmp_path: Path, gated_sync: GatedSync) -> None:
    gated_sync.gate.set()
    with LocalJournal(tmp_path, NONE, segment_bytes=200, files=gated_sync.files) as journal:
        for _ in range(4):
            last = journal.append(1, b"payload")
            journal.commit()
        await_durable(journal, last)
        segments = journal.stat().segments
        assert segments > 1
        assert gated_sync.calls == segments - 1


def test_mode_interval_syncs_later_without_further_commits(tmp_path: Path) -> None:
    synced = threading.Event()

    def fdatasync(descriptor: int) -> None:
        os.fdatasync(descriptor)
        synced.set()

    mode = parse_durability_mode("interval=20")
    with LocalJournal(tmp_path, mode, files=FileOperations(fdatasync=fdatasync)) as journal:
        sequence = journal.append(1, b"payload")
        journal.commit()
        await_durable(journal, sequence)
        assert synced.wait(DEADLINE_S)


def test_mode_interval_syncs_once_for_many_commits(tmp_path: Path, gated_sync: GatedSync) -> None:
    mode = parse_durability_mode("interval=60000")
    journal = LocalJournal(tmp_path, mode, files=gated_sync.files)
    for _ in range(20):
        sequence = journal.append(1, b"payload")
        journal.commit()
        await_durable(journal, sequence)
    assert gated_sync.calls == 0
    gated_sync.gate.set()
    journal.sync(DEADLINE_S)
    assert gated_sync.calls == 1
    assert journal.stat().synced_sequence == 20
    journal.close()
