"""One generation in progress: its name at the server, and the two things that may end it from outside."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from rollmq.errors import RollmqError
from workers.http_client import settle

T = TypeVar("T")


class Flight:
    """A `generate` call that runs now.

    Args:
        exited: set when the server is gone.
        raise_exited: raises the error that says how it went.

    Attributes:
        attempt_id: id of the request that the server works on now; "" between two.
    """

    def __init__(self, exited: asyncio.Event, raise_exited: Callable[[], None]) -> None:
        self._exited = exited
        self._raise_exited = raise_exited
        self._ended = asyncio.Event()
        self._reason: RollmqError | None = None
        self.attempt_id = ""

    @property
    def ended(self) -> bool:
        """Whether somebody ended it."""
        return self._reason is not None

    def end(self, reason: RollmqError) -> None:
        """Makes the generation raise `reason` at once; the first reason counts."""
        self._reason = self._reason or reason
        self._ended.set()

    async def await_unless_over(self, work: Coroutine[Any, Any, T]) -> T:
        """Awaits `work`, but not past `end` or the server's end; `work` is cancelled then.

        Raises:
            RollmqError: what `end` was given.
            EngineUnavailable: the server is gone.
        """
        task = asyncio.ensure_future(work)
        ended = asyncio.ensure_future(self._ended.wait())
        exited = asyncio.ensure_future(self._exited.wait())
        try:
            await asyncio.wait({task, ended, exited}, return_when=asyncio.FIRST_COMPLETED)
            if self._reason is not None:
                raise self._reason
            if not task.done():
                self._raise_exited()
            return await task
        finally:
            for future in (task, ended, exited):
                await settle(future)
