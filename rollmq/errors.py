"""The one family of exceptions.

Every message says what happened, to what, and what to do. Nothing here imports anything, so every room may
raise and catch these without a cost.
"""

from __future__ import annotations


class RollmqError(Exception):
    """Base of every error that rollmq raises on purpose."""


class ConfigError(RollmqError):
    """A setting or command-line value is wrong or contradicts another."""


class DeadlineExceeded(RollmqError, TimeoutError):
    """A wait ended without what it waited for; the message names what was awaited and for how long."""


class ProtocolError(RollmqError):
    """Bytes that are not a legal message: wrong magic, version, type, field, length or checksum."""


class Refused(RollmqError):
    """The broker answered a request with a refusal.

    Attributes:
        code: the reason code, one of `rollmq.messages.RefusalCode`.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}" if message else code)
        self.code = code


class NotConnected(RollmqError):
    """There is no session with the broker within the time allowed."""


class SessionSuperseded(RollmqError):
    """A newer process with the same role and name took over; this one must stop."""


class TaskFailed(RollmqError):
    """A task ended without a trajectory.

    Attributes:
        task_id: the task.
        state: its terminal state: `dead`, `cancelled`, `expired` or `stale`.
        reason: the recorded reason, as text.
    """

    def __init__(self, task_id: int, state: str, reason: str) -> None:
        super().__init__(f"task {task_id} ended as {state}: {reason}; see `rollmq tasks --id {task_id}`")
        self.task_id = task_id
        self.state = state
        self.reason = reason


class JournalError(RollmqError):
    """Base of what can go wrong with the journal."""


class JournalLocked(JournalError):
    """Another process holds the journal's directory."""


class JournalDamaged(JournalError):
    """The journal holds bytes that no crash can explain; it is never repaired silently."""


class JournalFailed(JournalError):
    """A write or fsync failed; the broker must stop, since a failed fsync cannot be retried."""


class ReplayMismatch(RollmqError):
    """Replaying a journal gave a decision that differs from the recorded one."""


class EngineError(RollmqError):
    """Base of what can go wrong with an inference server; infrastructure, not the task's fault."""


class EngineLaunchError(EngineError):
    """The server could not be started; the message holds exit code, log file and last log lines."""


class EngineUnavailable(EngineError):
    """The server does not answer, answered 5xx, or died during a request."""


class EngineVersionUnknown(EngineError):
    """The server's weight version is unknown or is not the one it should be."""


class WeightUpdateError(EngineError):
    """New weights could not be loaded; the engine is fenced until it proves a version."""


class RequestRejected(RollmqError):
    """The server, or our own check before it, rejects this request (4xx): the task's fault, never retried."""


class GenerationInterrupted(RollmqError):
    """Generation was cancelled by its owner before it ended."""


class WorkflowError(RollmqError):
    """A workflow raised or is unknown: the task's fault."""


class RewardError(WorkflowError):
    """A reward function raised, is unknown, or did not answer within its timeout."""
