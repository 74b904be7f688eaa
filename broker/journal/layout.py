"""The segments of a directory as a whole: do their names, headers and numbers make one log?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from broker.journal.damage import Finding
from broker.journal.scan import Chain
from broker.journal.segment import (
    MalformedSegment,
    Segment,
    list_segment_files,
    read_segment_header,
    sequence_of_name,
)


@dataclass(frozen=True, slots=True)
class Layout:
    """The segments found, in order, and what is wrong with them as files.

    Attributes:
        segments: those with an intact header, by name.
        findings: empty if the segments can be one log.
    """

    segments: tuple[Segment, ...]
    findings: tuple[Finding, ...]


def read_layout(directory: Path) -> Layout:
    """Read the headers of all segments and check that they belong together.

    Raises:
        UnknownFormat: a segment has a newer format.
        OSError: the directory or a file cannot be read.
    """
    segments: list[Segment] = []
    findings: list[Finding] = []
    for path in list_segment_files(directory):
        named = sequence_of_name(path.name)
        if named is None:
            findings.append(Finding(path, 0, 0, "the name is not that of a segment; move the file away"))
            continue
        try:
            segment = Segment(path, read_segment_header(path))
        except MalformedSegment as error:
            findings.append(Finding(path, 0, named, str(error)))
            continue
        findings.extend(_misplaced(segment, named, segments))
        segments.append(segment)
    return Layout(tuple(segments), tuple(findings))


def _misplaced(segment: Segment, named: int, before: list[Segment]) -> list[Finding]:
    header, path = segment.header, segment.path
    if header.first_sequence != named:
        what = f"the file is segment {header.number} with first record {header.first_sequence}, not as named"
        return [Finding(path, 0, named, what)]
    if before and header.log_id != before[0].header.log_id:
        what = f"the file belongs to log {header.log_id.hex()}, {before[0].path.name} to another"
        return [Finding(path, 0, named, what)]
    expected = before[-1].header.number + 1 if before else 1
    if header.number > expected:
        return [Finding(path.parent, 0, named, f"segment {expected} is missing before {path.name}")]
    if header.number < expected:
        return [Finding(path, 0, named, f"segment {header.number} stands where {expected} belongs")]
    return []


def broken_link(segment: Segment, chain: Chain) -> Finding | None:
    """Say how a segment fails to continue the log that was walked up to `chain`, or None if it does."""
    header = segment.header
    if header.first_sequence != chain.sequence + 1:
        what = f"the segment starts with record {header.first_sequence}, the one before ends at {chain.sequence}"
    elif header.previous_crc != chain.crc:
        what = "the segment does not continue the last record of the segment before it"
    else:
        return None
    return Finding(segment.path, 0, chain.sequence + 1, what)
