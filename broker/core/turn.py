"""One turn of the machine: the event at hand, and the effects and decisions it has led to so far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from broker.core.events import Decision, Effect, Event, SendTo
from broker.core.model import BodyRef, BrokerState
from rollmq.messages import DropItem, EndedItem, Message

MAX_PIECE_BYTES = 8 * 1024 * 1024
_T = TypeVar("_T")


@dataclass(slots=True)
class Turn:
    """Collects what one event leads to.

    Attributes:
        sequence: the journal sequence of this event's record; effects that show its outcome require it.
        drops: leases to take back, by session; sent once at the end of the turn.
        endings: tasks that ended without a trajectory, by trainer session; sent once at the end of the turn.
        dispatch: policies whose queue, budget or workers changed.
        deliver: trainers who may have something to receive.
    """

    state: BrokerState
    event: Event
    sequence: int
    effects: list[Effect] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    drops: dict[int, list[DropItem]] = field(default_factory=dict)
    endings: dict[int, list[EndedItem]] = field(default_factory=dict)
    dispatch: set[str] = field(default_factory=set)
    deliver: set[str] = field(default_factory=set)

    @property
    def now_ns(self) -> int:
        """The broker's clock at this event."""
        return self.event.now_ns

    def send(self, session: int, message: Message, bodies: tuple[BodyRef, ...] = ()) -> None:
        """A message that may leave once this event is durable."""
        self.effects.append(SendTo(session, message, self.sequence, bodies))

    def answer(self, message: Any) -> None:
        """A message for the session that this event came from."""
        self.send(message.session, message)

    def decide(self, subject: int, state_index: int, detail: str) -> None:
        """Notes a decision for the journal."""
        self.decisions.append((subject, state_index, detail))

    def body_refs(self) -> list[BodyRef]:
        """Where the bodies of this event's message are in the journal."""
        return [BodyRef(self.sequence, index, length) for index, length in enumerate(self.event.lengths)]


def chunks(items: list[_T], size: int) -> list[tuple[_T, ...]]:
    """The items in tuples of at most `size`, so that no head is over its limit."""
    return [tuple(items[start : start + size]) for start in range(0, len(items), size)]


def split_by_bytes(entries: list[_T], length: Callable[[_T], int], most: int) -> list[list[_T]]:
    """Pieces of at most `most` entries and 8 MiB of bodies (or one larger body), so that no frame is huge."""
    pieces: list[list[_T]] = []
    size = 0
    for entry in entries:
        if not pieces or len(pieces[-1]) == most or size + length(entry) > MAX_PIECE_BYTES:
            pieces.append([])
            size = 0
        pieces[-1].append(entry)
        size += length(entry)
    return pieces
