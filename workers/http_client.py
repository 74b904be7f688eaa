"""One keep-alive HTTP session to one engine, and the sorting of everything that can go wrong with a call.

- 400, 413, 422 and the like are the request's fault: `RequestRejected`, never retried.
- 401, 403, 404, 405 mean that the server lacks a route we need: an `EngineUnavailable` that says so.
- 408, 429, 5xx, connection errors and missed deadlines are the engine's: `EngineUnavailable`.

Nothing that was answered is retried here, and no error text holds a payload: texts are cut to 400 characters.
"""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from rollmq.errors import EngineUnavailable, RequestRejected

KEEP_ALIVE_S = 3.0  # below the 5 s after which engines close an idle connection
CONNECT_DEADLINE_S = 10.0
TEXT_LIMIT = 400

_ROUTE_MISSING = frozenset({401, 403, 404, 405})
_ENGINE_FAULT_4XX = frozenset({408, 425, 429})


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """One call: path with query, JSON body (None: no body), method."""

    endpoint: str
    payload: Mapping[str, Any] | None = None
    method: str = "POST"


class EngineCallFailed(EngineUnavailable):
    """A call that failed by the engine's fault.

    Attributes:
        status: the HTTP status, None if no answer came.
        dropped: the connection was closed before a byte of the answer; the same call may be made once more.
    """

    def __init__(self, message: str, *, status: int | None = None, dropped: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.dropped = dropped


class EngineHttp:
    """Calls to one engine. Use inside one event loop; `close` it."""

    def __init__(self, base_url: str, engine: str) -> None:
        self._base_url = base_url
        self._engine = engine
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def control(self, request: HttpRequest, *, timeout: float) -> dict[str, Any]:
        """As `call`, for calls that may safely reach the engine twice: made once more if the connection was dropped.

        An engine may close an idle connection at the moment of its reuse, and some do after an answer of 500.
        """
        try:
            return await self.call(request, timeout=timeout)
        except EngineCallFailed as error:
            if not error.dropped:
                raise
        return await self.call(request, timeout=timeout)

    async def call(self, request: HttpRequest, *, timeout: float) -> dict[str, Any]:
        """Makes a call and returns the JSON object it answers with ({} for an empty or non-object body).

        Args:
            request: what to call.
            timeout: seconds for the whole call.

        Raises:
            RequestRejected: the engine says that the request is wrong.
            EngineCallFailed: everything else.
        """
        what = f"{request.method} {request.endpoint} of {self._engine} at {self._base_url}"
        limits = aiohttp.ClientTimeout(total=timeout, connect=min(CONNECT_DEADLINE_S, timeout))
        try:
            async with self._open_session().request(
                request.method, self._base_url + request.endpoint, json=request.payload, timeout=limits
            ) as response:
                body = await response.read()
                if response.status >= 500:
                    response.close()  # not to be used again: the server may be about to close it
                if response.status >= 300:
                    raise classify(response.status, body, what)
                return parse_object(body, what)
        except aiohttp.ServerDisconnectedError as error:
            raise EngineCallFailed(f"{what} was disconnected without an answer", dropped=True) from error
        except TimeoutError as error:
            raise EngineCallFailed(f"{what} gave no answer within {timeout:.1f} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineCallFailed(
                f"{what} failed: {cut(str(error) or type(error).__name__)}",
                dropped=isinstance(error, ConnectionResetError | BrokenPipeError)
                or getattr(error, "errno", None) in (errno.ECONNRESET, errno.EPIPE),
            ) from error

    async def close(self) -> None:
        """Closes all connections; later calls fail."""
        self._closed = True
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _open_session(self) -> aiohttp.ClientSession:
        if self._closed:
            raise EngineCallFailed(f"the connection to {self._engine} at {self._base_url} is closed")
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
            self._session = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
        return self._session


def classify(status: int, body: bytes, what: str) -> RequestRejected | EngineCallFailed:
    """The exception for an answer that is not a success."""
    text = error_text(body)
    if status in _ROUTE_MISSING:
        return EngineCallFailed(
            f"{what} answered {status}: {text}; the server does not offer this route: wrong engine version or flags",
            status=status,
        )
    if 400 <= status < 500 and status not in _ENGINE_FAULT_4XX:
        return RequestRejected(f"{what} rejected the request ({status}): {text}")
    return EngineCallFailed(f"{what} answered {status}: {text}", status=status)


def error_text(body: bytes) -> str:
    """The message inside an error body, whatever its shape, cut to 400 characters."""
    text = body[: 16 * TEXT_LIMIT].decode("utf-8", "replace")
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return cut(text)
    if isinstance(value, dict):
        found = value.get("error", value.get("message", value.get("detail", text)))
        if isinstance(found, dict):
            found = found.get("message", text)
        return cut(str(found))
    return cut(text)


def parse_object(body: bytes, what: str) -> dict[str, Any]:
    """The JSON object in a body; NaN and Infinity are let through for the caller to judge."""
    if not body.strip():
        return {}
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise EngineCallFailed(f"{what} answered {len(body)} bytes that are not JSON") from error
    return value if isinstance(value, dict) else {}


def cut(text: str) -> str:
    """`text` on one line, at most 400 characters."""
    line = " ".join(text.split())
    return line if len(line) <= TEXT_LIMIT else line[: TEXT_LIMIT - 3] + "..."


async def settle(task: asyncio.Task[Any]) -> None:
    """Cancels a task and waits until it is over; its outcome is of no interest any more."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
