"""EngineSupervisor over fake engines: launch, death, hang, budget."""

from __future__ import annotations

import asyncio

import pytest

from rollmq.errors import ConfigError, EngineLaunchError, EngineUnavailable
from rollmq.messages import PolicyNews, WeightState
from rollmq.rollout import ModelRequest
from workers.executor import WorkflowExecutor
from workers.generation import EngineResponse
from workers.leases import Lease, Outcome
from workers.rewards import RewardPool
from workers.supervise import EngineSupervisor, Watch
from workers.weight_update import UpdateReport
from workers.weights import UpdateMode, WeightKeeper, WeightReport
from workers.workflows.registry import WorkflowRegistry

FAST = Watch(interval_s=0.01, timeout_s=0.05, retry_s=0.01, failures=2, pause_s=(0.001, 0.002))


class FakeEngine:
    def __init__(self, label: str, launch_error: Exception | None = None) -> None:
        self.label: str | None = label
        self.fenced = False
        self.exited = asyncio.Event()
        self.closed = False
        self.hangs = False
        self._launch_error = launch_error

    async def start(self) -> None:
        if self._launch_error:
            raise self._launch_error

    async def close(self) -> None:
        self.closed = True

    async def current_version(self) -> str | None:
        if self.hangs:
            await asyncio.Event().wait()
        return self.label

    def exit_description(self) -> str | None:
        return "killed by signal 9" if self.exited.is_set() else None

    async def generate(self, request: ModelRequest, *, rid: str | None = None) -> EngineResponse:
        raise AssertionError

    async def cancel(self, rid: str) -> bool:
        return False

    async def update_weights(self, path: str | None, label: str, mode: UpdateMode = "keep") -> UpdateReport:
        self.label = label
        return UpdateReport(label, 0.0, 0.0)


class Bench:
    def __init__(self, max_restarts: int = 3) -> None:
        self.engines: list[FakeEngine] = []
        self.launch_errors: list[Exception | None] = []
        self.reports: asyncio.Queue[WeightReport] = asyncio.Queue()
        self.keeper = WeightKeeper("default", "keep", self.reports.put_nowait)
        self.executor = WorkflowExecutor(
            slots=1,
            workflows=WorkflowRegistry({}),
            rewards=RewardPool({}),
            worker="w",
            on_started=lambda lease: None,
            on_outcome=self._ignore,
        )
        self.supervisor = EngineSupervisor(self._make, self.keeper, self.executor, max_restarts, FAST)

    def _ignore(self, lease: Lease, outcome: Outcome) -> None:
        return None

    def _make(self, label: str) -> FakeEngine:
        error = self.launch_errors.pop(0) if self.launch_errors else None
        self.engines.append(FakeEngine(label, error))
        return self.engines[-1]

    async def until_ready(self) -> FakeEngine:
        async with asyncio.timeout(10):
            while (await self.reports.get()).state is not WeightState.READY:
                pass
        return self.engines[-1]


@pytest.fixture
async def bench():
    made = Bench()
    made.task = asyncio.create_task(made.supervisor.run())
    yield made
    made.task.cancel()
    await asyncio.gather(made.task, return_exceptions=True)
    assert all(engine.closed for engine in made.engines)


async def test_an_engine_that_died_is_launched_again_and_gets_the_current_weights(bench) -> None:
    first = await bench.until_ready()
    assert bench.supervisor.serving
    bench.keeper.follow([PolicyNews("default", 1, 3, "/", 5)])
    await bench.until_ready()
    first.exited.set()
    second = await bench.until_ready()
    assert second is not first and first.closed and second.label == "1.3"


async def test_an_engine_that_hangs_is_replaced(bench) -> None:
    first = await bench.until_ready()
    first.hangs = True
    assert await bench.until_ready() is not first


async def test_weights_changed_by_somebody_else_close_the_worker_until_loaded_again(bench) -> None:
    engine = await bench.until_ready()
    bench.keeper.follow([PolicyNews("default", 1, 3, "/", 5)])
    await bench.until_ready()
    engine.label = "9.9"
    assert await bench.until_ready() is engine
    assert engine.label == "1.3"


async def test_the_budget_ends_with_the_last_cause() -> None:
    bench = Bench(max_restarts=2)
    task = asyncio.create_task(bench.supervisor.run())
    for _ in range(3):
        (await bench.until_ready()).exited.set()
    with pytest.raises(EngineUnavailable, match=r"3 times in a row .*killed by signal 9"):
        await asyncio.wait_for(task, 10)
    assert len(bench.engines) == 3 and not bench.supervisor.serving


async def test_finished_tasks_renew_the_budget() -> None:
    bench = Bench(max_restarts=1)
    task = asyncio.create_task(bench.supervisor.run())
    for _ in range(4):
        engine = await bench.until_ready()
        bench.executor.finished += 1
        engine.exited.set()
    await bench.until_ready()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("error", [EngineLaunchError("exit code 1, log file x"), ConfigError("no model")])
async def test_a_first_launch_that_fails_is_final(error: Exception) -> None:
    bench = Bench()
    bench.launch_errors = [error]
    with pytest.raises(type(error), match=str(error)):
        await asyncio.wait_for(bench.supervisor.run(), 10)
    assert len(bench.engines) == 1


async def test_a_later_launch_that_fails_is_tried_again() -> None:
    bench = Bench()
    bench.launch_errors = [None, EngineLaunchError("out of memory"), None]
    task = asyncio.create_task(bench.supervisor.run())
    (await bench.until_ready()).exited.set()
    assert await bench.until_ready() is bench.engines[2]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_after_a_failed_request_the_engine_is_asked_before_more_is_started() -> None:
    bench = Bench()
    bench.supervisor._watch = Watch(interval_s=3600.0)
    task = asyncio.create_task(bench.supervisor.run())
    engine = await bench.until_ready()
    asked = asyncio.Event()

    async def answer() -> str | None:
        asked.set()
        return engine.label

    engine.current_version = answer  # type: ignore[method-assign]
    bench.executor.trouble.set()
    await asyncio.wait_for(asked.wait(), 10)
    async with asyncio.timeout(10):
        while bench.executor.trouble.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
