"""The formulas of GRPO with a clipped, truncated importance ratio; pure functions on tensors.

Sources: group-normalised advantages from DeepSeekMath (arXiv 2402.03300, section 4.1); the clipped
surrogate from PPO (arXiv 1707.06347, equation 7). The ratio is taken against the policy that
generated the tokens, which with an asynchronous queue is up to `max_head_offpolicyness` versions old.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_STD_FLOOR = 1e-4


@dataclass(frozen=True, slots=True)
class Surrogate:
    """Value of the clipped objective and what happened to the ratios, all scalar float32 tensors."""

    loss: Tensor
    ratio_mean: Tensor
    ratio_max: Tensor
    clipped_fraction: Tensor


def group_advantages(rewards: Tensor) -> Tensor:
    """Advantage of each sample against its own group.

    `A_i = (r_i - mean(r)) / (std(r) + 1e-4)` over one group, population standard deviation. A group
    whose rewards are all equal teaches nothing and gets zeros.

    Args:
        rewards: float tensor of shape [samples], one group.

    Returns:
        Float tensor of shape [samples].
    """
    centred = rewards - rewards.mean()
    return centred / (centred.square().mean().sqrt() + _STD_FLOOR)


def clipped_surrogate(
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    ratio_cap: float,
) -> Surrogate:
    """PPO's clipped surrogate per token, averaged over the tokens that count.

    `loss = -mean(min(w A, clip(w, 1 - clip_low, 1 + clip_high) A))` with
    `w = min(exp(logprob - behaviour_logprob), ratio_cap)`. PPO's minimum does not bound `w A` for a
    negative advantage; the cap does, so one token that the old policy found improbable cannot
    dominate a step.

    Args:
        logprobs: float tensor [samples, tokens] under the policy being trained (has a gradient).
        behaviour_logprobs: float tensor [samples, tokens] as reported by the engine.
        advantages: float tensor [samples].
        loss_mask: bool tensor [samples, tokens]; False for prompt, padding and foreign tokens.
        clip_low: how far below 1 the ratio may fall before a token's gradient is cut, in (0, 1).
        clip_high: how far above 1 it may rise, > 0.
        ratio_cap: truncation of the ratio, > 1.
    """
    log_ratio = torch.where(loss_mask, logprobs - behaviour_logprobs, 0.0)
    ratio = log_ratio.exp().clamp(max=ratio_cap)
    weighted = ratio * advantages[:, None]
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages[:, None]
    count = loss_mask.sum().clamp(min=1)
    loss = -torch.where(loss_mask, torch.minimum(weighted, clipped), 0.0).sum() / count
    with torch.no_grad():
        counted = torch.where(loss_mask, ratio, 0.0)
        cut = loss_mask & (clipped < weighted)
        return Surrogate(loss, counted.sum() / count, counted.max(), cut.sum() / count)
