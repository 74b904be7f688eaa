"""Backends by the name that `--engine` takes."""

from __future__ import annotations

from collections.abc import Callable

from rollmq.errors import ConfigError
from workers.backends.base import RemoteInfBackendProtocol
from workers.backends.embedded import EmbeddedBackend
from workers.backends.vllm import VLLMBackend

_BACKENDS: dict[str, Callable[[], RemoteInfBackendProtocol]] = {"embedded": EmbeddedBackend, "vllm": VLLMBackend}


def backend_names() -> tuple[str, ...]:
    """All names, sorted."""
    return tuple(sorted(_BACKENDS))


def backend_for(name: str) -> RemoteInfBackendProtocol:
    """The backend of that name.

    Raises:
        ConfigError: there is none; the message names those there are.
    """
    try:
        return _BACKENDS[name]()
    except KeyError:
        raise ConfigError(f"engine {name!r} is not available; available are {', '.join(backend_names())}") from None
