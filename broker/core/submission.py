"""SUBMIT and CANCEL: how tasks come in and are withdrawn.

An idempotency key lives as long as its task: the same key with the same body is the same task, whatever its state; with
another body it is a conflict.
"""

from __future__ import annotations

from broker.core.events import WatchDeadline
from broker.core.model import BodyRef, Group, SessionState, Task, Trainer
from broker.core.states import STATE_INDEX, is_terminal
from broker.core.transitions import end, push
from broker.core.turn import Turn, chunks
from rollmq.messages import (
    Cancel,
    Priority,
    Reason,
    Refusal,
    RefusalCode,
    Settled,
    Submit,
    SubmitItem,
    SubmitOutcome,
    Submitted,
    TaskOutcome,
    TaskState,
)

OUTCOMES_PER_ANSWER = 100
LONGEST_DEADLINE_S = 10 * 365 * 86_400.0
LARGEST_COST = 2**31
"""Bounds what one task can add to a trainer's virtual time, so that no sum leaves 64 bits."""


def submit(turn: Turn, session: SessionState, message: Submit) -> None:
    """Takes in each item, or says why not; one answer for all."""
    refusal = _refuse_all(turn, session, message)
    if refusal is not None:
        turn.decide(0, -1, f"submit refused: {refusal.code.value}")
        turn.answer(refusal)
        return
    trainer = turn.state.trainers[session.name]
    digests = turn.event.digests
    outcomes = [
        _submit_one(turn, trainer, item, digests[index], ref)
        for index, (item, ref) in enumerate(zip(message.items, turn.body_refs(), strict=True))
    ]
    turn.answer(Submitted(session.session, message.request, tuple(outcomes)))


def _refuse_all(turn: Turn, session: SessionState, message: Submit) -> Refusal | None:
    settings = turn.state.settings

    def refuse(code: RefusalCode, text: str, retry_after_s: float = 0.0) -> Refusal:
        return Refusal(session.session, message.request, code, text, retry_after_s)

    if turn.state.draining:
        return refuse(RefusalCode.DRAINING, "the broker is stopping; submit again to the next one", 1.0)
    if len(message.items) > OUTCOMES_PER_ANSWER:
        return refuse(RefusalCode.TOO_LARGE, f"{len(message.items)} tasks in one SUBMIT; {OUTCOMES_PER_ANSWER} at most")
    longest = max(turn.event.lengths)
    if longest > settings.max_body_bytes:
        return refuse(RefusalCode.TOO_LARGE, f"a task of {longest} bytes; {settings.max_body_bytes} at most")
    open_tasks = turn.state.trainers[session.name].open_tasks
    if open_tasks + len(message.items) > settings.max_open_tasks:
        return refuse(RefusalCode.BUSY, f"{open_tasks} tasks of {session.name} are open; consume some first", 1.0)
    return None


def _submit_one(turn: Turn, trainer: Trainer, item: SubmitItem, digest: int, body: BodyRef) -> SubmitOutcome:
    known = trainer.keys.get(item.key)
    if known is not None:
        return _resubmitted(turn, turn.state.tasks[known], item, digest)
    group = _group_for(turn, trainer, item)
    if group is None:
        turn.decide(0, -1, f"conflict: group {item.group}")
        return SubmitOutcome(0, 0, None, RefusalCode.CONFLICT)
    task = _create(turn, trainer, group, item, digest, body)
    return SubmitOutcome(task.task_id, group.group_id, task.state, None)


def _resubmitted(turn: Turn, task: Task, item: SubmitItem, digest: int) -> SubmitOutcome:
    if task.digest != digest or task.member != item.member:
        turn.decide(task.task_id, -1, "conflict: same key, other body")
        return SubmitOutcome(task.task_id, task.group, task.state, RefusalCode.CONFLICT)
    return SubmitOutcome(task.task_id, task.group, task.state, None)


def _group_for(turn: Turn, trainer: Trainer, item: SubmitItem) -> Group | None:
    """The item's group, new or existing; None if the item contradicts it."""
    if not 0 <= item.member < item.size:
        return None
    group_id = trainer.groups.get(item.group) if item.group else None
    if group_id is not None:
        group = turn.state.groups[group_id]
        return group if group.size == item.size and item.member not in group.members else None
    group_id = turn.state.next_task
    budgeted = item.priority is not Priority.EVAL
    group = Group(group_id, trainer.name, trainer.policy, item.group, item.size, budgeted=budgeted)
    turn.state.groups[group_id] = group
    if item.group:
        trainer.groups[item.group] = group_id
    return group


def _create(turn: Turn, trainer: Trainer, group: Group, item: SubmitItem, digest: int, body: BodyRef) -> Task:
    state = turn.state
    deadline_s = min(item.deadline_s or state.settings.task_deadline_s, LONGEST_DEADLINE_S)
    task = Task(
        task_id=state.next_task,
        trainer=trainer.name,
        policy=trainer.policy,
        key=item.key,
        digest=digest,
        body=body,
        group=group.group_id,
        member=item.member,
        priority=item.priority,
        cost=min(item.cost, LARGEST_COST),
        submitted_ns=turn.now_ns,
        deadline_ns=turn.now_ns + int(deadline_s * 1e9),
    )
    state.next_task += 1
    state.tasks[task.task_id] = task
    state.open_ids[task.task_id] = None
    trainer.keys[item.key] = task.task_id
    trainer.open_tasks += 1
    group.members[item.member] = task.task_id
    group.counts[TaskState.QUEUED] = group.counts.get(TaskState.QUEUED, 0) + 1
    state.ledger.enter(TaskState.QUEUED)
    turn.decide(task.task_id, STATE_INDEX[TaskState.QUEUED], "submitted")
    turn.effects.append(WatchDeadline(task.task_id, task.deadline_ns))
    push(turn, task)
    return task


def cancel(turn: Turn, session: SessionState, message: Cancel) -> None:
    """Withdraws tasks of the session's own trainer."""
    outcomes = [TaskOutcome(task_id, 0, _cancel_one(turn, session, task_id)) for task_id in message.tasks]
    for part in chunks(outcomes, OUTCOMES_PER_ANSWER):
        turn.answer(Settled(session.session, message.request, part))


def _cancel_one(turn: Turn, session: SessionState, task_id: int) -> RefusalCode | None:
    task = turn.state.tasks.get(task_id)
    if task is None or task.trainer != session.name:
        return RefusalCode.UNKNOWN_TASK
    if is_terminal(task.state):
        return RefusalCode.CANCELLED if task.state is TaskState.CANCELLED else RefusalCode.ALREADY_DONE
    end(turn, task, TaskState.CANCELLED, Reason.CANCELLED, f"by {session.name}")
    return None


def expire(turn: Turn, tasks: tuple[int, ...]) -> None:
    """Ends tasks whose deadline passed before a result came; finished ones stay."""
    for task_id in tasks:
        task = turn.state.tasks.get(task_id)
        if task is not None and task.state in (TaskState.QUEUED, TaskState.LEASED):
            waited_s = (turn.now_ns - task.submitted_ns) / 1e9
            end(turn, task, TaskState.EXPIRED, Reason.DEADLINE, f"not finished {waited_s:.0f} s after submission")
