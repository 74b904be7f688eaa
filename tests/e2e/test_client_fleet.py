"""The trainer client against a real broker and sim workers, all as processes."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollmq import GenerationHyperparameters, ModelRequest
from rollmq.errors import DeadlineExceeded, Refused, TaskFailed
from rollmq.testing import Fleet, local_fleet
from trainer_client import AsyncRolloutClient, DiskWeights, RolloutClient

TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with local_fleet(workers=2, model="sim:tpot_ms=1,tokens=8", slots=8) as fleet:
        yield fleet


def prompts(count: int, samples: int = 1, tokens: int = 8, first: int = 1) -> list[ModelRequest]:
    gconfig = GenerationHyperparameters(n_samples=samples, max_new_tokens=tokens)
    return [ModelRequest([first + n, 2, 3], gconfig, {"prompt": n}) for n in range(count)]


def balanced(ledger: dict[str, int]) -> bool:
    return ledger["submitted"] == sum(count for state, count in ledger.items() if state != "submitted")


def test_submit_and_wait(fleet: Fleet) -> None:
    with RolloutClient(fleet.address, trainer="waits", policy="default", timeout=TIMEOUT_S) as client:
        task_ids = client.submit_many(prompts(8))
        for n, task_id in reversed(list(enumerate(task_ids))):
            trajectory = client.wait(task_id, timeout=TIMEOUT_S)
            assert trajectory.task_id == task_id and trajectory.metadata == {"prompt": n}
            assert len(trajectory.output_ids) == 8 and trajectory.head_version == client.version
        key = {"key": "the same"}
        assert client.submit(prompts(1)[0], **key) == client.submit(prompts(1)[0], **key)
        assert [row["task_id"] for row in client.tasks(task_id=task_ids[0])] == task_ids[:1]


@pytest.fixture
def own_fleet() -> Iterator[Fleet]:
    """A fleet of the test's own, for what changes versions or kills processes."""
    with local_fleet(workers=2, model="sim:tpot_ms=1,tokens=8", slots=8) as fleet:
        yield fleet


def test_batches_and_publication_keep_the_staleness_bound(own_fleet: Fleet) -> None:
    with RolloutClient(own_fleet.address, consumer_batch_size=4, timeout=TIMEOUT_S) as client:
        seen: list[int] = []
        for step, batch in enumerate(client.batches(prompts(40, samples=2), timeout=TIMEOUT_S)):
            assert len(batch) == 4 and all(len(group) == 2 for group in batch)
            assert all(0 <= client.version - t.head_version <= 1 for group in batch for t in group)
            seen += [group[0].metadata["prompt"] for group in batch]
            client.publish_weights(DiskWeights("sim:"), step + 1)
        assert sorted(seen) == list(range(40)) and client.left_over == 0 and client.failures == []
        with pytest.raises(Refused, match="stale_version"):
            client.publish_weights(DiskWeights("sim:"), 1)
        # A fleet that simulates its engines takes any source; a real one does not.
        client.publish_weights(DiskWeights(own_fleet.directory / "none"), 99)
    ledger = own_fleet.status()["ledger"]
    assert balanced(ledger) and ledger["consumed"] == 80, ledger


def test_a_batch_beyond_the_staleness_bound_says_that_a_version_is_needed(own_fleet: Fleet) -> None:
    with RolloutClient(own_fleet.address, consumer_batch_size=2, max_head_offpolicyness=0, timeout=TIMEOUT_S) as client:
        stream = client.batches(prompts(20), timeout=TIMEOUT_S)
        next(stream)
        short = client.batches(prompts(20), timeout=1.0)
        with pytest.raises(DeadlineExceeded, match="publish a newer version"):
            next(short)
        client.publish_weights(DiskWeights("sim:"), 1)
        assert len(next(client.batches(prompts(20), timeout=TIMEOUT_S))) == 2


def test_a_wait_survives_kill_9_of_the_broker() -> None:
    with (
        local_fleet(workers=2, model="sim:tpot_ms=100,tokens=10", slots=2) as fleet,
        RolloutClient(fleet.address, consumer_batch_size=8, timeout=TIMEOUT_S) as client,
    ):
        task_ids = client.submit_many(prompts(8, tokens=10))
        assert client.wait(task_ids[0], timeout=TIMEOUT_S).task_id == task_ids[0]
        # Half of the tasks are at work or queued now, and some results may not be acknowledged yet.
        killer = threading.Timer(0.2, lambda: (fleet.kill_broker(), fleet.start_broker()))
        killer.start()
        assert [client.wait(task_id, timeout=TIMEOUT_S).task_id for task_id in task_ids[1:]] == task_ids[1:]
        killer.join()
        more = client.submit_many(prompts(4, tokens=10))
        assert [client.wait(task_id, timeout=TIMEOUT_S).task_id for task_id in more] == more
        client.close()
        ledger = fleet.status()["ledger"]
        assert balanced(ledger) and ledger["consumed"] == 12, ledger


def test_a_cancelled_task_and_an_expired_one_fail_with_their_reason() -> None:
    with local_fleet(workers=0) as fleet, RolloutClient(fleet.address, timeout=TIMEOUT_S) as client:
        cancelled, expired = client.submit(prompts(1)[0]), client.submit(prompts(1)[0], deadline_s=0.5)
        assert client.cancel(cancelled) and not client.cancel(cancelled)
        with pytest.raises(TaskFailed, match="cancelled"):
            client.wait(cancelled, timeout=TIMEOUT_S)
        with pytest.raises(TaskFailed, match="expired"):
            client.wait(expired, timeout=TIMEOUT_S)


TRAINER = """
import json, sys
from rollmq import GenerationHyperparameters, ModelRequest
from trainer_client import DiskWeights, RolloutClient

address, store = sys.argv[1:]
client = RolloutClient(address, trainer="resumed", consumer_batch_size=4, timeout=60)
try:
    saved = json.load(open(store))
    client.load_state_dict(saved["state"])
except FileNotFoundError:
    saved = {"seen": [], "state": client.state_dict()}
gconfig = GenerationHyperparameters(n_samples=2, max_new_tokens=8)
for batch in client.batches([ModelRequest([1 + n, 2], gconfig, {"prompt": n}) for n in range(120)], timeout=60):
    for group in batch:
        assert all(client.version - t.head_version <= 1 for t in group)
        saved["seen"].append(group[0].metadata["prompt"])
    client.publish_weights(DiskWeights("sim:"), client.version + 1)
    saved["state"] = client.state_dict()
    import os
    with open(store + ".new", "w") as file:
        json.dump(saved, file)
    os.replace(store + ".new", store)
    print("step", len(saved["seen"]), flush=True)
client.close()
"""


def test_a_trainer_killed_again_and_again_repeats_and_skips_nothing(own_fleet: Fleet, tmp_path: Path) -> None:
    script, store = tmp_path / "trainer.py", tmp_path / "state.json"
    script.write_text(TRAINER)
    codes = []
    for kills_at in (2, 4, 1, 3, None):
        process = subprocess.Popen(
            [sys.executable, str(script), own_fleet.address, str(store)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        if kills_at is not None:
            for _line in itertools.islice(process.stdout, kills_at):
                pass
            process.kill()
        process.stdout.read()
        codes.append(process.wait(TIMEOUT_S))
    assert codes == [-signal.SIGKILL] * 4 + [0]
    seen = json.loads(store.read_text())["seen"]
    assert sorted(seen) == list(range(120)), "a prompt was repeated or skipped"
    ledger = own_fleet.status()["ledger"]
    assert balanced(ledger) and ledger["consumed"] == 240, ledger


async def test_the_asyncio_client_does_the_same(own_fleet: Fleet) -> None:
    async with AsyncRolloutClient(own_fleet.address, consumer_batch_size=4, timeout=TIMEOUT_S) as client:
        count = 0
        async for batch in client.batches(prompts(12, samples=2), timeout=TIMEOUT_S):
            count += len(batch)
            await client.publish_weights(DiskWeights("sim:"), client.version + 1)
        assert count == 12
        assert balanced((await client.status())["ledger"])
