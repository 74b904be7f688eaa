"""Requests, trajectories and groups: validation, bodies, tensors."""

from __future__ import annotations

from typing import Any

import pytest

from rollmq import GenerationHyperparameters, Group, ModelRequest
from rollmq.bodies import decode_task_spec, decode_trajectory, encode_episode, encode_task_spec
from rollmq.errors import ConfigError, ProtocolError
from rollmq.rollout import EpisodeResult, TaskSpec


def episode(**changes: Any) -> EpisodeResult:
    values: dict[str, Any] = {
        "input_ids": [1, 2],
        "output_ids": [3, 4, 5],
        "output_logprobs": [-0.5, -0.25, -0.125],
        "version_spans": [(4, 0, 2), (5, 2, 3)],
        "stop_reason": "stop",
        "reward": 1.0,
        "loss_mask": [1, 1, 1],
    }
    return EpisodeResult(**{**values, **changes})


def test_a_task_survives_its_body() -> None:
    gconfig = GenerationHyperparameters(max_new_tokens=5, stop_token_ids=(7,), seed=3)
    spec = TaskSpec(
        ModelRequest([1, 2, 3], gconfig, {"row": 9}), "generate", {"reward": "exact", "nested": [1, {"a": b"x"}]}
    )
    assert decode_task_spec(encode_task_spec(spec)) == spec


def test_a_trajectory_survives_its_body_with_spans_and_versions() -> None:
    trajectory = decode_trajectory(encode_episode(episode(), worker="w", attempt=2), task_id=9)
    assert (trajectory.task_id, trajectory.worker, trajectory.attempts) == (9, "w", 2)
    assert (trajectory.head_version, trajectory.tail_version) == (4, 5)
    assert trajectory.versions() == [4, 4, 5]
    assert trajectory.output_logprobs == [-0.5, -0.25, -0.125]


def test_tokens_that_were_not_generated_do_not_set_the_head_version() -> None:
    result = episode(version_spans=[(0, 0, 1), (5, 1, 3)], loss_mask=[0, 1, 1])
    assert (result.head_version, result.tail_version) == (5, 5)


@pytest.mark.parametrize(
    "changes",
    [
        {"output_logprobs": [-0.5]},
        {"output_logprobs": [float("nan"), -1.0, -1.0]},
        {"reward": float("inf")},
        {"stop_reason": "tired"},
        {"version_spans": [(1, 0, 9)]},
        {"version_spans": [(1, 2, 2)]},
        {"version_spans": [(1, 1, 3), (2, 0, 1)]},
    ],
)
def test_an_inconsistent_episode_is_named(changes: dict[str, Any]) -> None:
    assert episode(**changes).problem()


def test_an_episode_without_a_known_version_cannot_be_labelled() -> None:
    with pytest.raises(ProtocolError, match="labelled"):
        _ = episode(version_spans=[]).head_version


@pytest.mark.parametrize("flip", [0, 3, 4, 20, -1])
def test_a_changed_body_is_refused(flip: int) -> None:
    body = bytearray(encode_episode(episode(), worker="w", attempt=1))
    body[flip] ^= 0x10
    with pytest.raises(ProtocolError):
        decode_trajectory(bytes(body), task_id=1)


@pytest.mark.parametrize(
    "changes",
    [
        {"n_samples": 0},
        {"max_new_tokens": 0},
        {"max_new_tokens": True},
        {"min_new_tokens": 200},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_k": -2},
        {"frequency_penalty": 3.0},
        {"stop_token_ids": [-1]},
        {"stop": "text"},
        {"stop": [""]},
        {"seed": -1},
    ],
)
def test_wrong_sampling_parameters_are_named(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes))):
        GenerationHyperparameters(**changes)


@pytest.mark.parametrize("ids", [[], [-1], [2**31], [1, 2, -3]])
def test_wrong_prompts_are_refused(ids: list[int]) -> None:
    with pytest.raises(ConfigError, match="input_ids"):
        ModelRequest(ids)


def test_data_that_cannot_travel_is_refused_when_it_is_sent() -> None:
    with pytest.raises(ConfigError, match="cannot be sent"):
        encode_task_spec(TaskSpec(ModelRequest([1]), data={"f": object()}))


def test_a_group_becomes_padded_tensors() -> None:
    members = [
        decode_trajectory(encode_episode(e, worker="w", attempt=1), task_id=i, member=i)
        for i, e in enumerate(
            [
                episode(),
                episode(output_ids=[3], output_logprobs=[-1.0], loss_mask=[1], version_spans=[(4, 0, 1)], reward=None),
            ]
        )
    ]
    group = Group(1, tuple(members))
    tensors = group.to_tensors()
    assert tensors["input_ids"].tolist() == [[1, 2, 3, 4, 5], [1, 2, 3, 0, 0]]
    assert tensors["attention_mask"].tolist() == [[True] * 5, [True, True, True, False, False]]
    assert tensors["loss_mask"].tolist() == [[False, False, True, True, True], [False, False, True, False, False]]
    assert tensors["versions"].tolist() == [[-1, -1, 4, 4, 5], [-1, -1, 4, -1, -1]]
    assert tensors["rewards"].shape == (2,)
    assert (group.head_version, group.tail_version, group.task_ids) == (4, 5, [0, 1])
