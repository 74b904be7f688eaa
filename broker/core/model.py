"""The broker's state: tasks, groups, policies, trainers, workers and sessions. Data only; the rules are elsewhere."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from broker.core.credit import CreditAccount
from broker.core.fairness import PolicyQueue
from broker.core.ledger import Ledger
from broker.core.staleness import StalenessController
from broker.core.versions import PolicyVersions
from rollmq.messages import Priority, Reason, Role, TaskState, WeightState


class BodyRef(NamedTuple):
    """Where a body is: the record's journal sequence, its position in it, and its length in bytes."""

    sequence: int
    position: int
    length: int


@dataclass(frozen=True, slots=True)
class CoreSettings:
    """The broker's numbers that decisions depend on; they are in the journal, so that a replay has the same."""

    heartbeat_s: float = 2.0
    dead_after_s: float = 10.0
    task_deadline_s: float = 3600.0
    infrastructure_budget: int = 10
    data_budget: int = 3
    max_open_tasks: int = 200_000
    retain_ended: int = 100_000
    max_body_bytes: int = 16 * 1024 * 1024
    max_items: int = 64


@dataclass(slots=True)
class Lease:
    """A task in a worker's hands.

    Attributes:
        session: the worker's session; 0 while orphaned by a restart of the broker.
        worker: the worker's name.
        nonce: the worker's instance.
        epoch: dispatch epoch.
        started: whether generation has begun; only then can the task be blamed.
        label: label of the weights it began on; empty until started.
    """

    session: int
    worker: str
    nonce: bytes
    epoch: int
    started: bool = False
    label: str = ""


@dataclass(slots=True)
class Task:
    """One prompt to roll out. Times are nanoseconds of the broker's clock."""

    task_id: int
    trainer: str
    policy: str
    key: str
    digest: int
    body: BodyRef
    group: int
    member: int
    priority: Priority
    cost: int
    submitted_ns: int
    deadline_ns: int
    state: TaskState = TaskState.QUEUED
    reason: Reason | None = None
    detail: str = ""
    attempts: int = 0
    infrastructure_failures: int = 0
    data_failures: int = 0
    blamed: tuple[str, ...] = ()
    lease: Lease | None = None
    last_epoch: int = 0
    result: BodyRef | None = None
    head_version: int = 0
    tail_version: int = 0
    delivery: int = 0
    stale: bool = False


@dataclass(slots=True)
class Group:
    """The tasks of one prompt; the unit of admission.

    Attributes:
        group_id: id of its first task.
        key: the trainer's key of the group; empty for a group of one.
        size: how many members it will have.
        members: task ids by member index.
        counts: members per state.
        budgeted: whether it counts in the admission budget; evaluation does not, since nothing is trained on it.
        admitted: whether it holds a place in the policy's budget.
        counted_at: sequence of the version it was counted as consumed under; 0 = not counted.
    """

    group_id: int
    trainer: str
    policy: str
    key: str
    size: int
    members: dict[int, int] = field(default_factory=dict)
    counts: dict[TaskState, int] = field(default_factory=dict)
    budgeted: bool = True
    admitted: bool = False
    phase: str = "waiting"
    counted_at: int = 0


@dataclass(slots=True)
class Policy:
    """A model being trained."""

    name: str
    owner: str
    versions: PolicyVersions
    staleness: StalenessController
    queue: PolicyQueue


@dataclass(slots=True)
class Trainer:
    """Who submits, by name; outlives its sessions.

    Attributes:
        nonce: its newest instance.
        session: its open session, or 0.
        next_delivery: delivery sequence to give next.
        ready: deliveries waiting to be sent, by sequence.
        deliveries: delivery sequence -> task id, also of what was consumed and is still retained.
        floor: no delivery below this can still be open.
        open_tasks: tasks that are not over.
    """

    name: str
    policy: str
    nonce: bytes = b""
    session: int = 0
    next_delivery: int = 1
    floor: int = 1
    ready: list[int] = field(default_factory=list)
    deliveries: dict[int, int] = field(default_factory=dict)
    keys: dict[str, int] = field(default_factory=dict)
    groups: dict[str, int] = field(default_factory=dict)
    open_tasks: int = 0


@dataclass(slots=True)
class SessionState:
    """One open session. The worker fields stay empty for trainers and admins."""

    session: int
    role: Role
    name: str
    nonce: bytes
    policy: str
    credit: CreditAccount = field(default_factory=CreditAccount)
    engine: str = ""
    slots: int = 0
    host: str = ""
    pid: int = 0
    label: str = ""
    weights: WeightState = WeightState.UPDATING
    weights_detail: str = ""
    draining: bool = False
    leases: set[int] = field(default_factory=set)


@dataclass(slots=True)
class BrokerState:
    """Everything that a replay of the journal rebuilds.

    `open_ids` holds the tasks that are not over, `ended` the others in the order in which they ended.
    """

    settings: CoreSettings = field(default_factory=CoreSettings)
    sequence: int = 0
    broker_epoch: int = 0
    next_session: int = 0
    next_dispatch: int = 0
    next_task: int = 1
    draining: bool = False
    tasks: dict[int, Task] = field(default_factory=dict)
    groups: dict[int, Group] = field(default_factory=dict)
    policies: dict[str, Policy] = field(default_factory=dict)
    trainers: dict[str, Trainer] = field(default_factory=dict)
    sessions: dict[int, SessionState] = field(default_factory=dict)
    workers: dict[str, int] = field(default_factory=dict)
    open_ids: dict[int, None] = field(default_factory=dict)
    ended: deque[int] = field(default_factory=deque)
    ledger: Ledger = field(default_factory=Ledger)
