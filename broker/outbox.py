"""What waits to be sent to each session: until its journal record is durable, and until the peer can take it.

Sends never block. Bodies are read from the journal only when a message leaves, so a waiting message costs little;
what a peer leaves unread is bounded, and a peer beyond the bound loses its session.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any

from broker.core.events import SendTo
from broker.core.model import BodyRef
from rollmq.codec import encode
from rollmq.messages import HeartbeatAck

MAX_WAITING_MESSAGES = 20_000
MAX_WAITING_BYTES = 512 * 1024 * 1024


class SendResult(Enum):
    """What became of a try to send."""

    SENT = auto()
    FULL = auto()
    GONE = auto()


Sender = Callable[[bytes, list[bytes]], SendResult]
"""(routing id, frames) -> what became of it; must not block."""


@dataclass(slots=True)
class Peer:
    """One session's way out."""

    route: bytes
    waiting: deque[SendTo] = field(default_factory=deque)
    waiting_bytes: int = 0
    closing: bool = False


class Outbox:
    """The outgoing messages of all sessions.

    Args:
        send: hands frames to the socket.
        read_body: reads a body from the journal.
    """

    def __init__(self, send: Sender, read_body: Callable[[int, int], bytes]) -> None:
        self._send = send
        self._read_body = read_body
        self._peers: dict[int, Peer] = {}
        self._active: dict[int, None] = {}

    def open(self, session: int, route: bytes) -> None:
        """A session's messages go to this routing id from now on."""
        self._peers[session] = Peer(route)

    def route(self, session: int) -> bytes | None:
        """The routing id a session is bound to, or None if it is not open."""
        peer = self._peers.get(session)
        return None if peer is None or peer.closing else peer.route

    def close(self, session: int) -> None:
        """No more messages for this session; what waits is still sent."""
        peer = self._peers.get(session)
        if peer is None:
            return
        peer.closing = True
        if not peer.waiting:
            del self._peers[session]

    def forget(self, session: int) -> None:
        """Drops a session with all that waits for it."""
        self._peers.pop(session, None)
        self._active.pop(session, None)

    def put(self, message: SendTo) -> bool:
        """Queues a message; False if the peer leaves too much unread."""
        peer = self._peers.get(message.session)
        if peer is None:
            return True
        peer.waiting.append(message)
        peer.waiting_bytes += sum(ref.length for ref in message.bodies)
        self._active[message.session] = None
        return len(peer.waiting) <= MAX_WAITING_MESSAGES and peer.waiting_bytes <= MAX_WAITING_BYTES

    def put_beat(self, message: SendTo, durable: int) -> bool:
        """A heartbeat's answer overtakes what waits for the disk, so that a slow disk is not taken for a dead
        broker."""
        peer = self._peers.get(message.session)
        if peer is None or message.requires > durable or not isinstance(message.message, HeartbeatAck):
            return self.put(message)
        return self._send(peer.route, encode(message.message)) is not SendResult.GONE

    def flush(self, durable: int) -> list[int]:
        """Sends what is durable; returns sessions whose peers are gone."""
        gone: list[int] = []
        for session in list(self._active):
            if not self._flush_peer(session, durable):
                gone.append(session)
        return gone

    def _flush_peer(self, session: int, durable: int) -> bool:
        peer = self._peers[session]
        while peer.waiting and peer.waiting[0].requires <= durable:
            result = self._send(peer.route, self._frames(peer.waiting[0]))
            if result is SendResult.FULL:
                return True
            if result is SendResult.GONE:
                self.forget(session)
                return False
            peer.waiting_bytes -= sum(ref.length for ref in peer.waiting.popleft().bodies)
        if not peer.waiting:
            self._active.pop(session, None)
            if peer.closing:
                del self._peers[session]
        return True

    def _frames(self, item: SendTo) -> list[bytes]:
        message: Any = item.message
        if item.bodies:
            message = replace(message, bodies=tuple(self._body(ref) for ref in item.bodies))
        return encode(message)

    def _body(self, ref: BodyRef) -> bytes:
        return self._read_body(ref.sequence, ref.position)

    def waiting(self) -> int:
        """Messages that wait, over all sessions."""
        return sum(len(peer.waiting) for peer in self._peers.values())
