"""Weights are loaded all or nothing."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from examples.tiny_model import make_tiny_model
from workers.embedded.errors import BadModelDirectory
from workers.embedded.model import load_model
from workers.embedded.weights import load_weights

Tensors = dict[str, torch.Tensor]
NORM = "model.layers.1.input_layernorm.weight"
HEAD = "lm_head.weight"


def network_of(directory: Path) -> Any:
    return load_model(str(directory), dtype="float32", device="cpu", max_model_len=None)._network


def snapshot(network: Any) -> Tensors:
    return {name: tensor.clone() for name, tensor in network.state_dict().items()}


def assert_equal(network: Any, expected: Tensors) -> None:
    live = network.state_dict()
    assert live.keys() == expected.keys()
    assert all(torch.equal(live[name], tensor) for name, tensor in expected.items())


@pytest.fixture
def altered(model_b: Path, tmp_path: Path) -> Callable[[Callable[[Tensors], None]], Path]:
    """A copy of model b whose tensors went through a function."""

    def make(alter: Callable[[Tensors], None]) -> Path:
        tensors = load_file(model_b / "model.safetensors")
        alter(tensors)
        target = tmp_path / "altered"
        target.mkdir()
        save_file(tensors, target / "model.safetensors")
        return target

    return make


def test_all_tensors_are_replaced_in_place(model_a: Path, model_b: Path) -> None:
    network = network_of(model_a)
    places = {name: tensor.data_ptr() for name, tensor in network.state_dict().items()}
    load_weights(model_b, network)
    assert_equal(network, snapshot(network_of(model_b)))
    assert places == {name: tensor.data_ptr() for name, tensor in network.state_dict().items()}


def test_other_float_dtypes_are_cast(model_a: Path, altered: Callable[..., Path]) -> None:
    network = network_of(model_a)

    def halve(tensors: Tensors) -> None:
        tensors.update({name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()})

    load_weights(altered(halve), network)
    assert network.state_dict()[HEAD].dtype is torch.float32


@pytest.mark.parametrize(
    ("alter", "message"),
    [
        (lambda tensors: tensors.pop(NORM), f"lack tensor {NORM}"),
        (lambda tensors: tensors.pop(HEAD), f"lack tensor {HEAD}"),
        (lambda tensors: tensors.update({HEAD: torch.zeros(321, 64)}), r"lm_head.weight.*\[321, 64\].*\[320, 64\]"),
        (
            lambda tensors: tensors.update({"model.extra": torch.zeros(1)}),
            r"'model.extra' that the running model lacks",
        ),
        (lambda tensors: tensors.update({NORM: torch.zeros(64, dtype=torch.int8)}), r"dtype I8"),
    ],
)
def test_bad_tensor_is_named_and_nothing_changes(
    model_a: Path, altered: Callable[..., Path], alter: Callable[[Tensors], None], message: str
) -> None:
    network = network_of(model_a)
    before = snapshot(network)
    with pytest.raises(BadModelDirectory, match=message):
        load_weights(altered(alter), network)
    assert_equal(network, before)


def test_truncated_shard_is_named_and_nothing_changes(model_a: Path, model_b: Path, tmp_path: Path) -> None:
    network = network_of(model_a)
    before = snapshot(network)
    broken = Path(shutil.copytree(model_b, tmp_path / "broken"))
    file = broken / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(BadModelDirectory, match=r"broken/model.safetensors is truncated"):
        load_weights(broken, network)
    assert_equal(network, before)


def test_tied_embeddings_are_needed_once(tmp_path: Path) -> None:
    network = network_of(make_tiny_model(tmp_path / "old", seed=0, tie_word_embeddings=True))
    fresh = make_tiny_model(tmp_path / "new", seed=1, tie_word_embeddings=True)
    assert HEAD not in load_file(fresh / "model.safetensors")
    load_weights(fresh, network)
    assert_equal(network, snapshot(network_of(fresh)))
    assert network.lm_head.weight.data_ptr() == network.model.embed_tokens.weight.data_ptr()


def test_untied_weights_are_refused_by_a_tied_model(tmp_path: Path, model_b: Path) -> None:
    network = network_of(make_tiny_model(tmp_path / "tied", seed=0, tie_word_embeddings=True))
    before = snapshot(network)
    with pytest.raises(BadModelDirectory, match=r"lm_head.weight.*tied"):
        load_weights(model_b, network)
    assert_equal(network, before)


def test_sharded_directory_loads(model_a: Path, model_b: Path, tmp_path: Path) -> None:
    tensors = load_file(model_b / "model.safetensors")
    names = sorted(tensors)
    for part, members in enumerate((names[:10], names[10:])):
        save_file({name: tensors[name] for name in members}, tmp_path / f"part-{part}.safetensors")
    network = network_of(model_a)
    load_weights(tmp_path, network)
    assert_equal(network, snapshot(network_of(model_b)))
