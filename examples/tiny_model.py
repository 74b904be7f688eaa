"""Makes a tiny random Qwen2 model and a byte-level tokenizer, for demos and tests.

Only this module needs torch, transformers and tokenizers; it imports them when called, so that
`examples` stays importable without them. It writes one directory and talks to no network.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

BYTE_COUNT = 256
PAD_TOKEN_ID = 256
BOS_TOKEN_ID = 257
EOS_TOKEN_ID = 258
SPECIAL_TOKENS = {"<pad>": PAD_TOKEN_ID, "<bos>": BOS_TOKEN_ID, "<eos>": EOS_TOKEN_ID}


def make_tiny_model(
    directory: str | Path,
    *,
    vocab_size: int = 320,
    hidden_size: int = 64,
    layers: int = 2,
    heads: int = 2,
    seed: int = 0,
    max_position: int = 1024,
    dtype: str = "float32",
    tie_word_embeddings: bool = False,
) -> Path:
    """Save a random `Qwen2ForCausalLM` and its tokenizer in `directory`; return the directory.

    Token ids 0-255 are the bytes; 256, 257 and 258 are pad, bos and eos; the ids above are unused.
    `seed` decides the weights and leaves torch's global generator as it was. `dtype` is that of the
    saved tensors, "float32" or "bfloat16".

    Raises:
        ValueError: `vocab_size` leaves no room for the special tokens, or `hidden_size` is not an
            even multiple of `heads`.
    """
    if vocab_size < BYTE_COUNT + len(SPECIAL_TOKENS):
        raise ValueError(f"vocab_size is {vocab_size}; bytes and special tokens need {EOS_TOKEN_ID + 1}")
    if hidden_size % (2 * heads) != 0:
        raise ValueError(f"hidden_size {hidden_size} is not an even multiple of heads {heads}")
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=max_position,
        tie_word_embeddings=tie_word_embeddings,
        pad_token_id=PAD_TOKEN_ID,
        bos_token_id=BOS_TOKEN_ID,
        eos_token_id=EOS_TOKEN_ID,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = Qwen2ForCausalLM(config)
    model.generation_config.pad_token_id = PAD_TOKEN_ID
    model.generation_config.bos_token_id = BOS_TOKEN_ID
    model.generation_config.eos_token_id = EOS_TOKEN_ID
    model.to(getattr(torch, dtype)).save_pretrained(target)
    save_byte_tokenizer(target, max_position=max_position)
    return target


def save_byte_tokenizer(directory: Path, *, max_position: int) -> None:
    """Save a tokenizer whose ids 0-255 are the UTF-8 bytes, followed by pad, bos and eos."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {character: byte for byte, character in enumerate(byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    library: Any = transformers
    library.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        model_max_length=max_position,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(str(directory))


def byte_characters() -> list[str]:
    """The printable character that byte-level tokenizers write for each byte, in byte order.

    This is GPT-2's table: printable bytes stand for themselves, the others are shifted above 255.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    characters, shift = [], 0
    for byte in range(BYTE_COUNT):
        characters.append(chr(byte if byte in printable else BYTE_COUNT + shift))
        shift += byte not in printable
    return characters
