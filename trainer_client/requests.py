"""Open requests: each is numbered, sent again in a new session, and answered exactly once.

No I/O and no clock: who asked says what to do with the answer and when to give up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from rollmq.messages import (
    Cancel,
    Consumed,
    HandBack,
    Message,
    Publish,
    Query,
    Resume,
    Submit,
    Watch,
)

Request = Submit | Cancel | Consumed | HandBack | Publish | Resume | Query | Watch
Answered = Callable[[Message], None]
"""Called once with the answer: the message of the request's own kind, or a `Refusal`."""


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """A request without its answer; `template` has no session."""

    number: int
    template: Request
    answered: Answered

    def message(self, session: int) -> Message:
        """The request as sent in a session."""
        return replace(self.template, session=session)


class RequestTable:
    """Requests in the order in which they were made."""

    def __init__(self) -> None:
        self._last = 0
        self._open: dict[int, OpenRequest] = {}
        self._publishing: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[OpenRequest]:
        return iter(list(self._open.values()))

    def add(self, kind: type[Request], answered: Answered, **values: Any) -> OpenRequest:
        """A new request of this kind with these values."""
        self._last += 1
        template = kind(session=0, request=self._last, **values)
        request = OpenRequest(self._last, template, answered)
        self._open[request.number] = request
        if isinstance(template, Publish):
            self._publishing[request.number] = template.version
        return request

    @property
    def publishing(self) -> int:
        """The highest version whose PUBLISH is unanswered; 0 if there is none."""
        return max(self._publishing.values(), default=0)

    def answer(self, number: int, message: Message) -> bool:
        """Hands an answer to who asked; False if nobody did or the asker gave up."""
        request = self._remove(number)
        if request is None:
            return False
        request.answered(message)
        return True

    def abandon(self, number: int) -> None:
        """The asker no longer waits; a late answer is dropped and nothing is sent again."""
        self._remove(number)

    def _remove(self, number: int) -> OpenRequest | None:
        self._publishing.pop(number, None)
        return self._open.pop(number, None)

    def has_open(self, kind: type[Request]) -> bool:
        """Whether a request of this kind has no answer yet."""
        return any(isinstance(request.template, kind) for request in self._open.values())
