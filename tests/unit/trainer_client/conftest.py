"""A small model of the broker for the client's tests: pure, and behind a real ROUTER socket."""

from __future__ import annotations

import asyncio
import json
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import zmq

from rollmq.bodies import encode_episode
from rollmq.codec import decode, encode
from rollmq.messages import (
    Bye,
    ByeAck,
    Cancel,
    Consumed,
    Deliver,
    DeliverItem,
    Done,
    Ended,
    EndedItem,
    Grant,
    HandBack,
    Heartbeat,
    HeartbeatAck,
    Hello,
    Message,
    PolicyNews,
    Publish,
    Published,
    Query,
    Refusal,
    RefusalCode,
    Report,
    Resume,
    Resumed,
    Resync,
    Settled,
    Submit,
    SubmitOutcome,
    Submitted,
    TaskOutcome,
    TaskState,
    Watch,
    Welcome,
)
from rollmq.rollout import EpisodeResult

OPEN = {TaskState.QUEUED, TaskState.READY, TaskState.DELIVERED}


@dataclass
class ModelTask:
    task_id: int
    key: str
    body: bytes
    group: int
    member: int
    size: int
    state: TaskState = TaskState.QUEUED
    sequence: int = 0
    head: int = 0


@dataclass
class ModelBroker:
    """One trainer's broker without workers: `finish` gives a task its result."""

    eta: int = 1
    dead_after_s: float = 5.0
    version: int = 0
    epoch: int = 0
    source: str = ""
    news_sequence: int = 1
    session: int = 0
    nonce: bytes = b""
    next_sequence: int = 1
    tasks: dict[int, ModelTask] = field(default_factory=dict)
    keys: dict[str, int] = field(default_factory=dict)
    groups: dict[str, int] = field(default_factory=dict)
    granted: tuple[int, int] = (0, 0)
    sent: tuple[int, int] = (0, 0)
    heard: list[Message] = field(default_factory=list)

    @property
    def news(self) -> PolicyNews:
        return PolicyNews("default", self.epoch, self.version, self.source, self.news_sequence)

    @property
    def floor(self) -> int:
        return min(
            (t.sequence for t in self.tasks.values() if t.sequence and t.state in OPEN), default=self.next_sequence
        )

    def count(self, state: TaskState) -> int:
        return sum(t.state is state for t in self.tasks.values())

    # --- events ---------------------------------------------------------------------------------------------------

    def hello(self, message: Hello) -> Welcome:
        self.heard.append(message)
        if message.nonce != self.nonce:
            self.nonce, self.epoch = message.nonce, self.epoch + 1
        self.session += 1
        self.granted = self.sent = (0, 0)
        for task in self.tasks.values():
            if task.state is TaskState.DELIVERED:
                task.state = TaskState.READY
        return Welcome(
            self.session, 1, 0.2, self.dead_after_s, 1 << 24, 64, (self.news,), self.epoch, True, floor=self.floor
        )

    def finish(self, task_id: int, head: int | None = None) -> list[Message]:
        task = self.tasks[task_id]
        assert task.state is TaskState.QUEUED
        task.state, task.head = TaskState.READY, self.version if head is None else head
        task.sequence, self.next_sequence = self.next_sequence, self.next_sequence + 1
        return self.deliver()

    def end(self, task_id: int, state: TaskState, reason: str = "workflow_raised: boom") -> list[Message]:
        task = self.tasks[task_id]
        task.state, task.sequence = state, 0
        return [Ended(self.session, 0, (EndedItem(task_id, state, reason),))] if self.session else []

    def publish(self, version: int, source: str = "") -> None:
        self.version, self.source, self.news_sequence = version, source, self.news_sequence + 1
        for task in self.tasks.values():
            if task.state is TaskState.READY and self._is_stale(task):
                self._requeue(task)

    def queued(self) -> list[int]:
        return [t.task_id for t in self.tasks.values() if t.state is TaskState.QUEUED]

    def _is_stale(self, task: ModelTask) -> bool:
        return self.version - task.head > self.eta

    def _requeue(self, task: ModelTask) -> None:
        task.state, task.sequence = TaskState.QUEUED, 0

    def deliver(self) -> list[Message]:
        items, bodies = [], []
        ready = sorted((t for t in self.tasks.values() if t.state is TaskState.READY), key=lambda t: t.sequence)
        for task in ready:
            if self.sent[0] >= self.granted[0] or self.sent[1] >= self.granted[1] or not self.session:
                break
            if self._is_stale(task):
                self._requeue(task)
                continue
            task.state = TaskState.DELIVERED
            body = encode_episode(episode(task.task_id, task.head), worker="w", attempt=1)
            self.sent = (self.sent[0] + 1, self.sent[1] + len(body))
            items.append(
                DeliverItem(
                    task.task_id, task.sequence, task.group, task.member, task.size, task.head, task.head, False
                )
            )
            bodies.append(body)
        if not items:
            return []
        return [Deliver(self.session, self.floor, tuple(items), tuple(bodies))]

    # --- requests -------------------------------------------------------------------------------------------------

    def handle(self, message: Message) -> list[Message]:
        self.heard.append(message)
        match message:
            case Grant(session=_, tasks=tasks, body_bytes=body_bytes):
                self.granted = (max(self.granted[0], tasks), max(self.granted[1], body_bytes))
            case Submit():
                return [
                    Submitted(self.session, message.request, tuple(map(self._submit, message.items, message.bodies)))
                ]
            case Consumed():
                for task in self._known(message.tasks):
                    if task.state in (TaskState.READY, TaskState.DELIVERED):
                        task.state = TaskState.CONSUMED
                return [Done(self.session, message.request), *self.deliver()]
            case HandBack():
                for task in self._known(message.tasks):
                    if task.state is TaskState.DELIVERED:
                        if self._is_stale(task):
                            self._requeue(task)
                        else:
                            task.state = TaskState.READY
                return [Done(self.session, message.request), *self.deliver()]
            case Publish():
                if message.version <= self.version:
                    return [Refusal(self.session, message.request, RefusalCode.STALE_VERSION, "does not grow")]
                self.publish(message.version, message.source)
                return [Published(self.session, message.request, self.news)]
            case Resume():
                return [self._resume(message)]
            case Watch():
                items = tuple(i for i in map(self._fate, message.tasks) if i is not None)
                return [Ended(self.session, message.request, items)]
            case Cancel():
                outcomes = tuple(TaskOutcome(t, 0, self._cancel(t)) for t in message.tasks)
                return [Settled(self.session, message.request, outcomes)]
            case Query():
                facts: dict[str, object] = {"tasks": []} if message.what == "tasks" else {"ledger": {}}
                return [Report(self.session, message.request, (json.dumps(facts).encode(),))]
            case Heartbeat():
                return [HeartbeatAck(self.session, (self.news,))]
            case Bye():
                return [ByeAck(self.session)]
        return self.deliver()

    def _known(self, task_ids: tuple[int, ...]) -> list[ModelTask]:
        return [self.tasks[t] for t in task_ids if t in self.tasks]

    def _submit(self, item: object, body: bytes) -> SubmitOutcome:
        known = self.keys.get(item.key)  # type: ignore[attr-defined]
        if known is not None:
            task = self.tasks[known]
            code = None if task.body == body else RefusalCode.CONFLICT
            return SubmitOutcome(known, task.group, task.state, code)
        task_id = len(self.tasks) + 1
        group = self.groups.setdefault(item.group or item.key, task_id)  # type: ignore[attr-defined]
        self.keys[item.key] = task_id  # type: ignore[attr-defined]
        self.tasks[task_id] = ModelTask(task_id, item.key, body, group, item.member, item.size)  # type: ignore[attr-defined]
        return SubmitOutcome(task_id, group, TaskState.QUEUED, None)

    def _cancel(self, task_id: int) -> RefusalCode | None:
        if task_id not in self.tasks:
            return RefusalCode.UNKNOWN_TASK
        if self.tasks[task_id].state not in OPEN:
            return RefusalCode.ALREADY_DONE
        self.tasks[task_id].state = TaskState.CANCELLED
        return None

    def _fate(self, task_id: int) -> EndedItem | None:
        task = self.tasks.get(task_id)
        if task is None:
            return EndedItem(task_id, None, "no such task")
        return None if task.state in OPEN else EndedItem(task_id, task.state, "over")

    def _resume(self, message: Resume) -> Message:
        if message.version > self.version:
            return Refusal(self.session, message.request, RefusalCode.CONFLICT, "a newer checkpoint than this journal")
        if message.version < self.version:
            self.publish(message.version)
        rewound = 0
        for task in self.tasks.values():
            taken = task.sequence and (task.sequence <= message.cursor or task.sequence in message.taken)
            if taken and task.state in (TaskState.READY, TaskState.DELIVERED):
                task.state = TaskState.CONSUMED
            elif not taken and task.state is TaskState.CONSUMED:
                task.state, rewound = TaskState.READY, rewound + 1
        return Resumed(self.session, message.request, rewound, self.news)


def episode(task_id: int, head: int = 0, tokens: int = 3) -> EpisodeResult:
    return EpisodeResult(
        input_ids=[1, 2],
        output_ids=[task_id] * tokens,
        output_logprobs=[-0.5] * tokens,
        version_spans=[(head, 0, tokens)],
        stop_reason="length",
        reward=1.0,
        loss_mask=[1] * tokens,
    )


class RouterBroker:
    """A `ModelBroker` behind a ROUTER socket in a thread; it can be stopped and started at the same address.

    Attributes:
        silent: kinds of messages that are heard and done, but not answered.
        deaf: kinds of messages that are dropped.
        auto: heads for tasks to finish at once, by task; None = tasks wait for `finish`.
    """

    def __init__(self, auto: Callable[[ModelTask], int | None] | None = None) -> None:
        self.model = ModelBroker()
        self.silent: set[type[Message]] = set()
        self.deaf: set[type[Message]] = set()
        self.refuse: list[Refusal] = []
        self.auto = auto
        self.address = ""
        self._calls: queue.Queue[Callable[[], list[Message]]] = queue.Queue()
        self._heard = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def start(self) -> None:
        self._stop.clear()
        # A context of its own: only the end of a context waits until the port is free again.
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(self.address or "tcp://127.0.0.1:*")
        self.address = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._thread = threading.Thread(target=self._serve, args=(context, socket), daemon=True)
        self._thread.start()

    def kill(self) -> None:
        """Stops serving; the model, the broker's disk, stays."""
        self._stop.set()
        assert self._thread is not None
        self._thread.join(10)
        self.model.session += 1000

    def close(self) -> None:
        if self._thread is not None and self._thread.is_alive():
            self.kill()

    def call(self, change: Callable[[ModelBroker], list[Message] | None]) -> None:
        """Changes the model on its thread and sends what follows."""
        self._calls.put(lambda: change(self.model) or [])

    def wait_heard(self, kind: type[Message], count: int = 1, timeout: float = 20.0) -> list[Message]:
        def found() -> list[Message]:
            return [m for m in list(self.model.heard) if isinstance(m, kind)]

        with self._heard:
            assert self._heard.wait_for(lambda: len(found()) >= count, timeout), f"{kind.__name__}: {found()}"
        return found()

    async def heard(self, kind: type[Message], count: int = 1) -> list[Message]:
        return await asyncio.to_thread(self.wait_heard, kind, count)

    def _serve(self, context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes]) -> None:
        peer = b""
        try:
            while not self._stop.is_set():
                if socket.poll(5):
                    peer, *frames = socket.recv_multipart()
                    self._send(socket, peer, self._answers(decode(frames)))
                while not self._calls.empty():
                    answers = self._calls.get()()
                    if peer:
                        self._send(socket, peer, answers)
        finally:
            context.destroy(0)

    def _answers(self, message: Message) -> list[Message]:
        if isinstance(message, Hello):
            answers: list[Message] = [self.model.hello(message)]
        elif getattr(message, "session", 0) != self.model.session:
            answers = [Resync("unknown session")]
        elif type(message) in self.deaf:
            self.model.heard.append(message)
            answers = []
        elif self.refuse and isinstance(message, Submit):
            refusal = self.refuse.pop(0)
            answers = [
                Refusal(self.model.session, message.request, refusal.code, refusal.message, refusal.retry_after_s)
            ]
        else:
            answers = self.model.handle(message)
            if type(message) in self.silent:
                answers = []
            answers += self._finish_all() + self.model.deliver()
        with self._heard:
            self._heard.notify_all()
        return answers

    def _finish_all(self) -> list[Message]:
        if self.auto is None:
            return []
        answers: list[Message] = []
        for task_id in self.model.queued():
            head = self.auto(self.model.tasks[task_id])
            if head is not None:
                answers += self.model.finish(task_id, head)
        return answers

    def _send(self, socket: zmq.Socket[bytes], peer: bytes, messages: list[Message]) -> None:
        for message in messages:
            socket.send_multipart([peer, *encode(message)])


@pytest.fixture(scope="session")
def broker_model() -> type[ModelBroker]:
    return ModelBroker


@pytest.fixture
def router() -> Iterator[RouterBroker]:
    """A started broker whose tasks wait for `finish`."""
    broker = RouterBroker()
    broker.start()
    yield broker
    broker.close()


@pytest.fixture
def auto_router() -> Iterator[RouterBroker]:
    """A started broker whose tasks finish at once at its current version."""
    broker = RouterBroker()
    broker.auto = lambda task: broker.model.version
    broker.start()
    yield broker
    broker.close()
