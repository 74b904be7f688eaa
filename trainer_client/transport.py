"""The trainer's ZeroMQ connection: one DEALER per session attempt, plus a pipe that wakes its thread.

Used by `rollmq.session.Session` only. DEALER, because answers come asynchronously and many requests may be open; one
socket per attempt, because frames queued for an old session must never reach a new broker. Nothing here knows what a
message means.
"""

from __future__ import annotations

import os
import re
import threading

import zmq

from rollmq.codec import MAX_FRAME_BYTES
from rollmq.errors import ConfigError

HEAD_ROOM_BYTES = 64 * 1024
_TCP = re.compile(r"tcp://(?:\[[0-9A-Fa-f:.%\w]+\]|[^\s:/\[\]]+):(\d{1,5})")


def check_address(address: str) -> str:
    """The address itself, if it can be connected to.

    Raises:
        ConfigError: it is not `tcp://host:port` or `ipc://path`.
    """
    match = _TCP.fullmatch(address)
    if match is not None and 0 < int(match.group(1)) < 65536:
        return address
    if address.startswith("ipc://") and len(address) > len("ipc://"):
        return address
    raise ConfigError(f"broker address {address!r} must be tcp://host:port with a port in 1..65535, or ipc://path")


class DealerTransport:
    """A connected DEALER; see `rollmq.session.Transport`.

    Args:
        context: the process's or client's ZeroMQ context; must outlive the transport.
        address: checked by `check_address`.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self._socket = context.socket(zmq.DEALER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.HEARTBEAT_IVL, 2000),
            (zmq.HEARTBEAT_TIMEOUT, 10000),
            (zmq.HEARTBEAT_TTL, 10000),
            (zmq.RECONNECT_IVL, 100),
            (zmq.MAXMSGSIZE, MAX_FRAME_BYTES + HEAD_ROOM_BYTES),
        ):
            self._socket.setsockopt(option, value)
        self._socket.connect(address)
        self._lock = threading.Lock()
        self._closed = False
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake_read, zmq.POLLIN)

    def send(self, frames: list[bytes]) -> bool:
        """Queues the frames; False if libzmq's queue is full."""
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self) -> list[bytes] | None:
        """The next message's frames, or None."""
        try:
            return self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def wait(self, timeout_s: float) -> None:
        """Until something can be received, `wake`, or the timeout."""
        ready = dict(self._poller.poll(max(0, int(timeout_s * 1000))))
        if self._wake_read in ready:
            os.read(self._wake_read, 4096)

    def wake(self) -> None:
        """Ends a `wait`; callable from any thread, also after `close`."""
        # The lock keeps a late wake from writing into a descriptor number that was closed and given to someone else.
        with self._lock:
            if self._closed:
                return
            try:
                os.write(self._wake_write, b"\0")
            except BlockingIOError:
                return  # The pipe is full of wakes already.

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def close(self) -> None:
        """Closes the socket, dropping what is queued, and the pipe."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            os.close(self._wake_write)
        self._socket.close(0)
        os.close(self._wake_read)
