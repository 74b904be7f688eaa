"""GRPO in plain torch: one object that holds the policy, learns from groups and saves checkpoints.

It knows nothing of queues or engines: samples come in, a report and a directory go out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from examples.grpo.batch import Batch, Sample, collate
from examples.grpo.checkpoint import appearing_whole, copy_metadata, stored_dtype
from examples.grpo.objective import Surrogate, clipped_surrogate


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one optimiser step saw and did.

    Attributes:
        step: number of steps taken so far, this one included.
        loss: clipped surrogate, lower is better; near zero by construction.
        reward_mean: mean reward over all samples.
        grad_norm: L2 norm of the gradient before clipping.
        ratio_mean, ratio_max: importance ratio of the tokens trained on, after truncation.
        clipped_fraction: share of tokens whose gradient PPO's clip removed.
        tokens: number of tokens trained on.
    """

    step: int
    loss: float
    reward_mean: float
    grad_norm: float
    ratio_mean: float
    ratio_max: float
    clipped_fraction: float
    tokens: int


class GrpoLearner:
    """A causal LM trained with GRPO and AdamW, in float32 whatever the checkpoint's dtype.

    Group-normalised advantages (arXiv 2402.03300), the clipped surrogate of PPO (arXiv 1707.06347)
    against the logprobs that the engine reported, one optimiser step per batch, gradient clipping,
    linear learning-rate warm-up. No reference model and no KL term: the weights start random, so
    there is nothing worth staying close to.

    Args:
        model_dir: Hugging Face causal LM directory. Its config and tokenizer files are copied into
            every checkpoint.
        learning_rate: AdamW's peak rate.
        warmup_steps: steps over which the rate rises linearly to its peak.
        clip_low, clip_high, ratio_cap: see `objective.clipped_surrogate`.
        max_grad_norm: gradients are scaled down to this L2 norm.
        device: where to train.
    """

    def __init__(
        self,
        model_dir: str | Path,
        *,
        learning_rate: float,
        warmup_steps: int = 0,
        clip_low: float = 0.2,
        clip_high: float = 0.28,
        ratio_cap: float = 5.0,
        max_grad_norm: float = 1.0,
        device: str = "cpu",
    ) -> None:
        self._source = Path(model_dir)
        self._device = torch.device(device)
        self._model = _load_model(self._source)
        self._model.to(self._device)
        self._model.eval()
        self._stored_dtype = stored_dtype(self._source)
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=learning_rate, betas=(0.9, 0.99), eps=1e-5, weight_decay=0.0
        )
        self._learning_rate = learning_rate
        self._warmup_steps = warmup_steps
        self._clip_low = clip_low
        self._clip_high = clip_high
        self._ratio_cap = ratio_cap
        self._max_grad_norm = max_grad_norm
        self._steps = 0

    @property
    def model(self) -> Any:
        """The Hugging Face model being trained."""
        return self._model

    def step(self, groups: Sequence[Sequence[Sample]]) -> StepReport:
        """Take one optimiser step on the groups of a batch.

        Raises:
            ValueError: no samples, or a sample's lengths disagree.
            FloatingPointError: the gradient is not finite; the weights are left as they were.
        """
        batch = collate(groups, self._device)
        self._steps += 1
        self._set_learning_rate()
        self._optimizer.zero_grad(set_to_none=True)
        surrogate = self._surrogate(batch)
        surrogate.loss.backward()  # type: ignore[no-untyped-call]
        grad_norm = float(torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._max_grad_norm))
        if not math.isfinite(grad_norm):
            raise FloatingPointError(
                f"gradient norm of step {self._steps} is {grad_norm}; look for non-finite logprobs or rewards "
                "in the batch, or lower the learning rate"
            )
        self._optimizer.step()
        rewards = [sample.reward for group in groups for sample in group]
        return StepReport(
            step=self._steps,
            loss=surrogate.loss.item(),
            reward_mean=sum(rewards) / len(rewards),
            grad_norm=grad_norm,
            ratio_mean=surrogate.ratio_mean.item(),
            ratio_max=surrogate.ratio_max.item(),
            clipped_fraction=surrogate.clipped_fraction.item(),
            tokens=int(batch.loss_mask.sum()),
        )

    def logprobs(self, batch: Batch) -> Tensor:
        """Log-probability of every target, float32 [samples, length - 1]; temperature 1."""
        logits = self._model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
        chosen = logits.float().log_softmax(dim=-1).gather(-1, batch.targets[..., None])
        return chosen.squeeze(-1)  # type: ignore[no-any-return]

    def save(self, directory: str | Path) -> Path:
        """Write a complete Hugging Face directory that an engine can load, and return its path.

        The directory appears under its name whole or not at all: it is written beside it and renamed.
        Weights are stored in the dtype of the source model.

        Raises:
            FileExistsError: `directory` exists. Checkpoints are never overwritten, because an engine
                may be reading one; choose a new name per version.
        """
        target = Path(directory)
        with appearing_whole(target) as partial:
            state = {name: tensor.to(self._stored_dtype) for name, tensor in self._model.state_dict().items()}
            self._model.save_pretrained(partial, state_dict=state)
            copy_metadata(self._source, partial)
        return target

    def _surrogate(self, batch: Batch) -> Surrogate:
        return clipped_surrogate(
            self.logprobs(batch),
            batch.behaviour_logprobs,
            batch.advantages,
            batch.loss_mask,
            clip_low=self._clip_low,
            clip_high=self._clip_high,
            ratio_cap=self._ratio_cap,
        )

    def _set_learning_rate(self) -> None:
        scale = min(1.0, self._steps / (self._warmup_steps + 1))
        for group in self._optimizer.param_groups:
            group["lr"] = self._learning_rate * scale


def _load_model(source: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
