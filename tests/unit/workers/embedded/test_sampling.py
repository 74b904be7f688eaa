"""Each sampling option, on hand-made logits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from workers.embedded.sampling import Sampler
from workers.embedded.sequence import SequenceState

Make = Callable[..., SequenceState]

LOGITS = torch.tensor([0.0, 2.0, 1.0, -1.0, 1.5])


def draw_many(make_sequence: Make, count: int = 400, logits: torch.Tensor = LOGITS, **params: Any) -> Counter[int]:
    sequences = [make_sequence([1], seed=seed, **params) for seed in range(count)]
    tokens, _ = Sampler().sample(logits.expand(count, -1), sequences)
    return Counter(tokens)


def test_greedy_takes_the_most_likely(make_sequence: Make) -> None:
    assert set(draw_many(make_sequence, 3, greedy=True)) == {1}
    assert set(draw_many(make_sequence, 3, temperature=0.0)) == {1}


def test_frequencies_follow_the_softmax(make_sequence: Make) -> None:
    count = 4000
    found = draw_many(make_sequence, count)
    expected = torch.softmax(LOGITS, -1)
    for token, share in enumerate(expected.tolist()):
        assert found[token] / count == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / count))


def test_low_temperature_sharpens_and_high_temperature_flattens(make_sequence: Make) -> None:
    assert set(draw_many(make_sequence, temperature=0.01)) == {1}
    flat = draw_many(make_sequence, 2000, temperature=100.0)
    assert min(flat.values()) > 300


def test_top_k_keeps_the_k_most_likely(make_sequence: Make) -> None:
    assert set(draw_many(make_sequence, top_k=2)) == {1, 4}
    assert set(draw_many(make_sequence, top_k=1)) == {1}
    assert set(draw_many(make_sequence, 1000, top_k=0)) == {0, 1, 2, 3, 4}
    assert set(draw_many(make_sequence, 1000, top_k=10**400)) == {0, 1, 2, 3, 4}


def test_top_p_keeps_the_smallest_set_that_reaches_the_mass(make_sequence: Make) -> None:
    ordered = torch.softmax(LOGITS, -1).sort(descending=True).values
    two = float(ordered[:2].sum())
    assert set(draw_many(make_sequence, top_p=two - 1e-6)) == {1, 4}
    assert set(draw_many(make_sequence, top_p=two + 1e-6)) == {1, 4, 2}
    assert set(draw_many(make_sequence, top_p=1e-9)) == {1}


def test_top_p_applies_to_what_top_k_left(make_sequence: Make) -> None:
    # Among the two kept, the first has softmax([2, 1.5]) = 0.62 of the mass.
    assert set(draw_many(make_sequence, top_k=2, top_p=0.6)) == {1}
    assert set(draw_many(make_sequence, top_k=2, top_p=0.7)) == {1, 4}


def test_rows_with_different_options_do_not_touch_each_other(make_sequence: Make) -> None:
    plain = make_sequence([1], seed=5)
    alone, alone_logprobs = Sampler().sample(LOGITS.unsqueeze(0), [plain])
    mixed = [make_sequence([1], greedy=True), make_sequence([1], seed=5, top_k=1), plain]
    tokens, logprobs = Sampler().sample(LOGITS.expand(3, -1), mixed)
    assert tokens == [1, 1, alone[0]]
    assert logprobs[2] == alone_logprobs[0]


def test_noise_depends_on_seed_and_position_only(make_sequence: Make) -> None:
    logits = torch.zeros(1, 10_000)
    sampler = Sampler()
    [first], _ = sampler.sample(logits, [make_sequence([1, 2, 3], seed=5)])
    [again], _ = sampler.sample(logits, [make_sequence([7, 8, 9], seed=5)])
    [other_position], _ = sampler.sample(logits, [make_sequence([1, 2], seed=5)])
    [other_seed], _ = sampler.sample(logits, [make_sequence([1, 2, 3], seed=6)])
    assert first == again
    assert len({first, other_position, other_seed}) == 3


@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2.0**-53])
def test_token_of_probability_zero_is_never_drawn(
    make_sequence: Make, monkeypatch: pytest.MonkeyPatch, uniform: float
) -> None:
    monkeypatch.setattr(Sampler, "_uniform", lambda _self, _sequence: uniform)
    [token], _ = Sampler().sample(LOGITS.unsqueeze(0), [make_sequence([1], eos=[0, 4], min_new_tokens=1, top_k=1)])
    assert token == 1


def test_negative_seed_works(make_sequence: Make) -> None:
    [token], _ = Sampler().sample(LOGITS.unsqueeze(0), [make_sequence([1], seed=-(1 << 63))])
    assert 0 <= token < 5


def test_logprob_is_of_the_raw_logits(make_sequence: Make) -> None:
    sequence = make_sequence([1], temperature=0.1, top_k=1, seed=1, frequency_penalty=1.0)
    [token], [logprob] = Sampler().sample(LOGITS.unsqueeze(0), [sequence])
    assert logprob == pytest.approx(float(torch.log_softmax(LOGITS, -1)[token]))


def test_frequency_penalty_counts_output_tokens_only(make_sequence: Make) -> None:
    sequence = make_sequence([1, 1, 1, 1], greedy=True, frequency_penalty=0.3)
    picked = []
    for _ in range(4):
        [token], [logprob] = Sampler().sample(LOGITS.unsqueeze(0), [sequence])
        sequence.accept([token], [logprob], "0.0")
        picked.append(token)
    # Scores of (1, 4) go 2.0/1.5 -> 1.7/1.5 -> 1.4/1.5 -> 1.4/1.2 as each is picked.
    assert picked == [1, 1, 4, 1]


def test_min_new_tokens_masks_eos_and_stop_ids(make_sequence: Make) -> None:
    options: dict[str, Any] = {"eos": [1], "stop_token_ids": [4], "min_new_tokens": 1}
    assert set(draw_many(make_sequence, 1000, **options)) == {0, 2, 3}
    sequence = make_sequence([1], greedy=True, **options)
    sequence.accept([2], [-1.0], "0.0")
    assert Sampler().sample(LOGITS.unsqueeze(0), [sequence])[0] == [1]


def test_logits_that_are_not_finite_give_a_logprob_that_is_not(make_sequence: Make) -> None:
    for params in ({"greedy": True}, {"seed": 1}, {"seed": 1, "top_k": 2}):
        _, [logprob] = Sampler().sample(torch.full((1, 5), math.nan), [make_sequence([1], **params)])
        assert not math.isfinite(logprob)


def test_input_logits_are_not_changed(make_sequence: Make) -> None:
    logits = LOGITS.unsqueeze(0).clone()
    sequence = make_sequence([1], eos=[1], min_new_tokens=2, seed=1, frequency_penalty=2.0)
    sequence.accept([2], [-1.0], "0.0")
    Sampler().sample(logits, [sequence])
    assert torch.equal(logits, LOGITS.unsqueeze(0))
