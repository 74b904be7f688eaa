"""A sequence's spans, stop rules and masks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from workers.embedded.sequence import FinishReason, SequenceState, VersionSpan

Make = Callable[..., SequenceState]


def test_spans_are_contiguous_and_merge_tokens_of_one_version(make_sequence: Make) -> None:
    sequence = make_sequence([1], 10)
    for token, version in [(5, "0.0"), (6, "0.0"), (7, "0.1"), (8, "0.2"), (9, "0.2")]:
        sequence.accept([token], [-1.0], version)
    assert sequence.spans == [VersionSpan("0.0", 0, 2), VersionSpan("0.1", 2, 3), VersionSpan("0.2", 3, 5)]


def test_length_is_reached_with_the_last_token(make_sequence: Make) -> None:
    sequence = make_sequence([1], 2)
    sequence.accept([5], [-1.0], "0.0")
    assert not sequence.is_finished
    sequence.accept([6], [-1.0], "0.0")
    assert sequence.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("token", "ignore_eos", "reason", "stop_reason"),
    [(9, False, "stop", None), (9, True, None, None), (4, False, "stop", 4), (4, True, "stop", 4)],
)
def test_ignore_eos_disables_only_the_models_own_end(
    make_sequence: Make, token: int, ignore_eos: bool, reason: str | None, stop_reason: int | None
) -> None:
    sequence = make_sequence([1], 10, eos=[9], stop_token_ids=[4], ignore_eos=ignore_eos)
    sequence.accept([token], [-1.0], "0.0")
    assert (sequence.finish_reason, sequence.stop_reason) == (reason, stop_reason)
    assert sequence.output_ids == [token]


def test_stop_token_at_the_budgets_end_counts_as_stop(make_sequence: Make) -> None:
    sequence = make_sequence([1], 1, stop_token_ids=[4])
    sequence.accept([4], [-1.0], "0.0")
    assert sequence.finish_reason is FinishReason.STOP


def test_endings_are_masked_below_min_new_tokens(make_sequence: Make) -> None:
    sequence = make_sequence([1], 10, eos=[9], stop_token_ids=[4], ignore_eos=True, min_new_tokens=1)
    assert sequence.masked_ids == {4, 9}
    sequence.accept([5], [-1.0], "0.0")
    assert sequence.masked_ids == frozenset()


def test_result_of_an_unfinished_sequence_is_an_error(make_sequence: Make) -> None:
    with pytest.raises(ValueError, match="not finished"):
        make_sequence([1]).result()
