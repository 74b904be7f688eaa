"""SUBMIT with its answer: pieces that fit, sent together, acknowledged durably, outcomes checked."""

from __future__ import annotations

import asyncio
import time

from rollmq.errors import Refused
from rollmq.messages import Submit, SubmitOutcome, Submitted
from trainer_client import submission
from trainer_client.connection import Connection
from trainer_client.submission import Entry


class Submitter:
    """Submits for one client.

    Args:
        connection: to the broker.
        timeout: seconds an acknowledgement may take.
    """

    def __init__(self, connection: Connection, timeout: float) -> None:
        self._connection = connection
        self._timeout = timeout

    async def submit(self, entries: list[Entry]) -> list[int]:
        """Task ids in the order of the entries, once the broker has them on disk.

        Raises:
            ConfigError: a body is too large.
            Refused: the broker does not take all of them; those it took stay submitted.
            DeadlineExceeded: no answer in time. The tasks may have been taken: the same keys may be submitted again.
        """
        welcome = self._connection.core.welcome
        if welcome is not None:
            submission.check_sizes(entries, welcome.max_body_bytes)
        most = welcome.max_items if welcome is not None else submission.ITEMS_PER_SUBMIT
        deadline = time.monotonic() + self._timeout
        pieces = list(submission.pieces(entries, most))
        answers = await asyncio.gather(*(self._submit_piece(piece, deadline) for piece in pieces))
        outcomes = [outcome for answer in answers for outcome in answer.outcomes]
        _check(entries, outcomes)
        return [outcome.task_id for outcome in outcomes]

    async def _submit_piece(self, piece: list[Entry], deadline: float) -> Submitted:
        answer = await self._connection.ask(
            Submit,
            Submitted,
            deadline,
            f"submit of {len(piece)} task(s), first key {piece[0].item.key}",
            items=tuple(entry.item for entry in piece),
            bodies=tuple(entry.body for entry in piece),
        )
        self._connection.core.submitted(answer.outcomes)
        return answer


def _check(entries: list[Entry], outcomes: list[SubmitOutcome]) -> None:
    for entry, outcome in zip(entries, outcomes, strict=True):
        if outcome.code is not None:
            raise Refused(
                outcome.code,
                f"key {entry.item.key} is already used by task {outcome.task_id} with another request or group; "
                "use a new key for a new request",
            )
