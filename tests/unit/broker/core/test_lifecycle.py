"""A task's way from submit to consumed, and every way it can go wrong between."""

from __future__ import annotations

import pytest
from core_world import World

from broker.core.events import GraceEnded
from rollmq import messages as m
from rollmq.messages import Reason, RefusalCode, TaskState


def test_a_task_goes_from_submit_to_consumed_and_the_ledger_balances() -> None:
    world = World()
    trainer, worker = world.trainer(), world.worker()
    (task,) = world.submit(trainer)
    assert world.leased_to(worker) == [task]
    world.start_tasks(worker, task)
    assert world.finish(worker, task) == [None]
    assert world.delivered_to(trainer) == [task]
    world.consume(trainer, task)
    assert world.task(task).state is TaskState.CONSUMED
    assert world.state.ledger.as_dict()["consumed"] == 1


def test_nothing_is_sent_before_its_own_record_is_durable() -> None:
    world = World()
    trainer, _ = world.trainer(), world.worker()
    outcome = world.apply(m.Submit(trainer, 7, (m.SubmitItem("k"),), (b"b",)))
    assert outcome.effects
    assert all(effect.requires == outcome.sequence for effect in outcome.effects if hasattr(effect, "requires"))


def test_the_same_key_and_body_is_the_same_task_and_another_body_a_conflict() -> None:
    world = World()
    trainer = world.trainer()
    (task,) = world.submit(trainer, key="k")
    assert world.submit(trainer, key="k") == [task]
    assert world.state.ledger.submitted == 1
    world.apply(m.Submit(trainer, 9, (m.SubmitItem("k"),), (b"other",)))
    assert world.last(trainer, m.Submitted).outcomes[0].code is RefusalCode.CONFLICT


def test_keys_of_different_trainers_do_not_meet() -> None:
    world = World()
    first = world.trainer("a")
    second = world.trainer("b", owner=False, nonce=b"b" * 16)
    assert world.submit(first, key="k") != world.submit(second, key="k")


def test_late_result_of_an_old_lease_is_refused_and_the_replacement_is_untouched() -> None:
    world = World()
    trainer = world.trainer()
    slow = world.worker("slow")
    (task,) = world.submit(trainer)
    old_epoch = world.task(task).last_epoch
    world.lose(slow)
    fast = world.worker("fast", nonce=b"f" * 16)
    assert world.leased_to(fast) == [task]
    again = world.worker("slow")
    world.apply(m.Result(again, (m.ResultItem(task, old_epoch, "0.0", "0.0", 3),), (b"late",)))
    assert world.last(again, m.Settled).outcomes[0].code is RefusalCode.STALE_EPOCH
    assert world.finish(fast, task) == [None]


def test_a_second_result_of_a_task_is_answered_already_done() -> None:
    world = World()
    trainer, worker = world.trainer(), world.worker()
    (task,) = world.submit(trainer)
    epoch = world.task(task).last_epoch
    world.finish(worker, task)
    world.apply(m.Result(worker, (m.ResultItem(task, epoch, "0.0", "0.0", 3),), (b"again",)))
    assert world.last(worker, m.Settled).outcomes[0].code is RefusalCode.ALREADY_DONE
    assert world.delivered_to(trainer) == [task]


def test_nack_under_an_old_epoch_changes_nothing() -> None:
    world = World()
    trainer, worker = world.trainer(), world.worker()
    (task,) = world.submit(trainer)
    world.apply(m.Nack(worker, (m.NackItem(task, 1, Reason.ENGINE_FAILED),)))
    assert world.last(worker, m.Settled).outcomes[0].code is RefusalCode.STALE_EPOCH
    assert world.task(task).state is TaskState.LEASED


def test_only_started_tasks_are_blamed_when_a_worker_is_lost() -> None:
    world = World(infrastructure_budget=1)
    trainer, worker = world.trainer(batch=10), world.worker()
    poison, innocent = world.submit(trainer, 2)
    world.start_tasks(worker, poison)
    world.lose(worker)
    assert world.task(poison).state is TaskState.DEAD
    assert world.task(innocent).state is TaskState.QUEUED
    assert world.task(innocent).infrastructure_failures == 0


def test_a_task_that_always_fails_becomes_a_dead_letter_and_its_trainer_is_told() -> None:
    world = World(data_budget=3)
    trainer, worker = world.trainer(), world.worker(credit=100)
    (task,) = world.submit(trainer)
    for _ in range(3):
        item = m.NackItem(task, world.task(task).last_epoch, Reason.WORKFLOW_RAISED, "ValueError: no")
        world.apply(m.Nack(worker, (item,)))
    assert world.task(task).state is TaskState.DEAD
    ended = world.last(trainer, m.Ended).items[0]
    assert (ended.task_id, ended.state) == (task, TaskState.DEAD)
    assert "ValueError: no" in ended.reason


def test_a_failed_task_prefers_another_worker_and_dies_only_after_two() -> None:
    world = World(data_budget=2)
    trainer = world.trainer()
    one, two = world.worker("one", nonce=b"1" * 16), world.worker("two", nonce=b"2" * 16)
    (task,) = world.submit(trainer)
    for session in (one, two):
        assert task in world.state.sessions[session].leases
        world.apply(m.Nack(session, (m.NackItem(task, world.task(task).last_epoch, Reason.WORKFLOW_RAISED),)))
    assert world.task(task).state is TaskState.DEAD
    assert world.task(task).blamed == ("one", "two")


def test_cancel_stops_a_leased_task_and_its_result_is_refused() -> None:
    world = World()
    trainer, worker = world.trainer(), world.worker()
    (task,) = world.submit(trainer)
    epoch = world.task(task).last_epoch
    world.apply(m.Cancel(trainer, 5, (task, 999)))
    assert [o.code for o in world.last(trainer, m.Settled).outcomes] == [None, RefusalCode.UNKNOWN_TASK]
    assert world.last(worker, m.Drop).items[0].task_id == task
    world.apply(m.Result(worker, (m.ResultItem(task, epoch, "0.0", "0.0", 1),), (b"r",)))
    assert world.last(worker, m.Settled).outcomes[0].code is RefusalCode.CANCELLED


def test_a_deadline_ends_queued_and_leased_tasks_but_not_finished_ones() -> None:
    world = World()
    trainer, worker = world.trainer(batch=10), world.worker(slots=2)
    done, running, queued = world.submit(trainer, 3)
    world.finish(worker, done)
    world.expire(done, running, queued)
    states = [world.task(t).state for t in (done, running, queued)]
    assert states == [TaskState.DELIVERED, TaskState.EXPIRED, TaskState.EXPIRED]


def test_a_broken_trainer_session_gets_its_unacknowledged_deliveries_again_in_the_same_sequence() -> None:
    world = World()
    trainer, worker = world.trainer(), world.worker()
    tasks = world.submit(trainer, 3)
    world.finish(worker, *reversed(tasks))
    first = [(i.task_id, i.sequence) for d in world.all(trainer, m.Deliver) for i in d.items]
    world.consume(trainer, tasks[-1])
    world.lose(trainer)
    again = world.trainer()
    second = [(i.task_id, i.sequence) for d in world.all(again, m.Deliver) for i in d.items]
    assert second == first[1:]


def test_delivery_stops_at_the_trainers_credit() -> None:
    world = World()
    trainer, worker = world.trainer(batch=10, credit=2), world.worker()
    tasks = world.submit(trainer, 4)
    world.finish(worker, *tasks)
    assert world.delivered_to(trainer) == tasks[:2]
    world.apply(m.Grant(trainer, 3, 1 << 30))
    assert world.delivered_to(trainer) == tasks[:3]


def test_a_worker_holds_no_more_than_its_credit() -> None:
    world = World()
    trainer, slow = world.trainer(batch=100), world.worker("slow", slots=1, credit=2)
    world.submit(trainer, 10)
    assert len(world.leased_to(slow)) == 2


def test_a_new_instance_of_a_worker_supersedes_the_old_one_with_notice() -> None:
    world = World()
    trainer, old = world.trainer(), world.worker("w", nonce=b"1" * 16)
    (task,) = world.submit(trainer)
    new = world.worker("w", nonce=b"2" * 16)
    assert world.last(old, m.Resync).final
    assert world.leased_to(new) == [task]


def test_a_reconnecting_worker_keeps_its_leases_under_new_epochs() -> None:
    world = World()
    trainer, worker = world.trainer(), world.worker()
    held, lost = world.submit(trainer, 2)
    old_epoch = world.task(held).last_epoch
    again = world.worker(held=(m.TaskEpoch(held, old_epoch),))
    (adoption,) = world.last(again, m.Welcome).adopted
    assert (adoption.task_id, adoption.old_epoch) == (held, old_epoch)
    assert adoption.epoch > old_epoch
    assert world.leased_to(again) == [lost]
    assert world.finish(again, held) == [None]
    assert worker not in world.state.sessions


def test_after_a_restart_leases_wait_for_their_worker_and_then_are_requeued_without_blame() -> None:
    world = World()
    trainer, worker = world.trainer(), world.worker()
    kept, given_up = world.submit(trainer, 2)
    world.start_tasks(worker, kept, given_up)
    epochs = {t: world.task(t).last_epoch for t in (kept, given_up)}
    world.start()
    world.worker("other", nonce=b"o" * 16)
    assert world.task(given_up).state is TaskState.LEASED
    again = world.worker(nonce=b"w" * 16, unsent=(m.TaskEpoch(kept, epochs[kept]),))
    assert world.finish(again, kept) == [None]
    assert world.task(given_up).state in (TaskState.QUEUED, TaskState.LEASED)
    assert world.task(given_up).infrastructure_failures == 0


def test_orphaned_leases_are_requeued_when_the_grace_ends() -> None:
    world = World()
    trainer, _ = world.trainer(), world.worker()
    (task,) = world.submit(trainer)
    world.start()
    world.apply(GraceEnded(world.state.broker_epoch))
    assert world.task(task).state is TaskState.QUEUED
    assert world.task(task).reason is Reason.BROKER_RESTARTED


def test_a_claim_on_a_lease_that_somebody_else_has_is_dropped() -> None:
    world = World()
    trainer, slow = world.trainer(), world.worker("slow")
    (task,) = world.submit(trainer)
    epoch = world.task(task).last_epoch
    world.lose(slow)
    world.worker("fast", nonce=b"f" * 16)
    again = world.worker("slow", held=(m.TaskEpoch(task, epoch),))
    assert [d.task_id for d in world.last(again, m.Welcome).dropped] == [task]


def test_goodbye_returns_leases_without_blame() -> None:
    world = World()
    trainer, worker = world.trainer(), world.worker()
    started, waiting = world.submit(trainer, 2)
    world.start_tasks(worker, started)
    world.apply(m.Bye(worker))
    assert world.task(started).infrastructure_failures == 0
    assert {world.task(t).state for t in (started, waiting)} == {TaskState.QUEUED}


def test_a_draining_worker_gets_no_more_tasks() -> None:
    world = World()
    trainer, worker = world.trainer(), world.worker()
    world.apply(m.Drain(worker, 3))
    world.submit(trainer)
    assert world.leased_to(worker) == []


@pytest.mark.parametrize("message", ["submit", "result"])
def test_a_message_of_the_wrong_role_is_refused(message: str) -> None:
    world = World()
    trainer, worker = world.trainer(), world.worker()
    if message == "submit":
        world.apply(m.Submit(worker, 3, (m.SubmitItem("k"),), (b"b",)))
        assert world.last(worker, m.Refusal).code is RefusalCode.NOT_ALLOWED
    else:
        world.apply(m.Result(trainer, (m.ResultItem(1, 1, "0.0", "0.0", 1),), (b"r",)))
        assert world.last(trainer, m.Refusal).code is RefusalCode.NOT_ALLOWED


def test_too_many_open_tasks_are_refused_as_busy() -> None:
    world = World(max_open_tasks=3)
    trainer = world.trainer()
    world.submit(trainer, 3)
    world.apply(m.Submit(trainer, 8, (m.SubmitItem("more"),), (b"b",)))
    refusal = world.last(trainer, m.Refusal)
    assert (refusal.request, refusal.code) == (8, RefusalCode.BUSY)
    assert refusal.retry_after_s > 0


def test_absurd_deadlines_and_costs_are_bounded() -> None:
    from broker.core.fingerprint import state_hash

    world = World()
    trainer, worker = world.trainer(), world.worker()
    tasks = world.submit(trainer, 4, deadline_s=1e300, cost=2**62)
    assert world.leased_to(worker) == tasks
    assert state_hash(world.state) == world.replayed_hash()


def test_ended_tasks_are_forgotten_beyond_the_retention() -> None:
    world = World(retain_ended=2)
    trainer, worker = world.trainer(batch=100), world.worker(credit=100)
    tasks = world.submit(trainer, 5)
    world.finish(worker, *tasks)
    world.consume(trainer, *tasks)
    assert sorted(world.state.tasks) == tasks[3:]
    assert world.state.ledger.as_dict()["consumed"] == 5


def test_a_replay_of_the_same_events_gives_the_same_decisions_and_hash() -> None:
    from broker.core.fingerprint import state_hash

    world = World()
    trainer, worker = world.trainer(eta=1), world.worker(credit=50)
    tasks = world.submit(trainer, 6)
    world.start_tasks(worker, *tasks)
    world.finish(worker, *tasks[:4])
    world.consume(trainer, *tasks[:3])
    world.publish(trainer, 1)
    world.lose(worker)
    world.worker("next", nonce=b"n" * 16, label="0.0")
    world.start()
    assert world.replayed_hash() == state_hash(world.state)
