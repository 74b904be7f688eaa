"""WeightKeeper over a fake engine: coalescing, verification, fencing, retries, and when a new launch is needed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from rollmq.errors import WeightUpdateError
from rollmq.messages import PolicyNews, WeightState
from workers.weight_update import UpdateReport
from workers.weights import UpdateMode, WeightKeeper, WeightReport

READY, UPDATING, FENCED = WeightState.READY, WeightState.UPDATING, WeightState.FENCED


def news(version: int, sequence: int, source: str | Path = "", epoch: int = 1, policy: str = "default") -> PolicyNews:
    return PolicyNews(policy, epoch, version, str(source), sequence)


BASE = news(0, 1, epoch=0)


class FakeEngine:
    def __init__(self, label: str = "0.0") -> None:
        self.label: str | None = label
        self.fenced = False
        self.updates: list[tuple[str | None, str, str]] = []
        self.failures = 0
        self.damages = False
        self.answers: str | None = None
        self.gate = asyncio.Event()
        self.gate.set()

    async def update_weights(self, path: str | None, label: str, mode: UpdateMode = "keep") -> UpdateReport:
        self.updates.append((path, label, mode))
        await self.gate.wait()
        if self.failures:
            self.failures -= 1
            self.fenced = True
            self.label = None if self.damages else self.label
            raise WeightUpdateError("shape of lm_head is wrong")
        self.fenced, self.label = False, self.answers or label
        return UpdateReport(label, 0.1, 0.2)


class Bench:
    def __init__(self, mode: UpdateMode = "keep") -> None:
        self.reports: list[WeightReport] = []
        self._changed = asyncio.Event()
        self.keeper = WeightKeeper("default", mode, self._report, pause_s=(0.001, 0.002))
        self.engine = FakeEngine()
        self.task: asyncio.Task[None] | None = None

    def _report(self, report: WeightReport) -> None:
        self.reports.append(report)
        self._changed.set()

    def start(self, label: str | None = None) -> None:
        self.engine = FakeEngine(label or self.keeper.launch_label)
        self.task = asyncio.create_task(self.keeper.keep(self.engine))

    async def until(self, condition: Callable[[WeightReport], bool]) -> WeightReport:
        async with asyncio.timeout(10):
            while not condition(self.keeper.report):
                self._changed.clear()
                await self._changed.wait()
        return self.keeper.report

    async def until_ready(self, label: str) -> None:
        await self.until(lambda report: report == WeightReport(READY, label))

    async def error(self) -> str:
        assert self.task is not None
        with pytest.raises(WeightUpdateError) as caught:
            await asyncio.wait_for(self.task, 10)
        return str(caught.value)


@pytest.fixture
async def bench():
    made = Bench()
    yield made
    if made.task is not None:
        made.task.cancel()
        await asyncio.gather(made.task, return_exceptions=True)


async def test_launch_weights_are_ready_without_an_update(bench: Bench) -> None:
    bench.keeper.follow([BASE], authoritative=True)
    bench.start()
    await bench.until_ready("0.0")
    assert bench.engine.updates == []


async def test_a_late_joiner_loads_the_newest_before_it_is_ready(bench: Bench, tmp_path: Path) -> None:
    bench.keeper.follow([news(5, 9, tmp_path)], authoritative=True)
    assert bench.keeper.launch_label == "0.0"
    bench.start()
    await bench.until_ready("1.5")
    assert [r.state for r in bench.reports] == [UPDATING, READY]
    assert bench.engine.updates == [(str(tmp_path), "1.5", "keep")]


async def test_news_close_the_worker_before_the_update_begins(bench: Bench, tmp_path: Path) -> None:
    bench.keeper.follow([BASE])
    bench.start()
    await bench.until_ready("0.0")
    bench.keeper.follow([news(1, 2, tmp_path)])
    assert bench.keeper.report == WeightReport(UPDATING, "0.0", "waits for 1.1")
    await bench.until_ready("1.1")


async def test_news_during_an_update_coalesce_to_the_newest(bench: Bench, tmp_path: Path) -> None:
    bench.keeper.follow([BASE])
    bench.start()
    await bench.until_ready("0.0")
    bench.engine.gate.clear()
    bench.keeper.follow([news(1, 2, tmp_path)])
    await bench.until(lambda report: report.detail == "loads 1.1")
    for version in (2, 3, 4):
        bench.keeper.follow([news(version, version + 1, tmp_path)])
    bench.engine.gate.set()
    await bench.until_ready("1.4")
    assert [label for _, label, _ in bench.engine.updates] == ["1.1", "1.4"]
    assert WeightReport(READY, "1.1") not in bench.reports


async def test_older_news_and_other_policies_change_nothing(bench: Bench, tmp_path: Path) -> None:
    bench.keeper.follow([news(3, 7, tmp_path)])
    bench.start()
    await bench.until_ready("1.3")
    bench.keeper.follow([news(2, 6, tmp_path), news(9, 99, tmp_path, policy="other")])
    assert bench.keeper.ready and len(bench.engine.updates) == 1


async def test_a_welcome_wins_even_with_an_older_sequence(bench: Bench, tmp_path: Path) -> None:
    bench.keeper.follow([news(3, 70, tmp_path)])
    bench.start()
    await bench.until_ready("1.3")
    bench.keeper.follow([news(1, 2, tmp_path)], authoritative=True)
    await bench.until_ready("1.1")


async def test_a_failed_update_fences_and_is_tried_again(bench: Bench, tmp_path: Path) -> None:
    bench.keeper.follow([BASE])
    bench.start()
    await bench.until_ready("0.0")
    bench.engine.failures = 1
    bench.keeper.follow([news(1, 2, tmp_path)])
    fenced = await bench.until(lambda report: report.state is FENCED)
    assert fenced.label == "0.0" and "lm_head" in fenced.detail
    await bench.until_ready("1.1")
    assert len(bench.engine.updates) == 2


async def test_after_three_failures_a_new_launch_is_asked_for(bench: Bench, tmp_path: Path) -> None:
    bench.keeper.follow([news(1, 2, tmp_path)])
    bench.start()
    bench.engine.failures = 99
    assert "3 updates to 1.1 failed" in await bench.error()
    assert len(bench.engine.updates) == 3


async def test_a_missing_directory_is_waited_for(bench: Bench, tmp_path: Path) -> None:
    bench.keeper.follow([news(1, 2, tmp_path / "later")])
    bench.start()
    bench.engine.failures = 5
    await bench.until_ready("1.1")
    assert len(bench.engine.updates) == 6


async def test_newer_news_end_the_wait_after_a_failure(tmp_path: Path) -> None:
    bench = Bench()
    bench.keeper._pause_s = (60.0, 60.0)
    bench.keeper.follow([news(1, 2, tmp_path)])
    bench.start()
    bench.engine.failures = 1
    await bench.until(lambda report: report.state is FENCED)
    bench.keeper.follow([news(2, 3, tmp_path)])
    await bench.until_ready("1.2")
    assert bench.task is not None
    bench.task.cancel()


async def test_a_fence_with_the_weights_wanted_is_lifted_without_loading(bench: Bench, tmp_path: Path) -> None:
    bench.keeper.follow([news(1, 2, tmp_path)])
    bench.start()
    await bench.until_ready("1.1")
    bench.engine.failures = 1
    bench.keeper._pause_s = (60.0, 60.0)
    bench.keeper.follow([news(2, 3, tmp_path)])
    await bench.until(lambda report: report.state is FENCED)
    bench.keeper.follow([news(1, 4, tmp_path)])
    await bench.until_ready("1.1")
    assert bench.engine.updates[-1] == (None, "1.1", "keep")


async def test_an_engine_that_reports_another_label_is_never_ready(bench: Bench, tmp_path: Path) -> None:
    bench.keeper.follow([news(1, 2, tmp_path)])
    bench.start()
    bench.engine.answers = "1.0"
    assert "reports '1.0'" in await bench.error()
    assert all(report.state is not READY for report in bench.reports)


async def test_the_launch_weights_after_others_need_a_new_launch(bench: Bench, tmp_path: Path) -> None:
    bench.keeper.follow([news(4, 9, tmp_path)])
    bench.start()
    await bench.until_ready("1.4")
    bench.keeper.follow([news(0, 1, epoch=0)], authoritative=True)
    assert "those of its launch" in await bench.error()
    bench.keeper.engine_lost("restart")
    bench.start()
    await bench.until_ready("0.0")


async def test_the_launch_weights_under_another_label_are_only_relabelled(bench: Bench) -> None:
    bench.keeper.follow([BASE])
    bench.start()
    await bench.until_ready("0.0")
    bench.keeper.follow([news(0, 5, epoch=3)])
    await bench.until_ready("3.0")
    assert bench.engine.updates == [(None, "3.0", "keep")]


async def test_weights_changed_behind_our_back_are_loaded_again(bench: Bench, tmp_path: Path) -> None:
    bench.keeper.follow([news(1, 2, tmp_path)])
    bench.start()
    await bench.until_ready("1.1")
    bench.engine.label = None
    bench.engine.gate.clear()
    bench.keeper.recheck()
    await bench.until(lambda report: report.state is UPDATING)
    bench.engine.gate.set()
    await bench.until_ready("1.1")
    assert len(bench.engine.updates) == 2


async def test_the_update_mode_reaches_the_engine(tmp_path: Path) -> None:
    bench = Bench("abort")
    bench.keeper.follow([news(1, 2, tmp_path)])
    bench.start()
    await bench.until_ready("1.1")
    assert bench.engine.updates[0][2] == "abort"
    assert bench.task is not None
    bench.task.cancel()
