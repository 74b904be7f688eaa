"""Where bodies are found again: an index by sequence, a cache of recent ones, reads from disk.

Owned by the thread that owns the journal; nothing here is locked.
"""

from __future__ import annotations

import os
from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from zlib import crc32

from broker.journal.damage import Finding
from broker.journal.record import FIXED_SIZE, MalformedRecord, RecordHeader, decode_header, table_size
from broker.journal.segment import Segment
from rollmq.errors import JournalError

_FIRST_READ = FIXED_SIZE + 8 * 64
_OPEN_FILES = 16


class BodyIndex:
    """Offset of each record that has bodies: 12 bytes of memory per record."""

    def __init__(self) -> None:
        self._sequences = array("Q")
        self._offsets = array("I")

    def add(self, sequence: int, offset: int) -> None:
        """Remember where a record starts in its segment; sequences must grow."""
        self._sequences.append(sequence)
        self._offsets.append(offset)

    def find(self, sequence: int) -> int:
        """Return the record's offset in its segment; raises `KeyError` if it is unknown or has no bodies."""
        position = bisect_left(self._sequences, sequence)
        if position == len(self._sequences) or self._sequences[position] != sequence:
            raise KeyError(f"record {sequence} is not in the journal or has no bodies")
        return self._offsets[position]

    def __len__(self) -> int:
        return len(self._sequences)


class BodyCache:
    """The newest bodies, oldest dropped first, and without fail all those not yet written.

    Args:
        limit_bytes: total size of written bodies to keep; unwritten ones may exceed it.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._bodies: OrderedDict[int, tuple[bytes, ...]] = OrderedDict()
        self._bytes = 0

    def add(self, sequence: int, bodies: Sequence[bytes], written: int) -> None:
        """Keep the bodies of a new record; `written` is the highest sequence that can be read from disk."""
        self._bodies[sequence] = tuple(bodies)
        self._bytes += sum(map(len, bodies))
        self.trim(written)

    def trim(self, written: int) -> None:
        """Drop what is over the limit and can be read from disk."""
        while self._bytes > self._limit and self._bodies:
            oldest = next(iter(self._bodies))
            if oldest > written:
                return
            self._bytes -= sum(map(len, self._bodies.pop(oldest)))

    def get(self, sequence: int) -> tuple[bytes, ...] | None:
        """Return all bodies of a record, or None if they are not here."""
        return self._bodies.get(sequence)

    @property
    def bytes(self) -> int:
        """Total size of the bodies held."""
        return self._bytes


class SegmentReads:
    """Positioned reads from segments through a few descriptors kept open."""

    def __init__(self) -> None:
        self._descriptors: OrderedDict[Path, int] = OrderedDict()

    def read(self, path: Path, offset: int, length: int) -> bytes:
        """Return up to `length` bytes; fewer only at the end of the file. Raises `JournalError`."""
        try:
            return os.pread(self._descriptor(path), length, offset)
        except OSError as error:
            raise JournalError(f"{path} cannot be read at offset {offset}: {error}") from error

    def _descriptor(self, path: Path) -> int:
        descriptor = self._descriptors.pop(path, -1)
        if descriptor < 0:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._descriptors[path] = descriptor
        if len(self._descriptors) > _OPEN_FILES:
            os.close(self._descriptors.popitem(last=False)[1])
        return descriptor

    def close(self) -> None:
        """Close all descriptors."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])


class BodiesOnDisk:
    """The bodies of one record in a segment file; header and body CRC are checked at each read."""

    __slots__ = ("_header", "_offset", "_reads", "_segment", "_sequence")

    def __init__(
        self,
        reads: SegmentReads,
        segment: Segment,
        offset: int,
        sequence: int,
        header: RecordHeader | None = None,
    ) -> None:
        self._reads = reads
        self._segment = segment
        self._offset = offset
        self._sequence = sequence
        self._header = header

    def read(self, index: int) -> bytes:
        """Return body `index`; raises `IndexError`, `JournalDamaged`, `JournalError`."""
        header = self._header or self._read_header()
        start = self._offset + header.body_offset(index)
        body = self._reads.read(self._segment.path, start, header.body_lengths[index])
        if len(body) != header.body_lengths[index] or crc32(body) != header.body_crcs[index]:
            raise self._finding(f"the CRC of body {index} does not match").as_error()
        return body

    def _read_header(self) -> RecordHeader:
        path, seed = self._segment.path, self._segment.header.seed
        data = self._reads.read(path, self._offset, _FIRST_READ)
        try:
            if len(data) >= FIXED_SIZE and FIXED_SIZE + (table := table_size(data, 0)) > len(data):
                data = self._reads.read(path, self._offset, FIXED_SIZE + table)
            size = os.stat(path).st_size
            self._header = header = decode_header(data, 0, seed, size - self._offset)
        except MalformedRecord as error:
            raise self._finding(str(error)).as_error() from None
        if header.sequence != self._sequence:
            raise self._finding(f"record {header.sequence} stands here").as_error()
        return header

    def _finding(self, what: str) -> Finding:
        return Finding(self._segment.path, self._offset, self._sequence, what)
