"""`rollmq node`: one process per worker of a machine, started again when it ends, all gone when the node ends.

The node runs no engine and speaks to no broker. Each worker leads a session of its own, so that a terminal's Ctrl-C
reaches only the node, which passes it on; should the node be killed, the kernel kills its workers, and each engine's
guard its engine. All processes below a node carry its mark in their environment, which is how the node proves at
its end that nothing is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from rollmq.config import NodeConfig, WorkerConfig
from rollmq.errors import ConfigError
from workers.engine_setup import EngineSetup

log = logging.getLogger(__name__)

MARK = "ROLLMQ_NODE_RUN"
STEADY_S = 60.0
"""A worker that ran this long starts over with the first pause."""
CLEAR_TIMEOUT_S = 10.0
SETTINGS_LIMIT = 32 * 1024
EXIT_OK, EXIT_FAILED, EXIT_MISUSE = 0, 1, 2


class Node:
    """The workers of one machine. Made and run inside one event loop, on the main thread.

    Args:
        config: the node's settings.
        log_level: passed to the workers.

    Raises:
        ConfigError: an entry is wrong.
    """

    def __init__(self, config: NodeConfig, log_level: str = "info") -> None:
        self._config = config
        self._workers = config.worker_configs()
        self._log_level = log_level
        self._mark = secrets.token_hex(16)
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._stopping = asyncio.Event()
        self._killing = asyncio.Event()
        self._exit_code = EXIT_OK

    def stop(self) -> None:
        """Drains all workers; the second time kills them."""
        if self._stopping.is_set():
            log.warning("second signal: killing the workers")
            self._killing.set()
            return
        log.info("stopping %d workers", len(self._processes))
        self._stopping.set()
        for name, process in self._processes.items():
            log.info("worker %s (pid %d): SIGTERM", name, process.pid)
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)

    async def run(self) -> int:
        """Runs until `stop`; returns the exit code.

        Raises:
            ConfigError: an engine cannot be launched as configured; nothing was started.
        """
        await self._check()
        kept = [asyncio.create_task(self._keep(worker)) for worker in self._workers]
        everything = asyncio.gather(*kept)
        try:
            await self._stopping.wait()
            await self._wait_stopped(everything)
            await everything
        finally:
            self._kill_all()
            await asyncio.gather(*kept, return_exceptions=True)
            await self._clear()
        return self._exit_code

    async def _check(self) -> None:
        checked: list[WorkerConfig] = []
        for worker in self._workers:
            settings = worker.model_copy(update={"name": ""})
            if settings in checked:
                continue
            checked.append(settings)
            try:
                _settings_bytes(worker)
                await EngineSetup(worker).check()
            except ConfigError as error:
                raise ConfigError(f"worker {worker.name}: {error}") from error

    # --- one worker ---------------------------------------------------------------------------------------------

    async def _keep(self, worker: WorkerConfig) -> None:
        pause_s = self._config.restart_pause_s
        while not self._stopping.is_set():
            began = time.monotonic()
            code = await self._run_once(worker)
            if self._stopping.is_set():
                return
            if code == EXIT_MISUSE:
                log.error("worker %s ended with exit code 2: its settings are wrong; stopping the node", worker.name)
                self._exit_code = EXIT_MISUSE
                self.stop()
                return
            if time.monotonic() - began >= STEADY_S:
                pause_s = self._config.restart_pause_s
            log.warning("worker %s ended (%s); starting it again in %.1f s", worker.name, _describe(code), pause_s)
            await self._pause(pause_s)
            pause_s = min(pause_s * 2, self._config.restart_pause_max_s)

    async def _run_once(self, worker: WorkerConfig) -> int:
        process = await self._start(worker)
        self._processes[worker.name] = process
        log.info("worker %s started, pid %d", worker.name, process.pid)
        if self._stopping.is_set():
            process.send_signal(signal.SIGTERM)  # the signal came while it was being started
        code = await process.wait()
        del self._processes[worker.name]
        if self._stopping.is_set():
            log.info("worker %s ended (%s)", worker.name, _describe(code))
        return code

    async def _start(self, worker: WorkerConfig) -> asyncio.subprocess.Process:
        """The settings go through a pipe: they may hold secrets, and a killed node would leave files behind."""
        read_end, write_end = os.pipe()
        try:
            os.write(write_end, _settings_bytes(worker))
            os.close(write_end)
            return await asyncio.create_subprocess_exec(
                sys.executable, "-m", "rollmq.cli.worker", "--config", "/dev/stdin",
                "--owner-pid", str(os.getpid()), "--log-level", self._log_level,
                stdin=read_end, start_new_session=True, env={**os.environ, MARK: self._mark},
            )  # fmt: skip
        finally:
            os.close(read_end)

    async def _pause(self, pause_s: float) -> None:
        try:
            await asyncio.wait_for(self._stopping.wait(), pause_s)
        except TimeoutError:
            return

    # --- the end ------------------------------------------------------------------------------------------------

    async def _wait_stopped(self, everything: asyncio.Future[list[None]]) -> None:
        killing: asyncio.Future[Any] = asyncio.ensure_future(self._killing.wait())
        try:
            await asyncio.wait(
                [everything, killing], timeout=self._config.stop_timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            killing.cancel()
        if not everything.done():
            self._exit_code = self._exit_code or EXIT_FAILED
            self._kill_all()

    def _kill_all(self) -> None:
        for name, process in self._processes.items():
            log.warning("worker %s (pid %d): SIGKILL", name, process.pid)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)

    async def _clear(self) -> None:
        """Proves that nothing is left; engines of killed workers need a moment for that."""
        deadline = time.monotonic() + CLEAR_TIMEOUT_S
        while left := marked_processes(self._mark):
            if time.monotonic() > deadline:
                log.error("processes %s did not end by themselves: SIGKILL", left)
                self._exit_code = self._exit_code or EXIT_FAILED
                for pid in left:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL)
                return
            await asyncio.sleep(0.05)
        log.info("all workers ended, no process is left")


def marked_processes(mark: str) -> list[int]:
    """Processes that were started below the node of that mark, however deep; empty where there is no /proc."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (directory / "environ").read_bytes().split(b"\0"):
                found.append(int(directory.name))
    return found


def run_node(config: NodeConfig, log_level: str = "info") -> int:
    """Runs a node until SIGTERM or SIGINT; returns the exit code: 0, 1 (something had to be killed) or 2.

    Raises:
        ConfigError: wrong settings; nothing was started.
    """
    return asyncio.run(_run(config, log_level))


async def _run(config: NodeConfig, log_level: str) -> int:
    node = Node(config, log_level)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, node.stop)
    return await node.run()


def _settings_bytes(worker: WorkerConfig) -> bytes:
    content = yaml.safe_dump(worker.model_dump(mode="json")).encode()
    if len(content) > SETTINGS_LIMIT:
        raise ConfigError(f"its settings have {len(content)} bytes; the limit is {SETTINGS_LIMIT}")
    return content


def _describe(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
