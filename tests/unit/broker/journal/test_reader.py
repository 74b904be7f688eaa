from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from broker.journal.local import LocalJournal
from broker.journal.reader import read_journal
from broker.journal.segment import SEGMENT_HEADER_SIZE
from rollmq.errors import JournalDamaged, JournalError

Content = tuple[int, bytes, tuple[bytes, ...]]
MakeJournal = Callable[..., dict[int, Content]]


def record_starts(segment: Path) -> list[int]:
    data, offset, starts = segment.read_bytes(), SEGMENT_HEADER_SIZE, []
    while offset < len(data):
        starts.append(offset)
        offset += struct.unpack_from("<I", data, offset + 4)[0]
    return starts


def flip(segment: Path, position: int) -> None:
    data = bytearray(segment.read_bytes())
    data[position] ^= 0x20
    segment.write_bytes(data)


def test_records_are_read_as_written_and_own_marks_are_not_shown(tmp_path: Path, make_journal: MakeJournal) -> None:
    written = make_journal(tmp_path, segment_bytes=350, close=True)
    with read_journal(tmp_path) as reader:
        records = list(reader.records(check_bodies=True))
        assert {r.sequence: (r.kind, r.payload, r.bodies()) for r in records} == written
        assert reader.torn_tail is None
        with pytest.raises(IndexError):
            records[0].body(0)


@pytest.mark.parametrize("start", [1, 2, 3, 4, 5, 99])
def test_reading_starts_at_the_asked_sequence(tmp_path: Path, make_journal: MakeJournal, start: int) -> None:
    make_journal(tmp_path, segment_bytes=350)
    with read_journal(tmp_path) as reader:
        assert [record.sequence for record in reader.records(start)] == list(range(start, 5))


def test_an_intact_journal_verifies(tmp_path: Path, make_journal: MakeJournal) -> None:
    written = make_journal(tmp_path, segment_bytes=350, close=True)
    found = read_journal(tmp_path).verify()
    assert found.findings == ()
    assert found.intact and found.closed and found.stopped is None
    assert found.records == len(written) + 1
    assert found.last_sequence == len(written) + 1
    assert found.bodies == sum(len(bodies) for _, _, bodies in written.values())
    assert found.bytes == sum(path.stat().st_size for path in tmp_path.glob("*.segment"))


def test_a_journal_that_was_not_closed_verifies_too(tmp_path: Path, make_journal: MakeJournal) -> None:
    make_journal(tmp_path)
    found = read_journal(tmp_path).verify()
    assert found.intact and not found.closed


def test_a_changed_byte_anywhere_is_named_by_its_record(tmp_path: Path, make_journal: MakeJournal) -> None:
    whole = tmp_path / "whole"
    make_journal(whole, segment_bytes=350)
    names = sorted(path.name for path in whole.glob("*.segment"))
    sequence = 0
    for name in names:
        starts = record_starts(whole / name)
        for number, position in enumerate(range((whole / name).stat().st_size)):
            directory = tmp_path / "changed"
            shutil.copytree(whole, directory)
            flip(directory / name, position)
            expected = sequence + max(1, sum(start <= position for start in starts))
            with read_journal(directory) as reader:
                found = reader.verify()
                assert [finding.sequence for finding in found.findings][:1] == [expected], (name, number)
                assert found.stopped is not None
                assert found.last_sequence <= expected - 1
                if found.intact:
                    assert [r.sequence for r in reader.records(check_bodies=True)] == list(range(1, expected))
                    assert reader.torn_tail is not None and reader.torn_tail.sequence == expected
                else:
                    with pytest.raises(JournalDamaged, match=f"record {expected}:"):
                        list(reader.records(check_bodies=True))
            shutil.rmtree(directory)
        sequence += len(starts)


def test_verify_goes_on_behind_damage_and_counts_what_is_intact(tmp_path: Path, make_journal: MakeJournal) -> None:
    make_journal(tmp_path, [(1, b"payload", (b"body",))] * 10, close=True)
    (segment,) = tmp_path.glob("*.segment")
    starts = record_starts(segment)
    flip(segment, starts[2] + 20)  # the header of record 3
    flip(segment, starts[6] - 1)  # the body of record 6
    found = read_journal(tmp_path).verify()
    assert [(finding.sequence, finding.offset) for finding in found.findings] == [(3, starts[2]), (6, starts[5])]
    assert not any(finding.torn_tail for finding in found.findings)
    assert found.records == 11 - 2
    assert found.last_sequence == 2
    assert not found.closed


def test_verify_names_missing_and_broken_segments(tmp_path: Path, make_journal: MakeJournal) -> None:
    make_journal(tmp_path, [(1, b"payload", ())] * 12, segment_bytes=300)
    first, second, third, _ = sorted(tmp_path.glob("*.segment"))
    second.unlink()
    flip(first, 3)
    found = read_journal(tmp_path).verify()
    assert any(finding.file == first and finding.sequence == 1 for finding in found.findings)
    assert any("missing" in finding.what and third.name in finding.what for finding in found.findings)
    assert not found.intact


def test_a_live_journal_is_read_as_a_prefix(tmp_path: Path) -> None:
    with LocalJournal(tmp_path, segment_bytes=20_000) as journal, read_journal(tmp_path) as reader:
        seen = 0
        for round_number in range(60):
            for _ in range(20):
                journal.append(1, b"payload", [b"body" * round_number])
            journal.commit()
            sequences = [record.sequence for record in reader.records(check_bodies=True)]
            assert sequences == list(range(1, len(sequences) + 1))
            assert seen <= len(sequences) <= journal.last_sequence
            assert reader.verify().intact
            seen = len(sequences)
        journal.append(1, b"only in memory")
        journal.sync(30.0)
        assert len(list(reader.records())) == journal.last_sequence


def test_reading_takes_no_lock_and_changes_nothing(tmp_path: Path, make_journal: MakeJournal) -> None:
    make_journal(tmp_path)
    (segment,) = tmp_path.glob("*.segment")
    segment.write_bytes(segment.read_bytes()[:-5])
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with read_journal(tmp_path) as reader:
        list(reader.records())
        reader.verify()
        reader.stat()
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_stat_tells_where_the_log_ends(tmp_path: Path, make_journal: MakeJournal) -> None:
    make_journal(tmp_path, segment_bytes=350)
    stat = read_journal(tmp_path).stat()
    assert (stat.first_sequence, stat.last_sequence, stat.durable_sequence) == (1, 4, 3)
    assert stat.segments == len(list(tmp_path.glob("*.segment")))
    assert len(stat.log_id) == 32


def test_no_journal_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match=r"no journal in .*missing"):
        read_journal(tmp_path / "missing")
    with pytest.raises(JournalError, match=r"holds no \*\.segment"):
        read_journal(tmp_path)
