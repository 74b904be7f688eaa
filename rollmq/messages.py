"""Every wire message as a typed frozen record, and the reason codes.

This module says what may be said; how it becomes bytes is `rollmq.codec`. Nothing here may do I/O or hold state.

Conventions: `session` is 0 only in HELLO and in answers to peers without a session. `request` is a number chosen
by the asker and repeated in the one answer. `epoch` of a task is its dispatch epoch, `broker epoch << 32 | counter`.
A version label is `"{policy epoch}.{version}"`; the empty label means unknown.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar

PROTOCOL_VERSION = 1
NAME_LIMIT = 128
TEXT_LIMIT = 300
PATH_LIMIT = 1024


class Role(StrEnum):
    """What a peer is; decides which messages it may send."""

    WORKER = "worker"
    TRAINER = "trainer"
    ADMIN = "admin"


class TaskState(StrEnum):
    """Where a task is. The last five are terminal."""

    QUEUED = "queued"
    LEASED = "leased"
    READY = "ready"
    DELIVERED = "delivered"
    CONSUMED = "consumed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    STALE = "stale"
    DEAD = "dead"


TERMINAL_STATES = frozenset(
    {TaskState.CONSUMED, TaskState.CANCELLED, TaskState.EXPIRED, TaskState.STALE, TaskState.DEAD}
)


class RefusalCode(StrEnum):
    """Why the broker refuses a request."""

    BUSY = "busy"
    DISK_LOW = "disk_low"
    TOO_LARGE = "too_large"
    STALE_VERSION = "stale_version"
    STALE_EPOCH = "stale_epoch"
    ALREADY_DONE = "already_done"
    CANCELLED = "cancelled"
    UNKNOWN_TASK = "unknown_task"
    CONFLICT = "conflict"
    NOT_ALLOWED = "not_allowed"
    DRAINING = "draining"
    MALFORMED = "malformed"


class Reason(StrEnum):
    """Why an attempt ended without an accepted result, or a task left a state. See `CAUSE_OF`."""

    ENGINE_FAILED = "engine_failed"
    WORKER_LOST = "worker_lost"
    RETURNED = "returned"
    DRAINED = "drained"
    BROKER_RESTARTED = "broker_restarted"
    STALE_VERSION = "stale_version"
    WORKFLOW_RAISED = "workflow_raised"
    REQUEST_REJECTED = "request_rejected"
    REWARD_FAILED = "reward_failed"
    BAD_RESULT = "bad_result"
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    REWOUND = "rewound"


class Cause(StrEnum):
    """Which budget an attempt is counted against."""

    INFRASTRUCTURE = "infrastructure"
    DATA = "data"
    NONE = "none"


CAUSE_OF: dict[Reason, Cause] = {
    Reason.ENGINE_FAILED: Cause.INFRASTRUCTURE,
    Reason.WORKER_LOST: Cause.INFRASTRUCTURE,
    Reason.RETURNED: Cause.NONE,
    Reason.DRAINED: Cause.NONE,
    Reason.BROKER_RESTARTED: Cause.NONE,
    Reason.STALE_VERSION: Cause.NONE,
    Reason.WORKFLOW_RAISED: Cause.DATA,
    Reason.REQUEST_REJECTED: Cause.DATA,
    Reason.REWARD_FAILED: Cause.DATA,
    Reason.BAD_RESULT: Cause.DATA,
    Reason.DEADLINE: Cause.DATA,
    Reason.CANCELLED: Cause.NONE,
    Reason.REWOUND: Cause.NONE,
}


class OnStale(StrEnum):
    """What happens to a trajectory older than the bound."""

    RETRY = "retry"
    DROP = "drop"
    DELIVER = "deliver"


class Priority(StrEnum):
    """Scheduling class inside one trainer."""

    TRAIN = "train"
    EVAL = "eval"


class WeightState(StrEnum):
    """What a worker says of its engine's weights."""

    READY = "ready"
    UPDATING = "updating"
    FENCED = "fenced"


# --- records inside messages --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PolicyNews:
    """The newest published version of a policy: the truth that PUB only speeds up.

    Attributes:
        epoch: run epoch of the owner that published it.
        version: the version, >= 0.
        source: where the weights are (a directory); empty for version 0 at launch.
        sequence: journal sequence of the publication; the newest sequence wins.
    """

    policy: str
    epoch: int
    version: int
    source: str = field(metadata={"max": PATH_LIMIT})
    sequence: int

    @property
    def label(self) -> str:
        """The version label engines carry."""
        return f"{self.epoch}.{self.version}"


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """A policy's bounds, in groups. See the design's section 7.

    Attributes:
        consumer_batch_size: B, groups the trainer consumes per version.
        max_head_offpolicyness: eta, allowed staleness.
        max_concurrent_rollouts: most groups running at once; None = no bound of its own.
        on_stale: what to do with what is too old.
    """

    consumer_batch_size: int
    max_head_offpolicyness: int
    max_concurrent_rollouts: int | None
    on_stale: OnStale


@dataclass(frozen=True, slots=True)
class TaskEpoch:
    """One dispatch of one task."""

    task_id: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Adoption:
    """A lease that survived a reconnect: same task, new epoch."""

    task_id: int
    old_epoch: int
    epoch: int


@dataclass(frozen=True, slots=True)
class SubmitItem:
    """Meta of one submitted task; its body is a `rollmq.rollout.TaskSpec`.

    Attributes:
        key: idempotency key, unique per trainer.
        group: key of its group; empty = a group of its own.
        member: index in the group.
        size: number of members of the group.
        deadline_s: seconds from submission until it expires; 0 = the broker's default.
        priority: scheduling class.
        cost: expected tokens, for fairness.
    """

    key: str = field(metadata={"max": 256})
    group: str = field(default="", metadata={"max": 256})
    member: int = 0
    size: int = 1
    deadline_s: float = 0.0
    priority: Priority = Priority.TRAIN
    cost: int = 1


@dataclass(frozen=True, slots=True)
class SubmitOutcome:
    """What became of one submitted task: an id and its state, or a refusal code."""

    task_id: int
    group: int
    state: TaskState | None
    code: RefusalCode | None


@dataclass(frozen=True, slots=True)
class TaskOutcome:
    """Answer for one task named in a request: None = done, else why not."""

    task_id: int
    epoch: int
    code: RefusalCode | None


@dataclass(frozen=True, slots=True)
class TaskItem:
    """Meta of one dispatched task.

    Attributes:
        epoch: dispatch epoch, repeated in every message about this lease.
        attempt: 1 for the first.
        deadline_s: seconds left until the task expires.
    """

    task_id: int
    epoch: int
    attempt: int
    policy: str
    deadline_s: float
    group: int
    member: int


@dataclass(frozen=True, slots=True)
class StartedItem:
    """A task that began to generate, with the label of the weights it begins on."""

    task_id: int
    epoch: int
    label: str


@dataclass(frozen=True, slots=True)
class ResultItem:
    """Meta of one result; its body is an encoded episode.

    Attributes:
        head: label of the oldest weights among the generated tokens.
        tail: label of the newest.
        tokens: generated tokens.
    """

    task_id: int
    epoch: int
    head: str
    tail: str
    tokens: int


@dataclass(frozen=True, slots=True)
class NackItem:
    """One lease given back without a result."""

    task_id: int
    epoch: int
    reason: Reason
    detail: str = field(default="", metadata={"max": TEXT_LIMIT})


@dataclass(frozen=True, slots=True)
class DropItem:
    """A lease the worker must stop working on."""

    task_id: int
    epoch: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class DeliverItem:
    """Meta of one delivered trajectory.

    Attributes:
        sequence: the trainer's delivery sequence; stable, grows, may have gaps.
        size: number of members of the group.
        stale: True only under `on_stale=deliver`.
    """

    task_id: int
    sequence: int
    group: int
    member: int
    size: int
    head_version: int
    tail_version: int
    stale: bool


@dataclass(frozen=True, slots=True)
class EndedItem:
    """A task that ended, or will end, without a trajectory for its trainer. `state` None = unknown task."""

    task_id: int
    state: TaskState | None
    reason: str = field(default="", metadata={"max": TEXT_LIMIT})


# --- messages -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Message:
    """Base of all messages. `TYPE` is the byte on the wire."""

    TYPE: ClassVar[int] = -1


@dataclass(frozen=True, slots=True)
class Hello(Message):
    """Opens a session. `held` are leases at work, `unsent` leases whose results still have to be sent."""

    TYPE: ClassVar[int] = 1
    role: Role
    name: str
    nonce: bytes
    protocol_min: int = PROTOCOL_VERSION
    protocol_max: int = PROTOCOL_VERSION
    policy: str = "default"
    settings: PolicySettings | None = None
    owner: bool = True
    engine: str = ""
    slots: int = 0
    label: str = ""
    held: tuple[TaskEpoch, ...] = ()
    unsent: tuple[TaskEpoch, ...] = ()
    host: str = ""
    pid: int = 0


@dataclass(frozen=True, slots=True)
class Welcome(Message):
    """Answers HELLO. `policy_epoch` is the run epoch of the session's policy; `owner` whether it may publish.

    `floor` is the trainer's: no delivery with a lower sequence is open; 0 = not said.
    """

    TYPE: ClassVar[int] = 2
    session: int
    broker_epoch: int
    heartbeat_s: float
    dead_after_s: float
    max_body_bytes: int
    max_items: int
    policies: tuple[PolicyNews, ...] = ()
    policy_epoch: int = 0
    owner: bool = False
    adopted: tuple[Adoption, ...] = ()
    dropped: tuple[TaskEpoch, ...] = ()
    news_address: str = ""
    floor: int = 0


@dataclass(frozen=True, slots=True)
class Resync(Message):
    """The session is unknown or over; open a new one. `final` = do not: a newer process took the name."""

    TYPE: ClassVar[int] = 3
    reason: str = field(default="", metadata={"max": TEXT_LIMIT})
    final: bool = False


@dataclass(frozen=True, slots=True)
class Refusal(Message):
    """The one answer to a request that cannot be done."""

    TYPE: ClassVar[int] = 4
    session: int
    request: int
    code: RefusalCode
    message: str = field(default="", metadata={"max": TEXT_LIMIT})
    retry_after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Heartbeat(Message):
    """Sent every `heartbeat_s`; `progress` counts what the episode loop has done."""

    TYPE: ClassVar[int] = 5
    session: int
    progress: int = 0
    running: int = 0


@dataclass(frozen=True, slots=True)
class HeartbeatAck(Message):
    """Repeats the versions, so that a lost broadcast converges within a heartbeat."""

    TYPE: ClassVar[int] = 6
    session: int
    policies: tuple[PolicyNews, ...] = ()


@dataclass(frozen=True, slots=True)
class Bye(Message):
    """Ends a session on purpose: what it still holds is returned without blame."""

    TYPE: ClassVar[int] = 7
    session: int


@dataclass(frozen=True, slots=True)
class ByeAck(Message):
    """Answers BYE."""

    TYPE: ClassVar[int] = 8
    session: int


@dataclass(frozen=True, slots=True)
class Done(Message):
    """The plain positive answer."""

    TYPE: ClassVar[int] = 9
    session: int
    request: int


@dataclass(frozen=True, slots=True)
class Grant(Message):
    """Credit as running totals since the session opened: what the peer may have sent by then."""

    TYPE: ClassVar[int] = 10
    session: int
    tasks: int
    body_bytes: int


@dataclass(frozen=True, slots=True)
class Submit(Message):
    """Tasks to roll out; answered by SUBMITTED once durable."""

    TYPE: ClassVar[int] = 20
    session: int
    request: int
    items: tuple[SubmitItem, ...]
    bodies: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Submitted(Message):
    """One outcome per submitted item, in order."""

    TYPE: ClassVar[int] = 21
    session: int
    request: int
    outcomes: tuple[SubmitOutcome, ...]


@dataclass(frozen=True, slots=True)
class Cancel(Message):
    """Tasks the trainer no longer wants; answered by SETTLED."""

    TYPE: ClassVar[int] = 22
    session: int
    request: int
    tasks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Consumed(Message):
    """Trajectories the trainer has used; answered by DONE."""

    TYPE: ClassVar[int] = 23
    session: int
    request: int
    tasks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HandBack(Message):
    """Trajectories that became too old in the client's hands; answered by DONE."""

    TYPE: ClassVar[int] = 24
    session: int
    request: int
    tasks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Publish(Message):
    """A new version of the policy; answered by PUBLISHED."""

    TYPE: ClassVar[int] = 25
    session: int
    request: int
    version: int
    source: str = field(metadata={"max": PATH_LIMIT})


@dataclass(frozen=True, slots=True)
class Published(Message):
    """The version is durable and broadcast."""

    TYPE: ClassVar[int] = 26
    session: int
    request: int
    news: PolicyNews


@dataclass(frozen=True, slots=True)
class Resume(Message):
    """A trainer restored from a checkpoint: what it had taken, and its version; answered by RESUMED.

    Attributes:
        version: the policy version of the checkpoint.
        cursor: every delivery with sequence <= cursor had been taken (or is gone).
        taken: sequences above the cursor that had been taken as well.
    """

    TYPE: ClassVar[int] = 27
    session: int
    request: int
    version: int
    cursor: int
    taken: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Resumed(Message):
    """How many consumed trajectories will be delivered again, and the policy's state now."""

    TYPE: ClassVar[int] = 28
    session: int
    request: int
    rewound: int
    news: PolicyNews


@dataclass(frozen=True, slots=True)
class Deliver(Message):
    """Trajectories for the trainer. Nothing with a sequence below `floor` is still to come."""

    TYPE: ClassVar[int] = 29
    session: int
    floor: int
    items: tuple[DeliverItem, ...]
    bodies: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Watch(Message):
    """Asks for the fate of tasks; answered by ENDED holding those that are over or unknown (maybe none)."""

    TYPE: ClassVar[int] = 30
    session: int
    request: int
    tasks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ended(Message):
    """Tasks that ended without a trajectory. `request` is 0 when unasked."""

    TYPE: ClassVar[int] = 31
    session: int
    request: int
    items: tuple[EndedItem, ...]


@dataclass(frozen=True, slots=True)
class Task(Message):
    """Dispatched tasks, with the newest versions."""

    TYPE: ClassVar[int] = 40
    session: int
    policies: tuple[PolicyNews, ...]
    items: tuple[TaskItem, ...]
    bodies: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Started(Message):
    """Tasks that began to generate; only these can be blamed for a crash. Not answered."""

    TYPE: ClassVar[int] = 41
    session: int
    items: tuple[StartedItem, ...]


@dataclass(frozen=True, slots=True)
class Result(Message):
    """Finished tasks; sent again until SETTLED names them."""

    TYPE: ClassVar[int] = 42
    session: int
    items: tuple[ResultItem, ...]
    bodies: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Nack(Message):
    """Leases given back; answered by SETTLED."""

    TYPE: ClassVar[int] = 43
    session: int
    items: tuple[NackItem, ...]


@dataclass(frozen=True, slots=True)
class Settled(Message):
    """The terminal answer for results, nacks and cancels; the worker may forget what it names."""

    TYPE: ClassVar[int] = 44
    session: int
    request: int
    outcomes: tuple[TaskOutcome, ...]


@dataclass(frozen=True, slots=True)
class Drop(Message):
    """Leases that are over: stop the work, send nothing."""

    TYPE: ClassVar[int] = 45
    session: int
    items: tuple[DropItem, ...]


@dataclass(frozen=True, slots=True)
class Weights(Message):
    """What the worker's engine reports of its weights; only READY with a known label gets tasks. Not answered."""

    TYPE: ClassVar[int] = 46
    session: int
    state: WeightState
    label: str
    detail: str = field(default="", metadata={"max": TEXT_LIMIT})


@dataclass(frozen=True, slots=True)
class Drain(Message):
    """The worker wants no more tasks; what it has not started it returns itself. Answered by DONE."""

    TYPE: ClassVar[int] = 47
    session: int
    request: int


@dataclass(frozen=True, slots=True)
class Query(Message):
    """Asks for facts as JSON: `what` is `status` or `tasks`; answered by REPORT.

    Attributes:
        state: only tasks in this state (`tasks`).
        task_id: only this task (`tasks`); 0 = all.
        limit: most rows.
    """

    TYPE: ClassVar[int] = 60
    session: int
    request: int
    what: str
    state: TaskState | None = None
    task_id: int = 0
    limit: int = 100


@dataclass(frozen=True, slots=True)
class Report(Message):
    """A JSON document in the one body."""

    TYPE: ClassVar[int] = 61
    session: int
    request: int
    bodies: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class News(Message):
    """On the PUB socket: a policy's newest version, repeated each second."""

    TYPE: ClassVar[int] = 80
    broker_epoch: int
    beat: int
    policies: tuple[PolicyNews, ...]
