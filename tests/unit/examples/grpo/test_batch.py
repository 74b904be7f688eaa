"""Samples become padded tensors whose columns belong to the right predictions."""

from __future__ import annotations

import pytest
import torch

from examples.grpo.batch import Sample, collate

CPU = torch.device("cpu")


def test_targets_logprobs_and_mask_are_shifted_onto_the_predicting_column() -> None:
    sample = Sample(input_ids=[10, 11], output_ids=[20, 21], logprobs=[-1.0, -2.0], reward=1.0)
    batch = collate([[sample]], CPU)
    assert batch.input_ids.tolist() == [[10, 11, 20]]
    assert batch.targets.tolist() == [[11, 20, 21]]
    assert batch.loss_mask.tolist() == [[False, True, True]]
    assert batch.behaviour_logprobs.tolist() == [[0.0, -1.0, -2.0]]


def test_short_samples_are_padded_on_the_right_and_not_attended() -> None:
    long = Sample(input_ids=[1, 2, 3], output_ids=[4, 5], logprobs=[-1.0, -1.0], reward=1.0)
    short = Sample(input_ids=[1], output_ids=[4], logprobs=[-1.0], reward=0.0)
    batch = collate([[long, short]], CPU)
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch.loss_mask[1].tolist() == [True, False, False, False]


def test_tokens_that_were_not_generated_are_left_out() -> None:
    sample = Sample(input_ids=[1], output_ids=[2, 3, 4], logprobs=[-1.0, 0.0, -1.0], reward=1.0, loss_mask=[1, 0, 1])
    assert collate([[sample]], CPU).loss_mask.tolist() == [[True, False, True]]


def test_advantages_are_taken_inside_each_group() -> None:
    def group(*rewards: float) -> list[Sample]:
        return [Sample(input_ids=[1], output_ids=[2], logprobs=[-1.0], reward=reward) for reward in rewards]

    advantages = collate([group(0.0, 0.2), group(0.8, 1.0)], CPU).advantages
    assert advantages.tolist() == pytest.approx([-1.0, 1.0, -1.0, 1.0], abs=1e-2)


def test_a_batch_without_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="without samples"):
        collate([[]], CPU)


def test_logprobs_of_another_length_than_the_output_are_refused() -> None:
    with pytest.raises(ValueError, match="2 output tokens but 1 logprobs"):
        Sample(input_ids=[1], output_ids=[2, 3], logprobs=[-1.0], reward=0.0)


def test_a_loss_mask_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="loss mask of 3"):
        Sample(input_ids=[1], output_ids=[2], logprobs=[-1.0], reward=0.0, loss_mask=[1, 1, 1])


def test_a_sample_without_a_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one prompt token"):
        Sample(input_ids=[], output_ids=[2], logprobs=[-1.0], reward=0.0)
