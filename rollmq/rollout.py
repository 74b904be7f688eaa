"""What users handle: requests, responses, trajectories and groups.

How they travel is `rollmq.bodies`. This module may not import numpy or torch at import time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, overload

from rollmq.errors import ConfigError, ProtocolError

if TYPE_CHECKING:
    import torch

STOP_REASONS = ("stop", "length", "abort")

VersionSpan = tuple[int, int, int]
"""(version, start, end): half open over output tokens."""


@dataclass(frozen=True, slots=True)
class GenerationHyperparameters:
    """How to sample. The same meaning on every engine.

    Attributes:
        n_samples: samples of the prompt; more than one makes a group of that many tasks (`submit_group`, `batches`).
        max_new_tokens: most tokens to generate, at least 1.
        min_new_tokens: no stop before this many tokens.
        temperature: 0 is the same as `greedy`.
        top_p: nucleus mass in (0, 1].
        top_k: 0 or -1 keeps all.
        greedy: take the most likely token.
        stop: stop strings; need an engine with a tokenizer.
        stop_token_ids: ids that end generation; the id is part of the output.
        ignore_eos: go on after the model's own end token; `stop_token_ids` still stop.
        frequency_penalty: in [-2, 2], over output tokens.
        seed: makes sampling repeatable for the same weights.
    """

    n_samples: int = 1
    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    greedy: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    frequency_penalty: float = 0.0
    seed: int | None = None

    def __post_init__(self) -> None:
        _require(not isinstance(self.stop, str), "stop", self.stop, "a list of strings")
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        self._check()

    def _check(self) -> None:
        _require(_is_int(self.n_samples) and self.n_samples >= 1, "n_samples", self.n_samples, "an int >= 1")
        _require(
            _is_int(self.max_new_tokens) and self.max_new_tokens >= 1,
            "max_new_tokens",
            self.max_new_tokens,
            "an int >= 1",
        )
        _require(
            _is_int(self.min_new_tokens) and 0 <= self.min_new_tokens <= self.max_new_tokens,
            "min_new_tokens",
            self.min_new_tokens,
            f"an int in [0, max_new_tokens={self.max_new_tokens}]",
        )
        _require(_is_number(self.temperature, 0.0, 10.0), "temperature", self.temperature, "a number in [0, 10]")
        _require(_is_number(self.top_p, 0.0, 1.0) and self.top_p > 0, "top_p", self.top_p, "a number in (0, 1]")
        _require(_is_int(self.top_k) and self.top_k >= -1, "top_k", self.top_k, "an int >= -1")
        _require(
            _is_number(self.frequency_penalty, -2.0, 2.0),
            "frequency_penalty",
            self.frequency_penalty,
            "a number in [-2, 2]",
        )
        _require(
            all(_is_int(i) and i >= 0 for i in self.stop_token_ids),
            "stop_token_ids",
            self.stop_token_ids,
            "ints >= 0",
        )
        _require(all(isinstance(s, str) and s for s in self.stop), "stop", self.stop, "non-empty strings")
        _require(
            self.seed is None or (_is_int(self.seed) and 0 <= self.seed < 2**63),
            "seed",
            self.seed,
            "None or an int >= 0",
        )

    @property
    def is_greedy(self) -> bool:
        """Whether sampling is deterministic argmax."""
        return self.greedy or self.temperature == 0.0

    def new(self, **changes: Any) -> GenerationHyperparameters:
        """A copy with some fields changed."""
        return replace(self, **changes)


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """One prompt as token ids, with how to sample.

    Attributes:
        input_ids: prompt token ids, at least one, each >= 0.
        gconfig: sampling parameters.
        metadata: free-form values that come back with the trajectory (msgpack types only).
    """

    input_ids: list[int]
    gconfig: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    metadata: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ids = [int(i) for i in self.input_ids]
        _require(len(ids) > 0, "input_ids", "[]", "at least one token id")
        _require(all(0 <= i < 2**31 for i in ids), "input_ids", _first_bad(ids), "ids in [0, 2**31)")
        object.__setattr__(self, "input_ids", ids)


@dataclass(frozen=True, slots=True)
class ModelResponse:
    """What an engine gave for one request, resumed pieces joined.

    Attributes:
        input_ids: the prompt.
        output_ids: generated ids, the stop id included.
        output_logprobs: natural-log probability of each generated id, same length.
        version_spans: (version, start, end) over output tokens, contiguous, covering all.
        stop_reason: `stop`, `length` or `abort`.
        latency_s: wall time of the whole generation, pauses included.
        interruptions: how often it was interrupted and resumed.
    """

    input_ids: list[int]
    output_ids: list[int]
    output_logprobs: list[float]
    version_spans: list[VersionSpan]
    stop_reason: str
    latency_s: float = 0.0
    interruptions: int = 0


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The result of one task.

    Attributes:
        task_id: the broker's id of the task.
        input_ids: the prompt, length P.
        output_ids: everything after the prompt, length T (for many turns: tool and user text included).
        output_logprobs: natural-log probability per output token under the weights that produced it, length T;
            0 where the token was not generated.
        version_spans: (version, start, end), half open over output tokens.
        head_version: oldest version among generated tokens.
        tail_version: newest version among generated tokens.
        stop_reason: `stop`, `length` or `abort`.
        reward: the reward function's value, or None if the task named none.
        loss_mask: 1 for generated tokens, 0 for others, length T.
        worker: name of the worker that ran it.
        attempts: which attempt gave this result, 1 for the first.
        metrics: numbers measured on the way (latency_s, interruptions, ...).
        metadata: the request's metadata.
        stale: True only under `on_stale="deliver"`, when the staleness bound was exceeded at delivery.
        group: id of the group it belongs to.
        member: index inside the group.
        sequence: the delivery sequence of this trainer, grows by delivery.
    """

    task_id: int
    input_ids: list[int]
    output_ids: list[int]
    output_logprobs: list[float]
    version_spans: list[VersionSpan]
    head_version: int
    tail_version: int
    stop_reason: str
    reward: float | None
    loss_mask: list[int]
    worker: str = ""
    attempts: int = 1
    metrics: dict[str, float] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    stale: bool = False
    group: int = 0
    member: int = 0
    sequence: int = 0

    def versions(self) -> list[int]:
        """The version of each output token, length T; -1 where no span covers the token."""
        result = [-1] * len(self.output_ids)
        for version, start, end in self.version_spans:
            result[start:end] = [version] * (end - start)
        return result

    def to_tensors(self) -> dict[str, torch.Tensor]:
        """The trajectory as torch tensors over prompt + output, length L = P + T.

        Returns:
            `input_ids` int64 [L], `attention_mask` bool [L], `loss_mask` bool [L], `logprobs` float32 [L] (0 on the
            prompt), `versions` int64 [L] (-1 on the prompt), `rewards` float32 [] (NaN if there is none).

        Raises:
            ImportError: torch is not installed (extra `embedded`).
        """
        import torch

        prompt = len(self.input_ids)
        length = prompt + len(self.output_ids)
        return {
            "input_ids": torch.tensor(self.input_ids + self.output_ids, dtype=torch.long),
            "attention_mask": torch.ones(length, dtype=torch.bool),
            "loss_mask": torch.tensor([0] * prompt + self.loss_mask, dtype=torch.bool),
            "logprobs": torch.tensor([0.0] * prompt + self.output_logprobs, dtype=torch.float32),
            "versions": torch.tensor([-1] * prompt + self.versions(), dtype=torch.long),
            "rewards": torch.tensor(math.nan if self.reward is None else self.reward, dtype=torch.float32),
        }


@dataclass(frozen=True, slots=True)
class Group(Sequence[Trajectory]):
    """The samples of one prompt, ordered by member.

    Attributes:
        group_id: the broker's id of the group (the id of its first task).
        trajectories: its members.
    """

    group_id: int
    trajectories: tuple[Trajectory, ...]

    @overload
    def __getitem__(self, index: int) -> Trajectory: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Trajectory, ...]: ...
    def __getitem__(self, index: int | slice) -> Trajectory | tuple[Trajectory, ...]:
        return self.trajectories[index]

    def __len__(self) -> int:
        return len(self.trajectories)

    def __iter__(self) -> Iterator[Trajectory]:
        return iter(self.trajectories)

    @property
    def input_ids(self) -> list[int]:
        """The prompt, shared by all members."""
        return self.trajectories[0].input_ids

    @property
    def rewards(self) -> list[float | None]:
        """One reward per member."""
        return [t.reward for t in self.trajectories]

    @property
    def head_version(self) -> int:
        """Oldest version among all members' generated tokens."""
        return min(t.head_version for t in self.trajectories)

    @property
    def tail_version(self) -> int:
        """Newest version among all members' generated tokens."""
        return max(t.tail_version for t in self.trajectories)

    @property
    def task_ids(self) -> list[int]:
        """One task id per member."""
        return [t.task_id for t in self.trajectories]

    def to_tensors(self) -> dict[str, torch.Tensor]:
        """The members right-padded to the longest, batch first: as `Trajectory.to_tensors` with a leading [n]."""
        return pad_tensors([t.to_tensors() for t in self.trajectories])


def pad_tensors(rows: Sequence[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Right-pads `Trajectory.to_tensors` rows to one batch.

    Args:
        rows: n dictionaries of tensors, lengths may differ.

    Returns:
        The same keys with shape [n, longest]; padding is 0, -1 for `versions`; `rewards` has shape [n].
    """
    import torch

    pad_values = {"versions": -1}
    batch: dict[str, torch.Tensor] = {}
    for key in rows[0]:
        if rows[0][key].dim() == 0:
            batch[key] = torch.stack([row[key] for row in rows])
            continue
        batch[key] = torch.nn.utils.rnn.pad_sequence(
            [row[key] for row in rows], batch_first=True, padding_value=pad_values.get(key, 0)
        )
    return batch


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """What a task's body holds: the request, the workflow that runs it, and the workflow's data.

    Attributes:
        request: prompt and sampling parameters; `n_samples` is 1 here.
        workflow: name of a workflow in the worker's own configuration; never an import path.
        data: values for the workflow and its reward function (`data["reward"]` names the reward).
    """

    request: ModelRequest
    workflow: str = "generate"
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EpisodeResult:
    """What a workflow yields; with the task's meta it becomes a `Trajectory`. Fields as there."""

    input_ids: list[int]
    output_ids: list[int]
    output_logprobs: list[float]
    version_spans: list[VersionSpan]
    stop_reason: str
    reward: float | None
    loss_mask: list[int]
    metrics: dict[str, float] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)

    @property
    def head_version(self) -> int:
        """Oldest version among generated tokens.

        Raises:
            ProtocolError: no token was generated, so no version produced anything.
        """
        return min(self._generated_versions())

    @property
    def tail_version(self) -> int:
        """Newest version among generated tokens. Raises as `head_version`."""
        return max(self._generated_versions())

    def _generated_versions(self) -> list[int]:
        versions = [version for version, start, end in self.version_spans if any(self.loss_mask[start:end])]
        if not versions:
            raise ProtocolError("the episode has no generated token with a known version; it cannot be labelled")
        return versions

    def problem(self) -> str | None:
        """What is wrong with the result as data, or None: lengths, finiteness, spans that do not cover."""
        length = len(self.output_ids)
        if len(self.output_logprobs) != length or len(self.loss_mask) != length:
            return (
                f"{length} output ids but {len(self.output_logprobs)} logprobs and {len(self.loss_mask)} mask entries"
            )
        if not all(math.isfinite(value) for value in self.output_logprobs):
            return "a logprob is not finite"
        if self.reward is not None and not math.isfinite(self.reward):
            return f"the reward is {self.reward}"
        if self.stop_reason not in STOP_REASONS:
            return f"stop reason {self.stop_reason!r} is none of {STOP_REASONS}"
        return _span_problem(self.version_spans, length)


def _span_problem(spans: Sequence[VersionSpan], length: int) -> str | None:
    position = 0
    for version, start, end in spans:
        if start < position or end <= start or end > length or version < 0:
            return f"version spans {list(spans)} are not ordered, non-empty and inside {length} tokens"
        position = end
    return None


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object, low: float, high: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def _first_bad(ids: list[int]) -> str:
    return next((f"{i} at position {p}" for p, i in enumerate(ids) if not 0 <= i < 2**31), "")


def _require(ok: bool, name: str, value: object, expected: str) -> None:
    if not ok:
        raise ConfigError(f"{name} is {value!r}; it must be {expected}")
