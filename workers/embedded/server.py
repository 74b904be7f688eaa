"""The HTTP face of the embedded engine: routes, bodies in and out, errors as JSON.

Holds no engine state: it reads requests, hands them to the scheduler and awaits its futures. A client that goes
away takes its request with it.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web

import rollmq
from rollmq.errors import EngineError, EngineUnavailable, RequestRejected
from workers.embedded.errors import BadModelDirectory, Conflict
from workers.embedded.interface import Model
from workers.embedded.request import as_object, parse_generate, read_text
from workers.embedded.scheduler import PauseMode, Scheduler
from workers.embedded.sequence import GenerationResult

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 * 1024 * 1024

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_STATUS_OF_ERROR: tuple[tuple[type[Exception], int, str], ...] = (
    (RequestRejected, 400, "invalid_request"),
    (BadModelDirectory, 400, "bad_weights"),
    (Conflict, 409, "conflict"),
    (EngineUnavailable, 503, "unavailable"),
    (EngineError, 500, "engine_fault"),
)
"""First match wins; subclasses come before their bases."""


@dataclass(frozen=True, slots=True)
class Server:
    """What the routes need: the scheduler, the model's facts, and the name this server answers to."""

    scheduler: Scheduler
    model: Model
    served_name: str

    def application(self) -> web.Application:
        """The aiohttp application with all routes."""
        app = web.Application(middlewares=[_errors_as_json], client_max_size=MAX_BODY_BYTES)
        app.router.add_get("/health", self._health)
        app.router.add_get("/info", self._info)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort", self._abort)
        app.router.add_post("/pause", self._pause)
        app.router.add_post("/resume", self._resume)
        app.router.add_post("/update_weights", self._update_weights)
        app.router.add_post("/set_weight_version", self._set_weight_version)
        return app

    async def _health(self, _request: web.Request) -> web.Response:
        failure = self.scheduler.status().failure
        if failure is not None:
            return web.json_response({"status": "failed", **_error_body(failure, "failed")}, status=503)
        return web.json_response({"status": "ok"})

    async def _info(self, _request: web.Request) -> web.Response:
        status, limits = self.scheduler.status(), self.model.limits
        return web.json_response(
            {
                "engine": "embedded",
                "version": rollmq.__version__,
                "served_name": self.served_name,
                "model": self.model.name,
                "weight_version": status.weight_version,
                "vocab_size": limits.vocab_size,
                "max_model_len": limits.max_model_len,
                "running": status.running,
                "waiting": status.waiting,
                "paused": status.paused,
                "generated_tokens": status.generated_tokens,
                "eos_token_ids": sorted(limits.eos_token_ids),
            }
        )

    async def _generate(self, request: web.Request) -> web.Response:
        generate = parse_generate(await _read_json(request), self.model.limits)
        answer = self.scheduler.submit(generate)
        try:
            result = await asyncio.wrap_future(answer)
        except asyncio.CancelledError:
            logger.info("client of request %r went away; aborting it", generate.rid)
            self.scheduler.abandon(generate.rid)
            raise
        return web.json_response(_result_body(result))

    async def _abort(self, request: web.Request) -> web.Response:
        body = await _read_object(request)
        if body.get("all") is True and "rids" not in body:
            aborted = await asyncio.wrap_future(self.scheduler.abort_all())
        else:
            aborted = await asyncio.wrap_future(self.scheduler.abort(_read_rids(body)))
        return web.json_response({"aborted": aborted})

    async def _pause(self, request: web.Request) -> web.Response:
        mode = read_text(await _read_object(request), "mode")
        if mode not in list(PauseMode):
            raise RequestRejected(f"mode is {mode!r}; it must be one of {', '.join(PauseMode)}")
        await asyncio.wrap_future(self.scheduler.pause(PauseMode(mode)))
        return web.json_response({"status": "paused"})

    async def _resume(self, _request: web.Request) -> web.Response:
        await asyncio.wrap_future(self.scheduler.resume())
        return web.json_response({"status": "resumed"})

    async def _update_weights(self, request: web.Request) -> web.Response:
        body = await _read_object(request)
        path, version = read_text(body, "path"), read_text(body, "weight_version")
        seconds = await asyncio.wrap_future(self.scheduler.update_weights(path, version))
        return web.json_response({"success": True, "weight_version": version, "load_s": seconds})

    async def _set_weight_version(self, request: web.Request) -> web.Response:
        version = read_text(await _read_object(request), "weight_version")
        version = await asyncio.wrap_future(self.scheduler.set_weight_version(version))
        return web.json_response({"weight_version": version})


def _result_body(result: GenerationResult) -> dict[str, Any]:
    return {
        "rid": result.rid,
        "output_ids": result.output_ids,
        "output_logprobs": result.output_logprobs,
        "finish_reason": result.finish_reason.value,
        "stop_reason": result.stop_reason,
        "weight_versions": [{"version": span.version, "start": span.start, "end": span.end} for span in result.spans],
        "prompt_tokens": result.prompt_tokens,
        "cached_tokens": 0,
    }


async def _read_json(request: web.Request) -> object:
    try:
        return json.loads(await request.read())
    except (ValueError, RecursionError) as error:
        raise RequestRejected(f"the body of {request.method} {request.path} is not valid JSON: {error}") from None


async def _read_object(request: web.Request) -> Mapping[str, Any]:
    return as_object(await _read_json(request), "the body")


def _read_rids(body: Mapping[str, Any]) -> list[str]:
    rids = body.get("rids")
    if "all" in body or not isinstance(rids, list) or not all(isinstance(rid, str) for rid in rids):
        raise RequestRejected('the body must be {"rids": [strings]} or {"all": true}')
    return rids


@web.middleware
async def _errors_as_json(request: web.Request, handler: _Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as error:
        return _error_response(error.status, f"{request.method} {request.path}: {error.reason}", "http_error")
    except Exception as error:
        for kind, status, name in _STATUS_OF_ERROR:
            if isinstance(error, kind):
                return _error_response(status, str(error), name)
        logger.exception("%s %s failed", request.method, request.path)
        return _error_response(500, f"{type(error).__name__}: {error}", "internal_error")


def _error_response(status: int, message: str, kind: str) -> web.Response:
    return web.json_response(_error_body(message, kind), status=status)


def _error_body(message: str, kind: str) -> dict[str, dict[str, str]]:
    return {"error": {"message": message, "type": kind}}
