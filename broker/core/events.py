"""What the machine is told, and what it tells back.

Inputs are wire messages of a session, or the broker's own events below, which only the journal and the machine see.
Outputs are effects for the server to carry out. Both are plain data.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from broker.core.model import BodyRef
from rollmq.codec import register
from rollmq.messages import Message, PolicyNews


@register
@dataclass(frozen=True, slots=True)
class BrokerStarted(Message):
    """A broker process took over the journal: sessions are gone, leases wait for their workers."""

    TYPE: ClassVar[int] = 128
    broker_epoch: int
    heartbeat_s: float
    dead_after_s: float
    task_deadline_s: float
    infrastructure_budget: int
    data_budget: int
    max_open_tasks: int
    retain_ended: int
    max_body_bytes: int
    max_items: int


@register
@dataclass(frozen=True, slots=True)
class SessionLost(Message):
    """A session was silent for too long, or its peer could not keep up."""

    TYPE: ClassVar[int] = 129
    session: int
    reason: str = field(default="", metadata={"max": 300})


@register
@dataclass(frozen=True, slots=True)
class TasksExpired(Message):
    """The deadlines of these tasks passed."""

    TYPE: ClassVar[int] = 130
    tasks: tuple[int, ...]


@register
@dataclass(frozen=True, slots=True)
class GraceEnded(Message):
    """Workers of before the restart have had their time to come back."""

    TYPE: ClassVar[int] = 131
    broker_epoch: int


@register
@dataclass(frozen=True, slots=True)
class BrokerDraining(Message):
    """The broker is being stopped: no new submissions."""

    TYPE: ClassVar[int] = 132
    broker_epoch: int


@dataclass(frozen=True, slots=True)
class Event:
    """One input with all that the decision may depend on.

    Attributes:
        now_ns: the broker's clock.
        message: what was said.
        digests: one digest per body of a SUBMIT, for idempotency.
        lengths: one length per body.
    """

    now_ns: int
    message: Message
    digests: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SendTo:
    """A message for a session; `requires` is the journal sequence that must be durable first.

    `bodies` name what the server reads from the journal and puts into the message.
    """

    session: int
    message: Message
    requires: int
    bodies: tuple[BodyRef, ...] = ()


@dataclass(frozen=True, slots=True)
class Reply:
    """A message for the peer that said this, which has no session (a refused or superseding HELLO)."""

    message: Message
    requires: int


@dataclass(frozen=True, slots=True)
class OpenSession:
    """Bind the peer that said HELLO to this session."""

    session: int


@dataclass(frozen=True, slots=True)
class CloseSession:
    """The session is over; what is queued for it may still be sent."""

    session: int


@dataclass(frozen=True, slots=True)
class Broadcast:
    """News for the PUB socket."""

    news: PolicyNews
    requires: int


@dataclass(frozen=True, slots=True)
class WatchDeadline:
    """Tell the timers that this task expires at that time of the broker's clock."""

    task_id: int
    at_ns: int


Effect = SendTo | Reply | OpenSession | CloseSession | Broadcast | WatchDeadline

Decision = tuple[int, int, str]
"""(subject, state index or -1, detail): what was decided about a task (subject = its id) or in general (subject 0)."""
