"""PUBLISH, RESUME and WEIGHTS: which version is current, and what a change of it does to work in hand."""

from __future__ import annotations

from broker.core.events import Broadcast
from broker.core.model import Policy, SessionState, Task, Trainer
from broker.core.results import is_too_old
from broker.core.transitions import (
    became_stale,
    discard_ready,
    drop_lease,
    make_ready,
    move,
    requeue,
    staleness_detail,
)
from broker.core.turn import Turn
from rollmq.messages import (
    Publish,
    Published,
    Reason,
    Refusal,
    RefusalCode,
    Resume,
    Resumed,
    TaskState,
    Weights,
)


def publish(turn: Turn, session: SessionState, message: Publish) -> None:
    """A new version: logged, broadcast, and everything that it makes too old is swept."""
    policy = turn.state.policies[session.policy]
    refusal = _refuse(policy, session, message)
    if refusal is not None:
        turn.decide(0, -1, f"publish refused: {refusal.code.value}")
        turn.answer(refusal)
        return
    news = policy.versions.publish(message.version, message.source, turn.sequence)
    policy.staleness.version_published()
    turn.decide(0, -1, f"policy {policy.name} is at {news.label}")
    turn.effects.append(Broadcast(news, turn.sequence))
    sweep(turn, policy)
    turn.answer(Published(session.session, message.request, news))
    turn.dispatch.add(policy.name)


def _refuse(policy: Policy, session: SessionState, message: Publish) -> Refusal | None:
    if policy.owner != session.name:
        text = f"policy {policy.name} is owned by trainer {policy.owner}; only it may publish"
        return Refusal(session.session, message.request, RefusalCode.NOT_ALLOWED, text)
    if message.version <= policy.versions.version:
        text = f"version {message.version} does not grow: policy {policy.name} is at {policy.versions.version}"
        return Refusal(session.session, message.request, RefusalCode.STALE_VERSION, text)
    return None


def sweep(turn: Turn, policy: Policy) -> None:
    """Ready results and leases that can no longer be delivered leave; work within the bound is not touched."""
    for task in open_tasks(turn, policy):
        head = _known_head(policy, task)
        if head is not None and is_too_old(policy, head):
            became_stale(turn, task, staleness_detail(policy, head))


def open_tasks(turn: Turn, policy: Policy) -> list[Task]:
    """Tasks of the policy that are leased or ready, oldest first."""
    states = (TaskState.LEASED, TaskState.READY)
    tasks = (turn.state.tasks[task_id] for task_id in turn.state.open_ids)
    return [task for task in tasks if task.policy == policy.name and task.state in states]


def _known_head(policy: Policy, task: Task) -> int | None:
    """The head version if it can be known now: of a result, or of a lease that has started."""
    if task.state is TaskState.READY:
        return task.head_version
    if task.lease is not None and task.lease.started:
        return policy.versions.version_of(task.lease.label)
    return None


def weights(turn: Turn, session: SessionState, message: Weights) -> None:
    """What a worker's engine proved; it decides whether the worker gets tasks."""
    session.weights, session.label, session.weights_detail = message.state, message.label, message.detail
    turn.decide(0, -1, f"worker {session.name} is {message.state.value} at {message.label}")
    turn.dispatch.add(session.policy)


# --- a trainer restored from a checkpoint -------------------------------------------------------------------------


def resume(turn: Turn, session: SessionState, message: Resume) -> None:
    """Puts deliveries and version back to where the trainer's checkpoint was."""
    policy = turn.state.policies[session.policy]
    trainer = turn.state.trainers[session.name]
    refusal = _refuse_resume(policy, trainer, session, message)
    if refusal is not None:
        turn.decide(0, -1, f"resume refused: {refusal.code.value}")
        turn.answer(refusal)
        return
    if message.version < policy.versions.version:
        _go_back(turn, policy, message.version)
    rewound = _rewind(turn, trainer, message)
    turn.answer(Resumed(session.session, message.request, rewound, policy.versions.news))


def _refuse_resume(policy: Policy, trainer: Trainer, session: SessionState, message: Resume) -> Refusal | None:
    current = policy.versions.version
    if message.cursor >= trainer.next_delivery:
        text = (
            f"the checkpoint has taken delivery {message.cursor} of trainer {trainer.name}, but this journal's next is "
            f"{trainer.next_delivery}; is this the journal of that run?"
        )
        return Refusal(session.session, message.request, RefusalCode.CONFLICT, text)
    if message.version > current:
        text = (
            f"the checkpoint is at version {message.version} but policy {policy.name} is at {current}; is this the "
            "journal of that run? publish the checkpoint's weights as a new version to go on with this one"
        )
        return Refusal(session.session, message.request, RefusalCode.CONFLICT, text)
    if message.version < current and policy.owner != session.name:
        text = f"policy {policy.name} is owned by trainer {policy.owner}; only it may go back to {message.version}"
        return Refusal(session.session, message.request, RefusalCode.NOT_ALLOWED, text)
    if message.version < current and policy.versions.find(message.version) is None:
        text = f"the weights of version {message.version} are no longer remembered; the policy is at {current}"
        return Refusal(session.session, message.request, RefusalCode.CONFLICT, text)
    return None


def _go_back(turn: Turn, policy: Policy, version: int) -> None:
    """The policy returns to an earlier version; what later weights produced is of an abandoned lineage."""
    earlier = policy.versions.find(version)
    assert earlier is not None
    for task in open_tasks(turn, policy):
        newest = _newest_version(policy, task)
        if newest is None or newest > version:
            drop_lease(turn, task, Reason.REWOUND)
            requeue(turn, task, Reason.REWOUND, f"trainer restored at version {version}")
    news = policy.versions.go_back(earlier, turn.sequence)
    policy.staleness.start_anew()
    turn.decide(0, -1, f"policy {policy.name} went back to {news.label}")
    turn.effects.append(Broadcast(news, turn.sequence))
    turn.dispatch.add(policy.name)


def _newest_version(policy: Policy, task: Task) -> int | None:
    """The newest version that may be in a task's tokens; None = cannot be known."""
    if task.state is TaskState.READY:
        return task.tail_version
    if task.lease is None or not task.lease.started:
        return 0
    # A started lease may have lived through updates since: its tail is unknown until it returns.
    return None


def _rewind(turn: Turn, trainer: Trainer, message: Resume) -> int:
    taken = set(message.taken)
    rewound = 0
    for delivery, task_id in list(trainer.deliveries.items()):
        task = turn.state.tasks[task_id]
        was_taken = delivery <= message.cursor or delivery in taken
        if was_taken and task.state in (TaskState.READY, TaskState.DELIVERED):
            discard_ready(trainer.ready, delivery)
            move(turn, task, TaskState.CONSUMED, "taken before the checkpoint")
        elif not was_taken and task.state is TaskState.CONSUMED:
            make_ready(turn, task, "rewound to the checkpoint")
            rewound += 1
            if task.tail_version > message.version:
                # Its newest tokens are of a version that the checkpoint has not trained yet: run it again.
                requeue(turn, task, Reason.REWOUND, f"trainer restored at version {message.version}")
    return rewound
