"""The broker's ZeroMQ sockets: one ROUTER for sessions, one PUB for news. Never blocks, never shared between threads.

ROUTER, since it gives every peer its own queue and tells a vanished peer from a full one (ROUTER_MANDATORY); libzmq
picks the routing ids, so two peers can never claim the same one. PUB for news only, since it drops silently.
"""

from __future__ import annotations

import logging

import zmq

from broker.outbox import SendResult
from rollmq.codec import MAX_FRAME_BYTES
from rollmq.errors import ConfigError

log = logging.getLogger(__name__)

HEARTBEAT_INTERVAL_MS = 2_000
HEARTBEAT_TIMEOUT_MS = 10_000
HANDSHAKE_TIMEOUT_MS = 5_000
SEND_QUEUE_MESSAGES = 1_000
BACKLOG = 1_024


class BrokerSockets:
    """Both sockets, bound.

    Raises:
        ConfigError: an address is in use or cannot be bound; names it.
    """

    def __init__(self, bind: str, news_bind: str) -> None:
        self._context = zmq.Context()
        self.router = self._socket(zmq.ROUTER)
        self.router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._news = self._socket(zmq.PUB)
        try:
            self.address = self._bind(self.router, bind)
            self.news_address = self._bind(self._news, news_bind)
        except ConfigError:
            self.close()
            raise

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, SEND_QUEUE_MESSAGES)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES + 65_536)
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TTL, HEARTBEAT_TIMEOUT_MS)
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_TIMEOUT_MS)
        socket.setsockopt(zmq.BACKLOG, BACKLOG)
        return socket

    @staticmethod
    def _bind(socket: zmq.Socket[bytes], address: str) -> str:
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"cannot bind {address}: {error.strerror}; is another broker running there? choose another address"
            ) from error
        bound = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        return bound.rstrip("\0")

    def receive(self) -> list[bytes] | None:
        """[routing id, frames...] of the next message, or None."""
        try:
            return self.router.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def send(self, route: bytes, frames: list[bytes]) -> SendResult:
        """Hands a message to a peer's queue."""
        try:
            self.router.send_multipart([route, *frames], zmq.NOBLOCK)
        except zmq.Again:
            return SendResult.FULL
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return SendResult.GONE
        return SendResult.SENT

    def broadcast(self, frames: list[bytes]) -> None:
        """News to every subscriber that is connected now."""
        self._news.send_multipart(frames, zmq.NOBLOCK)

    def touch(self) -> None:
        """Lets libzmq clean up after vanished peers; an untouched socket leaks them."""
        self.router.getsockopt(zmq.EVENTS)
        self._news.getsockopt(zmq.EVENTS)

    def close(self) -> None:
        """Frees both at once; what is not sent is recoverable from the journal."""
        self.router.close(0)
        self._news.close(0)
        self._context.term()
