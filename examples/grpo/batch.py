"""From trajectories to padded tensors: what the learner needs of a rollout and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from examples.grpo.objective import group_advantages


@dataclass(frozen=True, slots=True)
class Sample:
    """One rollout as the learner sees it.

    Attributes:
        input_ids: prompt tokens, at least one.
        output_ids: generated tokens.
        logprobs: log-probability of each generated token under the policy that generated it, in nats.
        reward: scalar reward of the whole answer.
        loss_mask: 1 for each output token to train on, 0 for others; None means all of them.
    """

    input_ids: Sequence[int]
    output_ids: Sequence[int]
    logprobs: Sequence[float]
    reward: float
    loss_mask: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if not self.input_ids:
            raise ValueError("a sample needs at least one prompt token to predict its answer from")
        if len(self.logprobs) != len(self.output_ids):
            raise ValueError(
                f"sample has {len(self.output_ids)} output tokens but {len(self.logprobs)} logprobs; "
                "the engine must report one per generated token"
            )
        if self.loss_mask is not None and len(self.loss_mask) != len(self.output_ids):
            raise ValueError(
                f"sample has {len(self.output_ids)} output tokens but a loss mask of {len(self.loss_mask)}"
            )


@dataclass(frozen=True, slots=True)
class Batch:
    """Right-padded tensors of all samples of a step.

    Column j of the shifted tensors (`targets`, `behaviour_logprobs`, `loss_mask`) belongs to the
    prediction made at input column j, so they are one column narrower than the sequences.

    Attributes:
        input_ids: int64 [samples, length - 1], every token but the last column.
        attention_mask: int64 [samples, length - 1], 1 on real tokens.
        targets: int64 [samples, length - 1].
        behaviour_logprobs: float32 [samples, length - 1], 0 where not generated.
        loss_mask: bool [samples, length - 1].
        advantages: float32 [samples].
    """

    input_ids: Tensor
    attention_mask: Tensor
    targets: Tensor
    behaviour_logprobs: Tensor
    loss_mask: Tensor
    advantages: Tensor


def collate(groups: Sequence[Sequence[Sample]], device: torch.device) -> Batch:
    """Pad the samples of all groups into one batch, with advantages taken inside each group.

    Raises:
        ValueError: there is no sample at all.
    """
    samples = [sample for group in groups for sample in group]
    if not samples:
        raise ValueError("cannot train on a batch without samples")
    length = max(len(sample.input_ids) + len(sample.output_ids) for sample in samples)
    tokens = torch.zeros(len(samples), length, dtype=torch.int64)
    attention = torch.zeros(len(samples), length, dtype=torch.int64)
    behaviour = torch.zeros(len(samples), length, dtype=torch.float32)
    counted = torch.zeros(len(samples), length, dtype=torch.bool)
    for row, sample in enumerate(samples):
        start = len(sample.input_ids)
        end = start + len(sample.output_ids)
        tokens[row, :end] = torch.tensor([*sample.input_ids, *sample.output_ids])
        attention[row, :end] = 1
        behaviour[row, start:end] = torch.tensor(sample.logprobs, dtype=torch.float32)
        counted[row, start:end] = True if sample.loss_mask is None else torch.tensor(sample.loss_mask, dtype=torch.bool)
    advantages = [
        group_advantages(torch.tensor([sample.reward for sample in group], dtype=torch.float32))
        for group in groups
        if group
    ]
    return Batch(
        input_ids=tokens[:, :-1].to(device),
        attention_mask=attention[:, :-1].to(device),
        targets=tokens[:, 1:].to(device),
        behaviour_logprobs=behaviour[:, 1:].to(device),
        loss_mask=counted[:, 1:].to(device),
        advantages=torch.cat(advantages).to(device),
    )
