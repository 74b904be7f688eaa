"""The torch model under the scheduler equals plain forward passes, whatever else is in the batch."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from examples.tiny_model import make_tiny_model
from rollmq.errors import ConfigError, EngineError
from workers.embedded.errors import BadModelDirectory
from workers.embedded.model import TorchModel, load_model
from workers.embedded.request import GenerateRequest
from workers.embedded.scheduler import PauseMode, Scheduler
from workers.embedded.sequence import GenerationResult, VersionSpan

Request = Callable[..., GenerateRequest]
PlainLogprobs = Callable[[Path, Sequence[int], Sequence[int]], torch.Tensor]
Stepped = Callable[..., Any]
FreeRunning = Callable[..., Scheduler]

DEADLINE = 60.0
TOLERANCE = 1e-4


def prompt_of(length: int) -> list[int]:
    return [(7 * length + 13 * position) % 256 for position in range(length)]


def assert_matches(plain: torch.Tensor, result: GenerationResult, *, greedy: bool) -> None:
    """Logprobs equal those of the plain pass; greedy tokens are its most likely ones."""
    expected = plain[range(len(result.output_ids)), result.output_ids]
    assert torch.allclose(torch.tensor(result.output_logprobs), expected, atol=TOLERANCE, rtol=0)
    if greedy:
        assert result.output_ids == plain.argmax(-1).tolist()


def run(scheduler: Scheduler, requests: Sequence[GenerateRequest]) -> list[GenerationResult]:
    return [answer.result(DEADLINE) for answer in [scheduler.submit(request) for request in requests]]


def test_logprobs_equal_a_plain_forward_in_a_mixed_batch(
    torch_model: TorchModel,
    model_a: Path,
    make_request: Request,
    free_running: FreeRunning,
    plain_logprobs: PlainLogprobs,
) -> None:
    requests = [
        make_request(prompt_of(1 + 9 * index), 4 + 25 * index, greedy=index % 2 == 0, seed=index, ignore_eos=True)
        for index in range(8)
    ]
    for request, result in zip(requests, run(free_running(torch_model, max_batch=3), requests), strict=True):
        assert len(result.output_ids) == request.params.max_new_tokens
        plain = plain_logprobs(model_a, request.input_ids, result.output_ids)
        assert_matches(plain, result, greedy=request.params.greedy)


def test_requests_that_join_and_leave_do_not_disturb_the_others(
    torch_model: TorchModel, model_a: Path, make_request: Request, stepped: Stepped, plain_logprobs: PlainLogprobs
) -> None:
    scheduler = stepped(torch_model)
    answers: list[tuple[GenerateRequest, Future[GenerationResult]]] = []
    plan = {0: (5, 60), 3: (90, 4), 5: (2, 20), 9: (150, 40), 12: (1, 1), 14: (40, 2)}
    for step in range(80):
        if step in plan:
            request = make_request(prompt_of(plan[step][0]), plan[step][1], greedy=True, ignore_eos=True)
            answers.append((request, scheduler.submit(request)))
        if step == 20:
            assert scheduler.abort([answers[3][0].rid]).result(DEADLINE) == 1
        scheduler.advance()
    for request, answer in answers:
        result = answer.result(DEADLINE)
        plain = plain_logprobs(model_a, request.input_ids, result.output_ids)
        assert_matches(plain, result, greedy=True)
    assert answers[3][1].result().finish_reason == "abort"
    assert 0 < len(answers[3][1].result().output_ids) < 40


def test_same_seed_gives_the_same_tokens_in_any_batch(
    torch_model: TorchModel, make_request: Request, free_running: FreeRunning
) -> None:
    def seeded() -> GenerateRequest:
        return make_request(prompt_of(11), 30, seed=42, temperature=1.3, top_p=0.95, ignore_eos=True)

    scheduler = free_running(torch_model)
    [alone] = run(scheduler, [seeded()])
    others = [make_request(prompt_of(3 * index + 1), 5 + 6 * index, ignore_eos=True) for index in range(6)]
    crowded = run(scheduler, [*others[:3], seeded(), *others[3:]])[3]
    assert crowded.output_ids == alone.output_ids


def test_requests_without_a_seed_differ(
    torch_model: TorchModel, make_request: Request, free_running: FreeRunning
) -> None:
    results = run(free_running(torch_model), [make_request(prompt_of(5), 16, ignore_eos=True) for _ in range(3)])
    assert len({tuple(result.output_ids) for result in results}) == 3


def test_stop_id_ends_and_is_part_of_the_output(
    torch_model: TorchModel, make_request: Request, free_running: FreeRunning
) -> None:
    scheduler = free_running(torch_model)
    [free] = run(scheduler, [make_request(prompt_of(6), 20, greedy=True, ignore_eos=True)])
    stop = free.output_ids[7]
    cut = free.output_ids.index(stop) + 1
    [stopped] = run(scheduler, [make_request(prompt_of(6), 20, greedy=True, ignore_eos=True, stop_token_ids=[stop])])
    assert stopped.output_ids == free.output_ids[:cut]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)


def test_eos_of_the_config_ends_unless_ignored_or_too_early(
    model_a: Path, tmp_path: Path, make_request: Request, free_running: FreeRunning
) -> None:
    # With a zero head all tokens are equally likely, so that EOS comes soon but not at once.
    tensors = load_file(model_a / "model.safetensors")
    tensors["lm_head.weight"].zero_()
    directory = Path(shutil.copytree(model_a, tmp_path / "uniform"))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    model = load_model(str(directory), dtype="float32", device="cpu", max_model_len=None)
    assert model.limits.eos_token_ids == {258}
    scheduler = free_running(model)
    endless = make_request(prompt_of(4), 900, seed=1, ignore_eos=True)
    early = make_request(prompt_of(4), 900, seed=1)
    late = make_request(prompt_of(4), 900, seed=1, min_new_tokens=850)
    results = run(scheduler, [endless, early, late])
    first_eos = results[0].output_ids.index(258)
    assert results[0].finish_reason == "length"
    assert results[1].output_ids == results[0].output_ids[: first_eos + 1]
    assert (results[1].finish_reason, results[1].stop_reason) == ("stop", None)
    assert 258 not in results[2].output_ids[:850]


@pytest.mark.parametrize("greedy", [True, False])
def test_keep_goes_on_with_the_new_weights_exactly_at_the_boundary(
    torch_model: TorchModel,
    model_a: Path,
    model_b: Path,
    make_request: Request,
    stepped: Stepped,
    plain_logprobs: PlainLogprobs,
    greedy: bool,
) -> None:
    scheduler = stepped(torch_model)
    requests = [
        make_request(prompt_of(4 + 10 * index), 20, greedy=greedy, seed=index, ignore_eos=True) for index in range(4)
    ]
    answers = [scheduler.submit(request) for request in requests]
    scheduler.advance(6)
    scheduler.pause(PauseMode.KEEP).result(DEADLINE)
    assert scheduler.status().paused
    assert (scheduler.status().running, scheduler.status().waiting) == (0, 4)
    scheduler.update_weights(str(model_b), "1.7").result(DEADLINE)
    scheduler.resume().result(DEADLINE)
    scheduler.advance(20)
    for request, answer in zip(requests, answers, strict=True):
        result = answer.result(DEADLINE)
        assert result.finish_reason == "length"
        assert len(result.output_ids) == len(result.output_logprobs) == 20
        before, after = result.spans
        boundary = before.end
        assert (before, after) == (VersionSpan("0.0", 0, boundary), VersionSpan("1.7", boundary, 20))
        assert 0 < boundary < 20
        old = plain_logprobs(model_a, request.input_ids, result.output_ids)
        new = plain_logprobs(model_b, request.input_ids, result.output_ids)
        mixed = torch.cat([old[:boundary], new[boundary:]])
        assert_matches(mixed, result, greedy=greedy)
        assert (old - new).abs().max() > 0.01


def test_keep_without_an_update_changes_nothing(
    torch_model: TorchModel, make_request: Request, stepped: Stepped
) -> None:
    scheduler = stepped(torch_model)
    first = scheduler.submit(make_request(prompt_of(9), 12, seed=3, ignore_eos=True))
    scheduler.advance(12)
    second = scheduler.submit(make_request(prompt_of(9), 12, seed=3, ignore_eos=True))
    scheduler.advance(5)
    scheduler.pause(PauseMode.KEEP).result(DEADLINE)
    scheduler.resume().result(DEADLINE)
    scheduler.advance(8)
    assert second.result(DEADLINE).output_ids == first.result(DEADLINE).output_ids
    assert second.result().spans == [VersionSpan("0.0", 0, 12)]


def test_aborted_request_resumed_with_its_partial_output_equals_an_uninterrupted_one(
    torch_model: TorchModel, make_request: Request, stepped: Stepped
) -> None:
    scheduler = stepped(torch_model)
    whole = scheduler.submit(make_request(prompt_of(9), 24, seed=8, ignore_eos=True))
    scheduler.advance(24)
    cut = scheduler.submit(make_request(prompt_of(9), 24, seed=8, ignore_eos=True))
    scheduler.advance(10)
    scheduler.pause(PauseMode.ABORT).result(DEADLINE)
    part = cut.result(DEADLINE)
    assert part.finish_reason == "abort"
    assert 0 < len(part.output_ids) < 24
    scheduler.resume().result(DEADLINE)
    left = 24 - len(part.output_ids)
    rest = scheduler.submit(make_request([*prompt_of(9), *part.output_ids], left, seed=8, ignore_eos=True))
    scheduler.advance(24)
    assert part.output_ids + rest.result(DEADLINE).output_ids == whole.result(DEADLINE).output_ids


def test_refused_weights_leave_the_old_ones_serving(
    torch_model: TorchModel, model_b: Path, tmp_path: Path, make_request: Request, free_running: FreeRunning
) -> None:
    scheduler = free_running(torch_model)
    [before] = run(scheduler, [make_request(prompt_of(5), 12, greedy=True, ignore_eos=True)])
    broken = Path(shutil.copytree(model_b, tmp_path / "broken"))
    tensors = load_file(broken / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, broken / "model.safetensors")
    scheduler.pause(PauseMode.KEEP).result(DEADLINE)
    with pytest.raises(BadModelDirectory, match=r"model.norm.weight"):
        scheduler.update_weights(str(broken), "0.1").result(DEADLINE)
    assert scheduler.status().weight_version == "0.0"
    scheduler.resume().result(DEADLINE)
    [after] = run(scheduler, [make_request(prompt_of(5), 12, greedy=True, ignore_eos=True)])
    assert after.output_ids == before.output_ids
    assert after.spans == [VersionSpan("0.0", 0, 12)]


def test_logits_that_are_not_finite_fail_the_request_and_spare_the_engine(
    torch_model: TorchModel,
    model_a: Path,
    model_b: Path,
    tmp_path: Path,
    make_request: Request,
    free_running: FreeRunning,
) -> None:
    tensors = load_file(model_b / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    scheduler = free_running(torch_model)

    def update(path: Path, version: str) -> None:
        scheduler.pause(PauseMode.KEEP).result(DEADLINE)
        scheduler.update_weights(str(path), version).result(DEADLINE)
        scheduler.resume().result(DEADLINE)

    update(tmp_path, "0.1")
    with pytest.raises(EngineError, match="logits are not finite"):
        scheduler.submit(make_request(prompt_of(5), 12)).result(DEADLINE)
    update(model_a, "0.2")
    assert len(run(scheduler, [make_request(prompt_of(5), 12, ignore_eos=True)])[0].output_ids) == 12


def test_grouped_query_attention_and_tied_embeddings_match_too(
    tmp_path: Path, make_request: Request, free_running: FreeRunning, plain_logprobs: PlainLogprobs
) -> None:
    import transformers

    library: Any = transformers
    config = library.LlamaConfig(
        vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True, eos_token_id=[2, 3, 151643],
    )  # fmt: skip
    torch.manual_seed(0)
    library.LlamaForCausalLM(config).save_pretrained(tmp_path)
    model = load_model(str(tmp_path), dtype="float32", device="cpu", max_model_len=200)
    assert (model.limits.vocab_size, model.limits.max_model_len) == (300, 200)
    assert model.limits.eos_token_ids == {2, 3}
    requests = [make_request(prompt_of(3 + 30 * index), 25, greedy=True, ignore_eos=True) for index in range(4)]
    for request, result in zip(requests, run(free_running(model), requests), strict=True):
        plain = plain_logprobs(tmp_path, request.input_ids, result.output_ids)
        assert_matches(plain, result, greedy=True)


def test_prefill_larger_than_one_pass_is_split(
    torch_model: TorchModel,
    model_a: Path,
    make_request: Request,
    monkeypatch: pytest.MonkeyPatch,
    free_running: FreeRunning,
    plain_logprobs: PlainLogprobs,
) -> None:
    monkeypatch.setattr("workers.embedded.model._PREFILL_CELLS", 64)
    requests = [make_request(prompt_of(length), 6, greedy=True, ignore_eos=True) for length in (20, 25, 70, 9, 8, 7)]
    for request, result in zip(requests, run(free_running(torch_model), requests), strict=True):
        plain = plain_logprobs(model_a, request.input_ids, result.output_ids)
        assert_matches(plain, result, greedy=True)


def test_max_model_len_beyond_the_model_is_refused(model_a: Path) -> None:
    with pytest.raises(ConfigError, match=r"--max-model-len 2000 is more than the model's 1024"):
        load_model(str(model_a), dtype="float32", device="cpu", max_model_len=2000)


def test_directory_that_lacks_a_tensor_does_not_start(model_a: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(model_a, tmp_path / "lacking"))
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BadModelDirectory, match=r"lack tensor 'model.layers.0.mlp.up_proj.weight'"):
        load_model(str(directory), dtype="float32", device="cpu", max_model_len=None)


def test_unknown_architecture_does_not_start(model_a: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(model_a, tmp_path / "unknown"))
    (directory / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(BadModelDirectory, match=r"cannot load a causal LM from .*unknown"):
        load_model(str(directory), dtype="float32", device="cpu", max_model_len=None)


def test_bfloat16_model_serves(model_a: Path, make_request: Request, free_running: FreeRunning) -> None:
    model = load_model(str(model_a), dtype="bfloat16", device="cpu", max_model_len=None)
    [result] = run(free_running(model), [make_request(prompt_of(5), 12, ignore_eos=True)])
    assert len(result.output_ids) == 12


def test_tiny_model_is_the_same_for_the_same_seed(model_a: Path, tmp_path: Path) -> None:
    again = make_tiny_model(tmp_path / "again", seed=0)
    first, second = (load_file(path / "model.safetensors") for path in (model_a, again))
    assert all(torch.equal(first[name], second[name]) for name in first)
