"""Which reason an error of an episode is reported with. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from rollmq.errors import (
    EngineError,
    GenerationInterrupted,
    RequestRejected,
    RewardError,
    RollmqError,
    WorkflowError,
)
from rollmq.messages import Reason
from workers.leases import Failed
from workers.outbox import bounded

_REASONS: tuple[tuple[type[BaseException], Reason], ...] = (
    (EngineError, Reason.ENGINE_FAILED),
    (GenerationInterrupted, Reason.ENGINE_FAILED),
    (RequestRejected, Reason.REQUEST_REJECTED),
    (RewardError, Reason.REWARD_FAILED),
    (WorkflowError, Reason.WORKFLOW_RAISED),
)


def describe_failure(error: BaseException, *, started: bool) -> Failed:
    """The outcome of an episode that raised.

    The engine's errors win wherever they hide (in an exception group of concurrent turns, or as the declared cause
    of a workflow's own exception): a task must not pay for a dead engine. A task that had not reached the engine is
    returned without blame.
    """
    for kind, reason in _REASONS:
        for leaf in _leaves(error):
            if isinstance(leaf, kind):
                if reason is Reason.ENGINE_FAILED and not started:
                    reason = Reason.RETURNED
                return Failed(reason, bounded(str(leaf) or type(leaf).__name__))
    return Failed(Reason.WORKFLOW_RAISED, bounded(_text(error)))


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
        return
    yield error
    if error.__cause__ is not None and not isinstance(error, RollmqError):
        yield from _leaves(error.__cause__)


def _text(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
