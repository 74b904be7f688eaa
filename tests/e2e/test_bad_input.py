"""Bad input through the whole system: a clear error that names the thing, within seconds, and other tasks go on."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from examples.tiny_model import make_tiny_model
from rollmq import GenerationHyperparameters, ModelRequest
from rollmq.errors import ConfigError, Refused, TaskFailed
from rollmq.testing import Fleet, local_fleet
from trainer_client import DiskWeights, RolloutClient

TIMEOUT_S = 60.0
SUPPORT = Path(__file__).resolve().parents[1] / "support"
SHORT = GenerationHyperparameters(max_new_tokens=4)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two embedded workers with a real tiny model and a user's workflows and rewards."""
    directory = tmp_path_factory.mktemp("bad-input")
    model = make_tiny_model(directory / "model", max_position=128)
    config = directory / "worker.yaml"
    config.write_text(
        "workflows: {raising: user_code:RaisingWorkflow}\n"
        "rewards: {length: user_code:length_reward, hanging: user_code:hanging_reward}\n"
        "reward_timeout_s: 0.5\n"
        "engine_args: [--threads, '1']\n"
        "engine_env: {OMP_NUM_THREADS: '1'}\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(SUPPORT))
        arguments = ("--config", str(config))
        with local_fleet(workers=2, model=str(model), slots=4, worker_args=arguments, directory=directory) as fleet:
            yield fleet


@pytest.fixture(scope="module")
def client(fleet: Fleet) -> Iterator[RolloutClient]:
    with RolloutClient(fleet.address, trainer="bad", consumer_batch_size=1000, timeout=TIMEOUT_S) as client:
        yield client


def run_worker(*args: str) -> subprocess.CompletedProcess[str]:
    """A worker that is expected to end by itself, soon."""
    command = [sys.executable, "-m", "rollmq.cli.main", "worker", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def check_named(done: subprocess.CompletedProcess[str], *names: str) -> None:
    assert done.returncode in (1, 2)
    assert "Traceback" not in done.stderr
    for name in names:
        assert name in done.stderr, done.stderr


def test_good_tasks_go_on_beside_each_bad_one(client: RolloutClient) -> None:
    bad = [
        client.submit(ModelRequest([1, 2], SHORT), workflow="raising"),
        client.submit(ModelRequest([1, 2], SHORT), workflow="unheard-of"),
        client.submit(ModelRequest([1, 2], SHORT), data={"reward": "hanging"}),
        client.submit(ModelRequest([1, 2], SHORT), data={"reward": "unheard-of"}),
        client.submit(ModelRequest([1, 5000], SHORT)),
        client.submit(ModelRequest([1] * 200, SHORT)),
    ]
    good = [client.submit(ModelRequest([1, i], SHORT), data={"reward": "length"}) for i in range(20)]
    for task in good:
        trajectory = client.wait(task, timeout=TIMEOUT_S)
        assert trajectory.reward == len(trajectory.output_ids)
    for task in bad:
        with pytest.raises(TaskFailed) as error:
            client.wait(task, timeout=TIMEOUT_S)
        assert error.value.state == "dead"


@pytest.mark.parametrize(
    ("submit", "words"),
    [
        (lambda c: c.submit(ModelRequest([1], SHORT), workflow="raising"), ("ValueError", "row 17")),
        (lambda c: c.submit(ModelRequest([1], SHORT), workflow="nope"), ("nope", "generate")),
        (lambda c: c.submit(ModelRequest([1], SHORT), data={"reward": "hanging"}), ("hanging", "0.5")),
        (lambda c: c.submit(ModelRequest([1, 5000], SHORT)), ("5000", "320")),
        (lambda c: c.submit(ModelRequest([1] * 200, SHORT)), ("200", "128")),
        (lambda c: c.submit(ModelRequest([1], GenerationHyperparameters(max_new_tokens=4, stop=("x",)))), ("stop",)),
    ],
)
def test_the_reason_of_a_dead_task_names_what_was_wrong(
    client: RolloutClient, submit: Callable[[RolloutClient], int], words: tuple[str, ...]
) -> None:
    with pytest.raises(TaskFailed) as error:
        client.wait(submit(client), timeout=TIMEOUT_S)
    for word in words:
        assert word in str(error.value)


def test_a_task_with_several_samples_is_pointed_to_groups(client: RolloutClient) -> None:
    with pytest.raises(ConfigError, match="submit_group"):
        client.submit(ModelRequest([1], GenerationHyperparameters(n_samples=2)))


def test_a_deadline_that_passes_is_an_expired_task(client: RolloutClient) -> None:
    slow = GenerationHyperparameters(max_new_tokens=100, ignore_eos=True)
    tasks = [client.submit(ModelRequest([1, i], slow), deadline_s=0.01) for i in range(20)]
    states = set()
    for task in tasks:
        try:
            client.wait(task, timeout=TIMEOUT_S)
        except TaskFailed as error:
            states.add(error.state)
    assert states == {"expired"}


def test_weights_that_do_not_exist_are_refused_before_they_are_published(client: RolloutClient, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="missing"):
        client.publish_weights(DiskWeights(tmp_path / "missing"), version=1)
    with pytest.raises(ConfigError, match="no file"):
        client.publish_weights(DiskWeights(tmp_path), version=1)
    assert client.version == 0


def test_weights_that_cannot_be_loaded_fence_the_workers_and_good_ones_free_them(
    client: RolloutClient, fleet: Fleet, tmp_path: Path
) -> None:
    """The bound is 1 version, so version 2 is what the fleet must have."""
    other_shape = make_tiny_model(tmp_path / "other", hidden_size=128, max_position=128)
    good = make_tiny_model(tmp_path / "good", seed=5, max_position=128)
    client.publish_weights(DiskWeights(other_shape), version=client.version + 1)
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        workers = client.status()["workers"]
        if len(workers) == 2 and all(w["weights"] == "fenced" for w in workers):
            break
        assert time.monotonic() < deadline, workers
        time.sleep(0.05)
    assert all("shape" in w["detail"] for w in workers), workers
    client.publish_weights(DiskWeights(good), version=client.version + 1)
    trajectory = client.wait(client.submit(ModelRequest([1, 2], SHORT)), timeout=TIMEOUT_S)
    assert trajectory.head_version == client.version


def test_a_version_that_does_not_grow_is_refused(client: RolloutClient, tmp_path: Path) -> None:
    good = make_tiny_model(tmp_path / "good", max_position=128)
    with pytest.raises(Refused, match="does not grow"):
        client.publish_weights(DiskWeights(good), version=client.version)


def test_a_missing_model_directory_is_named(fleet: Fleet, tmp_path: Path) -> None:
    missing = str(tmp_path / "no-such-model")
    check_named(run_worker("--broker", fleet.address, "--name", "x", "--model", missing), missing)


def test_a_wrong_python_is_named(fleet: Fleet, tmp_path: Path) -> None:
    python = str(tmp_path / "no-such-python")
    model = str(make_tiny_model(tmp_path / "model"))
    arguments = ("--broker", fleet.address, "--name", "x", "--model", model, "--engine", "vllm", "--python", python)
    check_named(run_worker(*arguments), python)


def test_a_server_that_exits_at_start_is_reported_with_code_log_and_last_lines(fleet: Fleet, tmp_path: Path) -> None:
    arguments = ("--broker", fleet.address, "--name", "x", "--model", "sim:", "--log-dir", str(tmp_path))
    done = run_worker(*arguments, "--engine-arg=--no-such-argument")
    check_named(done, "no-such-argument", "code 2", str(tmp_path))


def test_two_trainers_cannot_own_one_policy(fleet: Fleet, client: RolloutClient) -> None:
    with pytest.raises(Refused, match="owned by trainer bad"):
        RolloutClient(fleet.address, trainer="other", timeout=TIMEOUT_S)


def test_an_address_without_a_broker_is_named_within_the_timeout() -> None:
    with pytest.raises(Exception, match=r"127\.0\.0\.1:9"):
        RolloutClient("tcp://127.0.0.1:9", timeout=1.0)


def test_the_ledger_balances_after_all_of_it(client: RolloutClient) -> None:
    ledger = client.status()["ledger"]
    assert ledger["submitted"] == sum(count for name, count in ledger.items() if name != "submitted")
    assert ledger["dead"] >= 12
