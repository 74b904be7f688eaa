"""RemoteInfEngine: one launched inference server, as a worker uses it.

It owns the server's process, one HTTP session, the gate that keeps requests away during a weight update, and the
knowledge of what weights the server has. It does not restart anything and knows no tasks: that is the worker's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollmq.errors import (
    EngineError,
    EngineUnavailable,
    EngineVersionUnknown,
    GenerationInterrupted,
    RequestRejected,
    WeightUpdateError,
)
from rollmq.rollout import ModelRequest
from workers.backends.base import (
    PAUSE_MODES,
    HttpGenerationResult,
    ModelLimits,
    PauseMode,
    RemoteInfBackendProtocol,
    Segment,
)
from workers.flight import Flight
from workers.generation import EngineResponse, Generation
from workers.http_client import EngineCallFailed, EngineHttp, HttpRequest
from workers.labels import parse_label
from workers.launch_spec import LaunchSpec
from workers.launcher import LocalInfServerInfo, launch_server, teardown_server
from workers.log_tail import describe_log
from workers.ports import free_port
from workers.request_checks import check_request
from workers.weight_update import EngineTimeouts, UpdateReport, WeightUpdater

logger = logging.getLogger(__name__)

_HALF_LOADED = "a weight update failed half-way; what weights the server now holds is unknown"


class RemoteInfEngine:
    """One launch of one inference server, inside one event loop: `start`, then anything, then `close`.

    Args:
        backend: which kind of server.
        spec: how to launch it.
        timeouts: deadlines of the calls.
        pick_port: gives a free port (for tests).
    """

    def __init__(
        self,
        backend: RemoteInfBackendProtocol,
        spec: LaunchSpec,
        *,
        timeouts: EngineTimeouts | None = None,
        pick_port: Callable[[str], int] = free_port,
    ) -> None:
        self._backend = backend
        self._spec = spec
        self._timeouts = timeouts or EngineTimeouts()
        self._pick_port = pick_port
        self._server: LocalInfServerInfo | None = None
        self._http: EngineHttp | None = None
        self._limits: ModelLimits | None = None
        self._flights: dict[str, Flight] = {}
        self._owner = asyncio.Lock()
        self._gate = asyncio.Event()
        self._gate.set()
        self._closures = 0
        self._fence = ""
        self._weights_suspect = False
        self._label: str | None = None

    # --- life

    async def start(self) -> None:
        """Launches the server, sets the label `spec.weight_version`, and has the server prove it.

        Raises:
            ConfigError, EngineLaunchError: as `launch_server`.
            EngineError: the server runs but does not report limits or the label; it was taken down again.
        """
        if self._server is not None:
            raise EngineError(f"engine {self._backend.name} of worker {self._spec.name} is already started")
        parse_label(self._spec.weight_version)
        self._server = await launch_server(self._backend, self._spec, pick_port=self._pick_port)
        self._http = EngineHttp(self._server.base_url, self._backend.name)
        try:
            identity = await self._ask(self._backend.identity_request())
            self._limits = self._backend.parse_limits(self._spec, identity)
            await self._label_base_weights()
        except BaseException:
            await self.close()
            raise
        logger.info("engine %s ready: %s", self._backend.name, self.describe())

    async def _label_base_weights(self) -> None:
        label = self._spec.weight_version
        await self._ask(self._backend.set_version_request(label))
        reported = await self.current_version()
        if reported != label:
            raise EngineVersionUnknown(f"after the launch the server reports {reported!r} instead of {label!r}")

    async def close(self) -> None:
        """Ends all requests, takes the server down and proves that nothing of it is left. May be called again.

        Raises:
            EngineError: a process of the server cannot be killed.
        """
        for flight in self._flights.values():
            flight.end(GenerationInterrupted("the engine is being closed"))
        if self._http is not None:
            await self._http.close()
        if self._server is not None:
            await teardown_server(self._server)

    # --- facts

    @property
    def running(self) -> int:
        """Number of `generate` calls in progress; those that wait for a weight update included."""
        return len(self._flights)

    @property
    def fenced(self) -> bool:
        """Whether a weight update failed and none has succeeded since."""
        return bool(self._fence)

    @property
    def label(self) -> str | None:
        """The label that the server proved last; None while unknown."""
        return None if self._weights_suspect else self._label

    @property
    def limits(self) -> ModelLimits:
        """Vocabulary and context length."""
        if self._limits is None:
            raise EngineUnavailable(f"engine {self._backend.name} of worker {self._spec.name} is not started")
        return self._limits

    @property
    def log_path(self) -> Path | None:
        """The log file of the server's present launch."""
        return None if self._server is None else self._server.log_path

    @property
    def exited(self) -> asyncio.Event:
        """Set once the server's processes are gone, whatever the reason."""
        return self._running_server().process.exited

    def exit_description(self) -> str | None:
        """How the server ended, with log file and last lines; None while it runs."""
        server = self._running_server()
        report = server.process.exit_report
        if report is None:
            return None
        return f"engine {self._backend.name} {report.text}{describe_log(server.log_path)}"

    def describe(self) -> dict[str, Any]:
        """Facts for status displays."""
        server = self._server
        return {
            "engine": self._backend.name,
            "engine_version": server.installation.version if server else "",
            "model": self._spec.model,
            "url": server.base_url if server else "",
            "pid": server.process.engine_pid if server else 0,
            "log": str(server.log_path) if server else "",
            "label": self.label,
            "fenced": self._fence or None,
            "running": self.running,
            "paused": not self._gate.is_set(),
            "vocab_size": self._limits.vocab_size if self._limits else 0,
            "max_model_len": self._limits.max_model_len if self._limits else 0,
        }

    async def current_version(self) -> str | None:
        """The label that the server itself reports now; None if it has none or may have half-loaded weights.

        Raises:
            EngineUnavailable: it does not answer.
        """
        body = await self._ask(self._backend.version_request())
        self._label = self._backend.parse_version(body)
        return self.label

    async def health(self) -> None:
        """Returns if the process lives and its cheap endpoint answers.

        Raises:
            EngineUnavailable: otherwise, with the reason.
        """
        self._raise_if_exited()
        await self._ask(self._backend.health_request())

    # --- generation

    async def generate(self, request: ModelRequest, *, rid: str | None = None) -> EngineResponse:
        """Generates one completion, through any number of weight updates.

        Args:
            request: prompt and sampling parameters; `n_samples` must be 1.
            rid: name by which `cancel` finds it; must not be in use.

        Raises:
            RequestRejected: the request is wrong for this model or engine; retrying it is of no use.
            GenerationInterrupted: `cancel` or `close` ended it.
            EngineUnavailable: the server failed, died, or gave an answer that makes no sense.
            EngineVersionUnknown: nobody can tell what weights produced the tokens.
        """
        check_request(request, self.limits)
        self._backend.check_supported(request.gconfig, self.limits)
        if self._fence:
            raise EngineVersionUnknown(f"engine {self._backend.name} is fenced since a failed update: {self._fence}")
        name = rid or secrets.token_hex(16)
        if name in self._flights:
            raise RequestRejected(f"request id {name!r} is already in use")
        flight = self._flights[name] = Flight(self.exited, self._raise_if_exited)
        try:
            return await self._run(self._generation(request), flight)
        finally:
            del self._flights[name]

    async def cancel(self, rid: str) -> bool:
        """Ends a `generate` call, in the server as well; returns whether there was one of that name."""
        flight = self._flights.get(rid)
        if flight is None:
            return False
        attempt = flight.attempt_id
        flight.end(GenerationInterrupted(f"generation {rid} was cancelled"))
        if attempt:
            await self._abort([attempt])
        return True

    def _generation(self, request: ModelRequest) -> Generation:
        return Generation(
            request,
            carries_penalties=self._backend.carries_penalties,
            seeds_by_position=self._backend.seeds_by_position,
        )

    async def _run(self, generation: Generation, flight: Flight) -> EngineResponse:
        retries = 1
        while not generation.finished:
            await self._pass_gate(flight)
            closures = self._closures
            try:
                result = await self._attempt(generation.next_segment(), flight)
            except EngineCallFailed as error:
                if error.status == 503 and closures != self._closures:
                    await self._pause_for(generation.accept_refusal(), flight)
                elif error.dropped and retries:
                    retries -= 1  # an idle connection that the server closed just then
                else:
                    raise
                continue
            self._refuse_suspect_weights()
            delay = generation.accept(result)
            generation.refuse_if_unlabelled()
            await self._pause_for(delay, flight)
        return generation.result()

    async def _attempt(self, segment: Segment, flight: Flight) -> HttpGenerationResult:
        flight.attempt_id = secrets.token_hex(16)
        request = self._backend.generation_request(flight.attempt_id, segment, self.limits)
        try:
            body = await flight.await_unless_over(self._client().call(request, timeout=self._timeouts.generate_s))
        finally:
            flight.attempt_id = ""
        return self._backend.parse_generation(body)

    async def _pass_gate(self, flight: Flight) -> None:
        if not self._gate.is_set() or flight.ended:
            await flight.await_unless_over(self._gate.wait())
        self._refuse_suspect_weights()

    def _refuse_suspect_weights(self) -> None:
        if self._weights_suspect:
            raise EngineVersionUnknown(_HALF_LOADED)

    async def _pause_for(self, delay: float, flight: Flight) -> None:
        if delay > 0:
            await flight.await_unless_over(asyncio.sleep(delay))

    # --- weights

    async def update_weights(self, path: str | None, label: str, mode: PauseMode = "keep") -> UpdateReport:
        """Puts new weights into the server; requests in flight are treated as `mode` says.

        Args:
            path: directory of the weights; None only gives the present weights another label.
            label: `"{epoch}.{version}"` of the new weights.
            mode: `keep`, `abort` or `wait`.

        Raises:
            WeightUpdateError: it failed; the engine is fenced until a later update succeeds. Where the old weights
                may be damaged, requests in flight end with EngineVersionUnknown: restart the server.
        """
        if mode not in PAUSE_MODES:
            raise WeightUpdateError(f"update mode {mode!r} is none of {', '.join(PAUSE_MODES)}")
        async with self._owner:
            started = time.monotonic()
            updater = WeightUpdater(self._backend, self._client(), self._timeouts, self._distrust_weights)
            self._closures += 1
            self._gate.clear()
            try:
                self._check_update(path, label)
                await updater.run(path, label, mode)
            except BaseException as error:
                self._fence = str(error) or type(error).__name__
                if isinstance(error, EngineError) and not isinstance(error, WeightUpdateError):
                    raise WeightUpdateError(f"update to {label} failed: {error}") from error
                raise
            else:
                self._fence, self._weights_suspect, self._label = "", False, label
            finally:
                self._gate.set()
            return UpdateReport(label, updater.load_s, time.monotonic() - started)

    async def _distrust_weights(self) -> None:
        """Ends all generations: not one more token may be made with half-loaded weights under the old label."""
        self._weights_suspect = True
        attempts = [flight.attempt_id for flight in self._flights.values() if flight.attempt_id]
        for flight in self._flights.values():
            flight.end(EngineVersionUnknown(_HALF_LOADED))
        if attempts:
            await self._abort(attempts)

    async def _abort(self, attempts: list[str]) -> None:
        """Closing a request's connection aborts it, too; this reaches servers that do not notice."""
        with contextlib.suppress(EngineError, RequestRejected):
            await self._client().control(self._backend.abort_request(attempts), timeout=self._timeouts.control_s)

    def _check_update(self, path: str | None, label: str) -> None:
        self._raise_if_exited()
        parse_label(label)
        if path is not None and not self._spec.is_sim and not Path(path).is_dir():
            raise WeightUpdateError(f"weights of {label}: {path} is not a directory that this machine can see")

    # --- inside

    def _running_server(self) -> LocalInfServerInfo:
        if self._server is None:
            raise EngineUnavailable(f"engine {self._backend.name} of worker {self._spec.name} is not started")
        return self._server

    def _client(self) -> EngineHttp:
        if self._http is None:
            raise EngineUnavailable(f"engine {self._backend.name} of worker {self._spec.name} is not started")
        return self._http

    async def _ask(self, request: HttpRequest) -> dict[str, Any]:
        """A control call; a refusal of it is the engine's fault, not a task's."""
        try:
            return await self._client().control(request, timeout=self._timeouts.control_s)
        except RequestRejected as error:
            raise EngineUnavailable(str(error)) from error

    def _raise_if_exited(self) -> None:
        description = self.exit_description()
        if description is not None:
            raise EngineUnavailable(description)
