"""Checks of model directories by file headers: what is missing or damaged is named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from workers.embedded.errors import BadModelDirectory
from workers.embedded.model_directory import check_model_directory, read_tensor_infos


@pytest.fixture
def copy(model_a: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_a, tmp_path / "copy"))


def test_whole_directory_passes_and_shapes_are_read(copy: Path) -> None:
    assert check_model_directory(copy) == copy
    info = read_tensor_infos(copy)["model.embed_tokens.weight"]
    assert (info.shape, info.dtype) == ((320, 64), "F32")


def test_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadModelDirectory, match=r"nowhere does not exist"):
        check_model_directory(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["x" * 5000, "nul\0byte"])
def test_impossible_path_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadModelDirectory):
        read_tensor_infos(tmp_path / name)


def test_file_instead_of_directory_is_named(copy: Path) -> None:
    with pytest.raises(BadModelDirectory, match=r"config.json is not a directory"):
        check_model_directory(copy / "config.json")


def test_missing_config_is_named(copy: Path) -> None:
    (copy / "config.json").unlink()
    with pytest.raises(BadModelDirectory, match=r"has no config.json"):
        check_model_directory(copy)


def test_broken_config_is_named(copy: Path) -> None:
    (copy / "config.json").write_text("{")
    with pytest.raises(BadModelDirectory, match=r"config.json is not valid JSON"):
        check_model_directory(copy)


def test_missing_weight_files_are_named(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    with pytest.raises(BadModelDirectory, match=r"no \*.safetensors"):
        check_model_directory(copy)


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_truncated_file_is_named(copy: Path, kept: int) -> None:
    file = copy / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:kept])
    with pytest.raises(BadModelDirectory, match=r"model.safetensors.*truncated"):
        check_model_directory(copy)


def test_garbage_header_is_named(copy: Path) -> None:
    (copy / "model.safetensors").write_bytes((7).to_bytes(8, "little") + b"garbage")
    with pytest.raises(BadModelDirectory, match=r"no valid safetensors header"):
        check_model_directory(copy)


def test_missing_shard_of_an_index_is_named(copy: Path) -> None:
    (copy / "model.safetensors").rename(copy / "part-1.safetensors")
    index = {"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BadModelDirectory, match=r"part-2.safetensors: No such file"):
        check_model_directory(copy)


def test_tensor_in_two_files_is_named(copy: Path) -> None:
    shutil.copy(copy / "model.safetensors", copy / "part-1.safetensors")
    (copy / "model.safetensors").rename(copy / "part-2.safetensors")
    with pytest.raises(BadModelDirectory, match=r"is in both"):
        check_model_directory(copy)
