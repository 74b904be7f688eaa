"""Reading a journal without owning it: for `rollmq log`, for replay, on a copy or beside a live broker.

Takes no lock and changes nothing. Beside a live broker it sees a prefix: what was written when it looked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from broker.journal.bodies import BodiesOnDisk, SegmentReads
from broker.journal.damage import Finding
from broker.journal.interface import JournalStat, Record
from broker.journal.layout import Layout, broken_link, read_layout
from broker.journal.record import RecordFlags, RecordHeader
from broker.journal.scan import BadRecord, Chain, Window, judge, next_header, walk
from broker.journal.segment import SEGMENT_HEADER_SIZE, Segment
from rollmq.errors import JournalError


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of checking every byte of a journal.

    Attributes:
        findings: all damage, and the torn tail if there is one; empty for an intact journal.
        segments: number of segment files.
        records: number of intact records, those behind damage included.
        bodies: number of intact bodies.
        bytes: size of all segments.
        last_sequence: of the last record before the first finding: what an opener would keep.
        stopped: the first finding, where every reader stops; None if there is none.
        closed: whether the journal ends with the mark of a clean close.
    """

    findings: tuple[Finding, ...]
    segments: int
    records: int
    bodies: int
    bytes: int
    last_sequence: int
    closed: bool

    @property
    def stopped(self) -> Finding | None:
        """The first finding."""
        return self.findings[0] if self.findings else None

    @property
    def intact(self) -> bool:
        """Whether the journal opens without a refusal: no finding but a torn tail."""
        return all(finding.torn_tail for finding in self.findings)


class JournalReader:
    """Read-only access to a journal directory. Not thread safe.

    Attributes:
        torn_tail: the interrupted write at which the last complete iteration ended, if any.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.torn_tail: Finding | None = None
        self._reads = SegmentReads()

    def records(self, from_sequence: int = 1, *, check_bodies: bool = False) -> Iterator[Record]:
        """Iterate over the records on disk, oldest first; ends before a torn tail and sets `torn_tail`.

        Args:
            from_sequence: where to start.
            check_bodies: check the CRC of every body on the way; else bodies are checked when read.

        Raises:
            JournalDamaged: at the first damage, naming file, offset and sequence.
        """
        self.torn_tail = None
        layout = self._layout()
        if layout.findings:
            raise layout.findings[0].as_error()
        later = [segment.header.first_sequence > from_sequence for segment in layout.segments]
        start = max(0, (later.index(True) if True in later else len(later)) - 1)
        chain = Chain.before(layout.segments[start])
        for segment in layout.segments[start:]:
            if (broken := broken_link(segment, chain)) is not None:
                raise broken.as_error()
            with Window(segment.path) as window:
                try:
                    yield from _records(window, segment, chain, self._reads, from_sequence, check_bodies)
                except BadRecord as bad:
                    last = segment is layout.segments[-1]
                    finding = judge(window, segment, bad, last_segment=last)
                    if not finding.torn_tail:
                        raise finding.as_error() from None
                    self.torn_tail = finding

    def verify(self) -> Verification:
        """Check every byte and go on behind damage; raises nothing for it."""
        return _Verifier(self._layout()).run()

    def stat(self) -> JournalStat:
        """Return facts about the journal; reads the last segment only.

        `durable_sequence` and `synced_sequence` are the highest that a record states; the mode is not
        recorded in a journal.

        Raises:
            JournalDamaged: the segments are not one log, or the last one is damaged.
        """
        layout = self._layout()
        if layout.findings:
            raise layout.findings[0].as_error()
        last = layout.segments[-1]
        chain, durable = Chain.before(last), last.header.first_sequence - 1
        with Window(last.path) as window:
            try:
                for _, header in walk(window, last.header.seed, chain, check_bodies=False):
                    durable = header.durable
            except BadRecord as bad:
                finding = judge(window, last, bad, last_segment=True)
                if not finding.torn_tail:
                    raise finding.as_error() from None
        return JournalStat(
            directory=str(self.directory),
            log_id=last.header.log_id.hex(),
            segments=len(layout.segments),
            bytes=sum(segment.path.stat().st_size for segment in layout.segments),
            unwritten_bytes=0,
            first_sequence=layout.segments[0].header.first_sequence,
            last_sequence=chain.sequence,
            durable_sequence=durable,
            synced_sequence=durable,
            mode="unknown",
            loss_window="not recorded in the journal",
        )

    def close(self) -> None:
        """Close the files kept open; bodies of records can no longer be read."""
        self._reads.close()

    def __enter__(self) -> JournalReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _layout(self) -> Layout:
        try:
            layout = read_layout(self.directory)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise JournalError(f"there is no journal in {self.directory}: {error}") from error
        if not layout.segments and not layout.findings:
            raise JournalError(f"there is no journal in {self.directory}: it holds no *.segment file")
        return layout


def read_journal(directory: str | Path) -> JournalReader:
    """Open a journal for reading; its files are looked at when they are used.

    Raises:
        JournalError: the directory holds no journal.
    """
    reader = JournalReader(Path(directory))
    reader._layout()
    return reader


def records_of(
    segments: Sequence[Segment], reads: SegmentReads, from_sequence: int, to_sequence: int
) -> Iterator[Record]:
    """Iterate over records of a validated log from and up to a sequence, both included.

    Raises:
        JournalDamaged: at a record that is not what was written.
    """
    for segment in segments:
        if segment.header.first_sequence > to_sequence:
            return
        with Window(segment.path) as window:
            try:
                for record in _records(window, segment, Chain.before(segment), reads, from_sequence, False):
                    if record.sequence > to_sequence:
                        return
                    yield record
            except BadRecord as bad:
                if bad.sequence > to_sequence:
                    return  # the committer is writing here
                raise judge(window, segment, bad, last_segment=False).as_error() from None


def _records(
    window: Window,
    segment: Segment,
    chain: Chain,
    reads: SegmentReads,
    from_sequence: int,
    check_bodies: bool,
) -> Iterator[Record]:
    for offset, header in walk(window, segment.header.seed, chain, check_bodies=check_bodies):
        if header.sequence < from_sequence or header.flags & RecordFlags.CLOSED:
            continue
        yield Record(
            header.sequence,
            header.time_ns,
            header.kind,
            window.read(offset + header.payload_offset, header.payload_length),
            header.body_lengths,
            BodiesOnDisk(reads, segment, offset, header.sequence, header) if header.body_lengths else None,
        )


class _Verifier:
    """Checks a whole journal; behind damage it takes up the chain again at the next intact header."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._findings = list(layout.findings)
        self._records = 0
        self._bodies = 0
        self._last_sequence = 0
        self._closed = False

    def run(self) -> Verification:
        segments = self._layout.segments
        chain = Chain.before(segments[0]) if segments else Chain(0, 0)
        for segment in segments:
            if (broken := broken_link(segment, chain)) is not None:
                self._findings.append(broken)
                chain = Chain.before(segment)
            self._segment(segment, chain, last=segment is segments[-1])
        self._findings.sort(key=lambda finding: (finding.sequence, finding.offset))
        return Verification(
            findings=tuple(self._findings),
            segments=len(segments),
            records=self._records,
            bodies=self._bodies,
            bytes=sum(segment.path.stat().st_size for segment in segments),
            last_sequence=self._kept(),
            closed=self._closed and not self._findings,
        )

    def _kept(self) -> int:
        if self._findings:
            return min(self._last_sequence, max(0, self._findings[0].sequence - 1))
        return self._last_sequence

    def _segment(self, segment: Segment, chain: Chain, *, last: bool) -> None:
        seed, offset = segment.header.seed, SEGMENT_HEADER_SIZE
        with Window(segment.path) as window:
            while True:
                try:
                    for _, header in walk(window, seed, chain, offset=offset, check_bodies=True):
                        self._count(header)
                    return
                except BadRecord as bad:
                    self._findings.append(judge(window, segment, bad, last_segment=last))
                    found = _behind(window, seed, bad)
                if found is None:
                    return
                offset, header = found
                chain.sequence, chain.crc = header.sequence - 1, header.previous_crc

    def _count(self, header: RecordHeader) -> None:
        self._closed = bool(header.flags & RecordFlags.CLOSED)
        self._records += 1
        self._bodies += len(header.body_lengths)
        self._last_sequence = header.sequence


def _behind(window: Window, seed: int, bad: BadRecord) -> tuple[int, RecordHeader] | None:
    """Where the walk can be taken up behind a bad record."""
    start = bad.offset + (bad.header.length if bad.header is not None else 8)
    return next_header(window, start, seed)
