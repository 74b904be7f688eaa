"""Dispatch epochs and leases: who holds a task, and how a late answer is told from a current one.

The epoch is the safety mechanism: every dispatch has a new one, (broker epoch << 32) | counter, and RESULT, NACK and
STARTED under any other change nothing. The lease is only for liveness. Since the broker epoch is raised durably at
each start, an epoch is never given twice even if the record of a dispatch was lost.
"""

from __future__ import annotations

from broker.core.model import Lease, SessionState, Task
from broker.core.transitions import fail_attempt, move, requeue
from broker.core.turn import Turn
from rollmq.messages import Adoption, Reason, RefusalCode, TaskEpoch, TaskState

EPOCH_SHIFT = 32


def next_epoch(turn: Turn) -> int:
    """A dispatch epoch that was never given before."""
    turn.state.next_dispatch += 1
    return (turn.state.broker_epoch << EPOCH_SHIFT) | turn.state.next_dispatch


def grant_lease(turn: Turn, task: Task, session: SessionState) -> int:
    """Gives a queued task to a worker; returns the dispatch epoch."""
    epoch = next_epoch(turn)
    task.attempts += 1
    task.lease = Lease(session.session, session.name, session.nonce, epoch)
    task.last_epoch = epoch
    session.leases.add(task.task_id)
    move(turn, task, TaskState.LEASED, f"{session.name} {epoch}")
    return epoch


def refuse_epoch(task: Task | None, epoch: int) -> RefusalCode | None:
    """Why a message about a lease changes nothing, or None if it is current."""
    if task is None:
        return RefusalCode.UNKNOWN_TASK
    if task.lease is not None and task.lease.epoch == epoch:
        return None
    if task.state is TaskState.CANCELLED:
        return RefusalCode.CANCELLED
    if task.state in (TaskState.QUEUED, TaskState.LEASED):
        return RefusalCode.STALE_EPOCH
    return RefusalCode.ALREADY_DONE


def end_leases(turn: Turn, session: SessionState, started: Reason, unstarted: Reason, detail: str) -> None:
    """The worker is gone: started tasks are counted by cause, the others go back untouched."""
    for task_id in sorted(session.leases):
        task = turn.state.tasks[task_id]
        if task.lease is not None and task.lease.started:
            fail_attempt(turn, task, session.name, started, detail)
        else:
            requeue(turn, task, unstarted, detail)


def adopt(turn: Turn, session: SessionState, claims: tuple[TaskEpoch, ...]) -> tuple[list[Adoption], list[TaskEpoch]]:
    """Leases that a reconnecting worker reports: taken over under a new epoch where the task is still its own or free.

    A task counts as free when it is queued and this claim is its last dispatch: nobody else has had it since.
    """
    adopted: list[Adoption] = []
    dropped: list[TaskEpoch] = []
    for claim in claims:
        task = turn.state.tasks.get(claim.task_id)
        if task is None or task.last_epoch != claim.epoch or task.state not in (TaskState.QUEUED, TaskState.LEASED):
            dropped.append(claim)
            continue
        adopted.append(Adoption(claim.task_id, claim.epoch, _take_over(turn, task, session)))
    return adopted, dropped


def _take_over(turn: Turn, task: Task, session: SessionState) -> int:
    if task.lease is None:
        task.attempts -= 1  # the same attempt goes on
        return grant_lease(turn, task, session)
    old = turn.state.sessions.get(task.lease.session)
    if old is not None:
        old.leases.discard(task.task_id)
    epoch = next_epoch(turn)
    task.lease.session, task.lease.epoch = session.session, epoch
    task.lease.worker, task.lease.nonce = session.name, session.nonce
    task.last_epoch = epoch
    session.leases.add(task.task_id)
    turn.decide(task.task_id, -1, f"adopted by {session.name} {epoch}")
    return epoch


def orphaned_leases(turn: Turn) -> list[Task]:
    """Leases whose session is gone (after a restart of the broker), oldest first."""
    sessions = turn.state.sessions
    open_tasks = (turn.state.tasks[task_id] for task_id in turn.state.open_ids)
    return [task for task in open_tasks if task.lease is not None and task.lease.session not in sessions]
