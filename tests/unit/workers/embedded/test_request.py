"""Reading /generate bodies: what is accepted, and that each refusal names the field and the limit."""

from __future__ import annotations

from typing import Any

import pytest

from rollmq.errors import RequestRejected
from workers.embedded.request import ModelLimits, parse_generate

LIMITS = ModelLimits(vocab_size=320, max_model_len=64, eos_token_ids=frozenset({258}))


def body(**changes: Any) -> dict[str, Any]:
    return {"rid": "r", "input_ids": [1, 2], "sampling_params": {"max_new_tokens": 4}, **changes}


def params(**changes: Any) -> dict[str, Any]:
    return body(sampling_params={"max_new_tokens": 4, **changes})


def test_minimal_body_gets_the_documented_defaults() -> None:
    request = parse_generate(body(), LIMITS)
    assert (request.rid, request.input_ids) == ("r", (1, 2))
    sampling = request.params
    assert (sampling.max_new_tokens, sampling.min_new_tokens, sampling.temperature) == (4, 0, 1.0)
    assert (sampling.top_p, sampling.top_k, sampling.greedy, sampling.seed) == (1.0, -1, False, None)
    assert (sampling.stop_token_ids, sampling.ignore_eos, sampling.frequency_penalty) == (frozenset(), False, 0.0)


def test_all_fields_are_read() -> None:
    request = parse_generate(
        params(
            min_new_tokens=2,
            temperature=0,
            top_p=0.5,
            top_k=0,
            seed=-7,
            stop_token_ids=[3, 3],
            ignore_eos=True,
            frequency_penalty=-2,
            greedy=True,
        ),
        LIMITS,
    )
    assert request.params.is_greedy
    assert request.params.seed == -7
    assert request.params.stop_token_ids == {3}


@pytest.mark.parametrize("temperature", [0, 1e-320, 9e-6])
def test_vanishing_temperature_is_greedy(temperature: float) -> None:
    assert parse_generate(params(temperature=temperature), LIMITS).params.is_greedy
    assert not parse_generate(params(temperature=1e-5), LIMITS).params.is_greedy


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([], "the body must be a JSON object"),
        (body(extra=1), "unknown key 'extra' in the body"),
        (params(n=2), "unknown key 'n' in sampling_params"),
        (body(rid=""), "rid must be a non-empty string"),
        (body(rid=5), "rid must be a non-empty string"),
        (body(rid="a\ud800"), "characters that cannot be printed"),
        (params(temperature=10**400), "temperature must be a finite number"),
        (params(max_new_tokens=10**400), "more than the model's max_model_len 64"),
        (body(rid="x" * 300), "rid has 300 characters"),
        (body(input_ids=[]), "input_ids is empty"),
        (body(input_ids="text"), "input_ids must be a list"),
        (body(input_ids=[1, True]), r"input_ids\[1\] must be an int"),
        (body(input_ids=[1.0]), r"input_ids\[0\] must be an int"),
        (body(input_ids=[1, 320]), r"token id 320, outside the vocabulary.*vocab_size 320"),
        (body(input_ids=[-1]), r"token id -1, outside the vocabulary.*vocab_size 320"),
        (body(input_ids=[1] * 61), r"prompt of 61 tokens \+ max_new_tokens 4 = 65.*max_model_len 64"),
        (body(sampling_params=None), "sampling_params must be a JSON object"),
        (body(sampling_params={}), "max_new_tokens must be an int"),
        (params(max_new_tokens=0), "max_new_tokens is 0; it must be at least 1"),
        (params(max_new_tokens=True), "max_new_tokens must be an int"),
        (params(min_new_tokens=5), "min_new_tokens is 5; it must be from 0 to 4"),
        (params(temperature=-0.1), "temperature is -0.1"),
        (params(temperature=float("nan")), "temperature must be a finite number"),
        (params(temperature="1"), "temperature must be a finite number"),
        (params(top_p=0), "top_p is 0"),
        (params(top_p=1.5), "top_p is 1.5"),
        (params(top_k=-2), "top_k is -2"),
        (params(greedy=1), "greedy must be true or false"),
        (params(seed=1.5), "seed must be an int"),
        (params(seed=1 << 63), "seed is"),
        (params(stop_token_ids=[400]), r"stop_token_ids\[0\] is token id 400"),
        (params(stop_token_ids=7), "stop_token_ids must be a list"),
        (params(frequency_penalty=2.1), "frequency_penalty is 2.1"),
        (params(min_new_tokens=1, stop_token_ids=list(range(320))), "leaves nothing to sample"),
    ],
)
def test_bad_body_is_refused_with_a_message_that_names_it(bad: object, message: str) -> None:
    with pytest.raises(RequestRejected, match=message):
        parse_generate(bad, LIMITS)


def test_prompt_that_just_fits_is_accepted() -> None:
    assert len(parse_generate(body(input_ids=[1] * 60), LIMITS).input_ids) == 60
