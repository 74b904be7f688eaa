"""Where published weights are. One small type per way of moving them; only `disk` so far."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from rollmq.errors import ConfigError
from rollmq.messages import PATH_LIMIT

SIMULATED_PREFIX = "sim:"
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")


@dataclass(frozen=True, slots=True)
class DiskWeights:
    """A directory of weights that every worker can read under the same path (Hugging Face layout).

    Attributes:
        path: the directory; or `sim:...` for workers that simulate their engine.
    """

    path: str | os.PathLike[str]

    def source(self, check: bool = True) -> str:
        """What is broadcast to the workers: the absolute path.

        Args:
            check: look at the directory from here; False where only the workers can see it.

        Raises:
            ConfigError: the path is empty or too long; with `check`, it is no directory or holds no weights.
        """
        text = os.fspath(self.path)
        if not text:
            raise ConfigError("DiskWeights has an empty path; name the directory the weights were saved to")
        if not text.startswith(SIMULATED_PREFIX):
            text = os.path.abspath(text)
            if check:
                _check_directory(Path(text))
        if len(text) > PATH_LIMIT:
            raise ConfigError(f"weights path of {len(text)} characters is over {PATH_LIMIT}; use a shorter directory")
        return text


def _check_directory(path: Path) -> None:
    if not path.is_dir():
        raise ConfigError(f"weights directory {path} does not exist; save the weights before publishing them")
    if not any(entry.name.endswith(WEIGHT_SUFFIXES) for entry in path.iterdir()):
        raise ConfigError(
            f"weights directory {path} holds no file ending in {', '.join(WEIGHT_SUFFIXES)}; "
            "save the weights completely before publishing, or pass check=False if only the workers can see them"
        )
