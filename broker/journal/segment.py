"""Segment files: their names, their header, how one is created and how a directory of them is listed.

A segment is named by its first sequence, is appended to by one writer, and is never used again for other
records. Its header repeats the CRC of the record before it, so that a missing, swapped or foreign segment
breaks the chain. The header is on the device under a temporary name before the file gets its own name:
a segment with a bad header is therefore damage, never an interrupted creation.
"""

from __future__ import annotations

import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

from broker.journal.files import FileOperations
from broker.journal.record import chain_seed
from rollmq.errors import JournalError

FORMAT_VERSION = 1
SEGMENT_MAGIC = b"RMQSEGM\n"
SEGMENT_HEADER_SIZE = 64
LOG_ID_SIZE = 16
SUFFIX = ".segment"
_UNFINISHED = "unfinished.tmp"

_MAX_HEADER_SIZE = 4096
_PREFIX = struct.Struct("<8sII")
_COVERED = struct.Struct("<8sII16sQQQI")
_CRC = struct.Struct("<I")
_NAME = re.compile(r"(\d{20})" + re.escape(SUFFIX))


class MalformedSegment(ValueError):
    """Bytes that are not a segment header; the text says which check failed."""


class UnknownFormat(JournalError):
    """A segment was written in a newer format than this version reads."""


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """What the first 64 bytes of a segment say.

    Attributes:
        log_id: 16 random bytes, the same in all segments of a log.
        number: 1, 2, 3, …
        first_sequence: sequence of the first record in this segment.
        created_ns: wall time of creation in nanoseconds since 1970.
        previous_crc: header CRC of the last record before this segment; `chain_seed(log_id)` if none.
    """

    log_id: bytes
    number: int
    first_sequence: int
    created_ns: int
    previous_crc: int

    def encode(self) -> bytes:
        """Return the header's bytes."""
        covered = _COVERED.pack(
            SEGMENT_MAGIC, FORMAT_VERSION, SEGMENT_HEADER_SIZE,
            self.log_id, self.number, self.first_sequence, self.created_ns, self.previous_crc,
        )  # fmt: skip
        return covered + _CRC.pack(crc32(covered))

    @property
    def seed(self) -> int:
        """Seed of the record CRCs of this log."""
        return chain_seed(self.log_id)

    @property
    def file_name(self) -> str:
        """Name of the file that holds this segment."""
        return segment_name(self.first_sequence)


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment file and its checked header."""

    path: Path
    header: SegmentHeader


def segment_name(first_sequence: int) -> str:
    """Return the file name of the segment that starts with `first_sequence`."""
    return f"{first_sequence:020d}{SUFFIX}"


def sequence_of_name(name: str) -> int | None:
    """Return the first sequence that a file name states, or None if it is no segment's name."""
    match = _NAME.fullmatch(name)
    return int(match.group(1)) if match else None


def decode_segment_header(data: bytes) -> SegmentHeader:
    """Decode the start of a segment file.

    Args:
        data: the first bytes of the file, up to 4096.

    Raises:
        MalformedSegment: the bytes are no intact segment header.
        UnknownFormat: an intact header of a newer format.
    """
    if len(data) < SEGMENT_HEADER_SIZE:
        raise MalformedSegment(f"{len(data)} bytes, a segment header has {SEGMENT_HEADER_SIZE}")
    magic, version, header_size = _PREFIX.unpack_from(data)
    if magic != SEGMENT_MAGIC:
        raise MalformedSegment("the file does not start as a segment of a rollmq journal")
    if not _PREFIX.size < header_size <= min(len(data), _MAX_HEADER_SIZE):
        raise MalformedSegment(f"the header size of {header_size} bytes is impossible")
    crc_at = header_size - _CRC.size
    if _CRC.unpack_from(data, crc_at)[0] != crc32(data[:crc_at]):
        raise MalformedSegment("the segment header's CRC does not match")
    if version > FORMAT_VERSION:
        raise UnknownFormat(
            f"it has journal format {version}, this version of rollmq reads up to {FORMAT_VERSION}; "
            "use the version of rollmq that wrote it, or a newer one"
        )
    if version != FORMAT_VERSION or header_size != SEGMENT_HEADER_SIZE:
        raise MalformedSegment(f"format {version} with a header of {header_size} bytes does not exist")
    _, _, _, log_id, number, first_sequence, created_ns, previous_crc = _COVERED.unpack_from(data)
    return SegmentHeader(log_id, number, first_sequence, created_ns, previous_crc)


def read_segment_header(path: Path) -> SegmentHeader:
    """Read and check the header of a file; raises as `decode_segment_header`, and `OSError`."""
    with path.open("rb", buffering=0) as file:
        data = file.read(_MAX_HEADER_SIZE)
    try:
        return decode_segment_header(data)
    except UnknownFormat as error:
        raise UnknownFormat(f"{path} cannot be read: {error}") from None


def list_segment_files(directory: Path) -> list[Path]:
    """Return all `*.segment` files by name, well named or not; raises `OSError`."""
    return sorted(path for path in directory.iterdir() if path.name.endswith(SUFFIX))


def create_segment(directory: Path, header: SegmentHeader, files: FileOperations) -> int:
    """Create a segment durably and return a descriptor positioned behind its header.

    Raises:
        OSError: any step failed, also if the segment exists already.
    """
    path = directory / header.file_name
    unfinished = directory / _UNFINISHED
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        files.write_all(descriptor, [header.encode()])
        files.fsync(descriptor)
        if path.exists():
            raise FileExistsError(f"segment {path} exists already")
        os.rename(unfinished, path)
        files.sync_directory(directory)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_segment_for_append(path: Path) -> int:
    """Open an existing segment positioned at its end; raises `OSError`."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    os.lseek(descriptor, 0, os.SEEK_END)
    return descriptor
