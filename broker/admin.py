"""Sessions of people and scripts who only ask: they hold nothing, so the core and the journal never hear of them."""

from __future__ import annotations

from dataclasses import dataclass

from rollmq.codec import MAX_BODY_BYTES, MAX_ITEMS
from rollmq.messages import Bye, ByeAck, Heartbeat, HeartbeatAck, Hello, Message, Query, Refusal, RefusalCode, Welcome

FIRST_SESSION = 1 << 62
"""Far above the ids that the core gives to sessions."""

MAX_SESSIONS = 1000


@dataclass(frozen=True, slots=True)
class Asked:
    """A question that the server must answer itself."""

    query: Query


class AdminDesk:
    """The open admin sessions by routing id. The oldest makes room when there are too many.

    Args:
        heartbeat_s, dead_after_s: told to peers.
        broker_epoch: of this broker process.
    """

    def __init__(self, heartbeat_s: float, dead_after_s: float, broker_epoch: int) -> None:
        self._heartbeat_s = heartbeat_s
        self._dead_after_s = dead_after_s
        self._broker_epoch = broker_epoch
        self._routes: dict[int, bytes] = {}
        self._next = FIRST_SESSION

    def hello(self, route: bytes, message: Hello) -> Message:
        """Opens a session."""
        if not message.name:
            return Refusal(0, 0, RefusalCode.MALFORMED, "HELLO needs a name")
        self._next += 1
        self._routes[self._next] = route
        if len(self._routes) > MAX_SESSIONS:
            del self._routes[next(iter(self._routes))]
        return Welcome(self._next, self._broker_epoch, self._heartbeat_s, self._dead_after_s, MAX_BODY_BYTES, MAX_ITEMS)

    def owns(self, session: int, route: bytes) -> bool:
        """Whether this is one of its sessions, used by the peer that opened it."""
        return self._routes.get(session) == route

    def answer(self, session: int, message: Message) -> Message | Asked:
        """What to say to a message of one of its sessions."""
        match message:
            case Heartbeat():
                return HeartbeatAck(session)
            case Bye():
                del self._routes[session]
                return ByeAck(session)
            case Query():
                return Asked(message)
            case _:
                text = f"an admin may not send {type(message).__name__}"
                return Refusal(session, getattr(message, "request", 0), RefusalCode.NOT_ALLOWED, text)
