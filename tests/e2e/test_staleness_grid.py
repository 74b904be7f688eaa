"""AReaL's staleness grid through a real broker and two sim workers, and the promise about every delivery."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from rollmq import GenerationHyperparameters, ModelRequest
from rollmq.testing import Fleet, local_fleet
from trainer_client import DiskWeights, RolloutClient

TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with local_fleet(workers=2, model="sim:tpot_ms=0,tokens=4", slots=16) as fleet:
        yield fleet


def connect(fleet: Fleet, batch: int, eta: int, **more: Any) -> RolloutClient:
    """The one trainer of the policy; each cell is a new incarnation with other bounds."""
    return RolloutClient(
        fleet.address,
        trainer="grid",
        consumer_batch_size=batch,
        max_head_offpolicyness=eta,
        timeout=TIMEOUT_S,
        **more,
    )


def submit(client: RolloutClient, count: int, tokens: int = 4) -> list[int]:
    gconfig = GenerationHyperparameters(max_new_tokens=tokens)
    return [client.submit(ModelRequest([1 + i, 2, 3], gconfig)) for i in range(count)]


def settle(client: RolloutClient, done: int, started_at: int) -> int:
    """Waits until `done` tasks of this cell have results or no more can start; returns how many have."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        status = client.status()
        ledger, policy = status["ledger"], status["policies"]["default"]
        finished = ledger["ready"] + ledger["delivered"] + ledger["consumed"] - started_at
        if finished >= done:
            return int(finished)
        if ledger["leased"] == 0 and ledger["queued"] > 0 and policy["capacity"] <= 0:
            return int(finished)
        time.sleep(0.02)
    raise AssertionError(f"neither done nor exhausted: {client.status()}")


def finished_now(client: RolloutClient) -> int:
    ledger = client.status()["ledger"]
    return int(ledger["ready"] + ledger["delivered"] + ledger["consumed"])


def next_version(client: RolloutClient) -> None:
    client.publish_weights(DiskWeights("sim"), version=client.version + 1, check=False)


def drain_budget(client: RolloutClient, batch: int) -> None:
    """Versions until nothing of an earlier cell counts any more."""
    while client.status()["policies"]["default"]["consumed_since_version"]:
        next_version(client)


@pytest.mark.parametrize("eta", [0, 1, 4, 16])
@pytest.mark.parametrize("batch", [2, 4])
def test_double_batches_complete_only_within_the_bound(fleet: Fleet, eta: int, batch: int) -> None:
    with connect(fleet, batch, eta) as client:
        drain_budget(client, batch)
        for needed in (1, 2):
            before = finished_now(client)
            tasks = submit(client, 2 * batch)
            assert (settle(client, 2 * batch, before) == 2 * batch) == (eta >= needed)
            if eta < needed:
                for task in tasks:
                    client.cancel(task)
                break
            for task in tasks:
                trajectory = client.wait(task, timeout=TIMEOUT_S)
                assert client.version - trajectory.head_version <= eta
            next_version(client)


def test_no_delivered_trajectory_is_too_old_stragglers_included(fleet: Fleet) -> None:
    eta, batch = 1, 4
    # One prompt in five is long: it spans versions and is started again when it can no longer be delivered.
    requests = [
        ModelRequest([7, i % 250], GenerationHyperparameters(max_new_tokens=400 if i % 5 == 0 else 2, ignore_eos=True))
        for i in range(60)
    ]
    ages: list[int] = []
    with connect(fleet, batch, eta) as client:
        drain_budget(client, batch)
        for groups in client.batches(requests, timeout=TIMEOUT_S):
            assert len(groups) == batch
            ages += [client.version - group.head_version for group in groups]
            next_version(client)
    assert len(ages) == 60
    assert max(ages) <= eta
