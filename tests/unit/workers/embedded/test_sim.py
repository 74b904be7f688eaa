"""The sim model: deterministic, paced, resumable, and faulty on demand."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from rollmq.errors import EngineError
from workers.embedded.request import GenerateRequest
from workers.embedded.scheduler import PauseMode, Scheduler
from workers.embedded.sequence import GenerationResult, VersionSpan
from workers.embedded.sim import SimModel, version_number
from workers.embedded.sim_options import SimOptions

DEADLINE = 60.0
Request = Callable[..., GenerateRequest]
FreeRunning = Callable[..., Scheduler]


def sim(**options: Any) -> SimModel:
    return SimModel(SimOptions(**{"tpot_ms": 0.0, **options}))


@pytest.fixture
def answer_of(free_running: FreeRunning, make_request: Request) -> Callable[..., GenerationResult]:
    """Runs one request on a fresh engine."""

    def ask(model: SimModel, *args: Any, **params: Any) -> GenerationResult:
        return free_running(model).submit(make_request(*args, **params)).result(DEADLINE)

    return ask


Ask = Callable[..., GenerationResult]


def test_greedy_answers_are_a_function_of_seed_and_prompt(answer_of: Ask) -> None:
    first = answer_of(sim(), [1, 2, 3], 64, greedy=True)
    assert answer_of(sim(), [1, 2, 3], 64, greedy=True).output_ids == first.output_ids
    assert answer_of(sim(seed=1), [1, 2, 3], 64, greedy=True).output_ids != first.output_ids
    assert answer_of(sim(), [1, 2, 4], 64, greedy=True).output_ids != first.output_ids
    assert len(set(first.output_ids)) > 10
    assert all(0 <= token < 320 for token in first.output_ids)
    assert all(math.isfinite(logprob) and logprob < 0 for logprob in first.output_logprobs)


def test_sampled_answers_follow_the_request_seed(answer_of: Ask) -> None:
    def ask(seed: int | None) -> list[int]:
        return answer_of(sim(), [1, 2, 3], 64, seed=seed).output_ids

    assert ask(5) == ask(5)
    assert ask(5) != ask(6)


def test_sampled_answers_without_a_seed_differ(free_running: FreeRunning, make_request: Request) -> None:
    scheduler = free_running(sim())
    first, second = (scheduler.submit(make_request([1], 32)).result(DEADLINE) for _ in range(2))
    assert first.output_ids != second.output_ids


@pytest.mark.parametrize(
    ("tokens", "params", "length", "reason"),
    [
        (8, {}, 8, "stop"),
        (16, {}, 16, "stop"),
        (17, {}, 16, "length"),
        (8, {"ignore_eos": True}, 16, "length"),
        (8, {"min_new_tokens": 12}, 12, "stop"),
    ],
)
def test_answer_length(answer_of: Ask, tokens: int, params: dict[str, Any], length: int, reason: str) -> None:
    result = answer_of(sim(tokens=tokens), [1], 16, **params)
    assert (len(result.output_ids), result.finish_reason, result.stop_reason) == (length, reason, None)


def test_stop_ids_stop_and_are_avoided_below_min_new_tokens(answer_of: Ask) -> None:
    free = answer_of(sim(), [1], 32, greedy=True).output_ids
    stop = free[5]
    stopped = answer_of(sim(), [1], 32, greedy=True, stop_token_ids=[stop])
    assert stopped.output_ids == free[: free.index(stop) + 1]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
    late = answer_of(sim(), [1], 32, greedy=True, stop_token_ids=[stop], min_new_tokens=30)
    assert stop not in late.output_ids[:30]


def test_version_number_of_the_label_changes_the_tokens(
    answer_of: Ask, free_running: FreeRunning, make_request: Request
) -> None:
    old = answer_of(sim(), [1], 16, greedy=True).output_ids
    scheduler = free_running(sim())

    def ask_after(label: str) -> GenerationResult:
        scheduler.pause(PauseMode.KEEP).result(DEADLINE)
        scheduler.update_weights("/no/such/path", label).result(DEADLINE)
        scheduler.resume().result(DEADLINE)
        return scheduler.submit(make_request([1], 16, greedy=True)).result(DEADLINE)

    new = ask_after("0.3")
    assert new.output_ids != old
    assert new.spans == [VersionSpan("0.3", 0, 16)]
    assert ask_after("7.3").output_ids == new.output_ids
    assert ask_after("7.0").output_ids == old


def test_labels_have_numbers() -> None:
    assert version_number("1.17") == 17
    assert version_number("4") == 4
    assert version_number("default") == version_number("default") > 1 << 31


@pytest.mark.parametrize("params", [{"greedy": True}, {"seed": 11}])
def test_resumed_request_equals_an_uninterrupted_one(
    answer_of: Ask, free_running: FreeRunning, make_request: Request, params: dict[str, Any]
) -> None:
    whole = answer_of(sim(tokens=40), [9, 9], 100, **params)
    scheduler = free_running(sim(tokens=40, tpot_ms=2.0))
    output: list[int] = []
    while True:
        answer = scheduler.submit(make_request([9, 9, *output], 100 - len(output), **params))
        wait_for_tokens(scheduler, 5)
        scheduler.pause(PauseMode.ABORT).result(DEADLINE)
        scheduler.resume().result(DEADLINE)
        part = answer.result(DEADLINE)
        output += part.output_ids
        if part.finish_reason != "abort":
            break
    assert output == whole.output_ids
    assert part.finish_reason == whole.finish_reason == "stop"


def wait_for_tokens(scheduler: Scheduler, count: int) -> None:
    """Return when this many more tokens are counted, or nothing runs any more."""
    target = scheduler.status().generated_tokens + count
    deadline = time.monotonic() + DEADLINE
    scheduler.abort([]).result(DEADLINE)
    while scheduler.status().generated_tokens < target and scheduler.status().running:
        assert time.monotonic() < deadline
        scheduler.abort([]).result(DEADLINE)


def test_kept_request_gets_the_new_versions_tokens_after_the_boundary(
    answer_of: Ask, free_running: FreeRunning, make_request: Request
) -> None:
    scheduler = free_running(sim(tokens=200, tpot_ms=1.0))
    answer = scheduler.submit(make_request([3], 200, greedy=True))
    wait_for_tokens(scheduler, 20)
    scheduler.pause(PauseMode.KEEP).result(DEADLINE)
    scheduler.update_weights("w", "0.1").result(DEADLINE)
    scheduler.resume().result(DEADLINE)
    result = answer.result(DEADLINE)
    assert len(result.output_ids) == 200
    assert result.finish_reason == "stop"
    old, new = result.spans
    assert old.end == new.start
    assert (old.start, new.end) == (0, 200)
    prefix = result.output_ids[: old.end]
    assert prefix == answer_of(sim(tokens=200), [3], 200, greedy=True).output_ids[: old.end]
    fresh = sim(tokens=200)
    scheduler = free_running(fresh)
    scheduler.set_weight_version("0.1").result(DEADLINE)
    rest = scheduler.submit(make_request([3, *prefix], 200 - old.end, greedy=True)).result(DEADLINE)
    assert result.output_ids[old.end :] == rest.output_ids


def test_pace_is_kept_and_all_advance_together(free_running: FreeRunning, make_request: Request) -> None:
    scheduler = free_running(sim(tokens=50, tpot_ms=4.0), max_batch=200)
    started = time.monotonic()
    answers = [scheduler.submit(make_request([1], 50)) for _ in range(200)]
    for answer in answers:
        assert len(answer.result(DEADLINE).output_ids) == 50
    # One after the other would take 40 s.
    assert 0.2 <= time.monotonic() - started < 10.0


def test_progress_is_reported_before_the_end(free_running: FreeRunning, make_request: Request) -> None:
    scheduler = free_running(sim(tokens=100_000, tpot_ms=5.0))
    answer = scheduler.submit(make_request([1], 100_000))
    deadline = time.monotonic() + DEADLINE
    while scheduler.status().generated_tokens < 10:
        assert time.monotonic() < deadline
        scheduler.abort([]).result(DEADLINE)
    assert not answer.done()


def test_fail_depends_on_seed_and_rid_only(free_running: FreeRunning, make_request: Request) -> None:
    def failures(seed: int) -> set[str]:
        scheduler = free_running(sim(seed=seed, fail=0.3))
        rids = [f"task-{number}" for number in range(200)]
        answers = {rid: scheduler.submit(make_request([1], 4, rid=rid)) for rid in rids}
        return {rid for rid, answer in answers.items() if isinstance(answer.exception(DEADLINE), EngineError)}

    first = failures(0)
    assert 30 < len(first) < 90
    assert failures(0) == first
    assert failures(1) != first


def test_hang_ends_only_by_abort(free_running: FreeRunning, make_request: Request) -> None:
    scheduler = free_running(sim(hang=1.0, tpot_ms=1.0))
    answer: Future[GenerationResult] = scheduler.submit(make_request([1], 4, rid="stuck"))
    with pytest.raises(TimeoutError):
        answer.result(0.2)
    assert scheduler.status().running == 1
    scheduler.pause(PauseMode.KEEP).result(DEADLINE)
    scheduler.resume().result(DEADLINE)
    assert scheduler.abort(["stuck"]).result(DEADLINE) == 1
    assert answer.result(DEADLINE).finish_reason == "abort"
    assert answer.result().output_ids == []
