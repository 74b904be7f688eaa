"""Pausing, aborting, batching and failing, on a sim model that is stepped by hand."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from rollmq.errors import EngineError, EngineUnavailable, RequestRejected
from workers.embedded.errors import Conflict
from workers.embedded.interface import Emission
from workers.embedded.request import GenerateRequest, ModelLimits
from workers.embedded.scheduler import PauseMode, Scheduler
from workers.embedded.sequence import GenerationResult, SequenceState, VersionSpan

DEADLINE = 60.0
Request = Callable[..., GenerateRequest]
Stepped = Callable[..., Any]


class CountingModel:
    """Gives each sequence its length as the next token; a decode step per token, none in prefill."""

    def __init__(self) -> None:
        self.name = "counting"
        self.limits = ModelLimits(vocab_size=1000, max_model_len=1000)
        self.inside: dict[SequenceState, None] = {}
        self.broken: Exception | None = None
        self.bad_weights: Exception | None = None
        self.log: list[str] = []

    def prefill(self, sequences: Sequence[SequenceState]) -> Iterable[Emission]:
        self.log.extend(f"prefill {sequence.request.rid}:{sequence.length}" for sequence in sequences)
        self.inside.update(dict.fromkeys(sequences))
        return []

    def decode(self) -> Iterable[Emission]:
        if self.broken is not None:
            raise self.broken
        return [Emission(sequence, [sequence.length], [-1.0]) for sequence in self.inside]

    def remove(self, sequences: Collection[SequenceState]) -> Iterable[Emission]:
        for sequence in sequences:
            del self.inside[sequence]
        return []

    def next_step_at(self) -> float | None:
        return 0.0

    def load_weights(self, path: str) -> None:
        if self.bad_weights is not None:
            raise self.bad_weights
        self.log.append(f"load {path}")

    def set_weight_version(self, version: str) -> None:
        self.log.append(f"version {version}")


@pytest.fixture
def model() -> CountingModel:
    return CountingModel()


def lengths(answers: Iterable[Future[GenerationResult]]) -> list[int]:
    return [len(answer.result(DEADLINE).output_ids) for answer in answers]


def test_batch_is_limited_and_refilled_in_order(model: CountingModel, make_request: Request, stepped: Stepped) -> None:
    scheduler = stepped(model, max_batch=2)
    answers = [scheduler.submit(make_request([1], 3, rid=name)) for name in "abc"]
    scheduler.sync()
    assert (scheduler.status().running, scheduler.status().waiting) == (2, 1)
    scheduler.advance(3)
    scheduler.sync()
    assert [answer.done() for answer in answers] == [True, True, False]
    scheduler.advance(3)
    assert answers[2].result(DEADLINE).output_ids == [1, 2, 3]
    assert scheduler.status().generated_tokens == 9


def test_pause_keep_freezes_and_resume_goes_on(model: CountingModel, make_request: Request, stepped: Stepped) -> None:
    scheduler = stepped(model)
    answer = scheduler.submit(make_request([1], 4, rid="a"))
    scheduler.advance(2)
    scheduler.pause(PauseMode.KEEP).result(DEADLINE)
    scheduler.advance(5)
    assert not answer.done()
    assert not model.inside
    late = scheduler.submit(make_request([1], 1, rid="late"))
    scheduler.update_weights("w", "0.1").result(DEADLINE)
    scheduler.resume().result(DEADLINE)
    scheduler.advance(2)
    assert answer.result(DEADLINE).spans == [VersionSpan("0.0", 0, 2), VersionSpan("0.1", 2, 4)]
    assert late.result(DEADLINE).spans == [VersionSpan("0.1", 0, 1)]
    assert model.log == ["version 0.0", "prefill a:1", "load w", "version 0.1", "prefill a:3", "prefill late:1"]


def test_frozen_requests_keep_their_place_in_the_queue(
    model: CountingModel, make_request: Request, stepped: Stepped
) -> None:
    scheduler = stepped(model, max_batch=2)
    for name in "abc":
        scheduler.submit(make_request([1], 9, rid=name))
    scheduler.advance(1)
    scheduler.pause(PauseMode.KEEP).result(DEADLINE)
    model.log.clear()
    scheduler.resume().result(DEADLINE)
    scheduler.sync()
    assert model.log == ["prefill a:2", "prefill b:2"]


def test_pause_abort_answers_with_partials_and_holds_what_comes_later(
    model: CountingModel, make_request: Request, stepped: Stepped
) -> None:
    scheduler = stepped(model, max_batch=1)
    running, waiting = (scheduler.submit(make_request([1], 4)) for _ in range(2))
    scheduler.advance(2)
    scheduler.pause(PauseMode.ABORT).result(DEADLINE)
    assert running.result(DEADLINE).finish_reason == "abort"
    assert lengths([running, waiting]) == [2, 0]
    assert waiting.result().spans == []
    late = scheduler.submit(make_request([1], 1))
    scheduler.advance(3)
    assert not late.done()
    scheduler.resume().result(DEADLINE)
    scheduler.advance(1)
    assert late.result(DEADLINE).finish_reason == "length"


def test_pause_wait_finishes_what_is_in_flight_and_holds_what_comes_later(
    model: CountingModel, make_request: Request, stepped: Stepped
) -> None:
    scheduler = stepped(model, max_batch=1)
    in_flight = [scheduler.submit(make_request([1], 2)) for _ in range(2)]
    scheduler.advance(1)
    paused = scheduler.pause(PauseMode.WAIT)
    late = scheduler.submit(make_request([1], 1))
    scheduler.advance(2)
    assert not paused.done()
    assert not scheduler.status().paused
    scheduler.advance(2)
    paused.result(DEADLINE)
    assert lengths(in_flight) == [2, 2]
    assert scheduler.status().paused
    scheduler.advance(3)
    assert not late.done()
    scheduler.resume().result(DEADLINE)
    scheduler.advance(1)
    assert lengths([late]) == [1]


def test_pause_wait_on_an_idle_engine_settles_at_once(model: CountingModel, stepped: Stepped) -> None:
    stepped(model).pause(PauseMode.WAIT).result(DEADLINE)


def test_harder_pause_settles_a_waiting_one(model: CountingModel, make_request: Request, stepped: Stepped) -> None:
    scheduler = stepped(model)
    answer = scheduler.submit(make_request([1], 9))
    scheduler.advance(1)
    soft = scheduler.pause(PauseMode.WAIT)
    scheduler.pause(PauseMode.ABORT).result(DEADLINE)
    soft.result(DEADLINE)
    assert lengths([answer]) == [1]


def test_pause_wait_after_keep_finishes_the_frozen(
    model: CountingModel, make_request: Request, stepped: Stepped
) -> None:
    scheduler = stepped(model)
    answer = scheduler.submit(make_request([1], 3))
    scheduler.advance(1)
    scheduler.pause(PauseMode.KEEP).result(DEADLINE)
    paused = scheduler.pause(PauseMode.WAIT)
    scheduler.advance(2)
    paused.result(DEADLINE)
    assert lengths([answer]) == [3]


def test_resume_calls_off_a_pause_that_has_not_settled(
    model: CountingModel, make_request: Request, stepped: Stepped
) -> None:
    scheduler = stepped(model)
    answer = scheduler.submit(make_request([1], 3))
    scheduler.advance(1)
    paused = scheduler.pause(PauseMode.WAIT)
    scheduler.resume().result(DEADLINE)
    with pytest.raises(Conflict, match="called off"):
        paused.result(DEADLINE)
    scheduler.advance(2)
    assert lengths([answer]) == [3]


def test_resume_is_idempotent(model: CountingModel, stepped: Stepped) -> None:
    scheduler = stepped(model)
    for _ in range(2):
        scheduler.resume().result(DEADLINE)
    assert not scheduler.status().paused


def test_update_needs_a_settled_pause(model: CountingModel, make_request: Request, stepped: Stepped) -> None:
    scheduler = stepped(model)
    with pytest.raises(Conflict, match="only be updated while paused"):
        scheduler.update_weights("w", "0.1").result(DEADLINE)
    scheduler.submit(make_request([1], 3))
    scheduler.advance(1)
    scheduler.pause(PauseMode.WAIT)
    with pytest.raises(Conflict, match="draining"):
        scheduler.update_weights("w", "0.1").result(DEADLINE)


def test_relabel_takes_effect_at_the_next_token(model: CountingModel, make_request: Request, stepped: Stepped) -> None:
    scheduler = stepped(model)
    answer = scheduler.submit(make_request([1], 3))
    scheduler.advance(1)
    assert scheduler.set_weight_version("2.5").result(DEADLINE) == "2.5"
    scheduler.advance(2)
    assert answer.result(DEADLINE).spans == [VersionSpan("0.0", 0, 1), VersionSpan("2.5", 1, 3)]
    assert model.log[-2:] == ["version 2.5", f"prefill {answer.result().rid}:2"]


def test_abort_by_rid_answers_running_waiting_and_held(
    model: CountingModel, make_request: Request, stepped: Stepped
) -> None:
    scheduler = stepped(model, max_batch=1)
    running = scheduler.submit(make_request([1], 9, rid="running"))
    waiting = scheduler.submit(make_request([1], 9, rid="waiting"))
    scheduler.advance(2)
    assert scheduler.abort(["running", "unknown", "running"]).result(DEADLINE) == 1
    assert lengths([running]) == [2]
    scheduler.pause(PauseMode.KEEP).result(DEADLINE)
    held = scheduler.submit(make_request([1], 9, rid="held"))
    assert scheduler.abort(["waiting", "held"]).result(DEADLINE) == 2
    assert [answer.result(DEADLINE).finish_reason for answer in (waiting, held)] == ["abort", "abort"]
    assert scheduler.abort(["running", "waiting", "held"]).result(DEADLINE) == 0


def test_abort_all_counts(model: CountingModel, make_request: Request, stepped: Stepped) -> None:
    scheduler = stepped(model, max_batch=2)
    answers = [scheduler.submit(make_request([1], 9)) for _ in range(5)]
    scheduler.advance(1)
    assert scheduler.abort_all().result(DEADLINE) == 5
    assert lengths(answers) == [1, 1, 0, 0, 0]
    assert (scheduler.status().running, scheduler.status().waiting) == (0, 0)


def test_rid_in_flight_is_refused_and_free_again_afterwards(
    model: CountingModel, make_request: Request, stepped: Stepped
) -> None:
    scheduler = stepped(model)
    scheduler.submit(make_request([1], 9, rid="same"))
    with pytest.raises(RequestRejected, match="rid 'same' is in flight"):
        scheduler.submit(make_request([1], 9, rid="same"))
    scheduler.abandon("same")
    answer = scheduler.submit(make_request([1], 1, rid="same"))
    scheduler.advance(1)
    assert lengths([answer]) == [1]


def test_broken_model_fails_every_future_and_the_engine_says_so(
    model: CountingModel, make_request: Request, stepped: Stepped
) -> None:
    scheduler = stepped(model)
    answer = scheduler.submit(make_request([1], 9))
    scheduler.sync()
    held = scheduler.pause(PauseMode.WAIT)
    model.broken = RuntimeError("out of memory")
    with contextlib.suppress(EngineError):
        scheduler.advance(1)
    for future in (answer, held):
        with pytest.raises(EngineError, match="RuntimeError: out of memory"):
            future.result(DEADLINE)
    assert "out of memory" in scheduler.status().failure
    with pytest.raises(EngineUnavailable, match="out of memory"):
        scheduler.submit(make_request([1], 9))


def test_unexpected_error_in_a_command_reaches_its_caller(model: CountingModel, stepped: Stepped) -> None:
    scheduler = stepped(model)
    scheduler.pause(PauseMode.KEEP).result(DEADLINE)
    model.bad_weights = RuntimeError("half written")
    with pytest.raises(EngineError, match="half written"):
        scheduler.update_weights("w", "0.1").result(DEADLINE)
    assert scheduler.status().weight_version == "0.0"
    assert "half written" in scheduler.status().failure


def test_close_answers_what_is_in_flight_and_refuses_more(
    model: CountingModel, make_request: Request, stepped: Stepped
) -> None:
    scheduler: Scheduler = stepped(model)
    answer = scheduler.submit(make_request([1], 900))
    pause = scheduler.pause(PauseMode.WAIT)
    scheduler.abort([]).result(DEADLINE)
    assert scheduler.close(DEADLINE)
    assert answer.result(DEADLINE).finish_reason == "abort"
    with pytest.raises(EngineUnavailable, match="shutting down"):
        pause.result(DEADLINE)
    with pytest.raises(EngineUnavailable, match="shutting down"):
        scheduler.submit(make_request([1], 1))
