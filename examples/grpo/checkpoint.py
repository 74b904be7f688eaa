"""Checkpoints that appear whole or not at all, and the removal of those that nobody needs.

Engines read checkpoints while the trainer writes the next one, so a directory is written under a
hidden name beside its place and renamed: a reader sees the complete directory or none.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".index.json")


@contextmanager
def appearing_whole(target: Path) -> Iterator[Path]:
    """Give a fresh directory to write to; on success rename it to `target`, on any error remove it.

    Raises:
        FileExistsError: `target` exists. Checkpoints are never overwritten, since an engine may be
            reading one.
    """
    if target.exists():
        raise FileExistsError(f"checkpoint {target} already exists; save each version under a new name")
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def copy_metadata(source: Path, target: Path) -> None:
    """Copy every file of a model directory that holds no weights: configs and tokenizer."""
    for path in source.iterdir():
        if path.is_file() and not path.name.endswith(_WEIGHT_SUFFIXES):
            shutil.copyfile(path, target / path.name)


def stored_dtype(model_dir: Path) -> torch.dtype:
    """The floating-point type named by a model directory's config; float32 where it names none.

    Raises:
        ValueError: the config names something that is not a torch floating-point type.
    """
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"{model_dir / 'config.json'} names dtype {name!r}, which is no floating-point type")
    return dtype


class CheckpointShelf:
    """The checkpoints of a run, one directory per version, kept only as long as a worker may read them.

    Args:
        directory: where they go; made when missing.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def path(self, version: int) -> Path:
        """Where the checkpoint of a version is or will be."""
        return self._directory / f"version-{version:06d}"

    def remove_older_than(self, version: int) -> list[int]:
        """Delete checkpoints of versions below `version`, which every worker must have passed; returns them."""
        removed = []
        for path in sorted(self._directory.glob("version-*")):
            found = int(path.name.removeprefix("version-"))
            if found < version:
                shutil.rmtree(path)
                removed.append(found)
        return removed
