"""What users handle: requests, responses, trajectories and groups, and their form as opaque bodies.

The broker never decodes a body: its sender puts a CRC-32 in front, its final receiver checks it. Token ids travel
as little-endian int32 bytes and log-probabilities as float32 bytes, since msgpack lists of numbers are slow. This
module may not import numpy or torch at import time.
"""

from __future__ import annotations

import math
import struct
import sys
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar, overload

import msgpack

from rollmq.errors import ConfigError, ProtocolError

if TYPE_CHECKING:
    import torch

BODY_FORMAT = 1
_CRC = struct.Struct("<I")
STOP_REASONS = ("stop", "length", "abort")

_Number = TypeVar("_Number", int, float)

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


# --- bodies -----------------------------------------------------------------------------------------------------


def encode_task_spec(spec: TaskSpec) -> bytes:
    """A task's body.

    Raises:
        ConfigError: `data` or `metadata` holds something msgpack cannot carry.
    """
    gconfig = spec.request.gconfig
    return _pack(
        {
            "format": BODY_FORMAT,
            "workflow": spec.workflow,
            "input_ids": _ints_to_bytes(spec.request.input_ids),
            "gconfig": {f.name: getattr(gconfig, f.name) for f in fields(gconfig)},
            "data": spec.data,
            "metadata": spec.request.metadata,
        },
        "the task's data or metadata",
    )


def decode_task_spec(body: bytes) -> TaskSpec:
    """The inverse of `encode_task_spec`.

    Raises:
        ProtocolError: the bytes are not a task body.
    """
    raw = _unpack(body, "task body")
    try:
        request = ModelRequest(
            input_ids=_bytes_to_ints(raw["input_ids"]),
            gconfig=GenerationHyperparameters(**raw["gconfig"]),
            metadata=raw["metadata"],
        )
        return TaskSpec(request=request, workflow=str(raw["workflow"]), data=dict(raw["data"]))
    except (KeyError, TypeError, ValueError, ConfigError) as error:
        raise ProtocolError(f"task body does not decode: {error}") from error


def encode_episode(episode: EpisodeResult, *, worker: str, attempt: int) -> bytes:
    """A result's body.

    Raises:
        ConfigError: metrics or metadata hold something msgpack cannot carry.
    """
    return _pack(
        {
            "format": BODY_FORMAT,
            "input_ids": _ints_to_bytes(episode.input_ids),
            "output_ids": _ints_to_bytes(episode.output_ids),
            "output_logprobs": _little_endian(array("f", episode.output_logprobs)).tobytes(),
            "version_spans": [list(span) for span in episode.version_spans],
            "stop_reason": episode.stop_reason,
            "reward": episode.reward,
            "loss_mask": bytes(episode.loss_mask),
            "metrics": episode.metrics,
            "metadata": episode.metadata,
            "worker": worker,
            "attempt": attempt,
        },
        "the episode's metrics or metadata",
    )


def decode_trajectory(
    body: bytes, *, task_id: int, group: int = 0, member: int = 0, sequence: int = 0, stale: bool = False
) -> Trajectory:
    """The trajectory in a result's body, with what the broker's meta says of the task.

    Raises:
        ProtocolError: the bytes are not a result body.
    """
    raw = _unpack(body, "result body")
    try:
        episode = EpisodeResult(
            input_ids=_bytes_to_ints(raw["input_ids"]),
            output_ids=_bytes_to_ints(raw["output_ids"]),
            output_logprobs=_bytes_to_floats(raw["output_logprobs"]),
            version_spans=[(int(v), int(s), int(e)) for v, s, e in raw["version_spans"]],
            stop_reason=str(raw["stop_reason"]),
            reward=raw["reward"],
            loss_mask=list(raw["loss_mask"]),
            metrics=dict(raw["metrics"]),
            metadata=dict(raw["metadata"]),
        )
        worker, attempt = str(raw["worker"]), int(raw["attempt"])
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"result body does not decode: {error}") from error
    problem = episode.problem()
    if problem is not None:
        raise ProtocolError(f"result body of task {task_id} is inconsistent: {problem}")
    return Trajectory(
        task_id=task_id,
        input_ids=episode.input_ids,
        output_ids=episode.output_ids,
        output_logprobs=episode.output_logprobs,
        version_spans=episode.version_spans,
        head_version=episode.head_version,
        tail_version=episode.tail_version,
        stop_reason=episode.stop_reason,
        reward=episode.reward,
        loss_mask=episode.loss_mask,
        worker=worker,
        attempts=attempt,
        metrics=episode.metrics,
        metadata=episode.metadata,
        stale=stale,
        group=group,
        member=member,
        sequence=sequence,
    )


def _pack(value: Mapping[str, Any], what: str) -> bytes:
    try:
        content: bytes = msgpack.packb(value, use_bin_type=True)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"{what} cannot be sent: {error}; use only None, bool, int, float, str, bytes, list and dict"
        ) from error
    return _CRC.pack(zlib.crc32(content)) + content


def _unpack(body: bytes, what: str) -> dict[str, Any]:
    content = body[_CRC.size :]
    if len(body) < _CRC.size or _CRC.unpack_from(body)[0] != zlib.crc32(content):
        raise ProtocolError(f"{what} of {len(body)} bytes fails its checksum")
    try:
        raw = msgpack.unpackb(content, raw=False, strict_map_key=True, ext_hook=_refuse_ext)
    except (ValueError, OverflowError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise ProtocolError(f"{what} of {len(body)} bytes is not msgpack: {error}") from error
    if not isinstance(raw, dict) or raw.get("format") != BODY_FORMAT:
        raise ProtocolError(f"{what} of {len(body)} bytes is not of format {BODY_FORMAT}")
    return raw


def _refuse_ext(code: int, data: bytes) -> object:
    raise ValueError(f"extension type {code} is not allowed")


def _ints_to_bytes(values: Sequence[int]) -> bytes:
    return _little_endian(array("i", values)).tobytes()


def _bytes_to_ints(data: bytes) -> list[int]:
    values = array("i")
    values.frombytes(data)
    return _little_endian(values).tolist()


def _bytes_to_floats(data: bytes) -> list[float]:
    values = array("f")
    values.frombytes(data)
    return _little_endian(values).tolist()


def _little_endian(values: array[_Number]) -> array[_Number]:
    if sys.byteorder == "big":
        values.byteswap()
    return values


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object, low: float, high: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def _first_bad(ids: list[int]) -> str:
    return next((f"{i} at position {p}" for p, i in enumerate(ids) if not 0 <= i < 2**31), "")


def _require(ok: bool, name: str, value: object, expected: str) -> None:
    if not ok:
        raise ConfigError(f"{name} is {value!r}; it must be {expected}")
