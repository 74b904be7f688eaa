"""The client's core without sockets: exactly-once under any interleaving, credit, staleness, reconnect order."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollmq.bodies import encode_episode
from rollmq.errors import TaskFailed
from rollmq.messages import (
    Consumed,
    Deliver,
    DeliverItem,
    Done,
    EndedItem,
    Grant,
    HandBack,
    HeartbeatAck,
    Hello,
    Message,
    OnStale,
    PolicyNews,
    PolicySettings,
    Publish,
    Resume,
    Role,
    Submit,
    SubmitItem,
    TaskState,
    Watch,
    Welcome,
)
from rollmq.rollout import EpisodeResult
from trainer_client.core import ClientCore, failure
from trainer_client.credit import Credit
from trainer_client.state import BatchProgress, ClientState

ETA = 1
SETTINGS = PolicySettings(2, ETA, None, OnStale.RETRY)
Model = Any


class Harness:
    """A core and a model broker with two queues of messages between them, any of which may be cut at any time."""

    def __init__(self, model: Model, tasks: int) -> None:
        self.model, self.keys = model, [f"k{n}" for n in range(tasks)]
        self.log: list[int] = []
        self.checkpoint: tuple[dict[str, Any], list[int]] | None = None
        self.start()

    def start(self) -> None:
        """A new process, from its newest checkpoint if there is one."""
        self.core = ClientCore("default", SETTINGS, Credit(tasks=3, body_bytes=10_000))
        self.processes = getattr(self, "processes", 0) + 1
        self.up: list[Message] = []
        self.down: list[Message] = []
        self.ids: list[int] = []
        self.open()
        if self.checkpoint is None:
            self.save()
            self.submit()
            return
        state = ClientState.from_dict(json.loads(json.dumps(self.checkpoint[0])), trainer="t", policy="default")
        self.log = list(self.checkpoint[1])
        self.core.restore(state.cursor, state.taken, state.unconfirmed)
        self.core.request(
            Resume, lambda answer: self.submit(), version=state.version, cursor=state.cursor, taken=state.taken
        )

    def open(self) -> None:
        hello = Hello(Role.TRAINER, "t", self.processes.to_bytes(16, "little"), settings=SETTINGS)
        welcome = self.model.hello(hello)
        self.core.opened(welcome)
        self.up, self.down = self.core.outgoing(), []

    def cut(self) -> None:
        self.core.lost()
        self.up, self.down = [], []

    def submit(self) -> None:
        items = tuple(SubmitItem(key) for key in self.keys)

        def submitted(answer: Any) -> None:
            self.core.submitted(answer.outcomes)
            self.ids = [outcome.task_id for outcome in answer.outcomes]

        self.core.request(Submit, submitted, items=items, bodies=tuple(b"body" for _ in items))
        self.core.begin()

    def step_up(self) -> None:
        self.up += self.core.outgoing()
        if self.up:
            self.down += self.model.handle(self.up.pop(0))

    def step_down(self) -> None:
        if self.down:
            self.core.received(self.down.pop(0))
            self.up += self.core.outgoing()

    def exchange(self) -> None:
        self.up += self.core.outgoing()
        while self.up or self.down:
            self.step_up()
            self.step_down()

    def take(self, most: int) -> None:
        for task_id in self.ids:
            if most == 0:
                return
            version = self.core.version
            try:
                trajectory = self.core.collect(task_id)
            except TaskFailed as error:
                assert (error.state, task_id in self.log) == ("consumed", True), "lost"
                continue
            if trajectory is not None:
                assert version - trajectory.head_version <= ETA
                self.log.append(task_id)
                most -= 1

    def save(self) -> None:
        if self.core.requests.has_open(Resume):
            return  # `load_state_dict` has not returned yet.
        cursor, taken = self.core.inbox.position()
        version, epoch, unconfirmed = self.core.version, self.core.epoch, self.core.unconfirmed
        state = ClientState("t", "default", "run", version, epoch, cursor, taken, unconfirmed, BatchProgress())
        self.checkpoint = (state.to_dict(), list(self.log))

    def do(self, action: str, number: int) -> None:
        match action:
            case "up":
                self.step_up()
            case "down":
                self.step_down()
            case "exchange":
                self.exchange()
            case "finish":
                queued = self.model.queued()
                if queued:
                    messages = self.model.finish(queued[number % len(queued)])
                    self.down += messages if self.core.session else []
            case "take":
                self.take(number)
            case "flush":
                self.core.flush_consumed()
            case "publish":
                self.core.flush_consumed()
                self.core.request(Publish, lambda answer: None, version=self.core.version + 1, source="")
            case "save":
                self.save()
            case "cut":
                self.cut()
            case "open":
                self.open()
            case "crash":
                self.start()

    def finish_everything(self) -> None:
        self.open()
        for _ in range(200):
            self.exchange()
            self.core.expect(self.ids)
            for task_id in self.model.queued():
                self.down += self.model.finish(task_id)
            self.exchange()
            self.take(1000)
            self.core.unexpect(self.ids)
            self.core.flush_consumed()
            self.exchange()
            if self.model.count(TaskState.CONSUMED) == len(self.keys):
                break


ACTIONS = ["up", "up", "up", "down", "down", "down", "finish", "finish", "take", "take", "flush", "publish", "save"]
ACTIONS += ["cut", "open", "open", "crash", "exchange", "exchange", "exchange", "finish", "take"]


@given(
    tasks=st.integers(1, 8),
    actions=st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 5)), min_size=20, max_size=60),
)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_trajectory_is_taken_exactly_once_by_a_trainer_that_keeps_its_state(
    broker_model: type[Model], tasks: int, actions: list[tuple[str, int]]
) -> None:
    harness = Harness(broker_model(eta=ETA), tasks)
    for action, number in actions:
        harness.do(action, number)
        assert len(harness.log) == len(set(harness.log)), f"a trajectory came twice after {action}"
    harness.finish_everything()
    assert sorted(harness.log) == sorted(harness.ids) == list(range(1, tasks + 1))
    assert harness.model.count(TaskState.CONSUMED) == tasks


# --- single rules -------------------------------------------------------------------------------------------------


def opened(core: ClientCore, session: int = 1, **changes: Any) -> list[Message]:
    core.opened(Welcome(session, 1, 2.0, 10.0, 1 << 20, 64, policy_epoch=1, owner=True, **changes))
    return core.outgoing()


def delivery(task_id: int, sequence: int, floor: int = 1, head: int = 0) -> Deliver:
    result = EpisodeResult([1], [task_id], [-0.1], [(head, 0, 1)], "stop", None, [1])
    item = DeliverItem(task_id, sequence, task_id, 0, 1, head, head, False)
    return Deliver(1, floor, (item,), (encode_episode(result, worker="w", attempt=1),))


def test_a_new_session_sends_requests_then_watches_then_credit() -> None:
    core = ClientCore("default", SETTINGS)
    opened(core)
    core.request(Submit, lambda answer: None, items=(SubmitItem("a"),), bodies=(b"",))
    core.expect([5])
    core.outgoing()
    core.lost()
    kinds = [type(m) for m in opened(core, session=2)]
    assert kinds == [Submit, Watch, Grant]
    assert core.outgoing() == []


def test_what_was_taken_is_confirmed_only_when_flushed() -> None:
    core = ClientCore("default", SETTINGS)
    opened(core)
    core.received(delivery(1, 1))
    assert core.collect(1) is not None
    assert not [m for m in core.outgoing() if isinstance(m, Consumed)]
    core.flush_consumed()
    assert [m.tasks for m in core.outgoing() if isinstance(m, Consumed)] == [(1,)]


def test_what_the_user_has_is_never_handed_out_again_even_if_the_broker_ran_it_again() -> None:
    core = ClientCore("default", SETTINGS)
    opened(core)
    core.received(delivery(1, 1))
    assert core.collect(1) is not None
    unconfirmed = core.unconfirmed
    core.received(delivery(1, 7))
    assert core.collect(1) is None

    restarted = ClientCore("default", SETTINGS)
    opened(restarted)
    restarted.restore(1, (), unconfirmed)
    restarted.received(delivery(1, 7))
    assert restarted.collect(1) is None
    restarted.flush_consumed()
    assert [m.tasks for m in restarted.outgoing() if isinstance(m, Consumed)] == [(1,)]


def test_a_version_sweeps_what_became_too_old() -> None:
    core = ClientCore("default", SETTINGS)
    opened(core)
    core.received(delivery(1, 1))
    core.received(HeartbeatAck(1, (PolicyNews("default", 1, ETA + 1, "", 9),)))
    assert [m.tasks for m in core.outgoing() if isinstance(m, HandBack)] == [(1,)]
    assert core.collect(1) is None
    assert core.inbox.position()[0] == 0, "what is handed back is not over until the broker says so"


def test_what_the_broker_insists_on_after_a_hand_back_is_taken() -> None:
    core = ClientCore("default", SETTINGS)
    opened(core)
    message = delivery(1, 1)
    core.received(message)
    core.received(HeartbeatAck(1, (PolicyNews("default", 1, ETA + 1, "", 9),)))
    (back,) = [m for m in core.outgoing() if isinstance(m, HandBack)]
    core.received(message)
    assert core.collect(1) is None, "it crossed the HANDBACK, so the broker has not looked at it again"
    core.received(Done(1, back.request))
    core.received(message)
    assert core.collect(1) is not None


def test_older_news_of_a_policy_and_news_of_others_are_ignored() -> None:
    core = ClientCore("default", SETTINGS)
    opened(core)
    core.received(HeartbeatAck(1, (PolicyNews("default", 1, 5, "", 9), PolicyNews("other", 1, 8, "", 99))))
    core.received(HeartbeatAck(1, (PolicyNews("default", 1, 4, "", 8),)))
    assert core.version == 5


def test_an_end_without_a_trajectory_is_raised_with_its_reason() -> None:
    core = ClientCore("default", SETTINGS)
    opened(core)
    core._end([EndedItem(3, TaskState.EXPIRED, "deadline: not finished 60 s after submission")])
    with pytest.raises(TaskFailed, match="task 3 ended as expired: deadline"):
        core.collect(3)
    assert "already taken" in str(failure(EndedItem(3, TaskState.CONSUMED)))


def test_fates_of_tasks_nobody_asked_for_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer_client.core.REMEMBERED_FATES", 10)
    core = ClientCore("default", SETTINGS)
    opened(core)
    core._end([EndedItem(n, TaskState.DEAD) for n in range(100)])
    assert len(core._fates) == 10
    core.expect([5])
    assert [m.tasks for m in core.outgoing() if isinstance(m, Watch)] == [(5,)]


def test_credit_is_granted_beyond_a_full_inbox_only_while_the_user_is_blocked() -> None:
    credit = Credit(tasks=100, body_bytes=1000)
    assert credit.next_grant(0, 0, blocked=False) == (100, 1000)
    credit.received(100, 500)
    assert credit.next_grant(100, 500, blocked=False) is None
    blocked = credit.next_grant(100, 500, blocked=True)
    assert blocked is not None and blocked[0] > 100


def test_credit_totals_never_fall_and_count_duplicates() -> None:
    credit = Credit(tasks=10, body_bytes=1000)
    assert credit.next_grant(0, 0, False) == (10, 1000)
    credit.received(10, 100)
    assert credit.next_grant(0, 0, False) == (20, 1100)
    assert credit.next_grant(5, 100, False) is None


def test_long_runs_keep_small_sets() -> None:
    core = ClientCore("default", SETTINGS)
    opened(core)
    for n in range(1, 2001):
        core.received(delivery(n, n, floor=n))
        assert core.collect(n) is not None
        core.flush_consumed()
        for message in core.outgoing():
            if isinstance(message, Consumed):
                core.received(Done(1, message.request))
    inbox = core.inbox
    assert len(inbox._taken) < 600 and not core._claimed and not core._confirming and not len(core.requests)
    assert inbox.position() == (2000, ())
