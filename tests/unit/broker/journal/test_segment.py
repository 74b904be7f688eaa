from __future__ import annotations

import os
import struct
from pathlib import Path
from zlib import crc32

import pytest

from broker.journal.files import SYSTEM_FILES
from broker.journal.segment import (
    MalformedSegment,
    SegmentHeader,
    UnknownFormat,
    create_segment,
    decode_segment_header,
    list_segment_files,
    read_segment_header,
    segment_name,
    sequence_of_name,
)

HEADER = SegmentHeader(log_id=b"i" * 16, number=3, first_sequence=42, created_ns=9, previous_crc=7)
GOLDEN = (
    "524d515345474d0a01000000400000006969696969696969696969696969696903000000000000002a00000000000000"
    "090000000000000007000000b419692f"
)


def test_a_header_decodes_to_what_was_encoded() -> None:
    assert decode_segment_header(HEADER.encode()) == HEADER


def test_every_flipped_bit_of_a_header_is_noticed() -> None:
    data = HEADER.encode()
    for position in range(len(data)):
        for bit in range(8):
            changed = bytearray(data)
            changed[position] ^= 1 << bit
            with pytest.raises(MalformedSegment):
                decode_segment_header(bytes(changed))


def test_every_cut_header_is_noticed() -> None:
    data = HEADER.encode()
    for size in range(len(data)):
        with pytest.raises(MalformedSegment):
            decode_segment_header(data[:size])


def test_an_intact_header_of_a_newer_format_is_a_clear_refusal(tmp_path: Path) -> None:
    newer = struct.pack("<8sII", b"RMQSEGM\n", 2, 96) + bytes(76)
    path = tmp_path / segment_name(1)
    path.write_bytes(newer + struct.pack("<I", crc32(newer)))
    with pytest.raises(UnknownFormat, match=rf"{path.name}.*format 2.*up to 1"):
        read_segment_header(path)


def test_names_sort_by_first_sequence_and_other_names_are_no_segments() -> None:
    assert sorted([segment_name(10), segment_name(9)]) == [segment_name(9), segment_name(10)]
    assert sequence_of_name(segment_name(2**64 - 1)) == 2**64 - 1
    assert sequence_of_name("1.segment") is None
    assert sequence_of_name(segment_name(1) + ".torn") is None


def test_a_created_segment_has_its_header_and_no_temporary_file_is_left(tmp_path: Path) -> None:
    os.close(create_segment(tmp_path, HEADER, SYSTEM_FILES))
    assert list_segment_files(tmp_path) == [tmp_path / segment_name(42)]
    assert read_segment_header(tmp_path / segment_name(42)) == HEADER
    assert len(list(tmp_path.iterdir())) == 1


def test_an_existing_segment_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / segment_name(42)
    path.write_bytes(b"something")
    with pytest.raises(FileExistsError):
        create_segment(tmp_path, HEADER, SYSTEM_FILES)
    assert path.read_bytes() == b"something"


def test_the_bytes_of_format_1_do_not_change() -> None:
    assert HEADER.encode().hex() == GOLDEN
