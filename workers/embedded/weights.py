"""Replacing the weights of a live model from a directory of safetensors files, all or nothing.

Names, shapes and files are checked against the live model, then every tensor is read into memory; only then is
the live model touched. So bad weights cost a refusal, never a half-updated model.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from workers.embedded.errors import BadModelDirectory
from workers.embedded.model_directory import TensorInfo, read_tensor_infos

logger = logging.getLogger(__name__)

_FLOAT_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})
_RECOMPUTED_SUFFIX = "rotary_emb.inv_freq"
"""Buffers that old checkpoints hold and the model computes itself."""


def load_weights(path: str | Path, network: torch.nn.Module) -> None:
    """Check the directory's tensors against the network, then copy them in, cast to the network's dtypes.

    Raises:
        BadModelDirectory: a tensor is missing, unknown or of a wrong shape, or a file is damaged; nothing changed.
    """
    infos = read_tensor_infos(path)
    chosen = match_tensors(infos, network, str(path))
    staged = _read_tensors(infos, chosen)
    live = network.state_dict()
    _check_ties(staged, live, str(path))
    with torch.no_grad():
        for name, tensor in staged.items():
            live[name].copy_(tensor)


def match_tensors(infos: Mapping[str, TensorInfo], network: torch.nn.Module, where: str) -> list[str]:
    """The names to load: all tensors of the network, tied ones once or under each name that the files hold.

    Raises:
        BadModelDirectory: as `load_weights`.
    """
    live = network.state_dict()
    unknown = sorted(name for name in infos if name not in live and not name.endswith(_RECOMPUTED_SUFFIX))
    if unknown:
        raise BadModelDirectory(
            f"{infos[unknown[0]].file} holds tensor {unknown[0]!r} that the running model lacks "
            f"({len(unknown)} such); these are weights of another architecture"
        )
    chosen: list[str] = []
    for group in _tied_groups(live):
        present = [name for name in group if name in infos]
        if not present:
            raise BadModelDirectory(f"weights in {where} lack tensor {' / '.join(group)}")
        chosen.extend(present)
    for name in chosen:
        _check_tensor(name, infos[name], live[name])
    return chosen


def _tied_groups(live: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Names of the state dict, those that share one memory together (tied embeddings)."""
    groups: defaultdict[tuple[int, torch.Size], list[str]] = defaultdict(list)
    for name, tensor in live.items():
        groups[(tensor.data_ptr(), tensor.shape)].append(name)
    return list(groups.values())


def _check_tensor(name: str, info: TensorInfo, live: torch.Tensor) -> None:
    if info.shape != tuple(live.shape):
        raise BadModelDirectory(
            f"tensor {name!r} in {info.file} has shape {list(info.shape)}; the running model needs {list(live.shape)}"
        )
    if live.is_floating_point() and info.dtype not in _FLOAT_DTYPES:
        raise BadModelDirectory(
            f"tensor {name!r} in {info.file} has dtype {info.dtype}; the running model needs one of "
            f"{', '.join(sorted(_FLOAT_DTYPES))}"
        )


def _check_ties(staged: Mapping[str, torch.Tensor], live: Mapping[str, torch.Tensor], where: str) -> None:
    for group in _tied_groups(live):
        first, *others = [name for name in group if name in staged]
        for other in others:
            if not torch.equal(staged[first], staged[other]):
                raise BadModelDirectory(f"{other} and {first} are tied in the running model but differ in {where}")


def _read_tensors(infos: Mapping[str, TensorInfo], names: list[str]) -> dict[str, torch.Tensor]:
    by_file: defaultdict[Path, list[str]] = defaultdict(list)
    for name in names:
        by_file[infos[name].file].append(name)
    staged: dict[str, torch.Tensor] = {}
    for file, members in by_file.items():
        try:
            with safe_open(str(file), framework="pt", device="cpu") as reader:
                staged.update((name, reader.get_tensor(name)) for name in members)
        except (SafetensorError, OSError) as error:
            raise BadModelDirectory(f"cannot read weight file {file}: {error}") from error
    return staged
