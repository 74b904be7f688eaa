"""Finding and checking the safetensors files of a model directory by their headers, without torch.

A safetensors file is: 8 bytes little-endian header length, a JSON header that gives each tensor's dtype, shape and
byte range, the data. So shapes and truncation are known before any tensor is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.embedded.errors import BadModelDirectory

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor as its file's header describes it; `dtype` is the safetensors name such as "F32" or "BF16"."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


def check_model_directory(path: str | Path) -> Path:
    """Check that a whole model is there: the directory, its config.json and complete weight files.

    Raises:
        BadModelDirectory: something is missing or damaged; the message names it.
    """
    directory = Path(path)
    _require_directory(directory)
    read_json_object(directory / "config.json")
    read_tensor_infos(directory)
    return directory


def read_tensor_infos(path: str | Path) -> dict[str, TensorInfo]:
    """Every tensor in a directory's weight files, by name.

    Raises:
        BadModelDirectory: no weight files, one is missing, truncated or damaged, or a name occurs twice.
    """
    directory = Path(path)
    _require_directory(directory)
    try:
        files = _weight_files(directory)
    except OSError as error:
        raise BadModelDirectory(f"cannot read model directory {directory}: {error.strerror}") from error
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        for name, info in read_header(file).items():
            if name in tensors:
                raise BadModelDirectory(f"tensor {name!r} is in both {tensors[name].file} and {file}; remove one")
            tensors[name] = info
    return tensors


def read_header(file: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file, after checking that its data is complete.

    Raises:
        BadModelDirectory: the file cannot be read, is truncated, or is no safetensors file.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            header = stream.read(length) if length <= min(size, _MAX_HEADER_BYTES) else b""
    except OSError as error:
        raise BadModelDirectory(f"cannot read weight file {file}: {error.strerror}") from error
    if size < _LENGTH_BYTES or len(header) != length:
        raise BadModelDirectory(f"weight file {file} of {size} bytes is truncated or no safetensors file")
    infos, data_bytes = _parse_header(file, header)
    promised = _LENGTH_BYTES + length + data_bytes
    if size != promised:
        state = "truncated" if size < promised else "damaged"
        raise BadModelDirectory(f"weight file {file} is {state}: it has {size} bytes, its header promises {promised}")
    return infos


def read_json_object(file: Path) -> Mapping[str, Any]:
    """A JSON object from a file.

    Raises:
        BadModelDirectory: the file is missing, unreadable or holds something else.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadModelDirectory(f"model directory {file.parent} has no {file.name}") from None
    except OSError as error:
        raise BadModelDirectory(f"cannot read {file}: {error.strerror}") from error
    except ValueError as error:
        raise BadModelDirectory(f"{file} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadModelDirectory(f"{file} must hold a JSON object, not a {type(value).__name__}")
    return value


def _require_directory(directory: Path) -> None:
    try:
        if not directory.exists():
            raise BadModelDirectory(f"model directory {directory} does not exist; give an existing directory or sim:")
        # Listing it proves that it is a directory and that its files can be looked up.
        next(directory.iterdir(), None)
    except NotADirectoryError:
        raise BadModelDirectory(
            f"model path {directory} is not a directory; give the directory that holds the files"
        ) from None
    except OSError as error:
        raise BadModelDirectory(f"cannot read model directory {directory}: {error.strerror}") from error


def _weight_files(directory: Path) -> list[Path]:
    """Which files hold the weights: one file, else those of the index, else all safetensors files."""
    if (directory / _SINGLE_FILE).is_file():
        return [directory / _SINGLE_FILE]
    if (directory / _INDEX_FILE).is_file():
        weight_map = read_json_object(directory / _INDEX_FILE).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise BadModelDirectory(f"{directory / _INDEX_FILE} has no weight_map of tensor names to file names")
        return [directory / name for name in sorted(set(weight_map.values()))]
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise BadModelDirectory(f"model directory {directory} has no *.safetensors weight files")
    return files


def _parse_header(file: Path, header: bytes) -> tuple[dict[str, TensorInfo], int]:
    """The tensors of a header, and how many bytes of data it promises."""
    try:
        entries = json.loads(header)
        entries.pop("__metadata__", None)
        infos = {
            name: TensorInfo(file, str(entry["dtype"]), tuple(int(size) for size in entry["shape"]))
            for name, entry in entries.items()
        }
        return infos, max((int(entry["data_offsets"][1]) for entry in entries.values()), default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise BadModelDirectory(f"weight file {file} has no valid safetensors header: {error!r}") from error
