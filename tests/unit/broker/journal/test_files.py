from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from broker.journal.files import FileOperations


def write_and_read_back(path: Path, files: FileOperations, pieces: list[bytes | memoryview]) -> bytes:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        files.write_all(descriptor, pieces)
    finally:
        os.close(descriptor)
    return path.read_bytes()


def test_more_pieces_than_one_call_takes_are_written_in_order(tmp_path: Path) -> None:
    pieces: list[bytes | memoryview] = [str(number).encode() for number in range(5000)]
    assert write_and_read_back(tmp_path / "file", FileOperations(), pieces) == b"".join(pieces)


@pytest.mark.parametrize("most", [1, 2, 3, 7])
def test_partial_writes_are_continued_where_they_stopped(tmp_path: Path, most: int) -> None:
    def write_little(descriptor: int, pieces: Sequence[bytes | memoryview]) -> int:
        return os.write(descriptor, b"".join(pieces)[:most])

    pieces: list[bytes | memoryview] = [b"ab", b"", b"cdef", memoryview(b"ghi"), b"j"]
    assert write_and_read_back(tmp_path / "file", FileOperations(writev=write_little), pieces) == b"abcdefghij"


def test_a_write_that_takes_nothing_is_an_error_and_no_endless_loop(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="3 bytes are not written"):
        write_and_read_back(tmp_path / "file", FileOperations(writev=lambda descriptor, pieces: 0), [b"abc"])
