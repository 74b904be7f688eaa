"""What a Hugging Face model directory says of itself: vocabulary, context length, end tokens, tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rollmq.errors import ConfigError

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def check_model_directory(model: str) -> None:
    """Refuses a model that is not a directory with a readable configuration and weights.

    Raises:
        ConfigError: naming what is missing.
    """
    directory = Path(model)
    if not directory.is_dir():
        raise ConfigError(f"model directory {model} does not exist; give the path of a Hugging Face model directory")
    read_model_config(model)
    if not any(directory.glob("*.safetensors")) and not any(directory.glob("*.bin")):
        raise ConfigError(f"model directory {model} holds no weights (*.safetensors)")


def read_model_config(model: str) -> dict[str, Any]:
    """The text part of a model's config.json.

    Raises:
        ConfigError: missing, not JSON, or without a vocabulary size.
    """
    config = _read_json(Path(model) / "config.json")
    text = config.get("text_config")
    merged = {**config, **text} if isinstance(text, dict) else config
    if not isinstance(merged.get("vocab_size"), int):
        raise ConfigError(f"{model}/config.json names no vocab_size; token ids could not be checked")
    return merged


def eos_token_ids(model: str) -> tuple[int, ...]:
    """The model's end tokens: generation_config.json where it names them, else config.json."""
    generation = Path(model) / "generation_config.json"
    for config in ([_read_json(generation)] if generation.is_file() else []) + [read_model_config(model)]:
        value = config.get("eos_token_id")
        if isinstance(value, int):
            return (value,)
        if isinstance(value, list) and value:
            return tuple(int(i) for i in value)
    return ()


def has_tokenizer(model: str) -> bool:
    """Whether the directory holds a tokenizer."""
    return any((Path(model) / name).is_file() for name in _TOKENIZER_FILES)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}; is this a Hugging Face model directory?"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} does not hold a JSON object")
    return value
