"""The tiny model's tokenizer and its refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from examples.tiny_model import BOS_TOKEN_ID, EOS_TOKEN_ID, PAD_TOKEN_ID, make_tiny_model


def test_tokenizer_ids_are_bytes_and_specials(tmp_path: Path) -> None:
    library: Any = transformers
    directory = make_tiny_model(tmp_path / "model")
    tokenizer = library.AutoTokenizer.from_pretrained(directory)
    text = "héllo\n 日 + 12"
    ids = tokenizer.encode(text)
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    specials = (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id)
    assert specials == (PAD_TOKEN_ID, BOS_TOKEN_ID, EOS_TOKEN_ID)
    assert len(tokenizer) == EOS_TOKEN_ID + 1


def test_end_token_is_in_both_configs(tmp_path: Path) -> None:
    library: Any = transformers
    directory = make_tiny_model(tmp_path)
    assert library.AutoConfig.from_pretrained(directory).eos_token_id == EOS_TOKEN_ID
    assert library.GenerationConfig.from_pretrained(directory).eos_token_id == EOS_TOKEN_ID


@pytest.mark.parametrize(
    ("options", "message"), [({"vocab_size": 258}, "vocab_size is 258"), ({"heads": 3}, "hidden_size 64")]
)
def test_impossible_sizes_are_refused(tmp_path: Path, options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_tiny_model(tmp_path, **options)  # type: ignore[arg-type]
