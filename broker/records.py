"""Events as journal records and back: the input, with what was decided on it.

A record's payload is a msgpack array `[clock ns, message, digests, decisions]`; the bodies of the message are the
record's bodies. Recovery and `rollmq replay decisions` feed the inputs to the same machine and compare the decisions.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import msgpack

from broker.core.events import Decision, Event
from broker.journal.interface import Record
from rollmq.codec import pack_record, unpack_record
from rollmq.errors import JournalDamaged, ProtocolError
from rollmq.messages import Message, Submit

EVENT_KIND = 1
"""The only record kind of the broker; the journal's own kinds are not shown to it."""


@dataclass(frozen=True, slots=True)
class RecordedEvent:
    """One event of the journal with its sequence and recorded decisions."""

    sequence: int
    event: Event
    decisions: list[Decision]


def make_event(now_ns: int, message: Message) -> Event:
    """The event of a message that just came in."""
    bodies: tuple[bytes, ...] = getattr(message, "bodies", ())
    digests = tuple(map(body_digest, bodies)) if isinstance(message, Submit) else ()
    return Event(now_ns, message, digests, tuple(map(len, bodies)))


def body_digest(body: bytes) -> int:
    """64 bits that tell one body from another, for idempotency keys."""
    return int.from_bytes(hashlib.blake2b(body, digest_size=8).digest(), "big")


def encode_event(event: Event, decisions: list[Decision]) -> bytes:
    """The payload of an event's record."""
    content = [event.now_ns, pack_record(event.message), event.digests, decisions]
    packed: bytes = msgpack.packb(content, use_bin_type=True)
    return packed


def decode_event(record: Record) -> RecordedEvent:
    """The inverse of `encode_event`; bodies stay in the journal.

    Raises:
        JournalDamaged: the payload is no event (its checksum is right, so another program wrote it).
    """
    try:
        now_ns, message, digests, decisions = _unpack(record.payload)
        event = Event(int(now_ns), unpack_record(message), tuple(digests), tuple(record.body_lengths))
    except (ValueError, TypeError, ProtocolError, msgpack.exceptions.UnpackException) as error:
        raise JournalDamaged(
            f"journal record {record.sequence} is not an event of this rollmq: {error}; "
            "was it written by another version?"
        ) from error
    return RecordedEvent(record.sequence, event, [(int(s), int(i), str(d)) for s, i, d in decisions])


def _unpack(payload: bytes) -> Any:
    return msgpack.unpackb(payload, raw=False, strict_map_key=True, use_list=True)
