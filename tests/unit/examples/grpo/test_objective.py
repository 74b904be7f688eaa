"""The formulas: group advantages, the clipped and truncated ratio, and where gradients are cut."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from examples.grpo.objective import Surrogate, clipped_surrogate, group_advantages


def surrogate(new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor | None = None) -> Surrogate:
    counted = torch.ones_like(new, dtype=torch.bool) if mask is None else mask
    return clipped_surrogate(new, old, advantages, counted, clip_low=0.2, clip_high=0.3, ratio_cap=5.0)


def gradient(log_ratio: float, advantage: float) -> float:
    new = torch.tensor([[log_ratio]], requires_grad=True)
    surrogate(new, torch.zeros(1, 1), torch.tensor([advantage])).loss.backward()  # type: ignore[no-untyped-call]
    assert new.grad is not None
    return float(new.grad)


def test_advantages_have_zero_mean_and_unit_deviation() -> None:
    advantages = group_advantages(torch.tensor([0.0, 0.25, 0.5, 1.0]))
    assert advantages.mean().item() == pytest.approx(0.0, abs=1e-6)
    assert advantages.std(unbiased=False).item() == pytest.approx(1.0, abs=1e-3)


def test_a_better_sample_has_the_larger_advantage() -> None:
    advantages = group_advantages(torch.tensor([0.1, 0.9, 0.5]))
    assert advantages.argsort().tolist() == [0, 2, 1]


def test_a_group_of_equal_rewards_has_no_advantages() -> None:
    assert group_advantages(torch.full((4,), 0.7)).abs().max().item() < 1e-2
    assert group_advantages(torch.ones(4)).tolist() == [0.0] * 4


def test_ratio_one_gives_minus_the_mean_advantage_per_token() -> None:
    logprobs = torch.full((2, 3), -1.5)
    result = surrogate(logprobs, logprobs, torch.tensor([1.0, -0.5]))
    assert result.loss.item() == pytest.approx(-0.25)
    assert result.ratio_mean.item() == pytest.approx(1.0)
    assert result.clipped_fraction.item() == 0.0


def test_masked_tokens_do_not_count_whatever_their_values() -> None:
    new = torch.tensor([[-1.0, 50.0, -1.0]])
    mask = torch.tensor([[True, False, False]])
    result = surrogate(new, torch.tensor([[-1.0, 0.0, math.nan]]), torch.tensor([2.0]), mask)
    assert result.loss.item() == pytest.approx(-2.0)
    assert result.ratio_max.item() == pytest.approx(1.0)


def test_a_batch_without_counted_tokens_has_zero_loss() -> None:
    mask = torch.zeros(1, 2, dtype=torch.bool)
    assert surrogate(torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1), mask).loss.item() == 0.0


@pytest.mark.parametrize(
    ("ratio", "advantage", "cut"),
    [(1.2, 1.0, False), (1.5, 1.0, True), (0.5, 1.0, False), (0.5, -1.0, True), (1.5, -1.0, False), (6.0, -1.0, True)],
)
def test_gradient_is_cut_only_where_the_policy_moved_too_far_already(ratio: float, advantage: float, cut: bool) -> None:
    assert (gradient(math.log(ratio), advantage) == 0.0) is cut


def test_gradient_pushes_good_tokens_up_and_bad_ones_down() -> None:
    assert gradient(0.0, 1.0) < 0 < gradient(0.0, -1.0)


def test_the_ratio_of_an_improbable_token_is_truncated() -> None:
    result = surrogate(torch.tensor([[0.0]]), torch.tensor([[-20.0]]), torch.tensor([-1.0]))
    assert result.ratio_max.item() == pytest.approx(5.0)
    assert result.loss.item() == pytest.approx(5.0)
