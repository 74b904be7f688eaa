"""A real broker process: what it survives, what it refuses, what it costs at rest."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from peers import ScriptedPeer

from rollmq.messages import (
    Deliver,
    Heartbeat,
    HeartbeatAck,
    Query,
    Refusal,
    RefusalCode,
    Report,
    Result,
    ResultItem,
    Resync,
    Settled,
    Started,
    StartedItem,
    Submit,
    SubmitItem,
    Submitted,
    Task,
)
from rollmq.testing import Fleet, local_fleet


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with local_fleet(workers=0, directory=tmp_path) as fleet:
        yield fleet


def run_cli(*args: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rollmq.cli.main", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


def test_an_acknowledged_task_survives_kill_9_of_the_broker(fleet: Fleet) -> None:
    with ScriptedPeer(fleet.address, "math") as trainer:
        trainer.hello_trainer()
        (task,) = trainer.submit("k")
    fleet.kill_broker()
    fleet.start_broker()
    with ScriptedPeer(fleet.address, "w") as worker:
        worker.hello_worker()
        assert [item.task_id for item in worker.receive(Task).items] == [task]


def test_an_acknowledged_result_survives_kill_9_of_the_broker_and_is_delivered(fleet: Fleet) -> None:
    with ScriptedPeer(fleet.address, "math") as trainer, ScriptedPeer(fleet.address, "w") as worker:
        trainer.hello_trainer()
        worker.hello_worker()
        (task,) = trainer.submit("k")
        (item,) = worker.receive(Task).items
        result = Result(worker.session, (ResultItem(task, item.epoch, "0.0", "0.0", 3),), (b"the result",))
        worker.send(result)
        assert worker.receive(Settled).outcomes[0].code is None
    fleet.kill_broker()
    fleet.start_broker()
    with ScriptedPeer(fleet.address, "math") as trainer:
        trainer.hello_trainer()
        delivered = trainer.receive(Deliver)
        assert (delivered.items[0].task_id, delivered.bodies) == (task, (b"the result",))


def test_a_submit_resent_after_a_restart_is_the_same_task(fleet: Fleet) -> None:
    with ScriptedPeer(fleet.address, "math") as trainer:
        trainer.hello_trainer()
        first = trainer.submit("a", "b")
    fleet.kill_broker()
    fleet.start_broker()
    with ScriptedPeer(fleet.address, "math") as trainer:
        trainer.hello_trainer()
        assert trainer.submit("a", "b") == first
    assert fleet.status()["ledger"]["submitted"] == 2


def test_an_old_session_is_told_to_say_hello_again(fleet: Fleet) -> None:
    with ScriptedPeer(fleet.address, "w") as worker:
        worker.hello_worker()
        fleet.kill_broker()
        fleet.start_broker()
        worker.send(Heartbeat(worker.session))
        assert not worker.receive(Resync).final
        worker.send(Started(worker.session, (StartedItem(1, 1, "0.0"),)))
        worker.receive(Resync)


def test_a_session_of_somebody_else_cannot_be_used(fleet: Fleet) -> None:
    with ScriptedPeer(fleet.address, "math") as trainer, ScriptedPeer(fleet.address, "thief") as thief:
        trainer.hello_trainer()
        thief.send(Submit(trainer.session, 1, (SubmitItem("k"),), (b"b",)))
        thief.receive(Resync)
    assert fleet.status()["ledger"]["submitted"] == 0


GARBAGE = [
    [b"\x00" * 100],
    [b"GET / HTTP/1.1"],
    [b"RQ\x01\x05" + b"\xc1" * 10],
    [b"x"] * 5,
    [b"RQ\x01\x14\x80"],
    [b""],
    [b"RQ\x01\x82\x81\xa5tasks\x90"],
]


def test_garbage_is_answered_and_does_not_disturb_others(fleet: Fleet) -> None:
    with ScriptedPeer(fleet.address, "math") as trainer, ScriptedPeer(fleet.address, "bad") as bad:
        trainer.hello_trainer()
        for frames in GARBAGE[:4]:
            bad.send_raw(frames)
            assert bad.receive(Refusal).code is RefusalCode.MALFORMED
        for frames in GARBAGE * 20:
            bad.send_raw(frames)
        assert trainer.submit("k")
        trainer.send(Heartbeat(trainer.session))
        trainer.receive(HeartbeatAck)
    assert fleet.status()["broker"]["counters"]["malformed"] >= 4


def test_a_peer_that_keeps_sending_garbage_loses_its_session(fleet: Fleet) -> None:
    with ScriptedPeer(fleet.address, "math") as trainer, ScriptedPeer(fleet.address, "w") as worker:
        trainer.hello_trainer()
        worker.hello_worker()
        (task,) = trainer.submit("k")
        assert worker.receive(Task).items[0].task_id == task
        for _ in range(5):
            worker.send_raw([b"garbage"])
        assert "malformed" in worker.receive(Resync).reason
        with ScriptedPeer(fleet.address, "good") as good:
            good.hello_worker()
            assert good.receive(Task).items[0].task_id == task


def test_raw_bytes_on_the_port_do_not_disturb_the_broker(fleet: Fleet) -> None:
    host, port = fleet.address.removeprefix("tcp://").split(":")
    for data in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00", b"\xff" + b"\x00" * 8 + b"\x7f", b"\x00" * 5000):
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(data)
    with ScriptedPeer(fleet.address, "math") as trainer:
        trainer.hello_trainer()
        assert trainer.submit("k")


def test_a_silent_worker_loses_its_leases_to_another(tmp_path: Path) -> None:
    args = ("--heartbeat-s", "0.1", "--dead-after-s", "0.5")
    with (
        local_fleet(workers=0, directory=tmp_path, broker_args=args) as fleet,
        ScriptedPeer(fleet.address, "math") as trainer,
        ScriptedPeer(fleet.address, "silent") as silent,
    ):
        trainer.hello_trainer()
        silent.hello_worker()
        (task,) = trainer.submit("k")
        silent.receive(Task)
        assert "silent for" in silent.receive(Resync).reason
        with ScriptedPeer(fleet.address, "next") as worker:
            worker.hello_worker()
            assert worker.receive(Task).items[0].task_id == task


def test_a_broker_that_was_stopped_does_not_take_its_own_absence_for_its_peers(tmp_path: Path) -> None:
    args = ("--heartbeat-s", "0.2", "--dead-after-s", "1.0")
    with (
        local_fleet(workers=0, directory=tmp_path, broker_args=args) as fleet,
        ScriptedPeer(fleet.address, "w") as worker,
    ):
        worker.hello_worker()
        assert fleet.broker is not None
        fleet.broker.process.send_signal(signal.SIGSTOP)
        time.sleep(3.0)  # the stall itself: longer than any session may be silent
        fleet.broker.process.send_signal(signal.SIGCONT)
        worker.send(Heartbeat(worker.session))
        worker.send(Query(worker.session, 1, "status"))
        answer = worker.receive()
        assert isinstance(answer, Report), answer


def test_a_second_broker_on_the_same_journal_is_refused_by_name(fleet: Fleet) -> None:
    done = run_cli("broker", "--bind", "tcp://127.0.0.1:0", "--journal", str(fleet.journal))
    assert done.returncode == 1
    assert str(fleet.journal) in done.stderr
    assert fleet.broker is not None
    assert str(fleet.broker.process.pid) in done.stderr


def test_a_port_in_use_is_named(fleet: Fleet, tmp_path: Path) -> None:
    done = run_cli("broker", "--bind", fleet.address, "--journal", str(tmp_path / "other"))
    assert done.returncode == 2
    assert fleet.address in done.stderr
    assert "Traceback" not in done.stderr


def test_an_address_without_a_broker_is_an_error_within_its_deadline() -> None:
    done = run_cli("status", "--broker", "tcp://127.0.0.1:9", "--timeout", "1")
    assert done.returncode == 1
    assert "127.0.0.1:9" in done.stderr


def test_sigterm_ends_cleanly_and_the_journal_says_so(fleet: Fleet) -> None:
    with ScriptedPeer(fleet.address, "math") as trainer:
        trainer.hello_trainer()
        trainer.submit("k")
        assert fleet.broker is not None
        fleet.broker.process.terminate()
        assert fleet.broker.process.wait(20) == 0
    assert run_cli("log", "verify", str(fleet.journal)).returncode == 0
    done = run_cli("replay", "decisions", str(fleet.journal), "--json")
    assert json.loads(done.stdout)["ledger"]["queued"] == 1


def test_a_draining_broker_and_a_full_one_answer_with_a_reason(fleet: Fleet) -> None:
    with ScriptedPeer(fleet.address, "math") as trainer:
        trainer.hello_trainer()
        items = tuple(SubmitItem(f"k{i}") for i in range(200))
        trainer.send(Submit(trainer.session, 5, items, tuple(b"b" for _ in items)))
        refusal = trainer.receive(Refusal)
        assert (refusal.request, refusal.code) == (5, RefusalCode.TOO_LARGE)
        trainer.send(Submit(trainer.session, 6, items[:100], tuple(b"b" for _ in items[:100])))
        assert len(trainer.receive(Submitted).outcomes) == 100


def test_tasks_and_status_are_shown_for_people_and_as_json(fleet: Fleet) -> None:
    with ScriptedPeer(fleet.address, "math") as trainer:
        trainer.hello_trainer()
        (task,) = trainer.submit("the-key")
        rows = json.loads(run_cli("tasks", "--broker", fleet.address, "--json").stdout)
        assert (rows[0]["task_id"], rows[0]["state"], rows[0]["key"]) == (task, "queued", "the-key")
        assert "math" in run_cli("status", "--broker", fleet.address).stdout
        assert run_cli("tasks", "--broker", fleet.address, "--id", "999").returncode == 1


def test_at_rest_with_two_workers_it_costs_little(fleet: Fleet) -> None:
    """Under 80 MB and 2 % of a core, peers beating every 2 s as real ones do."""
    with ScriptedPeer(fleet.address, "a") as one, ScriptedPeer(fleet.address, "b") as two:
        one.hello_worker()
        two.hello_worker()
        assert fleet.broker is not None
        process = psutil.Process(fleet.broker.process.pid)
        before, start = sum(process.cpu_times()[:2]), time.monotonic()
        for _ in range(4):
            for peer in (one, two):
                peer.send(Heartbeat(peer.session))
                peer.receive(HeartbeatAck)
            time.sleep(2.0)  # the heartbeat interval: what is measured is rest
        share = (sum(process.cpu_times()[:2]) - before) / (time.monotonic() - start)
        assert process.memory_info().rss < 80e6
        assert share < 0.02


def test_a_stopping_broker_refuses_new_tasks_with_the_reason(fleet: Fleet) -> None:
    with ScriptedPeer(fleet.address, "math") as trainer:
        trainer.hello_trainer()
        trainer.submit("before")
        assert fleet.broker is not None
        fleet.broker.process.terminate()
        codes = set()
        for number in range(1000):
            trainer.send(Submit(trainer.session, number, (SubmitItem(f"k{number}"),), (b"b",)))
            answer = trainer.receive()
            if isinstance(answer, Refusal):
                codes.add(answer.code)
                break
        assert codes == {RefusalCode.DRAINING}
        assert fleet.broker.process.wait(20) == 0


def test_a_full_disk_refuses_tasks_and_takes_results(tmp_path: Path) -> None:
    config = tmp_path / "broker.yaml"
    config.write_text(f"disk_floor_bytes: {2**60}\n")
    with local_fleet(workers=0, directory=tmp_path) as fleet:
        with ScriptedPeer(fleet.address, "math") as trainer:
            trainer.hello_trainer()
            (task,) = trainer.submit("k")
        fleet.kill_broker()
        fleet.broker_args = ("--config", str(config))
        fleet.start_broker()
        with ScriptedPeer(fleet.address, "math") as trainer, ScriptedPeer(fleet.address, "w") as worker:
            trainer.hello_trainer()
            trainer.send(Submit(trainer.session, 3, (SubmitItem("more"),), (b"b",)))
            assert trainer.receive(Refusal).code is RefusalCode.DISK_LOW
            worker.hello_worker()
            (item,) = worker.receive(Task).items
            worker.send(Result(worker.session, (ResultItem(task, item.epoch, "0.0", "0.0", 3),), (b"result",)))
            assert worker.receive(Settled).outcomes[0].code is None
            assert trainer.receive(Deliver).items[0].task_id == task


def test_questions_leave_no_trace_in_the_journal(fleet: Fleet) -> None:
    before = fleet.status()["journal"]["last_sequence"]
    assert fleet.status()["journal"]["last_sequence"] == before
