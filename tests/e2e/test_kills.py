"""kill -9 of a worker, the broker and the trainer, each during a run of 500 sim tasks; then replay of that journal."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollmq import GenerationHyperparameters, ModelRequest
from rollmq.testing import Fleet, local_fleet
from trainer_client import RolloutClient

TASKS = 500
SIM = "sim:tpot_ms=2,tokens=16,vocab=300,seed=3"
TIMEOUT_S = 120.0
GREEDY = GenerationHyperparameters(max_new_tokens=16, greedy=True)


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with local_fleet(workers=2, model=SIM, slots=8) as fleet:
        yield fleet


def requests() -> list[ModelRequest]:
    return [ModelRequest([index % 300, index // 300, 7], GREEDY, {"index": index}) for index in range(TASKS)]


def run_cli(*args: str, timeout: float = TIMEOUT_S) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rollmq.cli.main", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


def check_ledger(ledger: dict[str, int]) -> None:
    """Every submitted task is consumed, and the sum holds."""
    assert ledger["submitted"] == sum(count for name, count in ledger.items() if name != "submitted")
    assert ledger["consumed"] == ledger["submitted"], ledger


def test_kill_9_of_worker_and_broker_loses_and_repeats_nothing(fleet: Fleet) -> None:
    with RolloutClient(fleet.address, trainer="killed-fleet", consumer_batch_size=TASKS, timeout=TIMEOUT_S) as client:
        acknowledged = client.submit_many(requests())
        assert len(set(acknowledged)) == TASKS
        seen: dict[int, int] = {}
        for count, task in enumerate(acknowledged):
            if count == 100:
                fleet.kill_worker("worker-0")
                fleet.start_worker("worker-0")
            if count == 250:
                fleet.kill_broker()
                fleet.start_broker()
            trajectory = client.wait(task, timeout=TIMEOUT_S)
            assert trajectory.metadata["index"] == count
            seen[trajectory.task_id] = seen.get(trajectory.task_id, 0) + 1
        assert set(seen) == set(acknowledged) and max(seen.values()) == 1
    check_ledger(fleet.status()["ledger"])


TRAINER = """
import json, os, sys
from rollmq import GenerationHyperparameters, ModelRequest
from trainer_client import RolloutClient

address, checkpoint = sys.argv[1:]
saved = json.load(open(checkpoint)) if os.path.exists(checkpoint) else {"state": None, "taken": []}
gconfig = GenerationHyperparameters(max_new_tokens=16)
requests = [ModelRequest([i % 300, i // 300, 9], gconfig, {"index": i}) for i in range(500)]
bounds = {"consumer_batch_size": 5, "max_head_offpolicyness": 200}
client = RolloutClient(address, trainer="killed-trainer", timeout=120, **bounds)
if saved["state"] is not None:
    client.load_state_dict(saved["state"])
for groups in client.batches(requests, timeout=120):
    saved["taken"] += [t.metadata["index"] for group in groups for t in group]
    saved["state"] = client.state_dict()
    with open(checkpoint + ".new", "w") as file:
        json.dump(saved, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(checkpoint + ".new", checkpoint)
client.close()
"""


def test_kill_9_of_a_trainer_that_keeps_its_state_repeats_and_skips_nothing(tmp_path: Path) -> None:
    script, checkpoint = tmp_path / "trainer.py", tmp_path / "checkpoint.json"
    script.write_text(TRAINER)

    def taken() -> list[int]:
        return json.loads(checkpoint.read_text())["taken"] if checkpoint.exists() else []

    with local_fleet(workers=2, model=SIM, slots=8, directory=tmp_path / "fleet") as fleet:
        for goal in (100, 300, TASKS):
            process = subprocess.Popen([sys.executable, str(script), fleet.address, str(checkpoint)])
            try:
                deadline = time.monotonic() + TIMEOUT_S
                while len(taken()) < goal and process.poll() is None:
                    assert time.monotonic() < deadline, f"{len(taken())} of {goal} taken"
                    time.sleep(0.01)
                if goal < TASKS:
                    os.kill(process.pid, signal.SIGKILL)
                assert process.wait(TIMEOUT_S) == (0 if goal == TASKS else -signal.SIGKILL)
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        assert sorted(taken()) == list(range(TASKS)), "each prompt exactly once"
        check_ledger(fleet.status()["ledger"])


def test_the_journal_of_the_killed_run_replays_with_identical_decisions(fleet: Fleet) -> None:
    done = run_cli("replay", "decisions", str(fleet.journal), "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["identical"] and report["balanced"]
    assert report["ledger"] == fleet.status()["ledger"]
    assert report["ledger"]["submitted"] == TASKS


def test_its_greedy_tasks_give_identical_tokens_on_a_fresh_fleet(fleet: Fleet, tmp_path: Path) -> None:
    with local_fleet(workers=2, model=SIM, slots=8, directory=tmp_path) as fresh:
        done = run_cli("replay", "tasks", str(fleet.journal), "--to", fresh.address, "--json")
    report: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == 0, report
    assert report["identical"] == TASKS
    assert not report["different"]


@pytest.mark.parametrize("part", [0.1, 0.5, 0.9])
def test_a_journal_with_one_altered_record_is_refused_by_sequence(fleet: Fleet, tmp_path: Path, part: float) -> None:
    copy = tmp_path / "journal"
    shutil.copytree(fleet.journal, copy)
    segment = sorted(copy.glob("*"), key=lambda path: path.stat().st_size)[-1]
    data = bytearray(segment.read_bytes())
    position = int(len(data) * part)
    data[position] ^= 0x40
    segment.write_bytes(data)
    for command in (["replay", "decisions", str(copy)], ["log", "verify", str(copy)]):
        done = run_cli(*command)
        assert done.returncode == 1
        assert re.search(r"record \d+", done.stdout + done.stderr)
        assert "Traceback" not in done.stderr


def test_a_sim_fleet_that_fails_hangs_and_crashes_loses_nothing(tmp_path: Path) -> None:
    model = "sim:tpot_ms=1,tokens=8,fail=0.05,crash=0.004"
    with local_fleet(workers=2, model=model, slots=8, directory=tmp_path) as fleet:
        with RolloutClient(fleet.address, trainer="faults", consumer_batch_size=200, timeout=TIMEOUT_S) as client:
            tasks = client.submit_many(requests()[:200])
            attempts = [client.wait(task, timeout=TIMEOUT_S).attempts for task in tasks]
        assert max(attempts) > 1, "faults were injected"
        check_ledger(fleet.status()["ledger"])
