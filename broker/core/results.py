"""STARTED, RESULT and NACK: what workers say about their leases. An old dispatch epoch changes nothing."""

from __future__ import annotations

from broker.core.leases import refuse_epoch
from broker.core.model import BodyRef, Policy, SessionState, Task
from broker.core.transitions import became_stale, fail_attempt, make_ready, release_lease, staleness_detail
from broker.core.turn import Turn, chunks
from rollmq.messages import (
    DropItem,
    Nack,
    NackItem,
    OnStale,
    Reason,
    RefusalCode,
    Result,
    ResultItem,
    Settled,
    Started,
    StartedItem,
    TaskOutcome,
)

OUTCOMES_PER_ANSWER = 100


def started(turn: Turn, session: SessionState, message: Started) -> None:
    """Notes that generation began, and on which weights; what is already too old is taken back."""
    for item in message.items:
        task = turn.state.tasks.get(item.task_id)
        if refuse_epoch(task, item.epoch) is not None or task is None or task.lease is None:
            drop = DropItem(item.task_id, item.epoch, Reason.CANCELLED)
            turn.drops.setdefault(session.session, []).append(drop)
            continue
        task.lease.started, task.lease.label = True, item.label
        turn.decide(item.task_id, -1, f"started on {item.label}")
        _check_start(turn, task, item)


def _check_start(turn: Turn, task: Task, item: StartedItem) -> None:
    policy = turn.state.policies[task.policy]
    version = policy.versions.version_of(item.label)
    if version is not None and is_too_old(policy, version):
        became_stale(turn, task, staleness_detail(policy, version))


def is_too_old(policy: Policy, head_version: int) -> bool:
    """Whether work with this head version can no longer be delivered under the policy's rule."""
    staleness = policy.staleness
    if staleness.settings.on_stale is OnStale.DELIVER:
        return False
    return staleness.is_stale(head_version, policy.versions.version)


def result(turn: Turn, session: SessionState, message: Result) -> None:
    """Accepts each result of a current lease once; every item gets a terminal answer."""
    outcomes = [
        TaskOutcome(item.task_id, item.epoch, _accept(turn, session, item, ref))
        for item, ref in zip(message.items, turn.body_refs(), strict=True)
    ]
    _settle(turn, session, outcomes)


def _accept(turn: Turn, session: SessionState, item: ResultItem, body: BodyRef) -> RefusalCode | None:
    task = turn.state.tasks.get(item.task_id)
    code = refuse_epoch(task, item.epoch)
    if code is not None or task is None:
        turn.decide(item.task_id, -1, f"result refused: {code}")
        return code
    policy = turn.state.policies[task.policy]
    head, tail = policy.versions.version_of(item.head), policy.versions.version_of(item.tail)
    if head is None or tail is None:
        fail_attempt(turn, task, session.name, Reason.ENGINE_FAILED, f"unknown version label {item.head}/{item.tail}")
        return RefusalCode.STALE_VERSION
    if body.length > turn.state.settings.max_body_bytes:
        fail_attempt(turn, task, session.name, Reason.BAD_RESULT, f"a result of {body.length} bytes is too large")
        return RefusalCode.TOO_LARGE
    if is_too_old(policy, head):
        became_stale(turn, task, staleness_detail(policy, head))
        return RefusalCode.STALE_VERSION
    task.result, task.head_version, task.tail_version = body, head, tail
    release_lease(turn, task)
    make_ready(turn, task, f"result on {item.head}..{item.tail} by {session.name}")
    return None


def nack(turn: Turn, session: SessionState, message: Nack) -> None:
    """A worker gives leases back."""
    outcomes = [TaskOutcome(item.task_id, item.epoch, _give_back(turn, session, item)) for item in message.items]
    _settle(turn, session, outcomes)


def _give_back(turn: Turn, session: SessionState, item: NackItem) -> RefusalCode | None:
    task = turn.state.tasks.get(item.task_id)
    code = refuse_epoch(task, item.epoch)
    if code is not None or task is None:
        return code
    fail_attempt(turn, task, session.name, item.reason, item.detail)
    return None


def _settle(turn: Turn, session: SessionState, outcomes: list[TaskOutcome]) -> None:
    for part in chunks(outcomes, OUTCOMES_PER_ANSWER):
        turn.answer(Settled(session.session, 0, part))
