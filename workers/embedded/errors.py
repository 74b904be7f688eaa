"""What can go wrong inside the embedded engine, beyond the family in `rollmq.errors`."""

from __future__ import annotations

from rollmq.errors import ConfigError, RollmqError


class BadModelDirectory(ConfigError):
    """A directory does not hold what the model needs; the message names the directory, file or tensor."""


class Conflict(RollmqError):
    """The request is legal, but not in the engine's present state (HTTP 409)."""
