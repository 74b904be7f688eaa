"""The worker's end of its session: the session thread on one side, the event loop on the other.

Events of the thread reach the loop in their order. What the loop sends while there is no session is dropped here;
the worker says everything that still counts again when the next session opens.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Protocol

import zmq

from rollmq.errors import NotConnected, RollmqError
from rollmq.messages import Hello, Message, News, Welcome
from rollmq.session import Session
from workers.transport import BrokerTransport

log = logging.getLogger(__name__)


class SessionOwner(Protocol):
    """Who is told. `hello` and `progress` run on the session's thread, the rest on the event loop."""

    def hello(self) -> Hello:
        """The greeting, with what is held now."""

    def progress(self) -> tuple[int, int]:
        """(progress counter, running episodes)."""

    def opened(self, welcome: Welcome) -> None:
        """A session began."""

    def received(self, message: Message) -> None:
        """A message of the broker, broadcasts included."""

    def lost(self, reason: str, error: RollmqError | None) -> None:
        """The session ended; with an error for good."""


class BrokerSession:
    """Implements `rollmq.session.SessionHandler` on behalf of an owner on the running event loop.

    Args:
        address: the broker's.
        owner: who is told.
    """

    def __init__(self, address: str, owner: SessionOwner) -> None:
        self._address = address
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._transport: BrokerTransport | None = None
        self._session = Session(self._open_transport, self, "broker-session")

    def start(self) -> None:
        """Begins to look for the broker."""
        self._session.start()

    def send(self, message: Message) -> bool:
        """Queues a message of the present session; False if that is over."""
        try:
            self._session.send(message)
        except NotConnected:
            return False
        return True

    async def close(self) -> None:
        """Says goodbye and ends the thread."""
        await asyncio.to_thread(self._session.close)
        self._context.destroy(linger=0)

    # --- on the session's thread --------------------------------------------------------------------------------

    def hello(self) -> Hello:
        """See `SessionOwner.hello`."""
        return self._owner.hello()

    def progress(self) -> tuple[int, int]:
        """See `SessionOwner.progress`."""
        return self._owner.progress()

    def opened(self, welcome: Welcome) -> None:
        """Listens to the broadcast, too."""
        if self._transport is not None:
            self._transport.subscribe(welcome.news_address)
        self._post(self._owner.opened, welcome)

    def received(self, message: Message) -> None:
        """Passes it on."""
        self._post(self._owner.received, message)

    def lost(self, reason: str, error: RollmqError | None) -> None:
        """Passes it on."""
        self._post(self._owner.lost, reason, error)

    def _open_transport(self) -> BrokerTransport:
        self._transport = BrokerTransport(self._context, self._address, self._broadcast)
        return self._transport

    def _broadcast(self, news: News) -> None:
        self._post(self._owner.received, news)

    def _post(self, callback: Callable[..., None], *arguments: object) -> None:
        # The loop may already be closed when the process is ending; nobody is left to tell.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback, *arguments)
