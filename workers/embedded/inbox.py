"""Commands from any thread to the one thread that owns the engine's state.

A command is never lost: it runs, or its future fails with the reason why the inbox ended.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from rollmq.errors import EngineError, EngineUnavailable, RollmqError

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Command:
    """Work for the owning thread, and the future that fails if the work is never done."""

    run: Callable[[], None]
    future: Future[Any]


class Inbox:
    """A queue of commands with one reader."""

    def __init__(self) -> None:
        self._commands: deque[Command] = deque()
        self._condition = threading.Condition()
        self._ended: str | None = None

    def call(self, action: Callable[[], _Result]) -> Future[_Result]:
        """Have the reader run `action`; the future gives its result or its RollmqError.

        Raises:
            EngineUnavailable: the inbox has ended.
        """
        future: Future[_Result] = new_future()

        def run() -> None:
            try:
                result = action()
            except RollmqError as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self.post(Command(run, future))
        return future

    def post(self, command: Command) -> None:
        """Queue a command whose future is resolved by other means.

        Raises:
            EngineUnavailable: the inbox has ended.
        """
        with self._condition:
            if self._ended is not None:
                raise EngineUnavailable(f"{self._ended}; send the request to another server or restart this one")
            self._commands.append(command)
            self._condition.notify()

    def wait(self, seconds: Callable[[], float | None]) -> None:
        """Block the reader until there is a command, the inbox ends, or the time given is over (None: no limit)."""
        with self._condition:
            while not self._commands and self._ended is None:
                left = seconds()
                if left is not None and left <= 0:
                    return
                self._condition.wait(left)

    def pop(self) -> Command | None:
        """The oldest command, None if there is none."""
        with self._condition:
            return self._commands.popleft() if self._commands else None

    @property
    def ended(self) -> str | None:
        """Why no more commands are taken; None while they are."""
        return self._ended

    def end(self, reason: str) -> None:
        """Take no more commands and wake the reader; those queued stay queued. The first reason stays."""
        with self._condition:
            self._ended = self._ended or reason
            self._condition.notify()

    def fail_all(self, error: EngineError) -> None:
        """Fail the commands that are still queued."""
        while (command := self.pop()) is not None:
            fail(command.future, error)


def new_future() -> Future[Any]:
    """A future that its waiter cannot cancel: only the owning thread decides how it ends."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def fail(future: Future[Any], error: EngineError) -> None:
    """End a future with an error unless it has ended."""
    if not future.done():
        future.set_exception(error)
