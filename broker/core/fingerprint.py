"""A hash of everything that decisions depend on: equal in the server, the simulator and a replay of the same
journal."""

from __future__ import annotations

import hashlib
from typing import Any

import msgpack

from broker.core.model import BrokerState, Group, Policy, SessionState, Task, Trainer


def state_hash(state: BrokerState) -> str:
    """SHA-256 of the state in a fixed order, as hexadecimal text."""
    content = [
        [state.sequence, state.broker_epoch, state.next_session, state.next_dispatch, state.next_task, state.draining],
        state.ledger.as_dict(),
        [_task(task) for _, task in sorted(state.tasks.items())],
        [_group(group) for _, group in sorted(state.groups.items())],
        [_policy(policy) for _, policy in sorted(state.policies.items())],
        [_trainer(trainer) for _, trainer in sorted(state.trainers.items())],
        [_session(session) for _, session in sorted(state.sessions.items())],
        sorted(state.workers.items()),
        list(state.ended),
    ]
    return hashlib.sha256(msgpack.packb(content, use_bin_type=True)).hexdigest()


def _task(task: Task) -> list[Any]:
    lease = task.lease
    return [
        task.task_id, task.trainer, task.policy, task.key, task.digest, list(task.body), task.group, task.member,
        task.priority.value, task.cost, task.submitted_ns, task.deadline_ns, task.state.value,
        task.reason.value if task.reason else None, task.detail, task.attempts, task.infrastructure_failures,
        task.data_failures, list(task.blamed), task.last_epoch, list(task.result) if task.result else None,
        task.head_version, task.tail_version, task.delivery, task.stale,
        [lease.session, lease.worker, lease.nonce, lease.epoch, lease.started, lease.label] if lease else None,
    ]  # fmt: skip


def _group(group: Group) -> list[Any]:
    counts = sorted((state.value, count) for state, count in group.counts.items() if count)
    return [
        group.group_id, group.trainer, group.policy, group.key, group.size, sorted(group.members.items()), counts,
        group.budgeted, group.admitted, group.phase, group.counted_at,
    ]  # fmt: skip


def _policy(policy: Policy) -> list[Any]:
    settings = policy.staleness.settings
    staleness = policy.staleness
    return [
        policy.name, policy.owner, policy.versions.epoch, list(policy.versions.known), policy.versions.news.label,
        policy.versions.news.source, policy.versions.news.sequence, settings.consumer_batch_size,
        settings.max_head_offpolicyness, settings.max_concurrent_rollouts, str(settings.on_stale), staleness.running,
        staleness.ready, staleness.consumed_since_version, policy.queue.fingerprint(),
    ]  # fmt: skip


def _trainer(trainer: Trainer) -> list[Any]:
    return [
        trainer.name, trainer.policy, trainer.nonce, trainer.session, trainer.next_delivery, trainer.floor,
        list(trainer.ready), sorted(trainer.deliveries.items()), sorted(trainer.keys.items()),
        sorted(trainer.groups.items()), trainer.open_tasks,
    ]  # fmt: skip


def _session(session: SessionState) -> list[Any]:
    credit = session.credit
    return [
        session.session, session.role.value, session.name, session.nonce, session.policy, session.slots, session.label,
        session.weights.value, session.draining, sorted(session.leases), credit.granted_tasks, credit.granted_bytes,
        credit.sent_tasks, credit.sent_bytes,
    ]  # fmt: skip
