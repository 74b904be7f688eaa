"""Reading `sim:tpot_ms=1,tokens=32,...`, the name of a simulated model. Shared by whoever must check one early."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from rollmq.errors import ConfigError

SIM_PREFIX = "sim:"


@dataclass(frozen=True, slots=True)
class SimOptions:
    """How the simulated engine behaves.

    Attributes:
        tpot_ms: milliseconds per output token; 0 is as fast as possible.
        tokens: length of an answer, unless the request's limits end it earlier.
        vocab: size of the vocabulary.
        seed: decides tokens and faults.
        fail: share of requests, by rid, that end in an engine fault.
        hang: share of requests, by rid, that never end until aborted.
        crash: share of requests, by rid, that end the process hard when they start.
        max_len: most tokens of prompt and output together.
    """

    tpot_ms: float = 1.0
    tokens: int = 32
    vocab: int = 320
    seed: int = 0
    fail: float = 0.0
    hang: float = 0.0
    crash: float = 0.0
    max_len: int = 131072


_AT_LEAST_ONE = frozenset({"tokens", "vocab", "max_len"})
_PROBABILITIES = frozenset({"fail", "hang", "crash"})
_NAMES = tuple(field.name for field in fields(SimOptions))


def is_sim(model: str) -> bool:
    """Whether `--model` names a simulated model."""
    return model.startswith(SIM_PREFIX)


def parse_sim_options(model: str) -> SimOptions:
    """Read the options after `sim:`; all are optional.

    Raises:
        ConfigError: an option is unknown, given twice, or its value is not possible; the message names it.
    """
    values: dict[str, float] = {}
    for item in filter(None, model.removeprefix(SIM_PREFIX).split(",")):
        name, _, text = item.partition("=")
        if name not in _NAMES:
            raise ConfigError(f"unknown sim option {name!r} in {model!r}; known are {', '.join(_NAMES)}")
        if name in values:
            raise ConfigError(f"sim option {name!r} is given twice in {model!r}")
        values[name] = _read_value(name, text, model)
    return SimOptions(**values)  # type: ignore[arg-type]


def _read_value(name: str, text: str, model: str) -> float:
    is_float = name == "tpot_ms" or name in _PROBABILITIES
    try:
        value = float(text) if is_float else int(text)
    except ValueError:
        kind = "a number" if is_float else "an int"
        raise ConfigError(f"sim option {name}={text!r} in {model!r} is not {kind}") from None
    if name in _PROBABILITIES and not 0.0 <= value <= 1.0:
        raise ConfigError(f"sim option {name}={text} in {model!r} is no probability from 0 to 1")
    if name in _AT_LEAST_ONE and value < 1:
        raise ConfigError(f"sim option {name}={text} in {model!r} must be at least 1")
    if name == "tpot_ms" and not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"sim option tpot_ms={text} in {model!r} must be 0 or more milliseconds")
    return value
