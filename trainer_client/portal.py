"""An event loop in its own thread, for blocking callers."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from rollmq.errors import NotConnected

_T = TypeVar("_T")

STOP_S = 5.0


class Portal:
    """Runs coroutines for threads that have no loop. Callable from any thread of the process that made it.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """The coroutine's result; an interrupt of the caller cancels it.

        Raises:
            NotConnected: the portal is stopped, or this is a forked child.
        """
        problem = self._problem()
        if problem:
            coroutine.close()
            raise NotConnected(problem)
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def call(self, function: Callable[[], _T]) -> _T:
        """The function's result, run on the loop's thread."""

        async def call() -> _T:
            return function()

        return self.run(call())

    def stop(self) -> None:
        """Ends the loop and its thread; idempotent."""
        if self._loop.is_closed() or os.getpid() != self._pid:
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_S)
        if not self._thread.is_alive():
            self._loop.close()

    def is_running(self) -> bool:
        """Whether `run` can work here."""
        return not self._problem()

    def _problem(self) -> str:
        if os.getpid() != self._pid:
            return "the client belongs to the parent of this forked process; make a new one here"
        if self._loop.is_closed() or not self._thread.is_alive():
            return "the client is closed; make a new one"
        if threading.current_thread() is self._thread:
            return "a blocking call on the client's own thread would wait for itself for ever"
        return ""
