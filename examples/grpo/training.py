"""The training loop: batches in, optimiser step, new version out. Knows the client, not the processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from examples.grpo.batch import Sample
from examples.grpo.checkpoint import CheckpointShelf
from examples.grpo.config import DemoConfig
from examples.grpo.display import Display
from examples.grpo.history import StepRecord, recent_reward
from examples.grpo.learner import GrpoLearner, StepReport
from examples.grpo.task import ANSWER_TOKENS, REWARD_NAME, prompts
from rollmq import GenerationHyperparameters, ModelRequest
from rollmq.errors import DeadlineExceeded
from rollmq.rollout import Group, Trajectory
from trainer_client import DiskWeights, RolloutClient

_MOST_OPEN_TASKS = 10_000
_CHECK_EVERY_S = 2.0


def requests(config: DemoConfig) -> Iterator[tuple[ModelRequest, dict[str, Any]]]:
    """Prompts of the task for ever, each to be sampled `group_size` times, with the name of their reward."""
    sampling = GenerationHyperparameters(n_samples=config.group_size, max_new_tokens=ANSWER_TOKENS)
    for prompt in prompts(config.seed):
        yield ModelRequest(input_ids=prompt, gconfig=sampling), {"reward": REWARD_NAME}


def train(
    client: RolloutClient,
    learner: GrpoLearner,
    shelf: CheckpointShelf,
    config: DemoConfig,
    display: Display,
    check_fleet: Callable[[], None],
) -> list[StepRecord]:
    """Train until the target reward or the last step; publish one version per step.

    Args:
        client: connected, owner of the policy.
        learner: the policy; its weights are those that the engines started with.
        shelf: where checkpoints go.
        config: the settings.
        display: told of every step.
        check_fleet: called while a batch is long in coming; raises if none can come any more.

    Raises:
        DeadlineExceeded: no batch came in time; names the last prompt that failed, if one did.
    """
    history: list[StepRecord] = []
    last_end = time.monotonic()
    for batch in _batches(client, config, check_fleet):
        waited = time.monotonic() - last_end
        version = client.version
        report = learner.step([[to_sample(trajectory) for trajectory in group] for group in batch])
        client.publish_weights(DiskWeights(learner.save(shelf.path(version + 1))), version=version + 1)
        versions = worker_versions(client.status())
        _forget_passed(shelf, versions)
        now = time.monotonic()
        history.append(_record(version, batch, report, versions, seconds=now - last_end, waited=waited))
        last_end = now
        display.step(history)
        if _is_over(history, config):
            break
    return history


def cancel_open_tasks(client: RolloutClient) -> int:
    """Withdraw what was submitted ahead for steps that will not come; returns how many tasks."""
    open_tasks = client.tasks(limit=_MOST_OPEN_TASKS)
    return sum(client.cancel(row["task_id"]) for row in open_tasks)


def _batches(client: RolloutClient, config: DemoConfig, check_fleet: Callable[[], None]) -> Iterator[list[Group]]:
    """The client's batches, with a look at the fleet whenever one is long in coming."""
    batches = client.batches(requests(config), timeout=_CHECK_EVERY_S)
    while True:
        deadline = time.monotonic() + config.batch_timeout_s
        while (batch := _next_or_none(batches)) is None:
            check_fleet()
            if time.monotonic() > deadline:
                failures = client.failures
                reason = f"; the last prompt that failed: {failures[-1].reason}" if failures else ""
                raise DeadlineExceeded(
                    f"no batch of {config.groups_per_step} groups within {config.batch_timeout_s:g} s{reason}"
                )
        yield batch


def _next_or_none(batches: Iterator[list[Group]]) -> list[Group] | None:
    try:
        return next(batches)
    except DeadlineExceeded:
        return None


def to_sample(trajectory: Trajectory) -> Sample:
    """What the learner needs of a trajectory.

    Raises:
        ValueError: it has no reward.
    """
    if trajectory.reward is None:
        raise ValueError(f"task {trajectory.task_id} came back without a reward; name one in the request's data")
    return Sample(
        input_ids=trajectory.input_ids,
        output_ids=trajectory.output_ids,
        logprobs=trajectory.output_logprobs,
        reward=trajectory.reward,
        loss_mask=trajectory.loss_mask,
    )


def worker_versions(status: Mapping[str, Any]) -> dict[str, int | None]:
    """Version of every connected worker's weights, by name, from the broker's status; None is unknown."""
    rows = sorted(status["workers"], key=lambda row: str(row["name"]))
    return {str(row["name"]): row["version"] for row in rows}


def _forget_passed(shelf: CheckpointShelf, versions: Mapping[str, int | None]) -> None:
    """Delete checkpoints that every worker has passed; while one is unknown, keep all."""
    known = [version for version in versions.values() if version is not None]
    if known and len(known) == len(versions):
        shelf.remove_older_than(min(known))


def _record(
    version: int,
    batch: Sequence[Group],
    report: StepReport,
    versions: Mapping[str, int | None],
    *,
    seconds: float,
    waited: float,
) -> StepRecord:
    staleness = [version - group.head_version for group in batch]
    return StepRecord(
        step=report.step,
        version=version,
        reward=report.reward_mean,
        staleness_mean=sum(staleness) / len(staleness),
        staleness_max=max(staleness),
        tokens=report.tokens,
        seconds=seconds,
        wait_seconds=waited,
        loss=report.loss,
        grad_norm=report.grad_norm,
        ratio_max=report.ratio_max,
        clipped_fraction=report.clipped_fraction,
        worker_versions=versions,
    )


def _is_over(history: Sequence[StepRecord], config: DemoConfig) -> bool:
    if len(history) >= config.max_steps:
        return True
    return len(history) >= config.window and recent_reward(history, config.window) >= config.target_reward
