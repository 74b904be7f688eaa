"""A real `rollmq worker` process with a simulated engine, against a scripted broker on real sockets."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import zmq

from rollmq.bodies import decode_trajectory, encode_task_spec
from rollmq.codec import MAX_BODY_BYTES, MAX_ITEMS, decode, encode
from rollmq.messages import (
    Adoption,
    Bye,
    ByeAck,
    Done,
    Drain,
    Drop,
    DropItem,
    Grant,
    Heartbeat,
    HeartbeatAck,
    Hello,
    Message,
    Nack,
    News,
    PolicyNews,
    Reason,
    Result,
    Resync,
    Settled,
    Started,
    Task,
    TaskEpoch,
    TaskItem,
    TaskOutcome,
    Weights,
    WeightState,
    Welcome,
)
from rollmq.rollout import GenerationHyperparameters, ModelRequest, TaskSpec, Trajectory

WAIT_S = 30.0
BASE = PolicyNews("default", 0, 0, "", 1)
_M = TypeVar("_M", bound=Message)


class ScriptedBroker:
    """A ROUTER and a PUB that do what the test says, and keep what the worker said."""

    def __init__(self, port: int = 0) -> None:
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self.port = self._bind(self._router, port)
        self._pub = self._context.socket(zmq.PUB)
        self._pub.setsockopt(zmq.LINGER, 0)
        self._pub_port = self._bind(self._pub, 0)
        self._peer = b""
        self.news = BASE
        self.session = 0
        self.hello: Hello | None = None
        self.seen: list[Message] = []
        self.settles = True
        self.settled: list[TaskEpoch] = []
        self.results: dict[int, Trajectory] = {}

    @staticmethod
    def _bind(sock: zmq.Socket[bytes], port: int) -> int:
        sock.bind(f"tcp://127.0.0.1:{port}" if port else "tcp://127.0.0.1:*")
        return int(sock.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    def close(self) -> None:
        self._context.destroy(linger=0)

    def send(self, message: Message) -> None:
        self._router.send_multipart([self._peer, *encode(message)])

    def publish(self, version: int, source: str | Path, epoch: int = 1) -> None:
        self.news = PolicyNews("default", epoch, version, str(source), self.news.sequence + 1)
        self._pub.send_multipart(encode(News(1, version, (self.news,))))

    def until(self, kind: type[_M], condition: Callable[[_M], bool] = lambda message: True) -> _M:
        """Serves the worker until it says this; everything said since the last such call counts."""
        deadline = time.monotonic() + WAIT_S
        position = 0
        while True:
            while position < len(self.seen):
                message = self.seen[position]
                position += 1
                if isinstance(message, kind) and condition(message):
                    del self.seen[:position]
                    return message
            self._serve(deadline, f"{kind.__name__}; so far came {self.seen[-20:]}")

    def serve_until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            self._serve(deadline, what)

    def _serve(self, deadline: float, what: str) -> None:
        if not self._router.poll(max(0, int((deadline - time.monotonic()) * 1000))):
            raise AssertionError(f"timed out waiting for {what}")
        peer, *frames = self._router.recv_multipart()
        message = decode(frames)
        if isinstance(message, Hello):
            self._peer, self.hello = peer, message
        elif getattr(message, "session", 0) != self.session:
            return  # of an older session: what its socket still had to send
        self.seen.append(message)
        match message:
            case Heartbeat():
                self.send(HeartbeatAck(self.session, (self.news,)))
            case Bye():
                self.send(ByeAck(self.session))
            case Drain(request=request):
                self.send(Done(self.session, request))
            case Result() | Nack():
                if isinstance(message, Result):
                    for item, body in zip(message.items, message.bodies, strict=True):
                        self.results[item.task_id] = decode_trajectory(body, task_id=item.task_id)
                if self.settles:
                    self.settle(*message.items)

    def settle(self, *items: Any) -> None:
        self.settled += [TaskEpoch(item.task_id, item.epoch) for item in items]
        self.send(Settled(self.session, 0, tuple(TaskOutcome(i.task_id, i.epoch, None) for i in items)))

    def welcome(self, session: int, **changes: Any) -> Hello:
        hello = self.until(Hello)
        self.session = session
        self.results.clear()
        values: dict[str, Any] = {
            "broker_epoch": 1,
            "heartbeat_s": 0.2,
            "dead_after_s": 5.0,
            "max_body_bytes": MAX_BODY_BYTES,
            "max_items": MAX_ITEMS,
            "policies": (self.news,),
            "news_address": f"tcp://127.0.0.1:{self._pub_port}",
        }
        self.send(Welcome(session, **{**values, **changes}))
        return hello

    def until_ready(self, label: str = "0.0") -> Weights:
        return self.until(Weights, lambda w: w.state is WeightState.READY and w.label == label)

    def task(self, *task_ids: int, tokens: int = 4, epoch: int = 10, deadline_s: float = 60.0, **spec: Any) -> None:
        request = ModelRequest([1, 2, 3], GenerationHyperparameters(max_new_tokens=tokens))
        body = encode_task_spec(TaskSpec(request, **spec))
        items = tuple(TaskItem(n, epoch, 1, "default", deadline_s, n, 0) for n in task_ids)
        self.send(Task(self.session, (self.news,), items, (body,) * len(items)))


class WorkerProcess:
    def __init__(
        self, broker: ScriptedBroker, folder: Path, *options: str, model: str = "sim:tpot_ms=1,tokens=4"
    ) -> None:
        self.log_dir = folder / "logs"
        self.log = folder / "worker.log"
        command = [sys.executable, "-m", "rollmq.cli.worker", "--broker", broker.address, "--model", model]
        command += ["--name", "w0", "--log-dir", str(self.log_dir), "--slots", "2", "--prefetch", "1", *options]
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)

    def wait(self, timeout: float = WAIT_S) -> int:
        return self.process.wait(timeout)

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def engines(self) -> list[int]:
        """Engine and guard processes that still live."""
        marker = str(self.log_dir).encode()
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                line = (path / "cmdline").read_bytes()
                if b"workers.embedded" in line and os.readlink(path / "cwd").encode() == marker:
                    found.append(int(path.name))
        return found

    def until_no_engine(self) -> None:
        deadline = time.monotonic() + 10
        while left := self.engines():
            assert time.monotonic() < deadline, f"engine processes {left} survive"
            time.sleep(0.05)

    def text(self) -> str:
        return self.log.read_text()


@pytest.fixture
def broker() -> Iterator[ScriptedBroker]:
    made = ScriptedBroker()
    yield made
    made.close()


@pytest.fixture
def launch(broker: ScriptedBroker, tmp_path: Path) -> Iterator[Callable[..., WorkerProcess]]:
    made: list[WorkerProcess] = []

    def start(*options: str, **more: Any) -> WorkerProcess:
        made.append(WorkerProcess(broker, tmp_path, *options, **more))
        return made[-1]

    yield start
    for worker in made:
        if worker.process.poll() is None:
            worker.process.kill()
            worker.process.wait(10)
        worker.until_no_engine()


def test_credit_results_and_a_clean_end(broker: ScriptedBroker, launch: Callable[..., WorkerProcess]) -> None:
    worker = launch()
    hello = broker.welcome(11)
    assert (hello.name, hello.slots, hello.engine, hello.held, hello.unsent) == ("w0", 2, "sim", (), ())
    assert broker.until(Weights).state is WeightState.UPDATING
    broker.until_ready()
    grant = broker.until(Grant)
    assert (grant.session, grant.tasks) == (11, 3)
    broker.task(1, 2, 3)
    started = broker.until(Started)
    assert {item.label for item in started.items} == {"0.0"}
    broker.until(Grant, lambda g: g.tasks == 6)
    assert sorted(broker.results) == [1, 2, 3]
    trajectory = broker.results[1]
    assert len(trajectory.output_ids) == 4 and trajectory.version_spans == [(0, 0, 4)] and trajectory.worker == "w0"
    assert broker.until(Heartbeat, lambda h: h.progress > 0).running == 0
    worker.terminate()
    broker.until(Bye)
    assert worker.wait() == 0
    worker.until_no_engine()


def test_results_are_sent_again_in_the_next_session_until_settled(
    broker: ScriptedBroker, launch: Callable[..., WorkerProcess]
) -> None:
    launch()
    broker.settles = False
    broker.welcome(11)
    broker.until_ready()
    broker.task(1, 2)
    broker.serve_until(lambda: len(broker.results) == 2, "two results")
    broker.send(Resync(reason="forgotten"))
    broker.settles = True
    hello = broker.welcome(12, adopted=(Adoption(1, 10, 77),), dropped=(TaskEpoch(2, 10),))
    assert set(hello.unsent) == {TaskEpoch(1, 10), TaskEpoch(2, 10)} and hello.label == "0.0"
    broker.until_ready()
    result = broker.until(Result)
    assert [(item.task_id, item.epoch) for item in result.items] == [(1, 77)]
    assert broker.until(Grant).tasks == 3
    broker.send(Resync(reason="again"))
    assert broker.until(Hello).unsent == ()


def test_running_work_survives_a_broker_that_was_away(
    broker: ScriptedBroker, launch: Callable[..., WorkerProcess]
) -> None:
    launch(model="sim:tpot_ms=20,tokens=100")
    broker.welcome(11)
    broker.until_ready()
    broker.task(1, 2, 3, tokens=60)
    broker.until(Started)
    port = broker.port
    broker.close()
    back = ScriptedBroker(port)
    try:
        hello = back.welcome(
            5, adopted=(Adoption(1, 10, 91), Adoption(3, 10, 93)), dropped=(TaskEpoch(2, 10),), broker_epoch=2
        )
        assert sorted(key.task_id for key in (*hello.held, *hello.unsent)) == [1, 2, 3]
        back.serve_until(lambda: len(back.results) == 2, "results of the adopted tasks")
        assert set(back.settled) == {TaskEpoch(1, 91), TaskEpoch(3, 93)}
    finally:
        back.close()


def test_a_dropped_task_frees_its_place_and_sends_nothing(
    broker: ScriptedBroker, launch: Callable[..., WorkerProcess]
) -> None:
    launch(model="sim:hang=1.0")
    broker.welcome(11)
    broker.until_ready()
    broker.until(Grant)
    broker.task(1, 2, 3)
    broker.serve_until(lambda: sum(len(m.items) for m in broker.seen if isinstance(m, Started)) == 2, "two starts")
    broker.send(Drop(11, tuple(DropItem(n, 10, Reason.CANCELLED) for n in (1, 3))))
    assert broker.until(Grant).tasks == 5
    assert broker.results == {} and not any(isinstance(m, Nack) for m in broker.seen)


def test_a_deadline_ends_the_work(broker: ScriptedBroker, launch: Callable[..., WorkerProcess]) -> None:
    launch(model="sim:hang=1.0")
    broker.welcome(11)
    broker.until_ready()
    broker.task(1, deadline_s=0.3)
    (item,) = broker.until(Nack).items
    assert (item.task_id, item.reason) == (1, Reason.DEADLINE)


def test_sigterm_returns_what_waits_and_finishes_what_runs(
    broker: ScriptedBroker, launch: Callable[..., WorkerProcess]
) -> None:
    worker = launch(model="sim:tpot_ms=20,tokens=100")
    broker.welcome(11)
    broker.until_ready()
    broker.task(1, 2, 3, tokens=50)
    broker.serve_until(lambda: sum(len(m.items) for m in broker.seen if isinstance(m, Started)) == 2, "two starts")
    worker.terminate()
    broker.until(Drain)
    (returned,) = broker.until(Nack).items
    assert (returned.task_id, returned.reason) == (3, Reason.RETURNED)
    broker.until(Bye)
    assert sorted(broker.results) == [1, 2]
    assert worker.wait() == 0


def test_a_second_sigterm_ends_at_once_and_leaves_no_engine(
    broker: ScriptedBroker, launch: Callable[..., WorkerProcess]
) -> None:
    worker = launch(model="sim:hang=1.0")
    broker.welcome(11)
    broker.until_ready()
    broker.task(1)
    broker.until(Started)
    worker.terminate()
    broker.until(Drain)
    worker.terminate()
    assert worker.wait(3) == 1
    worker.until_no_engine()


def test_killing_the_worker_leaves_no_engine(broker: ScriptedBroker, launch: Callable[..., WorkerProcess]) -> None:
    worker = launch()
    broker.welcome(11)
    broker.until_ready()
    assert worker.engines()
    worker.process.kill()
    worker.until_no_engine()


def test_new_weights_arrive_by_broadcast_and_by_heartbeat(
    broker: ScriptedBroker, launch: Callable[..., WorkerProcess], tmp_path: Path
) -> None:
    launch()
    broker.welcome(11)
    broker.until_ready()
    for version in (1, 2):
        broker.publish(version, tmp_path)
        assert broker.until(Weights).state is WeightState.UPDATING
        broker.until_ready(f"1.{version}")
    broker.task(1)
    result = broker.until(Result)
    assert (result.items[0].head, result.items[0].tail) == ("1.2", "1.2")


def test_a_dead_engine_gives_its_tasks_back_and_comes_again_with_the_weights(
    broker: ScriptedBroker, launch: Callable[..., WorkerProcess], tmp_path: Path
) -> None:
    broker.news = PolicyNews("default", 1, 4, str(tmp_path), 9)
    worker = launch(model="sim:hang=1.0")
    broker.welcome(11)
    broker.until_ready("1.4")
    broker.task(1, 2, 3)
    broker.serve_until(lambda: sum(len(m.items) for m in broker.seen if isinstance(m, Started)) == 2, "two starts")
    for pid in worker.engines():
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
        if b"guard.py" not in line:
            os.kill(pid, signal.SIGKILL)
    reasons: dict[int, Reason] = {}
    while len(reasons) < 3:
        reasons |= {item.task_id: item.reason for item in broker.until(Nack).items}
    assert reasons == {1: Reason.ENGINE_FAILED, 2: Reason.ENGINE_FAILED, 3: Reason.RETURNED}
    broker.until_ready("1.4")


def test_an_engine_that_keeps_dying_ends_the_worker_with_the_log_file_named(
    broker: ScriptedBroker, launch: Callable[..., WorkerProcess], tmp_path: Path
) -> None:
    config = tmp_path / "worker.yaml"
    config.write_text("max_restarts: 0\n")
    worker = launch("--config", str(config), model="sim:crash=1.0")
    broker.welcome(11)
    broker.until_ready()
    broker.task(1)
    assert broker.until(Nack).items[0].reason is Reason.ENGINE_FAILED
    broker.until(Bye)
    assert worker.wait() == 1
    assert "1 times in a row" in worker.text() and str(worker.log_dir) in worker.text()


def test_a_superseded_worker_ends(broker: ScriptedBroker, launch: Callable[..., WorkerProcess]) -> None:
    worker = launch()
    broker.welcome(11)
    broker.until_ready()
    broker.send(Resync(reason="a newer worker took the name w0", final=True))
    assert worker.wait() == 1
    assert "a newer worker took the name" in worker.text()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--model", "/no/such/model"), "/no/such/model"),
        (("--model", "sim:", "--python", "/no/such/python"), "/no/such/python"),
        (("--model", "sim:speed=3"), "speed"),
        (("--model", "sim:", "--workflow", "mine=no_such_module_here:W"), "no_such_module_here"),
        (("--model", "sim:", "--reward", "mine"), "name=module:object"),
        (("--model", "sim:", "--slots", "0"), "slots"),
        (("--model", "sim:", "--config", "/no/such/file.yaml"), "/no/such/file.yaml"),
        ((), "model"),
    ],
)
def test_wrong_settings_end_with_code_2_and_name_the_thing(options: tuple[str, ...], text: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rollmq.cli.worker", *options], cwd=tmp_path, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 2
    assert text in done.stderr and "Traceback" not in done.stderr


def test_without_a_broker_the_worker_waits_and_can_be_ended(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        log = tmp_path / "log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "rollmq.cli.worker", "--model", "sim:", "--broker", address, "--name", "w"],
                cwd=tmp_path, stdout=out, stderr=out,
            )  # fmt: skip
        deadline = time.monotonic() + WAIT_S
        while "no session with the broker" not in log.read_text():
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0
