"""RemoteInfEngine over a scripted server in its own process: interruptions, updates, faults."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from pathlib import Path

import pytest

from rollmq.errors import (
    EngineUnavailable,
    EngineVersionUnknown,
    GenerationInterrupted,
    RequestRejected,
    WeightUpdateError,
)
from rollmq.rollout import GenerationHyperparameters, ModelRequest


def request(max_new_tokens: int = 10, prompt: int = 1, **sampling: object) -> ModelRequest:
    gconfig = GenerationHyperparameters(max_new_tokens=max_new_tokens, **sampling)  # type: ignore[arg-type]
    return ModelRequest(input_ids=list(range(1, prompt + 1)), gconfig=gconfig)


async def test_generate_returns_tokens_logprobs_and_spans(scripted) -> None:
    result = await scripted.engine.generate(request(5))
    assert result.response.output_ids == [1, 2, 3, 4, 5]
    assert result.response.output_logprobs == [-0.5] * 5
    assert result.response.version_spans == [(0, 0, 5)]
    assert result.labels == {"0.0"}
    assert result.response.stop_reason == "length"
    assert scripted.engine.running == 0


async def test_an_interrupted_request_resumes_with_its_tokens_and_the_budget_left(scripted) -> None:
    await scripted.script(generate=[{"tokens": 4, "finish": "abort"}, {"tokens": 4, "finish": "abort"}])
    result = await scripted.engine.generate(request(10, min_new_tokens=6))
    asked = await scripted.requests()
    assert [len(body["input_ids"]) for body in asked] == [1, 5, 9]
    assert [body["sampling_params"]["max_new_tokens"] for body in asked] == [10, 6, 2]
    assert [body["sampling_params"]["min_new_tokens"] for body in asked] == [6, 2, 0]
    assert result.response.output_ids == list(range(1, 11))
    assert result.response.version_spans == [(0, 0, 10)]
    assert result.response.interruptions == 2
    assert len({body["rid"] for body in asked}) == 3


async def test_an_abort_exactly_at_the_budget_ends_as_length(scripted) -> None:
    await scripted.script(generate=[{"tokens": 10, "finish": "abort"}])
    result = await scripted.engine.generate(request(10))
    assert result.response.stop_reason == "length"
    assert len(await scripted.requests()) == 1


async def test_tokens_keep_the_label_that_the_engine_reported_for_them(scripted, tmp_path: Path) -> None:
    await scripted.script(generate=[{"hang": True}])
    running = asyncio.create_task(scripted.engine.generate(request(10)))
    await scripted.until_hanging()
    report = await scripted.engine.update_weights(str(tmp_path), "2.7", "abort")
    result = await running
    assert report.label == "2.7" and report.stall_s >= report.load_s >= 0
    assert result.label_spans == (("0.0", 0, 1), ("2.7", 1, 10))
    assert result.response.version_spans == [(0, 0, 1), (7, 1, 10)]
    assert scripted.engine.label == await scripted.engine.current_version() == "2.7"


async def test_empty_aborts_are_backed_off_and_bounded(scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.generation.BACKOFF_S", (0.001, 0.01))
    await scripted.script(generate=[{"tokens": 0, "finish": "abort"}] * 1000)
    with pytest.raises(EngineUnavailable, match="without a new token"):
        await scripted.engine.generate(request())
    assert len(await scripted.requests()) == 21


async def test_a_rejected_request_is_sent_once_and_its_error_text_is_bounded(scripted) -> None:
    await scripted.script(generate=[{"status": 400}])
    with pytest.raises(RequestRejected) as caught:
        await scripted.engine.generate(request(10, prompt=90))
    assert len(await scripted.requests()) == 1
    assert len(str(caught.value)) < 700


async def test_a_server_error_is_the_engines_fault(scripted) -> None:
    await scripted.script(generate=[{"status": 500}])
    with pytest.raises(EngineUnavailable) as caught:
        await scripted.engine.generate(request())
    assert len(str(caught.value)) < 700


async def test_a_connection_dropped_without_an_answer_is_tried_once_more(scripted) -> None:
    await scripted.script(generate=[{"drop": True}])
    assert len((await scripted.engine.generate(request())).response.output_ids) == 10
    await scripted.script(generate=[{"drop": True}, {"drop": True}])
    with pytest.raises(EngineUnavailable):
        await scripted.engine.generate(request())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"output_logprobs": [float("nan")]}, "logprob is nan"),
        ({"output_logprobs": [-1.0, -1.0]}, "1 token ids but 2 logprobs"),
        ({"weight_versions": []}, "spans cover 0 of 1"),
        ({"output_ids": [1] * 11, "output_logprobs": [-1.0] * 11,
          "weight_versions": [{"version": "0.0", "start": 0, "end": 11}]}, "11 tokens; 10 were asked"),
    ],
)  # fmt: skip
async def test_answers_that_make_no_sense_are_dropped(scripted, change: dict, message: str) -> None:
    body = {"output_ids": [1], "output_logprobs": [-1.0], "finish_reason": "length",
            "weight_versions": [{"version": "0.0", "start": 0, "end": 1}]}  # fmt: skip
    await scripted.script(generate=[{"raw": json.dumps({**body, **change})}])
    with pytest.raises(EngineUnavailable, match=message):
        await scripted.engine.generate(request())


async def test_tokens_of_unknown_weights_are_refused(scripted) -> None:
    body = {"output_ids": [1], "output_logprobs": [-1.0], "finish_reason": "length",
            "weight_versions": [{"version": "default", "start": 0, "end": 1}]}  # fmt: skip
    await scripted.script(generate=[{"raw": json.dumps(body)}])
    with pytest.raises(EngineVersionUnknown, match="default"):
        await scripted.engine.generate(request())


async def test_ids_and_lengths_are_checked_before_anything_is_sent(scripted) -> None:
    with pytest.raises(RequestRejected, match=r"input_ids\[1\] is 100, outside the model's vocabulary \[0, 100\)"):
        await scripted.engine.generate(ModelRequest([1, 100]))
    with pytest.raises(RequestRejected, match=r"stop_token_ids"):
        await scripted.engine.generate(request(stop_token_ids=(500,)))
    with pytest.raises(RequestRejected, match=r"503 tokens.*10 = 513.*512"):
        await scripted.engine.generate(ModelRequest([1] * 503, GenerationHyperparameters(max_new_tokens=10)))
    with pytest.raises(RequestRejected, match="stop strings"):
        await scripted.engine.generate(request(stop=("x",)))
    with pytest.raises(RequestRejected, match="n_samples"):
        await scripted.engine.generate(request(n_samples=2))
    assert await scripted.requests() == []


async def test_cancel_reaches_the_server_and_ends_generate(scripted) -> None:
    await scripted.script(generate=[{"hang": True}])
    running = asyncio.create_task(scripted.engine.generate(request(), rid="mine"))
    await scripted.until_hanging()
    with pytest.raises(RequestRejected, match="already in use"):
        await scripted.engine.generate(request(), rid="mine")
    assert await scripted.engine.cancel("mine")
    with pytest.raises(GenerationInterrupted):
        await running
    await scripted.until_hanging(0)
    assert not await scripted.engine.cancel("mine")


async def test_a_cancelled_task_leaves_nothing_running_in_the_server(scripted) -> None:
    await scripted.script(generate=[{"hang": True}])
    running = asyncio.create_task(scripted.engine.generate(request()))
    await scripted.until_hanging()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await scripted.until_hanging(0)
    assert scripted.engine.running == 0


async def test_requests_wait_while_weights_change(scripted, tmp_path: Path) -> None:
    await scripted.script(generate=[{"hang": True}])
    first = asyncio.create_task(scripted.engine.generate(request(), rid="first"))
    await scripted.until_hanging()
    update = asyncio.create_task(scripted.engine.update_weights(str(tmp_path), "0.1", "keep"))
    second = asyncio.create_task(scripted.engine.generate(request()))
    await update
    assert (await second).labels == {"0.1"}
    log = [entry["path"] for entry in (await scripted.log())["seen"]]
    assert log[-1] == "/generate" and log.index("/resume") < len(log) - 1
    await scripted.engine.cancel("first")
    await asyncio.gather(first, return_exceptions=True)


@pytest.mark.parametrize("route", ["/pause", "/update_weights", "/resume"])
async def test_a_failed_update_fences_until_a_later_one_succeeds(scripted, tmp_path: Path, route: str) -> None:
    await scripted.script(fail={route: 500})
    with pytest.raises(WeightUpdateError, match="scripted failure"):
        await scripted.engine.update_weights(str(tmp_path), "0.1", "keep")
    assert scripted.engine.fenced
    assert "/resume" in [entry["path"] for entry in (await scripted.log())["seen"]]
    with pytest.raises(EngineVersionUnknown, match="fenced"):
        await scripted.engine.generate(request())
    await scripted.script()
    await scripted.engine.update_weights(str(tmp_path), "0.1", "keep")
    assert not scripted.engine.fenced and not (await scripted.log())["paused"]
    assert (await scripted.engine.generate(request())).labels == {"0.1"}


@pytest.mark.parametrize("route", ["/pause", "/update_weights", "/resume"])
async def test_a_control_call_whose_connection_was_dropped_is_made_again(scripted, tmp_path: Path, route: str) -> None:
    await scripted.script(drop=[route])
    await scripted.engine.update_weights(str(tmp_path), "0.1", "keep")
    assert len(await scripted.requests(route)) == 2 and not (await scripted.log())["paused"]


async def test_an_update_that_the_engine_does_not_confirm_is_a_failure(scripted, tmp_path: Path) -> None:
    await scripted.script(label="0.0")
    with pytest.raises(WeightUpdateError, match=r"reports weight version '0.0' instead of '0.1'"):
        await scripted.engine.update_weights(str(tmp_path), "0.1", "keep")
    assert scripted.engine.fenced


async def test_a_label_alone_can_be_changed(scripted) -> None:
    await scripted.engine.update_weights(None, "3.0", "keep")
    assert await scripted.requests("/update_weights") == []
    assert (await scripted.engine.generate(request())).labels == {"3.0"}


async def test_the_death_of_the_server_ends_requests_at_once_with_the_reason(scripted) -> None:
    await scripted.script(generate=[{"hang": True}])
    running = asyncio.create_task(scripted.engine.generate(request()))
    await scripted.until_hanging()
    os.kill(scripted.engine.describe()["pid"], signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(EngineUnavailable):
        await running
    await asyncio.wait_for(scripted.engine.exited.wait(), 10)
    assert time.monotonic() - started < 10
    assert "SIGKILL" in (scripted.engine.exit_description() or "")
    with pytest.raises(EngineUnavailable, match="SIGKILL"):
        await scripted.engine.health()


async def test_close_ends_requests_and_may_be_repeated(scripted) -> None:
    await scripted.script(generate=[{"hang": True}])
    running = asyncio.create_task(scripted.engine.generate(request()))
    await scripted.until_hanging()
    await scripted.engine.close()
    with pytest.raises(GenerationInterrupted):
        await running
    await scripted.engine.close()
