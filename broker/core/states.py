"""The states of a task and its legal transitions, as data.

A task is submitted into QUEUED. A worker holds it while LEASED; a worker that fails, dies or is too slow sends it
back to QUEUED. An accepted result makes it READY; handing it to its trainer DELIVERED; the trainer's acknowledgement
CONSUMED. A result that became older than the policy's bound goes back to QUEUED (`on_stale=retry`) or ends as STALE.
A session that breaks returns DELIVERED to READY, so that the next session gets it again. CONSUMED is left only by a
trainer that is restored from an older checkpoint and asks for what it had not seen by then.
"""

from __future__ import annotations

from rollmq.messages import TERMINAL_STATES, TaskState

QUEUED, LEASED, READY, DELIVERED = TaskState.QUEUED, TaskState.LEASED, TaskState.READY, TaskState.DELIVERED
CONSUMED, CANCELLED, EXPIRED = TaskState.CONSUMED, TaskState.CANCELLED, TaskState.EXPIRED
STALE, DEAD = TaskState.STALE, TaskState.DEAD

TRANSITIONS: dict[TaskState, frozenset[TaskState]] = {
    QUEUED: frozenset({LEASED, CANCELLED, EXPIRED, DEAD}),
    LEASED: frozenset({QUEUED, READY, CANCELLED, EXPIRED, STALE, DEAD}),
    READY: frozenset({DELIVERED, CONSUMED, QUEUED, CANCELLED, STALE}),
    DELIVERED: frozenset({CONSUMED, READY, QUEUED, CANCELLED, STALE}),
    CONSUMED: frozenset({READY}),
    CANCELLED: frozenset(),
    EXPIRED: frozenset(),
    STALE: frozenset(),
    DEAD: frozenset(),
}

STATES: tuple[TaskState, ...] = tuple(TaskState)
"""All states in a fixed order; a journal record names a state by its index here."""

STATE_INDEX: dict[TaskState, int] = {state: index for index, state in enumerate(STATES)}


def is_legal(old: TaskState, new: TaskState) -> bool:
    """Whether a task may go from one state to the other."""
    return new in TRANSITIONS[old]


def is_terminal(state: TaskState) -> bool:
    """Whether a task in this state is over."""
    return state in TERMINAL_STATES
