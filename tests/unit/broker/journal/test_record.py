from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.journal.record import (
    ALIGNMENT,
    FIXED_SIZE,
    MAX_BODIES,
    MalformedRecord,
    RecordHeader,
    chain_seed,
    decode_header,
    encode_record,
)

SEED = chain_seed(b"0123456789abcdef")
GOLDEN = (
    "524d51725800000005000000000000000100000000000000020000000200000003000000000000000700000005576648"
    "0400000075daed5d03000000f1866c7a03000000668aca117061796c6f61640000006f6e6574776f"
)


def encode(payload: bytes = b"payload", bodies: tuple[bytes, ...] = (), **changes: int) -> bytes:
    fields = {"sequence": 5, "time_ns": 1, "kind": 2, "flags": 0, "durable": 3, "previous_crc": 4, "seed": SEED}
    return encode_record(payload=payload, bodies=bodies, **(fields | changes)).head + b"".join(bodies)


def decode(data: bytes, seed: int = SEED) -> RecordHeader:
    return decode_header(data, 0, seed, len(data))


@settings(max_examples=200, deadline=None)
@given(
    sequence=st.integers(1, 2**64 - 1),
    time_ns=st.integers(0, 2**64 - 1),
    kind=st.integers(0, 2**16 - 1),
    durable=st.integers(0, 2**64 - 1),
    previous_crc=st.integers(0, 2**32 - 1),
    payload=st.binary(max_size=200),
    bodies=st.lists(st.binary(max_size=100), max_size=5).map(tuple),
)
def test_a_record_decodes_to_what_was_encoded(
    sequence: int,
    time_ns: int,
    kind: int,
    durable: int,
    previous_crc: int,
    payload: bytes,
    bodies: tuple[bytes, ...],
) -> None:
    data = encode(
        payload,
        bodies,
        sequence=sequence,
        time_ns=time_ns,
        kind=kind,
        durable=durable,
        previous_crc=previous_crc,
    )
    header = decode(data)
    assert len(data) == header.length
    assert header.length % ALIGNMENT == 0
    assert (header.sequence, header.time_ns, header.kind) == (sequence, time_ns, kind)
    assert (header.durable, header.previous_crc) == (durable, previous_crc)
    assert data[header.payload_offset : header.payload_offset + header.payload_length] == payload
    for index, body in enumerate(bodies):
        start = header.body_offset(index)
        assert data[start : start + header.body_lengths[index]] == body


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=200))
def test_random_bytes_are_no_record(data: bytes) -> None:
    with pytest.raises(MalformedRecord):
        decode(data)


@settings(max_examples=200, deadline=None)
@given(data=st.binary(min_size=4, max_size=200))
def test_random_bytes_behind_the_magic_are_no_record(data: bytes) -> None:
    with pytest.raises(MalformedRecord):
        decode(encode()[:4] + data)


def test_every_flipped_bit_of_header_and_body_table_is_noticed() -> None:
    data = encode(b"payload", (b"one", b"two"))
    for position in range(FIXED_SIZE + 16):
        for bit in range(8):
            changed = bytearray(data)
            changed[position] ^= 1 << bit
            with pytest.raises(MalformedRecord):
                decode(bytes(changed))


def test_a_record_of_another_log_is_refused() -> None:
    with pytest.raises(MalformedRecord, match="CRC"):
        decode(encode(), seed=chain_seed(b"another log's id"))


@pytest.mark.parametrize("missing", [1, 8, 20, 60])
def test_a_record_longer_than_the_segment_is_refused(missing: int) -> None:
    data = encode(b"p" * 50)
    with pytest.raises(MalformedRecord):
        decode(data[:-missing])


def test_a_body_table_that_does_not_fit_is_refused_before_it_is_read() -> None:
    data = bytearray(encode())
    data[28:32] = (2**32 - 1).to_bytes(4, "little")
    with pytest.raises(MalformedRecord, match="4294967295 bodies"):
        decode(bytes(data))


def test_an_intact_record_over_the_limit_is_refused() -> None:
    data = encode(b"p" * 100)
    with pytest.raises(MalformedRecord, match="over the limit"):
        decode_header(data, 0, SEED, len(data), max_record_bytes=100)


def test_encoding_over_a_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="kind 65536"):
        encode(kind=65536)
    with pytest.raises(ValueError, match="over the limit of 64 bytes"):
        encode(b"p" * 100, max_record_bytes=64)
    with pytest.raises(ValueError, match="bodies"):
        encode(bodies=(b"",) * (MAX_BODIES + 1))


def test_the_most_bodies_a_record_may_have_round_trip() -> None:
    header = decode(encode(bodies=(b"",) * MAX_BODIES))
    assert len(header.body_lengths) == MAX_BODIES


def test_the_bytes_of_format_1_do_not_change() -> None:
    """Golden bytes: a log written by any release of format 1 must stay readable."""
    assert encode(b"payload", (b"one", b"two")).hex() == GOLDEN
    header = decode(bytes.fromhex(GOLDEN))
    assert (header.sequence, header.kind, header.durable, header.body_lengths) == (5, 2, 3, (3, 3))
