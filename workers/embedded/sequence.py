"""The state of one request while it is generated: its tokens, their versions, and when it is done.

Pure: no torch, no I/O. Only the scheduler's thread changes a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from workers.embedded.request import GenerateRequest


class FinishReason(StrEnum):
    """Why generation ended: an EOS or stop id (or the sim's answer length), the token budget, or an abort."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(slots=True)
class VersionSpan:
    """Output tokens [start, end) were produced by the weights `version`."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """The answer to one request. Spans are contiguous and cover all output tokens."""

    rid: str
    output_ids: list[int]
    output_logprobs: list[float]
    finish_reason: FinishReason
    stop_reason: int | None
    spans: list[VersionSpan]
    prompt_tokens: int


@dataclass(slots=True, eq=False)
class SequenceState:
    """One request in flight. Compared and hashed by identity.

    Attributes:
        request: what was asked.
        seed: the request's seed, or one drawn for it.
        eos_token_ids: the model's own end tokens.
        output_ids: tokens so far.
        output_logprobs: log-softmax of the raw logits at each output token.
        spans: which weights made which output tokens.
        finish_reason: None while unfinished.
        stop_reason: the id in `stop_token_ids` that ended it, else None.
    """

    request: GenerateRequest
    seed: int
    eos_token_ids: frozenset[int]
    output_ids: list[int] = field(default_factory=list)
    output_logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None

    @property
    def length(self) -> int:
        """Tokens of prompt and output together."""
        return len(self.request.input_ids) + len(self.output_ids)

    @property
    def tokens(self) -> list[int]:
        """Prompt and output in one list."""
        return [*self.request.input_ids, *self.output_ids]

    @property
    def is_finished(self) -> bool:
        """Whether no more tokens will come."""
        return self.finish_reason is not None

    @property
    def masked_ids(self) -> frozenset[int]:
        """Ids that may not be the next token: EOS and stop ids while below `min_new_tokens`."""
        if len(self.output_ids) >= self.request.params.min_new_tokens:
            return frozenset()
        return self.eos_token_ids | self.request.params.stop_token_ids

    def is_ending(self, token: int) -> bool:
        """Whether this token, if it is sampled, ends the sequence."""
        params = self.request.params
        return token in params.stop_token_ids or (not params.ignore_eos and token in self.eos_token_ids)

    def accept(self, token_ids: list[int], logprobs: list[float], version: str, *, answer_ended: bool = False) -> None:
        """Append new tokens made by the weights `version`; only the last one may end the sequence.

        Args:
            answer_ended: the model has nothing more to say, whatever the last token is.
        """
        if token_ids:
            self._extend(token_ids, logprobs, version)
            if self.is_ending(token_ids[-1]):
                self._stop_at(token_ids[-1])
                return
        if answer_ended:
            self.finish_reason = FinishReason.STOP
        elif len(self.output_ids) >= self.request.params.max_new_tokens:
            self.finish_reason = FinishReason.LENGTH

    def result(self) -> GenerationResult:
        """The answer of a finished sequence."""
        if self.finish_reason is None:
            raise ValueError(f"request {self.request.rid!r} is not finished")
        return GenerationResult(
            rid=self.request.rid,
            output_ids=self.output_ids,
            output_logprobs=self.output_logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            spans=self.spans,
            prompt_tokens=len(self.request.input_ids),
        )

    def _extend(self, token_ids: list[int], logprobs: list[float], version: str) -> None:
        start = len(self.output_ids)
        self.output_ids.extend(token_ids)
        self.output_logprobs.extend(logprobs)
        end = len(self.output_ids)
        if self.spans and self.spans[-1].version == version:
            self.spans[-1].end = end
        else:
            self.spans.append(VersionSpan(version, start, end))

    def _stop_at(self, token: int) -> None:
        self.finish_reason = FinishReason.STOP
        # As in vLLM, the reason is null when the model's own EOS ended it.
        is_eos = token in self.eos_token_ids and not self.request.params.ignore_eos
        self.stop_reason = None if is_eos else token
