from __future__ import annotations

import select
from pathlib import Path

import pytest

from broker.journal.durability import NONE, parse_durability_mode
from broker.journal.local import LocalJournal
from broker.journal.reader import read_journal
from rollmq.errors import JournalFailed

DEADLINE_S = 30.0


def readable(descriptor: int, timeout_s: float) -> bool:
    return bool(select.select([descriptor], [], [], timeout_s)[0])


def test_sequences_start_at_one_without_gaps(tmp_path: Path) -> None:
    with LocalJournal(tmp_path) as journal:
        assert [journal.append(1, b"payload") for _ in range(5)] == [1, 2, 3, 4, 5]
        assert journal.last_sequence == 5


def test_nothing_is_written_before_commit(tmp_path: Path) -> None:
    with LocalJournal(tmp_path) as journal:
        journal.append(1, b"payload")
        assert journal.stat().unwritten_bytes > 0
        assert list(journal.records()) == []
        journal.sync(DEADLINE_S)
        assert journal.stat().unwritten_bytes == 0
        assert [record.payload for record in journal.records()] == [b"payload"]


def test_records_and_bodies_survive_reopening(tmp_path: Path) -> None:
    with LocalJournal(tmp_path, clock=lambda: 123) as journal:
        journal.append(1, b"one")
        journal.append(2, b"two", [b"body", b"", b"other"])
    with LocalJournal(tmp_path) as journal:
        one, two = journal.records()
        assert (one.sequence, one.time_ns, one.kind, one.payload, one.body_lengths) == (1, 123, 1, b"one", ())
        assert (two.sequence, two.kind, two.payload, two.body_lengths) == (2, 2, b"two", (4, 0, 5))
        assert two.bodies() == (b"body", b"", b"other")
        assert journal.read_body(2, 2) == b"other"
        assert journal.torn_tail is None


def test_appending_goes_on_after_reopening(tmp_path: Path) -> None:
    for opening in range(4):
        with LocalJournal(tmp_path) as journal:
            journal.append(opening, b"payload", [b"body %d" % opening])
    with LocalJournal(tmp_path) as journal:
        records = list(journal.records())
        assert [record.kind for record in records] == [0, 1, 2, 3]
        assert [record.body(0) for record in records] == [b"body 0", b"body 1", b"body 2", b"body 3"]
        sequences = [record.sequence for record in records]
        assert sequences == sorted(set(sequences))


def test_close_marks_the_log_once(tmp_path: Path) -> None:
    with LocalJournal(tmp_path) as journal:
        journal.append(1, b"payload")
    assert read_journal(tmp_path).verify().closed
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    LocalJournal(tmp_path).close()
    journal = LocalJournal(tmp_path)
    journal.close()
    journal.close()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == size


def test_a_closed_journal_refuses_appends(tmp_path: Path) -> None:
    journal = LocalJournal(tmp_path)
    journal.close()
    with pytest.raises(JournalFailed, match="is closed"):
        journal.append(1, b"payload")
    with pytest.raises(JournalFailed, match="is closed"):
        journal.commit()


def test_the_wakeup_tells_that_durable_advanced(tmp_path: Path) -> None:
    with LocalJournal(tmp_path) as journal:
        assert not readable(journal.wakeup_fd, 0)
        sequence = journal.append(1, b"payload")
        journal.commit()
        assert readable(journal.wakeup_fd, DEADLINE_S)
        journal.drain_wakeup()
        assert journal.durable == sequence
        assert not readable(journal.wakeup_fd, 0)


def test_a_wakeup_never_drained_blocks_nobody(tmp_path: Path) -> None:
    with LocalJournal(tmp_path, NONE) as journal:
        for _ in range(200):
            for _ in range(400):
                journal._wakeup.fire()
        journal.append(1, b"payload")
        journal.sync(DEADLINE_S)
        journal.drain_wakeup()
        assert not readable(journal.wakeup_fd, 0)


@pytest.mark.parametrize("cache_bytes", [0, 50, 10**6])
def test_bodies_are_read_from_buffer_cache_and_disk(tmp_path: Path, cache_bytes: int) -> None:
    with LocalJournal(tmp_path, segment_bytes=400, cache_bytes=cache_bytes) as journal:
        bodies = {}
        for number in range(20):
            body = b"%d" % number * 30
            bodies[journal.append(1, b"payload", [b"first", body])] = body
        assert all(journal.read_body(sequence, 1) == body for sequence, body in bodies.items())
        journal.sync(DEADLINE_S)
        assert all(journal.read_body(sequence, 1) == body for sequence, body in bodies.items())
        assert all(record.body(1) == bodies[record.sequence] for record in journal.records())
        journal.append(1, b"payload", [b"more"])
        assert journal._cache.bytes <= cache_bytes + 4


def test_a_body_that_is_not_there_is_a_clear_error(tmp_path: Path) -> None:
    with LocalJournal(tmp_path, cache_bytes=0) as journal:
        journal.append(1, b"no body")
        journal.append(1, b"one body", [b"body"])
        for _ in range(2):
            with pytest.raises(KeyError, match="record 1 "):
                journal.read_body(1, 0)
            with pytest.raises(KeyError, match="record 77 "):
                journal.read_body(77, 0)
            for index in (1, -1):
                with pytest.raises(IndexError, match="record 2 has 1 bodies"):
                    journal.read_body(2, index)
            journal.sync(DEADLINE_S)
            journal.append(1, b"", [b"pushes the other body out of the cache"])


def test_a_record_with_many_bodies_reads_back(tmp_path: Path) -> None:
    bodies = [b"%d" % number for number in range(1000)]
    with LocalJournal(tmp_path, cache_bytes=0) as journal:
        sequence = journal.append(1, b"batch", bodies)
        journal.sync(DEADLINE_S)
        journal.append(1, b"", [b""])
        assert [journal.read_body(sequence, index) for index in range(1000)] == bodies


def test_full_segments_roll_and_link(tmp_path: Path) -> None:
    with LocalJournal(tmp_path, segment_bytes=300) as journal:
        for number in range(30):
            journal.append(1, b"payload %d" % number)
            if number % 7 == 0:
                journal.commit()
        journal.sync(DEADLINE_S)
        stat = journal.stat()
        assert stat.segments == len(list(tmp_path.glob("*.segment"))) > 5
        assert stat.bytes == sum(path.stat().st_size for path in tmp_path.glob("*.segment"))
        assert all(path.stat().st_size <= 300 for path in tmp_path.glob("*.segment"))
    with LocalJournal(tmp_path, segment_bytes=300) as journal:
        assert [record.payload for record in journal.records()] == [b"payload %d" % n for n in range(30)]


def test_a_record_larger_than_a_segment_gets_its_own(tmp_path: Path) -> None:
    with LocalJournal(tmp_path, segment_bytes=300) as journal:
        journal.append(1, b"small")
        large = journal.append(2, b"large", [b"x" * 5000])
        journal.append(3, b"small")
        journal.sync(DEADLINE_S)
        assert journal.stat().segments == 3
    with LocalJournal(tmp_path, segment_bytes=300) as journal:
        assert [record.kind for record in journal.records()] == [1, 2, 3]
        assert journal.read_body(large, 0) == b"x" * 5000


def test_iteration_starts_at_the_asked_sequence(tmp_path: Path) -> None:
    with LocalJournal(tmp_path, segment_bytes=300) as journal:
        for number in range(20):
            journal.append(number, b"payload")
        journal.sync(DEADLINE_S)
        for start in (1, 2, 7, 20, 21, 100):
            assert [record.sequence for record in journal.records(start)] == list(range(start, 21))


def test_iteration_ends_at_what_was_written_when_it_began(tmp_path: Path) -> None:
    with LocalJournal(tmp_path, segment_bytes=300) as journal:
        for _ in range(5):
            journal.append(1, b"payload")
        journal.sync(DEADLINE_S)
        records = journal.records()
        for _ in range(5):
            journal.append(1, b"payload")
        journal.sync(DEADLINE_S)
        assert [record.sequence for record in records] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("mode", ["always", "interval=5", "none"])
def test_stat_states_mode_and_loss_window(tmp_path: Path, mode: str) -> None:
    with LocalJournal(tmp_path, parse_durability_mode(mode)) as journal:
        journal.append(1, b"payload")
        journal.sync(DEADLINE_S)
        stat = journal.stat()
        assert (stat.mode, stat.directory) == (mode, str(tmp_path))
        assert (stat.first_sequence, stat.last_sequence) == (1, 1)
        assert (stat.durable_sequence, stat.synced_sequence) == (1, 1)
        assert len(stat.log_id) == 32
        assert stat.loss_window


def test_a_new_journal_makes_its_directory_private(tmp_path: Path) -> None:
    directory = tmp_path / "a" / "b"
    LocalJournal(directory).close()
    assert directory.stat().st_mode & 0o077 == 0


def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("not a directory")
    with pytest.raises(JournalFailed, match=str(path)):
        LocalJournal(path)
