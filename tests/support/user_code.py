"""Workflows and rewards as a user would write them, good and bad."""

from __future__ import annotations

import time
from typing import Any

from rollmq.rollout import EpisodeResult, TaskSpec


class RaisingWorkflow:
    """Always fails."""

    async def run(self, context: Any, spec: TaskSpec) -> EpisodeResult:
        raise ValueError("this workflow cannot handle row 17")


def length_reward(*, prompt_ids: list[int], completion_ids: list[int], data: dict[str, Any]) -> float:
    """How many tokens were generated."""
    return float(len(completion_ids))


def hanging_reward(*, prompt_ids: list[int], completion_ids: list[int], data: dict[str, Any]) -> float:
    """Never answers."""
    time.sleep(3600)
    return 0.0
