"""What `batches` returns: an iterator that pulls prompts in the caller's own thread and yields full batches.

An iterator and not a generator, so that a deadline that passed does not end the iteration: `next` may be called again.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from typing import Any

from rollmq.rollout import Group
from trainer_client.batches import Prompt, split_prompt
from trainer_client.pipeline import BatchRun
from trainer_client.portal import Portal
from trainer_client.settings import WAIT_LIMIT_S, check_timeout


class PromptFeed:
    """The user's iterable, cut to what the pipeline wants.

    Args:
        requests: prompts from the beginning of the iteration.
        data: common data under each prompt's own.
        run: the iteration they are for.
    """

    def __init__(self, requests: Iterable[Prompt], data: Mapping[str, Any] | None, run: BatchRun) -> None:
        self._data = dict(data or {})
        self._run = run
        self._prompts = iter(requests)
        self._to_skip = run.plan.skip

    def pull(self) -> list[Prompt]:
        """The next prompts; notes when there are no more. Prompts settled before a checkpoint are passed over."""
        next(itertools.islice(self._prompts, self._to_skip, self._to_skip), None)
        self._to_skip = 0
        wanted = self._run.plan.wanted()
        pulled = [self._with_data(prompt) for prompt in itertools.islice(self._prompts, wanted)]
        if len(pulled) < wanted:
            self._run.plan.exhausted = True
        return pulled

    def _with_data(self, prompt: Prompt) -> Prompt:
        request, own = split_prompt(prompt)
        return request, {**self._data, **own}


class Batches(Iterator[list[Group]]):
    """Full batches for blocking code."""

    def __init__(self, run: BatchRun, feed: PromptFeed, portal: Portal, timeout: float) -> None:
        self._run, self._feed, self._portal, self._timeout = run, feed, portal, timeout

    def __next__(self) -> list[Group]:
        """The next batch; see `AsyncRolloutClient.batches`."""
        deadline = time.monotonic() + self._timeout
        while not self._run.over:
            batch = self._portal.run(self._run.advance(self._feed.pull(), deadline))
            if batch is not None:
                return batch
        raise StopIteration


class AsyncBatches(AsyncIterator[list[Group]]):
    """Full batches for asyncio."""

    def __init__(self, run: BatchRun, feed: PromptFeed, timeout: float) -> None:
        self._run, self._feed, self._timeout = run, feed, timeout

    async def __anext__(self) -> list[Group]:
        """The next batch; see `AsyncRolloutClient.batches`."""
        deadline = time.monotonic() + self._timeout
        while not self._run.over:
            batch = await self._run.advance(self._feed.pull(), deadline)
            if batch is not None:
                return batch
        raise StopAsyncIteration


def batch_timeout(timeout: float | None) -> float:
    """Seconds one batch may take.

    Raises:
        ConfigError: it is not a number >= 0.
    """
    return check_timeout("timeout", WAIT_LIMIT_S if timeout is None else timeout)
