"""The asyncio client against a real ROUTER: requests, reconnects, deadlines, errors."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollmq.errors import ConfigError, DeadlineExceeded, NotConnected, Refused, SessionSuperseded, TaskFailed
from rollmq.messages import (
    Consumed,
    Grant,
    HandBack,
    Publish,
    Refusal,
    RefusalCode,
    Resume,
    Resync,
    Submit,
    TaskState,
    Watch,
)
from rollmq.rollout import GenerationHyperparameters, ModelRequest
from trainer_client import AsyncRolloutClient, DiskWeights

REQUEST = ModelRequest([1, 2], GenerationHyperparameters(max_new_tokens=3))
Router = Any


def client_of(router: Router, **changes: Any) -> AsyncRolloutClient:
    return AsyncRolloutClient(router.address, **{"consumer_batch_size": 2, "timeout": 20.0, **changes})


async def test_submit_returns_the_acknowledged_id_and_wait_the_trajectory(router: Router) -> None:
    async with client_of(router) as client:
        task_id = await client.submit(REQUEST, data={"x": 1})
        router.call(lambda model: model.finish(task_id))
        trajectory = await client.wait(task_id, timeout=20)
        assert (trajectory.task_id, trajectory.output_ids, trajectory.sequence) == (1, [1, 1, 1], 1)
        assert not [m for m in router.model.heard if isinstance(m, Consumed)], "acknowledged before the user came back"
    assert router.model.tasks[task_id].state is TaskState.CONSUMED


async def test_no_credit_is_granted_before_work_is_asked_for(router: Router) -> None:
    async with client_of(router) as client:
        await client.status()
        assert not [m for m in router.model.heard if isinstance(m, Grant)]
        await client.submit(REQUEST)
        await router.heard(Grant)


async def test_a_submit_without_answer_is_sent_again_in_the_next_session_with_the_same_keys(router: Router) -> None:
    router.silent.add(Submit)
    async with client_of(router) as client:
        submitting = asyncio.ensure_future(client.submit_many([REQUEST] * 3))
        await router.heard(Submit)
        router.kill()
        router.silent.clear()
        router.start()
        assert await submitting == [1, 2, 3]
        first, second = await router.heard(Submit, 2)
        assert first.items == second.items and first.session != second.session


async def test_wait_survives_a_restart_and_asks_for_the_fate_of_its_task(router: Router) -> None:
    async with client_of(router) as client:
        task_id = await client.submit(REQUEST)
        waiting = asyncio.ensure_future(client.wait(task_id, timeout=30))
        await router.heard(Grant)
        router.kill()
        router.model.tasks[task_id].state = TaskState.DEAD
        router.start()
        with pytest.raises(TaskFailed, match="task 1 ended as dead") as caught:
            await waiting
        assert caught.value.state == "dead"
        assert (await router.heard(Watch))[0].tasks == (task_id,)


async def test_what_was_delivered_and_not_acknowledged_comes_again_and_is_dropped(router: Router) -> None:
    async with client_of(router) as client:
        first, second = await client.submit_many([REQUEST] * 2)
        router.call(lambda model: model.finish(first))
        await client.wait(first, timeout=20)
        router.deaf.add(Consumed)
        router.kill()
        router.start()
        router.call(lambda model: model.finish(second))
        assert (await client.wait(second, timeout=20)).task_id == second
        with pytest.raises(DeadlineExceeded):
            await client.wait(first, timeout=0.2)
        router.deaf.clear()
        router.kill()
        router.start()
        await client.status()
    assert router.model.count(TaskState.CONSUMED) == 2


async def test_wait_with_timeout_zero_polls(router: Router) -> None:
    async with client_of(router) as client:
        task_id = await client.submit(REQUEST)
        with pytest.raises(DeadlineExceeded, match="task 1 had no trajectory in time"):
            await client.wait(task_id, timeout=0)
        router.call(lambda model: model.finish(task_id))
        for _ in range(2000):
            try:
                assert (await client.wait(task_id, timeout=0)).task_id == task_id
                break
            except DeadlineExceeded:
                await asyncio.sleep(0.01)
        else:
            pytest.fail("never came")


async def test_wait_for_a_task_that_was_taken_says_so(router: Router) -> None:
    async with client_of(router) as client:
        task_id = await client.submit(REQUEST)
        router.call(lambda model: model.finish(task_id))
        await client.wait(task_id, timeout=20)
        with pytest.raises(TaskFailed, match="already taken"):
            await client.wait(task_id, timeout=20)


async def test_wait_for_an_unknown_task_fails_at_once(router: Router) -> None:
    async with client_of(router) as client:
        with pytest.raises(TaskFailed, match="task 77 ended as unknown"):
            await client.wait(77, timeout=20)


async def test_many_waits_at_once_each_get_their_own(auto_router: Router) -> None:
    async with client_of(auto_router) as client:
        task_ids = await client.submit_many([REQUEST] * 300)
        found = await asyncio.gather(*(client.wait(task_id, timeout=30) for task_id in reversed(task_ids)))
        assert [t.task_id for t in found] == list(reversed(task_ids))
    assert auto_router.model.count(TaskState.CONSUMED) == 300
    assert max(len(m.items) for m in auto_router.model.heard if isinstance(m, Submit)) <= 64


async def test_a_busy_broker_is_asked_again(router: Router) -> None:
    router.refuse = [Refusal(0, 0, RefusalCode.BUSY, "full", 0.05), Refusal(0, 0, RefusalCode.DISK_LOW, "low", 0.05)]
    async with client_of(router) as client:
        assert await client.submit(REQUEST) == 1


async def test_a_conflict_is_refused_and_names_the_key(router: Router) -> None:
    async with client_of(router) as client:
        assert await client.submit(REQUEST, key="a") == await client.submit(REQUEST, key="a")
        with pytest.raises(Refused, match="key a is already used by task 1") as caught:
            await client.submit(ModelRequest([9]), key="a")
        assert caught.value.code == RefusalCode.CONFLICT


async def test_a_request_without_answer_fails_at_its_deadline(router: Router) -> None:
    router.deaf.add(Submit)
    async with client_of(router) as client:
        client._submitter._timeout = 0.3
        with pytest.raises(DeadlineExceeded, match=r"submit of 1 task\(s\), first key mine had no answer"):
            await client.submit(REQUEST, key="mine")


async def test_no_broker_is_reported_with_the_address() -> None:
    client = AsyncRolloutClient("tcp://127.0.0.1:9", timeout=0.3)
    with pytest.raises(NotConnected, match=r"tcp://127\.0\.0\.1:9 within 0\.3 s"):
        await client.connect()
    await client.close()


async def test_a_wait_ends_when_the_broker_stays_away(router: Router) -> None:
    router.model.dead_after_s = 1.0
    async with client_of(router, timeout=0.5) as client:
        task_id = await client.submit(REQUEST)
        waiting = asyncio.ensure_future(client.wait(task_id, timeout=100))
        await router.heard(Grant)
        router.kill()
        with pytest.raises(NotConnected, match="no session with the broker"):
            await waiting


async def test_a_newer_process_of_the_same_name_ends_this_one(router: Router) -> None:
    async with client_of(router) as client:
        task_id = await client.submit(REQUEST)
        waiting = asyncio.ensure_future(client.wait(task_id, timeout=100))
        await router.heard(Grant)
        router.call(lambda model: [Resync("a newer trainer named math took over", final=True)])
        with pytest.raises(SessionSuperseded, match="took over"):
            await waiting
        with pytest.raises(SessionSuperseded):
            await client.submit(REQUEST)


async def test_publish_is_not_repeated_when_the_new_session_shows_that_it_is_done(router: Router) -> None:
    router.silent.add(Publish)
    async with client_of(router) as client:
        publishing = asyncio.ensure_future(client.publish_weights(DiskWeights("sim:"), 1))
        await router.heard(Publish)
        router.kill()
        router.start()
        await publishing
        assert client.version == 1


async def test_publish_that_does_not_grow_is_refused(router: Router) -> None:
    async with client_of(router) as client:
        await client.publish_weights(DiskWeights("sim:a"), 3)
        with pytest.raises(Refused) as caught:
            await client.publish_weights(DiskWeights("sim:a"), 3)
        assert caught.value.code == RefusalCode.STALE_VERSION


async def test_consumed_goes_out_before_publish(router: Router) -> None:
    async with client_of(router) as client:
        task_id = await client.submit(REQUEST)
        router.call(lambda model: model.finish(task_id))
        await client.wait(task_id, timeout=20)
        await client.publish_weights(DiskWeights("sim:"), 1)
        kinds = [type(m) for m in router.model.heard if isinstance(m, Consumed | Publish)]
        assert kinds == [Consumed, Publish]


async def test_a_trajectory_that_aged_in_the_inbox_is_handed_back_and_comes_again_newer(router: Router) -> None:
    async with client_of(router, max_head_offpolicyness=1) as client:
        first, second = await client.submit_many([REQUEST] * 2)
        router.call(lambda model: model.finish(second) + model.finish(first, 0))
        await client.wait(second, timeout=20)
        await client.publish_weights(DiskWeights("sim:"), 2)
        waiting = asyncio.ensure_future(client.wait(first, timeout=20))
        await router.heard(HandBack)
        router.call(lambda model: model.finish(first, 2))
        trajectory = await waiting
        assert trajectory.head_version == 2 and trajectory.sequence > 2


async def test_deliver_marks_what_is_too_old_instead_of_handing_it_back(router: Router) -> None:
    async with client_of(router, max_head_offpolicyness=0, on_stale="deliver") as client:
        first, second = await client.submit_many([REQUEST] * 2)
        router.call(lambda model: model.finish(first, 0) + model.finish(second, 0))
        assert not (await client.wait(first, timeout=20)).stale
        await client.publish_weights(DiskWeights("sim:"), 1)
        assert (await client.wait(second, timeout=20)).stale


async def test_cancel_says_whether_it_was_in_time(router: Router) -> None:
    async with client_of(router) as client:
        first, second = await client.submit_many([REQUEST] * 2)
        assert await client.cancel(first)
        with pytest.raises(TaskFailed, match="cancelled"):
            await client.wait(first, timeout=20)
        router.call(lambda model: model.end(second, TaskState.DEAD))
        with pytest.raises(TaskFailed, match="boom"):
            await client.wait(second, timeout=20)
        assert not await client.cancel(second)
        with pytest.raises(Refused, match="no such task"):
            await client.cancel(99)


async def test_resume_is_sent_before_the_first_grant_and_again_if_unanswered(router: Router) -> None:
    async with client_of(router) as client:
        task_id = await client.submit(REQUEST)
        before = client.state_dict()
        router.call(lambda model: model.finish(task_id))
        await client.wait(task_id, timeout=20)
    assert router.model.count(TaskState.CONSUMED) == 1
    router.silent.add(Resume)
    async with client_of(router) as client:
        loading = asyncio.ensure_future(client.load_state_dict(before))
        await router.heard(Resume)
        router.kill()
        router.silent.clear()
        router.start()
        await loading
        assert (await client.wait(task_id, timeout=20)).task_id == task_id
    kinds = [type(m) for m in router.model.heard if isinstance(m, Resume | Grant)]
    last_resume = len(kinds) - 1 - kinds[::-1].index(Resume)
    assert kinds[last_resume - 1] is Resume, "a GRANT came between the two"
    assert kinds[last_resume + 1] is Grant


async def test_a_refused_resume_leaves_a_client_that_can_begin_anew(router: Router) -> None:
    async with client_of(router) as client:
        state = {**client.state_dict(), "version": 9, "cursor": 500}
        with pytest.raises(Refused) as caught:
            await client.load_state_dict(state)
        assert caught.value.code == RefusalCode.CONFLICT
        task_id = await client.submit(REQUEST)
        router.call(lambda model: model.finish(task_id))
        assert (await client.wait(task_id, timeout=20)).task_id == task_id


async def test_load_state_dict_must_come_first(router: Router) -> None:
    async with client_of(router) as client:
        state = client.state_dict()
        await client.submit(REQUEST)
        with pytest.raises(ConfigError, match="right after connecting"):
            await client.load_state_dict(state)


async def test_a_closed_or_unopened_client_says_so(router: Router) -> None:
    client = client_of(router)
    with pytest.raises(NotConnected, match="not connected"):
        await client.submit(REQUEST)
    await client.connect()
    await client.close()
    await client.close()
    with pytest.raises(NotConnected, match="closed"):
        await client.submit(REQUEST)


async def test_status_and_tasks_are_documents(router: Router) -> None:
    async with client_of(router) as client:
        assert await client.status() == {"ledger": {}}
        assert await client.tasks(state="dead") == []
        with pytest.raises(ConfigError, match="state 'gone' must be one of"):
            await client.tasks(state="gone")
