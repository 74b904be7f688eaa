"""A thread that keeps one session with the broker alive, whatever the rest of the process does.

It drives `rollmq.link` over a transport that the caller makes (a ZeroMQ DEALER in practice; this room knows no
sockets). Since the thread is its own, heartbeats go on while an event loop or a training step is busy.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from rollmq.codec import decode, encode
from rollmq.errors import DeadlineExceeded, NotConnected, ProtocolError, RollmqError
from rollmq.link import CloseTransport, Instruction, Link, LinkState, Lost, Opened, OpenTransport, Received, Send
from rollmq.messages import Hello, Message, Welcome

log = logging.getLogger(__name__)

MAX_IDLE_S = 1.0
MAX_RECEIVED_PER_TURN = 256


class Transport(Protocol):
    """A connection to the broker. All methods but `wake` are called by the session thread only."""

    def send(self, frames: list[bytes]) -> bool:
        """Queues the frames without blocking; False if the peer cannot take more."""

    def receive(self) -> list[bytes] | None:
        """The next message's frames, or None if there is none now."""

    def wait(self, timeout_s: float) -> None:
        """Returns when something can be received, `wake` was called, or after the timeout."""

    def wake(self) -> None:
        """Ends a `wait` now; callable from any thread."""

    def close(self) -> None:
        """Frees the connection at once, dropping what is queued."""


class SessionHandler(Protocol):
    """Who owns a session. All methods run on the session thread and must not block."""

    def hello(self) -> Hello:
        """The greeting for a new attempt, with what is held now."""

    def progress(self) -> tuple[int, int]:
        """(progress counter, running episodes) for the heartbeat."""

    def opened(self, welcome: Welcome) -> None:
        """A session began: send again whatever was not answered."""

    def received(self, message: Message) -> None:
        """A message came in."""

    def lost(self, reason: str, error: RollmqError | None) -> None:
        """The session ended; with an error it will not come back."""


class Session:
    """One session, reopened until closed.

    Args:
        open_transport: makes a fresh, connected transport.
        handler: who is told.
        name: of the thread, for logs.
    """

    def __init__(self, open_transport: Callable[[], Transport], handler: SessionHandler, name: str) -> None:
        self._open_transport = open_transport
        self._handler = handler
        self._link = Link(handler.hello, handler.progress)
        self._transport: Transport | None = None
        self._outgoing: deque[Message] = deque()
        self._closing = threading.Event()
        self._open = threading.Event()
        self._lock = threading.Lock()
        self.error: RollmqError | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread; returns at once."""
        self._thread.start()

    @property
    def id(self) -> int:
        """The session id to put into messages; 0 while there is none."""
        return self._link.session

    def wait_open(self, timeout_s: float) -> None:
        """Waits until a session is open.

        Raises:
            DeadlineExceeded: none within the timeout.
            RollmqError: the broker refused for good.
        """
        deadline = time.monotonic() + timeout_s
        while not self._open.wait(min(0.05, timeout_s)):
            if self.error is not None:
                raise self.error
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(
                    f"no session with the broker within {timeout_s:g} s; is it running at that address?"
                )

    def send(self, message: Message) -> None:
        """Queues a message of the current session; callable from any thread.

        Raises:
            NotConnected: there is no session, or the message is of an older one.
        """
        session = getattr(message, "session", 0)
        with self._lock:
            if self._link.state is not LinkState.OPEN or session != self._link.session:
                raise NotConnected(
                    f"no session to send {type(message).__name__} in; it is sent again once there is one"
                )
            self._outgoing.append(message)
        self.wake()

    def wake(self) -> None:
        """Makes the thread look at its queues now."""
        transport = self._transport
        if transport is not None:
            transport.wake()

    def close(self, timeout_s: float = 3.0) -> None:
        """Says goodbye and ends the thread; idempotent."""
        self._closing.set()
        self.wake()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    # --- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._link.state is not LinkState.CLOSED:
                self._turn()
        except Exception as error:
            log.exception("the session thread ended")
            fatal = RollmqError(f"the session thread ended: {type(error).__name__}: {error}")
            self._forget_session(fatal)
            self._handler.lost(str(fatal), fatal)
        finally:
            self._drop_transport()
            self._open.clear()

    def _turn(self) -> None:
        now = time.monotonic()
        if self._closing.is_set() and self._link.state is not LinkState.CLOSING:
            self._flush()
            self._carry_out(self._link.close(now))
        self._carry_out(self._link.poll(now))
        self._flush()
        self._wait()
        self._receive_some()

    def _wait(self) -> None:
        if self._link.state is LinkState.CLOSED:
            return
        timeout_s = max(0.0, min(MAX_IDLE_S, self._link.deadline() - time.monotonic()))
        if self._transport is None:
            self._closing.wait(timeout_s)
        elif not self._outgoing:
            self._transport.wait(timeout_s)

    def _receive_some(self) -> None:
        for _ in range(MAX_RECEIVED_PER_TURN):
            frames = self._transport.receive() if self._transport is not None else None
            if frames is None:
                return
            try:
                message = decode(frames)
            except ProtocolError as error:
                log.error("dropped a message from the broker: %s", error)
                continue
            self._carry_out(self._link.receive(message, time.monotonic()))

    def _flush(self) -> None:
        while self._outgoing and self._transport is not None and self._link.state is LinkState.OPEN:
            message = self._outgoing[0]
            if not self._transport.send(encode(message)):
                self._transport.wait(0.01)
                return
            self._outgoing.popleft()

    def _carry_out(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case OpenTransport():
                    self._drop_transport()
                    self._transport = self._open_transport()
                case CloseTransport():
                    self._drop_transport()
                case Send(message):
                    if self._transport is not None:
                        self._transport.send(encode(message))
                case Opened(welcome):
                    self._open.set()
                    self._handler.opened(welcome)
                case Lost(reason, error):
                    self._forget_session(error)
                    self._handler.lost(reason, error)
                case Received(message):
                    self._handler.received(message)

    def _forget_session(self, error: RollmqError | None) -> None:
        self.error = error
        self._open.clear()
        with self._lock:
            self._outgoing.clear()

    def _drop_transport(self) -> None:
        if self._transport is not None:
            self._transport.close()
            self._transport = None
