"""The embedded server as a real process over HTTP: contract, refusals, weights, faults, signals."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

DEADLINE = 60.0
START_DEADLINE = 90.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def spawn(model: str, port: int, log: Path, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "workers.embedded", "--model", model, "--port", str(port), *options]
    with log.open("ab") as stream:
        return subprocess.Popen(command, stderr=stream, stdout=stream, start_new_session=True)


@dataclass
class Running:
    """One server process and a client to it."""

    process: subprocess.Popen[bytes]
    session: aiohttp.ClientSession
    port: int

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(path) as response:
            return response.status, await response.json()

    async def post(self, path: str, body: object) -> tuple[int, Any]:
        async with self.session.post(path, json=body) as response:
            return response.status, await response.json()

    async def ok(self, path: str, body: object) -> Any:
        status, answer = await self.post(path, body)
        assert status == 200, answer
        return answer

    async def refused(self, path: str, body: object, status: int = 400) -> str:
        found, answer = await self.post(path, body)
        assert found == status, answer
        assert set(answer["error"]) == {"message", "type"}
        return str(answer["error"]["message"])

    async def info_when(self, condition: Callable[[Any], bool]) -> Any:
        deadline = time.monotonic() + DEADLINE
        while True:
            _, info = await self.get("/info")
            if condition(info):
                return info
            assert time.monotonic() < deadline, info
            await asyncio.sleep(0.005)

    async def wait_exit(self, seconds: float = DEADLINE) -> int:
        return await asyncio.to_thread(self.process.wait, seconds)


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Whatever is in the list is gone after the test."""
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.kill()
        process.wait(DEADLINE)


@pytest.fixture
async def start(tmp_path: Path, processes: list[subprocess.Popen[bytes]]) -> AsyncIterator[Callable[..., Any]]:
    sessions: list[aiohttp.ClientSession] = []

    async def launch(model: str | Path, *options: str) -> Running:
        port, log = free_port(), tmp_path / f"server-{len(processes)}.log"
        process = spawn(str(model), port, log, *options)
        processes.append(process)
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=DEADLINE)
        sessions.append(aiohttp.ClientSession(f"http://127.0.0.1:{port}", connector=connector, timeout=timeout))
        running = Running(process, sessions[-1], port)
        deadline = time.monotonic() + START_DEADLINE
        while True:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            try:
                if (await running.get("/health"))[0] == 200:
                    return running
            except aiohttp.ClientConnectionError:
                await asyncio.sleep(0.02)

    yield launch
    for session in sessions:
        await session.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    from examples.tiny_model import make_tiny_model

    base = tmp_path_factory.mktemp("models")
    return make_tiny_model(base / "a", seed=0), make_tiny_model(base / "b", seed=1)


Start = Callable[..., Any]


def generate(rid: str = "r", input_ids: object = (1, 2, 3), **params: Any) -> dict[str, Any]:
    return {"rid": rid, "input_ids": input_ids, "sampling_params": {"max_new_tokens": 8, **params}}


async def test_contract_of_info_and_generate(start: Start) -> None:
    server = await start("sim:tokens=4,tpot_ms=0", "--served-name", "mine", "--weight-version", "2.5")
    _, info = await server.get("/info")
    assert info == {
        "engine": "embedded", "version": info["version"], "served_name": "mine", "model": "sim:tokens=4,tpot_ms=0",
        "weight_version": "2.5", "vocab_size": 320, "max_model_len": 131072, "running": 0, "waiting": 0,
        "paused": False, "generated_tokens": 0, "eos_token_ids": [],
    }  # fmt: skip
    answer = await server.ok("/generate", generate("x1", greedy=True))
    assert answer == {
        "rid": "x1", "output_ids": answer["output_ids"], "output_logprobs": answer["output_logprobs"],
        "finish_reason": "stop", "stop_reason": None, "weight_versions": [{"version": "2.5", "start": 0, "end": 4}],
        "prompt_tokens": 3, "cached_tokens": 0,
    }  # fmt: skip
    assert len(answer["output_ids"]) == len(answer["output_logprobs"]) == 4
    assert (await server.get("/info"))[1]["generated_tokens"] == 4


async def test_servers_with_one_seed_and_different_names_draw_different_samples(start: Start) -> None:
    outputs = []
    for name in ("one", "two", "one"):
        server = await start("sim:tpot_ms=0", "--seed", "7", "--served-name", name)
        outputs.append((await server.ok("/generate", generate()))["output_ids"])
    assert outputs[0] == outputs[2] != outputs[1]


async def test_bad_requests_are_400_and_the_server_goes_on(start: Start) -> None:
    server = await start("sim:tpot_ms=0,max_len=50,hang=0")
    assert "token id 320" in await server.refused("/generate", generate(input_ids=[1, 320]))
    assert "max_model_len 50" in await server.refused("/generate", generate(input_ids=[1] * 43))
    assert "unknown key 'n'" in await server.refused("/generate", generate(n=2))
    assert "top_p" in await server.refused("/generate", generate(top_p=2.0))
    assert "JSON object" in await server.refused("/generate", [1])
    assert "'soft'" in await server.refused("/pause", {"mode": "soft"})
    assert "rids" in await server.refused("/abort", {"rids": "r"})
    assert "rids" in await server.refused("/abort", {"all": False})
    assert "path" in await server.refused("/update_weights", {"weight_version": "0.1"})
    assert "weight_version" in await server.refused("/update_weights", {"path": "x"})
    assert "weight_version" in await server.refused("/set_weight_version", {"weight_version": 3})
    assert "paused" in await server.refused("/update_weights", {"path": "x", "weight_version": "0.1"}, status=409)
    assert "/nowhere" in await server.refused("/nowhere", {}, status=404)
    async with server.session.get("/generate") as response:
        assert response.status == 405
    async with server.session.post("/generate", data=b"{not json") as response:
        assert response.status == 400
        assert "not valid JSON" in (await response.json())["error"]["message"]
    assert (await server.ok("/generate", generate()))["finish_reason"] == "length"


async def test_rid_in_flight_is_refused_and_abort_frees_it(start: Start) -> None:
    server = await start("sim:hang=1")
    first = asyncio.create_task(server.ok("/generate", generate("same")))
    await server.info_when(lambda info: info["running"] == 1)
    assert "'same' is in flight" in await server.refused("/generate", generate("same"))
    assert await server.ok("/abort", {"rids": ["same", "other"]}) == {"aborted": 1}
    assert (await first)["finish_reason"] == "abort"
    assert await server.ok("/abort", {"all": True}) == {"aborted": 0}


async def test_disconnect_aborts_the_request(start: Start) -> None:
    server = await start("sim:hang=1")
    tasks = [asyncio.create_task(server.ok("/generate", generate(f"r{number}"))) for number in range(3)]
    await server.info_when(lambda info: info["running"] == 3)
    for task in tasks[:2]:
        task.cancel()
    await server.info_when(lambda info: info["running"] == 1)
    await server.ok("/abort", {"all": True})
    assert (await tasks[2])["rid"] == "r2"


async def test_faults_answer_500_and_spare_the_others(start: Start) -> None:
    server = await start("sim:fail=0.5,tpot_ms=0,seed=3")
    answers = await asyncio.gather(*(server.post("/generate", generate(f"r{number}")) for number in range(40)))
    statuses = [status for status, _ in answers]
    assert set(statuses) == {200, 500}
    assert all(answer["error"]["type"] == "engine_fault" for status, answer in answers if status == 500)
    assert (await server.get("/health"))[0] == 200


async def test_crash_ends_the_process_with_code_13(start: Start) -> None:
    server = await start("sim:crash=1")
    with pytest.raises(aiohttp.ClientConnectionError):
        await server.post("/generate", generate())
    assert await server.wait_exit() == 13


async def test_hundreds_of_requests_advance_together(start: Start) -> None:
    server = await start("sim:tpot_ms=1,tokens=100")
    answers = await asyncio.gather(
        *(server.ok("/generate", generate(f"r{number}", max_new_tokens=100)) for number in range(300))
    )
    assert {len(answer["output_ids"]) for answer in answers} == {100}
    assert len({answer["rid"] for answer in answers}) == 300


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signal_answers_what_is_in_flight_and_exits_zero(start: Start, number: int) -> None:
    server = await start("sim:tpot_ms=20,tokens=100000")
    task = asyncio.create_task(server.ok("/generate", generate(max_new_tokens=100000)))
    await server.info_when(lambda info: info["generated_tokens"] > 0)
    server.process.send_signal(number)
    assert (await task)["finish_reason"] == "abort"
    assert await server.wait_exit(10.0) == 0


async def test_signal_while_paused_exits_zero(start: Start) -> None:
    server = await start("sim:")
    await server.ok("/pause", {"mode": "keep"})
    held = asyncio.create_task(server.ok("/generate", generate()))
    await server.info_when(lambda info: info["waiting"] == 1)
    server.process.terminate()
    assert (await held)["output_ids"] == []
    assert await server.wait_exit(10.0) == 0


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("{tmp}/nowhere", (), "nowhere does not exist"),
        ("{tmp}", (), "has no config.json"),
        ("sim:speed=9", (), "unknown sim option 'speed'"),
        ("sim:tokens=many", (), "sim option tokens='many'"),
        ("sim:", ("--host", "203.0.113.1"), "cannot listen on 203.0.113.1:"),
    ],
)
def test_server_that_cannot_start_says_why_in_one_line(
    tmp_path: Path, processes: list[subprocess.Popen[bytes]], model: str, options: tuple[str, ...], message: str
) -> None:
    log = tmp_path / "log"
    processes.append(spawn(model.format(tmp=tmp_path), free_port(), log, *options))
    assert processes[0].wait(DEADLINE) == 1
    [line] = [line for line in log.read_text().splitlines() if line]
    assert message in line


async def test_port_in_use_is_named_and_the_first_server_lives_on(
    start: Start, tmp_path: Path, processes: list[subprocess.Popen[bytes]]
) -> None:
    server = await start("sim:tpot_ms=0")
    log = tmp_path / "second.log"
    processes.append(spawn("sim:", server.port, log))
    assert await asyncio.to_thread(processes[-1].wait, DEADLINE) == 1
    assert f"cannot listen on 127.0.0.1:{server.port}: Address already in use" in log.read_text()
    await server.ok("/generate", generate())


def test_sim_does_not_import_torch() -> None:
    code = (
        "import sys; from workers.embedded.__main__ import make_model;"
        "from workers.embedded.options import parse_arguments;"
        "make_model(parse_arguments(['--model', 'sim:', '--port', '1']));"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=DEADLINE)


async def test_weights_change_under_requests_in_flight(start: Start, models: tuple[Path, Path]) -> None:
    import torch
    import transformers

    library: Any = transformers
    old, new = (library.AutoModelForCausalLM.from_pretrained(path, dtype="float32").eval() for path in models)
    server = await start(models[0], "--threads", "1", "--device", "cpu")
    info = await server.info_when(lambda info: True)
    assert (info["vocab_size"], info["max_model_len"], info["eos_token_ids"]) == (320, 1024, [258])
    prompts = [list(range(1, 4 + 9 * number)) for number in range(8)]
    tasks = [
        asyncio.create_task(server.ok("/generate", generate(f"r{number}", prompt, max_new_tokens=400, greedy=True,
                                                            ignore_eos=True)))
        for number, prompt in enumerate(prompts)
    ]  # fmt: skip
    await server.info_when(lambda info: info["generated_tokens"] >= 8 * 10)
    await server.ok("/pause", {"mode": "keep"})
    assert (await server.get("/info"))[1]["paused"] is True
    bad = models[1].parent / "bad"
    bad.mkdir()
    (bad / "model.safetensors").write_bytes((models[1] / "model.safetensors").read_bytes()[:-1])
    message = await server.refused("/update_weights", {"path": str(bad), "weight_version": "0.1"})
    assert "truncated" in message
    assert (await server.get("/info"))[1]["weight_version"] == "0.0"
    answer = await server.ok("/update_weights", {"path": str(models[1]), "weight_version": "0.1"})
    assert (answer["success"], answer["weight_version"], answer["load_s"] > 0) == (True, "0.1", True)
    assert await server.ok("/resume", {}) == {"status": "resumed"}
    for prompt, task in zip(prompts, tasks, strict=True):
        result = await task
        first, second = result["weight_versions"]
        boundary = first["end"]
        assert first == {"version": "0.0", "start": 0, "end": boundary}
        assert second == {"version": "0.1", "start": boundary, "end": 400}
        assert 0 < boundary < 400
        with torch.no_grad():
            ids = torch.tensor([[*prompt, *result["output_ids"]]])
            rows = [
                torch.log_softmax(network(input_ids=ids).logits[0, len(prompt) - 1 : -1], -1) for network in (old, new)
            ]
        expected = torch.cat([rows[0][:boundary], rows[1][boundary:]])
        assert result["output_ids"] == expected.argmax(-1).tolist()
        assert torch.allclose(torch.tensor(result["output_logprobs"]), expected.max(-1).values, atol=1e-4, rtol=0)
    server.process.terminate()
    assert await server.wait_exit(20.0) == 0


def test_sigterm_while_loading_exits_zero(
    models: tuple[Path, Path], tmp_path: Path, processes: list[subprocess.Popen[bytes]]
) -> None:
    # A named pipe as the only weight file keeps the server in its loading phase for ever.
    model = tmp_path / "endless"
    model.mkdir()
    (model / "config.json").write_text((models[0] / "config.json").read_text())
    os.mkfifo(model / "part.safetensors")
    processes.append(spawn(str(model), free_port(), tmp_path / "log"))
    # Opening for writing blocks until the server has opened its end for reading.
    with (model / "part.safetensors").open("wb"):
        processes[0].terminate()
        assert processes[0].wait(DEADLINE) == 0
