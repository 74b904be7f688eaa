"""The resume logic as data in, data out."""

from __future__ import annotations

import pytest

from rollmq.errors import EngineUnavailable, EngineVersionUnknown
from rollmq.rollout import GenerationHyperparameters, ModelRequest
from workers.backends.base import HttpGenerationResult
from workers.generation import BACKOFF_S, MAX_EMPTY_ABORTS, Generation


def start(carries_penalties: bool = True, seeds_by_position: bool = False, **sampling: object) -> Generation:
    gconfig = GenerationHyperparameters(**{"max_new_tokens": 10, **sampling})  # type: ignore[arg-type]
    request = ModelRequest([7, 8], gconfig)
    return Generation(request, carries_penalties=carries_penalties, seeds_by_position=seeds_by_position)


def piece(text: str, finish: str = "abort", label: str = "0.0") -> HttpGenerationResult:
    """A segment whose tokens are the bytes of `text`."""
    ids = list(text.encode())
    spans = [(label, 0, len(ids))] if ids else []
    return HttpGenerationResult(ids, [-1.0] * len(ids), spans, finish)


def test_the_original_budget_less_what_is_there_is_asked_for() -> None:
    generation = start(min_new_tokens=6)
    generation.accept(piece("abcd"))
    segment = generation.next_segment()
    assert segment.prompt_ids == [7, 8, *b"abcd"]
    assert segment.prior_ids == list(b"abcd")
    assert (segment.gconfig.max_new_tokens, segment.gconfig.min_new_tokens) == (6, 2)
    generation.accept(piece("efgh"))
    assert (generation.next_segment().gconfig.max_new_tokens, generation.next_segment().gconfig.min_new_tokens) == (
        2,
        0,
    )


def test_spans_are_shifted_and_merged_when_labels_are_equal() -> None:
    generation = start()
    generation.accept(piece("abc", label="0.1"))
    generation.accept(piece("de", label="0.1"))
    generation.accept(piece("fg", "stop", label="1.2"))
    result = generation.result()
    assert result.label_spans == (("0.1", 0, 5), ("1.2", 5, 7))
    assert result.response.version_spans == [(1, 0, 5), (2, 5, 7)]
    assert result.labels == {"0.1", "1.2"}
    assert result.response.interruptions == 2


def test_equal_versions_of_different_epochs_stay_apart() -> None:
    generation = start()
    generation.accept(piece("abc", label="1.4"))
    generation.accept(piece("de", "stop", label="2.4"))
    assert generation.result().label_spans == (("1.4", 0, 3), ("2.4", 3, 5))


def test_a_seed_changes_with_each_segment_and_is_reproducible() -> None:
    def seeds() -> list[int | None]:
        generation = start(seed=5)
        found = [generation.next_segment().gconfig.seed]
        for _ in range(2):
            generation.accept(piece("a"))
            found.append(generation.next_segment().gconfig.seed)
        return found

    assert seeds() == seeds()
    assert len(set(seeds())) == 3 and seeds()[0] == 5
    assert start().next_segment().gconfig.seed is None


def test_a_seed_stays_where_random_numbers_depend_on_the_position() -> None:
    generation = start(seeds_by_position=True, seed=5)
    generation.accept(piece("abc"))
    assert generation.next_segment().gconfig.seed == 5


def test_empty_aborts_are_spaced_out_then_given_up_and_progress_resets_the_count() -> None:
    generation = start()
    delays = [generation.accept(piece("")) for _ in range(MAX_EMPTY_ABORTS)]
    assert delays[:3] == [BACKOFF_S[0], 2 * BACKOFF_S[0], 4 * BACKOFF_S[0]] and max(delays) == BACKOFF_S[1]
    assert generation.accept(piece("a")) == 0.0
    assert generation.accept(piece("")) == BACKOFF_S[0]
    for _ in range(MAX_EMPTY_ABORTS - 1):
        generation.accept_refusal()
    with pytest.raises(EngineUnavailable, match="without a new token"):
        generation.accept(piece(""))


def test_more_tokens_than_asked_for_are_refused() -> None:
    with pytest.raises(EngineUnavailable, match="11 tokens; 10 were asked"):
        start().accept(piece("x" * 11))


def test_labels_that_are_none_of_ours_are_refused() -> None:
    for label in ("default", "", "v3", "1", "01.2", "1.2.3"):
        generation = start()
        generation.accept(piece("abc", label=label))
        with pytest.raises(EngineVersionUnknown):
            generation.refuse_if_unlabelled()


def test_a_generation_without_a_token_is_the_engines_fault() -> None:
    generation = start()
    generation.accept(piece("", "stop"))
    with pytest.raises(EngineUnavailable, match="without a single token"):
        generation.result()


def test_a_penalty_that_cannot_be_carried_over_makes_the_request_start_over() -> None:
    generation = start(carries_penalties=False, frequency_penalty=0.5)
    assert generation.accept(piece("abc", label="0.1")) > 0
    assert generation.next_segment().prompt_ids == [7, 8]
    assert generation.next_segment().gconfig.max_new_tokens == 10
    generation.accept(piece("de", "stop", label="0.2"))
    assert generation.result().label_spans == (("0.2", 0, 2),)


def test_a_request_with_stop_strings_starts_over_since_one_may_cross_the_interruption() -> None:
    generation = start(stop=("STOP",))
    generation.accept(piece("abST"))
    assert generation.next_segment().prompt_ids == [7, 8]
    generation.accept(piece("abSTOP", "stop", label="0.1"))
    response = generation.result().response
    assert bytes(response.output_ids) == b"abSTOP" and response.stop_reason == "stop"
    assert response.version_spans == [(1, 0, 6)] and len(response.output_logprobs) == 6
