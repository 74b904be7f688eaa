"""A generate request: its typed form, and the strict reading of it from JSON.

Everything that is the request's fault is found here, before the engine sees it, and raised as
`rollmq.errors.RequestRejected` with the field, the value and the limit in the message.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from rollmq.errors import RequestRejected

MAX_RID_LENGTH = 256
_SEED_LIMIT = 1 << 63
_GREEDY_TEMPERATURE = 1e-5


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a request is checked against: ids are in [0, vocab_size), prompt + output <= max_model_len."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample one request.

    Attributes:
        max_new_tokens: most tokens to generate, at least 1.
        min_new_tokens: EOS and stop ids cannot be sampled before this many tokens exist.
        temperature: divides the logits; below 1e-5 it is greedy, as in vLLM.
        top_p: nucleus mass in (0, 1].
        top_k: keep the k most likely; 0 and -1 keep all.
        greedy: take the most likely token after penalty and masks.
        seed: makes sampling repeatable for the same weights, whatever else is in the batch; None draws one.
        stop_token_ids: end generation and are part of the output; `ignore_eos` does not disable them.
        ignore_eos: go on after the model's own end token.
        frequency_penalty: in [-2, 2]; subtracted from a logit once per occurrence in the output so far.
    """

    max_new_tokens: int
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    greedy: bool = False
    seed: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    frequency_penalty: float = 0.0

    @property
    def is_greedy(self) -> bool:
        """Whether no randomness is involved."""
        return self.greedy or self.temperature < _GREEDY_TEMPERATURE


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One prompt to continue; `rid` is unique among the requests in flight."""

    rid: str
    input_ids: tuple[int, ...]
    params: SamplingParams


_PARAM_NAMES = frozenset(field.name for field in fields(SamplingParams))
_BODY_NAMES = frozenset({"rid", "input_ids", "sampling_params"})


def parse_generate(body: object, limits: ModelLimits) -> GenerateRequest:
    """Read the body of POST /generate.

    Raises:
        RequestRejected: a field is missing, unknown, of a wrong type or out of its range.
    """
    mapping = as_object(body, "the body")
    _refuse_unknown(mapping, _BODY_NAMES, "the body")
    rid = _read_rid(mapping)
    input_ids = _read_ids(mapping.get("input_ids"), "input_ids", limits.vocab_size)
    if not input_ids:
        raise RequestRejected("input_ids is empty; send at least one token id")
    params = parse_sampling_params(mapping.get("sampling_params"), limits)
    total = len(input_ids) + params.max_new_tokens
    if total > limits.max_model_len:
        raise RequestRejected(
            f"prompt of {len(input_ids)} tokens + max_new_tokens {params.max_new_tokens} = {total} is more than "
            f"the model's max_model_len {limits.max_model_len}; shorten one of them"
        )
    return GenerateRequest(rid=rid, input_ids=input_ids, params=params)


def parse_sampling_params(value: object, limits: ModelLimits) -> SamplingParams:
    """Read `sampling_params`.

    Raises:
        RequestRejected: as `parse_generate`.
    """
    mapping = as_object(value, "sampling_params")
    _refuse_unknown(mapping, _PARAM_NAMES, "sampling_params")
    max_new_tokens = _read_int(mapping, "max_new_tokens", None, low=1)
    stop_ids = _read_ids(mapping.get("stop_token_ids", []), "stop_token_ids", limits.vocab_size)
    params = SamplingParams(
        max_new_tokens=max_new_tokens,
        min_new_tokens=_read_int(mapping, "min_new_tokens", 0, low=0, high=max_new_tokens),
        temperature=_read_float(mapping, "temperature", 1.0, low=0.0),
        top_p=_read_top_p(mapping),
        top_k=_read_int(mapping, "top_k", -1, low=-1),
        greedy=_read_bool(mapping, "greedy"),
        seed=_read_seed(mapping),
        stop_token_ids=frozenset(stop_ids),
        ignore_eos=_read_bool(mapping, "ignore_eos"),
        frequency_penalty=_read_float(mapping, "frequency_penalty", 0.0, low=-2.0, high=2.0),
    )
    endings = params.stop_token_ids | limits.eos_token_ids
    if params.min_new_tokens > 0 and len(endings) >= limits.vocab_size:
        raise RequestRejected("min_new_tokens > 0 with every token a stop id leaves nothing to sample")
    return params


def as_object(value: object, what: str) -> Mapping[str, Any]:
    """The value as a JSON object.

    Raises:
        RequestRejected: it is something else.
    """
    if not isinstance(value, Mapping):
        raise RequestRejected(f"{what} must be a JSON object, not {_describe(value)}")
    return value


def read_text(mapping: Mapping[str, Any], name: str) -> str:
    """A required, non-empty string field.

    Raises:
        RequestRejected: it is missing, empty or no string.
    """
    value = mapping.get(name)
    if not isinstance(value, str) or not value:
        raise RequestRejected(f"{name} must be a non-empty string, not {_describe(value)}")
    if not value.isprintable():
        raise RequestRejected(f"{name} {_describe(value)} holds characters that cannot be printed")
    return value


def _read_rid(mapping: Mapping[str, Any]) -> str:
    rid = read_text(mapping, "rid")
    if len(rid) > MAX_RID_LENGTH:
        raise RequestRejected(f"rid has {len(rid)} characters; at most {MAX_RID_LENGTH} are allowed")
    return rid


def _read_ids(value: object, name: str, vocab_size: int) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise RequestRejected(f"{name} must be a list of token ids, not {_describe(value)}")
    for position, token in enumerate(value):
        if type(token) is not int:
            raise RequestRejected(f"{name}[{position}] must be an int, not {_describe(token)}")
        if not 0 <= token < vocab_size:
            raise RequestRejected(
                f"{name}[{position}] is token id {token}, outside the vocabulary: ids are 0 to {vocab_size - 1} "
                f"(vocab_size {vocab_size})"
            )
    return tuple(value)


def _read_int(mapping: Mapping[str, Any], name: str, default: int | None, *, low: int, high: int | None = None) -> int:
    value = mapping.get(name, default)
    if type(value) is not int:
        raise RequestRejected(f"{name} must be an int, not {_describe(value)}")
    _check_range(name, value, low, high)
    return value


def _read_float(
    mapping: Mapping[str, Any], name: str, default: float, *, low: float, high: float | None = None
) -> float:
    value = mapping.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
        raise RequestRejected(f"{name} must be a finite number, not {_describe(value)}")
    _check_range(name, value, low, high)
    return float(value)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an int beyond every float
        return False


def _read_top_p(mapping: Mapping[str, Any]) -> float:
    top_p = _read_float(mapping, "top_p", 1.0, low=0.0, high=1.0)
    if top_p == 0.0:
        raise RequestRejected("top_p is 0; it must be in (0, 1]; use greedy for the most likely token")
    return top_p


def _read_bool(mapping: Mapping[str, Any], name: str) -> bool:
    value = mapping.get(name, False)
    if not isinstance(value, bool):
        raise RequestRejected(f"{name} must be true or false, not {_describe(value)}")
    return value


def _read_seed(mapping: Mapping[str, Any]) -> int | None:
    if mapping.get("seed") is None:
        return None
    return _read_int(mapping, "seed", None, low=-_SEED_LIMIT, high=_SEED_LIMIT - 1)


def _check_range(name: str, value: float, low: float, high: float | None) -> None:
    if value < low or (high is not None and value > high):
        limits = f"at least {low}" if high is None else f"from {low} to {high}"
        raise RequestRejected(f"{name} is {value}; it must be {limits}")


def _refuse_unknown(mapping: Mapping[str, Any], known: frozenset[str], what: str) -> None:
    unknown = sorted(set(mapping) - known)
    if unknown:
        raise RequestRejected(f"unknown key {unknown[0]!r} in {what}; known are {', '.join(sorted(known))}")


def _describe(value: object) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
