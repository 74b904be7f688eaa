"""A tiny model on disk, made once; torch on one thread."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from examples.tiny_model import make_tiny_model


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", hidden_size=64, layers=2, heads=1))
