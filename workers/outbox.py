"""Outcomes and starts as messages that keep within the broker's limits. Pure: leases in, messages out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from rollmq.codec import HEAD_LIMIT, MAX_BODY_BYTES, MAX_ITEMS
from rollmq.messages import (
    TEXT_LIMIT,
    Message,
    Nack,
    NackItem,
    Reason,
    Result,
    ResultItem,
    Started,
    StartedItem,
    TaskEpoch,
)
from workers.leases import Failed, Finished, Lease, Outcome

RESULT_BATCH_BYTES = 8 * 1024 * 1024
_HEAD_BUDGET = HEAD_LIMIT - 256
_ITEM_OVERHEAD = 48

_T = TypeVar("_T")


def bounded(text: str, limit: int = TEXT_LIMIT) -> str:
    """The text on one line, cut in the middle to `limit` characters: errors say most at both ends."""
    line = " ".join(text.split())
    if len(line) <= limit:
        return line
    head = (limit - 5) * 2 // 3
    return f"{line[:head]} ... {line[len(line) - (limit - 5 - head) :]}"


def fitting(outcome: Outcome, max_body_bytes: int = MAX_BODY_BYTES) -> Outcome:
    """The outcome, or a failure in place of a result that the broker would not take."""
    if isinstance(outcome, Finished) and len(outcome.body) > max_body_bytes:
        return Failed(
            Reason.BAD_RESULT,
            f"the result has {len(outcome.body)} bytes, the broker takes {max_body_bytes}; return less metadata or "
            "fewer tokens",
        )
    return outcome


def outcome_messages(session: int, leases: Iterable[Lease], max_items: int = MAX_ITEMS) -> Iterator[Message]:
    """RESULTs and NACKs for leases that have an outcome."""
    results: list[tuple[ResultItem, bytes]] = []
    nacks: list[NackItem] = []
    for lease in leases:
        match lease.outcome:
            case Finished(body, head, tail, tokens):
                results.append((ResultItem(lease.task_id, lease.epoch, head, tail, tokens), body))
            case Failed(reason, detail):
                nacks.append(NackItem(lease.task_id, lease.epoch, reason, bounded(detail)))
            case None:
                raise ValueError(f"task {lease.task_id} has no outcome to send")
    for batch in _batches(results, lambda pair: len(pair[1]), RESULT_BATCH_BYTES, max_items):
        yield Result(session, tuple(item for item, _ in batch), tuple(body for _, body in batch))
    yield from nack_messages(session, nacks, max_items)


def nack_messages(session: int, items: Iterable[NackItem], max_items: int = MAX_ITEMS) -> Iterator[Nack]:
    """NACKs; their details have to fit into heads."""
    size = lambda item: len(item.detail.encode()) + _ITEM_OVERHEAD  # noqa: E731
    for batch in _batches(list(items), size, _HEAD_BUDGET, max_items):
        yield Nack(session, tuple(batch))


def return_messages(session: int, keys: Iterable[TaskEpoch], detail: str) -> Iterator[Nack]:
    """NACKs for leases that we do not have."""
    return nack_messages(session, [NackItem(key.task_id, key.epoch, Reason.RETURNED, detail) for key in keys])


def started_messages(session: int, items: Sequence[StartedItem], max_items: int = MAX_ITEMS) -> Iterator[Started]:
    """STARTEDs."""
    size = lambda item: len(item.label) + _ITEM_OVERHEAD  # noqa: E731
    for batch in _batches(items, size, _HEAD_BUDGET, max_items):
        yield Started(session, tuple(batch))


def _batches(items: Sequence[_T], size: Callable[[_T], int], max_size: int, max_items: int) -> Iterator[list[_T]]:
    batch: list[_T] = []
    total = 0
    for item in items:
        if batch and (total + size(item) > max_size or len(batch) >= max_items):
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += size(item)
    if batch:
        yield batch
