"""From logits to tokens.

The random number behind a token depends only on the sequence's seed and the token's position, and each row is
computed from its own logits. So the same seed and weights give the same tokens whatever else is in the batch, and a
request that is resumed with its partial output draws what it would have drawn.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from workers.embedded.hashing import MASK64, mix64
from workers.embedded.sequence import SequenceState


class Sampler:
    """Samples one token per row. Holds one generator, set anew for each token."""

    def __init__(self) -> None:
        self._generator = torch.Generator(device="cpu")

    def sample(self, logits: torch.Tensor, sequences: Sequence[SequenceState]) -> tuple[list[int], list[float]]:
        """One token per row, and its log-probability under the raw logits.

        Args:
            logits: `[rows, vocab]`, any float dtype; row i belongs to sequence i.

        Returns:
            Token ids, and log-softmax of the float32 logits before penalty, masks, temperature, top-k and top-p
            (not finite if the logits are not).
        """
        raw = logits.float()
        scores = _penalised(raw, sequences)
        tokens = scores.argmax(dim=-1)
        drawn = [row for row, sequence in enumerate(sequences) if not sequence.request.params.is_greedy]
        if drawn:
            tokens[drawn] = self._draw(scores[drawn].double(), [sequences[row] for row in drawn])
        logprobs = torch.log_softmax(raw, dim=-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        return tokens.tolist(), logprobs.tolist()

    def _draw(self, scores: torch.Tensor, sequences: Sequence[SequenceState]) -> torch.Tensor:
        """Inverse-transform sampling, in float64 since cumulative sums over a vocabulary need it."""
        params = [sequence.request.params for sequence in sequences]
        scores = scores / _column([entry.temperature for entry in params], scores)
        vocab = scores.shape[-1]
        top_ks = [entry.top_k if 0 < entry.top_k < vocab else vocab for entry in params]
        top_ps = [entry.top_p for entry in params]
        if min(top_ks) < vocab or min(top_ps) < 1.0:
            scores = _keep_top(scores, _column(top_ks, scores), _column(top_ps, scores))
        cumulative = torch.softmax(scores, dim=-1).cumsum(dim=-1)
        total = cumulative[:, -1:]
        points = _column([self._uniform(sequence) for sequence in sequences], scores) * total
        # Below the total even after rounding, so that the last token is not picked with probability zero.
        points = torch.minimum(points, torch.nextafter(total, torch.zeros_like(total)))
        return torch.searchsorted(cumulative, points, right=True).squeeze(-1).clamp_(max=vocab - 1)

    def _uniform(self, sequence: SequenceState) -> float:
        """The number in [0, 1) for the sequence's next token."""
        noise = mix64(mix64(sequence.seed & MASK64) + sequence.length)
        self._generator.manual_seed(noise >> 1)
        return float(torch.rand((), generator=self._generator, dtype=torch.float64))


def _penalised(logits: torch.Tensor, sequences: Sequence[SequenceState]) -> torch.Tensor:
    """Logits after frequency penalty and the masks of `min_new_tokens`; the input is not changed."""
    scores = logits.clone()
    for row, sequence in enumerate(sequences):
        penalty = sequence.request.params.frequency_penalty
        if penalty != 0.0 and sequence.output_ids:
            outputs = torch.tensor(sequence.output_ids, device=scores.device)
            scores[row] -= penalty * torch.bincount(outputs, minlength=scores.shape[-1])
        masked = sequence.masked_ids
        if masked:
            scores[row, list(masked)] = -torch.inf
    return scores


def _keep_top(scores: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor) -> torch.Tensor:
    """Scores with -inf outside the k most likely and then outside the nucleus; the most likely always stays.

    Args:
        scores: `[rows, vocab]`, after temperature.
        top_ks: `[rows, 1]`, at least 1.
        top_ps: `[rows, 1]`, in (0, 1]; 1 keeps all.
    """
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(scores.shape[-1], device=scores.device)
    ordered = ordered.masked_fill(ranks >= top_ks, -torch.inf)
    probabilities = torch.softmax(ordered, dim=-1)
    mass_before = probabilities.cumsum(dim=-1) - probabilities
    outside = (mass_before >= top_ps) & (top_ps < 1.0) & (ranks > 0)
    return torch.empty_like(scores).scatter_(-1, order, ordered.masked_fill(outside, -torch.inf))


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    """A `[rows, 1]` tensor of the values, beside `like`."""
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(-1)
