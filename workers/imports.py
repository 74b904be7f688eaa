"""Objects that a worker's own configuration names as `module:name`. Never used on anything from the wire."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from rollmq.errors import ConfigError


def load_object(path: str, what: str) -> Any:
    """The object behind `module:name`; modules of the current directory are found too.

    Args:
        path: as configured.
        what: for messages, such as "reward 'math'".

    Raises:
        ConfigError: malformed, not importable, or without that name.
    """
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise ConfigError(f"{what}: {path!r} must have the form module:name")
    # A console script does not have the current directory on its path, `python -m` does; users expect the latter.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigError(
            f"{what}: module {module_name} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    try:
        return getattr(module, name)
    except AttributeError:
        raise ConfigError(f"{what}: module {module_name} has no {name}") from None
