"""The embedded server (`python -m workers.embedded`): a real model with torch, or `sim:`, on any machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollmq.errors import EngineUnavailable
from rollmq.rollout import GenerationHyperparameters
from workers.backends.base import (
    HttpGenerationResult,
    ModelLimits,
    PauseMode,
    Segment,
    WeightUpdateRequests,
    checked_result,
    reject_if,
)
from workers.backends.model_files import check_model_directory
from workers.http_client import HttpRequest
from workers.launch_spec import EngineInstallation, EngineRequirement, LaunchSpec


class EmbeddedBackend:
    """Implements `RemoteInfBackendProtocol` for the embedded server."""

    name = "embedded"
    carries_penalties = False
    seeds_by_position = True

    def requirement(self, spec: LaunchSpec) -> EngineRequirement:
        """rollmq itself; torch and transformers for a real model."""
        modules = ("workers.embedded",) if spec.is_sim else ("workers.embedded", "torch", "transformers", "safetensors")
        return EngineRequirement(modules, (), "pip install 'rollmq[embedded]'")

    def check_launch(self, spec: LaunchSpec, installation: EngineInstallation) -> None:
        """A real model must be a directory; any version of ourselves will do."""
        if not spec.is_sim:
            check_model_directory(spec.model)

    def launch_command(
        self, spec: LaunchSpec, installation: EngineInstallation, *, port: int, served_name: str
    ) -> tuple[str, ...]:
        """The module's command line."""
        command = [str(spec.python), "-m", "workers.embedded", "--model", spec.model]
        command += ["--host", spec.host, "--port", str(port), "--served-name", served_name]
        command += ["--weight-version", spec.weight_version, "--max-batch", str(spec.slots)]
        command += ["--device", spec.device, "--seed", str(spec.seed)]
        if spec.max_model_len is not None:
            command += ["--max-model-len", str(spec.max_model_len)]
        if spec.dtype is not None:
            command += ["--dtype", spec.dtype]
        if spec.threads is not None:
            command += ["--threads", str(spec.threads)]
        return (*command, *spec.extra_args)

    def launch_environment(self, spec: LaunchSpec, installation: EngineInstallation) -> dict[str, str]:
        """No model hub is ever asked."""
        return {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}

    def health_request(self) -> HttpRequest:
        """Cheap at any time."""
        return HttpRequest("/health", method="GET")

    def identity_request(self) -> HttpRequest:
        """`/info` holds everything."""
        return HttpRequest("/info", method="GET")

    def parse_identity(self, body: Mapping[str, Any]) -> str | None:
        """The name given at launch."""
        value = body.get("served_name")
        return value if isinstance(value, str) else None

    def parse_limits(self, spec: LaunchSpec, body: Mapping[str, Any]) -> ModelLimits:
        """As the server says."""
        try:
            eos = tuple(int(i) for i in body.get("eos_token_ids") or ())
            return ModelLimits(int(body["vocab_size"]), int(body["max_model_len"]), eos, stop_strings=False)
        except (KeyError, TypeError, ValueError) as error:
            raise EngineUnavailable(f"the embedded server's /info lacks its limits: {error!r}") from error

    def version_request(self) -> HttpRequest:
        """Part of `/info`."""
        return HttpRequest("/info", method="GET")

    def parse_version(self, body: Mapping[str, Any]) -> str | None:
        """The label."""
        value = body.get("weight_version")
        return value if isinstance(value, str) and value else None

    def check_supported(self, gconfig: GenerationHyperparameters, limits: ModelLimits) -> None:
        """No tokenizer, so no stop strings."""
        reject_if(
            bool(gconfig.stop),
            "stop strings need a tokenizer, which the embedded engine does not have; use stop_token_ids",
        )

    def generation_request(self, rid: str, segment: Segment, limits: ModelLimits) -> HttpRequest:
        """`POST /generate`."""
        gconfig = segment.gconfig
        sampling = {
            "max_new_tokens": gconfig.max_new_tokens,
            "min_new_tokens": gconfig.min_new_tokens,
            "temperature": gconfig.temperature,
            "top_p": gconfig.top_p,
            "top_k": gconfig.top_k,
            "greedy": gconfig.is_greedy,
            "seed": gconfig.seed,
            "stop_token_ids": list(gconfig.stop_token_ids),
            "ignore_eos": gconfig.ignore_eos,
            "frequency_penalty": gconfig.frequency_penalty,
        }
        return HttpRequest("/generate", {"rid": rid, "input_ids": segment.prompt_ids, "sampling_params": sampling})

    def parse_generation(self, body: Mapping[str, Any]) -> HttpGenerationResult:
        """The answer, checked."""
        return checked_result(
            body.get("output_ids"),
            body.get("output_logprobs"),
            body.get("weight_versions"),
            body.get("finish_reason"),
            body.get("stop_reason"),
            self.name,
        )

    def abort_request(self, rids: Sequence[str]) -> HttpRequest:
        """By id."""
        return HttpRequest("/abort", {"rids": list(rids)})

    def pause_request(self, mode: PauseMode) -> HttpRequest:
        """All three modes exist."""
        return HttpRequest("/pause", {"mode": mode})

    def resume_request(self) -> HttpRequest:
        """Idempotent."""
        return HttpRequest("/resume", {})

    def weight_update_requests(self, path: str, label: str) -> WeightUpdateRequests:
        """One call loads and labels, or leaves everything as it was."""
        request = HttpRequest("/update_weights", {"path": path, "weight_version": label})
        return WeightUpdateRequests((request,), atomic=True, sets_label=True)

    def set_version_request(self, label: str) -> HttpRequest:
        """Label only."""
        return HttpRequest("/set_weight_version", {"weight_version": label})

    def cache_reset_request(self) -> HttpRequest | None:
        """The server drops its KV cache with the weights."""
        return None
