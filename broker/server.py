"""The one thread that owns the sockets: poll, drain, decide, append, send.

A turn drains what has arrived, applies each message to the machine, appends its record, and hands the batch to the
journal's committer. Answers wait in the outbox until their record is durable. Nothing here decides anything: that is
the machine's.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import time
from collections import Counter
from dataclasses import replace
from typing import Any

import zmq

from broker import reports
from broker.admin import AdminDesk, Asked
from broker.clock import BrokerClock
from broker.core.events import (
    Broadcast,
    BrokerDraining,
    BrokerStarted,
    CloseSession,
    Effect,
    OpenSession,
    Reply,
    SendTo,
    SessionLost,
    WatchDeadline,
)
from broker.core.machine import Machine, unknown_session
from broker.core.timers import Timers
from broker.journal.interface import Journal
from broker.outbox import Outbox
from broker.records import EVENT_KIND, encode_event, make_event
from broker.replay import ReplayReport
from broker.sockets import BrokerSockets
from rollmq import __version__
from rollmq.codec import MAX_BODY_BYTES, decode, encode
from rollmq.config import BrokerConfig
from rollmq.errors import JournalFailed, ProtocolError
from rollmq.messages import (
    Heartbeat,
    Hello,
    Message,
    News,
    PolicyNews,
    Query,
    Refusal,
    RefusalCode,
    Report,
    Role,
    Submit,
    Welcome,
)

log = logging.getLogger(__name__)

MESSAGES_PER_TURN = 1_000
LONGEST_POLL_S = 1.0
BEAT_S = 1.0
STRIKES = 5
MAX_STRUCK_PEERS = 10_000
DRAIN_S = 0.5
ITEMS_PER_MESSAGE = 64


class BrokerServer:
    """A running broker.

    Args:
        config: its settings.
        journal: open, with its records already replayed into `machine`.
        machine: the state as of the journal's end.
        replayed: what the replay found (open deadlines, last clock).
        sockets: bound.
    """

    def __init__(
        self, config: BrokerConfig, journal: Journal, machine: Machine, replayed: ReplayReport, sockets: BrokerSockets
    ) -> None:
        self._config = config
        self._journal = journal
        self._machine = machine
        self._sockets = sockets
        self._clock = BrokerClock(replayed.last_ns)
        self._outbox = Outbox(sockets.send, journal.read_body)
        now_ns = self._clock.now_ns()
        self._timers = Timers(config.heartbeat_s, config.dead_after_s, config.lease_s, now_ns)
        for task_id, at_ns in replayed.deadlines.items():
            self._timers.expire_task(task_id, at_ns)
        self._broadcasts: list[Broadcast] = []
        self._admin = AdminDesk(config.heartbeat_s, config.dead_after_s, machine.state.broker_epoch + 1)
        self._disk_is_low = False
        self._strikes: Counter[bytes] = Counter()
        self._counters: Counter[str] = Counter()
        self._started_at = time.monotonic()
        self._next_beat = 0.0
        self._beat = 0
        self._stops = 0
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    # --- life ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Takes over the journal under a new broker epoch; durable before anything is served.

        Raises:
            JournalFailed: the journal cannot be written.
        """
        state, config = self._machine.state, self._config
        epoch = state.broker_epoch + 1
        self._apply(
            BrokerStarted(
                broker_epoch=epoch,
                heartbeat_s=config.heartbeat_s,
                dead_after_s=config.dead_after_s,
                task_deadline_s=config.task_deadline_s,
                infrastructure_budget=config.infrastructure_budget,
                data_budget=config.data_budget,
                max_open_tasks=config.max_open_tasks,
                retain_ended=config.retain_ended,
                max_body_bytes=MAX_BODY_BYTES,
                max_items=ITEMS_PER_MESSAGE,
            )
        )
        self._journal.sync(timeout_s=60.0)
        self._timers.start_grace(epoch, self._clock.now_ns() + int(config.adoption_grace_s * 1e9))

    def stop(self) -> None:
        """Asks the loop to end; callable from a signal handler."""
        self._stops += 1
        os.write(self._wake_write, b"!")

    def install_signals(self) -> None:
        """SIGTERM and SIGINT stop the broker; a second one exits at once, which is safe: the journal is durable."""

        def handle(number: int, frame: object) -> None:
            self.stop()
            if self._stops > 1:
                os._exit(130)

        signal.signal(signal.SIGTERM, handle)
        signal.signal(signal.SIGINT, handle)

    def run(self) -> None:
        """Serves until stopped.

        Raises:
            JournalFailed: a write or fsync failed; nothing unsaved was acknowledged.
        """
        poller = zmq.Poller()
        poller.register(self._sockets.router, zmq.POLLIN)
        poller.register(self._journal.wakeup_fd, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        try:
            while not self._stops:
                wait_ms = self._poll_ms()
                self._timers.expect_turn(self._clock.now_ns() + wait_ms * 1_000_000)
                poller.poll(wait_ms)
                self._turn()
            poller.unregister(self._wake_read)
            self._finish(poller)
        finally:
            self._sockets.close()
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _finish(self, poller: zmq.Poller) -> None:
        """Refuses new tasks for a moment, so that trainers hear why, then leaves with everything durable and sent."""
        self._apply(BrokerDraining(self._machine.state.broker_epoch))
        deadline = time.monotonic() + DRAIN_S
        while time.monotonic() < deadline:
            poller.poll(int(max(0.0, deadline - time.monotonic()) * 1000) + 1)
            self._turn()
        self._journal.sync(timeout_s=60.0)
        self._flush()
        self._journal.close()

    def _poll_ms(self) -> int:
        now = time.monotonic()
        wait_s = min(LONGEST_POLL_S, max(0.0, self._next_beat - now))
        due_ns = self._timers.next_ns()
        if due_ns is not None:
            wait_s = min(wait_s, max(0.0, (due_ns - self._clock.now_ns()) / 1e9))
        return int(wait_s * 1000) + 1

    # --- a turn -------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        drained = self._drain()
        if drained:
            # Only with all input of the turn seen may anybody be declared silent.
            for message in self._timers.due(self._clock.now_ns()):
                self._apply(message)
        self._journal.commit()
        self._journal.drain_wakeup()
        if self._journal.failed is not None:
            raise JournalFailed(f"the journal failed: {self._journal.failed}") from self._journal.failed
        self._flush()
        self._send_beat()
        self._sockets.touch()

    def _drain(self) -> bool:
        """Handles what has arrived; False if there may be more."""
        for _ in range(MESSAGES_PER_TURN):
            parts = self._sockets.receive()
            if parts is None:
                return True
            self._handle(parts[0], parts[1:])
        return False

    def _handle(self, route: bytes, frames: list[bytes]) -> None:
        self._counters["messages_in"] += 1
        try:
            message = decode(frames)
        except ProtocolError as error:
            self._strike(route, str(error))
            return
        session = getattr(message, "session", 0)
        if isinstance(message, Hello):
            self._greet(route, message)
        elif self._admin.owns(session, route):
            self._answer_admin(route, session, message)
        elif session == 0 or self._outbox.route(session) != route:
            self._counters["unknown_session"] += 1
            self._sockets.send(route, encode(unknown_session(message)))
        else:
            self._timers.heard(session, self._clock.now_ns())
            self._serve(message)

    def _greet(self, route: bytes, message: Hello) -> None:
        if message.role is Role.ADMIN:
            self._sockets.send(route, encode(self._admin.hello(route, message)))
        else:
            self._apply(message, route)

    def _answer_admin(self, route: bytes, session: int, message: Message) -> None:
        answer = self._admin.answer(session, message)
        if isinstance(answer, Asked):
            answer = self._report(answer.query)
        self._sockets.send(route, encode(answer))

    def _strike(self, route: bytes, text: str) -> None:
        """A peer sent what is no message: it is told, counted, and after a few tries not answered any more."""
        self._counters["malformed"] += 1
        if len(self._strikes) > MAX_STRUCK_PEERS:
            self._strikes.clear()
        self._strikes[route] += 1
        if self._strikes[route] > STRIKES:
            return
        log.warning("malformed message: %s", text)
        self._sockets.send(route, encode(Refusal(0, 0, RefusalCode.MALFORMED, text[:300])))
        if self._strikes[route] == STRIKES:
            for session in [s for s in self._machine.state.sessions if self._outbox.route(s) == route]:
                self._apply(SessionLost(session, f"{STRIKES} malformed messages"))

    def _serve(self, message: Message) -> None:
        if isinstance(message, Query):
            self._put(SendTo(message.session, self._report(message), self._machine.state.sequence), beat=False)
        elif isinstance(message, Submit) and self._disk_is_low:
            text = f"less than {self._config.disk_floor_bytes} bytes are free for the journal; results are still taken"
            self._put(
                SendTo(message.session, Refusal(message.session, message.request, RefusalCode.DISK_LOW, text, 5.0), 0),
                beat=False,
            )
        elif self._machine.is_recorded(message):
            self._apply(message)
        else:
            if isinstance(message, Heartbeat):
                self._timers.beat(message.session, message.progress, message.running, self._clock.now_ns())
            effects = self._machine.read(make_event(self._clock.now_ns(), message))
            self._carry_out(effects, beat=isinstance(message, Heartbeat))

    # --- the machine and its effects ----------------------------------------------------------------------------

    def _apply(self, message: Message, route: bytes = b"") -> None:
        event = make_event(self._clock.now_ns(), message)
        outcome = self._machine.apply(event, self._journal.last_sequence + 1)
        bodies: tuple[bytes, ...] = getattr(message, "bodies", ())
        sequence = self._journal.append(EVENT_KIND, encode_event(event, outcome.decisions), bodies)
        if sequence != outcome.sequence:
            raise JournalFailed(f"journal gave sequence {sequence} where {outcome.sequence} was decided on")
        self._carry_out(outcome.effects, route)

    def _carry_out(self, effects: list[Effect], route: bytes = b"", beat: bool = False) -> None:
        for effect in effects:
            match effect:
                case SendTo():
                    self._put(effect, beat)
                case OpenSession(session):
                    self._outbox.open(session, route)
                    self._timers.heard(session, self._clock.now_ns())
                case CloseSession(session):
                    self._outbox.close(session)
                    self._timers.closed(session)
                case Broadcast():
                    self._broadcasts.append(effect)
                case WatchDeadline(task_id, at_ns):
                    self._timers.expire_task(task_id, at_ns)
                case Reply(message):
                    # A refusal reveals nothing that must be durable first.
                    self._sockets.send(route, encode(message))

    def _put(self, effect: SendTo, beat: bool) -> None:
        if isinstance(effect.message, Welcome):
            effect = replace(effect, message=replace(effect.message, news_address=self._sockets.news_address))
        kept = self._outbox.put_beat(effect, self._journal.durable) if beat else self._outbox.put(effect)
        if not kept:
            self._end_session(effect.session, "it leaves too much unread")

    def _end_session(self, session: int, reason: str) -> None:
        self._outbox.forget(session)
        if session in self._machine.state.sessions:
            self._apply(SessionLost(session, reason))

    def _flush(self) -> None:
        durable = self._journal.durable
        for session in self._outbox.flush(durable):
            self._end_session(session, "its connection is gone")
        while self._broadcasts and self._broadcasts[0].requires <= durable:
            self._broadcast((self._broadcasts.pop(0).news,))

    def _send_beat(self) -> None:
        now = time.monotonic()
        if now < self._next_beat:
            return
        self._next_beat = now + BEAT_S
        self._beat += 1
        self._disk_is_low = shutil.disk_usage(self._config.journal).free < self._config.disk_floor_bytes
        durable = self._journal.durable
        news = [p.versions.news for p in self._machine.state.policies.values() if p.versions.news.sequence <= durable]
        if not news:
            self._broadcast(())
        for item in news:
            self._broadcast((item,))

    def _broadcast(self, policies: tuple[PolicyNews, ...]) -> None:
        self._sockets.broadcast(encode(News(self._machine.state.broker_epoch, self._beat, policies)))

    # --- facts --------------------------------------------------------------------------------------------------

    def _report(self, query: Query) -> Message:
        state = self._machine.state
        document: Any
        if query.what == "status":
            document = reports.status(state, self._journal.stat(), self._facts())
        elif query.what == "tasks":
            document = reports.tasks(state, query)
        else:
            text = f"there is no report {query.what!r}; ask for status or tasks"
            return Refusal(query.session, query.request, RefusalCode.MALFORMED, text)
        return Report(query.session, query.request, (json.dumps(document).encode(),))

    def _facts(self) -> dict[str, Any]:
        return {
            "version": __version__,
            "pid": os.getpid(),
            "address": self._sockets.address,
            "news_address": self._sockets.news_address,
            "uptime_s": round(time.monotonic() - self._started_at, 3),
            "sessions": len(self._machine.state.sessions),
            "disk_is_low": self._disk_is_low,
            "waiting_messages": self._outbox.waiting(),
            "counters": dict(self._counters),
        }
