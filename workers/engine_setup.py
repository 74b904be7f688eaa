"""From a worker's settings to an engine that can be started."""

from __future__ import annotations

import re
from pathlib import Path

from rollmq.config import WorkerConfig
from workers.backends.base import RemoteInfBackendProtocol
from workers.backends.registry import backend_for
from workers.embedded.sim_options import parse_sim_options
from workers.engine import RemoteInfEngine
from workers.engine_envs import python_for
from workers.launch_spec import SIM_PREFIX, LaunchSpec
from workers.launcher import check_launch
from workers.weight_update import EngineTimeouts


class EngineSetup:
    """Makes the engines of one worker, one per launch.

    Args:
        config: the worker's settings.

    Raises:
        ConfigError: the engine is unknown or not installed.
    """

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._backend: RemoteInfBackendProtocol = backend_for(config.engine)
        self._python = config.python.absolute() if config.python is not None else python_for(config.engine)

    async def check(self) -> None:
        """Finds wrong settings before anything is started.

        Raises:
            ConfigError: naming what is wrong.
        """
        if self._config.model.startswith(SIM_PREFIX):
            parse_sim_options(self._config.model)
        await check_launch(self._backend, self._spec("0.0"))

    def make(self, label: str) -> RemoteInfEngine:
        """An engine whose launch weights get the label."""
        timeouts = EngineTimeouts(generate_s=self._config.request_timeout_s)
        return RemoteInfEngine(self._backend, self._spec(label), timeouts=timeouts)

    def _spec(self, label: str) -> LaunchSpec:
        config = self._config
        # Absolute, since the server runs in the log folder.
        model = config.model if config.model.startswith(SIM_PREFIX) else str(Path(config.model).absolute())
        return LaunchSpec(
            name=re.sub(r"[^A-Za-z0-9._-]", "_", config.name),
            model=model,
            log_dir=config.log_dir.absolute(),
            python=self._python,
            weight_version=label,
            slots=config.slots,
            max_model_len=config.max_model_len,
            dtype=None if config.dtype == "auto" else config.dtype,
            extra_args=tuple(config.engine_args),
            env=config.engine_env,
            startup_timeout_s=config.launch_timeout_s,
        )
