"""The arguments of a client, checked once. No pydantic: importing a trainer's client must be quick."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rollmq.errors import ConfigError
from rollmq.messages import NAME_LIMIT, OnStale, PolicySettings
from trainer_client.transport import check_address

WAIT_LIMIT_S = 3600.0
"""Default limit of a wait for rollouts; the broker's default deadline of a task is the same."""


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """What a client is made with; see `AsyncRolloutClient`.

    Raises:
        ConfigError: a value is wrong; names it.
    """

    address: str
    trainer: str
    policy: str
    consumer_batch_size: int
    max_head_offpolicyness: int
    max_concurrent_rollouts: int | None
    on_stale: str
    keys: object
    timeout: float
    owner: bool

    def __post_init__(self) -> None:
        check_address(self.address)
        for name, value in (("trainer", self.trainer), ("policy", self.policy)):
            if not isinstance(value, str) or not 1 <= len(value) <= NAME_LIMIT:
                raise ConfigError(f"{name} is {value!r:.60}; it must be a name of 1 to {NAME_LIMIT} characters")
        _check_int("consumer_batch_size", self.consumer_batch_size, 1)
        _check_int("max_head_offpolicyness", self.max_head_offpolicyness, 0)
        if self.max_concurrent_rollouts is not None:
            _check_int("max_concurrent_rollouts", self.max_concurrent_rollouts, 1)
        if self.on_stale not in tuple(OnStale):
            raise ConfigError(f"on_stale is {self.on_stale!r}; it must be one of {', '.join(OnStale)}")
        if self.keys is not None:
            raise ConfigError("keys is set, but this version has no authentication yet; leave keys=None")
        check_timeout("timeout", self.timeout, least=0.001)

    @property
    def policy_settings(self) -> PolicySettings:
        """The policy's bounds as the broker is told."""
        return PolicySettings(
            self.consumer_batch_size,
            self.max_head_offpolicyness,
            self.max_concurrent_rollouts,
            OnStale(self.on_stale),
        )

    @property
    def pipeline_depth(self) -> int:
        """Groups submitted ahead: what the staleness bound admits, and a batch more for after the next version."""
        return (self.max_head_offpolicyness + 2) * self.consumer_batch_size


def check_timeout(name: str, value: float, least: float = 0.0) -> float:
    """The value itself.

    Raises:
        ConfigError: it is not a finite number of seconds >= `least`.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < least:
        raise ConfigError(f"{name} is {value!r}; it must be a number of seconds >= {least:g}")
    return float(value)


def _check_int(name: str, value: int, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name} is {value!r}; it must be an int >= {least}")
