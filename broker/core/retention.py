"""How long ended tasks stay known: for idempotency keys and for trainers restored from a checkpoint."""

from __future__ import annotations

from broker.core.model import BrokerState, Task
from broker.core.states import is_terminal


def forget_ended(state: BrokerState) -> None:
    """Drops the oldest ended tasks beyond the retention setting."""
    while len(state.ended) > state.settings.retain_ended:
        task = state.tasks.get(state.ended.popleft())
        # A rewound task is open again; it is listed anew when it ends.
        if task is not None and is_terminal(task.state):
            _forget(state, task)


def _forget(state: BrokerState, task: Task) -> None:
    del state.tasks[task.task_id]
    trainer = state.trainers[task.trainer]
    trainer.keys.pop(task.key, None)
    trainer.deliveries.pop(task.delivery, None)
    group = state.groups[task.group]
    group.counts[task.state] -= 1
    del group.members[task.member]
    group.size -= 1
    if not group.members:
        del state.groups[task.group]
        trainer.groups.pop(group.key, None)
