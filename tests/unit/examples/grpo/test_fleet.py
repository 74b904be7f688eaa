"""Processes of a run: started with a marker, ended for certain, and named when they end by themselves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from examples.grpo.fleet import Fleet, RoleEnded

DEADLINE_S = 60.0


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {DEADLINE_S:g} s"
        time.sleep(0.05)


def broker_is_ready(fleet: Fleet) -> bool:
    fleet.check(least_workers=0)
    return fleet.address in (fleet.log_dir / "broker.log").read_text(encoding="utf-8")


def test_leaving_the_fleet_ends_its_broker(tmp_path: Path) -> None:
    with Fleet(tmp_path, stop_timeout_s=20.0) as fleet:
        fleet.start_broker()
        wait_for(lambda: broker_is_ready(fleet), "ready line of the broker")
        assert len(fleet.survivors()) >= 1
    assert fleet.survivors() == []
    assert (tmp_path / "journal").is_dir()


def test_an_error_inside_ends_the_broker_too(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), Fleet(tmp_path, stop_timeout_s=20.0) as fleet:
        fleet.start_broker()
        raise KeyboardInterrupt
    assert fleet.survivors() == []


def test_stopping_twice_is_harmless(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, stop_timeout_s=20.0)
    fleet.start_broker()
    assert fleet.stop() == []
    assert fleet.stop() == []


def test_a_broker_that_ends_by_itself_is_named_with_its_log(tmp_path: Path) -> None:
    (tmp_path / "journal").write_text("a file where the directory should be", encoding="utf-8")

    def has_ended(fleet: Fleet) -> bool:
        try:
            fleet.check(least_workers=0)
        except RoleEnded as error:
            assert "broker of the demo ended with code" in str(error)
            assert "broker.log" in str(error)
            return True
        return False

    with Fleet(tmp_path, stop_timeout_s=20.0) as fleet:
        fleet.start_broker()
        wait_for(lambda: has_ended(fleet), "end of the broker")


def test_the_broker_dies_with_a_killed_demo(tmp_path: Path) -> None:
    code = (
        "import sys, time, pathlib; from examples.grpo.fleet import Fleet;"
        f"fleet = Fleet(pathlib.Path({str(tmp_path)!r}), 5.0); fleet.start_broker();"
        "print(*fleet.survivors(), flush=True); time.sleep(600)"
    )
    demo = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert demo.stdout is not None
        pids = [int(word) for word in demo.stdout.readline().split()]
        assert pids
    finally:
        demo.send_signal(signal.SIGKILL)
        demo.wait(DEADLINE_S)
        if demo.stdout is not None:
            demo.stdout.close()
    wait_for(lambda: not any(is_running(pid) for pid in pids), "end of the broker")


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
