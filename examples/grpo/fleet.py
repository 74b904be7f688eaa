"""The processes of a demo run: one broker and its workers, started as a user would, ended for certain.

Each role is `python -m rollmq.cli.main ROLE` in a session of its own with its own log file. All of
them carry a marker in their environment, which the engines inherit: so the end can be proved by
looking for the marker, however deep the process.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from rollmq.errors import RollmqError
from workers.parent_death import die_with_parent
from workers.ports import free_port

log = logging.getLogger(__name__)

MARKER_VARIABLE = "ROLLMQ_DEMO_RUN"
_HOST = "127.0.0.1"
_POLL_S = 0.05
_KILL_WAIT_S = 10.0
_LOG_TAIL_BYTES = 2000


class RoleEnded(RollmqError):
    """A broker or worker of the demo ended by itself."""


@dataclass(frozen=True, slots=True)
class Role:
    """One process of the run."""

    name: str
    process: subprocess.Popen[bytes]
    log_path: Path


class Fleet:
    """Broker and workers of one run. A context manager: leaving it ends every process.

    Args:
        run_dir: where journal, configurations and logs go; exists.
        stop_timeout_s: how long a process may take to end after SIGTERM before it is killed.
    """

    def __init__(self, run_dir: Path, stop_timeout_s: float) -> None:
        self._run_dir = run_dir
        self._stop_timeout_s = stop_timeout_s
        self._marker = uuid.uuid4().hex
        self._roles: list[Role] = []
        self.log_dir = run_dir / "logs"
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self.address = f"tcp://{_HOST}:{free_port(_HOST)}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        left = self.stop()
        if left:
            log.error("processes %s of the demo did not end; look at %s", left, self.log_dir)

    def start_broker(self) -> None:
        """Start the broker at `address`, with its journal inside the run's folder."""
        journal = self._run_dir / "journal"
        self._start("broker", ["broker", "--bind", self.address, "--journal", str(journal)])

    def start_worker(self, name: str, settings: dict[str, Any]) -> None:
        """Start one worker.

        Args:
            name: unique in this run.
            settings: those of `rollmq.config.WorkerConfig`, without broker, name and log_dir.
        """
        values = {**settings, "name": name, "log_dir": str(self.log_dir / name)}
        config = self._run_dir / f"{name}.yaml"
        config.write_text(yaml.safe_dump(values), encoding="utf-8")
        arguments = ["worker", "--config", str(config), "--broker", self.address]
        arguments += ["--engine", str(settings["engine"]), "--model", str(settings["model"])]
        self._start(name, arguments)

    def check(self, least_workers: int) -> None:
        """Look whether the broker and enough workers still run.

        Raises:
            RoleEnded: naming the process that ended, its exit code, its log file and the log's last lines.
        """
        ended = [role for role in self._roles if role.process.poll() is not None]
        living_workers = sum(role.name != "broker" and role not in ended for role in self._roles)
        for role in ended:
            if role.name == "broker" or living_workers < least_workers:
                raise RoleEnded(
                    f"{role.name} of the demo ended with code {role.process.returncode}; log file {role.log_path}; "
                    f"last lines:\n{_tail(role.log_path)}"
                )

    def stop(self) -> list[int]:
        """End all processes: workers first, so that they can say goodbye to the broker. Idempotent.

        Returns:
            The pids that are still alive, engines included; empty when all is well.
        """
        workers = [role for role in self._roles if role.name != "broker"]
        broker = [role for role in self._roles if role.name == "broker"]
        for roles in (workers, broker):
            _end(roles, self._stop_timeout_s)
        for pid in self.survivors():
            log.warning("process %d outlived its worker and is killed", pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + _KILL_WAIT_S
        while (left := self.survivors()) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return left

    def survivors(self) -> list[int]:
        """Living processes of this run, found by their marker; always empty where there is no /proc."""
        wanted = f"{MARKER_VARIABLE}={self._marker}".encode()
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return sorted(found)

    def _start(self, name: str, arguments: Sequence[str]) -> None:
        log_path = self.log_dir / f"{name}.log"
        environment = {**os.environ, MARKER_VARIABLE: self._marker}
        with log_path.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "rollmq.cli.main", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment,
                preexec_fn=functools.partial(die_with_parent, os.getpid()),
            )
        self._roles.append(Role(name, process, log_path))


def _end(roles: Sequence[Role], timeout_s: float) -> None:
    """SIGTERM to all at once, then wait, then SIGKILL to the whole session of those that stayed."""
    for role in roles:
        if role.process.poll() is None:
            role.process.terminate()
    deadline = time.monotonic() + timeout_s
    for role in roles:
        try:
            role.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            log.warning("%s did not end within %g s of SIGTERM and is killed", role.name, timeout_s)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(role.process.pid, signal.SIGKILL)
            role.process.wait(_KILL_WAIT_S)


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _LOG_TAIL_BYTES))
        return file.read().decode("utf-8", "replace").strip()
