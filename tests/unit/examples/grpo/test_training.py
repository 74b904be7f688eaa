"""The training loop against a client in memory: it publishes every step, prunes, stops, and never waits for ever."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from examples.grpo.batch import Sample
from examples.grpo.checkpoint import CheckpointShelf
from examples.grpo.config import DemoConfig
from examples.grpo.fleet import RoleEnded
from examples.grpo.history import StepRecord
from examples.grpo.learner import GrpoLearner, StepReport
from examples.grpo.run import worker_settings
from examples.grpo.task import REWARD_NAME
from examples.grpo.training import cancel_open_tasks, requests, to_sample, train, worker_versions
from rollmq.config import WorkerConfig
from rollmq.errors import DeadlineExceeded
from rollmq.rollout import Group, Trajectory
from trainer_client import DiskWeights, GroupFailure, RolloutClient


def trajectory(head: int, reward: float | None = 0.5) -> Trajectory:
    return Trajectory(
        task_id=1,
        input_ids=list(b"07 digits:"),
        output_ids=[49, 50],
        output_logprobs=[-1.0, -2.0],
        version_spans=[(head, 0, 2)],
        head_version=head,
        tail_version=head,
        stop_reason="length",
        reward=reward,
        loss_mask=[1, 1],
    )


class MemoryClient:
    """What the loop uses of `RolloutClient`: batches one version old, two workers one version behind."""

    def __init__(self, timeouts: int = 0) -> None:
        self.version = 0
        self.published: list[Path] = []
        self.failures: list[GroupFailure] = []
        self.cancelled: list[int] = []
        self._timeouts = timeouts

    def batches(self, prompts: Iterator[Any], timeout: float) -> Iterator[list[Group]]:
        return self

    def __iter__(self) -> Iterator[list[Group]]:
        return self

    def __next__(self) -> list[Group]:
        if self._timeouts:
            self._timeouts -= 1
            raise DeadlineExceeded("no batch yet")
        head = max(0, self.version - 1)
        return [Group(group_id=1, trajectories=(trajectory(head), trajectory(head)))]

    def publish_weights(self, weights: DiskWeights, version: int) -> None:
        self.published.append(Path(weights.path))
        self.version = version

    def status(self) -> dict[str, Any]:
        behind = max(0, self.version - 1)
        return {"workers": [{"name": "b", "version": behind}, {"name": "a", "version": self.version}]}

    def tasks(self, limit: int) -> list[dict[str, Any]]:
        return [{"task_id": 7}, {"task_id": 8}]

    def cancel(self, task_id: int) -> bool:
        self.cancelled.append(task_id)
        return task_id == 8


class MemoryLearner:
    """Reports the rewards it was given, one per step."""

    def __init__(self, rewards: list[float]) -> None:
        self._rewards = rewards
        self.steps = 0
        self.seen: list[Sample] = []

    def step(self, groups: list[list[Sample]]) -> StepReport:
        self.seen.extend(sample for group in groups for sample in group)
        self.steps += 1
        reward = self._rewards[min(self.steps, len(self._rewards)) - 1]
        return StepReport(self.steps, 0.0, reward, 1.0, 1.0, 1.0, 0.0, 4)

    def save(self, directory: Path) -> Path:
        directory.mkdir()
        return directory


class SilentDisplay:
    """Keeps the last history it was shown."""

    shown = 0

    def step(self, history: list[StepRecord]) -> None:
        self.shown = len(history)


def run(
    client: MemoryClient, learner: MemoryLearner, tmp_path: Path, check_fleet: Any = lambda: None, **changes: Any
) -> list[StepRecord]:
    config = DemoConfig(**{"max_steps": 6, "window": 2, **changes})
    return train(
        cast(RolloutClient, client),
        cast(GrpoLearner, learner),
        CheckpointShelf(tmp_path / "weights"),
        config,
        cast(Any, SilentDisplay()),
        check_fleet,
    )


def test_every_step_publishes_the_next_version(tmp_path: Path) -> None:
    client = MemoryClient()
    history = run(client, MemoryLearner([0.1]), tmp_path)
    assert [record.version for record in history] == [0, 1, 2, 3, 4, 5]
    assert client.version == 6
    assert [path.name for path in client.published[:2]] == ["version-000001", "version-000002"]


def test_staleness_is_consumer_version_minus_head_version(tmp_path: Path) -> None:
    history = run(MemoryClient(), MemoryLearner([0.1]), tmp_path)
    assert [record.staleness_max for record in history] == [0, 1, 1, 1, 1, 1]


def test_checkpoints_stay_until_the_slowest_worker_has_passed_them(tmp_path: Path) -> None:
    run(MemoryClient(), MemoryLearner([0.1]), tmp_path)
    assert sorted(path.name for path in (tmp_path / "weights").iterdir()) == ["version-000005", "version-000006"]


def test_training_ends_when_the_mean_of_the_window_reaches_the_target(tmp_path: Path) -> None:
    learner = MemoryLearner([0.1, 0.95, 0.1, 0.95, 0.95])
    history = run(MemoryClient(), learner, tmp_path, target_reward=0.9)
    assert len(history) == 5


def test_a_late_batch_is_waited_for_while_the_fleet_lives(tmp_path: Path) -> None:
    checks = itertools.count()
    history = run(MemoryClient(timeouts=3), MemoryLearner([0.1]), tmp_path, lambda: next(checks))
    assert len(history) == 6
    assert next(checks) == 3


def test_a_fleet_that_ended_is_reported_instead_of_the_wait(tmp_path: Path) -> None:
    def ended() -> None:
        raise RoleEnded("worker-0 ended")

    with pytest.raises(RoleEnded, match="worker-0"):
        run(MemoryClient(timeouts=1), MemoryLearner([0.1]), tmp_path, ended)


def test_a_batch_that_never_comes_names_the_last_failed_prompt(tmp_path: Path) -> None:
    client = MemoryClient(timeouts=10**9)
    client.failures.append(GroupFailure(position=0, task_id=1, state="dead", reason="reward raised"))
    with pytest.raises(DeadlineExceeded, match=r"no batch of 6 groups within 0.01 s.*reward raised"):
        run(client, MemoryLearner([0.1]), tmp_path, batch_timeout_s=0.01)


def test_a_trajectory_keeps_tokens_logprobs_mask_and_reward() -> None:
    sample = to_sample(trajectory(3))
    assert (sample.output_ids, sample.logprobs, sample.loss_mask, sample.reward) == (
        [49, 50],
        [-1.0, -2.0],
        [1, 1],
        0.5,
    )


def test_a_trajectory_without_a_reward_is_an_error() -> None:
    with pytest.raises(ValueError, match="without a reward"):
        to_sample(trajectory(3, reward=None))


def test_requests_ask_for_whole_groups_and_name_the_reward() -> None:
    request, data = next(requests(DemoConfig(group_size=4)))
    assert request.gconfig.n_samples == 4
    assert data == {"reward": REWARD_NAME}


def test_worker_versions_come_sorted_by_name() -> None:
    rows = {"workers": [{"name": "b", "version": None}, {"name": "a", "version": 3}]}
    assert list(worker_versions(rows).items()) == [("a", 3), ("b", None)]


def test_cancelling_counts_what_was_really_withdrawn() -> None:
    client = MemoryClient()
    assert cancel_open_tasks(cast(RolloutClient, client)) == 1
    assert client.cancelled == [7, 8]


@pytest.mark.parametrize("engine", ["embedded", "vllm"])
def test_worker_settings_are_valid_and_name_an_importable_reward(engine: Any, tmp_path: Path) -> None:
    config = DemoConfig(engine=engine)
    settings = WorkerConfig(**worker_settings(config, tmp_path))
    assert settings.slots * config.worker_count >= config.groups_per_step * config.group_size
    module, _, function = settings.rewards[REWARD_NAME].partition(":")
    assert callable(getattr(__import__(module, fromlist=[function]), function))
