"""WorkflowExecutor over a fake engine: slots, outcomes by cause, cancellation, deadlines."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from rollmq.bodies import decode_trajectory, encode_task_spec
from rollmq.errors import EngineUnavailable, RequestRejected, RewardError, WorkflowError
from rollmq.messages import Reason, TaskItem
from rollmq.rollout import EpisodeResult, GenerationHyperparameters, ModelRequest, ModelResponse, TaskSpec
from workers.executor import WorkflowExecutor
from workers.generation import EngineResponse
from workers.leases import Failed, Finished, Lease, Outcome
from workers.workflows.base import EpisodeContext
from workers.workflows.registry import WorkflowRegistry

REQUEST = ModelRequest([1, 2, 3], GenerationHyperparameters(max_new_tokens=4), {"from": "test"})


def response(label: str = "1.7", tokens: int = 4) -> EngineResponse:
    version = int(label.split(".")[1])
    ids = list(range(tokens))
    return EngineResponse(
        ModelResponse([1, 2, 3], ids, [-0.5] * tokens, [(version, 0, tokens)], "length"), ((label, 0, tokens),)
    )


class FakeEngine:
    """Answers when told, or at once."""

    def __init__(self) -> None:
        self.label: str | None = "1.7"
        self.answer: Callable[[str], Awaitable[EngineResponse]] | None = None
        self.active: set[str] = set()
        self.most_active = 0
        self.cancelled: list[str] = []
        self.called = asyncio.Event()

    async def generate(self, request: ModelRequest, *, rid: str | None = None) -> EngineResponse:
        assert rid is not None and rid not in self.active
        self.active.add(rid)
        self.most_active = max(self.most_active, len(self.active))
        self.called.set()
        try:
            return await self.answer(rid) if self.answer else response()
        finally:
            self.active.discard(rid)

    async def cancel(self, rid: str) -> bool:
        known = rid in self.active
        if known:
            self.cancelled.append(rid)
        return known


class FakeRewards:
    def __init__(self) -> None:
        self.value: float | Exception = 1.5
        self.calls: list[tuple[str, dict[str, Any]]] = []

    async def call(self, name: str, **arguments: Any) -> float:
        self.calls.append((name, arguments))
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


class Bench:
    """An executor with everything around it faked, and what it reported."""

    def __init__(self, slots: int = 2) -> None:
        self.engine = FakeEngine()
        self.rewards = FakeRewards()
        self.registry = WorkflowRegistry({})
        self.outcomes: dict[int, Outcome] = {}
        self.started: list[tuple[int, str | None]] = []
        self._reported = asyncio.Event()
        self.executor = WorkflowExecutor(
            slots=slots,
            workflows=self.registry,
            rewards=self.rewards,
            worker="w0",
            on_started=lambda lease: self.started.append((lease.task_id, lease.started_label)),
            on_outcome=self._report,
        )

    def _report(self, lease: Lease, outcome: Outcome) -> None:
        assert lease.task_id not in self.outcomes, "reported twice"
        self.outcomes[lease.task_id] = outcome
        self._reported.set()

    def go(self) -> None:
        self.executor.attach(self.engine)
        self.executor.release()

    def submit(self, task_id: int = 1, *, deadline_s: float = 60.0, **spec: Any) -> Lease:
        body = encode_task_spec(TaskSpec(REQUEST, **spec))
        lease = Lease(TaskItem(task_id, 5, 1, "default", deadline_s, 1, 0), body, 5)
        self.executor.submit(lease)
        return lease

    def use(self, run: Callable[[EpisodeContext, TaskSpec], Awaitable[Any]]) -> None:
        class Custom:
            async def run(self, context: EpisodeContext, spec: TaskSpec) -> EpisodeResult:
                return await run(context, spec)  # type: ignore[no-any-return]

        self.registry._workflows["custom"] = Custom()

    async def outcome(self, task_id: int = 1) -> Outcome:
        async with asyncio.timeout(10):
            while task_id not in self.outcomes:
                self._reported.clear()
                await self._reported.wait()
        return self.outcomes[task_id]

    async def failure(self, task_id: int = 1) -> Failed:
        outcome = await self.outcome(task_id)
        assert isinstance(outcome, Failed)
        return outcome


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    yield made
    await made.executor.close()


async def hang(rid: str) -> EngineResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def test_single_turn_gives_a_labelled_trajectory(bench: Bench) -> None:
    bench.go()
    bench.submit(data={"reward": "math", "answer": 4})
    outcome = await bench.outcome()
    assert isinstance(outcome, Finished)
    assert (outcome.head, outcome.tail, outcome.tokens) == ("1.7", "1.7", 4)
    trajectory = decode_trajectory(outcome.body, task_id=1)
    assert trajectory.output_ids == [0, 1, 2, 3] and trajectory.reward == 1.5 and trajectory.loss_mask == [1] * 4
    assert trajectory.metadata == {"from": "test"} and trajectory.worker == "w0"
    assert bench.rewards.calls == [
        ("math", {"prompt_ids": [1, 2, 3], "completion_ids": [0, 1, 2, 3], "data": {"reward": "math", "answer": 4}})
    ]
    assert bench.started == [(1, "1.7")]


async def test_without_a_reward_name_there_is_no_reward(bench: Bench) -> None:
    bench.go()
    bench.submit()
    outcome = await bench.outcome()
    assert isinstance(outcome, Finished)
    assert decode_trajectory(outcome.body, task_id=1).reward is None


async def test_no_more_than_slots_run_and_all_end(bench: Bench) -> None:
    bench.go()
    for n in range(10):
        bench.submit(n)
    assert bench.executor.running == 2 and bench.executor.waiting == 8
    async with asyncio.timeout(10):
        await bench.executor.idle()
    assert len(bench.outcomes) == 10 and bench.engine.most_active <= 2 and bench.executor.finished == 10


async def test_nothing_starts_before_release(bench: Bench) -> None:
    bench.submit()
    assert (bench.executor.running, bench.executor.waiting) == (0, 1)
    bench.go()
    await bench.outcome()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RequestRejected("prompt too long"), Reason.REQUEST_REJECTED),
        (EngineUnavailable("500"), Reason.ENGINE_FAILED),
    ],
)
async def test_errors_of_the_engine_keep_their_cause(bench: Bench, error: Exception, reason: Reason) -> None:
    async def fail(rid: str) -> EngineResponse:
        raise error

    bench.engine.answer = fail
    bench.go()
    bench.submit()
    assert await bench.failure() == Failed(reason, str(error))


async def _raises(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    ("error", "reason", "text"),
    [
        (ValueError("bad " + "x" * 1000), Reason.WORKFLOW_RAISED, "ValueError: bad xxx"),
        (TimeoutError(), Reason.WORKFLOW_RAISED, "TimeoutError"),
        (SystemExit(3), Reason.WORKFLOW_RAISED, "SystemExit: 3"),
        (asyncio.CancelledError(), Reason.WORKFLOW_RAISED, "CancelledError"),
        (WorkflowError("no tool"), Reason.WORKFLOW_RAISED, "no tool"),
        (RewardError("hung"), Reason.REWARD_FAILED, "hung"),
        (EngineUnavailable("gone"), Reason.RETURNED, "gone"),
        (ExceptionGroup("turns", [ValueError("a"), RequestRejected("b")]), Reason.REQUEST_REJECTED, "b"),
    ],
)
async def test_errors_of_a_workflow_are_told_apart(
    bench: Bench, error: BaseException, reason: Reason, text: str
) -> None:
    bench.use(lambda context, spec: _raises(error))
    bench.go()
    bench.submit(workflow="custom")
    failure = await bench.failure()
    assert failure.reason is reason and text in failure.detail and len(failure.detail) <= 300
    bench.submit(2)
    assert isinstance(await bench.outcome(2), Finished), "other tasks go on"


async def test_an_engine_error_wrapped_by_a_workflow_is_still_the_engines(bench: Bench) -> None:
    async def fail(rid: str) -> EngineResponse:
        raise EngineUnavailable("connection reset")

    async def wrap(context: EpisodeContext, spec: TaskSpec) -> None:
        try:
            await context.generate(spec.request)
        except EngineUnavailable as error:
            raise ValueError("turn 3 failed") from error

    bench.engine.answer = fail
    bench.use(wrap)
    bench.go()
    bench.submit(workflow="custom")
    assert await bench.failure() == Failed(Reason.ENGINE_FAILED, "connection reset")


async def test_unknown_workflow_names_the_known_ones(bench: Bench) -> None:
    bench.go()
    bench.submit(workflow="other")
    failure = await bench.failure()
    assert failure.reason is Reason.WORKFLOW_RAISED and "'other'" in failure.detail and "generate" in failure.detail


async def test_a_reward_error_is_reported_as_such(bench: Bench) -> None:
    bench.rewards.value = RewardError("reward 'math' did not return within 15 s")
    bench.go()
    bench.submit(data={"reward": "math"})
    assert (await bench.failure()).reason is Reason.REWARD_FAILED


async def test_a_broken_task_body_is_rejected(bench: Bench) -> None:
    bench.go()
    bench.executor.submit(Lease(TaskItem(1, 5, 1, "default", 60.0, 1, 0), b"garbage", 5))
    failure = await bench.failure()
    assert failure.reason is Reason.REQUEST_REJECTED and "checksum" in failure.detail


EPISODE = EpisodeResult([1], [5, 6], [-1.0, -1.0], [(7, 0, 2)], "stop", 0.0, [1, 1])


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (None, "NoneType"),
        (replace(EPISODE, output_logprobs=[-1.0]), "1 logprobs"),
        (replace(EPISODE, output_logprobs=[-1.0, math.nan]), "not finite"),
        (replace(EPISODE, reward="high"), "wrong type"),
        (replace(EPISODE, version_spans=[(8, 0, 2)]), "reported by no generation"),
        (replace(EPISODE, version_spans=[]), "no generated token"),
        (replace(EPISODE, metrics={"x": object()}), "metrics"),
        (replace(EPISODE, loss_mask=[1, 999]), "wrong type or value"),
    ],
)
async def test_a_bad_result_is_refused_with_what_is_wrong(bench: Bench, result: Any, text: str) -> None:
    async def run(context: EpisodeContext, spec: TaskSpec) -> Any:
        await context.generate(spec.request)
        return result

    bench.use(run)
    bench.go()
    bench.submit(workflow="custom")
    failure = await bench.failure()
    assert failure.reason is Reason.BAD_RESULT and text in failure.detail


async def test_head_and_tail_are_the_ends_over_all_turns(bench: Bench) -> None:
    labels = iter(["1.9", "2.3", "2.4"])

    async def answer(rid: str) -> EngineResponse:
        return response(next(labels), 1)

    async def run(context: EpisodeContext, spec: TaskSpec) -> EpisodeResult:
        spans = [(await context.generate(spec.request)).response.version_spans[0][0] for _ in range(3)]
        return EpisodeResult(
            [1], [5, 6, 7], [-1.0] * 3, [(v, n, n + 1) for n, v in enumerate(spans)], "stop", None, [1, 1, 1]
        )

    bench.engine.answer = answer
    bench.use(run)
    bench.go()
    bench.submit(workflow="custom")
    outcome = await bench.outcome()
    assert isinstance(outcome, Finished) and (outcome.head, outcome.tail) == ("1.9", "2.4")
    assert len(bench.started) == 1


async def test_cancel_reaches_the_engine_and_reports_nothing(bench: Bench) -> None:
    bench.engine.answer = hang
    bench.go()
    lease = bench.submit(1)
    await bench.engine.called.wait()
    (rid,) = bench.engine.active
    bench.executor.cancel(lease)
    async with asyncio.timeout(10):
        await bench.executor.idle()
        while bench.engine.active:  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert bench.engine.cancelled == [rid] and bench.outcomes == {}
    bench.engine.answer = None
    bench.submit(2)
    await bench.outcome(2)


async def test_a_task_cancelled_in_the_turn_it_came_in_frees_its_slot(bench: Bench) -> None:
    bench.go()
    for n in (1, 2):
        bench.executor.cancel(bench.submit(n))
    bench.submit(3)
    assert isinstance(await bench.outcome(3), Finished)
    assert set(bench.outcomes) == {3}


async def test_a_waiting_task_can_be_cancelled(bench: Bench) -> None:
    lease = bench.submit(1)
    bench.executor.cancel(lease)
    assert bench.executor.waiting == 0
    bench.go()
    async with asyncio.timeout(10):
        await bench.executor.idle()
    assert bench.outcomes == {}


async def test_work_stops_at_the_deadline_in_the_engine_as_well(bench: Bench) -> None:
    bench.engine.answer = hang
    bench.go()
    bench.submit(1, deadline_s=0.05)
    assert (await bench.failure()).reason is Reason.DEADLINE
    assert len(bench.started) == 1
    async with asyncio.timeout(10):
        while bench.engine.active:  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert len(bench.engine.cancelled) == 1


async def test_a_workflow_that_resists_cancellation_delays_no_answer_but_keeps_its_slot(bench: Bench) -> None:
    release = asyncio.Event()

    async def stubborn(context: EpisodeContext, spec: TaskSpec) -> EpisodeResult:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        return EPISODE

    bench.use(stubborn)
    bench.go()
    for n in (1, 2):
        bench.submit(n, deadline_s=0.02, workflow="custom")
    for n in (1, 2):
        assert (await bench.failure(n)).reason is Reason.DEADLINE
    bench.submit(3)
    assert bench.executor.running == 0
    release.set()
    assert isinstance(await bench.outcome(3), Finished)


async def test_a_lost_engine_fails_what_it_generates_and_returns_what_waits(bench: Bench) -> None:
    bench.engine.answer = hang
    bench.go()
    for n in (1, 2, 3):
        bench.submit(n)
    async with asyncio.timeout(5):
        while len(bench.engine.active) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0)
    bench.executor.detach("exit code 9")
    assert bench.outcomes == {
        3: Failed(Reason.RETURNED, "exit code 9"),
        1: Failed(Reason.ENGINE_FAILED, "exit code 9"),
        2: Failed(Reason.ENGINE_FAILED, "exit code 9"),
    }


async def test_after_an_engine_failure_nothing_more_is_started_until_it_is_trusted(bench: Bench) -> None:
    async def fail(rid: str) -> EngineResponse:
        raise EngineUnavailable("connection reset")

    bench.engine.answer = fail
    bench.go()
    for n in (1, 2, 3):
        bench.submit(n)
    await bench.outcome(1)
    await bench.outcome(2)
    assert bench.executor.trouble.is_set() and bench.executor.waiting == 1
    bench.engine.answer = None
    bench.executor.trust()
    assert isinstance(await bench.outcome(3), Finished)


async def test_an_episode_at_its_reward_survives_the_engine(bench: Bench) -> None:
    at_reward, go_on = asyncio.Event(), asyncio.Event()

    async def run(context: EpisodeContext, spec: TaskSpec) -> EpisodeResult:
        await context.generate(spec.request)
        at_reward.set()
        await go_on.wait()
        return EPISODE

    bench.use(run)
    bench.go()
    bench.submit(workflow="custom")
    await at_reward.wait()
    bench.executor.detach("exit code 9")
    go_on.set()
    assert isinstance(await bench.outcome(), Finished)


async def test_draining_returns_what_waits_and_then_what_runs(bench: Bench) -> None:
    bench.engine.answer = hang
    bench.go()
    for n in (1, 2, 3):
        bench.submit(n)
    bench.executor.return_waiting(Reason.RETURNED, "drain")
    assert list(bench.outcomes) == [3]
    bench.executor.return_running(Reason.DRAINED, "drain")
    assert {o.reason for n, o in bench.outcomes.items() if isinstance(o, Failed) and n != 3} == {Reason.DRAINED}
    async with asyncio.timeout(10):
        await bench.executor.idle()
