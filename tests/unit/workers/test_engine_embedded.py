"""RemoteInfEngine over the embedded server itself: simulated, and with a real tiny model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from examples.tiny_model import make_tiny_model
from rollmq.errors import RequestRejected, WeightUpdateError
from rollmq.rollout import GenerationHyperparameters, ModelRequest
from workers.backends.base import PauseMode
from workers.backends.embedded import EmbeddedBackend
from workers.engine import RemoteInfEngine
from workers.http_client import EngineHttp, HttpRequest
from workers.launch_spec import LaunchSpec

MakeSpec = Callable[..., LaunchSpec]
SLOW_SIM = "sim:tpot_ms=10,tokens=64,vocab=320,seed=0"


async def until_generating(engine: RemoteInfEngine, tokens: int) -> None:
    """Waits until the server has generated that many tokens since its start."""
    http = EngineHttp(engine.describe()["url"], "embedded")
    try:
        async with asyncio.timeout(30):
            info = HttpRequest("/info", method="GET")
            while (await http.call(info, timeout=10))["generated_tokens"] < tokens:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    finally:
        await http.close()


@pytest.mark.parametrize("mode", ["keep", "abort", "wait"])
async def test_weights_change_during_simulated_requests(make_spec: MakeSpec, tmp_path: Path, mode: PauseMode) -> None:
    make_tiny_model(tmp_path / "weights")
    engine = RemoteInfEngine(EmbeddedBackend(), make_spec(model=SLOW_SIM))
    await engine.start()
    try:
        assert engine.limits.vocab_size == 320
        gconfig = GenerationHyperparameters(max_new_tokens=64, ignore_eos=True)
        tasks = [asyncio.create_task(engine.generate(ModelRequest([i + 1], gconfig))) for i in range(4)]
        await until_generating(engine, 16)
        await engine.update_weights(str(tmp_path / "weights"), "0.1", mode)
        for result in await asyncio.gather(*tasks):
            assert len(result.response.output_ids) == 64
            labels = [label for label, _, _ in result.label_spans]
            assert labels == (["0.0"] if mode == "wait" else ["0.0", "0.1"])
            assert result.response.interruptions == (1 if mode == "abort" else 0)
    finally:
        await engine.close()


async def test_a_real_model_loads_new_weights_and_keeps_old_ones_when_they_are_bad(
    make_spec: MakeSpec, tmp_path: Path
) -> None:
    old, new = (make_tiny_model(tmp_path / name, seed=seed) for seed, name in enumerate(("old", "new")))
    engine = RemoteInfEngine(EmbeddedBackend(), make_spec(model=str(old), threads=1, device="cpu"))
    await engine.start()
    try:
        request = ModelRequest([1, 2, 3], GenerationHyperparameters(max_new_tokens=8, greedy=True, ignore_eos=True))
        before = (await engine.generate(request)).response
        (tmp_path / "empty").mkdir()
        with pytest.raises(WeightUpdateError):
            await engine.update_weights(str(tmp_path / "empty"), "0.1", "keep")
        assert engine.fenced and await engine.current_version() == "0.0"
        await engine.update_weights(str(new), "0.2", "keep")
        after = (await engine.generate(request)).response
        assert after.version_spans == [(2, 0, 8)] and after.output_ids != before.output_ids
        with pytest.raises(RequestRejected, match="vocabulary"):
            await engine.generate(ModelRequest([320]))
    finally:
        await engine.close()
