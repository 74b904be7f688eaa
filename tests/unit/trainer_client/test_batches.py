"""`batches` of both clients against a real ROUTER."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from rollmq.bodies import decode_task_spec
from rollmq.errors import ConfigError, DeadlineExceeded, TaskFailed
from rollmq.messages import Cancel, Submit, TaskState
from rollmq.rollout import GenerationHyperparameters, Group, ModelRequest
from trainer_client import AsyncRolloutClient, DiskWeights, RolloutClient

Router = Any


def prompts(count: int, samples: int = 1, **changes: Any) -> list[ModelRequest]:
    return [ModelRequest([n + 1], GenerationHyperparameters(n_samples=samples, **changes)) for n in range(count)]


def make(router: Router, **changes: Any) -> RolloutClient:
    router.model.eta = changes.get("max_head_offpolicyness", 1)
    return RolloutClient(router.address, **{"consumer_batch_size": 2, "timeout": 20.0, **changes})


def prompt_of(router: Router, group: Group) -> int:
    """The prompt's token, found in the broker's copy of the task."""
    return decode_task_spec(router.model.tasks[group[0].task_id].body).request.input_ids[0]


def test_batches_are_full_in_order_and_complete(auto_router: Router) -> None:
    with make(auto_router) as client:
        batches = list(client.batches(prompts(6, samples=3)))
        assert [[prompt_of(auto_router, g) for g in batch] for batch in batches] == [[1, 2], [3, 4], [5, 6]]
        assert all([t.member for t in group] == [0, 1, 2] for batch in batches for group in batch)
        assert client.left_over == 0 and client.failures == []
    assert auto_router.model.count(TaskState.CONSUMED) == 18


def test_prompts_that_make_no_full_batch_are_cancelled_and_counted(auto_router: Router) -> None:
    with make(auto_router) as client:
        assert len(list(client.batches(prompts(5)))) == 2
        assert client.left_over == 1
    assert auto_router.model.count(TaskState.CONSUMED) == 4
    assert auto_router.model.count(TaskState.CANCELLED) == 1


def test_fewer_prompts_than_a_batch_are_not_even_submitted(auto_router: Router) -> None:
    with make(auto_router, consumer_batch_size=4) as client:
        assert list(client.batches(prompts(3))) == []
        assert client.left_over == 3
    assert not auto_router.model.tasks


def test_the_pipeline_is_filled_ahead_and_the_iterable_only_advances_in_the_callers_thread(auto_router: Router) -> None:
    threads = set()

    def endless() -> Iterator[ModelRequest]:
        for n in itertools.count(1):
            threads.add(threading.current_thread())
            yield ModelRequest([n])

    with make(auto_router, consumer_batch_size=2, max_head_offpolicyness=3) as client:
        next(client.batches(endless()))
        assert len(auto_router.model.tasks) == (3 + 2) * 2
    assert threads == {threading.current_thread()}


def test_pairs_carry_data_over_the_common_data(auto_router: Router) -> None:
    with make(auto_router) as client:
        pairs = [(request, {"answer": n}) for n, request in enumerate(prompts(2))]
        next(client.batches(pairs, workflow="check", data={"reward": "equals", "answer": -1}))
    specs = [decode_task_spec(task.body) for task in auto_router.model.tasks.values()]
    assert [spec.data for spec in specs] == [{"reward": "equals", "answer": 0}, {"reward": "equals", "answer": 1}]
    assert {spec.workflow for spec in specs} == {"check"}


def test_members_of_a_seeded_group_have_different_seeds(auto_router: Router) -> None:
    with make(auto_router, consumer_batch_size=1) as client:
        next(client.batches(prompts(1, samples=3, seed=7)))
    seeds = [decode_task_spec(t.body).request.gconfig.seed for t in auto_router.model.tasks.values()]
    assert seeds == [7, 8, 9]


def test_a_group_with_a_dead_member_is_reported_and_replaced(router: Router) -> None:
    def finish_or_kill(task: Any) -> int | None:
        if task.key.endswith("/1/0"):
            router.call(lambda model: model.end(task.task_id, TaskState.DEAD) if task.state is TaskState.QUEUED else [])
            return None
        return 0

    router.auto = finish_or_kill
    with make(router) as client:
        batch = next(client.batches(prompts(20, samples=2)))
        assert [prompt_of(router, g) for g in batch] == [1, 3]
        (failed,) = client.failures
        assert (failed.position, failed.state, failed.reason) == (1, "dead", "workflow_raised: boom")
        with pytest.raises(TaskFailed, match="cancelled by this trainer"):
            client.wait(failed.task_id + 1, timeout=5)
        client.status()
    states = {t.state for t in router.model.tasks.values() if t.key.split("/")[3] == "1"}
    assert states == {TaskState.DEAD, TaskState.CANCELLED}


def test_stale_members_are_handed_back_at_the_yield_and_the_batch_waits_for_them(router: Router) -> None:
    router.model.eta = 0
    router.auto = lambda task: router.model.version
    with make(router, max_head_offpolicyness=0) as client:
        stream = client.batches(prompts(8, samples=2))
        first = next(stream)
        assert {t.head_version for g in first for t in g} == {0}
        # The next groups are already here, generated by version 0.
        client.publish_weights(DiskWeights("sim:"), 1)
        second = next(stream)
        assert {t.head_version for g in second for t in g} == {1}
        assert [prompt_of(router, g) for g in first + second] == [1, 2, 3, 4]


def test_no_full_batch_in_time_says_what_is_there_and_the_iteration_goes_on(router: Router) -> None:
    with make(router) as client:
        stream = client.batches(prompts(4), timeout=0.5)
        with pytest.raises(DeadlineExceeded, match="no batch of 2 groups in time: 0 of 4 groups"):
            next(stream)
        router.auto = lambda task: 0
        client.status()
        assert [[prompt_of(router, g) for g in batch] for batch in stream] == [[1, 2], [3, 4]]


def test_a_new_call_replaces_an_unfinished_iteration(auto_router: Router) -> None:
    with make(auto_router) as client:
        old = client.batches(prompts(20))
        next(old)
        new = client.batches(prompts(20))
        assert [prompt_of(auto_router, g) for g in next(new)] == [1, 2]
        with pytest.raises(ConfigError, match="replaced"):
            next(old)
        client.status()
        client.close()
    consumed = [t.key.split("/")[2] for t in auto_router.model.tasks.values() if t.state is TaskState.CONSUMED]
    assert consumed == ["0", "0", "1", "1"]


def test_a_run_that_begins_anew_cancels_what_the_last_process_left(auto_router: Router) -> None:
    crashed = make(auto_router)
    next(crashed.batches(prompts(20)))
    auto_router.wait_heard(Submit)
    with make(auto_router) as client:
        batch = next(client.batches(prompts(20)))
        assert [prompt_of(auto_router, g) for g in batch] == [1, 2]
        auto_router.wait_heard(Cancel)
    crashed.close()
    runs = {t.key.split("/")[1] for t in auto_router.model.tasks.values() if t.state is TaskState.CANCELLED}
    assert len(runs) == 1


def test_a_trainer_with_its_state_repeats_and_skips_nothing(auto_router: Router) -> None:
    seen: list[int] = []
    state: dict[str, Any] | None = None
    for _process in range(4):
        client = make(auto_router)
        if state is not None:
            client.load_state_dict(state)
        stream = client.batches(prompts(24, samples=2))
        for batch in itertools.islice(stream, 2):
            seen += [prompt_of(auto_router, g) for g in batch]
            client.publish_weights(DiskWeights("sim:"), client.version + 1)
        state = client.state_dict()
        # One more batch is taken, used and even acknowledged, but the process dies before it stores that.
        next(stream)
        client.publish_weights(DiskWeights("sim:"), client.version + 1)
        if _process % 2:
            auto_router.kill()
            auto_router.start()
        client._portal.stop()
    assert seen == list(range(1, 17))


def test_a_state_taken_after_the_end_begins_the_next_iteration(auto_router: Router) -> None:
    with make(auto_router) as client:
        list(client.batches(prompts(4)))
        state = client.state_dict()
    with make(auto_router) as client:
        client.load_state_dict(state)
        assert len(list(client.batches(prompts(4)))) == 2
    assert auto_router.model.count(TaskState.CONSUMED) == 8


def test_a_restart_of_the_broker_in_the_middle_of_a_batch_is_survived(router: Router) -> None:
    with make(router) as client:
        stream = client.batches(prompts(8), timeout=30)
        timer = threading.Timer(0.3, lambda: (router.kill(), setattr(router, "auto", lambda task: 0), router.start()))
        timer.start()
        assert [prompt_of(router, g) for g in next(stream)] == [1, 2]
        timer.join()


def test_what_is_no_request_is_refused(auto_router: Router) -> None:
    with make(auto_router) as client, pytest.raises(ConfigError, match="a prompt is a str"):
        next(client.batches(["hello"] * 9))  # type: ignore[list-item]


async def test_the_asyncio_client_yields_the_same(auto_router: Router) -> None:
    async with AsyncRolloutClient(auto_router.address, consumer_batch_size=2) as client:
        found = [batch async for batch in client.batches(prompts(4))]
        assert [[prompt_of(auto_router, g) for g in batch] for batch in found] == [[1, 2], [3, 4]]


async def test_batches_and_waits_share_a_client(auto_router: Router) -> None:
    async with AsyncRolloutClient(auto_router.address, consumer_batch_size=2) as client:
        task_ids = await client.submit_group(ModelRequest([5], GenerationHyperparameters(n_samples=3)))
        stream = client.batches(prompts(40))
        await anext(stream)
        singles = await asyncio.gather(*(client.wait(t, timeout=20) for t in task_ids))
        assert [t.member for t in singles] == [0, 1, 2] and len({t.group for t in singles}) == 1
        await anext(stream)
