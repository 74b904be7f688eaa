"""One generation as a state machine without I/O: what to ask next, and what an answer means.

A weight update may interrupt a request any number of times. The rest is asked for again with the tokens there are,
and with the *original* budget less what is there, so that an interruption changes nothing but the version spans:

- `max_new_tokens` and `min_new_tokens` shrink by what is there;
- a seed stays where the server's random numbers depend on the position; elsewhere the same one would repeat the same
  numbers, so each segment gets a value derived from it;
- penalties count the earlier output as well, where the server can be told; otherwise the request starts over;
- a stop string may begin in one segment and end in the next, where the server cannot see it: such requests start over.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from rollmq.errors import EngineUnavailable
from rollmq.rollout import ModelRequest, ModelResponse
from workers.backends.base import HttpGenerationResult, Segment
from workers.labels import LabelSpan, merge_spans, parse_label

MAX_EMPTY_ABORTS = 20
BACKOFF_S = (0.05, 2.0)

_SEED_STEP = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class EngineResponse:
    """What a generation gave.

    Attributes:
        response: ids, logprobs, spans with integer versions.
        label_spans: the same spans with the engine's own labels `"{epoch}.{version}"`.
    """

    response: ModelResponse
    label_spans: tuple[LabelSpan, ...]

    @property
    def labels(self) -> frozenset[str]:
        """The labels of all weights that produced a token."""
        return frozenset(label for label, _, _ in self.label_spans)


class Generation:
    """The progress of one request.

    Args:
        request: what is asked for.
        carries_penalties, seeds_by_position: as in `RemoteInfBackendProtocol`.
    """

    def __init__(self, request: ModelRequest, *, carries_penalties: bool, seeds_by_position: bool) -> None:
        self._request = request
        self._seeds_by_position = seeds_by_position
        self._carries_penalties = carries_penalties
        self._started = time.monotonic()
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._spans: list[LabelSpan] = []
        self._finish = ""
        self._empty_aborts = 0
        self.interruptions = 0

    @property
    def finished(self) -> bool:
        """Whether nothing more is to be asked."""
        return bool(self._finish)

    def next_segment(self) -> Segment:
        """What to ask for now."""
        gconfig = self._request.gconfig
        done = len(self._ids)
        seed = gconfig.seed
        if seed is not None and self.interruptions and not self._seeds_by_position:
            seed = (seed + self.interruptions * _SEED_STEP) % 2**63
        return Segment(
            prompt_ids=self._request.input_ids + self._ids,
            prior_ids=list(self._ids),
            gconfig=gconfig.new(
                max_new_tokens=gconfig.max_new_tokens - done,
                min_new_tokens=max(0, gconfig.min_new_tokens - done),
                seed=seed,
            ),
        )

    def accept(self, result: HttpGenerationResult) -> float:
        """Takes an answer; returns how many seconds to wait before asking again (0 mostly).

        Raises:
            EngineUnavailable: more tokens than asked for, or too many interruptions in a row without progress.
        """
        before = len(self._ids)
        budget = self._request.gconfig.max_new_tokens
        if before + len(result.output_ids) > budget:
            raise EngineUnavailable(
                f"the engine answered {len(result.output_ids)} tokens; {budget - before} were asked"
            )
        self._spans = merge_spans(self._spans, result.spans, before)
        self._ids += result.output_ids
        self._logprobs += result.output_logprobs
        if result.finish_reason != "abort":
            self._finish = result.finish_reason
            return 0.0
        if len(self._ids) == budget:
            self._finish = "length"
            return 0.0
        return self._interrupted(before)

    def accept_refusal(self) -> float:
        """The engine would not take the request because it is paused: an interruption before the first token."""
        return self._interrupted(len(self._ids))

    def result(self) -> EngineResponse:
        """The whole generation.

        Raises:
            EngineVersionUnknown: a span's label is not `"{epoch}.{version}"`.
            EngineUnavailable: it ended without any token.
        """
        if not self._ids:
            raise EngineUnavailable(f"the engine ended a generation ({self._finish}) without a single token")
        versions = [(parse_label(label)[1], start, end) for label, start, end in self._spans]
        response = ModelResponse(
            input_ids=list(self._request.input_ids),
            output_ids=self._ids,
            output_logprobs=self._logprobs,
            version_spans=versions,
            stop_reason=self._finish,
            latency_s=time.monotonic() - self._started,
            interruptions=self.interruptions,
        )
        return EngineResponse(response, tuple(self._spans))

    def refuse_if_unlabelled(self) -> None:
        """Raises EngineVersionUnknown as soon as a token has a label that is none of ours."""
        for label, _, _ in self._spans:
            parse_label(label)

    def _interrupted(self, before: int) -> float:
        self.interruptions += 1
        gconfig = self._request.gconfig
        if gconfig.stop or (gconfig.frequency_penalty and not self._carries_penalties):
            self._start_over()
        if len(self._ids) > before:
            self._empty_aborts = 0
            return 0.0
        self._empty_aborts += 1
        if self._empty_aborts > MAX_EMPTY_ABORTS:
            raise EngineUnavailable(
                f"the engine interrupted a request {self._empty_aborts} times in a row without a new token"
            )
        return min(BACKOFF_S[0] * 2.0 ** (self._empty_aborts - 1), BACKOFF_S[1])

    def _start_over(self) -> None:
        self._ids, self._logprobs, self._spans = [], [], []
