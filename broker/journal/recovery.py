"""Opening an existing journal: validate everything, set a torn tail aside, refuse any other damage.

The rule (and the only change ever made to existing bytes): a bad record in the last segment that was never
known to be durable is what an interrupted write leaves. It is copied to `<segment>.torn` and cut off.
Everything else refuses the journal, names file, offset and sequence, and changes nothing; repair is no part of
opening.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from broker.journal.bodies import BodyIndex
from broker.journal.damage import Finding
from broker.journal.files import FileOperations
from broker.journal.layout import Layout, broken_link, read_layout
from broker.journal.record import RecordFlags
from broker.journal.scan import BadRecord, Chain, Window, judge, walk
from broker.journal.segment import Segment

logger = logging.getLogger(__name__)

_COPY_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class TornTail:
    """A tail that was set aside.

    Attributes:
        finding: what was wrong, and where.
        bytes: how many bytes were cut off.
        copy: the file that keeps them.
    """

    finding: Finding
    bytes: int
    copy: Path


@dataclass(frozen=True, slots=True)
class Recovered:
    """A validated log, ready for appending.

    Attributes:
        segments: all segments, oldest first; never empty.
        sizes: size of each in bytes.
        sequence: of the last record, 0 if there is none.
        crc: header CRC of the last record, to which the next one links.
        index: where the bodies are.
        closed: whether the last record is the mark of a clean close.
        torn: the tail that was set aside, if any.
    """

    segments: tuple[Segment, ...]
    sizes: tuple[int, ...]
    sequence: int
    crc: int
    index: BodyIndex
    closed: bool
    torn: TornTail | None


def recover(directory: Path, files: FileOperations, *, check_bodies: bool = True) -> Recovered | None:
    """Validate the journal in `directory`, which the caller has locked; None if it holds no segment.

    Args:
        check_bodies: check every body too. Without, bodies of all but the last segment are only checked
            when they are read, which makes opening a large journal faster.

    Raises:
        JournalDamaged: damage that no interrupted write explains.
        UnknownFormat: a segment has a newer format.
        OSError: reading failed, or setting the tail aside.
    """
    _sync_before_reading(directory, files)
    layout = read_layout(directory)
    if layout.findings:
        raise layout.findings[0].as_error()
    if not layout.segments:
        return None
    return _Recovery(layout, directory, files, check_bodies).run()


def _sync_before_reading(directory: Path, files: FileOperations) -> None:
    """After this, what we read is on the device, so that we may build on it."""
    paths = sorted(directory.glob("*.segment"))
    for path in paths[-1:]:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            files.fsync(descriptor)
        finally:
            os.close(descriptor)
    files.sync_directory(directory)


class _Recovery:
    def __init__(self, layout: Layout, directory: Path, files: FileOperations, check_bodies: bool) -> None:
        self._segments = layout.segments
        self._directory = directory
        self._files = files
        self._check_bodies = check_bodies
        self._chain = Chain.before(layout.segments[0])
        self._index = BodyIndex()
        self._closed = False
        self._torn: TornTail | None = None

    def run(self) -> Recovered:
        sizes = tuple(self._scan(segment) for segment in self._segments)
        return Recovered(
            segments=self._segments,
            sizes=sizes,
            sequence=self._chain.sequence,
            crc=self._chain.crc,
            index=self._index,
            closed=self._closed,
            torn=self._torn,
        )

    def _scan(self, segment: Segment) -> int:
        """Validate one segment and return its size without the tail that was cut off."""
        if (finding := broken_link(segment, self._chain)) is not None:
            raise finding.as_error()
        last = segment is self._segments[-1]
        with Window(segment.path) as window:
            records = walk(window, segment.header.seed, self._chain, check_bodies=last or self._check_bodies)
            try:
                for offset, header in records:
                    self._closed = bool(header.flags & RecordFlags.CLOSED)
                    if header.body_lengths:
                        self._index.add(header.sequence, offset)
            except BadRecord as bad:
                finding = judge(window, segment, bad, last_segment=last)
                if not finding.torn_tail:
                    raise finding.as_error() from None
                self._torn = set_tail_aside(finding, window.size, self._files)
                return bad.offset
            return window.size


def set_tail_aside(finding: Finding, size: int, files: FileOperations) -> TornTail:
    """Copy the bytes from the finding to the end into a new file, durably, then cut them off.

    Raises:
        OSError: any step failed.
    """
    copy = _unused_name(finding.file)
    descriptor = os.open(finding.file, os.O_RDWR | os.O_CLOEXEC)
    try:
        target = os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            for offset in range(finding.offset, size, _COPY_BYTES):
                files.write_all(target, [os.pread(descriptor, min(_COPY_BYTES, size - offset), offset)])
            files.fsync(target)
        finally:
            os.close(target)
        files.sync_directory(copy.parent)
        os.ftruncate(descriptor, finding.offset)
        files.fsync(descriptor)
        files.sync_directory(copy.parent)
    finally:
        os.close(descriptor)
    torn = TornTail(finding, size - finding.offset, copy)
    logger.warning("%s; %d bytes were set aside in %s", finding, torn.bytes, copy)
    return torn


def _unused_name(path: Path) -> Path:
    copy = path.with_name(path.name + ".torn")
    number = 1
    while copy.exists():
        number += 1
        copy = path.with_name(f"{path.name}.torn{number}")
    return copy
