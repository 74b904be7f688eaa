"""The committer: a thread that writes batches and syncs them, and reports how far it came.

While one fdatasync runs, batches gather in the queue; the next turn takes them together: group commit. The
thread decides nothing else. Its first error is its last act: nothing is retried and `durable` stays.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from broker.journal.durability import DurabilityMode, SyncPolicy
from broker.journal.files import FileOperations
from broker.journal.segment import SegmentHeader, create_segment
from broker.journal.wakeup import Wakeup
from rollmq.errors import DeadlineExceeded, JournalFailed

logger = logging.getLogger(__name__)

MAX_BATCH_BYTES = 4 * 1024 * 1024
"""One write and one fdatasync cover at most about this much, so that a large backlog is acknowledged in parts."""


@dataclass(slots=True)
class Batch:
    """Consecutive encoded records for one segment.

    Attributes:
        segment: the segment they go to; created by the committer if it is not the current one.
        pieces: the bytes to write, in order.
        size: their total size.
        last_sequence: of the last record in the batch.
    """

    segment: SegmentHeader
    pieces: list[bytes] = field(default_factory=list)
    size: int = 0
    last_sequence: int = 0


class Committer:
    """Owns the descriptor that is written to, from construction until `stop`.

    Args:
        directory: of the journal, for new segments and messages.
        descriptor: the current segment, positioned at its end.
        segment: the current segment.
        last_sequence: of the last record on the device.
        mode: when to sync.
        files: the system calls to use.
        wakeup: fired when `durable` advanced or the committer failed.
    """

    def __init__(
        self,
        directory: Path,
        descriptor: int,
        segment: SegmentHeader,
        last_sequence: int,
        mode: DurabilityMode,
        files: FileOperations,
        wakeup: Wakeup,
    ) -> None:
        self.written = last_sequence
        self.synced = last_sequence
        self.durable = last_sequence
        self.failed: JournalFailed | None = None
        self._directory = directory
        self._descriptor = descriptor
        self._segment = segment
        self._mode = mode
        self._interval_s = mode.interval_ms / 1000
        self._sync_due: float | None = None
        self._sync_wanted = 0
        self._files = files
        self._wakeup = wakeup
        self.written_bytes = 0
        self._queue: deque[Batch] = deque()
        self._stopping = False
        self._condition = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="journal-committer", daemon=True)
        self._thread.start()

    def submit(self, batches: Sequence[Batch]) -> None:
        """Queue batches for writing and return at once."""
        with self._condition:
            self._queue.extend(batches)
            self._condition.notify_all()

    def wait_synced(self, sequence: int, timeout_s: float) -> None:
        """Wait until `sequence` is on the device, syncing in every mode.

        Raises:
            JournalFailed: the committer failed.
            DeadlineExceeded: it took longer than `timeout_s`.
        """
        with self._condition:
            self._sync_wanted = max(self._sync_wanted, sequence)
            self._condition.notify_all()
            self._condition.wait_for(lambda: self.failed is not None or self.synced >= sequence, timeout_s)
            if self.synced >= sequence:
                return
            if self.failed is not None:
                raise JournalFailed(str(self.failed)) from self.failed
            raise DeadlineExceeded(
                f"record {sequence} of the journal {self._directory} was not on the device after {timeout_s} s "
                f"(record {self.synced} is); the disk hangs or is too slow"
            )

    def stop(self, timeout_s: float) -> None:
        """Write and sync what is queued, close the descriptor and end the thread; then look at `failed`.

        Raises:
            DeadlineExceeded: the thread did not end; the descriptor stays open.
        """
        with self._condition:
            self._stopping = True
            self._condition.notify_all()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise DeadlineExceeded(
                f"the committer of the journal {self._directory} did not end within {timeout_s} s; the disk hangs"
            )

    def _run(self) -> None:
        try:
            while self._turn():
                pass
            self._close_descriptor()
        except Exception as error:
            logger.exception("the journal %s failed", self._directory)
            self._fail(error)
            if self._descriptor >= 0:
                with contextlib.suppress(OSError):  # failed already; this only gives the descriptor back
                    self._close_descriptor()

    def _close_descriptor(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        os.close(descriptor)

    def _turn(self) -> bool:
        batch = self._take()
        if batch is None and self._stopping and not self._must_sync():
            return False
        if batch is not None:
            self._write(batch)
        if self._must_sync():
            self._sync()
        self._publish()
        return True

    def _take(self) -> Batch | None:
        """Wait for something to do; None if that is a sync or the end."""
        with self._condition:
            while not self._queue and not self._stopping and not self._must_sync():
                due = self._sync_due
                self._condition.wait(None if due is None else max(0.0, due - time.monotonic()))
            if not self._queue:
                return None
            batch = self._queue.popleft()
            while (
                self._queue
                and self._queue[0].segment is batch.segment
                and batch.size + self._queue[0].size <= MAX_BATCH_BYTES
            ):
                more = self._queue.popleft()
                batch.pieces += more.pieces
                batch.size += more.size
                batch.last_sequence = more.last_sequence
            return batch

    def _write(self, batch: Batch) -> None:
        if batch.segment.number != self._segment.number:
            self._roll(batch.segment)
        self._files.write_all(self._descriptor, batch.pieces)
        self.written = batch.last_sequence
        self.written_bytes += batch.size
        if self._mode.policy is SyncPolicy.INTERVAL and self._sync_due is None:
            self._sync_due = time.monotonic() + self._interval_s

    def _roll(self, segment: SegmentHeader) -> None:
        """Finish the current segment and start `segment`; in every mode a full segment is on the device."""
        if self.synced < self.written:
            self._sync()
        self._close_descriptor()
        self._descriptor = create_segment(self._directory, segment, self._files)
        self._segment = segment

    def _must_sync(self) -> bool:
        if self.synced >= self.written:
            return False
        if self._mode.policy is SyncPolicy.ALWAYS or self._stopping or self._sync_wanted > self.synced:
            return True
        return self._sync_due is not None and time.monotonic() >= self._sync_due

    def _sync(self) -> None:
        self._files.fdatasync(self._descriptor)
        self.synced = self.written
        self._sync_due = None

    def _publish(self) -> None:
        durable = self.written if self._mode.acknowledges_unsynced else self.synced
        with self._condition:
            advanced = durable > self.durable
            self.durable = durable
            self._condition.notify_all()
        if advanced:
            self._wakeup.fire()

    def _fail(self, error: Exception) -> None:
        failed = JournalFailed(
            f"writing the journal {self._directory} failed: {error}. Records up to {self.synced} are on the "
            f"device, none after {self.durable} was acknowledged; check the disk, then start again"
        )
        failed.__cause__ = error
        with self._condition:
            self.failed = failed
            self._queue.clear()
            self._condition.notify_all()
        self._wakeup.fire()
