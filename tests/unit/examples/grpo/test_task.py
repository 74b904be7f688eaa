"""The task: prompts are reproducible and varied, the reward is a pure share of right characters."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys

import pytest

from examples.grpo.task import ANSWER_TOKENS, CharacterClass, prompts, reward, score, wanted_class

DIGITS_PROMPT = list(b"07 digits:")


def test_prompts_of_one_seed_repeat_and_of_another_differ() -> None:
    first = list(itertools.islice(prompts(1), 12))
    assert first == list(itertools.islice(prompts(1), 12))
    assert first != list(itertools.islice(prompts(2), 12))


def test_every_three_prompts_ask_for_each_class_once() -> None:
    asked = [wanted_class(prompt) for prompt in itertools.islice(prompts(0), 30)]
    for start in range(0, 30, 3):
        assert set(asked[start : start + 3]) == set(CharacterClass)


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [(b"07 digits:", b"012345678901"), (b"99 lower:", b"abcdefghijkl"), (b"00 upper:", b"ABCDEFGHIJKL")],
)
def test_a_full_answer_of_the_wanted_class_earns_one(prompt: bytes, answer: bytes) -> None:
    assert reward(prompt_ids=list(prompt), completion_ids=list(answer), data={}) == 1.0


def test_the_same_answer_earns_nothing_where_another_class_was_asked_for() -> None:
    assert reward(prompt_ids=list(b"07 upper:"), completion_ids=list(b"abcdefghijkl"), data={}) == 0.0


def test_a_short_answer_forfeits_the_missing_share() -> None:
    assert reward(prompt_ids=DIGITS_PROMPT, completion_ids=list(b"123"), data={}) == 3 / ANSWER_TOKENS


def test_an_empty_answer_earns_nothing() -> None:
    assert reward(prompt_ids=DIGITS_PROMPT, completion_ids=[], data={}) == 0.0


def test_tokens_beyond_the_answer_earn_nothing() -> None:
    assert reward(prompt_ids=DIGITS_PROMPT, completion_ids=list(b"1" * 50), data={}) == 1.0


def test_special_tokens_belong_to_no_class() -> None:
    assert all(score([256, 257, 258, 319], wanted) == 0.0 for wanted in CharacterClass)


def test_uniform_random_answers_score_far_below_the_start_limit() -> None:
    generator = random.Random(0)
    answers = [[generator.randrange(320) for _ in range(ANSWER_TOKENS)] for _ in range(300)]
    for wanted in CharacterClass:
        assert sum(score(answer, wanted) for answer in answers) / len(answers) < 0.12


@pytest.mark.parametrize("prompt", [b"hello", b"", b"07 vowels:"])
def test_a_foreign_prompt_is_an_error_and_not_a_zero(prompt: bytes) -> None:
    with pytest.raises(ValueError, match="asks for none of: digits, lower, upper"):
        reward(prompt_ids=list(prompt), completion_ids=[], data={})


def test_workers_import_the_task_without_torch() -> None:
    code = "import sys, examples.grpo.task; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
