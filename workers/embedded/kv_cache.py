"""Keys and values of a batch of sequences of different lengths, in the form that transformers' models use.

Rows are right-aligned: the newest token of every row is in the last column, shorter rows have padding on the left.
So one decode step writes one column for all rows, and an attention mask hides the padding. Columns are reserved
ahead; adding a token copies nothing. Sequences join and leave by building a new cache from rows of old ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import Cache

_RESERVE = 64


class BatchedKVCache(Cache):
    """Keys and values per layer, each `[rows, kv_heads, capacity, head_dim]`, of which `length` columns are in use.

    A forward pass writes at column `length`; `advance` then moves it, so that all layers see one length.
    """

    # The base class's own storage stays empty: every method that models call is overridden here, which holds
    # over transformers versions whose storage differs.
    is_compileable = False

    def __init__(self) -> None:
        self.layers: list[Any] = []
        self.layer_class_to_replicate = None
        self.offloading = False
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        self._length = 0

    @property
    def length(self) -> int:
        """Columns in use."""
        return self._length

    def advance(self, columns: int) -> None:
        """Count the columns that the last forward pass wrote."""
        self._length += columns

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new columns `[rows, kv_heads, new, head_dim]` of one layer; give all columns, old and new."""
        end = self._length + key_states.shape[2]
        if layer_idx == len(self._keys):
            self._keys.append(_reserved_like(key_states, end))
            self._values.append(_reserved_like(value_states, end))
        elif end > self._keys[layer_idx].shape[2]:
            self._keys[layer_idx] = _grown(self._keys[layer_idx], self._length, end)
            self._values[layer_idx] = _grown(self._values[layer_idx], self._length, end)
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        keys[:, :, self._length : end] = key_states
        values[:, :, self._length : end] = value_states
        return keys[:, :, :end], values[:, :, :end]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns before the present forward pass."""
        return self._length

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """The column of the first new token."""
        return self._length

    def get_mask_sizes(self, query: int | torch.Tensor, layer_idx: int = 0) -> tuple[int, int]:
        """(columns with the new ones, first column); older transformers pass positions instead of their number."""
        new = query if isinstance(query, int) else query.shape[0]
        return self._length + new, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """No limit."""
        return -1

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """No limit (the older name)."""
        return -1

    @staticmethod
    def joined(parts: Sequence[tuple[BatchedKVCache, Sequence[int]]], length: int) -> BatchedKVCache:
        """A new cache of the given rows of other caches, in order, with their newest `length` columns."""
        parts = [(cache, rows) for cache, rows in parts if rows]
        result = BatchedKVCache()
        result._length = length
        for layer in range(len(parts[0][0]._keys)):
            result._keys.append(_join([(cache._keys[layer], cache._length, rows) for cache, rows in parts], length))
            result._values.append(_join([(cache._values[layer], cache._length, rows) for cache, rows in parts], length))
        return result


def _join(parts: Sequence[tuple[torch.Tensor, int, Sequence[int]]], length: int) -> torch.Tensor:
    first = parts[0][0]
    total = sum(len(rows) for _, _, rows in parts)
    joined = first.new_zeros((total, first.shape[1], length + _RESERVE, first.shape[3]))
    start = 0
    for tensor, used, rows in parts:
        columns = min(used, length)
        index = torch.tensor(rows, device=tensor.device)
        newest = tensor[:, :, used - columns : used].index_select(0, index)
        joined[start : start + len(rows), :, length - columns : length] = newest
        start += len(rows)
    return joined


def _reserved_like(states: torch.Tensor, columns: int) -> torch.Tensor:
    rows, heads, _, width = states.shape
    return states.new_zeros((rows, heads, columns + _RESERVE, width))


def _grown(tensor: torch.Tensor, used: int, columns: int) -> torch.Tensor:
    """More room, by half, so that growing is rare."""
    grown = _reserved_like(tensor, columns + columns // 2)
    grown[:, :, :used] = tensor[:, :, :used]
    return grown
