"""ZeroMQ under a worker's session: a DEALER to the broker, a SUB for its news, and a wake-up pipe.

All methods but `wake` belong to the session's thread. News bypass the session on purpose: a broker that still
broadcasts but no longer answers must count as silent.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable

import zmq

from rollmq.codec import MAX_FRAME_BYTES, decode
from rollmq.errors import ProtocolError
from rollmq.messages import News

log = logging.getLogger(__name__)

HEARTBEAT_INTERVAL_MS = 2_000
HEARTBEAT_TIMEOUT_MS = 10_000
RECONNECT_INTERVAL_MS = 100
MAX_MESSAGE_BYTES = MAX_FRAME_BYTES + 64 * 1024


class BrokerTransport:
    """Implements `rollmq.session.Transport`.

    Args:
        context: shared by all transports of this process.
        address: the broker's ROUTER.
        on_news: called on the session's thread for each broadcast.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, on_news: Callable[[News], None]) -> None:
        self._context = context
        self._on_news = on_news
        self._dealer = _connected(context, zmq.DEALER, address)
        self._news: zmq.Socket[bytes] | None = None
        self._wake_read, self._wake_write = os.pipe()
        self._wake_lock = threading.Lock()
        self._closed = False
        for descriptor in (self._wake_read, self._wake_write):
            os.set_blocking(descriptor, False)
        self._poller = zmq.Poller()
        self._poller.register(self._dealer, zmq.POLLIN)
        self._poller.register(self._wake_read, zmq.POLLIN)

    def subscribe(self, address: str) -> None:
        """Connects to the broadcast that WELCOME names; once per transport."""
        if self._news is not None or not address:
            return
        self._news = _connected(self._context, zmq.SUB, address)
        self._news.setsockopt(zmq.SUBSCRIBE, b"")
        self._poller.register(self._news, zmq.POLLIN)

    def send(self, frames: list[bytes]) -> bool:
        """Queues without blocking; False if the broker cannot take more now."""
        try:
            self._dealer.send_multipart(frames, flags=zmq.NOBLOCK, copy=True)
        except zmq.Again:
            return False
        return True

    def receive(self) -> list[bytes] | None:
        """The next message of the broker; hands on news first."""
        self._receive_news()
        try:
            return self._dealer.recv_multipart(flags=zmq.NOBLOCK, copy=True)
        except zmq.Again:
            return None

    def wait(self, timeout_s: float) -> None:
        """Until something came in, `wake` was called, or the timeout."""
        ready = dict(self._poller.poll(max(0, round(timeout_s * 1000))))
        if self._wake_read in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read, 4096)

    def wake(self) -> None:
        """Ends a `wait` now; from any thread, also after `close`."""
        # The lock keeps a late caller from writing to a descriptor that was closed and given to somebody else.
        with self._wake_lock:
            if not self._closed:
                with contextlib.suppress(BlockingIOError):
                    os.write(self._wake_write, b"w")

    def close(self) -> None:
        """Frees sockets and descriptors; what is queued is dropped."""
        with self._wake_lock:
            if self._closed:
                return
            self._closed = True
            os.close(self._wake_read)
            os.close(self._wake_write)
        self._dealer.close(linger=0)
        if self._news is not None:
            self._news.close(linger=0)

    def _receive_news(self) -> None:
        while self._news is not None:
            try:
                frames = self._news.recv_multipart(flags=zmq.NOBLOCK, copy=True)
            except zmq.Again:
                return
            try:
                message = decode(frames)
            except ProtocolError as error:
                log.warning("dropped a broadcast: %s", error)
                continue
            if isinstance(message, News):
                self._on_news(message)


def _connected(context: zmq.Context[zmq.Socket[bytes]], kind: int, address: str) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TTL, HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_INTERVAL_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.connect(address)
    return socket
