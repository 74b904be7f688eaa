"""`rollmq node` with simulated engines: restarts, signals, and nothing left behind. No broker is needed for that."""

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

import pytest
import yaml

WAIT_S = 60.0


class NodeProcess:
    """A node, and the processes below it as the process table shows them."""

    def __init__(self, folder: Path, settings: dict[str, object]) -> None:
        self.folder = folder
        self.log = folder / "node.log"
        config = folder / "node.yaml"
        config.write_text(yaml.safe_dump(settings))
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rollmq.cli.node", "--config", str(config)],
                cwd=folder, stdout=out, stderr=out, start_new_session=True,
            )  # fmt: skip

    def text(self) -> str:
        return self.log.read_text()

    def below(self, kind: bytes = b"") -> list[int]:
        """Living processes that the node started, directly or not, with `kind` in their command line."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if b"ROLLMQ_NODE_RUN=" not in (path / "environ").read_bytes():
                    continue
                where = os.readlink(path / "cwd")
                if where.startswith(str(self.folder)) and kind in (path / "cmdline").read_bytes():
                    found.append(int(path.name))
        return found

    def workers(self) -> list[int]:
        return self.below(b"rollmq.cli.worker")

    def engines(self) -> list[int]:
        return self.below(b"workers.embedded")

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline, f"timed out waiting for {what}:\n{self.text()}"
            time.sleep(0.05)

    def until_said(self, text: str, times: int = 1) -> None:
        self.until(lambda: self.text().count(text) >= times, f"{times} x {text!r}")


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Callable[..., NodeProcess]]:
    made: list[NodeProcess] = []
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))

        def start(count: int = 2, **settings: object) -> NodeProcess:
            values = {
                "broker": f"tcp://127.0.0.1:{free.getsockname()[1]}",
                "workers": [{"name": "sim", "count": count, "settings": {"model": "sim:", **settings}}],
                "restart_pause_s": 0.05,
            }
            made.append(NodeProcess(tmp_path, values))
            return made[-1]

        yield start
    for each in made:
        if each.process.poll() is None:
            each.process.kill()
            each.process.wait(10)
        each.until(lambda each=each: not each.below(), "the end of all processes")  # type: ignore[misc]


def test_a_killed_worker_comes_back_and_sigterm_ends_all(node: Callable[..., NodeProcess]) -> None:
    running = node()
    running.until_said("weights ready 0.0", 2)
    first, second = running.workers()
    os.kill(first, signal.SIGKILL)
    running.until_said("killed by SIGKILL")
    running.until_said("weights ready 0.0", 3)
    assert second in running.workers() and first not in running.workers() and len(running.workers()) == 2
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(WAIT_S) == 0
    assert running.below() == []
    assert "no process is left" in running.text() and "[sim-0]" in running.text() and "[sim-1]" in running.text()


def test_a_killed_node_leaves_no_worker_and_no_engine(node: Callable[..., NodeProcess]) -> None:
    running = node()
    running.until_said("weights ready 0.0", 2)
    assert len(running.workers()) == 2 and running.engines()
    running.process.kill()
    running.process.wait(10)
    running.until(lambda: not running.below(), "the end of all processes")


def test_a_second_signal_kills_workers_that_drain(node: Callable[..., NodeProcess]) -> None:
    running = node(count=1)
    running.until_said("weights ready 0.0")
    (worker,) = running.workers()
    os.kill(worker, signal.SIGSTOP)
    running.process.send_signal(signal.SIGTERM)
    running.until_said("SIGTERM")
    running.process.send_signal(signal.SIGINT)
    assert running.process.wait(WAIT_S) == 1
    assert running.below() == []


@pytest.mark.parametrize(
    ("workers", "text"),
    [
        ([{"settings": {"model": "/no/such/model"}}], "worker worker-0: model directory /no/such/model"),
        ([{"settings": {"model": "sim:"}}, {"settings": {"model": "sim:"}}], "not unique"),
        ([{"settings": {"model": "sim:", "slotz": 3}}], "slotz"),
        ([], "workers"),
    ],
)
def test_wrong_settings_end_with_code_2_before_anything_starts(
    workers: list[dict[str, object]], text: str, tmp_path: Path
) -> None:
    config = tmp_path / "node.yaml"
    config.write_text(yaml.safe_dump({"workers": workers}))
    done = subprocess.run(
        [sys.executable, "-m", "rollmq.cli.node", "--config", str(config)],
        cwd=tmp_path, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert text in done.stderr and "started" not in done.stderr and "Traceback" not in done.stderr


def test_settings_that_only_a_worker_can_find_wrong_end_the_node_with_code_2(node: Callable[..., NodeProcess]) -> None:
    running = node(rewards={"mine": "no_such_module_here:f"})
    assert running.process.wait(WAIT_S) == 2
    assert "no_such_module_here" in running.text() and running.below() == []
