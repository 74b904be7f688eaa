"""What differs between inference servers, as pure functions over requests and answers.

A backend builds command lines and HTTP requests and reads answers. It does no I/O but reading a model's
configuration, holds no state, and decides no policy: retries, pauses, deadlines and versions are the engine's
(`workers/engine.py`), processes the launcher's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from rollmq.errors import EngineUnavailable, RequestRejected
from rollmq.rollout import GenerationHyperparameters
from workers.http_client import HttpRequest
from workers.labels import LabelSpan
from workers.launch_spec import EngineInstallation, EngineRequirement, LaunchSpec

PauseMode = Literal["keep", "abort", "wait"]
"""What happens to requests in flight when weights change: go on with the new ones, be interrupted, end first."""

PAUSE_MODES: tuple[PauseMode, ...] = ("keep", "abort", "wait")


@dataclass(frozen=True, slots=True)
class HttpGenerationResult:
    """One answer to one generation request.

    Attributes:
        output_ids: generated ids, the stop id included.
        output_logprobs: one per id.
        spans: (label, start, end) as the engine reports them, covering all output ids.
        finish_reason: `stop`, `length` or `abort`.
        stop_reason: the id or string that stopped it, if the engine says.
    """

    output_ids: list[int]
    output_logprobs: list[float]
    spans: list[LabelSpan]
    finish_reason: str
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a request must respect.

    Attributes:
        vocab_size: ids are in [0, vocab_size).
        max_model_len: prompt + output, in tokens.
        eos_token_ids: the model's own end tokens.
        stop_strings: whether the server can match stop strings (it has a tokenizer).
    """

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...] = ()
    stop_strings: bool = False


@dataclass(frozen=True, slots=True)
class Segment:
    """What to ask for next: a whole request, or the rest of an interrupted one.

    Attributes:
        prompt_ids: the prompt, followed by what was already generated.
        prior_ids: what was already generated (the tail of `prompt_ids`), for penalties over output tokens.
        gconfig: sampling parameters with the budget that is left.
    """

    prompt_ids: list[int]
    prior_ids: list[int]
    gconfig: GenerationHyperparameters


@dataclass(frozen=True, slots=True)
class WeightUpdateRequests:
    """Calls that load weights, in order.

    Attributes:
        requests: the calls.
        atomic: whether a failure surely leaves the old weights whole.
        sets_label: whether they set the version label as well, together with the weights.
    """

    requests: tuple[HttpRequest, ...]
    atomic: bool
    sets_label: bool


class RemoteInfBackendProtocol(Protocol):
    """One kind of inference server."""

    @property
    def name(self) -> str:
        """The name used by `--engine`."""

    @property
    def carries_penalties(self) -> bool:
        """Whether the rest of an interrupted request can be asked for with penalties over all its output tokens."""

    @property
    def seeds_by_position(self) -> bool:
        """Whether a seed gives the same random number at the same position, wherever a request was interrupted."""

    # --- launch
    def requirement(self, spec: LaunchSpec) -> EngineRequirement:
        """What must be importable behind the interpreter."""

    def check_launch(self, spec: LaunchSpec, installation: EngineInstallation) -> None:
        """Raises ConfigError if this model or version cannot be served."""

    def launch_command(
        self, spec: LaunchSpec, installation: EngineInstallation, *, port: int, served_name: str
    ) -> tuple[str, ...]:
        """Program and arguments."""

    def launch_environment(self, spec: LaunchSpec, installation: EngineInstallation) -> dict[str, str]:
        """What to add to the environment."""

    # --- questions
    def health_request(self) -> HttpRequest:
        """Succeeds if the server serves; cheap, also while paused."""

    def identity_request(self) -> HttpRequest:
        """Its answer names the server's served name and limits."""

    def parse_identity(self, body: Mapping[str, Any]) -> str | None:
        """The served name."""

    def parse_limits(self, spec: LaunchSpec, body: Mapping[str, Any]) -> ModelLimits:
        """Limits, from the answer to `identity_request` and the model's files."""

    def version_request(self) -> HttpRequest:
        """Its answer holds the weight version label."""

    def parse_version(self, body: Mapping[str, Any]) -> str | None:
        """The label, None if the answer has none."""

    # --- generation
    def check_supported(self, gconfig: GenerationHyperparameters, limits: ModelLimits) -> None:
        """Raises RequestRejected for a parameter that this server cannot honour."""

    def generation_request(self, rid: str, segment: Segment, limits: ModelLimits) -> HttpRequest:
        """Asks for one completion of `segment`."""

    def parse_generation(self, body: Mapping[str, Any]) -> HttpGenerationResult:
        """The answer, checked. Raises EngineUnavailable if it does not make sense."""

    def abort_request(self, rids: Sequence[str]) -> HttpRequest:
        """Ends these requests early."""

    # --- weights
    def pause_request(self, mode: PauseMode) -> HttpRequest:
        """Answers when the pause has settled."""

    def resume_request(self) -> HttpRequest:
        """Ends the pause."""

    def weight_update_requests(self, path: str, label: str) -> WeightUpdateRequests:
        """Loads a directory of weights, while paused."""

    def set_version_request(self, label: str) -> HttpRequest:
        """Sets the label without touching weights."""

    def cache_reset_request(self) -> HttpRequest | None:
        """Drops what was computed with earlier weights; None if the server does so by itself."""


def checked_result(
    output_ids: object, output_logprobs: object, spans: object, finish_reason: object, stop_reason: object, engine: str
) -> HttpGenerationResult:
    """Builds a result from parsed JSON after checking types, lengths, finiteness and coverage of the spans.

    Args:
        output_ids, output_logprobs: lists of the same length.
        spans: list of {"version", "start", "end"}; may be absent only if there are no tokens.
        finish_reason, stop_reason: as the engine reports them.
        engine: name for the error texts.

    Raises:
        EngineUnavailable: anything is inconsistent. That is the engine's fault; the sample is dropped.
    """
    try:
        ids = [_as_int(i) for i in _as_list(output_ids)]
        logprobs = [float(value) for value in _as_list(output_logprobs)]
        labelled = [(_as_str(s["version"]), _as_int(s["start"]), _as_int(s["end"])) for s in _as_list(spans or [])]
    except (TypeError, ValueError, KeyError) as error:
        raise EngineUnavailable(f"{engine} answered a generation that cannot be read: {error!r:.200}") from error
    problem = _result_problem(ids, logprobs, labelled, finish_reason)
    if problem is not None:
        raise EngineUnavailable(f"{engine} answered an inconsistent generation: {problem}")
    reason = stop_reason if isinstance(stop_reason, int | str) else None
    return HttpGenerationResult(ids, logprobs, [s for s in labelled if s[1] < s[2]], str(finish_reason), reason)


def _result_problem(ids: list[int], logprobs: list[float], spans: list[LabelSpan], finish: object) -> str | None:
    if len(ids) != len(logprobs):
        return f"{len(ids)} token ids but {len(logprobs)} logprobs"
    bad = next((value for value in logprobs if not math.isfinite(value)), None)
    if bad is not None:
        return f"a logprob is {bad}"
    if finish not in ("stop", "length", "abort"):
        return f"finish reason {finish!r:.40}"
    position = 0
    for _, start, end in spans:
        if start != position or end < start:
            return f"version spans {spans[:4]!r:.200} are not contiguous"
        position = end
    if position != len(ids):
        return f"version spans cover {position} of {len(ids)} tokens"
    return None


def reject_if(condition: bool, message: str) -> None:
    """Raises RequestRejected if the condition holds."""
    if condition:
        raise RequestRejected(message)


def with_eos(gconfig: GenerationHyperparameters, eos_token_ids: Sequence[int]) -> tuple[int, ...]:
    """The stop ids to send: those asked for, and the model's own end tokens unless they are to be ignored."""
    own = () if gconfig.ignore_eos else eos_token_ids
    return tuple(dict.fromkeys((*gconfig.stop_token_ids, *own)))


def _as_list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"expected a list, got {type(value).__name__}")
    return value


def _as_int(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"expected an int, got {value!r:.40}")
    return value


def _as_str(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a string, got {value!r:.40}")
    return value
