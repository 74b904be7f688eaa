"""A small fleet as real processes, for the tests of users and of rollmq itself.

    with local_fleet(workers=2, model="sim:tpot_ms=1,tokens=8") as fleet:
        client = RolloutClient(fleet.address, trainer="math")

Everything listens on loopback at free ports, lives in a temporary folder, and is gone when the block ends.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollmq.errors import DeadlineExceeded, RollmqError

START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 20.0


class FleetError(RollmqError):
    """A process of the fleet did not start or ended on its own; the message holds its log."""


@dataclass(slots=True)
class Member:
    """One process of the fleet and the file that holds its output."""

    process: subprocess.Popen[bytes]
    log: Path

    def tail(self, lines: int = 20) -> str:
        """The last lines of its output."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


@dataclass(slots=True)
class Fleet:
    """A broker and workers on this machine.

    Attributes:
        address: of the broker; stays the same when the broker is started again.
        directory: holds the journal, logs and whatever a test puts there.
    """

    directory: Path
    model: str
    slots: int
    policy: str = "default"
    worker_args: Sequence[str] = ()
    broker_args: Sequence[str] = ()
    address: str = ""
    broker: Member | None = None
    workers: dict[str, Member] = field(default_factory=dict)
    _starts: int = 0

    @property
    def journal(self) -> Path:
        """Directory of the broker's journal."""
        return self.directory / "journal"

    # --- broker -------------------------------------------------------------------------------------------------

    def start_broker(self) -> None:
        """Starts the broker and waits until it serves.

        Raises:
            FleetError: it ended instead.
            DeadlineExceeded: it did not say that it is ready.
        """
        bind = self.address or "tcp://127.0.0.1:0"
        args = ["broker", "--bind", bind, "--journal", str(self.journal), *self.broker_args]
        self.broker = self._start(args, "broker")
        line = _wait_for_line(self.broker, "rollmq broker ready:", START_TIMEOUT_S)
        self.address = next(part for part in line.split() if part.startswith("address=")).removeprefix("address=")

    def kill_broker(self) -> None:
        """SIGKILL, and waits until it is gone."""
        assert self.broker is not None
        self.broker.process.kill()
        self.broker.process.wait(STOP_TIMEOUT_S)

    # --- workers ------------------------------------------------------------------------------------------------

    def start_worker(self, name: str) -> Member:
        """Starts a worker; it connects when its engine is ready."""
        args = ["worker", "--broker", self.address, "--name", name, "--policy", self.policy, "--engine", "embedded"]
        args += ["--model", self.model, "--slots", str(self.slots), "--log-dir", str(self.directory / "logs")]
        self.workers[name] = self._start([*args, *self.worker_args], name)
        return self.workers[name]

    def kill_worker(self, name: str) -> None:
        """SIGKILL, and waits until it is gone."""
        self.workers[name].process.kill()
        self.workers[name].process.wait(STOP_TIMEOUT_S)

    def wait_workers(self, count: int, timeout_s: float = START_TIMEOUT_S) -> None:
        """Waits until `count` workers are connected with a proven version.

        Raises:
            DeadlineExceeded: they were not in time; names those that are, with the logs of the others.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            ready = [
                w["name"] for w in self.status()["workers"] if w["weights"] == "ready" and w["version"] is not None
            ]
            if len(ready) >= count:
                return
            if time.monotonic() > deadline:
                logs = "\n".join(f"{name}:\n{m.tail()}" for name, m in self.workers.items() if name not in ready)
                raise DeadlineExceeded(f"{len(ready)} of {count} workers ready after {timeout_s:g} s: {ready}\n{logs}")
            time.sleep(0.1)

    # --- facts and end ------------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """What `rollmq status --json` prints."""
        command = [sys.executable, "-m", "rollmq.cli.main", "status", "--json", "--broker", self.address]
        done = subprocess.run(command, capture_output=True, timeout=START_TIMEOUT_S, check=False)
        if done.returncode != 0:
            raise FleetError(f"rollmq status failed: {done.stderr.decode(errors='replace')}")
        document: dict[str, Any] = json.loads(done.stdout)
        return document

    def stop(self) -> None:
        """Ends every process that is still there: SIGTERM, then SIGKILL after a while."""
        members = [*self.workers.values(), *([self.broker] if self.broker else [])]
        for member in members[: len(self.workers)]:
            _terminate(member)
        for member in members:
            _terminate(member)
            _wait_or_kill(member)

    def _start(self, args: Sequence[str], name: str) -> Member:
        self._starts += 1
        log = self.directory / f"{self._starts:02d}-{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "rollmq.cli.main", *args],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )
        return Member(process, log)


@contextmanager
def local_fleet(
    *,
    workers: int = 2,
    model: str = "sim:tpot_ms=1,tokens=8",
    slots: int = 8,
    policy: str = "default",
    wait: bool = True,
    worker_args: Sequence[str] = (),
    broker_args: Sequence[str] = (),
    directory: Path | None = None,
) -> Iterator[Fleet]:
    """A broker and `workers` workers, named `worker-0`, `worker-1`, ..., until the block ends.

    Args:
        workers: how many to start.
        model: `sim:...` or a model directory.
        slots: episodes at once per worker.
        policy: whose tasks they run.
        wait: whether to wait until all workers are ready.
        worker_args: more arguments for each `rollmq worker`.
        broker_args: more arguments for `rollmq broker`.
        directory: where to keep journal and logs; a temporary folder by default.

    Raises:
        FleetError: a process could not be started.
        DeadlineExceeded: a process was not ready in time.
    """
    with tempfile.TemporaryDirectory(prefix="rollmq-fleet-") as temporary:
        home = directory or Path(temporary)
        home.mkdir(parents=True, exist_ok=True)
        fleet = Fleet(home, model, slots, policy, worker_args, broker_args)
        try:
            fleet.start_broker()
            for index in range(workers):
                fleet.start_worker(f"worker-{index}")
            if wait and workers:
                fleet.wait_workers(workers)
            yield fleet
        finally:
            fleet.stop()


def _wait_for_line(member: Member, start: str, timeout_s: float) -> str:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        for line in member.log.read_text(errors="replace").splitlines():
            if line.startswith(start):
                return line
        if member.process.poll() is not None:
            raise FleetError(f"{member.log.stem} ended with code {member.process.returncode}:\n{member.tail()}")
        time.sleep(0.02)
    raise DeadlineExceeded(f"{member.log.stem} did not say {start!r} within {timeout_s:g} s:\n{member.tail()}")


def _terminate(member: Member) -> None:
    if member.process.poll() is None:
        member.process.send_signal(signal.SIGTERM)


def _wait_or_kill(member: Member) -> None:
    try:
        member.process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        member.process.kill()
        member.process.wait(STOP_TIMEOUT_S)
