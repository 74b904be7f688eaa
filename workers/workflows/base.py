"""What a workflow is: one coroutine that turns a task into an episode, with the engine and rewards at its hand.

A workflow raises what it likes: that is the task's fault. Errors of the engine that it lets through are not.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from rollmq.rollout import EpisodeResult, ModelRequest, TaskSpec
from workers.generation import EngineResponse


class EpisodeContext(Protocol):
    """What a running episode may use."""

    @property
    def task_id(self) -> int:
        """The broker's id of the task."""

    @property
    def attempt(self) -> int:
        """1 for the first attempt."""

    async def generate(self, request: ModelRequest) -> EngineResponse:
        """One generation, resumed over weight updates until it is whole.

        Raises:
            RequestRejected: the request itself cannot be served.
            EngineError: the engine failed; let it through.
        """

    async def reward(
        self, name: str, *, prompt_ids: list[int], completion_ids: list[int], data: dict[str, Any]
    ) -> float:
        """The value of a configured reward function.

        Raises:
            RewardError: unknown, failed, or not a finite number.
        """


@runtime_checkable
class Workflow(Protocol):
    """One kind of episode. One instance serves all episodes of a worker, so it may hold no state of one."""

    async def run(self, context: EpisodeContext, spec: TaskSpec) -> EpisodeResult:
        """Runs one episode."""
