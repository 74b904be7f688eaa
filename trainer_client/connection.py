"""The asyncio side of a session: moves messages between the session thread and the core, and wakes who waits.

Everything but the small handler runs on the event loop. Nothing here knows what a user-level call means.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

import zmq

from rollmq.errors import DeadlineExceeded, NotConnected, Refused, RollmqError
from rollmq.messages import Hello, Message, PolicySettings, Refusal, RefusalCode, Role, Welcome
from rollmq.session import Session
from trainer_client.core import ClientCore
from trainer_client.requests import Request
from trainer_client.transport import DealerTransport, check_address

log = logging.getLogger(__name__)

RETRYABLE = frozenset({RefusalCode.BUSY, RefusalCode.DISK_LOW, RefusalCode.DRAINING})
RETRY_PAUSE_S = 0.2
CLOSE_FLUSH_S = 2.0
CLOSE_THREAD_S = 3.0
NONCE_BYTES = 16

_M = TypeVar("_M", bound=Message)
Waiter = asyncio.Future[None]


class _Handler:
    """Hands what happens on the session thread over to the event loop."""

    def __init__(self, hello: Hello, loop: asyncio.AbstractEventLoop, connection: Connection) -> None:
        self._hello, self._loop, self._connection = hello, loop, connection

    def hello(self) -> Hello:
        return self._hello

    def progress(self) -> tuple[int, int]:
        return 0, 0

    def opened(self, welcome: Welcome) -> None:
        self._post(self._connection.on_opened, welcome)

    def received(self, message: Message) -> None:
        self._post(self._connection.on_received, message)

    def lost(self, reason: str, error: RollmqError | None) -> None:
        self._post(self._connection.on_lost, reason, error)

    def _post(self, call: Callable[..., None], *values: object) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *values)
        except RuntimeError:
            # The user's loop ended without `close`; there is nobody left to tell.
            log.debug("the event loop is closed; dropped %s", call.__name__)


class Connection:
    """One trainer's session, its core and its waiters.

    Args:
        address: of the broker.
        trainer: name of the trainer.
        policy: name of the policy.
        settings: the policy's bounds.
        owner: whether this trainer publishes the policy's weights.
        timeout: seconds a call may go on without any session.

    Raises:
        ConfigError: the address is not one.
    """

    def __init__(
        self, address: str, trainer: str, policy: str, settings: PolicySettings, owner: bool, timeout: float
    ) -> None:
        self.address = check_address(address)
        self.core = ClientCore(policy, settings)
        self.error: RollmqError | None = None
        self._timeout = timeout
        self._hello = Hello(
            role=Role.TRAINER,
            name=trainer,
            nonce=secrets.token_bytes(NONCE_BYTES),
            policy=policy,
            settings=settings,
            owner=owner,
            host=socket.gethostname()[:128],
            pid=os.getpid(),
        )
        self._session: Session | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._transport: DealerTransport | None = None
        self._last_loss = ""
        self._offline_since = time.monotonic()
        self._waiters: dict[int, set[Waiter]] = {}
        self._asking: set[asyncio.Future[Message]] = set()
        self._listener: Callable[[int], None] | None = None

    # --- life -----------------------------------------------------------------------------------------------------

    async def open(self, timeout: float) -> None:
        """Starts the session and waits until it is open.

        Raises:
            NotConnected: no session within the timeout; names the address and the last trouble.
            Refused: the broker does not want this trainer.
        """
        self.check_usable(opening=True)
        if self._session is None:
            self._start()
        deadline = time.monotonic() + timeout
        while not self.core.session:
            waiter = self.waiter(())
            try:
                await self._sleep(waiter, deadline)
            finally:
                self.forget(waiter, ())
            if not self.core.session and time.monotonic() >= deadline:
                raise self._not_connected(timeout)

    def _start(self) -> None:
        handler = _Handler(self._hello, asyncio.get_running_loop(), self)
        self._context = zmq.Context()
        self._session = Session(self._open_transport, handler, f"rollmq-{self._hello.name}")
        self._offline_since = time.monotonic()
        self._session.start()

    def _open_transport(self) -> DealerTransport:
        assert self._context is not None
        self._transport = DealerTransport(self._context, self.address)
        return self._transport

    async def close(self) -> None:
        """Waits shortly for acknowledgements under way, then ends the session. Idempotent."""
        session, self._session = self._session, None
        if session is None:
            self.error = self.error or _closed()
            return
        await self._drain(session)
        self._fail(_closed())
        await asyncio.to_thread(session.close, CLOSE_THREAD_S)
        # `term` waits for open sockets, and only their own thread may close them: if that thread is stuck, leave it.
        if self._context is not None and (self._transport is None or self._transport.closed):
            await asyncio.to_thread(self._context.term)

    async def _drain(self, session: Session) -> None:
        deadline = time.monotonic() + CLOSE_FLUSH_S
        self._pump_to(session)
        while self.core.session and len(self.core.requests) and self.error is None and time.monotonic() < deadline:
            waiter = self.waiter(())
            await _pause(waiter, deadline)
            self.forget(waiter, ())

    def check_usable(self, opening: bool = False) -> None:
        """Raises what ended the session for good, or `NotConnected` if it was never begun."""
        if self.error is not None:
            raise self.error
        if self._session is None and not opening:
            raise NotConnected("the client is not connected; `await client.connect()` or use `async with` first")

    def _not_connected(self, timeout: float) -> NotConnected:
        trouble = f" (last: {self._last_loss})" if self._last_loss else ""
        return NotConnected(
            f"no session with the broker at {self.address} within {timeout:g} s{trouble}; "
            "check the address and that `rollmq broker` runs there"
        )

    # --- from the session thread ----------------------------------------------------------------------------------

    def on_opened(self, welcome: Welcome) -> None:
        """A session began."""
        self.core.opened(welcome)
        self.pump()
        self._wake_all()

    def on_received(self, message: Message) -> None:
        """A message came."""
        if getattr(message, "session", 0) not in (0, self.core.session):
            return  # Of a session that is over: what it says comes again.
        self.core.received(message)
        self.pump()
        self._wake(())

    def on_lost(self, reason: str, error: RollmqError | None) -> None:
        """The session ended."""
        if self.core.session:
            self._offline_since = time.monotonic()
            log.warning("session with the broker at %s lost: %s", self.address, reason)
        self._last_loss = reason
        self.core.lost()
        if error is not None:
            self._fail(error)
        else:
            self._wake_all()

    def _fail(self, error: RollmqError) -> None:
        self.error = self.error or error
        for future in self._asking:
            if not future.done():
                future.set_exception(error)
        self._wake_all()

    # --- to the session thread ------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Sends what the core has to say, and tells the listener what was touched."""
        if self._session is not None:
            self._pump_to(self._session)
        while self.core.touched:
            touched, self.core.touched = self.core.touched, set()
            for task_id in touched:
                if self._listener is not None:
                    self._listener(task_id)
            self._wake(touched)
            if self._session is not None:
                self._pump_to(self._session)

    def _pump_to(self, session: Session) -> None:
        for message in self.core.outgoing():
            try:
                session.send(message)
            except NotConnected:
                return  # The core sends everything again when there is a session.

    def listen(self, listener: Callable[[int], None] | None) -> None:
        """Who is told of every task that something happened to; one at most."""
        self._listener = listener

    # --- waiting --------------------------------------------------------------------------------------------------

    def waiter(self, task_ids: Iterable[int]) -> Waiter:
        """A future that is done when something happens to one of the tasks, to the session, or to it as a whole."""
        waiter: Waiter = asyncio.get_running_loop().create_future()
        for task_id in task_ids or (0,):
            self._waiters.setdefault(task_id, set()).add(waiter)
        return waiter

    def forget(self, waiter: Waiter, task_ids: Iterable[int]) -> None:
        """No longer wakes a waiter."""
        waiter.cancel()
        for task_id in task_ids or (0,):
            waiting = self._waiters.get(task_id)
            if waiting is not None:
                waiting.discard(waiter)
                if not waiting:
                    del self._waiters[task_id]

    async def until(self, waiter: Waiter, deadline: float, what: Callable[[], str]) -> None:
        """Until the waiter is woken.

        Args:
            deadline: on the monotonic clock.
            what: what is awaited and what is known of it, for the error.

        Raises:
            DeadlineExceeded: the deadline passed.
            NotConnected: there was no session for longer than the client's timeout.
        """
        offline_limit = deadline if self.core.session else self._offline_since + self._timeout
        await self._sleep(waiter, min(deadline, offline_limit))
        if waiter.done():
            return
        now = time.monotonic()
        if now >= deadline:
            raise DeadlineExceeded(what())
        if not self.core.session and now >= self._offline_since + self._timeout:
            raise self._not_connected(self._timeout)

    async def _sleep(self, waiter: Waiter, until: float) -> None:
        await _pause(waiter, until)
        if self.error is not None:
            raise self.error

    def _wake(self, task_ids: Iterable[int]) -> None:
        for task_id in (0, *task_ids):
            for waiter in self._waiters.get(task_id, ()):
                if not waiter.done():
                    waiter.set_result(None)

    def _wake_all(self) -> None:
        self._wake(list(self._waiters))

    # --- requests -------------------------------------------------------------------------------------------------

    async def ask(self, kind: type[Request], answer_type: type[_M], deadline: float, name: str, **values: Any) -> _M:
        """Asks the broker and waits for the answer, over as many sessions as it takes. Busy refusals are retried.

        Args:
            deadline: on the monotonic clock.
            name: of the request, for errors.
            values: fields of the request.

        Raises:
            Refused: the broker said no.
            DeadlineExceeded: no answer by the deadline.
        """
        while True:
            answer = await self._ask_once(kind, deadline, name, values)
            if isinstance(answer, answer_type):
                return answer
            if not isinstance(answer, Refusal):
                raise RollmqError(f"the broker answered {name} with {type(answer).__name__}: this is a bug")
            pause = answer.retry_after_s or RETRY_PAUSE_S
            if answer.code not in RETRYABLE or time.monotonic() + pause >= deadline:
                raise Refused(answer.code, f"{name}: {answer.message}")
            await asyncio.sleep(pause)

    async def _ask_once(self, kind: type[Request], deadline: float, name: str, values: dict[str, Any]) -> Message:
        self.check_usable()
        started = time.monotonic()
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        number = self.core.request(kind, partial(_resolve, future), **values)
        self._asking.add(future)
        self.pump()
        try:
            await asyncio.wait({future}, timeout=max(0.0, deadline - started))
            if future.done():
                return future.result()
            raise DeadlineExceeded(self._unanswered(name, time.monotonic() - started))
        finally:
            self._asking.discard(future)
            future.cancel()
            self.core.abandon(number)

    def _unanswered(self, name: str, waited_s: float) -> str:
        if self.core.session:
            link = "the session is open; is the broker's disk stalled?"
        else:
            link = f"there is no session ({self._last_loss or 'not yet opened'}); is the broker running?"
        return f"{name} had no answer from the broker at {self.address} within {waited_s:.1f} s: {link}"


async def _pause(waiter: Waiter, until: float) -> None:
    await asyncio.wait({waiter}, timeout=max(0.0, until - time.monotonic()))


def _resolve(future: asyncio.Future[Message], answer: Message) -> None:
    if not future.done():
        future.set_result(answer)


def _closed() -> NotConnected:
    return NotConnected("the client is closed; make a new one")
