"""Framing of one record, pure: bytes in, bytes out; no file, clock or thread.

Layout, little endian, every record a multiple of 8 bytes long:

    magic 4s | length u32 | sequence u64 | time ns u64 | kind u16 | flags u16 | bodies u32
    durable sequence u64 | payload length u32 | payload CRC u32 | previous CRC u32 | header CRC u32
    per body: length u32, CRC u32
    payload | zero padding | body 0 | body 1 | …

The header CRC covers the header, the body table and, through the CRCs in it, all content; it is seeded with
the log id, so that a journal stored as somebody's body is never taken for ours. `previous CRC` repeats the
header CRC of the record before: the chain. The payload CRC covers the padding. CRCs find accidents, not
attackers.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntFlag
from typing import NamedTuple
from zlib import crc32

RECORD_MAGIC = b"RMQr"
ALIGNMENT = 8
FIXED_SIZE = 56
MAX_KIND = 0xFFFF
MAX_BODIES = 0xFFFF
MAX_RECORD_BYTES = 512 * 1024 * 1024
"""Largest record, everything included; checked before anything is allocated."""

_COVERED = struct.Struct("<4sIQQHHIQIII")
_FIXED = struct.Struct("<4sIQQHHIQIIII")
_CRC = struct.Struct("<I")
_BODY = struct.Struct("<II")
_BODY_COUNT_AT = 28
_PADDING = tuple(bytes(size) for size in range(ALIGNMENT))


class RecordFlags(IntFlag):
    """Marks of the journal itself."""

    NONE = 0
    CLOSED = 1
    """The log was closed cleanly here; the record has no content and belongs to no caller."""


class MalformedRecord(ValueError):
    """Bytes that are not a record of this log; the text says which check failed."""


class RecordHeader(NamedTuple):
    """A decoded header (a tuple, not a dataclass: recovery makes one per record).

    Sizes in bytes. `length` is the size of the whole record.
    """

    length: int
    sequence: int
    time_ns: int
    kind: int
    flags: int
    durable: int
    payload_length: int
    payload_crc: int
    previous_crc: int
    crc: int
    body_lengths: tuple[int, ...]
    body_crcs: tuple[int, ...]

    @property
    def payload_offset(self) -> int:
        """Offset of the payload within the record."""
        return FIXED_SIZE + _BODY.size * len(self.body_lengths)

    @property
    def bodies_offset(self) -> int:
        """Offset of the first body within the record; payload and padding end here."""
        return self.length - sum(self.body_lengths)

    def body_offset(self, index: int) -> int:
        """Offset of body `index` within the record; raises `IndexError` if there is none."""
        if not 0 <= index < len(self.body_lengths):
            raise IndexError(f"record {self.sequence} has {len(self.body_lengths)} bodies, asked for {index}")
        return self.bodies_offset + sum(self.body_lengths[:index])


class EncodedRecord(NamedTuple):
    """Everything of a record but its bodies, which follow `head` unchanged."""

    head: bytes
    length: int
    crc: int


def chain_seed(log_id: bytes) -> int:
    """Return the seed of all header CRCs of a log, and the CRC that its first record links to."""
    return crc32(log_id)


def encode_record(
    *,
    sequence: int,
    time_ns: int,
    kind: int,
    flags: int,
    durable: int,
    payload: bytes,
    bodies: Sequence[bytes],
    previous_crc: int,
    seed: int,
    max_record_bytes: int = MAX_RECORD_BYTES,
) -> EncodedRecord:
    """Frame a record.

    Args:
        durable: highest sequence known to be on the device now.
        previous_crc: header CRC of the record before, or `seed` for the first one.
        seed: `chain_seed` of the log.

    Raises:
        ValueError: kind out of range, too many bodies, or the record is too large.
    """
    if not 0 <= kind <= MAX_KIND:
        raise ValueError(f"record kind {kind} is not in 0..{MAX_KIND}")
    table = b""
    unpadded = FIXED_SIZE + len(payload)
    if bodies:
        if len(bodies) > MAX_BODIES:
            raise ValueError(f"a record has at most {MAX_BODIES} bodies, got {len(bodies)}")
        unpadded += sum(map(len, bodies)) + _BODY.size * len(bodies)
    padding = _PADDING[-unpadded % ALIGNMENT]
    length = unpadded + len(padding)
    if length > max_record_bytes:
        raise ValueError(f"a record of {length} bytes is over the limit of {max_record_bytes} bytes")
    if bodies:
        table = b"".join([_BODY.pack(len(body), crc32(body)) for body in bodies])
    payload_crc = crc32(padding, crc32(payload))
    covered = _COVERED.pack(
        RECORD_MAGIC, length, sequence, time_ns, kind, flags, len(bodies),
        durable, len(payload), payload_crc, previous_crc,
    )  # fmt: skip
    crc = crc32(table, crc32(covered, seed))
    return EncodedRecord(b"".join((covered, _CRC.pack(crc), table, payload, padding)), length, crc)


def decode_header(
    data: bytes | memoryview,
    position: int,
    seed: int,
    available: int,
    max_record_bytes: int = MAX_RECORD_BYTES,
) -> RecordHeader:
    """Decode and check the header at `position`, on its own: neither chain nor content.

    Args:
        data: holds the fixed header and, where `table_size` says so, the body table at `position`.
        seed: `chain_seed` of the log.
        available: bytes from `position` to the end of the segment.

    Raises:
        MalformedRecord: the bytes are not a header of this log, or the record does not fit.
    """
    if available < FIXED_SIZE:
        raise MalformedRecord(f"{available} bytes left, a record header needs {FIXED_SIZE}")
    (
        magic, length, sequence, time_ns, kind, flags, body_count,
        durable, payload_length, payload_crc, previous_crc, crc,
    ) = _FIXED.unpack_from(data, position)  # fmt: skip
    if magic != RECORD_MAGIC:
        raise MalformedRecord("no record starts here")
    if body_count > MAX_BODIES or FIXED_SIZE + _BODY.size * body_count > available:
        raise MalformedRecord(f"the table of {body_count} bodies does not fit into the segment")
    start = position + FIXED_SIZE
    end = start + _BODY.size * body_count
    covered = crc32(data[position : position + _COVERED.size], seed)
    if crc32(data[start:end], covered) != crc:
        raise MalformedRecord("the header CRC does not match")
    table = struct.unpack_from(f"<{2 * body_count}I", data, start) if body_count else ()
    header = RecordHeader(
        length, sequence, time_ns, kind, flags, durable, payload_length, payload_crc, previous_crc, crc,
        table[0::2], table[1::2],
    )  # fmt: skip
    if length > available:
        raise MalformedRecord(f"the record of {length} bytes ends after the segment ({available} bytes left)")
    if length > max_record_bytes:
        raise MalformedRecord(f"the record of {length} bytes is over the limit of {max_record_bytes} bytes")
    padding = header.bodies_offset - header.payload_offset - payload_length
    if not 0 <= padding < ALIGNMENT or length % ALIGNMENT or flags not in (0, RecordFlags.CLOSED):
        raise MalformedRecord("the header contradicts itself")
    return header


def table_size(data: bytes | memoryview, position: int) -> int:
    """Return the size in bytes of the body table that a fixed header, not yet checked, announces.

    Never more than a legal table has: a header that announces more is refused by `decode_header`.
    """
    body_count: int = _CRC.unpack_from(data, position + _BODY_COUNT_AT)[0]
    return _BODY.size * min(body_count, MAX_BODIES)
