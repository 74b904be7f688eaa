"""The learner: it learns, it saves what engines can load, and it refuses to step on rubbish."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.grpo.batch import Sample
from examples.grpo.learner import GrpoLearner
from examples.grpo.task import ANSWER_TOKENS, prompts, reward
from examples.tiny_model import make_tiny_model


@torch.no_grad()
def sample_group(learner: GrpoLearner, prompt: list[int], size: int, generator: torch.Generator) -> list[Sample]:
    """Sample without a KV cache, straight from the learner's model."""
    tokens = torch.tensor([prompt] * size)
    logprobs = []
    for _ in range(ANSWER_TOKENS):
        scores = learner.model(input_ids=tokens).logits[:, -1].log_softmax(-1)
        chosen = torch.multinomial(scores.exp(), 1, generator=generator)
        logprobs.append(scores.gather(-1, chosen))
        tokens = torch.cat([tokens, chosen], dim=1)
    answers = tokens[:, len(prompt) :].tolist()
    return [
        Sample(prompt, answer, row, reward(prompt_ids=prompt, completion_ids=answer, data={}))
        for answer, row in zip(answers, torch.cat(logprobs, dim=1).tolist(), strict=True)
    ]


def sample_with_reward(value: float, logprob: float = -5.77) -> Sample:
    return Sample(list(b"07 digits:"), list(b"123"), [logprob] * 3, value)


def weights(learner: GrpoLearner) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in learner.model.state_dict().items()}


def test_a_short_run_on_one_step_old_data_raises_the_reward_clearly(tmp_path: Path) -> None:
    learner = GrpoLearner(make_tiny_model(tmp_path / "model", hidden_size=128), learning_rate=2e-3)
    generator = torch.Generator().manual_seed(0)
    source = prompts(0)

    def rollouts() -> list[list[Sample]]:
        return [sample_group(learner, prompt, 16, generator) for prompt in itertools.islice(source, 3)]

    waiting, rewards = rollouts(), []
    for _ in range(30):
        batch, waiting = waiting, rollouts()
        rewards.append(learner.step(batch).reward_mean)
    assert sum(rewards[:3]) / 3 < 0.2
    assert sum(rewards[-3:]) / 3 > 0.35


def test_fresh_samples_have_ratio_one_and_no_clipping(model_dir: Path) -> None:
    learner = GrpoLearner(model_dir, learning_rate=1e-3)
    group = sample_group(learner, list(b"07 digits:"), 8, torch.Generator().manual_seed(3))
    report = learner.step([group])
    assert report.ratio_mean == pytest.approx(1.0, abs=1e-4)
    assert report.ratio_max == pytest.approx(1.0, abs=1e-3)
    assert report.clipped_fraction == 0.0
    assert report.tokens == 8 * ANSWER_TOKENS
    assert report.reward_mean == pytest.approx(sum(sample.reward for sample in group) / 8)


def test_groups_without_contrast_leave_the_weights_alone(model_dir: Path) -> None:
    learner = GrpoLearner(model_dir, learning_rate=1e-2)
    before = weights(learner)
    report = learner.step([[sample_with_reward(1.0), sample_with_reward(1.0)]])
    assert report.grad_norm == 0.0
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(learner).items())


def test_a_gradient_that_is_not_finite_is_refused_and_changes_nothing(model_dir: Path) -> None:
    learner = GrpoLearner(model_dir, learning_rate=1e-2)
    before = weights(learner)
    with pytest.raises(FloatingPointError, match="gradient norm of step 1 is nan"):
        learner.step([[sample_with_reward(1.0, math.nan), sample_with_reward(0.0)]])
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(learner).items())


def test_a_saved_directory_is_complete_and_holds_the_learned_weights(model_dir: Path, tmp_path: Path) -> None:
    learner = GrpoLearner(model_dir, learning_rate=1e-2)
    learner.step([[sample_with_reward(1.0), sample_with_reward(0.0)]])
    saved = learner.save(tmp_path / "weights" / "version-1")
    assert {path.name for path in model_dir.iterdir()} <= {path.name for path in saved.iterdir()}
    loaded = AutoModelForCausalLM.from_pretrained(saved)
    ids = torch.tensor([list(b"07 digits:")])
    assert torch.allclose(loaded(input_ids=ids).logits, learner.model(input_ids=ids).logits, atol=1e-6)
    original = AutoModelForCausalLM.from_pretrained(model_dir)
    assert not torch.allclose(loaded(input_ids=ids).logits, original(input_ids=ids).logits, atol=1e-4)
    assert AutoTokenizer.from_pretrained(saved)("07 digits:")["input_ids"] == list(b"07 digits:")


def test_weights_are_stored_in_the_dtype_of_the_source(tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "model", hidden_size=64, dtype="bfloat16")
    saved = GrpoLearner(source, learning_rate=1e-3).save(tmp_path / "version-1")
    assert next(AutoModelForCausalLM.from_pretrained(saved).parameters()).dtype is torch.bfloat16


def test_saving_over_a_checkpoint_is_refused(model_dir: Path, tmp_path: Path) -> None:
    learner = GrpoLearner(model_dir, learning_rate=1e-3)
    learner.save(tmp_path / "version-1")
    with pytest.raises(FileExistsError, match="version-1"):
        learner.save(tmp_path / "version-1")


def test_the_learning_rate_rises_linearly_to_its_peak(model_dir: Path) -> None:
    learner = GrpoLearner(model_dir, learning_rate=1.0e-3, warmup_steps=1)
    group = [sample_with_reward(1.0), sample_with_reward(0.0)]
    start = weights(learner)
    learner.step([group])
    first = max(float((start[n] - t).abs().max()) for n, t in weights(learner).items())
    assert 0 < first <= 0.5e-3 * 1.01
