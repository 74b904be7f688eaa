"""The sequence that puts new weights into a server, and what state it leaves behind when it fails.

pause → load → set label → drop caches → compare the server's own report → resume, always. The gate that keeps new
requests away meanwhile, and the consequences of a failure, belong to `workers/engine.py`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from rollmq.errors import EngineError, EngineVersionUnknown, RequestRejected, WeightUpdateError
from workers.backends.base import PauseMode, RemoteInfBackendProtocol
from workers.http_client import EngineHttp, HttpRequest

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineTimeouts:
    """Deadlines of the calls to an engine, in seconds.

    Attributes:
        generate_s: one generation request, pauses included.
        control_s: health, version, label, resume, abort.
        pause_s: until a pause in mode keep or abort has settled.
        drain_s: until a pause in mode wait has settled, that is until all requests in flight ended.
        load_s: loading weights from disk.
    """

    generate_s: float = 3600.0
    control_s: float = 30.0
    pause_s: float = 60.0
    drain_s: float = 900.0
    load_s: float = 900.0


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """A finished update.

    Attributes:
        label: the version label that the server reports now.
        load_s: seconds for loading alone.
        stall_s: seconds during which the server took no request.
    """

    label: str
    load_s: float
    stall_s: float


class WeightUpdater:
    """Runs one update. One use.

    Args:
        backend, http, timeouts: of the engine.
        on_suspect: called, before the resume, after a failure that may have left a half-loaded model under its old
            label: nothing more may be generated with it.
    """

    def __init__(
        self,
        backend: RemoteInfBackendProtocol,
        http: EngineHttp,
        timeouts: EngineTimeouts,
        on_suspect: Callable[[], Awaitable[None]],
    ) -> None:
        self._backend = backend
        self._http = http
        self._timeouts = timeouts
        self._on_suspect = on_suspect
        self._half_loaded = False
        self.load_s = 0.0

    async def run(self, path: str | None, label: str, mode: PauseMode) -> None:
        """Pauses, loads, labels, verifies and resumes.

        Args:
            path: directory of the weights; None changes only the label.
            label: what the server must report afterwards.
            mode: what happens to requests in flight.

        Raises:
            WeightUpdateError: any step failed, the resume included.
        """
        try:
            await self._pause(mode)
            await self._load(path, label)
            await self._reset_caches()
            await self._verify(label)
        except BaseException as error:
            if self._half_loaded:
                await self._on_suspect()
            await self._resume_after_failure()
            if isinstance(error, EngineError | RequestRejected):
                raise WeightUpdateError(f"update to {label} from {path} failed: {error}") from error
            raise
        try:
            await self._call(self._backend.resume_request(), self._timeouts.control_s)
        except (EngineError, RequestRejected) as error:
            raise WeightUpdateError(f"the server did not resume after the update to {label}: {error}") from error

    async def _pause(self, mode: PauseMode) -> None:
        timeout = self._timeouts.drain_s if mode == "wait" else self._timeouts.pause_s
        await self._call(self._backend.pause_request(mode), timeout)

    async def _load(self, path: str | None, label: str) -> None:
        started = time.monotonic()
        labelled = False
        if path is not None:
            update = self._backend.weight_update_requests(path, label)
            self._half_loaded = not update.atomic
            for request in update.requests:
                await self._call(request, self._timeouts.load_s)
            labelled = update.sets_label
        if not labelled:
            await self._call(self._backend.set_version_request(label), self._timeouts.control_s)
        self.load_s = time.monotonic() - started

    async def _reset_caches(self) -> None:
        request = self._backend.cache_reset_request()
        if request is not None:
            await self._call(request, self._timeouts.control_s)

    async def _verify(self, label: str) -> None:
        body = await self._http.control(self._backend.version_request(), timeout=self._timeouts.control_s)
        reported = self._backend.parse_version(body)
        if reported != label:
            raise EngineVersionUnknown(f"the server reports weight version {reported!r} instead of {label!r}")

    async def _resume_after_failure(self) -> None:
        try:
            await self._call(self._backend.resume_request(), self._timeouts.control_s)
        except (EngineError, RequestRejected) as error:
            logger.error("after a failed weight update the server did not resume either: %s", error)

    async def _call(self, request: HttpRequest, timeout: float) -> dict[str, Any]:
        body = await self._http.control(request, timeout=timeout)
        if body.get("success") is False:
            raise WeightUpdateError(
                f"{request.endpoint} answered success: false ({str(body.get('message', ''))[:200]})"
            )
        return body
