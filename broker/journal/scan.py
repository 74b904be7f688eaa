"""Walking the records of one segment file, read only: every check is made here, every verdict elsewhere.

Memory is bounded by a window on the file. The file's size is taken once, so that a segment still being
appended to reads as a prefix of itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from zlib import crc32

from broker.journal.damage import Finding
from broker.journal.record import (
    ALIGNMENT,
    FIXED_SIZE,
    MAX_RECORD_BYTES,
    RECORD_MAGIC,
    MalformedRecord,
    RecordHeader,
    decode_header,
    table_size,
)
from broker.journal.segment import SEGMENT_HEADER_SIZE, Segment
from rollmq.errors import JournalError

WINDOW_BYTES = 1024 * 1024


class Window:
    """A file seen through a buffer; the file is as long as it was when the window was opened.

    Raises:
        JournalError: at any time: the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self.size = os.fstat(self._descriptor).st_size
        except OSError as error:
            raise JournalError(f"{path} cannot be read: {error}") from error
        self.data = b""
        self._start = 0

    def __enter__(self) -> Window:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    def at(self, offset: int, length: int) -> int:
        """Make `length` bytes from `offset` available and return their position in `data`.

        The caller has checked that they lie inside the file.

        Raises:
            JournalError: the file became shorter while it was read.
        """
        position = offset - self._start
        if position < 0 or position + length > len(self.data):
            wanted = max(length, min(WINDOW_BYTES, self.size - offset))
            try:
                self.data = os.pread(self._descriptor, wanted, offset)
            except OSError as error:
                raise JournalError(f"{self.path} cannot be read at offset {offset}: {error}") from error
            self._start, position = offset, 0
            if len(self.data) < length:
                raise JournalError(f"{self.path} became shorter while it was read; read it again")
        return position

    def read(self, offset: int, length: int) -> bytes:
        """Return `length` bytes from `offset`."""
        position = self.at(offset, length)
        return self.data[position : position + length]

    def crc(self, offset: int, length: int) -> int:
        """Return the CRC of `length` bytes from `offset` without holding more than a window of them."""
        crc = 0
        while length:
            part = min(length, WINDOW_BYTES)
            position = self.at(offset, part)
            crc = crc32(memoryview(self.data)[position : position + part], crc)
            offset += part
            length -= part
        return crc

    def find(self, pattern: bytes, offset: int) -> int:
        """Return the offset of the next occurrence of `pattern` at or after `offset`, or -1."""
        while offset + len(pattern) <= self.size:
            position = self.at(offset, len(pattern))
            found = self.data.find(pattern, position)
            if found >= 0:
                return offset + found - position
            offset += len(self.data) - position - len(pattern) + 1
        return -1


@dataclass(slots=True)
class Chain:
    """Where a walk stands: the sequence and header CRC of the last record it accepted."""

    sequence: int
    crc: int

    @staticmethod
    def before(segment: Segment) -> Chain:
        """Return the chain that a segment's own header claims to continue."""
        return Chain(segment.header.first_sequence - 1, segment.header.previous_crc)


class BadRecord(Exception):
    """The walk met bytes that are not the next record.

    Attributes:
        offset: where in the file.
        sequence: of the record expected there.
        what: the check that failed, in words.
        header: the record's header if that is intact.
        tearable: whether an interrupted write can leave such bytes.
    """

    def __init__(self, offset: int, sequence: int, what: str, *, header: RecordHeader | None, tearable: bool) -> None:
        super().__init__(what)
        self.offset = offset
        self.sequence = sequence
        self.what = what
        self.header = header
        self.tearable = tearable


def read_header(window: Window, offset: int, seed: int) -> RecordHeader:
    """Read and check the record header at `offset`, on its own; raises `MalformedRecord`."""
    available = window.size - offset
    if available < FIXED_SIZE:
        raise MalformedRecord(f"{available} bytes left, a record header needs {FIXED_SIZE}")
    position = window.at(offset, FIXED_SIZE)
    table = table_size(window.data, position)
    if table:
        position = window.at(offset, min(FIXED_SIZE + table, available))
    return decode_header(window.data, position, seed, available, MAX_RECORD_BYTES)


def walk(
    window: Window,
    seed: int,
    chain: Chain,
    *,
    offset: int = SEGMENT_HEADER_SIZE,
    check_bodies: bool,
) -> Iterator[tuple[int, RecordHeader]]:
    """Yield offset and header of each record up to the end of the file; `chain` is moved along.

    Header, payload, sequence and chain are checked, bodies if asked. After a yield the payload is usually
    still in the window.

    Raises:
        BadRecord: the bytes at some offset are not the next record.
    """
    while offset < window.size:
        sequence = chain.sequence + 1
        try:
            header = read_header(window, offset, seed)
        except MalformedRecord as error:
            raise BadRecord(offset, sequence, str(error), header=None, tearable=True) from None
        _check_place(header, chain, offset)
        payload_at = offset + header.payload_offset
        bodies_at = offset + header.bodies_offset
        if window.crc(payload_at, bodies_at - payload_at) != header.payload_crc:
            what = "the payload CRC does not match"
            raise BadRecord(offset, sequence, what, header=header, tearable=True)
        if check_bodies:
            _check_bodies(window, header, offset, bodies_at)
        chain.sequence, chain.crc = sequence, header.crc
        yield offset, header
        offset += header.length


def _check_place(header: RecordHeader, chain: Chain, offset: int) -> None:
    sequence = chain.sequence + 1
    if header.sequence != sequence:
        what = f"an intact record {header.sequence} stands where record {sequence} belongs"
    elif header.previous_crc != chain.crc:
        what = "the record is intact but does not continue the record before it"
    elif header.durable >= sequence:
        what = f"the record claims that record {header.durable} was durable before it was written"
    else:
        return
    raise BadRecord(offset, sequence, what, header=header, tearable=False)


def _check_bodies(window: Window, header: RecordHeader, offset: int, body_at: int) -> None:
    for index, (length, crc) in enumerate(zip(header.body_lengths, header.body_crcs, strict=True)):
        if window.crc(body_at, length) != crc:
            what = f"the CRC of body {index} does not match"
            raise BadRecord(offset, header.sequence, what, header=header, tearable=True)
        body_at += length


def next_header(window: Window, offset: int, seed: int) -> tuple[int, RecordHeader] | None:
    """Find the next intact record header at or after `offset`, whatever stands before it."""
    while (found := window.find(RECORD_MAGIC, offset)) >= 0:
        if found % ALIGNMENT == 0:
            try:
                return found, read_header(window, found, seed)
            except MalformedRecord:
                pass
        offset = found + 1
    return None


def judge(window: Window, segment: Segment, bad: BadRecord, *, last_segment: bool) -> Finding:
    """Tell a torn tail from damage.

    A torn tail is a bad record in the last segment that was never known to be durable: no intact header
    behind it repeats its sequence, or a later one, as durable. (None before it can: the walk refuses a
    record that claims a sequence not yet written.) Damage to the very last record of a log that was not
    closed cannot be told from a torn write.
    """
    what = bad.what
    torn = bad.tearable and last_segment
    if torn and (claim := _durability_claim(window, segment, bad)) is not None:
        torn = False
        what = f"{what}, though record {claim.sequence} behind it says that record {claim.durable} was durable"
    return Finding(segment.path, bad.offset, bad.sequence, what, torn_tail=torn)


def _durability_claim(window: Window, segment: Segment, bad: BadRecord) -> RecordHeader | None:
    offset = bad.offset + ALIGNMENT
    while (found := next_header(window, offset, segment.header.seed)) is not None:
        offset, header = found
        if header.durable >= bad.sequence:
            return header
        offset += ALIGNMENT
    return None
