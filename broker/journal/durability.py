"""Durability modes: when a record may be acknowledged, and what each mode can lose, in words."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from rollmq.errors import ConfigError

MAX_INTERVAL_MS = 60_000


class SyncPolicy(Enum):
    """When the committer calls fdatasync."""

    ALWAYS = "always"
    INTERVAL = "interval"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class DurabilityMode:
    """A durability mode.

    Attributes:
        policy: when records are synced.
        interval_ms: longest time between a write and its sync, for `INTERVAL`; else 0.
    """

    policy: SyncPolicy
    interval_ms: int = 0

    @property
    def acknowledges_unsynced(self) -> bool:
        """Whether a record counts as durable once it is written, before it is synced."""
        return self.policy is not SyncPolicy.ALWAYS

    @property
    def loss_window(self) -> str:
        """What an acknowledged record can be lost to, in words."""
        if self.policy is SyncPolicy.ALWAYS:
            return "nothing acknowledged is lost while the disk keeps what it confirmed"
        if self.policy is SyncPolicy.INTERVAL:
            return (
                f"a crash of the machine loses up to {self.interval_ms} ms of acknowledged records; "
                "a crash of the process alone loses none"
            )
        return (
            "a crash of the machine loses every acknowledged record since the last full segment; "
            "a crash of the process alone loses none"
        )

    def __str__(self) -> str:
        if self.policy is SyncPolicy.INTERVAL:
            return f"interval={self.interval_ms}"
        name: str = self.policy.value
        return name


ALWAYS = DurabilityMode(SyncPolicy.ALWAYS)
NONE = DurabilityMode(SyncPolicy.NONE)


def parse_durability_mode(text: str) -> DurabilityMode:
    """Parse `always`, `interval=<ms>` or `none`.

    Raises:
        ConfigError: anything else, or an interval outside 1..60000 ms.
    """
    name, separator, value = text.strip().partition("=")
    if name == SyncPolicy.INTERVAL.value and value.isascii() and value.isdecimal():
        interval_ms = int(value) if len(value) <= 6 else MAX_INTERVAL_MS + 1
        if not 1 <= interval_ms <= MAX_INTERVAL_MS:
            raise ConfigError(f"durability mode {text!r}: the interval must be 1..{MAX_INTERVAL_MS} ms")
        return DurabilityMode(SyncPolicy.INTERVAL, interval_ms)
    if not separator and name == SyncPolicy.ALWAYS.value:
        return ALWAYS
    if not separator and name == SyncPolicy.NONE.value:
        return NONE
    raise ConfigError(f"durability mode {text!r} is unknown; use `always`, `interval=<ms>` or `none`")
