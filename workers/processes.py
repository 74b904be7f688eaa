"""The owner's end of a guarded engine process: start, watch, stop, and prove that nothing is left.

The engine itself is started by `guard.py`; this module talks to that guard and takes over its duty if it dies.
It knows nothing of HTTP or of engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollmq.errors import EngineError, EngineLaunchError
from workers import guard

logger = logging.getLogger(__name__)

MARKER_VARIABLE = "ROLLMQ_ENGINE_LAUNCH"
SPAWN_DEADLINE_S = 30.0
KILL_DEADLINE_S = 20.0


@dataclass(frozen=True, slots=True)
class ExitReport:
    """How an engine ended.

    Attributes:
        code: exit code of its leading process, negative for a signal, None if nobody saw it.
        text: the same in words.
    """

    code: int | None
    text: str


class EngineProcess:
    """A running engine with the guard above it. Made by `start`; `stop` is idempotent.

    Attributes:
        log_path: where stdout and stderr of the engine go.
        engine_pid: the engine's leading process, also its session and process group.
        exited: set as soon as nothing of the engine runs any more; `exit_report` is there then.
    """

    def __init__(self, process: asyncio.subprocess.Process, log_path: Path, engine_pid: int, marker: str) -> None:
        self._process = process
        self._marker = marker
        self._stop_lock = asyncio.Lock()
        self.log_path = log_path
        self.engine_pid = engine_pid
        self.exited = asyncio.Event()
        self._exit_report: ExitReport | None = None
        self._watcher = asyncio.create_task(self._watch(), name=f"engine-process-{engine_pid}")

    @classmethod
    async def start(
        cls, command: Sequence[str], *, env: Mapping[str, str], cwd: Path, log_path: Path, marker: str
    ) -> EngineProcess:
        """Starts `command` below a guard; returns once it runs (not: once it serves).

        Args:
            command: program and arguments.
            env: its whole environment.
            cwd: its working folder.
            log_path: file for stdout and stderr, appended to.
            marker: a string unique to this launch, put into the environment so that lost processes can be found.

        Raises:
            EngineLaunchError: the program cannot be executed.
        """
        full_env = {**env, MARKER_VARIABLE: marker}
        with log_path.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), "--", *command,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=log, cwd=cwd, env=full_env,
            )  # fmt: skip
        try:
            message = await asyncio.wait_for(_read_message(process), SPAWN_DEADLINE_S)
        except BaseException:
            await _end_guard(process)
            raise
        if "pid" not in message:
            await _end_guard(process)
            reason = message.get("error", "its guard process ended without a word")
            raise EngineLaunchError(f"{reason}; log file {log_path}")
        return cls(process, log_path, int(str(message["pid"])), marker)

    @property
    def guard_pid(self) -> int:
        """The process that holds the engine; this process's child."""
        return self._process.pid

    @property
    def exit_report(self) -> ExitReport | None:
        """How the engine ended, or None while it runs."""
        return self._exit_report

    async def stop(self, grace_s: float) -> ExitReport:
        """SIGTERM, `grace_s` seconds, SIGKILL of everything below; returns when nothing is left.

        Raises:
            EngineError: the kernel does not let go of a process (named in the message).
        """
        async with self._stop_lock:
            if not self.exited.is_set() and grace_s > 0:
                _signal(self._process, signal.SIGTERM)
                await self._wait_exited(grace_s)
            if not self.exited.is_set():
                _close_stdin(self._process)
                await self._wait_exited(KILL_DEADLINE_S)
            if not self.exited.is_set():
                _signal(self._process, signal.SIGKILL)
                await self._wait_exited(KILL_DEADLINE_S)
            _close_stdin(self._process)
            left = await asyncio.to_thread(self.survivors)
            if left or self._exit_report is None:
                raise EngineError(
                    f"processes {left or [self.guard_pid]} of the engine are still there after SIGKILL; "
                    f"look for a stuck device driver; log file {self.log_path}"
                )
            return self._exit_report

    def survivors(self) -> list[int]:
        """Living processes of this launch: of its session, or with its marker in their environment."""
        return [
            pid
            for pid, row in guard.process_table().items()
            if row.state not in ("Z", "X") and (row.session == self.engine_pid or _has_marker(pid, self._marker))
        ]

    async def _wait_exited(self, timeout: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.exited.wait(), timeout)

    async def _watch(self) -> None:
        code: int | None = None
        clean = False
        while message := await _read_message(self._process):
            if "exit" in message:
                clean = not message.get("survivors")
                code = int(str(message["exit"]))
        guard_code = await self._process.wait()
        if not clean:
            logger.error("guard %d of engine %d ended with %d", self.guard_pid, self.engine_pid, guard_code)
            await asyncio.to_thread(self._kill_survivors)
        self._exit_report = ExitReport(code, _describe_exit(code))
        self.exited.set()

    def _kill_survivors(self) -> None:
        """The guard is dead: do its work from here."""
        for attempt in range(100):
            left = self.survivors()
            if not left:
                return
            for pid in left:
                guard.send_signal(pid, signal.SIGKILL)
            time.sleep(min(0.01 * (attempt + 1), 0.2))


async def _read_message(process: asyncio.subprocess.Process) -> dict[str, object]:
    assert process.stdout is not None
    line = await process.stdout.readline()
    if not line:
        return {}
    message = json.loads(line)
    return message if isinstance(message, dict) else {}


async def _end_guard(process: asyncio.subprocess.Process) -> None:
    _close_stdin(process)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), KILL_DEADLINE_S)


def _close_stdin(process: asyncio.subprocess.Process) -> None:
    if process.stdin is not None and not process.stdin.is_closing():
        process.stdin.close()


def _signal(process: asyncio.subprocess.Process, number: int) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)


def _has_marker(pid: int, marker: str) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return f"{MARKER_VARIABLE}={marker}".encode() in file.read().split(b"\0")
    except OSError:
        return False


def _describe_exit(code: int | None) -> str:
    if code is None:
        return "was killed together with its guard process"
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
