"""The client side of a session as a pure state machine: when to open, greet, beat, give up and try again.

Workers and trainers share it; it holds no socket and no thread, and time is an argument. `rollmq.session` drives it.

A fresh transport per attempt keeps frames of an old session from reaching a new broker; the pauses between attempts
grow from 0.1 to 5 s with jitter, so that a restarted broker does not meet a storm.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from rollmq.errors import Refused, RollmqError, SessionSuperseded
from rollmq.messages import (
    Bye,
    ByeAck,
    Heartbeat,
    Hello,
    Message,
    Refusal,
    RefusalCode,
    Resync,
    Welcome,
)

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
OPEN_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 1.0
RETRYABLE = frozenset({RefusalCode.BUSY, RefusalCode.DRAINING})


class LinkState(Enum):
    """Where the session is."""

    PAUSED = auto()
    OPENING = auto()
    OPEN = auto()
    CLOSING = auto()
    CLOSED = auto()


@dataclass(frozen=True, slots=True)
class OpenTransport:
    """Drop the transport there is, if any, and make a fresh one."""


@dataclass(frozen=True, slots=True)
class CloseTransport:
    """Close the transport."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send this message."""

    message: Message


@dataclass(frozen=True, slots=True)
class Opened:
    """A session began."""

    welcome: Welcome


@dataclass(frozen=True, slots=True)
class Lost:
    """The session ended; another attempt follows unless `error` is set."""

    reason: str
    error: RollmqError | None = None


@dataclass(frozen=True, slots=True)
class Received:
    """A message for the owner of the session."""

    message: Message


Instruction = OpenTransport | CloseTransport | Send | Opened | Lost | Received


class Link:
    """One peer's session with the broker.

    Args:
        hello: makes the greeting of each attempt (what is held changes between attempts).
        progress: (progress counter, running episodes) for heartbeats.
        rng: source of jitter.
    """

    def __init__(
        self,
        hello: Callable[[], Hello],
        progress: Callable[[], tuple[int, int]] = lambda: (0, 0),
        rng: random.Random | None = None,
    ) -> None:
        self.state = LinkState.PAUSED
        self.session = 0
        self._hello = hello
        self._progress = progress
        self._rng = rng or random.Random()
        self._pause_s = FIRST_PAUSE_S
        self._wake_at = 0.0
        self._heard_at = 0.0
        self._heartbeat_s = 2.0
        self._dead_after_s = 10.0
        self._beat_at = 0.0
        self._expected_at = math.inf

    def deadline(self) -> float:
        """When `poll` has something to do if nothing is received before, on the caller's clock."""
        if self.state is LinkState.OPEN:
            return min(self._beat_at, self._heard_at + self._dead_after_s)
        return self._wake_at

    def poll(self, now: float) -> list[Instruction]:
        """What time alone demands. Call it by `deadline` at the latest; whoever comes later has stalled."""
        self._compensate_stall(now)
        instructions = self._poll(now)
        self._expected_at = self.deadline()
        return instructions

    def _poll(self, now: float) -> list[Instruction]:
        if self.state is LinkState.OPEN:
            return self._poll_open(now)
        if now < self._wake_at or self.state is LinkState.CLOSED:
            return []
        if self.state is LinkState.PAUSED:
            self.state = LinkState.OPENING
            self._wake_at = now + OPEN_TIMEOUT_S
            return [OpenTransport(), Send(self._hello())]
        if self.state is LinkState.OPENING:
            return self._lose(now, f"no WELCOME within {OPEN_TIMEOUT_S:g} s")
        self.state = LinkState.CLOSED
        return [CloseTransport()]

    def receive(self, message: Message, now: float) -> list[Instruction]:
        """What a message demands."""
        self._heard_at = now
        if self.state is LinkState.CLOSING:
            return self._finish() if isinstance(message, ByeAck | Resync) else []
        if isinstance(message, Resync):
            error = SessionSuperseded(message.reason) if message.final else None
            return self._lose(now, message.reason, error)
        if self.state is LinkState.OPENING:
            return self._receive_opening(message, now)
        if self.state is not LinkState.OPEN or isinstance(message, ByeAck):
            return []
        return [Received(message)]

    def close(self, now: float) -> list[Instruction]:
        """Ends the session politely, or at once if there is none."""
        if self.state is not LinkState.OPEN:
            return self._finish()
        self.state = LinkState.CLOSING
        self._wake_at = now + CLOSE_TIMEOUT_S
        return [Send(Bye(self.session))]

    def _compensate_stall(self, now: float) -> None:
        """Our own absence is not the broker's silence: it could not answer beats that we did not send."""
        stall = now - self._expected_at
        if stall > self._heartbeat_s:
            self._heard_at += stall

    def _finish(self) -> list[Instruction]:
        self.state = LinkState.CLOSED
        self.session = 0
        return [CloseTransport()]

    def _receive_opening(self, message: Message, now: float) -> list[Instruction]:
        if isinstance(message, Refusal):
            error = None if message.code in RETRYABLE else Refused(message.code, message.message)
            return self._lose(now, f"HELLO refused: {message.code}: {message.message}", error)
        if not isinstance(message, Welcome):
            return []
        self.state = LinkState.OPEN
        self.session = message.session
        self._pause_s = FIRST_PAUSE_S
        self._heartbeat_s, self._dead_after_s = message.heartbeat_s, message.dead_after_s
        self._beat_at = now + self._heartbeat_s
        self._expected_at = self.deadline()
        return [Opened(message)]

    def _poll_open(self, now: float) -> list[Instruction]:
        if now >= self._heard_at + self._dead_after_s:
            return self._lose(now, f"the broker was silent for {self._dead_after_s:g} s")
        if now < self._beat_at:
            return []
        # After a stall of our own, skip the missed beats rather than sending them in a burst.
        self._beat_at = now + self._heartbeat_s
        progress, running = self._progress()
        return [Send(Heartbeat(self.session, progress, running))]

    def _lose(self, now: float, reason: str, error: RollmqError | None = None) -> list[Instruction]:
        self.session = 0
        self.state = LinkState.CLOSED if error else LinkState.PAUSED
        # The first attempt after a working session is at once (a restarted broker is waited for by libzmq's own
        # reconnect); failures in a row are spaced out.
        self._wake_at = now + self._pause_s * self._rng.uniform(0.5, 1.0)
        self._pause_s = min(self._pause_s * 2, LONGEST_PAUSE_S)
        return [CloseTransport(), Lost(reason, error)]
