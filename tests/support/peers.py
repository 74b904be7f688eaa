"""A scripted peer over real ZeroMQ, for tests of a real broker."""

from __future__ import annotations

import os
import time
from types import TracebackType
from typing import Any

import zmq

from rollmq.codec import decode, encode
from rollmq.messages import (
    Grant,
    HeartbeatAck,
    Hello,
    Message,
    OnStale,
    PolicySettings,
    Role,
    Submit,
    SubmitItem,
    Submitted,
    Welcome,
)

TIMEOUT_S = 20.0


class ScriptedPeer:
    """One DEALER that says what a test tells it to say."""

    def __init__(self, address: str, name: str = "peer") -> None:
        self.name = name
        self.session = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(address)

    def __enter__(self) -> ScriptedPeer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close(0)
        self._context.term()

    def send_raw(self, frames: list[bytes]) -> None:
        """Any bytes at all."""
        self._socket.send_multipart(frames)

    def send(self, message: Message) -> None:
        """A message."""
        self.send_raw(encode(message))

    def receive(self, kind: type[Message] | None = None, timeout_s: float = TIMEOUT_S) -> Any:
        """The next message (of a kind; others are skipped, heartbeat answers always)."""
        deadline = time.monotonic() + timeout_s
        while True:
            left_ms = int((deadline - time.monotonic()) * 1000)
            if left_ms <= 0 or not self._socket.poll(left_ms):
                raise TimeoutError(f"{self.name} got no {kind.__name__ if kind else 'message'} within {timeout_s:g} s")
            message = decode(self._socket.recv_multipart())
            if kind is None and isinstance(message, HeartbeatAck):
                continue
            if kind is None or isinstance(message, kind):
                return message

    def hello_trainer(self, *, batch: int = 100, eta: int = 0, **more: Any) -> Welcome:
        """Opens a trainer's session with credit."""
        settings = PolicySettings(batch, eta, None, OnStale.RETRY)
        return self._hello(Hello(Role.TRAINER, self.name, os.urandom(16), settings=settings, **more))

    def hello_worker(self, *, slots: int = 8, label: str = "0.0", **more: Any) -> Welcome:
        """Opens a worker's session with credit."""
        return self._hello(Hello(Role.WORKER, self.name, os.urandom(16), slots=slots, label=label, **more))

    def _hello(self, message: Hello) -> Welcome:
        self.send(message)
        welcome: Welcome = self.receive(Welcome)
        self.session = welcome.session
        self.send(Grant(self.session, 1000, 1 << 30))
        return welcome

    def submit(self, *keys: str) -> list[int]:
        """Task ids, once durable."""
        items = tuple(SubmitItem(key) for key in keys)
        self.send(Submit(self.session, 1, items, tuple(b"body" for _ in items)))
        return [outcome.task_id for outcome in self.receive(Submitted).outcomes]
