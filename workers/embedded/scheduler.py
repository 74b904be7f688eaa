"""Continuous batching: one thread that owns the model and every sequence.

Theory of operation. Other threads put commands into an inbox; the thread takes them between two steps of the
model, so that each command acts at a step boundary. A request is *held* (it came while not running), *waiting*
(for room in the batch) or *running* (in the model). The states:

    RUNNING --pause(keep|abort)--> PAUSED --resume--> RUNNING
    RUNNING --pause(wait)--> DRAINING --nothing in flight--> PAUSED

`keep` takes running sequences out of the model and puts them at the head of the queue; after `resume` they are
prefilled again, prompt and output, by the weights of that time. Weights change only while PAUSED.
An unexpected exception ends the thread, fails every request and makes the engine unhealthy: state that may be
broken is never used again.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Any

from rollmq.errors import EngineError, EngineUnavailable, RequestRejected
from workers.embedded.errors import Conflict
from workers.embedded.inbox import Command, Inbox, fail, new_future
from workers.embedded.interface import Emission, Model
from workers.embedded.request import GenerateRequest
from workers.embedded.sequence import FinishReason, GenerationResult, SequenceState

logger = logging.getLogger(__name__)


class PauseMode(StrEnum):
    """What a pause does to requests in flight: freeze them, answer with partial output, or finish them first."""

    KEEP = "keep"
    ABORT = "abort"
    WAIT = "wait"


class SchedulerState(Enum):
    """Whether sequences advance and new ones start (see the module's theory of operation)."""

    RUNNING = "running"
    DRAINING = "draining"
    PAUSED = "paused"


@dataclass(frozen=True, slots=True)
class SchedulerStatus:
    """Counters for /info; `failure` says why the engine died, if it did."""

    weight_version: str
    running: int
    waiting: int
    paused: bool
    generated_tokens: int
    failure: str | None


class Scheduler:
    """Runs requests through a model. Every public method may be called from any thread and returns at once."""

    def __init__(self, model: Model, *, max_batch: int, weight_version: str, seed: int | str | None = None) -> None:
        self._model = model
        self._max_batch = max_batch
        self._weight_version = weight_version
        self._seeds = random.Random(seed)
        self._state = SchedulerState.RUNNING
        self._running: dict[SequenceState, None] = {}
        self._waiting: deque[SequenceState] = deque()
        self._held: deque[SequenceState] = deque()
        self._answers: dict[SequenceState, Future[GenerationResult]] = {}
        self._pauses: list[Future[None]] = []
        self._generated_tokens = 0
        self._failure: str | None = None
        self._inbox = Inbox()
        # Shared with the callers' threads, hence guarded.
        self._by_rid: dict[str, SequenceState] = {}
        self._by_rid_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="embedded-scheduler", daemon=True)
        model.set_weight_version(weight_version)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self, timeout: float) -> bool:
        """Abort what is in flight and end the thread; False if a step of the model outlasts `timeout` seconds."""
        self._inbox.end("the engine is shutting down")
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def status(self) -> SchedulerStatus:
        """Counters of this moment; sequences frozen by a pause count as waiting."""
        return SchedulerStatus(
            weight_version=self._weight_version,
            running=len(self._running),
            waiting=len(self._waiting) + len(self._held),
            paused=self._state is SchedulerState.PAUSED,
            generated_tokens=self._generated_tokens,
            failure=self._failure,
        )

    def submit(self, request: GenerateRequest) -> Future[GenerationResult]:
        """Queue a request.

        Raises:
            RequestRejected: a request with this rid is in flight.
            EngineUnavailable: the engine died or is closing.
        """
        seed = request.params.seed if request.params.seed is not None else self._seeds.getrandbits(63)
        sequence = SequenceState(request, seed, self._model.limits.eos_token_ids)
        answer: Future[GenerationResult] = new_future()
        with self._by_rid_lock:
            if request.rid in self._by_rid:
                raise RequestRejected(f"a request with rid {request.rid!r} is in flight; use a new rid")
            self._inbox.post(Command(lambda: self._enqueue(sequence, answer), answer))
            self._by_rid[request.rid] = sequence
        return answer

    def abort(self, rids: Iterable[str]) -> Future[int]:
        """Answer these requests now with what they have; gives how many were in flight."""
        with self._by_rid_lock:
            sequences = [self._by_rid[rid] for rid in set(rids) if rid in self._by_rid]
        return self._inbox.call(lambda: self._abort(sequences))

    def abort_all(self) -> Future[int]:
        """Answer every request in flight or held now with what it has; gives how many."""
        return self._inbox.call(lambda: self._abort([*self._answers]))

    def abandon(self, rid: str) -> None:
        """Abort a request whose client has gone; its rid may be used again at once."""
        with self._by_rid_lock:
            sequence = self._by_rid.pop(rid, None)
        if sequence is not None and self._inbox.ended is None:
            with contextlib.suppress(EngineUnavailable):
                self._inbox.call(lambda: self._abort([sequence]))

    def pause(self, mode: PauseMode) -> Future[None]:
        """Stop advancing sequences; done when nothing is in the model. Requests that come later are held.

        The future fails with Conflict if `resume` comes before the pause has settled.
        """
        settled: Future[None] = new_future()
        self._inbox.post(Command(lambda: self._pause(mode, settled), settled))
        return settled

    def resume(self) -> Future[None]:
        """Go on; nothing happens if not paused."""
        return self._inbox.call(self._resume)

    def update_weights(self, path: str, version: str) -> Future[float]:
        """Load weights and label them; gives the seconds it took.

        The future fails with Conflict if not paused, BadModelDirectory if the weights are refused.
        """
        return self._inbox.call(lambda: self._update_weights(path, version))

    def set_weight_version(self, version: str) -> Future[str]:
        """Relabel the present weights at the next step boundary."""
        return self._inbox.call(lambda: self._set_weight_version(version))

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        command: Command | None = None
        try:
            while self._inbox.ended is None:
                self._inbox.wait(self._seconds_to_next_step)
                while (command := self._inbox.pop()) is not None:
                    command.run()
                self._step()
            self._abort([*self._answers])
            self._fail_all(EngineUnavailable("the engine is shutting down; send the request to another server"))
        except Exception as error:
            logger.exception("the engine loop died; every request in flight fails")
            self._failure = f"the engine loop died of {type(error).__name__}: {error}"
            self._inbox.end(self._failure)
            fault = EngineError(f"{self._failure}; restart the server")
            if command is not None:
                fail(command.future, fault)
            self._fail_all(fault)

    def _seconds_to_next_step(self) -> float | None:
        if self._state is SchedulerState.PAUSED:
            return None
        if self._waiting and len(self._running) < self._max_batch:
            return 0.0
        due = self._model.next_step_at() if self._running else None
        return None if due is None else due - time.monotonic()

    def _step(self) -> None:
        if self._state is not SchedulerState.PAUSED:
            self._admit()
            if self._running:
                self._apply(self._model.decode())
        if self._state is SchedulerState.DRAINING and not self._running and not self._waiting:
            self._settle()

    def _admit(self) -> None:
        starting: list[SequenceState] = []
        while self._waiting and len(self._running) + len(starting) < self._max_batch:
            starting.append(self._waiting.popleft())
        if starting:
            self._running.update(dict.fromkeys(starting))
            self._apply(self._model.prefill(starting))

    def _apply(self, emissions: Iterable[Emission]) -> None:
        ended = []
        for emission in emissions:
            sequence = emission.sequence
            if emission.fault is not None:
                self._answer(sequence, EngineError(f"request {sequence.request.rid!r}: {emission.fault}"))
                ended.append(sequence)
                continue
            self._generated_tokens += len(emission.token_ids)
            sequence.accept(
                emission.token_ids, emission.logprobs, self._weight_version, answer_ended=emission.answer_ended
            )
            if sequence.is_finished:
                self._answer(sequence)
                ended.append(sequence)
        leaving = [sequence for sequence in ended if sequence in self._running]
        for sequence in leaving:
            del self._running[sequence]
        if leaving:
            self._apply(self._model.remove(leaving))

    def _take_out(self, sequences: Collection[SequenceState]) -> list[SequenceState]:
        """Take running sequences out of the model; give those that did not finish by it, in their order."""
        inside = [sequence for sequence in sequences if sequence in self._running]
        for sequence in inside:
            del self._running[sequence]
        if inside:
            self._apply(self._model.remove(inside))
        return [sequence for sequence in inside if sequence in self._answers]

    def _answer(self, sequence: SequenceState, error: Exception | None = None) -> None:
        answer = self._answers.pop(sequence)
        with self._by_rid_lock:
            if self._by_rid.get(sequence.request.rid) is sequence:
                del self._by_rid[sequence.request.rid]
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(sequence.result())

    def _fail_all(self, error: EngineError) -> None:
        futures: list[Future[Any]] = [*self._answers.values(), *self._pauses]
        for future in futures:
            fail(future, error)
        self._answers.clear()
        self._pauses.clear()
        self._inbox.fail_all(error)

    # -- commands, run by the thread -----------------------------------------------------------------------------

    def _enqueue(self, sequence: SequenceState, answer: Future[GenerationResult]) -> None:
        self._answers[sequence] = answer
        (self._waiting if self._state is SchedulerState.RUNNING else self._held).append(sequence)

    def _abort(self, sequences: Collection[SequenceState]) -> int:
        in_flight = [sequence for sequence in sequences if sequence in self._answers]
        self._take_out(in_flight)
        count = 0
        for sequence in in_flight:
            if sequence in self._answers:
                sequence.finish_reason = FinishReason.ABORT
                self._answer(sequence)
                count += 1
        self._waiting = deque(sequence for sequence in self._waiting if sequence in self._answers)
        self._held = deque(sequence for sequence in self._held if sequence in self._answers)
        return count

    def _pause(self, mode: PauseMode, settled: Future[None]) -> None:
        self._pauses.append(settled)
        if mode is PauseMode.ABORT:
            self._abort([*self._running, *self._waiting])
        elif mode is PauseMode.KEEP:
            self._freeze()
        if mode is PauseMode.WAIT and (self._running or self._waiting):
            self._state = SchedulerState.DRAINING
        else:
            self._settle()

    def _freeze(self) -> None:
        self._waiting.extendleft(reversed(self._take_out([*self._running])))

    def _settle(self) -> None:
        self._state = SchedulerState.PAUSED
        for settled in self._pauses:
            settled.set_result(None)
        self._pauses.clear()

    def _resume(self) -> None:
        self._state = SchedulerState.RUNNING
        self._waiting.extend(self._held)
        self._held.clear()
        for settled in self._pauses:
            settled.set_exception(Conflict("the pause was called off by a resume before it settled; pause again"))
        self._pauses.clear()

    def _update_weights(self, path: str, version: str) -> float:
        if self._state is not SchedulerState.PAUSED:
            raise Conflict(f"weights can only be updated while paused; the engine is {self._state.value}: pause first")
        started = time.monotonic()
        self._model.load_weights(path)
        self._relabel(version)
        seconds = time.monotonic() - started
        logger.info("weights %s loaded from %s in %.3f s", version, path, seconds)
        return seconds

    def _set_weight_version(self, version: str) -> str:
        self._freeze()
        self._relabel(version)
        return version

    def _relabel(self, version: str) -> None:
        self._weight_version = version
        self._model.set_weight_version(version)
