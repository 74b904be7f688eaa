"""Which queued task goes to which worker now.

A task goes only to a worker of its policy that has credit, is not draining, and whose engine has proved a version
within the staleness bound; a group that is not yet admitted goes only while the admission budget has room.
"""

from __future__ import annotations

from broker.core.leases import grant_lease
from broker.core.model import Policy, SessionState, Task
from broker.core.turn import Turn, split_by_bytes
from rollmq.messages import Task as TaskMessage
from rollmq.messages import TaskItem, TaskState, WeightState


def dispatch(turn: Turn, policy: Policy) -> None:
    """Dispatches until queue, budget or workers are exhausted."""
    workers = [s for s in turn.state.sessions.values() if s.slots and can_serve(policy, s)]
    batches: dict[int, list[tuple[TaskItem, Task]]] = {}
    while workers:
        task = _next_task(turn, policy)
        if task is None:
            break
        worker = _choose_worker(task, workers)
        item = _lease_to(turn, policy, task, worker)
        batches.setdefault(worker.session, []).append((item, task))
        if worker.credit.free() == 0:
            workers.remove(worker)
    for session, batch in batches.items():
        _send_batch(turn, policy, session, batch)


def can_serve(policy: Policy, session: SessionState) -> bool:
    """Whether a worker may get tasks of the policy now."""
    if session.policy != policy.name or session.draining or session.weights is not WeightState.READY:
        return False
    version = policy.versions.version_of(session.label)
    if version is None or policy.staleness.is_stale(version, policy.versions.version):
        return False
    return session.credit.free() > 0


def _next_task(turn: Turn, policy: Policy) -> Task | None:
    tasks, groups = turn.state.tasks, turn.state.groups

    def is_current(task_id: int, admitted: bool) -> bool:
        task = tasks.get(task_id)
        return task is not None and task.state is TaskState.QUEUED and groups[task.group].admitted is admitted

    found = policy.queue.next(fresh_allowed=policy.staleness.capacity() > 0, is_current=is_current)
    return None if found is None else tasks[found[1]]


def _choose_worker(task: Task, workers: list[SessionState]) -> SessionState:
    """The least loaded worker; one that has not failed this task before, where there is one."""
    return min(workers, key=lambda s: (s.name in task.blamed, len(s.leases) / s.slots, s.session))


def _lease_to(turn: Turn, policy: Policy, task: Task, worker: SessionState) -> TaskItem:
    epoch = grant_lease(turn, task, worker)
    policy.queue.served(task.trainer, task.cost)
    worker.credit.spend(task.body.length)
    left_s = max(0.0, (task.deadline_ns - turn.now_ns) / 1e9)
    return TaskItem(task.task_id, epoch, task.attempts, policy.name, left_s, task.group, task.member)


def _send_batch(turn: Turn, policy: Policy, session: int, batch: list[tuple[TaskItem, Task]]) -> None:
    for piece in split_by_bytes(batch, lambda entry: entry[1].body.length, turn.state.settings.max_items):
        items = tuple(item for item, _ in piece)
        bodies = tuple(task.body for _, task in piece)
        turn.send(session, TaskMessage(session, (policy.versions.news,), items, ()), bodies)
