"""One running episode: the context that its workflow sees, and the check of what the workflow returns."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Protocol

from rollmq.bodies import encode_episode
from rollmq.errors import EngineUnavailable, GenerationInterrupted, RollmqError
from rollmq.messages import Reason
from rollmq.rollout import EpisodeResult, ModelRequest
from workers.generation import EngineResponse
from workers.labels import parse_label
from workers.leases import Failed, Finished, Lease, Outcome

_serials = itertools.count(1)


class Generator(Protocol):
    """The part of `workers.engine.RemoteInfEngine` that episodes need."""

    @property
    def label(self) -> str | None:
        """The label of the weights; None while unknown."""

    async def generate(self, request: ModelRequest, *, rid: str | None = None) -> EngineResponse:
        """One generation."""

    async def cancel(self, rid: str) -> bool:
        """Ends a generation."""


class Rewarder(Protocol):
    """The part of `workers.rewards.RewardPool` that episodes need."""

    async def call(self, name: str, *, prompt_ids: list[int], completion_ids: list[int], data: dict[str, Any]) -> float:
        """One reward."""


class Episode:
    """Implements `workers.workflows.base.EpisodeContext` for one lease.

    Args:
        lease: the task.
        engine: gives the engine there is now, if any.
        rewards: the worker's rewards.
        on_started: called once, when the first request goes to the engine.
    """

    def __init__(
        self,
        lease: Lease,
        engine: Callable[[], Generator | None],
        rewards: Rewarder,
        on_started: Callable[[Lease], None],
    ) -> None:
        self.lease = lease
        self.rids: set[str] = set()
        self.labels: set[str] = set()
        self.over = False
        self._engine = engine
        self._rewards = rewards
        self._on_started = on_started

    @property
    def task_id(self) -> int:
        """The broker's id of the task."""
        return self.lease.task_id

    @property
    def started(self) -> bool:
        """Whether a request has gone to the engine."""
        return self.lease.started_label is not None

    @property
    def attempt(self) -> int:
        """1 for the first attempt."""
        return self.lease.item.attempt

    async def generate(self, request: ModelRequest) -> EngineResponse:
        """See `EpisodeContext.generate`."""
        if self.over:
            raise GenerationInterrupted(f"task {self.task_id} was stopped; its workflow may not generate any more")
        engine = self._engine()
        if engine is None:
            raise EngineUnavailable("the engine of this worker is being restarted")
        if not self.started:
            self.lease.started_label = engine.label or ""
            self._on_started(self.lease)
        # Unique per attempt: engines refuse an id in use, and an aborted request may linger.
        rid = f"{self.task_id}-{self.attempt}-{next(_serials)}"
        self.rids.add(rid)
        try:
            response = await engine.generate(request, rid=rid)
        finally:
            self.rids.discard(rid)
        self.labels |= response.labels
        return response

    async def reward(
        self, name: str, *, prompt_ids: list[int], completion_ids: list[int], data: dict[str, Any]
    ) -> float:
        """See `EpisodeContext.reward`."""
        return await self._rewards.call(name, prompt_ids=prompt_ids, completion_ids=completion_ids, data=data)


def check_result(result: object, labels: set[str], *, worker: str, attempt: int) -> Outcome:
    """The outcome for what a workflow returned.

    Head and tail are the oldest and newest labels of the weights that produced its generated tokens; a version that
    no generation of this episode reported makes the result bad, since nothing may carry a version that did not
    produce it.

    Args:
        result: what the workflow returned.
        labels: of all weights that the episode's generations reported.
        worker, attempt: put into the body.
    """
    if not isinstance(result, EpisodeResult):
        return _bad(f"the workflow returned {type(result).__name__}, not an EpisodeResult")
    try:
        problem = result.problem()
        if problem is not None:
            return _bad(problem)
        head, tail = _ends(result, labels)
        body = encode_episode(result, worker=worker, attempt=attempt)
    except RollmqError as error:
        return _bad(str(error))
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        return _bad(f"a field of the episode has a wrong type or value: {error}")
    return Finished(body, head, tail, sum(result.loss_mask))


class _Unlabelled(RollmqError):
    """A span names a version that no generation reported."""


def _ends(result: EpisodeResult, labels: set[str]) -> tuple[str, str]:
    oldest, newest = result.head_version, result.tail_version
    known = sorted(labels, key=parse_label)
    used = {version for version, start, end in result.version_spans if any(result.loss_mask[start:end])}
    strange = used - {parse_label(label)[1] for label in known}
    if strange:
        raise _Unlabelled(f"versions {sorted(strange)} in the spans were reported by no generation of this episode")
    within = [label for label in known if oldest <= parse_label(label)[1] <= newest and parse_label(label)[1] in used]
    return within[0], within[-1]


def _bad(problem: str) -> Failed:
    return Failed(Reason.BAD_RESULT, problem)
