"""Messages that a worker sends keep within the broker's limits."""

from __future__ import annotations

from rollmq.codec import decode, encode
from rollmq.messages import Nack, NackItem, Reason, Result, StartedItem, TaskItem
from workers.leases import Failed, Finished, Lease, Outcome
from workers.outbox import (
    RESULT_BATCH_BYTES,
    bounded,
    fitting,
    nack_messages,
    outcome_messages,
    started_messages,
)


def lease(task_id: int, outcome: Outcome) -> Lease:
    return Lease(TaskItem(task_id, 5, 1, "default", 60.0, 1, 0), b"", 5, outcome)


def test_long_texts_are_cut_in_the_middle_to_the_limit() -> None:
    text = bounded("start " + "x" * 1000 + "\n end")
    assert len(text) == 300
    assert text.startswith("start x") and text.endswith("x end") and " ... " in text
    assert bounded("short\ntext") == "short text"


def test_nacks_with_long_details_in_any_script_encode() -> None:
    items = [NackItem(n, 2**40 + n, Reason.WORKFLOW_RAISED, "é語" * 150) for n in range(100)]
    messages = list(nack_messages(1, items))
    assert [i for m in messages for i in m.items] == items
    for message in messages:
        assert decode(encode(message)) == message


def test_started_items_with_long_labels_encode() -> None:
    items = [StartedItem(2**40 + n, 2**60, f"{n}." + "1" * 20) for n in range(600)]
    messages = list(started_messages(1, items))
    assert [i for m in messages for i in m.items] == items
    for message in messages:
        encode(message)


def test_results_are_batched_by_bytes_and_by_items() -> None:
    big = [lease(n, Finished(b"x" * (RESULT_BATCH_BYTES // 2), "0.0", "0.0", 1)) for n in range(5)]
    assert [len(m.items) for m in outcome_messages(1, big) if isinstance(m, Result)] == [2, 2, 1]
    small = [lease(n, Finished(b"x", "0.0", "0.0", 1)) for n in range(25)]
    assert [len(m.items) for m in outcome_messages(1, small, 10) if isinstance(m, Result)] == [10, 10, 5]


def test_outcomes_become_results_and_nacks_under_the_epoch_of_now() -> None:
    done, failed = lease(1, Finished(b"x", "0.1", "0.2", 3)), lease(2, Failed(Reason.REWARD_FAILED, "why"))
    done.epoch = 9
    result, nack = outcome_messages(7, [done, failed])
    assert isinstance(result, Result) and isinstance(nack, Nack)
    assert (result.items[0].epoch, result.items[0].head, result.items[0].tail) == (9, "0.1", "0.2")
    assert nack.items == (NackItem(2, 5, Reason.REWARD_FAILED, "why"),)


def test_a_result_over_the_brokers_limit_is_a_bad_result() -> None:
    outcome = fitting(Finished(b"x" * 11, "0.0", "0.0", 1), max_body_bytes=10)
    assert isinstance(outcome, Failed) and outcome.reason is Reason.BAD_RESULT and "11 bytes" in outcome.detail
