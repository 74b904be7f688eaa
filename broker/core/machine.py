"""The machine: applies one event to the state and returns the effects.

The server, the simulator and the replayer drive this same class. It is deterministic: the same events give the same
effects, decisions and state hash. Every event has a journal sequence, and every effect that shows its outcome
names that sequence as what must be durable first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from broker.core import delivery, publishing, results, sessions, submission
from broker.core.dispatch import dispatch
from broker.core.events import (
    BrokerDraining,
    BrokerStarted,
    Decision,
    Effect,
    Event,
    GraceEnded,
    SendTo,
    SessionLost,
    TasksExpired,
)
from broker.core.fingerprint import state_hash
from broker.core.model import BrokerState, CoreSettings, SessionState
from broker.core.retention import forget_ended
from broker.core.turn import Turn
from rollmq.messages import (
    Bye,
    Cancel,
    Consumed,
    Done,
    Drain,
    Drop,
    Ended,
    Grant,
    HandBack,
    Heartbeat,
    HeartbeatAck,
    Hello,
    Message,
    Nack,
    Publish,
    Refusal,
    RefusalCode,
    Result,
    Resume,
    Resync,
    Role,
    Started,
    Submit,
    Watch,
    Weights,
)

DROPS_PER_MESSAGE = 50


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one event led to."""

    sequence: int
    effects: list[Effect]
    decisions: list[Decision]


Handler = Callable[[Turn, SessionState, Any], None]

HANDLERS: dict[type[Message], tuple[Role, Handler]] = {
    Submit: (Role.TRAINER, submission.submit),
    Cancel: (Role.TRAINER, submission.cancel),
    Consumed: (Role.TRAINER, delivery.consumed),
    HandBack: (Role.TRAINER, delivery.handed_back),
    Publish: (Role.TRAINER, publishing.publish),
    Resume: (Role.TRAINER, publishing.resume),
    Started: (Role.WORKER, results.started),
    Result: (Role.WORKER, results.result),
    Nack: (Role.WORKER, results.nack),
    Weights: (Role.WORKER, publishing.weights),
}
"""Messages that change the state, with the role that may send them."""

READ_ONLY = (Heartbeat, Watch)
"""Messages that change nothing; they are not in the journal."""


class Machine:
    """The broker's decisions.

    Args:
        state: to go on from; empty by default.
    """

    def __init__(self, state: BrokerState | None = None) -> None:
        self.state = state or BrokerState()

    def is_recorded(self, message: Message) -> bool:
        """Whether `apply` of this message needs a journal record."""
        return not isinstance(message, READ_ONLY)

    def apply(self, event: Event, sequence: int) -> Outcome:
        """Applies a recorded event, whose record will have (or has) this journal sequence."""
        self.state.sequence = sequence
        turn = Turn(self.state, event, self.state.sequence)
        self._route(turn, event.message)
        self._settle(turn)
        return Outcome(turn.sequence, turn.effects, turn.decisions)

    def read(self, event: Event) -> list[Effect]:
        """Answers a read-only message from the state as it is."""
        turn = Turn(self.state, event, self.state.sequence)
        message = event.message
        session = self.state.sessions.get(getattr(message, "session", 0))
        if session is None:
            return []
        if isinstance(message, Heartbeat):
            self._beat(turn, session)
        elif isinstance(message, Watch):
            delivery.watch(turn, session, message)
        return turn.effects

    def _beat(self, turn: Turn, session: SessionState) -> None:
        policy = self.state.policies.get(session.policy)
        news = (policy.versions.news,) if policy is not None else ()
        # Only the version it repeats must be durable; the beat itself does not wait for the disk.
        required = news[0].sequence if news else 0
        turn.effects.append(SendTo(session.session, HeartbeatAck(session.session, news), required))

    def _route(self, turn: Turn, message: Message) -> None:
        match message:
            case BrokerStarted():
                self._note_hash(turn)
                self.state.broker_epoch = message.broker_epoch
                names = {f.name for f in fields(CoreSettings)}
                self.state.settings = CoreSettings(**{name: getattr(message, name) for name in names})
                sessions.broker_started(turn)
            case Hello():
                sessions.hello(turn, message)
            case TasksExpired():
                submission.expire(turn, message.tasks)
            case GraceEnded():
                sessions.grace_ended(turn)
            case BrokerDraining():
                self._note_hash(turn)
                self.state.draining = True
            case _:
                self._route_session(turn, message)

    def _note_hash(self, turn: Turn) -> None:
        """The hash becomes a decision, so that every replay compares the whole state at each start and clean stop."""
        turn.decide(0, -1, f"state {state_hash(self.state)}")

    def _route_session(self, turn: Turn, message: Any) -> None:
        session = self.state.sessions.get(message.session)
        if session is None:
            turn.decide(0, -1, f"{type(message).__name__} of unknown session {message.session}")
            return
        match message:
            case SessionLost():
                sessions.lost(turn, session, message.reason)
            case Bye():
                sessions.bye(turn, session)
            case Grant():
                session.credit.grant(message.tasks, message.body_bytes)
                turn.dispatch.add(session.policy)
                turn.deliver.add(session.name)
            case Drain():
                session.draining = True
                turn.answer(Done(session.session, message.request))
            case _:
                self._handle(turn, session, message)

    def _handle(self, turn: Turn, session: SessionState, message: Any) -> None:
        role, handler = HANDLERS.get(type(message), (None, None))
        if handler is None or session.role is not role:
            turn.decide(0, -1, f"{type(message).__name__} of {session.role.value} {session.name} not allowed")
            text = f"a {session.role.value} may not send {type(message).__name__}"
            request = getattr(message, "request", 0)
            turn.answer(Refusal(session.session, request, RefusalCode.NOT_ALLOWED, text))
            return
        handler(turn, session, message)

    def _settle(self, turn: Turn) -> None:
        """What follows from the event: dispatch, delivery, and the messages collected on the way."""
        for _ in range(2):  # a delivery that turns out stale frees budget, hence a second round
            for name in sorted(turn.dispatch):
                policy = self.state.policies.get(name)
                if policy is not None:
                    turn.dispatch.discard(name)
                    dispatch(turn, policy)
            for name in sorted(turn.deliver):
                turn.deliver.discard(name)
                trainer = self.state.trainers.get(name)
                if trainer is not None:
                    delivery.deliver(turn, trainer)
        for session, drops in turn.drops.items():
            for start in range(0, len(drops), DROPS_PER_MESSAGE):
                turn.send(session, Drop(session, tuple(drops[start : start + DROPS_PER_MESSAGE])))
        for session, endings in turn.endings.items():
            for start in range(0, len(endings), delivery.ENDED_PER_MESSAGE):
                part = tuple(endings[start : start + delivery.ENDED_PER_MESSAGE])
                turn.send(session, Ended(session, 0, part))
        forget_ended(self.state)


def unknown_session(message: Message) -> Resync:
    """The answer to a peer whose session is unknown here."""
    return Resync(f"{type(message).__name__}: this session is unknown to the broker; say HELLO again")
