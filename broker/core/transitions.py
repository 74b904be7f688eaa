"""The only place where a task changes its state: ledger, group and budget follow from here."""

from __future__ import annotations

import bisect

from broker.core.model import Group, Policy, Task
from broker.core.states import STATE_INDEX, is_legal, is_terminal
from broker.core.turn import Turn
from rollmq.messages import (
    CAUSE_OF,
    Cause,
    DropItem,
    EndedItem,
    OnStale,
    Reason,
    TaskState,
)

QUEUED, LEASED, READY, DELIVERED = TaskState.QUEUED, TaskState.LEASED, TaskState.READY, TaskState.DELIVERED


def move(turn: Turn, task: Task, new: TaskState, detail: str = "") -> None:
    """Moves a task along one legal transition."""
    old = task.state
    if not is_legal(old, new):
        raise AssertionError(f"task {task.task_id} cannot go from {old} to {new} ({detail}); this is a bug in the core")
    task.state = new
    turn.state.ledger.move(old, new)
    turn.decide(task.task_id, STATE_INDEX[new], detail)
    group = turn.state.groups[task.group]
    group.counts[old] -= 1
    group.counts[new] = group.counts.get(new, 0) + 1
    if is_terminal(new) != is_terminal(old):
        _count_open(turn, task, 1 if is_terminal(old) else -1)
    update_phase(turn, group)


def _count_open(turn: Turn, task: Task, change: int) -> None:
    turn.state.trainers[task.trainer].open_tasks += change
    if change < 0:
        turn.state.ended.append(task.task_id)
        del turn.state.open_ids[task.task_id]
    else:
        turn.state.open_ids[task.task_id] = None


# --- groups and the budget ----------------------------------------------------------------------------------------


def update_phase(turn: Turn, group: Group) -> None:
    """Moves a group between waiting, running, ready and over, and the policy's budget with it."""
    policy = turn.state.policies[group.policy]
    new = _phase_of(group)
    if new == group.phase:
        return
    if group.budgeted:
        _count_phase(policy, group.phase, -1)
        _count_phase(policy, new, +1)
    if new == "over" and group.budgeted and group.counts.get(TaskState.CONSUMED, 0):
        policy.staleness.consumed_since_version += 1
        group.counted_at = policy.versions.news.sequence
    elif group.phase == "over" and group.counted_at == policy.versions.news.sequence:
        # Counting may have started anew since.
        policy.staleness.consumed_since_version = max(0, policy.staleness.consumed_since_version - 1)
        group.counted_at = 0
    group.phase = new
    turn.dispatch.add(group.policy)
    admitted = new in ("running", "ready")
    if admitted is not group.admitted:
        group.admitted = admitted
        _requeue_members(turn, group)


def _requeue_members(turn: Turn, group: Group) -> None:
    """Queued members sit in another heap once their group holds a place in the budget, or has lost it."""
    for task_id in group.members.values():
        task = turn.state.tasks[task_id]
        if task.state is QUEUED:
            push(turn, task)


def _phase_of(group: Group) -> str:
    counts = group.counts
    unfinished = counts.get(QUEUED, 0) + counts.get(LEASED, 0) + group.size - len(group.members)
    finished = counts.get(READY, 0) + counts.get(DELIVERED, 0)
    if unfinished == 0:
        return "ready" if finished else "over"
    begun = counts.get(LEASED, 0) + finished + counts.get(TaskState.CONSUMED, 0)
    # A group none of whose members is at work or done gives its place back.
    return "running" if begun else "waiting"


def _count_phase(policy: Policy, phase: str, change: int) -> None:
    if phase == "running":
        policy.staleness.running += change
    elif phase == "ready":
        policy.staleness.ready += change


# --- leaving a lease ----------------------------------------------------------------------------------------------


def release_lease(turn: Turn, task: Task) -> None:
    """Ends a task's lease, if it has one; the dispatch epoch stays as the last one known."""
    lease, task.lease = task.lease, None
    if lease is None:
        return
    session = turn.state.sessions.get(lease.session)
    if session is not None:
        session.leases.discard(task.task_id)
    turn.dispatch.add(task.policy)


def drop_lease(turn: Turn, task: Task, reason: Reason) -> None:
    """Ends a task's lease and tells the worker to stop."""
    lease = task.lease
    if lease is not None and lease.session in turn.state.sessions:
        turn.drops.setdefault(lease.session, []).append(DropItem(task.task_id, lease.epoch, reason))
    release_lease(turn, task)


def requeue(turn: Turn, task: Task, reason: Reason, detail: str = "") -> None:
    """Back to the queue without blame."""
    task.reason, task.detail = reason, detail
    task.result, task.stale = None, False
    forget_delivery(turn, task)
    release_lease(turn, task)
    move(turn, task, QUEUED, reason.value)
    push(turn, task)


def push(turn: Turn, task: Task) -> None:
    """Puts a queued task into its policy's queue."""
    group = turn.state.groups[task.group]
    policy = turn.state.policies[task.policy]
    policy.queue.push(task.trainer, task.task_id, task.priority, admitted=group.admitted)
    turn.dispatch.add(task.policy)


def fail_attempt(turn: Turn, task: Task, worker: str, reason: Reason, detail: str) -> None:
    """An attempt failed: counted against its cause's budget; then queued again or dead."""
    cause = CAUSE_OF[reason]
    settings = turn.state.settings
    if cause is Cause.INFRASTRUCTURE:
        task.infrastructure_failures += 1
    elif cause is Cause.DATA:
        task.data_failures += 1
    if cause is not Cause.NONE and worker not in task.blamed:
        task.blamed = (*task.blamed, worker)
    if _exhausted(turn, task, task.data_failures, settings.data_budget) or _exhausted(
        turn, task, task.infrastructure_failures, settings.infrastructure_budget
    ):
        end(turn, task, TaskState.DEAD, reason, detail)
    else:
        requeue(turn, task, reason, detail)


def _exhausted(turn: Turn, task: Task, failures: int, budget: int) -> bool:
    """Whether a budget is used up, on at least two workers where the policy has two."""
    if failures < budget:
        return False
    workers = sum(1 for s in turn.state.sessions.values() if s.slots and s.policy == task.policy)
    return len(task.blamed) >= 2 or workers < 2 or failures >= 2 * budget


# --- ends ---------------------------------------------------------------------------------------------------------


def end(turn: Turn, task: Task, state: TaskState, reason: Reason, detail: str = "") -> None:
    """Ends a task without a trajectory and tells its trainer."""
    task.reason, task.detail = reason, detail
    forget_delivery(turn, task)
    drop_lease(turn, task, reason)
    move(turn, task, state, reason.value)
    trainer = turn.state.trainers[task.trainer]
    if trainer.session in turn.state.sessions:
        turn.endings.setdefault(trainer.session, []).append(ended_item(task))


def ended_item(task: Task) -> EndedItem:
    """What the trainer is told of a task that is over."""
    text = f"{task.reason.value if task.reason else ''}{': ' if task.detail else ''}{task.detail}"
    return EndedItem(task.task_id, task.state, text[:300])


def became_stale(turn: Turn, task: Task, detail: str) -> None:
    """A task whose generated tokens are too old, as the policy's `on_stale` says (not for `deliver`)."""
    policy = turn.state.policies[task.policy]
    if policy.staleness.settings.on_stale is OnStale.DROP:
        end(turn, task, TaskState.STALE, Reason.STALE_VERSION, detail)
        return
    drop_lease(turn, task, Reason.STALE_VERSION)
    requeue(turn, task, Reason.STALE_VERSION, detail)


def staleness_detail(policy: Policy, head_version: int) -> str:
    """Both versions, for the record of why something was too old."""
    return (
        f"head version {head_version}, consumer version {policy.versions.version}, "
        f"bound {policy.staleness.settings.max_head_offpolicyness}"
    )


# --- deliveries ---------------------------------------------------------------------------------------------------


def make_ready(turn: Turn, task: Task, detail: str) -> None:
    """The task's result waits for its trainer, with its place in the delivery sequence."""
    trainer = turn.state.trainers[task.trainer]
    if task.delivery == 0:
        task.delivery = trainer.next_delivery
        trainer.next_delivery += 1
        trainer.deliveries[task.delivery] = task.task_id
    trainer.floor = min(trainer.floor, task.delivery)
    move(turn, task, READY, detail)
    bisect.insort(trainer.ready, task.delivery)
    turn.deliver.add(task.trainer)


def forget_delivery(turn: Turn, task: Task) -> None:
    """Takes the task out of the delivery sequence; a later result gets a new, higher place."""
    if task.delivery == 0:
        return
    trainer = turn.state.trainers[task.trainer]
    trainer.deliveries.pop(task.delivery, None)
    discard_ready(trainer.ready, task.delivery)
    task.delivery = 0


def discard_ready(ready: list[int], delivery: int) -> None:
    """Removes a delivery from the sorted list of those waiting, if it is there."""
    index = bisect.bisect_left(ready, delivery)
    if index < len(ready) and ready[index] == delivery:
        del ready[index]
