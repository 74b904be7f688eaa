from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from rollmq.errors import EngineUnavailable, RequestRejected
from workers.http_client import EngineCallFailed, EngineHttp, HttpRequest, classify, error_text


@pytest.fixture
async def client() -> AsyncIterator[EngineHttp]:
    """A client of a real server whose path says what it does."""
    peers: set[object] = set()

    async def handle(request: web.Request) -> web.Response:
        assert request.transport is not None
        peers.add(request.transport.get_extra_info("peername"))
        match request.path:
            case "/slow":
                await request.content.read()
                import asyncio

                await asyncio.sleep(30)
            case "/not-json":
                return web.Response(text="<html>")
            case "/empty":
                return web.Response()
            case "/connections":
                return web.json_response({"count": len(peers)})
            case path if path.startswith("/status/"):
                return web.json_response({"error": {"message": "m" * 10_000}}, status=int(path[8:]))
        return web.json_response({"ok": True, "bad": float("nan")})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert isinstance(runner.addresses[0], tuple)
    http = EngineHttp(f"http://127.0.0.1:{runner.addresses[0][1]}", "test")
    yield http
    await http.close()
    await runner.cleanup()


@pytest.mark.parametrize("status", [400, 409, 413, 422])
async def test_other_4xx_are_the_requests_fault(client: EngineHttp, status: int) -> None:
    with pytest.raises(RequestRejected) as caught:
        await client.call(HttpRequest(f"/status/{status}", {}), timeout=10)
    assert str(status) in str(caught.value) and len(str(caught.value)) < 600


@pytest.mark.parametrize("status", [401, 403, 404, 405, 408, 429, 500, 502, 503])
async def test_everything_else_is_the_engines_fault(client: EngineHttp, status: int) -> None:
    with pytest.raises(EngineCallFailed) as caught:
        await client.call(HttpRequest(f"/status/{status}", {}), timeout=10)
    assert caught.value.status == status and len(str(caught.value)) < 600


async def test_a_missing_route_is_named_as_a_mismatch(client: EngineHttp) -> None:
    with pytest.raises(EngineUnavailable, match="wrong engine version or flags"):
        await client.call(HttpRequest("/status/404"), timeout=10)


async def test_a_missed_deadline_names_call_and_seconds(client: EngineHttp) -> None:
    with pytest.raises(EngineUnavailable, match=r"POST /slow of test .* within 0\.2 s"):
        await client.call(HttpRequest("/slow", {}), timeout=0.2)


async def test_bodies_are_read_tolerantly(client: EngineHttp) -> None:
    assert await client.call(HttpRequest("/empty"), timeout=10) == {}
    assert (await client.call(HttpRequest("/x", {}), timeout=10))["ok"] is True
    with pytest.raises(EngineUnavailable, match="not JSON"):
        await client.call(HttpRequest("/not-json"), timeout=10)


async def test_connections_are_reused(client: EngineHttp) -> None:
    for _ in range(5):
        answer = await client.call(HttpRequest("/connections", {}), timeout=10)
    assert answer == {"count": 1}


async def test_a_closed_port_and_a_closed_client_are_unavailable() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        http = EngineHttp(f"http://127.0.0.1:{probe.getsockname()[1]}", "test")
        with pytest.raises(EngineUnavailable):
            await http.call(HttpRequest("/x"), timeout=5)
    await http.close()
    with pytest.raises(EngineUnavailable, match="closed"):
        await http.call(HttpRequest("/x"), timeout=5)


def test_error_texts_are_found_in_all_known_shapes() -> None:
    shapes = [{"error": {"message": "m"}}, {"error": "m"}, {"object": "error", "message": "m"}, {"detail": "m"}]
    assert [error_text(json.dumps(shape).encode()) for shape in shapes] == ["m"] * 4
    assert error_text(b"plain\n text") == "plain text"
    assert len(error_text(b"y" * 10**6)) == 400
    assert isinstance(classify(400, b"", "call"), RequestRejected)
