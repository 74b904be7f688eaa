"""Time becomes events: silence, deadlines, grace, and the broker's own stalls."""

from __future__ import annotations

from broker.core.events import GraceEnded, SessionLost, TasksExpired
from broker.core.timers import Timers

SECOND = 1_000_000_000


def make_timers() -> Timers:
    return Timers(heartbeat_s=2.0, dead_after_s=10.0, lease_s=30.0, now_ns=0)


def due(timers: Timers, now_ns: int) -> list[object]:
    """What is due at a turn that came in time."""
    timers.expect_turn(now_ns)
    return list(timers.due(now_ns))


def test_a_session_is_lost_after_its_silence_and_only_once() -> None:
    timers = make_timers()
    timers.heard(1, 0)
    timers.heard(2, 5 * SECOND)
    assert due(timers, 10 * SECOND) == []
    (event,) = due(timers, 10 * SECOND + 1)
    assert isinstance(event, SessionLost) and event.session == 1
    assert due(timers, 11 * SECOND) == []


def test_a_closed_session_is_forgotten() -> None:
    timers = make_timers()
    timers.heard(1, 0)
    timers.closed(1)
    assert due(timers, 100 * SECOND) == []


def test_a_stall_of_the_broker_pushes_every_deadline_back() -> None:
    timers = make_timers()
    timers.heard(1, 0)
    timers.start_grace(3, 5 * SECOND)
    timers.expect_turn(1 * SECOND)
    assert timers.due(60 * SECOND) == []
    assert due(timers, 64 * SECOND + 1) == [GraceEnded(3)]
    assert [type(e) for e in due(timers, 70 * SECOND)] == [SessionLost]


def test_a_worker_that_beats_without_progress_loses_its_session_after_the_lease() -> None:
    timers = make_timers()
    for second in range(0, 32, 2):
        timers.heard(1, second * SECOND)
        timers.beat(1, progress=7, running=3, now_ns=second * SECOND)
        timers.heard(2, second * SECOND)
        timers.beat(2, progress=second, running=3, now_ns=second * SECOND)
        timers.heard(3, second * SECOND)
        timers.beat(3, progress=7, running=0, now_ns=second * SECOND)
        assert due(timers, second * SECOND) == []
    (event,) = due(timers, 30 * SECOND + 1)
    assert isinstance(event, SessionLost) and event.session == 1
    assert "not moved" in event.reason


def test_tasks_expire_in_batches_at_their_time() -> None:
    timers = make_timers()
    for task in range(300):
        timers.expire_task(task, 5 * SECOND)
    timers.expire_task(999, 6 * SECOND)
    events = due(timers, 5 * SECOND)
    assert [len(e.tasks) for e in events if isinstance(e, TasksExpired)] == [256, 44]
    assert timers.next_ns() == 6 * SECOND


def test_nothing_set_means_nothing_to_wait_for() -> None:
    assert make_timers().next_ns() is None
