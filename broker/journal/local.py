"""The journal on one local disk: what `interface.Journal` promises, by segments in a locked directory."""

from __future__ import annotations

import secrets
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from broker.journal.bodies import BodiesOnDisk, BodyCache, BodyIndex, SegmentReads
from broker.journal.durability import ALWAYS, DurabilityMode
from broker.journal.files import SYSTEM_FILES, FileOperations
from broker.journal.interface import Journal, JournalStat, Record
from broker.journal.lock import DirectoryLock
from broker.journal.reader import records_of
from broker.journal.record import RecordFlags, chain_seed, encode_record
from broker.journal.recovery import Recovered, TornTail, recover
from broker.journal.segment import (
    LOG_ID_SIZE,
    SEGMENT_HEADER_SIZE,
    Segment,
    SegmentHeader,
    create_segment,
    open_segment_for_append,
)
from broker.journal.wakeup import Wakeup
from broker.journal.writer import MAX_BATCH_BYTES, Batch, Committer
from rollmq.errors import JournalFailed

DEFAULT_SEGMENT_BYTES = 64 * 1024 * 1024
DEFAULT_CACHE_BYTES = 32 * 1024 * 1024
MAX_SEGMENT_BYTES = 2 * 1024 * 1024 * 1024
_JOIN_BYTES = 4096


class LocalJournal(Journal):
    """A journal in a directory; see `interface.Journal` for the methods' promises.

    Args:
        directory: made if it does not exist; locked until `close`.
        mode: when records are synced and may be acknowledged.
        segment_bytes: a segment that would grow beyond this is closed and a new one started.
        cache_bytes: total size of recent bodies kept in memory.
        check_bodies: whether opening checks the bodies of all segments, or of the last one only.
        clock: wall time in nanoseconds, written into records for people.
        files: the system calls used for writing.

    Raises:
        JournalLocked: another process has the journal open.
        JournalDamaged: damage that no interrupted write explains.
        JournalFailed: the directory or a file could not be made, read or synced.
    """

    def __init__(
        self,
        directory: str | Path,
        mode: DurabilityMode = ALWAYS,
        *,
        segment_bytes: int = DEFAULT_SEGMENT_BYTES,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        check_bodies: bool = True,
        clock: Callable[[], int] = time.time_ns,
        files: FileOperations = SYSTEM_FILES,
    ) -> None:
        if not SEGMENT_HEADER_SIZE < segment_bytes <= MAX_SEGMENT_BYTES:
            raise ValueError(f"segment_bytes must be {SEGMENT_HEADER_SIZE + 1}..{MAX_SEGMENT_BYTES}")
        self._directory = Path(directory)
        self._mode = mode
        self._segment_bytes = segment_bytes
        self._clock = clock
        self._cache = BodyCache(cache_bytes)
        self._reads = SegmentReads()
        self._closed = False
        try:
            _make_directory(self._directory, files)
            self._lock = DirectoryLock(self._directory)
        except OSError as error:
            raise JournalFailed(f"the journal {self._directory} cannot be opened: {error}") from error
        try:
            self._open(check_bodies, files)
        except OSError as error:
            self._lock.release()
            raise JournalFailed(f"the journal {self._directory} cannot be opened: {error}") from error
        except BaseException:
            self._lock.release()
            raise

    def _open(self, check_bodies: bool, files: FileOperations) -> None:
        recovered = recover(self._directory, files, check_bodies=check_bodies)
        if recovered is None:
            recovered, descriptor = _create(self._directory, self._clock(), files)
        else:
            descriptor = open_segment_for_append(recovered.segments[-1].path)
        self._torn_tail = recovered.torn
        self._clean = recovered.closed
        self._segments = list(recovered.segments)
        self._first_sequences = [segment.header.first_sequence for segment in self._segments]
        self._offset = recovered.sizes[-1]
        self._bytes = sum(recovered.sizes)
        self._index = recovered.index
        self._last = recovered.sequence
        self._crc = recovered.crc
        self._seed = self._segments[0].header.seed
        self._closed_batches: list[Batch] = []
        self._batch = Batch(self._segments[-1].header)
        self._appended_bytes = 0
        self._wakeup = Wakeup()
        self._committer = Committer(
            self._directory, descriptor, self._segments[-1].header, self._last, self._mode, files, self._wakeup
        )

    @property
    def durable(self) -> int:
        """Highest sequence that may be acknowledged."""
        return self._committer.durable

    @property
    def last_sequence(self) -> int:
        """Sequence of the newest record appended."""
        return self._last

    @property
    def wakeup_fd(self) -> int:
        """Becomes readable when `durable` advanced or the journal failed."""
        return self._wakeup.fd

    @property
    def failed(self) -> BaseException | None:
        """The error that ended this journal, or None."""
        return self._committer.failed

    @property
    def log_id(self) -> str:
        """Random id of this log, in hex."""
        return self._segments[0].header.log_id.hex()

    @property
    def torn_tail(self) -> TornTail | None:
        """The interrupted write that opening set aside, if there was one."""
        return self._torn_tail

    def append(self, kind: int, payload: bytes, bodies: Sequence[bytes] = ()) -> int:
        """Buffer a record in memory and return its sequence."""
        return self._append(kind, RecordFlags.NONE, payload, bodies)

    def commit(self) -> None:
        """Hand what was appended to the committer and return at once."""
        self._check_usable()
        if self._batch.size:
            self._close_batch(self._batch.segment)
        if self._closed_batches:
            self._committer.submit(self._closed_batches)
            self._closed_batches = []

    def sync(self, timeout_s: float) -> None:
        """Commit and wait until every record appended is on the device."""
        self.commit()
        self._committer.wait_synced(self._last, timeout_s)

    def read_body(self, sequence: int, index: int) -> bytes:
        """Return a body, its CRC checked, whether it is still in memory or on disk."""
        cached = self._cache.get(sequence)
        if cached is not None:
            if not 0 <= index < len(cached):
                raise IndexError(f"record {sequence} has {len(cached)} bodies, asked for {index}")
            return cached[index]
        offset = self._index.find(sequence)
        segment = self._segments[bisect_right(self._first_sequences, sequence) - 1]
        return BodiesOnDisk(self._reads, segment, offset, sequence).read(index)

    def records(self, from_sequence: int = 1) -> Iterator[Record]:
        """Iterate over the records that were written when the call was made, oldest first."""
        segments = tuple(self._segments)
        start = max(0, bisect_right(self._first_sequences, from_sequence) - 1)
        return records_of(segments[start:], self._reads, from_sequence, self._committer.written)

    def drain_wakeup(self) -> None:
        """Make `wakeup_fd` unreadable again."""
        self._wakeup.drain()

    def stat(self) -> JournalStat:
        """Return facts for people and metrics."""
        return JournalStat(
            directory=str(self._directory),
            log_id=self.log_id,
            segments=len(self._segments),
            bytes=self._bytes,
            unwritten_bytes=self._appended_bytes - self._committer.written_bytes,
            first_sequence=self._first_sequences[0],
            last_sequence=self._last,
            durable_sequence=self._committer.durable,
            synced_sequence=self._committer.synced,
            mode=str(self._mode),
            loss_window=self._mode.loss_window,
        )

    def close(self, timeout_s: float = 30.0) -> None:
        """Sync, mark the log as closed cleanly, release everything; does nothing the second time."""
        if self._closed:
            return
        deadline = time.monotonic() + timeout_s
        failed_before = self.failed is not None
        try:
            if not failed_before:
                self._mark_closed(deadline)
        finally:
            self._closed = True
            # Raises before anything is released if the thread hangs: it may still write, so the lock stays.
            self._committer.stop(max(0.1, deadline - time.monotonic()))
            self._release()
        if self._committer.failed is not None and not failed_before:
            raise JournalFailed(str(self._committer.failed)) from self._committer.failed

    def __enter__(self) -> LocalJournal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _mark_closed(self, deadline: float) -> None:
        self.sync(deadline - time.monotonic())
        if self._last and not self._clean:
            self._append(0, RecordFlags.CLOSED, b"", ())
            self.sync(max(0.0, deadline - time.monotonic()))

    def _release(self) -> None:
        self._reads.close()
        self._wakeup.close()
        self._lock.release()

    def _check_usable(self) -> None:
        if self._committer.failed is not None:
            raise JournalFailed(str(self._committer.failed)) from self._committer.failed
        if self._closed:
            raise JournalFailed(f"the journal {self._directory} is closed")

    def _append(self, kind: int, flags: int, payload: bytes, bodies: Sequence[bytes]) -> int:
        self._check_usable()
        sequence = self._last + 1
        head, length, crc = encode_record(
            sequence=sequence,
            time_ns=self._clock(),
            kind=kind,
            flags=flags,
            durable=self._committer.synced,
            payload=payload,
            bodies=bodies,
            previous_crc=self._crc,
            seed=self._seed,
        )
        if self._offset + length > self._segment_bytes and self._offset > SEGMENT_HEADER_SIZE:
            self._start_segment(sequence)
        batch = self._batch
        if not bodies:
            batch.pieces.append(head)
        elif length <= _JOIN_BYTES:
            batch.pieces.append(b"".join((head, *bodies)))
        else:
            batch.pieces.append(head)
            batch.pieces.extend(bodies)
        batch.size += length
        batch.last_sequence = sequence
        if bodies:
            self._index.add(sequence, self._offset)
            self._cache.add(sequence, bodies, self._committer.written)
        self._last, self._crc = sequence, crc
        self._offset += length
        self._bytes += length
        self._appended_bytes += length
        self._clean = flags == RecordFlags.CLOSED
        if batch.size >= MAX_BATCH_BYTES:
            self._close_batch(batch.segment)
        return sequence

    def _start_segment(self, first_sequence: int) -> None:
        """Direct what follows to a new segment; the committer makes the file when it gets there."""
        current = self._batch.segment
        header = SegmentHeader(current.log_id, current.number + 1, first_sequence, self._clock(), self._crc)
        self._close_batch(header)
        self._segments.append(Segment(self._directory / header.file_name, header))
        self._first_sequences.append(first_sequence)
        self._offset = SEGMENT_HEADER_SIZE
        self._bytes += SEGMENT_HEADER_SIZE

    def _close_batch(self, next_segment: SegmentHeader) -> None:
        if self._batch.size:
            self._closed_batches.append(self._batch)
        self._batch = Batch(next_segment)


def _make_directory(directory: Path, files: FileOperations) -> None:
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in missing:
        files.sync_directory(path.parent)


def _create(directory: Path, now_ns: int, files: FileOperations) -> tuple[Recovered, int]:
    log_id = secrets.token_bytes(LOG_ID_SIZE)
    header = SegmentHeader(log_id, 1, 1, now_ns, chain_seed(log_id))
    descriptor = create_segment(directory, header, files)
    segment = Segment(directory / header.file_name, header)
    recovered = Recovered(
        segments=(segment,),
        sizes=(SEGMENT_HEADER_SIZE,),
        sequence=0,
        crc=header.previous_crc,
        index=BodyIndex(),
        closed=False,
        torn=None,
    )
    return recovered, descriptor
