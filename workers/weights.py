"""WeightKeeper: keeps the engine's weights at the newest published version, and says what they are.

News coalesce: while one update runs, only the newest of what came in counts afterwards. A failed update fences the
worker until the engine has proved the right label. The keeper decides nothing about tasks and starts no process: it
reports, and it raises when only a new launch of the engine can help.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from rollmq.errors import EngineError, WeightUpdateError
from rollmq.messages import PolicyNews, WeightState
from workers.outbox import bounded
from workers.weight_update import UpdateReport

log = logging.getLogger(__name__)

BASE_LABEL = "0.0"
ATTEMPTS = 3
PAUSE_S = (0.5, 10.0)

UpdateMode = Literal["keep", "abort", "wait"]


@dataclass(frozen=True, slots=True)
class WeightReport:
    """What the worker says of its weights. `label` is empty while nothing is proved."""

    state: WeightState
    label: str
    detail: str = ""


class WeightedEngine(Protocol):
    """The part of `workers.engine.RemoteInfEngine` that the keeper needs."""

    @property
    def label(self) -> str | None:
        """The label that the server proved last; None while unknown."""

    @property
    def fenced(self) -> bool:
        """Whether an update failed and none has succeeded since."""

    async def update_weights(self, path: str | None, label: str, mode: UpdateMode = "keep") -> UpdateReport:
        """Loads new weights, or only relabels the present ones."""


class WeightKeeper:
    """Follows one policy.

    Args:
        policy: its name; news of others are ignored.
        mode: what happens to requests in flight during an update.
        on_report: told of every change.
        pause_s: first and longest pause between attempts.
    """

    def __init__(
        self,
        policy: str,
        mode: UpdateMode,
        on_report: Callable[[WeightReport], None],
        pause_s: tuple[float, float] = PAUSE_S,
    ) -> None:
        self._policy = policy
        self._mode = mode
        self._on_report = on_report
        self._pause_s = pause_s
        self._target: PolicyNews | None = None
        self._changed = asyncio.Event()
        self._base_loaded = False
        self.report = WeightReport(WeightState.UPDATING, "", "the engine is starting")

    @property
    def ready(self) -> bool:
        """Whether tasks may run."""
        return self.report.state is WeightState.READY

    @property
    def launch_label(self) -> str:
        """The label of the weights that the engine is launched with."""
        if self._target is not None and not self._target.source:
            return self._target.label
        return BASE_LABEL

    def follow(self, news: Iterable[PolicyNews], *, authoritative: bool = False) -> None:
        """Takes news; the newest sequence wins.

        Args:
            news: of any policies.
            authoritative: from a WELCOME: what it says counts even if older, since the broker may be another one.
        """
        for item in news:
            if item.policy == self._policy and (
                self._target is None or authoritative or item.sequence > self._target.sequence
            ):
                self._target = item
        if self.ready and self._target is not None and self._target.label != self.report.label:
            # Said at once, so that no task is sent for weights that are about to be replaced.
            self._say(WeightState.UPDATING, self.report.label, f"waits for {self._target.label}")
        self._changed.set()

    def recheck(self) -> None:
        """The engine's label may not be what it was."""
        self._changed.set()

    def engine_lost(self, detail: str) -> None:
        """There is no engine; the next launch begins with the weights it is launched with."""
        self._say(WeightState.UPDATING, "", detail)

    async def keep(self, engine: WeightedEngine) -> None:
        """Serves one launch of the engine, until cancelled.

        Raises:
            WeightUpdateError: only another launch can bring the right weights.
        """
        self._base_loaded = True
        failures = 0
        while True:
            self._changed.clear()
            if self._in_sync(engine):
                failures = 0
                self._say(WeightState.READY, engine.label or "")
                await self._changed.wait()
                continue
            target = self._target
            try:
                await self._update(engine, target)
            except EngineError as error:
                if target is None or self._needs_base(engine, target):
                    raise WeightUpdateError(str(error)) from error
                failures += not _source_is_missing(target)
                self._fence(engine, target, error)
                if failures >= ATTEMPTS:
                    raise WeightUpdateError(
                        f"{failures} updates to {target.label} failed; the last: {error}"
                    ) from error
                await self._changed_within(min(self._pause_s[0] * 2.0**failures, self._pause_s[1]))

    def _in_sync(self, engine: WeightedEngine) -> bool:
        if engine.fenced or not engine.label:
            return False
        return engine.label == (self._target.label if self._target is not None else self.launch_label)

    async def _update(self, engine: WeightedEngine, target: PolicyNews | None) -> None:
        if target is None or self._needs_base(engine, target):
            wanted = target.label if target is not None else BASE_LABEL
            raise WeightUpdateError(f"the engine has weights {engine.label!r}; {wanted} are those of its launch")
        self._say(WeightState.UPDATING, engine.label or "", f"loads {target.label}")
        path = None if engine.label == target.label or not target.source else target.source
        if path is not None:
            self._base_loaded = False
        report = await engine.update_weights(path, target.label, self._mode)
        if report.label != target.label or engine.label != target.label:
            raise WeightUpdateError(f"the engine reports {engine.label!r} after the update to {target.label}")
        log.info("weights %s loaded in %.2f s, %.2f s without generation", report.label, report.load_s, report.stall_s)

    def _needs_base(self, engine: WeightedEngine, target: PolicyNews) -> bool:
        """Whether the target is the weights of the launch, and the engine has others by now."""
        has_them = engine.label is not None and (self._base_loaded or engine.label == target.label)
        return not target.source and not has_them

    def _fence(self, engine: WeightedEngine, target: PolicyNews, error: EngineError) -> None:
        log.error("weights %s from %s cannot be loaded: %s", target.label, target.source, error)
        self._say(WeightState.FENCED, engine.label or "", bounded(str(error)))

    def _say(self, state: WeightState, label: str, detail: str = "") -> None:
        report = WeightReport(state, label, bounded(detail))
        if report != self.report:
            self.report = report
            self._on_report(report)

    async def _changed_within(self, timeout_s: float) -> None:
        try:
            await asyncio.wait_for(self._changed.wait(), timeout_s)
        except TimeoutError:
            return


def _source_is_missing(target: PolicyNews) -> bool:
    """A directory that is not there (yet) is waited for; a new launch of the engine would not bring it."""
    return bool(target.source) and not Path(target.source).is_dir()
