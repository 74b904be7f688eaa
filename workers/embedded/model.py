"""A Hugging Face causal LM from a local directory, run as one batch of sequences of different lengths.

Implements `interface.Model` with torch. It never touches the network: weights and code come from the directory and
the installed transformers package.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from rollmq.errors import ConfigError
from workers.embedded.errors import BadModelDirectory
from workers.embedded.interface import Emission
from workers.embedded.kv_cache import BatchedKVCache
from workers.embedded.model_directory import check_model_directory
from workers.embedded.request import ModelLimits
from workers.embedded.sampling import Sampler
from workers.embedded.sequence import SequenceState
from workers.embedded.weights import load_weights

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_PREFILL_CELLS = 16384
"""Most cells (rows x columns, padding included) of one prefill pass, unless one sequence alone has more."""


class TorchModel:
    """One model on one device. Called from one thread."""

    def __init__(self, network: Any, *, name: str, max_model_len: int, device: torch.device) -> None:
        self.name = name
        vocab_size = int(network.config.get_text_config().vocab_size)
        self.limits = ModelLimits(vocab_size, max_model_len, _eos_token_ids(network, vocab_size))
        self._network = network
        self._device = device
        self._sampler = Sampler()
        parameters = inspect.signature(network.forward).parameters
        self._cache_argument = "past_key_values" if "past_key_values" in parameters else "cache"
        self._options = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        self._cache: BatchedKVCache | None = None
        self._rows: list[SequenceState] = []
        self._members: dict[SequenceState, None] = {}

    @torch.inference_mode()
    def prefill(self, sequences: Sequence[SequenceState]) -> Iterable[Emission]:
        """Compute prompt and output so far and sample the next token of each."""
        emissions: list[Emission] = []
        for chunk in _chunks(sequences):
            cache = BatchedKVCache()
            logits = self._forward([sequence.tokens for sequence in chunk], [0] * len(chunk), cache)
            lengths = [sequence.length for sequence in (*self._members, *chunk)]
            self._regroup(cache, chunk, max(lengths))
            emissions.extend(self._sample(logits, chunk))
        return emissions

    @torch.inference_mode()
    def decode(self) -> Iterable[Emission]:
        """Sample one token of each sequence."""
        if len(self._rows) != len(self._members):
            self._regroup(BatchedKVCache(), [], max(sequence.length for sequence in self._members) - 1)
        if self._cache is None:
            return []
        newest = [[sequence.output_ids[-1]] for sequence in self._rows]
        logits = self._forward(newest, [sequence.length - 1 for sequence in self._rows], self._cache)
        return self._sample(logits, self._rows)

    def remove(self, sequences: Collection[SequenceState]) -> Iterable[Emission]:
        """Let sequences go; their rows are dropped at the next step."""
        for sequence in sequences:
            self._members.pop(sequence, None)
        if not self._members:
            self._cache, self._rows = None, []
        return []

    def next_step_at(self) -> float | None:
        """Always now."""
        return 0.0

    def load_weights(self, path: str) -> None:
        """Replace the weights in place, all or nothing."""
        load_weights(path, self._network)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def set_weight_version(self, version: str) -> None:
        """The label means nothing to this model."""

    def _forward(self, tokens: Sequence[Sequence[int]], past: Sequence[int], cache: BatchedKVCache) -> torch.Tensor:
        """Run new tokens through the network.

        Args:
            tokens: the new tokens of each row.
            past: how many tokens of each row the cache holds.

        Returns:
            The logits `[rows, vocab]` after the last token of each row.
        """
        new = max(map(len, tokens))
        padded = [[0] * (new - len(row)) + list(row) for row in tokens]
        valid = torch.tensor([old + len(row) for old, row in zip(past, tokens, strict=True)], device=self._device)
        columns = cache.length + new
        mask = torch.arange(columns, device=self._device) >= columns - valid.unsqueeze(-1)
        positions = torch.arange(-new, 0, device=self._device) + valid.unsqueeze(-1)
        output = self._network(
            input_ids=torch.tensor(padded, device=self._device),
            attention_mask=mask.long(),
            position_ids=positions.clamp_(min=0),
            use_cache=True,
            **{self._cache_argument: cache},
            **self._options,
        )
        cache.advance(new)
        logits: torch.Tensor = output.logits[:, -1, :]
        return logits

    def _sample(self, logits: torch.Tensor, sequences: Sequence[SequenceState]) -> list[Emission]:
        tokens, logprobs = self._sampler.sample(logits, sequences)
        return [
            Emission(sequence, [token], [logprob])
            if math.isfinite(logprob)
            else Emission(sequence, [], [], fault="the model's logits are not finite; check its weights")
            for sequence, token, logprob in zip(sequences, tokens, logprobs, strict=True)
        ]

    def _regroup(self, joining_cache: BatchedKVCache, joining: Sequence[SequenceState], length: int) -> None:
        """Drop the rows of sequences that left, add new ones, keep as many columns as the longest needs."""
        staying = [row for row, sequence in enumerate(self._rows) if sequence in self._members]
        parts = [] if self._cache is None else [(self._cache, staying)]
        self._rows = [*(self._rows[row] for row in staying), *joining]
        self._members = dict.fromkeys(self._rows)
        self._cache = BatchedKVCache.joined([*parts, (joining_cache, range(len(joining)))], length)


def load_model(path: str, *, dtype: str, device: str, max_model_len: int | None) -> TorchModel:
    """Load a causal LM.

    Args:
        dtype: a key of `DTYPES`.
        device: "cpu", "cuda" or "auto".
        max_model_len: most tokens of prompt and output; None is what the model's config says.

    Raises:
        BadModelDirectory: the directory is missing, incomplete, damaged, or of an unknown kind.
        ConfigError: the device is not there, or `max_model_len` is more than the model can do.
    """
    directory = check_model_directory(path)
    place = _pick_device(device)
    network = _load_network(directory, DTYPES[dtype]).to(place).eval()
    limit: int | None = getattr(network.config.get_text_config(), "max_position_embeddings", None)
    served = max_model_len if max_model_len is not None else limit
    if served is None:
        raise ConfigError(f"the config in {directory} has no max_position_embeddings; give --max-model-len")
    if limit is not None and served > limit:
        raise ConfigError(f"--max-model-len {served} is more than the model's {limit} positions in {directory}")
    return TorchModel(network, name=path, max_model_len=served, device=place)


def _load_network(directory: Path, dtype: torch.dtype) -> Any:
    library: Any = transformers
    library.utils.logging.disable_progress_bar()
    try:
        network, report = library.AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        summary = " ".join(str(error).split())[:500]
        raise BadModelDirectory(f"cannot load a causal LM from {directory}: {summary}") from error
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise BadModelDirectory(f"weights in {directory} lack tensor {missing[0]!r} ({len(missing)} missing)")
    if getattr(network, "_is_stateful", False):
        raise BadModelDirectory(f"the model in {directory} keeps a recurrent state; only attention models are served")
    return network


def _pick_device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda, but torch finds no CUDA device; use --device cpu or auto")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and torch.cuda.is_available()) else "cpu")


def _eos_token_ids(network: Any, vocab_size: int) -> frozenset[int]:
    """The end tokens of config and generation config; ids that the model cannot produce are left out."""
    found: set[int] = set()
    for source in (network.config.get_text_config(), getattr(network, "generation_config", None)):
        value = getattr(source, "eos_token_id", None)
        found.update(value if isinstance(value, list | tuple) else [] if value is None else [value])
    return frozenset(token for token in found if 0 <= token < vocab_size)


def _chunks(sequences: Sequence[SequenceState]) -> Iterator[list[SequenceState]]:
    """Split in order so that each pass stays within `_PREFILL_CELLS`."""
    chunk: list[SequenceState] = []
    longest = 0
    for sequence in sequences:
        longest = max(longest, sequence.length)
        if chunk and longest * (len(chunk) + 1) > _PREFILL_CELLS:
            yield chunk
            chunk, longest = [], sequence.length
        chunk.append(sequence)
    if chunk:
        yield chunk
