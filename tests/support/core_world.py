"""A machine with scripted peers: says things, keeps the effects, and checks the invariants after every event."""

from __future__ import annotations

from typing import Any

from broker.core.events import BrokerStarted, SendTo, SessionLost, TasksExpired
from broker.core.fingerprint import state_hash
from broker.core.machine import Machine, Outcome
from broker.core.model import Task
from broker.records import make_event
from rollmq import messages as m

MILLISECOND = 1_000_000


class World:
    """One machine; `sent` holds every message per session."""

    def __init__(self, **settings: Any) -> None:
        self.machine = Machine()
        self.now_ns = 1_000_000_000
        self.sequence = 0
        self.sent: dict[int, list[Any]] = {}
        self.bodies: dict[int, list[Any]] = {}
        self.log: list[tuple[Any, list[Any]]] = []
        self.settings = settings
        self.start()

    def start(self) -> None:
        """A (new) broker process."""
        values: dict[str, Any] = {
            "heartbeat_s": 2.0,
            "dead_after_s": 10.0,
            "task_deadline_s": 3600.0,
            "infrastructure_budget": 10,
            "data_budget": 3,
            "max_open_tasks": 1000,
            "retain_ended": 1000,
            "max_body_bytes": 1 << 20,
            "max_items": 64,
        }
        self.apply(BrokerStarted(broker_epoch=self.state.broker_epoch + 1, **{**values, **self.settings}))

    @property
    def state(self) -> Any:
        return self.machine.state

    def task(self, task_id: int) -> Task:
        return self.state.tasks[task_id]

    def apply(self, message: m.Message) -> Outcome:
        """One event; every message that it causes is kept."""
        self.sequence += 1
        self.now_ns += MILLISECOND
        event = make_event(self.now_ns, message)
        outcome = self.machine.apply(event, self.sequence)
        self.log.append((event, outcome.decisions))
        for effect in outcome.effects:
            if isinstance(effect, SendTo):
                assert effect.requires <= self.sequence
                self.sent.setdefault(effect.session, []).append(effect.message)
        self.check()
        return outcome

    def check(self) -> None:
        """The invariants that hold after every event."""
        state = self.state
        assert state.ledger.balances()
        counted: dict[m.TaskState, int] = {}
        for task in state.tasks.values():
            counted[task.state] = counted.get(task.state, 0) + 1
            assert (task.lease is not None) == (task.state is m.TaskState.LEASED)
        for name, open_state in ((s, s) for s in m.TaskState if s not in m.TERMINAL_STATES):
            assert counted.get(open_state, 0) == state.ledger.counts[name]
        for policy in state.policies.values():
            phases = [g.phase for g in state.groups.values() if g.policy == policy.name and g.budgeted]
            assert policy.staleness.running == phases.count("running")
            assert policy.staleness.ready == phases.count("ready")
        for session in state.sessions.values():
            for task_id in session.leases:
                assert state.tasks[task_id].lease.session == session.session

    def replayed_hash(self) -> str:
        """The hash after feeding the same events to a fresh machine, decisions compared."""
        machine = Machine()
        for sequence, (event, decisions) in enumerate(self.log, start=1):
            assert machine.apply(event, sequence).decisions == decisions
        return state_hash(machine.state)

    # --- peers --------------------------------------------------------------------------------------------------

    def trainer(
        self, name: str = "math", *, batch: int = 4, eta: int = 0, nonce: bytes = b"t" * 16, **more: Any
    ) -> int:
        """A trainer session with credit for everything."""
        settings = m.PolicySettings(batch, eta, more.pop("concurrent", None), m.OnStale(more.pop("on_stale", "retry")))
        credit = more.pop("credit", 1000)
        session = self.hello(m.Hello(m.Role.TRAINER, name, nonce, settings=settings, **more))
        self.apply(m.Grant(session, credit, 1 << 30))
        return session

    def worker(
        self, name: str = "w", *, slots: int = 8, label: str = "0.0", nonce: bytes = b"w" * 16, **more: Any
    ) -> int:
        """A worker session with credit for its slots."""
        credit = more.pop("credit", slots)
        session = self.hello(m.Hello(m.Role.WORKER, name, nonce, slots=slots, label=label, **more))
        self.apply(m.Grant(session, credit, 1 << 30))
        return session

    def hello(self, message: m.Hello) -> int:
        """The session that a HELLO opens."""
        before = set(self.state.sessions)
        self.apply(message)
        (session,) = set(self.state.sessions) - before
        return session

    def submit(self, session: int, count: int = 1, **fields: Any) -> list[int]:
        """Ids of freshly submitted tasks."""
        keys = [fields.pop("key", None) or f"key-{self.sequence}-{index}" for index in range(count)]
        items = tuple(m.SubmitItem(key, **fields) for key in keys)
        self.apply(m.Submit(session, self.sequence, items, tuple(b"body" for _ in items)))
        return [outcome.task_id for outcome in self.last(session, m.Submitted).outcomes]

    def submit_group(self, session: int, group: str, size: int) -> list[int]:
        """Ids of a group's members."""
        items = tuple(m.SubmitItem(f"{group}/{i}", group=group, member=i, size=size) for i in range(size))
        self.apply(m.Submit(session, self.sequence, items, tuple(b"body" for _ in items)))
        return [outcome.task_id for outcome in self.last(session, m.Submitted).outcomes]

    def start_tasks(self, session: int, *task_ids: int, label: str = "0.0") -> None:
        """STARTED for leases that the session holds."""
        items = tuple(m.StartedItem(t, self.task(t).last_epoch, label) for t in task_ids)
        self.apply(m.Started(session, items))

    def finish(self, session: int, *task_ids: int, head: str = "0.0", tail: str | None = None) -> list[Any]:
        """RESULT for leases; the outcomes' codes."""
        items = tuple(m.ResultItem(t, self.task(t).last_epoch, head, tail or head, 3) for t in task_ids)
        self.apply(m.Result(session, items, tuple(b"result" for _ in items)))
        return [outcome.code for outcome in self.last(session, m.Settled).outcomes]

    def consume(self, session: int, *task_ids: int) -> None:
        """CONSUMED."""
        self.apply(m.Consumed(session, 1, task_ids))

    def publish(self, session: int, version: int) -> Any:
        """PUBLISHED or the refusal."""
        self.apply(m.Publish(session, 1, version, f"/weights/{version}"))
        return (
            self.sent[session][-1] if isinstance(self.sent[session][-1], m.Refusal) else self.last(session, m.Published)
        )

    def weights(self, session: int, label: str, state: m.WeightState = m.WeightState.READY) -> None:
        """WEIGHTS."""
        self.apply(m.Weights(session, state, label))

    def lose(self, session: int) -> None:
        """The session was silent for too long."""
        self.apply(SessionLost(session, "silent"))

    def expire(self, *task_ids: int) -> None:
        """Deadlines pass."""
        self.apply(TasksExpired(task_ids))

    # --- what was seen ------------------------------------------------------------------------------------------

    def all(self, session: int, kind: type) -> list[Any]:
        """Messages of a kind sent to a session."""
        return [message for message in self.sent.get(session, []) if isinstance(message, kind)]

    def last(self, session: int, kind: type) -> Any:
        """The newest message of a kind sent to a session."""
        return self.all(session, kind)[-1]

    def leased_to(self, session: int) -> list[int]:
        """Task ids dispatched to a session, in order."""
        return [item.task_id for message in self.all(session, m.Task) for item in message.items]

    def delivered_to(self, session: int) -> list[int]:
        """Task ids delivered to a session, in order."""
        return [item.task_id for message in self.all(session, m.Deliver) for item in message.items]
