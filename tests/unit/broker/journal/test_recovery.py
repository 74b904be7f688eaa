from __future__ import annotations

import errno
import os
import select
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from zlib import crc32

import pytest

from broker.journal.durability import NONE
from broker.journal.files import FileOperations
from broker.journal.local import LocalJournal
from broker.journal.segment import (
    SEGMENT_HEADER_SIZE,
    SegmentHeader,
    UnknownFormat,
    create_segment,
    read_segment_header,
)
from rollmq.errors import JournalDamaged, JournalFailed

Content = tuple[int, bytes, tuple[bytes, ...]]
MakeJournal = Callable[..., dict[int, Content]]


def contents(journal: LocalJournal) -> dict[int, Content]:
    return {record.sequence: (record.kind, record.payload, record.bodies()) for record in journal.records()}


def segments(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.segment"))


def files_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name != "lock"}


def record_ends(segment: Path) -> list[int]:
    """Offsets at which the records of an intact segment end, found by their length fields alone."""
    data, offset, ends = segment.read_bytes(), SEGMENT_HEADER_SIZE, []
    while offset < len(data):
        offset += struct.unpack_from("<I", data, offset + 4)[0]
        ends.append(offset)
    return ends


def first(written: dict[int, Content], count: int) -> dict[int, Content]:
    return dict(list(written.items())[:count])


def abandon(journal: LocalJournal) -> None:
    """Leave a journal as kill -9 does: nothing marks a clean close."""
    journal._committer.stop(30.0)
    journal._closed = True
    journal._release()


def refuse(directory: Path, match: str) -> None:
    """Opening must refuse with `match` in the message, name the remedy, and change nothing."""
    before = files_of(directory)
    with pytest.raises(JournalDamaged, match=match) as caught:
        LocalJournal(directory)
    assert f"rollmq log verify {directory}" in str(caught.value)
    assert files_of(directory) == before


@pytest.mark.parametrize("close", [False, True])
def test_a_log_cut_at_any_byte_opens_with_a_prefix_and_takes_appends(
    tmp_path: Path, make_journal: MakeJournal, close: bool
) -> None:
    written = make_journal(tmp_path / "whole", close=close)
    (whole,) = segments(tmp_path / "whole")
    ends = record_ends(whole)
    for size in range(SEGMENT_HEADER_SIZE, whole.stat().st_size + 1):
        directory = tmp_path / "cut"
        directory.mkdir()
        cut = directory / whole.name
        cut.write_bytes(whole.read_bytes()[:size])
        complete = sum(end <= size for end in ends)
        journal = LocalJournal(directory)
        kept = first(written, complete)
        assert contents(journal) == kept
        at_boundary = size in (SEGMENT_HEADER_SIZE, *ends)
        torn = cut.with_name(cut.name + ".torn")
        assert (journal.torn_tail is None) == at_boundary == (not torn.exists())
        if journal.torn_tail is not None:
            boundary = max(end for end in (SEGMENT_HEADER_SIZE, *ends) if end <= size)
            assert journal.torn_tail.finding.offset == boundary
            assert torn.read_bytes() == whole.read_bytes()[boundary:size]
        kept[journal.append(9, b"after the tear", (b"body",))] = (9, b"after the tear", (b"body",))
        journal.close()
        with LocalJournal(directory) as again:
            assert contents(again) == kept
            assert again.torn_tail is None
        shutil.rmtree(directory)


def test_a_cut_inside_a_segment_header_is_refused(tmp_path: Path, make_journal: MakeJournal) -> None:
    make_journal(tmp_path)
    (segment,) = segments(tmp_path)
    for size in (0, 1, SEGMENT_HEADER_SIZE - 1):
        segment.write_bytes(segment.read_bytes()[:size])
        refuse(tmp_path, f"{segment.name} at offset 0")


@pytest.mark.parametrize("close", [False, True])
@pytest.mark.parametrize("mask", [0x01, 0x80, 0xFF])
def test_a_changed_byte_anywhere_is_refused_or_in_the_last_record_set_aside(
    tmp_path: Path, make_journal: MakeJournal, mask: int, close: bool
) -> None:
    written = make_journal(tmp_path / "whole", segment_bytes=350, close=close)
    names = [path.name for path in segments(tmp_path / "whole")]
    assert len(names) > 1
    for name in names:
        data = (tmp_path / "whole" / name).read_bytes()
        ends = record_ends(tmp_path / "whole" / name)
        last_record = [SEGMENT_HEADER_SIZE, *ends][-2]
        for position in range(len(data)):
            directory = tmp_path / "changed"
            shutil.copytree(tmp_path / "whole", directory)
            changed = bytearray(data)
            changed[position] ^= mask
            (directory / name).write_bytes(changed)
            if name == names[-1] and position >= last_record:
                with LocalJournal(directory) as journal:
                    assert contents(journal) == first(written, len(written) - (not close))
                    assert journal.torn_tail is not None
                    assert journal.torn_tail.finding.offset == last_record
            else:
                offset = max([0] + [start for start in [SEGMENT_HEADER_SIZE, *ends] if start <= position])
                refuse(directory, rf"{name} at offset {offset}, record \d+:")
            shutil.rmtree(directory)


@pytest.mark.parametrize("fill", [b"\0", b"\xff"])
def test_a_wiped_record_known_to_be_durable_is_refused(tmp_path: Path, make_journal: MakeJournal, fill: bytes) -> None:
    make_journal(tmp_path / "whole")
    (whole,) = segments(tmp_path / "whole")
    starts = [SEGMENT_HEADER_SIZE, *record_ends(whole)]
    for number in range(1, len(starts) - 1):
        directory = tmp_path / f"wiped-{number}"
        shutil.copytree(tmp_path / "whole", directory)
        data = bytearray(whole.read_bytes())
        data[starts[number - 1] : starts[number]] = fill * (starts[number] - starts[number - 1])
        (directory / whole.name).write_bytes(data)
        what = f"record {number}: .* says that record {number} was durable"
        refuse(directory, f"{whole.name} at offset {starts[number - 1]}, {what}")


def test_a_batch_that_reached_the_disk_in_parts_is_set_aside_from_its_first_gap(
    tmp_path: Path, make_journal: MakeJournal
) -> None:
    """Sectors of one unsynced write may arrive in any order: later records can be whole, earlier ones not."""
    written = make_journal(tmp_path, sync_each=False)
    (segment,) = segments(tmp_path)
    starts = [SEGMENT_HEADER_SIZE, *record_ends(segment)]
    data = bytearray(segment.read_bytes())
    data[starts[1] : starts[2]] = bytes(starts[2] - starts[1])
    segment.write_bytes(data)
    with LocalJournal(tmp_path) as journal:
        assert contents(journal) == first(written, 1)
        assert journal.torn_tail is not None
        assert journal.torn_tail.bytes == len(data) - starts[1]


def test_records_written_but_never_synced_do_not_count_as_known_to_be_durable(tmp_path: Path) -> None:
    journal = LocalJournal(tmp_path, NONE)
    for sequence in (1, 2, 3):
        journal.append(1, b"payload")
        journal.commit()
        while journal.durable < sequence:
            assert select.select([journal.wakeup_fd], [], [], 30.0)[0]
            journal.drain_wakeup()
    abandon(journal)
    (segment,) = segments(tmp_path)
    data = bytearray(segment.read_bytes())
    data[record_ends(segment)[0] + 10] ^= 1
    segment.write_bytes(data)
    with LocalJournal(tmp_path) as again:
        assert list(contents(again)) == [1]


def test_records_of_another_log_inside_a_torn_body_do_not_make_it_damage(
    tmp_path: Path, make_journal: MakeJournal
) -> None:
    make_journal(tmp_path / "other", [(1, b"x", ())] * 10)
    (other,) = segments(tmp_path / "other")
    written = make_journal(tmp_path / "log", [(1, b"first", ()), (2, b"", (other.read_bytes(), b"end"))])
    (segment,) = segments(tmp_path / "log")
    segment.write_bytes(segment.read_bytes()[:-8])
    with LocalJournal(tmp_path / "log") as journal:
        assert contents(journal) == first(written, 1)


def test_zeros_behind_the_last_record_are_set_aside(tmp_path: Path, make_journal: MakeJournal) -> None:
    written = make_journal(tmp_path)
    (segment,) = segments(tmp_path)
    segment.write_bytes(segment.read_bytes() + bytes(3 * 1024 * 1024))
    with LocalJournal(tmp_path) as journal:
        assert contents(journal) == written
        assert journal.torn_tail is not None
        assert journal.torn_tail.copy.stat().st_size == 3 * 1024 * 1024


def test_a_second_torn_tail_does_not_overwrite_the_first(tmp_path: Path, make_journal: MakeJournal) -> None:
    make_journal(tmp_path)
    (segment,) = segments(tmp_path)
    for number in range(3):
        segment.write_bytes(segment.read_bytes() + b"tail %d" % number)
        LocalJournal(tmp_path).close()
    kept = sorted(path.read_bytes() for path in tmp_path.glob("*.torn*"))
    assert kept == [b"tail 0", b"tail 1", b"tail 2"]


@pytest.mark.parametrize("call", range(1, 8))
def test_a_failure_while_a_tail_is_set_aside_loses_nothing(
    tmp_path: Path, make_journal: MakeJournal, call: int
) -> None:
    written = make_journal(tmp_path)
    (segment,) = segments(tmp_path)
    intact = segment.read_bytes()
    segment.write_bytes(intact + b"tail")
    calls = 0

    def fsync(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        os.fsync(descriptor)

    if call <= 6:  # segment and directory before reading; copy, directory, segment, directory
        with pytest.raises(JournalFailed):
            LocalJournal(tmp_path, files=FileOperations(fsync=fsync))
        assert segment.read_bytes().startswith(intact)
        tails = [segment.read_bytes()[len(intact) :], *(path.read_bytes() for path in tmp_path.glob("*.torn*"))]
        assert b"tail" in tails
    with LocalJournal(tmp_path) as journal:
        assert contents(journal) == written


@pytest.fixture
def many_segments(tmp_path: Path, make_journal: MakeJournal) -> Path:
    directory = tmp_path / "many"
    make_journal(directory, [(number, b"payload %d" % number, ()) for number in range(12)], segment_bytes=300)
    assert len(segments(directory)) == 4
    return directory


def test_a_missing_middle_segment_is_refused(many_segments: Path) -> None:
    _, second, third, _ = segments(many_segments)
    second.unlink()
    refuse(many_segments, f"segment 2 is missing before {third.name}")


def test_a_missing_first_segment_is_refused(many_segments: Path) -> None:
    one, second, *_ = segments(many_segments)
    one.unlink()
    refuse(many_segments, f"segment 1 is missing before {second.name}")


def test_a_duplicated_segment_is_refused(many_segments: Path) -> None:
    copy = many_segments / f"{500:020d}.segment"
    shutil.copy(segments(many_segments)[1], copy)
    refuse(many_segments, f"{copy.name} at offset 0.*segment 2 .*not as named")


def test_swapped_segments_are_refused(many_segments: Path) -> None:
    _, second, third, _ = segments(many_segments)
    second_bytes, third_bytes = second.read_bytes(), third.read_bytes()
    second.write_bytes(third_bytes)
    third.write_bytes(second_bytes)
    refuse(many_segments, f"{second.name} at offset 0.*not as named")


def test_a_file_that_only_pretends_to_be_a_segment_is_refused(many_segments: Path) -> None:
    shutil.copy(segments(many_segments)[1], many_segments / "copy of 2.segment")
    refuse(many_segments, "copy of 2.segment at offset 0.*move the file away")


def test_other_files_are_left_alone(many_segments: Path) -> None:
    (many_segments / "notes.txt").write_text("mine")
    (many_segments / "unfinished.tmp").write_bytes(b"half a header")
    LocalJournal(many_segments).close()
    assert (many_segments / "notes.txt").read_text() == "mine"


def test_a_segment_of_another_log_is_refused(tmp_path: Path, many_segments: Path, make_journal: MakeJournal) -> None:
    make_journal(tmp_path / "other", [(number, b"payload %d" % number, ()) for number in range(12)], segment_bytes=300)
    foreign = segments(tmp_path / "other")[2]
    shutil.copy(foreign, many_segments / foreign.name)
    refuse(many_segments, f"{foreign.name} at offset 0.*belongs to log {read_segment_header(foreign).log_id.hex()}")


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_segment_cut_at_a_record_is_refused_unless_it_is_the_last(many_segments: Path, number: int) -> None:
    segment = segments(many_segments)[number]
    segment.write_bytes(segment.read_bytes()[: record_ends(segment)[-2]])
    refuse(many_segments, f"{segments(many_segments)[number + 1].name} at offset 0.*the one before ends at")


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_torn_end_of_a_segment_that_is_not_the_last_is_refused(many_segments: Path, number: int) -> None:
    segment = segments(many_segments)[number]
    segment.write_bytes(segment.read_bytes()[:-3])
    refuse(many_segments, f"{segment.name} at offset {record_ends(segment)[-2]}")


def test_a_zeroed_segment_is_refused(many_segments: Path) -> None:
    for segment in segments(many_segments)[1:]:
        intact = segment.read_bytes()
        segment.write_bytes(bytes(len(intact)))
        refuse(many_segments, f"{segment.name} at offset 0")
        segment.write_bytes(intact)


def test_a_segment_that_does_not_continue_the_chain_is_refused(many_segments: Path) -> None:
    segment = segments(many_segments)[1]
    header = read_segment_header(segment)
    forged = SegmentHeader(header.log_id, header.number, header.first_sequence, header.created_ns, 1234)
    segment.write_bytes(forged.encode() + segment.read_bytes()[SEGMENT_HEADER_SIZE:])
    refuse(many_segments, f"{segment.name} at offset 0.*does not continue")


def test_a_record_that_stands_in_the_wrong_place_is_refused_even_at_the_end(
    tmp_path: Path, make_journal: MakeJournal
) -> None:
    """An intact record that does not belong there is no torn write."""
    make_journal(tmp_path)
    (segment,) = segments(tmp_path)
    ends = record_ends(segment)
    data = segment.read_bytes()
    segment.write_bytes(data + data[ends[-2] :])
    refuse(tmp_path, f"offset {ends[-1]}, record 5: an intact record 4 stands where record 5 belongs")


def test_an_intact_record_of_another_history_of_the_same_log_is_refused(
    tmp_path: Path, make_journal: MakeJournal
) -> None:
    make_journal(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    for name in ("one", "two"):
        with LocalJournal(tmp_path / name) as journal:
            journal.append(1, name.encode())
            journal.append(1, b"last")
    (one,), (two,) = segments(tmp_path / "one"), segments(tmp_path / "two")
    cut = record_ends(one)[4]
    one.write_bytes(one.read_bytes()[:cut] + two.read_bytes()[cut:])
    refuse(tmp_path / "one", f"offset {cut}, record 6: the record is intact but does not continue")


def test_a_segment_created_just_before_a_crash_is_used(tmp_path: Path, make_journal: MakeJournal) -> None:
    written = make_journal(tmp_path)
    with LocalJournal(tmp_path, segment_bytes=100) as journal:
        journal._start_segment(5)
        os.close(create_segment(tmp_path, journal._batch.segment, FileOperations()))
        abandon(journal)
    for kind in (8, 9):
        with LocalJournal(tmp_path) as journal:
            assert contents(journal) == written
            written[journal.append(kind, b"more", (b"body",))] = (kind, b"more", (b"body",))
    assert len(segments(tmp_path)) == 2


def test_a_newer_format_is_refused_as_such(tmp_path: Path, make_journal: MakeJournal) -> None:
    make_journal(tmp_path)
    (segment,) = segments(tmp_path)
    data = bytearray(segment.read_bytes())
    data[8:12] = (2).to_bytes(4, "little")
    data[SEGMENT_HEADER_SIZE - 4 : SEGMENT_HEADER_SIZE] = crc32(data[: SEGMENT_HEADER_SIZE - 4]).to_bytes(4, "little")
    segment.write_bytes(data)
    with pytest.raises(UnknownFormat, match="format 2"):
        LocalJournal(tmp_path)
    assert segment.read_bytes() == bytes(data)


def test_damaged_bodies_of_old_segments_may_be_found_late_but_are_never_returned(
    tmp_path: Path, make_journal: MakeJournal
) -> None:
    make_journal(tmp_path, [(1, b"payload", (b"body" * 20,))] * 4, segment_bytes=400)
    old = segments(tmp_path)[0]
    data = bytearray(old.read_bytes())
    data[record_ends(old)[0] - 1] ^= 1
    old.write_bytes(data)
    refuse(tmp_path, f"{old.name} at offset {SEGMENT_HEADER_SIZE}, record 1: the CRC of body 0")
    with LocalJournal(tmp_path, check_bodies=False) as journal:
        assert journal.read_body(2, 0) == b"body" * 20
        with pytest.raises(JournalDamaged, match=f"{old.name} at offset {SEGMENT_HEADER_SIZE}, record 1"):
            journal.read_body(1, 0)


def test_damage_under_an_open_journal_is_never_returned(tmp_path: Path) -> None:
    with LocalJournal(tmp_path, cache_bytes=0) as journal:
        for _ in range(3):
            journal.append(1, b"payload", [b"body"])
            journal.sync(30.0)
        (segment,) = segments(tmp_path)
        data = bytearray(segment.read_bytes())
        for position in range(SEGMENT_HEADER_SIZE, record_ends(segment)[0]):
            changed = bytearray(data)
            changed[position] ^= 0x10
            segment.write_bytes(changed)
            with pytest.raises(JournalDamaged, match="record 1"):
                journal.read_body(1, 0)
                list(journal.records())
        segment.write_bytes(data)
        assert journal.read_body(1, 0) == b"body"
