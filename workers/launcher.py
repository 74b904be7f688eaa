"""Launches one inference server and takes it down again.

Not to be used inside a training rank: the server would share that rank's accelerators and die with it. A server
belongs to a worker process of its own.

Everything that can be known before a start is checked before it: interpreter, engine version, model directory,
fixed port. A start then polls the server and its process together, so that a server that exits is reported at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rollmq.errors import ConfigError, EngineLaunchError, EngineUnavailable, RequestRejected
from workers.backends.base import RemoteInfBackendProtocol
from workers.http_client import EngineHttp
from workers.installation import base_environment, probe
from workers.launch_spec import EngineInstallation, LaunchSpec
from workers.log_tail import describe_log, log_tail
from workers.ports import free_port, port_is_free, says_bind_failed
from workers.processes import EngineProcess

PORT_ATTEMPTS = 3
POLL_S = (0.05, 0.5)
POLL_DEADLINE_S = 5.0


@dataclass(frozen=True, slots=True)
class LocalInfServerInfo:
    """One running server of ours.

    Attributes:
        host, port: where it listens.
        served_name: the random name by which it proves that it is ours.
        log_path: its own log file, stdout and stderr.
        process: the guarded process tree.
        installation: interpreter, distribution and version.
        shutdown_grace_s: from SIGTERM to SIGKILL at teardown.
    """

    host: str
    port: int
    served_name: str
    log_path: Path
    process: EngineProcess
    installation: EngineInstallation
    shutdown_grace_s: float

    @property
    def base_url(self) -> str:
        """`http://host:port`."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"


class _PortTaken(EngineLaunchError):
    """Somebody else has the port; another one may work."""


async def launch_server(
    backend: RemoteInfBackendProtocol, spec: LaunchSpec, *, pick_port: Callable[[str], int] = free_port
) -> LocalInfServerInfo:
    """Starts a server and waits until it serves.

    Args:
        backend: which kind.
        spec: how.
        pick_port: gives a free port for a host; called again (three times in all) if the port was taken meanwhile.

    Raises:
        ConfigError: found wrong before anything was started.
        EngineLaunchError: it exited, never became ready, or found no port; nothing is left of it. The message holds
            exit code, log file and last log lines.
    """
    installation = await check_launch(backend, spec)
    spec.log_dir.mkdir(parents=True, exist_ok=True)
    spec.cache_dir.mkdir(parents=True, exist_ok=True)
    attempts = 1 if spec.port is not None else PORT_ATTEMPTS
    for attempt in range(1, attempts + 1):
        port = spec.port if spec.port is not None else pick_port(spec.host)
        try:
            return await _launch_once(backend, spec, installation, port)
        except _PortTaken as error:
            if attempt == attempts:
                raise EngineLaunchError(f"{error}\n(attempt {attempt} of {attempts})") from error
    raise AssertionError("unreachable")


async def teardown_server(server: LocalInfServerInfo) -> None:
    """SIGTERM, grace, SIGKILL of the whole tree, and proof that it is gone. May be called again.

    Raises:
        EngineError: a process cannot be killed.
    """
    await server.process.stop(server.shutdown_grace_s)


async def check_launch(backend: RemoteInfBackendProtocol, spec: LaunchSpec) -> EngineInstallation:
    """Everything that can be found wrong without starting the server; takes well under a second.

    Raises:
        ConfigError: naming the thing that is wrong and what to do.
    """
    requirement = backend.requirement(spec)
    installation = await probe(backend.name, spec.python, requirement)
    backend.check_launch(spec, installation)
    if spec.port is not None and not port_is_free(spec.host, spec.port):
        raise ConfigError(
            f"port {spec.port} on {spec.host} is in use; choose another one for worker {spec.name}, or none at all"
        )
    return installation


async def _launch_once(
    backend: RemoteInfBackendProtocol, spec: LaunchSpec, installation: EngineInstallation, port: int
) -> LocalInfServerInfo:
    served_name = f"rollmq-{secrets.token_hex(8)}"
    log_path = spec.log_dir / f"{spec.name}-{time.strftime('%Y%m%d-%H%M%S')}-{served_name[-6:]}.log"
    process = await EngineProcess.start(
        backend.launch_command(spec, installation, port=port, served_name=served_name),
        env={**base_environment(spec.python), **backend.launch_environment(spec, installation), **spec.env},
        cwd=spec.log_dir,
        log_path=log_path,
        marker=served_name,
    )
    server = LocalInfServerInfo(spec.host, port, served_name, log_path, process, installation, spec.shutdown_grace_s)
    try:
        await _wait_ready(backend, spec, server)
    except BaseException:
        await process.stop(grace_s=0.0)
        raise
    return server


async def _wait_ready(backend: RemoteInfBackendProtocol, spec: LaunchSpec, server: LocalInfServerInfo) -> None:
    http = EngineHttp(server.base_url, backend.name)
    poll = asyncio.create_task(_poll_until_ready(backend, http, server))
    exited = asyncio.create_task(server.process.exited.wait())
    try:
        await asyncio.wait({poll, exited}, timeout=spec.startup_timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if exited.done():
            raise await asyncio.to_thread(_exit_error, backend.name, server)
        if not poll.done():
            raise EngineLaunchError(
                f"engine {backend.name} (worker {spec.name}) was not ready within {spec.startup_timeout_s:.0f} s and "
                f"was stopped{describe_log(server.log_path)}"
            )
        poll.result()
    finally:
        for task in (poll, exited):
            task.cancel()
        await asyncio.gather(poll, exited, return_exceptions=True)
        await http.close()


async def _poll_until_ready(backend: RemoteInfBackendProtocol, http: EngineHttp, server: LocalInfServerInfo) -> None:
    pause = POLL_S[0]
    while True:
        with contextlib.suppress(EngineUnavailable, RequestRejected):
            await http.call(backend.health_request(), timeout=POLL_DEADLINE_S)
            name = backend.parse_identity(await http.call(backend.identity_request(), timeout=POLL_DEADLINE_S))
            if name == server.served_name:
                return
            raise _PortTaken(
                f"port {server.port} on {server.host} is served by somebody else ({name!r}); log file {server.log_path}"
            )
        await asyncio.sleep(pause)
        pause = min(pause * 1.5, POLL_S[1])


def _exit_error(engine: str, server: LocalInfServerInfo) -> EngineLaunchError:
    report = server.process.exit_report
    text = (
        f"engine {engine} {report.text if report else 'ended'} before it was ready (port {server.port})"
        f"{describe_log(server.log_path)}"
    )
    kind = _PortTaken if says_bind_failed(log_tail(server.log_path, lines=200)) else EngineLaunchError
    return kind(text)
