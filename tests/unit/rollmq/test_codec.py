"""Frames to messages and back; anything that is not exactly one legal message is a ProtocolError, nothing else."""

from __future__ import annotations

import contextlib
import struct
import zlib
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmq import codec, messages
from rollmq.codec import decode, encode, pack_record, unpack_record
from rollmq.errors import ProtocolError
from rollmq.messages import (
    Deliver,
    DeliverItem,
    Grant,
    Heartbeat,
    Hello,
    Message,
    OnStale,
    PolicyNews,
    PolicySettings,
    Reason,
    Role,
    Submit,
    SubmitItem,
    Task,
    TaskEpoch,
    TaskItem,
)

EXAMPLES: list[Message] = [
    Hello(
        Role.WORKER,
        "w",
        b"n" * 16,
        settings=PolicySettings(4, 1, None, OnStale.RETRY),
        held=tuple(TaskEpoch(i, i) for i in range(300)),
    ),
    Heartbeat(3, 4, 5),
    Submit(1, 2, (SubmitItem("k1"), SubmitItem("k2", group="g", member=1, size=2)), (b"a", b"")),
    Task(1, (PolicyNews("p", 0, 0, "", 1),), (TaskItem(1, 2, 1, "p", 3.5, 1, 0),), (b"x" * 100_000,)),
    Deliver(1, 2, (DeliverItem(1, 2, 1, 0, 1, 0, 3, False),), (b"body",)),
    messages.Nack(1, (messages.NackItem(1, 2, Reason.DRAINED, "why"),)),
    messages.Query(1, 2, "tasks", messages.TaskState.DEAD),
    messages.Report(1, 2, (b"{}",)),
]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: type(m).__name__)
def test_a_message_survives_the_wire(message: Message) -> None:
    assert decode(encode(message)) == message


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda m: type(m).__name__)
def test_a_message_survives_the_journal_without_its_bodies(message: Any) -> None:
    restored: Any = unpack_record(pack_record(message))
    assert type(restored) is type(message)
    for name in ("session", "request", "items"):
        assert getattr(restored, name, None) == getattr(message, name, None)


def test_control_messages_have_one_frame_and_messages_with_bodies_two() -> None:
    assert len(encode(Grant(1, 2, 3))) == 1
    assert len(encode(EXAMPLES[2])) == 2


def head(kind: int, content: Any, magic: bytes = b"RQ", version: int = 1) -> bytes:
    packed = content if isinstance(content, bytes) else msgpack.packb(content)
    return struct.pack("<2sBB", magic, version, kind) + packed


HEARTBEAT = {"session": 1, "progress": 2, "running": 3}


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"RQ"],
        [head(5, HEARTBEAT)] * 3,
        [head(5, HEARTBEAT), b"unexpected"],
        [head(5, HEARTBEAT, magic=b"GE")],
        [head(5, HEARTBEAT, version=9)],
        [head(250, HEARTBEAT)],
        [head(5, [1, 2])],
        [head(5, {"progress": 1})],
        [head(5, {**HEARTBEAT, "extra": 1})],
        [head(5, {**HEARTBEAT, "session": True})],
        [head(5, {**HEARTBEAT, "session": -1})],
        [head(5, {**HEARTBEAT, "session": 2**63})],
        [head(5, {**HEARTBEAT, "session": "1"})],
        [head(5, {**HEARTBEAT, "session": None})],
        [head(5, {**HEARTBEAT, "session": 1.5})],
        [head(5, msgpack.packb(HEARTBEAT) + b"\x00")],
        [head(5, b"\x82\xa7session\x01\xa7session\x02")],
        [head(5, msgpack.packb({1: 2}))],
        [head(5, msgpack.packb(msgpack.ExtType(1, b"x")))],
        [head(5, b"\x81\xa7session\xc7\x01\x01x")],
        [head(5, b"\x81\xa7session\xa1\xff")],
        [head(5, b"\x91" * 5000)],
        [head(5, {"session": 1, "progress": "x" * 5000})],
        [head(20, {"session": 1, "request": 2})],
    ],
)
def test_what_is_no_message_is_refused(frames: list[bytes]) -> None:
    with pytest.raises(ProtocolError):
        decode(frames)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, True, "1"])
def test_numbers_that_are_no_durations_are_refused(value: Any) -> None:
    message = {"session": 1, "request": 2, "code": "busy", "message": "", "retry_after_s": value}
    with pytest.raises(ProtocolError, match="retry_after_s"):
        decode([head(4, message)])


def test_an_unknown_reason_code_is_refused() -> None:
    with pytest.raises(ProtocolError, match="code"):
        decode([head(4, {"session": 1, "request": 2, "code": "because"})])


def test_a_body_with_a_flipped_bit_is_refused() -> None:
    frames = encode(EXAMPLES[2])
    body = bytearray(frames[1])
    body[-1] ^= 1
    with pytest.raises(ProtocolError, match="checksum"):
        decode([frames[0], bytes(body)])


def test_a_body_whose_items_overrun_it_is_refused() -> None:
    body = struct.pack("<II", 10, 2**31) + b"x" * 10
    frame = head(20, {"session": 1, "request": 1, "body_length": len(body), "body_crc": zlib.crc32(body)})
    with pytest.raises(ProtocolError):
        decode([frame, body])


def test_a_head_over_its_limit_cannot_be_sent() -> None:
    with pytest.raises(ProtocolError, match="fewer records"):
        encode(messages.Cancel(1, 1, tuple(range(2**40, 2**40 + 1000))))


def test_message_types_are_unique() -> None:
    with pytest.raises(TypeError, match="taken"):
        codec.register(type("Again", (messages.Grant,), {}))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.binary(max_size=200), max_size=3))
def test_random_bytes_never_raise_anything_else(frames: list[bytes]) -> None:
    with contextlib.suppress(ProtocolError):
        decode(frames)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([1, 2, 4, 5, 20, 40, 42, 60]),
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**64 - 1)
        | st.floats()
        | st.text(max_size=5)
        | st.binary(max_size=5),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
        max_leaves=12,
    ),
    st.binary(max_size=64),
)
def test_random_heads_never_raise_anything_else(kind: int, content: Any, body: bytes) -> None:
    for frames in ([head(kind, content)], [head(kind, content), body]):
        with contextlib.suppress(ProtocolError):
            decode(frames)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(EXAMPLES), st.integers(0, 10_000), st.integers(1, 255))
def test_a_changed_byte_is_refused_or_still_a_legal_message(message: Message, position: int, mask: int) -> None:
    frames = [bytearray(frame) for frame in encode(message)]
    frame = frames[position % len(frames)]
    frame[position % len(frame)] ^= mask
    with contextlib.suppress(ProtocolError):
        assert isinstance(decode([bytes(f) for f in frames]), Message)
