"""Checkpoints appear whole or not at all, and old ones go only when they may."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from examples.grpo.checkpoint import CheckpointShelf, appearing_whole, stored_dtype


def test_the_target_does_not_exist_until_everything_is_written(tmp_path: Path) -> None:
    target = tmp_path / "version-1"
    with appearing_whole(target) as partial:
        (partial / "model.safetensors").write_bytes(b"x")
        assert not target.exists()
    assert [path.name for path in target.iterdir()] == ["model.safetensors"]
    assert [path.name for path in tmp_path.iterdir()] == ["version-1"]


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    target = tmp_path / "version-1"
    with pytest.raises(OSError, match="disk full"), appearing_whole(target) as partial:
        (partial / "half").write_bytes(b"x")
        raise OSError("disk full")
    assert list(tmp_path.iterdir()) == []


def test_the_rest_of_a_killed_write_does_not_get_into_the_next(tmp_path: Path) -> None:
    leftover = tmp_path / ".version-1.partial"
    leftover.mkdir()
    (leftover / "old").write_bytes(b"x")
    with appearing_whole(tmp_path / "version-1") as partial:
        (partial / "new").write_bytes(b"x")
    assert [path.name for path in (tmp_path / "version-1").iterdir()] == ["new"]


def test_an_existing_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "version-1").mkdir()
    with (
        pytest.raises(FileExistsError, match="save each version under a new name"),
        appearing_whole(tmp_path / "version-1"),
    ):
        pytest.fail("the body must not run")


def test_only_versions_below_the_given_one_are_removed(tmp_path: Path) -> None:
    shelf = CheckpointShelf(tmp_path / "weights")
    for version in (1, 2, 3, 10):
        shelf.path(version).mkdir()
    assert shelf.remove_older_than(3) == [1, 2]
    assert shelf.path(3).exists() and shelf.path(10).exists()
    assert shelf.remove_older_than(3) == []


@pytest.mark.parametrize(
    ("config", "dtype"),
    [({}, torch.float32), ({"torch_dtype": "bfloat16"}, torch.bfloat16), ({"dtype": "float16"}, torch.float16)],
)
def test_the_stored_dtype_is_the_one_of_the_config(tmp_path: Path, config: dict[str, str], dtype: torch.dtype) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert stored_dtype(tmp_path) is dtype


def test_an_unknown_dtype_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"dtype": "int8"}', encoding="utf-8")
    with pytest.raises(ValueError, match="'int8'"):
        stored_dtype(tmp_path)
