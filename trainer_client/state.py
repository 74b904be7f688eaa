"""What a trainer stores in its checkpoint, so that a restart repeats and skips nothing.

Typed here, a plain JSON-serialisable dict outside. Loading checks everything it reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollmq.errors import ConfigError

STATE_FORMAT = 1


@dataclass(frozen=True, slots=True)
class BatchProgress:
    """Data position of `batches`.

    Attributes:
        iteration: how many iterations (calls of `batches`) came before the one this describes.
        floor: every prompt of it at a position below this was yielded or reported as failed.
        settled: positions from `floor` on for which the same holds.
    """

    iteration: int = 0
    floor: int = 0
    settled: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ClientState:
    """The state of a client between two batches.

    Attributes:
        trainer: name of the trainer it belongs to.
        policy: name of the policy.
        run: random text that makes the idempotency keys of `batches` those of this training run.
        version: policy version at that moment.
        epoch: run epoch of the policy at that moment (for the reader; a restart raises it).
        cursor: every delivery with a sequence up to this one was taken or is gone.
        taken: sequences above the cursor that were taken too.
        unconfirmed: tasks that were taken, but whose acknowledgement by the broker was still under way.
        batches: data position.
    """

    trainer: str
    policy: str
    run: str
    version: int
    epoch: int
    cursor: int
    taken: tuple[int, ...]
    unconfirmed: tuple[int, ...]
    batches: BatchProgress

    def to_dict(self) -> dict[str, Any]:
        """The state as JSON types."""
        return {
            "format": STATE_FORMAT,
            "trainer": self.trainer,
            "policy": self.policy,
            "run": self.run,
            "version": self.version,
            "epoch": self.epoch,
            "cursor": self.cursor,
            "taken": list(self.taken),
            "unconfirmed": list(self.unconfirmed),
            "batches": {
                "iteration": self.batches.iteration,
                "floor": self.batches.floor,
                "settled": list(self.batches.settled),
            },
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any], *, trainer: str, policy: str) -> ClientState:
        """The inverse of `to_dict`.

        Raises:
            ConfigError: it is of another format, trainer or policy, or a value is missing or wrong.
        """
        if not isinstance(state, Mapping) or state.get("format") != STATE_FORMAT:
            found = state.get("format") if isinstance(state, Mapping) else type(state).__name__
            raise ConfigError(f"client state is of format {found!r}, not {STATE_FORMAT}; it is not ours or too new")
        _check_same("trainer", _text(state, "trainer"), trainer)
        _check_same("policy", _text(state, "policy"), policy)
        progress = state.get("batches")
        if not isinstance(progress, Mapping):
            raise ConfigError(f"client state has batches {progress!r:.60}; it must be a map")
        return cls(
            trainer=trainer,
            policy=policy,
            run=_text(state, "run"),
            version=_count(state, "version"),
            epoch=_count(state, "epoch"),
            cursor=_count(state, "cursor"),
            taken=_counts(state, "taken"),
            unconfirmed=_counts(state, "unconfirmed"),
            batches=BatchProgress(
                iteration=_count(progress, "iteration"),
                floor=_count(progress, "floor"),
                settled=_counts(progress, "settled"),
            ),
        )


def _check_same(what: str, found: str, expected: str) -> None:
    if found != expected:
        raise ConfigError(
            f"client state belongs to {what} {found!r}, this client is of {what} {expected!r}; "
            "load it into a client with the same trainer and policy names"
        )


def _text(values: Mapping[str, Any], name: str) -> str:
    value = values.get(name)
    if not isinstance(value, str) or not value:
        raise ConfigError(f"client state has {name} {value!r:.60}; it must be a non-empty text")
    return value


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _count(values: Mapping[str, Any], name: str) -> int:
    value = values.get(name)
    if not _is_count(value):
        raise ConfigError(f"client state has {name} {value!r:.60}; it must be an int >= 0")
    assert isinstance(value, int)
    return value


def _counts(values: Mapping[str, Any], name: str) -> tuple[int, ...]:
    value = values.get(name)
    if not isinstance(value, list | tuple) or not all(_is_count(v) for v in value):
        raise ConfigError(f"client state has {name} {value!r:.60}; it must be a list of ints >= 0")
    return tuple(sorted(set(value)))
