"""EngineSupervisor: keeps an engine running under the executor: launch, watch, tear down, again, within a budget.

An engine that died or hangs gives its tasks back at once; only then is it cleared away and launched again. The new
one gets the current weights before it gets tasks, since only the weight keeper's READY opens the worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from rollmq.errors import EngineError, EngineUnavailable
from workers.episode import Generator
from workers.executor import WorkflowExecutor
from workers.weights import WeightedEngine, WeightKeeper

log = logging.getLogger(__name__)

ENDING = "the worker is ending"


class Engine(Generator, WeightedEngine, Protocol):
    """The part of `workers.engine.RemoteInfEngine` that a worker uses. One object is one launch."""

    @property
    def exited(self) -> asyncio.Event:
        """Set once the server's processes are gone."""

    async def start(self) -> None:
        """Launches it and proves its label."""

    async def close(self) -> None:
        """Takes it down; may be called again."""

    async def current_version(self) -> str | None:
        """Asks the server for its label."""

    def exit_description(self) -> str | None:
        """How it ended; None while it runs."""


@dataclass(frozen=True, slots=True)
class Watch:
    """How a running engine is watched, in seconds.

    Attributes:
        interval_s: between two questions for its version.
        timeout_s: for an answer.
        retry_s: from an unanswered question to the next.
        failures: unanswered questions in a row that make it count as hung.
        pause_s: first and longest pause before another launch.
    """

    interval_s: float = 5.0
    timeout_s: float = 10.0
    retry_s: float = 1.0
    failures: int = 3
    pause_s: tuple[float, float] = (0.5, 30.0)


class EngineSupervisor:
    """Runs launches of an engine, one after another.

    Args:
        make_engine: an engine, not started, whose launch weights get the given label.
        keeper: brings and reports the weights.
        executor: runs episodes on it.
        max_restarts: launches in a row without one finished task before it gives up.
        watch: how it is watched.
    """

    def __init__(
        self,
        make_engine: Callable[[str], Engine],
        keeper: WeightKeeper,
        executor: WorkflowExecutor,
        max_restarts: int,
        watch: Watch | None = None,
    ) -> None:
        self._make_engine = make_engine
        self._keeper = keeper
        self._executor = executor
        self._max_restarts = max_restarts
        self._watch = watch or Watch()
        self._proved = False
        self.serving = False
        """Whether there is an engine that could run tasks, its weights aside."""

    async def run(self) -> None:
        """Runs until cancelled; leaves no engine behind.

        Raises:
            ConfigError: the engine cannot be launched as configured.
            EngineError: the first launch failed, or the budget of restarts is used up.
        """
        in_a_row = 0
        while True:
            finished = self._executor.finished
            cause = await self._launch()
            in_a_row = 1 if self._executor.finished > finished else in_a_row + 1
            if in_a_row > self._max_restarts:
                raise EngineUnavailable(
                    f"the engine failed {in_a_row} times in a row without one finished task; the last time: {cause}"
                )
            pause_s = min(self._watch.pause_s[0] * 2.0 ** (in_a_row - 1), self._watch.pause_s[1])
            log.warning("engine restart %d of %d in %.1f s: %s", in_a_row, self._max_restarts, pause_s, cause)
            await asyncio.sleep(pause_s)

    async def _launch(self) -> str:
        """One life of an engine; returns why it ended."""
        engine = self._make_engine(self._keeper.launch_label)
        cause = ENDING
        try:
            await engine.start()
            self._proved = self.serving = True
            self._executor.attach(engine)
            cause = await self._serve(engine)
        except EngineError as error:
            if not self._proved:
                raise
            cause = str(error)
        finally:
            self.serving = False
            self._keeper.engine_lost(cause if cause is ENDING else f"the engine is launched again: {cause}")
            self._executor.detach(cause)
            await _close(engine)
        return cause

    async def _serve(self, engine: Engine) -> str:
        """Until the engine is of no more use; returns why."""
        exited = asyncio.create_task(engine.exited.wait())
        kept = asyncio.create_task(self._keeper.keep(engine))
        probed = asyncio.create_task(self._probe(engine))
        tasks = (exited, kept, probed)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if exited.done():
                return engine.exit_description() or "the engine ended"
            for ended in (kept, probed):
                if ended.done():
                    ended.result()
            raise AssertionError("unreachable: these tasks end by raising only")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _probe(self, engine: Engine) -> None:
        """Asks for the version now and then, and when a request failed: finds an engine that hangs, or weights that
        somebody else changed."""
        failures = 0
        while failures < self._watch.failures:
            await self._until_next_question(failures)
            if not self._keeper.ready and not self._executor.trouble.is_set():
                failures = 0  # an update may keep it busy; it has deadlines of its own
                continue
            try:
                label = await asyncio.wait_for(engine.current_version(), self._watch.timeout_s)
            except (EngineError, TimeoutError) as error:
                failures += 1
                log.warning("engine did not tell its version (%d of %d): %s", failures, self._watch.failures, error)
                continue
            failures = 0
            if label != self._keeper.report.label:
                self._keeper.recheck()
            self._executor.trust()
        raise EngineUnavailable(f"the engine hangs: {failures} questions in a row were not answered")

    async def _until_next_question(self, failures: int) -> None:
        """At once when a request failed, but never faster than `retry_s` after an unanswered question."""
        if failures:
            await asyncio.sleep(self._watch.retry_s)
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._executor.trouble.wait(), self._watch.interval_s)


async def _close(engine: Engine) -> None:
    try:
        await engine.close()
    except EngineError as error:
        log.error("the engine cannot be taken down: %s", error)
