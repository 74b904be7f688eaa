"""LeaseTable: what a worker holds, what it owes, and the credit that follows."""

from __future__ import annotations

import pytest

from rollmq.messages import Adoption, Reason, TaskEpoch, TaskItem
from workers.leases import GREETING_LEASES, RESEND_S, WINDOW_BYTES, Failed, Finished, Lease, LeaseTable


def item(task_id: int, epoch: int = 100, attempt: int = 1) -> TaskItem:
    return TaskItem(task_id, epoch, attempt, "default", 60.0, task_id, 0)


def finished(size: int = 10) -> Finished:
    return Finished(b"x" * size, "0.1", "0.1", 5)


def opened_table(places: int = 4, **limits: int) -> LeaseTable:
    table = LeaseTable(places, **limits)
    table.greeting()
    table.opened((), ())
    return table


def take(table: LeaseTable, task_id: int, epoch: int = 100) -> Lease:
    lease, _ = table.receive(item(task_id, epoch), b"body")
    return lease


def test_first_credit_is_all_places() -> None:
    assert opened_table(6).credit() == (6, WINDOW_BYTES)


def test_credit_is_a_running_total_of_what_was_received_and_what_is_free() -> None:
    table = opened_table(4)
    table.credit()
    leases = [take(table, n) for n in range(4)]
    assert table.credit() is None
    table.finish(leases[0], finished())
    assert table.credit() == (5, 16 + WINDOW_BYTES)
    table.drop(1, 100)
    assert table.credit() == (6, 16 + WINDOW_BYTES)


def test_credit_starts_again_with_each_session_less_what_is_still_held() -> None:
    table = opened_table(4)
    table.credit()
    for n in range(3):
        take(table, n)
    table.greeting()
    table.opened([Adoption(n, 100, 200 + n) for n in range(3)], ())
    assert table.credit() == (1, WINDOW_BYTES)


def test_no_credit_while_unsettled_outcomes_hold_too_many_bytes() -> None:
    table = opened_table(2, outcome_bytes=15)
    table.credit()
    for n in range(2):
        table.finish(take(table, n), finished(10))
    assert table.unsettled_bytes == 20
    assert table.credit() is None
    table.settle(0, 100)
    assert table.credit() == (4, 8 + WINDOW_BYTES)


def test_no_credit_while_unsettled_outcomes_are_too_many_for_a_greeting() -> None:
    table = opened_table(2, outcome_count=2)
    table.credit()
    for n in range(2):
        table.finish(take(table, n), Failed(Reason.RETURNED))
    assert table.credit() is None
    assert LeaseTable(2050)._outcome_count + 2050 == GREETING_LEASES


def test_greeting_names_work_and_outcomes() -> None:
    table = opened_table()
    take(table, 1)
    table.finish(take(table, 2), finished())
    table.finish(take(table, 3), Failed(Reason.WORKFLOW_RAISED))
    assert table.greeting() == ((TaskEpoch(1, 100),), (TaskEpoch(2, 100), TaskEpoch(3, 100)))


def test_adopted_leases_answer_under_their_new_epoch() -> None:
    table = opened_table()
    lease = take(table, 1)
    table.greeting()
    result = table.opened([Adoption(1, 100, 777)], ())
    assert result.dropped == () and result.orphans == ()
    assert table.finish(lease, finished())
    assert [due.key for due in table.due(0.0)] == [TaskEpoch(1, 777)]
    assert table.settle(1, 100) is None
    assert table.settle(1, 777) is lease


def test_leases_that_a_welcome_drops_are_gone_with_their_outcomes() -> None:
    table = opened_table()
    working, done = take(table, 1), take(table, 2)
    table.finish(done, finished())
    table.greeting()
    result = table.opened((), [TaskEpoch(1, 100), TaskEpoch(2, 100)])
    assert set(result.dropped) == {working, done}
    assert (table.held, table.unsettled, table.unsettled_bytes) == (0, 0, 0)
    assert not table.finish(working, finished())


def test_a_task_that_came_after_the_greeting_was_made_is_dropped() -> None:
    table = opened_table()
    table.greeting()
    late = take(table, 9)
    assert table.opened((), ()).dropped == (late,)


def test_a_lease_that_a_welcome_does_not_mention_is_kept() -> None:
    table = opened_table()
    take(table, 1)
    table.greeting()
    assert table.opened((), ()).dropped == ()
    assert table.held == 1


def test_an_adoption_of_a_lease_that_is_gone_is_an_orphan() -> None:
    table = opened_table()
    take(table, 1)
    table.greeting()
    table.drop(1, 100)
    assert table.opened([Adoption(1, 100, 200)], ()).orphans == (TaskEpoch(1, 200),)


def test_a_new_dispatch_of_a_held_task_replaces_the_old_one() -> None:
    table = opened_table()
    old = take(table, 1)
    lease, older = table.receive(item(1, epoch=101, attempt=2), b"body")
    assert older is old
    assert not table.finish(old, finished())
    assert table.drop(1, 100) is None
    assert table.finish(lease, finished())


def test_outcomes_are_due_at_once_then_after_growing_pauses_until_settled() -> None:
    table = opened_table()
    table.finish(take(table, 1), finished())
    first, second = RESEND_S[0], RESEND_S[0] * 3
    assert len(table.due(0.0)) == 1
    assert table.due(first - 1) == []
    assert len(table.due(first)) == 1
    assert table.due(second - 1) == []
    assert len(table.due(second)) == 1
    table.settle(1, 100)
    assert table.due(1e9) == []


def test_all_outcomes_are_due_again_in_a_new_session() -> None:
    table = opened_table()
    table.finish(take(table, 1), finished())
    assert table.due(0.0)
    table.greeting()
    table.opened([Adoption(1, 100, 100)], ())
    assert [lease.task_id for lease in table.due(0.1)] == [1]


@pytest.mark.parametrize("second", [finished(), Failed(Reason.RETURNED)])
def test_a_lease_has_one_outcome(second: Finished | Failed) -> None:
    table = opened_table()
    lease = take(table, 1)
    assert table.finish(lease, Failed(Reason.DEADLINE))
    assert not table.finish(lease, second)
    assert lease.outcome == Failed(Reason.DEADLINE)


def test_work_without_an_outcome_is_not_settled() -> None:
    table = opened_table()
    take(table, 1)
    assert table.settle(1, 100) is None
    assert table.held == 1
