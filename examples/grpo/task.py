"""The demo's task: answer with the kind of character that the prompt asks for.

A prompt names a character class ("digits", "lower", "upper"); the reward is the share of the answer
that belongs to it. One model must answer three kinds of prompt in three ways, so a policy that
ignores its prompt scores at most one third. A model with random weights scores about one fifteenth:
its tokens are near uniform over the vocabulary.

Token ids below 256 are the bytes of the text. Workers import this module for its reward, so it
imports only the standard library.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import Any

ANSWER_TOKENS = 12
"""Length of a full answer, in tokens. A shorter answer forfeits the missing share of its reward."""

REWARD_NAME = "character_class"
"""Name under which the workers know the reward."""

REWARD_PATH = "examples.grpo.task:reward"
"""Where workers import it from."""


class CharacterClass(StrEnum):
    """What a prompt can ask for; the value is the word used in the prompt."""

    DIGITS = "digits"
    LOWER = "lower"
    UPPER = "upper"


_MEMBERS: Mapping[CharacterClass, frozenset[int]] = MappingProxyType(
    {
        CharacterClass.DIGITS: frozenset(b"0123456789"),
        CharacterClass.LOWER: frozenset(b"abcdefghijklmnopqrstuvwxyz"),
        CharacterClass.UPPER: frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ"),
    }
)


def prompts(seed: int) -> Iterator[list[int]]:
    """Yield prompts for ever, as token ids: each run of three asks for every class once.

    A two-digit number makes prompts of one class differ, so that the class has to be read and not
    remembered as one fixed string. The same seed gives the same prompts.
    """
    generator = random.Random(seed)
    classes = list(CharacterClass)
    while True:
        generator.shuffle(classes)
        for wanted in classes:
            yield list(f"{generator.randrange(100):02d} {wanted.value}:".encode("ascii"))


def wanted_class(prompt_ids: Sequence[int]) -> CharacterClass:
    """The class that a prompt asks for.

    Raises:
        ValueError: the prompt is not one of this task.
    """
    text = "".join(chr(token) for token in prompt_ids)
    word = text.rpartition(" ")[2].removesuffix(":")
    try:
        return CharacterClass(word)
    except ValueError:
        known = ", ".join(CharacterClass)
        raise ValueError(f"prompt {text[:80]!r} asks for none of: {known}; end it with 'CLASS:'") from None


def score(answer: Sequence[int], wanted: CharacterClass) -> float:
    """Share of a full answer that is in the wanted class, in [0, 1].

    Ids above 255 are special tokens and belong to no class; tokens beyond `ANSWER_TOKENS` earn nothing.
    """
    members = _MEMBERS[wanted]
    return sum(token in members for token in answer[:ANSWER_TOKENS]) / ANSWER_TOKENS


def reward(*, prompt_ids: list[int], completion_ids: list[int], data: dict[str, Any]) -> float:
    """Reward of one completion, in the form that a worker calls by name; `data` is not used.

    Raises:
        ValueError: the prompt is not one of this task. That is the submitter's fault, not a bad answer.
    """
    del data
    return score(completion_ids, wanted_class(prompt_ids))
