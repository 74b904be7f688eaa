"""Admission and freshness: AReaL's grid in the core, groups, stragglers, publishing and going back."""

from __future__ import annotations

import pytest
from core_world import World

from broker.core.staleness import StalenessController
from rollmq import messages as m
from rollmq.messages import OnStale, PolicySettings, Reason, RefusalCode, TaskState


def controller(batch: int, eta: int, concurrent: int | None = None) -> StalenessController:
    return StalenessController(PolicySettings(batch, eta, concurrent, OnStale.RETRY))


@pytest.mark.parametrize("batch", [1, 2, 3, 7])
@pytest.mark.parametrize("eta", [0, 1, 4])
def test_capacity_is_the_papers_bound_with_constant_batches(batch: int, eta: int) -> None:
    """floor((N - 1) / B) <= v + eta for the next group, arXiv 2505.24298 eq. 3."""
    for version in (0, 1, 5):
        for submitted in range(version * batch, version * batch + 60):
            rule = controller(batch, eta)
            rule.running = submitted - version * batch
            assert (rule.capacity() > 0) == (submitted // batch <= version + eta)


def test_capacity_also_obeys_the_concurrency_limit() -> None:
    rule = controller(8, 4, concurrent=3)
    rule.running, rule.ready = 2, 5
    assert rule.capacity() == 1


def test_capacity_may_be_negative_and_rejected_work_gives_its_budget_back() -> None:
    world = World()
    trainer, worker = world.trainer(batch=2, eta=0), world.worker()
    first, second, third = world.submit(trainer, 3)
    assert world.leased_to(worker) == [first, second]
    world.apply(m.Cancel(trainer, 3, (first,)))
    assert world.leased_to(worker) == [first, second, third]


@pytest.mark.parametrize("eta", [0, 1, 4, 16])
@pytest.mark.parametrize("batch", [2, 4])
def test_areals_grid_of_double_batches(eta: int, batch: int) -> None:
    """Two batches at once complete iff eta >= 1; after one version, another two iff eta >= 2."""
    world = World()
    trainer, worker = world.trainer(batch=batch, eta=eta), world.worker(slots=64, credit=1000)
    for version, needed in ((0, 1), (1, 2)):
        tasks = world.submit(trainer, 2 * batch)
        leased = [t for t in tasks if world.task(t).state is TaskState.LEASED]
        assert (len(leased) == 2 * batch) == (eta >= needed)
        world.finish(worker, *leased, head=world.state.policies["default"].versions.news.label)
        world.consume(trainer, *leased)
        if len(leased) < 2 * batch:
            return
        world.publish(trainer, version + 1)
        world.weights(worker, f"1.{version + 1}")


@pytest.mark.parametrize("eta", [0, 1, 4, 16])
@pytest.mark.parametrize("batch", [2, 4])
def test_the_grid_of_submissions_without_a_version(eta: int, batch: int) -> None:
    world = World()
    trainer, worker = world.trainer(batch=batch, eta=eta), world.worker(slots=64, credit=1000)
    for version in range(3):
        tasks = world.submit(trainer, 2 * batch)
        leased = [t for t in tasks if world.task(t).state is TaskState.LEASED]
        # Of 2B submissions per version, B (eta + 1) may be out at once, of which earlier rounds hold what they hold.
        allowed = max(0, min(2 * batch, (eta + 1) * batch - version * batch))
        assert len(leased) == allowed
        world.weights(worker, f"{1 if version else 0}.{version}")
        world.finish(worker, *leased, head=f"{1 if version else 0}.{version}")
        world.consume(trainer, *leased[:batch])
        if len(leased) < 2 * batch:
            break
        world.publish(trainer, version + 1)


def test_the_budget_does_not_inflate_when_batches_vary() -> None:
    """AReaL V15: half of each batch rejected; the headroom must stay within (eta + 1) B."""
    world = World()
    trainer, worker = world.trainer(batch=4, eta=1), world.worker(slots=64, credit=10_000)
    for version in range(1, 13):
        tasks = world.submit(trainer, 2)
        leased = [t for t in tasks if world.task(t).state is TaskState.LEASED]
        world.finish(worker, *leased, head=world.state.policies["default"].versions.news.label)
        world.consume(trainer, *leased)
        world.publish(trainer, version)
        world.weights(worker, f"1.{version}")
        assert world.state.policies["default"].staleness.capacity() <= 8


def test_a_trainer_that_lost_its_batch_gets_another_at_the_same_version() -> None:
    """It consumed B, crashed before publishing, and has no state: with eta = 0 it would otherwise wait for ever."""
    world = World()
    trainer, worker = world.trainer(batch=2, eta=0), world.worker(credit=100)
    tasks = world.submit(trainer, 2)
    world.finish(worker, *tasks)
    world.consume(trainer, *tasks)
    restarted = world.trainer(batch=2, eta=0, nonce=b"n" * 16)
    again = world.submit(restarted, 2)
    assert world.leased_to(worker) == [*tasks, *again]


def test_a_reconnect_of_the_same_instance_keeps_what_was_consumed() -> None:
    world = World()
    trainer, worker = world.trainer(batch=2, eta=0), world.worker(credit=100)
    tasks = world.submit(trainer, 2)
    world.finish(worker, *tasks)
    world.consume(trainer, *tasks)
    reconnected = world.trainer(batch=2, eta=0)
    world.submit(reconnected, 2)
    assert world.leased_to(worker) == tasks


def test_smaller_bounds_leave_room_for_a_batch_after_one_version() -> None:
    rule = controller(batch=4, eta=1)
    rule.consumed_since_version = 3000
    rule.version_published()
    assert rule.capacity() == 4


def test_a_restart_at_a_high_version_keeps_the_budget() -> None:
    """AReaL 1388: at version 40 the budget is (eta + 1) B, not 40 B."""
    world = World()
    trainer = world.trainer(batch=4, eta=1)
    world.publish(trainer, 40)
    world.start()
    trainer, worker = world.trainer(batch=4, eta=1), world.worker(slots=500, label="1.40")
    world.submit(trainer, 100)
    assert len(world.leased_to(worker)) == 8


def test_a_group_is_one_unit_of_the_budget_and_is_not_split_by_it() -> None:
    world = World()
    trainer, worker = world.trainer(batch=1, eta=0), world.worker(slots=3, credit=3)
    first = world.submit_group(trainer, "a", 4)
    second = world.submit_group(trainer, "b", 4)
    assert world.leased_to(worker) == first[:3]
    world.apply(m.Grant(worker, 8, 1 << 30))
    assert world.leased_to(worker) == first
    world.finish(worker, *first)
    world.consume(trainer, *first)
    assert not set(second) & set(world.leased_to(worker))
    world.publish(trainer, 1)
    world.weights(worker, "1.1")
    assert world.leased_to(worker) == first + second


def test_only_the_missing_member_of_a_group_is_run_again() -> None:
    world = World()
    trainer, worker = world.trainer(batch=1, eta=0), world.worker(credit=100)
    tasks = world.submit_group(trainer, "a", 3)
    world.finish(worker, tasks[0], tasks[1])
    world.apply(m.Nack(worker, (m.NackItem(tasks[2], world.task(tasks[2]).last_epoch, Reason.ENGINE_FAILED),)))
    assert world.leased_to(worker) == [*tasks, tasks[2]]


def test_a_group_whose_members_all_went_back_competes_again() -> None:
    world = World()
    trainer, worker = world.trainer(batch=1, eta=0), world.worker(credit=100)
    first = world.submit_group(trainer, "a", 2)
    world.lose(worker)
    assert not world.state.groups[first[0]].admitted
    again = world.worker("again", nonce=b"a" * 16, credit=100)
    assert world.leased_to(again) == first


def test_a_worker_with_unknown_or_too_old_weights_gets_no_tasks() -> None:
    world = World()
    trainer = world.trainer(eta=1)
    unknown, unpublished = world.worker("u", label="", nonce=b"u" * 16), world.worker("x", label="7.7", nonce=b"x" * 16)
    world.submit(trainer)
    assert world.leased_to(unknown) == world.leased_to(unpublished) == []
    world.weights(unknown, "default")
    assert world.leased_to(unknown) == []
    world.publish(trainer, 1)
    world.publish(trainer, 2)
    world.weights(unknown, "0.0")
    assert world.leased_to(unknown) == []
    world.weights(unknown, "1.1")
    assert len(world.leased_to(unknown)) == 1


def test_a_fenced_or_updating_worker_gets_no_tasks() -> None:
    world = World()
    trainer, worker = world.trainer(), world.worker(label="")
    for state in (m.WeightState.FENCED, m.WeightState.UPDATING):
        world.weights(worker, "0.0", state)
        world.submit(trainer)
        assert world.leased_to(worker) == []


def test_a_version_sweeps_what_is_too_old_and_touches_nothing_else() -> None:
    world = World()
    trainer, worker = world.trainer(batch=8, eta=1, credit=0), world.worker(credit=100)
    ready, running, waiting = world.submit(trainer, 3)
    world.start_tasks(worker, ready, running)
    world.finish(worker, ready)
    world.publish(trainer, 1)
    assert world.all(worker, m.Drop) == []
    assert world.task(ready).state is TaskState.READY
    world.weights(worker, "1.1")
    world.publish(trainer, 2)
    dropped = [item.task_id for d in world.all(worker, m.Drop) for item in d.items]
    assert dropped == [running], "a prefetched task starts on new weights and is not touched"
    assert world.task(ready).reason is Reason.STALE_VERSION
    assert world.task(waiting).attempts == 1
    assert "head version 0, consumer version 2" in world.task(ready).detail


def test_a_straggler_is_never_delivered_too_old() -> None:
    world = World()
    trainer, worker = world.trainer(batch=4, eta=1), world.worker(credit=100)
    (straggler,) = world.submit(trainer)
    epoch = world.task(straggler).last_epoch
    for version in (1, 2):
        world.publish(trainer, version)
        world.weights(worker, f"1.{version}")
    world.apply(m.Result(worker, (m.ResultItem(straggler, epoch, "0.0", "1.2", 5),), (b"r",)))
    assert world.last(worker, m.Settled).outcomes[0].code is RefusalCode.STALE_VERSION
    assert world.delivered_to(trainer) == []
    assert world.task(straggler).state is TaskState.LEASED, "run again at the current version"


def test_work_that_starts_too_old_is_taken_back_at_once() -> None:
    world = World()
    trainer, worker = world.trainer(eta=0), world.worker(credit=100)
    (task,) = world.submit(trainer)
    epoch = world.task(task).last_epoch
    world.publish(trainer, 1)
    world.apply(m.Started(worker, (m.StartedItem(task, epoch, "0.0"),)))
    assert world.last(worker, m.Drop).items[0].epoch == epoch


@pytest.mark.parametrize(("on_stale", "state"), [("drop", TaskState.STALE), ("deliver", TaskState.DELIVERED)])
def test_on_stale_drop_and_deliver(on_stale: str, state: TaskState) -> None:
    world = World()
    trainer, worker = world.trainer(eta=0, on_stale=on_stale), world.worker(credit=100)
    (task,) = world.submit(trainer)
    world.publish(trainer, 1)
    world.finish(worker, task)
    assert world.task(task).state is state
    if state is TaskState.DELIVERED:
        assert world.last(trainer, m.Deliver).items[0].stale
    else:
        assert world.last(trainer, m.Ended).items[0].state is TaskState.STALE


def test_a_result_under_a_label_that_was_never_published_is_not_accepted() -> None:
    world = World()
    trainer, worker = world.trainer(), world.worker(credit=100)
    (task,) = world.submit(trainer)
    assert world.finish(worker, task, head="default") == [RefusalCode.STALE_VERSION]
    assert world.task(task).infrastructure_failures == 1


def test_a_trajectory_that_aged_in_the_clients_hands_is_run_again_under_a_new_sequence() -> None:
    world = World()
    trainer, worker = world.trainer(eta=0), world.worker(credit=100)
    (task,) = world.submit(trainer)
    world.finish(worker, task)
    world.publish(trainer, 1)
    world.apply(m.HandBack(trainer, 4, (task,)))
    world.weights(worker, "1.1")
    world.finish(worker, task, head="1.1")
    sequences = [i.sequence for d in world.all(trainer, m.Deliver) for i in d.items]
    assert sequences == [1, 2]


def test_only_the_owner_publishes_and_versions_grow() -> None:
    world = World()
    owner = world.trainer("a")
    other = world.trainer("b", owner=False, nonce=b"b" * 16)
    assert world.publish(other, 1).code is RefusalCode.NOT_ALLOWED
    assert world.publish(owner, 3).news.version == 3
    assert world.publish(owner, 3).code is RefusalCode.STALE_VERSION


def test_a_new_incarnation_of_the_owner_raises_the_run_epoch_and_ends_the_old_one() -> None:
    world = World()
    old = world.trainer()
    world.publish(old, 1)
    new = world.trainer(nonce=b"n" * 16)
    assert world.last(old, m.Resync).final
    assert world.last(new, m.Welcome).policy_epoch == 2
    assert world.publish(new, 2).news.label == "2.2"


def test_a_second_owner_is_refused() -> None:
    world = World()
    world.trainer("a")
    settings = PolicySettings(4, 0, None, OnStale.RETRY)
    outcome = world.apply(m.Hello(m.Role.TRAINER, "b", b"b" * 16, settings=settings))
    assert outcome.effects[0].message.code is RefusalCode.CONFLICT


def test_a_restored_trainer_gets_what_it_had_not_taken_and_nothing_else() -> None:
    world = World()
    trainer, worker = world.trainer(batch=10), world.worker(credit=100)
    tasks = world.submit(trainer, 5)
    world.finish(worker, *tasks)
    world.consume(trainer, *tasks)
    restored = world.hello(
        m.Hello(m.Role.TRAINER, "math", b"r" * 16, settings=PolicySettings(10, 0, None, OnStale.RETRY))
    )
    world.apply(m.Resume(restored, 2, version=0, cursor=2, taken=(4,)))
    assert world.last(restored, m.Resumed).rewound == 2
    world.apply(m.Grant(restored, 100, 1 << 30))
    assert world.delivered_to(restored) == [tasks[2], tasks[4]]


def test_a_trainer_restored_at_an_earlier_version_takes_the_policy_back() -> None:
    world = World()
    trainer, worker = world.trainer(batch=10, eta=4), world.worker(credit=100)
    world.publish(trainer, 1)
    world.weights(worker, "1.1")
    world.publish(trainer, 2)
    world.weights(worker, "1.2")
    old, new = world.submit(trainer, 2)
    world.finish(worker, old, head="1.1")
    restored = world.hello(
        m.Hello(m.Role.TRAINER, "math", b"r" * 16, settings=PolicySettings(10, 4, None, OnStale.RETRY))
    )
    world.apply(m.Resume(restored, 2, version=1, cursor=0, taken=()))
    assert world.last(restored, m.Resumed).news.label == "1.1"
    assert world.task(new).state is not TaskState.READY
    world.weights(worker, "1.2")
    assert world.state.policies["default"].versions.version_of("1.2") is None, "the lineage of version 2 is abandoned"
    assert world.publish(restored, 2).news.label == "2.2"


@pytest.mark.parametrize(("version", "cursor"), [(9, 0), (0, 7)])
def test_a_checkpoint_of_another_journal_is_refused(version: int, cursor: int) -> None:
    world = World()
    trainer = world.trainer()
    world.apply(m.Resume(trainer, 2, version=version, cursor=cursor, taken=()))
    assert world.last(trainer, m.Refusal).code is RefusalCode.CONFLICT


def test_what_an_abandoned_version_produced_is_run_again_after_going_back() -> None:
    world = World()
    trainer, worker = world.trainer(batch=10, eta=4), world.worker(credit=100)
    world.publish(trainer, 1)
    world.weights(worker, "1.1")
    world.publish(trainer, 2)
    world.weights(worker, "1.2")
    of_1, of_2 = world.submit(trainer, 2)
    world.finish(worker, of_1, head="1.1")
    world.finish(worker, of_2, head="1.1", tail="1.2")
    world.consume(trainer, of_1, of_2)
    settings = PolicySettings(10, 4, None, OnStale.RETRY)
    restored = world.hello(m.Hello(m.Role.TRAINER, "math", b"r" * 16, settings=settings))
    world.apply(m.Resume(restored, 2, version=1, cursor=0, taken=()))
    world.apply(m.Grant(restored, 100, 1 << 30))
    assert world.delivered_to(restored) == [of_1]
    assert world.task(of_2).state is TaskState.QUEUED


def test_evaluation_needs_no_room_in_the_budget_and_goes_first() -> None:
    world = World()
    trainer = world.trainer(batch=1, eta=0)
    training = world.submit(trainer, 2)
    evaluation = world.submit(trainer, 3, priority=m.Priority.EVAL)
    worker = world.worker(credit=100)
    assert world.leased_to(worker) == [*evaluation, training[0]]
    world.finish(worker, *evaluation)
    world.consume(trainer, *evaluation)
    assert world.state.policies["default"].staleness.consumed_since_version == 0
    assert world.leased_to(worker) == [*evaluation, training[0]]


def test_trainers_share_a_fleet_by_cost() -> None:
    world = World()
    big = world.trainer("big", batch=100)
    small = world.trainer("small", batch=100, owner=False, nonce=b"s" * 16)
    world.submit(big, 50, cost=10)
    world.submit(small, 50, cost=10)
    worker = world.worker(slots=20)
    trainers = [world.task(t).trainer for t in world.leased_to(worker)]
    assert trainers.count("big") == trainers.count("small") == 10
