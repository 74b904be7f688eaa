"""HELLO, BYE and lost sessions: who is connected, which leases survive a reconnect, who owns a policy."""

from __future__ import annotations

from broker.core.delivery import delivery_floor, return_deliveries
from broker.core.events import CloseSession, OpenSession, Reply, SendTo
from broker.core.fairness import PolicyQueue
from broker.core.leases import adopt, end_leases, orphaned_leases
from broker.core.model import BrokerState, Policy, SessionState, Trainer
from broker.core.staleness import StalenessController
from broker.core.transitions import fail_attempt, requeue
from broker.core.turn import Turn
from broker.core.versions import PolicyVersions
from rollmq.messages import (
    PROTOCOL_VERSION,
    Adoption,
    ByeAck,
    Hello,
    OnStale,
    PolicyNews,
    PolicySettings,
    Reason,
    Refusal,
    RefusalCode,
    Resync,
    Role,
    TaskEpoch,
    WeightState,
    Welcome,
)

SESSION_SHIFT = 32
NEUTRAL_POLICY = PolicySettings(1, 0, None, OnStale.RETRY)


def hello(turn: Turn, message: Hello) -> None:
    """Opens a session or says why not."""
    refusal = _refuse(turn.state, message)
    if refusal is not None:
        turn.decide(0, -1, f"hello of {message.role.value} {message.name} refused: {refusal.code.value}")
        turn.effects.append(Reply(refusal, turn.sequence))
        return
    _supersede(turn, message)
    session = _open(turn, message)
    if message.role is Role.WORKER:
        _welcome_worker(turn, session, message)
    else:
        _welcome_trainer(turn, session, message)


def _refuse(state: BrokerState, message: Hello) -> Refusal | None:
    def refuse(code: RefusalCode, text: str) -> Refusal:
        return Refusal(0, 0, code, text)

    if not message.protocol_min <= PROTOCOL_VERSION <= message.protocol_max:
        spoken = f"{message.protocol_min} to {message.protocol_max}"
        return refuse(RefusalCode.NOT_ALLOWED, f"the broker speaks protocol {PROTOCOL_VERSION}, the peer {spoken}")
    if message.role is Role.ADMIN:
        return refuse(RefusalCode.NOT_ALLOWED, "sessions of admins are not the core's")
    if not message.name or not message.policy or len(message.nonce) != 16:
        return refuse(RefusalCode.MALFORMED, "HELLO needs a name, a policy and a nonce of 16 bytes")
    if message.role is Role.WORKER and message.slots < 1:
        return refuse(RefusalCode.MALFORMED, f"worker {message.name} says it has no slots")
    if message.role is not Role.TRAINER:
        return None
    settings = message.settings
    if settings is None or settings.consumer_batch_size < 1 or settings.max_concurrent_rollouts == 0:
        text = f"trainer {message.name} needs policy settings with a batch size and a concurrency of at least 1"
        return refuse(RefusalCode.MALFORMED, text)
    return _refuse_trainer(state, message, settings)


def _refuse_trainer(state: BrokerState, message: Hello, settings: PolicySettings) -> Refusal | None:
    trainer = state.trainers.get(message.name)
    if trainer is not None and trainer.policy != message.policy:
        text = f"trainer {message.name} trains policy {trainer.policy}, not {message.policy}; use another name"
        return Refusal(0, 0, RefusalCode.CONFLICT, text)
    policy = state.policies.get(message.policy)
    if policy is None or not policy.owner:
        return None
    if policy.owner != message.name and message.owner:
        text = (
            f"policy {policy.name} is owned by trainer {policy.owner}; to submit to it as {message.name} too, "
            "say owner=False"
        )
        return Refusal(0, 0, RefusalCode.CONFLICT, text)
    if policy.owner != message.name and settings != policy.staleness.settings:
        text = f"policy {policy.name} has {policy.staleness.settings}; the trainers that share it must say the same"
        return Refusal(0, 0, RefusalCode.CONFLICT, text)
    return None


# --- opening ------------------------------------------------------------------------------------------------------


def _open(turn: Turn, message: Hello) -> SessionState:
    state = turn.state
    state.next_session += 1
    session = SessionState(
        session=(state.broker_epoch << SESSION_SHIFT) | state.next_session,
        role=message.role,
        name=message.name,
        nonce=message.nonce,
        policy=message.policy,
        engine=message.engine,
        slots=message.slots if message.role is Role.WORKER else 0,
        host=message.host,
        pid=message.pid,
        label=message.label,
        weights=WeightState.READY if message.label else WeightState.UPDATING,
    )
    state.sessions[session.session] = session
    turn.effects.append(OpenSession(session.session))
    turn.decide(0, -1, f"session {session.session} of {message.role.value} {message.name}")
    return session


def _supersede(turn: Turn, message: Hello) -> None:
    """An older session of the same role and name ends: silently for the same instance, with notice for another."""
    for old in list(turn.state.sessions.values()):
        if old.role is not message.role or old.name != message.name:
            continue
        if old.nonce != message.nonce:
            text = f"a newer {old.role.value} named {old.name} took over"
            turn.effects.append(SendTo(old.session, Resync(text, final=True), turn.sequence))
            end_leases(turn, old, Reason.WORKER_LOST, Reason.RETURNED, text)
        close_session(turn, old)


def close_session(turn: Turn, session: SessionState) -> None:
    """Forgets a session; its leases must have been dealt with, or stay for adoption by the same instance."""
    del turn.state.sessions[session.session]
    if turn.state.workers.get(session.name) == session.session:
        del turn.state.workers[session.name]
    trainer = turn.state.trainers.get(session.name)
    if trainer is not None and trainer.session == session.session:
        trainer.session = 0
    turn.effects.append(CloseSession(session.session))
    turn.dispatch.add(session.policy)


def _welcome(
    turn: Turn,
    session: SessionState,
    policies: tuple[PolicyNews, ...],
    *,
    policy_epoch: int = 0,
    owner: bool = False,
    adopted: tuple[Adoption, ...] = (),
    dropped: tuple[TaskEpoch, ...] = (),
    floor: int = 0,
) -> None:
    settings = turn.state.settings
    turn.answer(
        Welcome(
            session=session.session,
            broker_epoch=turn.state.broker_epoch,
            heartbeat_s=settings.heartbeat_s,
            dead_after_s=settings.dead_after_s,
            max_body_bytes=settings.max_body_bytes,
            max_items=settings.max_items,
            policies=policies,
            policy_epoch=policy_epoch,
            owner=owner,
            adopted=adopted,
            dropped=dropped,
            floor=floor,
        )
    )


def _welcome_worker(turn: Turn, session: SessionState, message: Hello) -> None:
    turn.state.workers[session.name] = session.session
    policy = policy_named(turn, message.policy)
    adopted, dropped = adopt(turn, session, (*message.held, *message.unsent))
    _take_back_unclaimed(turn, session)
    _welcome(turn, session, (policy.versions.news,), adopted=tuple(adopted), dropped=tuple(dropped))
    turn.dispatch.add(policy.name)


def _take_back_unclaimed(turn: Turn, session: SessionState) -> None:
    """Leases of this worker that it does not report: it never got them, or has lost them with its process."""
    for task in orphaned_leases(turn):
        if task.lease is None or task.lease.worker != session.name:
            continue
        if task.lease.nonce == session.nonce or not task.lease.started:
            requeue(turn, task, Reason.RETURNED, f"{session.name} came back without it")
        else:
            fail_attempt(turn, task, session.name, Reason.WORKER_LOST, f"{session.name} restarted without it")


def _welcome_trainer(turn: Turn, session: SessionState, message: Hello) -> None:
    state = turn.state
    assert message.settings is not None
    policy = policy_named(turn, message.policy)
    trainer = state.trainers.get(message.name)
    if trainer is None:
        trainer = state.trainers[message.name] = Trainer(message.name, message.policy)
    is_new_instance = trainer.nonce != message.nonce
    trainer.nonce, trainer.session = message.nonce, session.session
    if not policy.owner and message.owner:
        policy.owner = message.name
    if policy.owner == message.name:
        policy.staleness.settings = message.settings
        if is_new_instance:
            policy.versions.epoch += 1
            policy.staleness.start_anew()
        turn.dispatch.add(policy.name)
    return_deliveries(turn, trainer)
    _welcome(
        turn,
        session,
        (policy.versions.news,),
        policy_epoch=policy.versions.epoch,
        owner=policy.owner == message.name,
        floor=delivery_floor(turn, trainer),
    )


def policy_named(turn: Turn, name: str) -> Policy:
    """The policy, made at version 0 when it is first named; without an owner nothing can be submitted to it."""
    policy = turn.state.policies.get(name)
    if policy is None:
        policy = turn.state.policies[name] = Policy(
            name=name,
            owner="",
            versions=PolicyVersions.initial(name, turn.sequence),
            staleness=StalenessController(NEUTRAL_POLICY),
            queue=PolicyQueue(),
        )
    return policy


# --- closing ------------------------------------------------------------------------------------------------------


def bye(turn: Turn, session: SessionState) -> None:
    """A session that ends on purpose: what it holds goes back without blame."""
    turn.answer(ByeAck(session.session))
    end_leases(turn, session, Reason.DRAINED, Reason.RETURNED, f"{session.name} said goodbye")
    close_session(turn, session)


def lost(turn: Turn, session: SessionState, reason: str) -> None:
    """A silent or overloaded peer: started tasks count against the infrastructure."""
    turn.effects.append(SendTo(session.session, Resync(reason), turn.sequence))
    end_leases(turn, session, Reason.WORKER_LOST, Reason.RETURNED, f"{session.name}: {reason}")
    close_session(turn, session)


def broker_started(turn: Turn) -> None:
    """A new broker process: sessions are gone; leases wait for their workers until the grace ends."""
    state = turn.state
    for session in state.sessions.values():
        turn.decide(0, -1, f"session {session.session} ended with the broker")
    state.sessions.clear()
    state.workers.clear()
    for trainer in state.trainers.values():
        trainer.session = 0
    state.draining = False


def grace_ended(turn: Turn) -> None:
    """Workers that did not come back in time lose their leases."""
    for task in orphaned_leases(turn):
        requeue(turn, task, Reason.BROKER_RESTARTED, "its worker did not come back after the broker's restart")
