"""What the broker tells people: the status document and lists of tasks, as plain values for JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from broker.core.model import BrokerState, Policy, SessionState, Task, Trainer
from broker.core.states import is_terminal
from broker.journal.interface import JournalStat
from rollmq.messages import Query, Role, TaskState

MAX_ROWS = 10_000


def status(state: BrokerState, journal: JournalStat, broker: dict[str, Any]) -> dict[str, Any]:
    """The document of `rollmq status --json`."""
    return {
        "ledger": state.ledger.as_dict(),
        "policies": {name: _policy(state, policy) for name, policy in sorted(state.policies.items())},
        "workers": [_worker(state, s) for s in state.sessions.values() if s.role is Role.WORKER],
        "trainers": [_trainer(state, trainer) for _, trainer in sorted(state.trainers.items())],
        "journal": asdict(journal),
        "broker": {"epoch": state.broker_epoch, "draining": state.draining, **broker},
    }


def _policy(state: BrokerState, policy: Policy) -> dict[str, Any]:
    settings, staleness, news = policy.staleness.settings, policy.staleness, policy.versions.news
    return {
        "owner": policy.owner,
        "run_epoch": policy.versions.epoch,
        "version": news.version,
        "label": news.label,
        "source": news.source,
        "consumer_batch_size": settings.consumer_batch_size,
        "max_head_offpolicyness": settings.max_head_offpolicyness,
        "max_concurrent_rollouts": settings.max_concurrent_rollouts,
        "on_stale": str(settings.on_stale),
        "running_groups": staleness.running,
        "ready_groups": staleness.ready,
        "consumed_since_version": staleness.consumed_since_version,
        "capacity": staleness.capacity(),
    }


def _worker(state: BrokerState, session: SessionState) -> dict[str, Any]:
    policy = state.policies.get(session.policy)
    return {
        "name": session.name,
        "session": session.session,
        "engine": session.engine,
        "policy": session.policy,
        "host": session.host,
        "pid": session.pid,
        "slots": session.slots,
        "leases": len(session.leases),
        "label": session.label,
        "version": policy.versions.version_of(session.label) if policy is not None else None,
        "weights": session.weights.value,
        "detail": session.weights_detail,
        "draining": session.draining,
        "free_credit": session.credit.free(),
    }


def _trainer(state: BrokerState, trainer: Trainer) -> dict[str, Any]:
    return {
        "name": trainer.name,
        "policy": trainer.policy,
        "connected": trainer.session in state.sessions,
        "open_tasks": trainer.open_tasks,
        "ready": len(trainer.ready),
        "next_delivery": trainer.next_delivery,
    }


def tasks(state: BrokerState, query: Query) -> list[dict[str, Any]]:
    """Rows of `rollmq tasks`: one task, those in a state, or the open ones; at most `query.limit`."""
    if query.task_id:
        task = state.tasks.get(query.task_id)
        return [] if task is None else [_task(state, task)]
    limit = min(query.limit, MAX_ROWS)
    if query.state is None or not is_terminal(query.state):
        candidates = (state.tasks[task_id] for task_id in sorted(state.open_ids))
    else:
        candidates = (state.tasks[task_id] for task_id in reversed(state.ended) if task_id in state.tasks)
    rows: list[dict[str, Any]] = []
    for task in candidates:
        if query.state is None or task.state is query.state:
            rows.append(_task(state, task))
        if len(rows) >= limit:
            break
    return rows


def _task(state: BrokerState, task: Task) -> dict[str, Any]:
    lease = task.lease
    return {
        "task_id": task.task_id,
        "state": task.state.value,
        "trainer": task.trainer,
        "policy": task.policy,
        "key": task.key,
        "group": task.group,
        "member": task.member,
        "attempts": task.attempts,
        "infrastructure_failures": task.infrastructure_failures,
        "data_failures": task.data_failures,
        "blamed": list(task.blamed),
        "worker": lease.worker if lease is not None else None,
        "started": lease.started if lease is not None else False,
        "reason": task.reason.value if task.reason is not None else None,
        "detail": task.detail,
        "head_version": task.head_version if task.result is not None else None,
        "tail_version": task.tail_version if task.result is not None else None,
        "delivery": task.delivery if task.state in (TaskState.READY, TaskState.DELIVERED, TaskState.CONSUMED) else None,
    }
