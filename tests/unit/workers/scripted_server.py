"""A server that speaks the embedded engine's HTTP contract and does what a test told it to, for faults and edges.

POST /script {"generate": [step, ...], "fail": {path: status}, "drop": [path, ...], "label": forced label or null} sets
what happens next (a path in "drop" loses its connection once);
GET /script answers with all requests seen. A generate step is one of {"tokens": n, "finish": reason},
{"status": s}, {"hang": true}, {"drop": true} and {"raw": body}; when none is left, requests run to their length.
A token's id is its position in prompt + output, modulo the vocabulary.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from typing import Any

from aiohttp import web

VOCABULARY = 100


class Scripted:
    """All state of the server."""

    def __init__(self, served_name: str, label: str) -> None:
        self.served_name = served_name
        self.label = label
        self.forced_label: str | None = None
        self.steps: list[dict[str, Any]] = []
        self.fail: dict[str, int] = {}
        self.drop: list[str] = []
        self.seen: list[dict[str, Any]] = []
        self.paused = False
        self.hanging: dict[str, asyncio.Event] = {}

    async def script(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.steps = body.get("generate", [])
        self.fail = body.get("fail", {})
        self.drop = body.get("drop", [])
        self.forced_label = body.get("label")
        return web.json_response({})

    async def log(self, request: web.Request) -> web.Response:
        return web.json_response({"seen": self.seen, "hanging": sorted(self.hanging), "paused": self.paused})

    async def info(self, request: web.Request) -> web.Response:
        label = self.label if self.forced_label is None else self.forced_label
        facts = {"weight_version": label, "vocab_size": VOCABULARY, "max_model_len": 512, "eos_token_ids": [0]}
        return web.json_response({"engine": "embedded", "served_name": self.served_name, **facts})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        step = self.steps.pop(0) if self.steps else {}
        if step.get("drop"):
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        if "status" in step:
            return web.json_response({"error": {"message": "x" * 50_000, "type": "scripted"}}, status=step["status"])
        if "raw" in step:
            return web.Response(text=step["raw"], content_type="application/json")
        if step.get("hang"):
            return await self._hang(body)
        budget = body["sampling_params"]["max_new_tokens"]
        return web.json_response(self._answer(body, step.get("tokens", budget), step.get("finish", "length")))

    async def _hang(self, body: dict[str, Any]) -> web.Response:
        ended = self.hanging[body["rid"]] = asyncio.Event()
        try:
            await ended.wait()
        finally:
            del self.hanging[body["rid"]]
        return web.json_response(self._answer(body, 1, "abort"))

    def _answer(self, body: dict[str, Any], count: int, finish: str) -> dict[str, Any]:
        first = len(body["input_ids"])
        ids = [position % VOCABULARY for position in range(first, first + count)]
        spans = [{"version": self.label, "start": 0, "end": count}] if count else []
        return {
            "rid": body["rid"], "output_ids": ids, "output_logprobs": [-0.5] * count, "finish_reason": finish,
            "stop_reason": None, "weight_versions": spans, "prompt_tokens": first, "cached_tokens": 0,
        }  # fmt: skip

    async def abort(self, request: web.Request) -> web.Response:
        body = await request.json()
        hit = [rid for rid in list(self.hanging) if rid in body["rids"]]
        for rid in hit:
            self.hanging[rid].set()
        return web.json_response({"aborted": len(hit)})

    async def pause(self, request: web.Request) -> web.Response:
        self.paused = True
        if (await request.json())["mode"] == "abort":
            for ended in list(self.hanging.values()):
                ended.set()
        return web.json_response({"status": "paused"})

    async def resume(self, request: web.Request) -> web.Response:
        self.paused = False
        return web.json_response({"status": "resumed"})

    async def update(self, request: web.Request) -> web.Response:
        self.label = (await request.json())["weight_version"]
        return web.json_response({"success": True, "weight_version": self.label, "load_s": 0.0})

    @web.middleware
    async def record(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.path not in ("/script", "/health", "/info"):
            body = await request.json() if request.can_read_body else {}
            self.seen.append({"path": request.path, "body": body})
        if request.path in self.drop:
            self.drop.remove(request.path)
            assert request.transport is not None
            request.transport.close()
        if request.path in self.fail:
            return web.json_response({"error": {"message": "scripted failure"}}, status=self.fail[request.path])
        response: web.StreamResponse = await handler(request)
        return response


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--served-name", required=True)
    parser.add_argument("--weight-version", default="0.0")
    arguments, _ = parser.parse_known_args()
    scripted = Scripted(arguments.served_name, arguments.weight_version)
    app = web.Application(middlewares=[scripted.record], client_max_size=64 << 20)
    app.add_routes(
        [
            web.post("/script", scripted.script),
            web.get("/script", scripted.log),
            web.get("/health", lambda request: _ok()),
            web.get("/info", scripted.info),
            web.post("/generate", scripted.generate),
            web.post("/abort", scripted.abort),
            web.post("/pause", scripted.pause),
            web.post("/resume", scripted.resume),
            web.post("/update_weights", scripted.update),
            web.post("/set_weight_version", scripted.update),
        ]
    )
    with contextlib.suppress(KeyboardInterrupt):
        web.run_app(app, host="127.0.0.1", port=arguments.port, print=None, handler_cancellation=True)


async def _ok() -> web.Response:
    return web.json_response({"status": "ok"})


if __name__ == "__main__":
    main()
