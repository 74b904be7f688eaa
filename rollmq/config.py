"""Typed settings of every role, read from YAML or the command line. A docstring per field.

Importable without any heavy package; validators refuse combinations that cannot work.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from rollmq.errors import ConfigError

DEFAULT_ADDRESS = "tcp://127.0.0.1:5555"
LOOPBACK_HOSTS = ("127.", "localhost", "[::1]")

_S = TypeVar("_S", bound="Settings")


class Settings(BaseModel):
    """Base of all settings: frozen, unknown keys refused, field docstrings become descriptions."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class BrokerConfig(Settings):
    """`rollmq broker`."""

    bind: str = DEFAULT_ADDRESS
    """Address of the ROUTER socket; port 0 picks a free one and prints it. Loopback only until keys are configured."""
    news_bind: str = "tcp://127.0.0.1:0"
    """Address of the PUB socket; clients learn the port that was picked from WELCOME."""
    journal: Path = Path("rollmq-journal")
    """Directory of the journal; made when missing; one broker at a time."""
    durability: str = "always"
    """`always`, `interval=<ms>` or `none`; the loss window is printed at start."""
    heartbeat_s: float = Field(2.0, gt=0)
    """How often peers send a heartbeat."""
    dead_after_s: float = Field(10.0, gt=0)
    """Silence after which a session is over and its leases are requeued."""
    lease_s: float = Field(30.0, gt=0)
    """How long a worker may run episodes without its episode loop moving; every heartbeat that shows progress renews
    its leases. A thread of its own sends the heartbeats, so a loop that is stuck does not look alive."""
    adoption_grace_s: float = Field(10.0, ge=0)
    """After a restart, how long leases wait for their workers to come back before they are requeued."""
    task_deadline_s: float = Field(3600.0, gt=0)
    """A task that has not finished this long after submission expires, unless its submitter set a deadline."""
    infrastructure_budget: int = Field(10, ge=1)
    """Attempts lost to engines and workers before a task becomes a dead letter."""
    data_budget: int = Field(3, ge=1)
    """Attempts lost to the task itself (workflow raised, rejected, deadline) before it becomes a dead letter."""
    max_open_tasks: int = Field(200_000, ge=1)
    """Most open tasks of one trainer; more are refused as `busy`."""
    retain_ended: int = Field(100_000, ge=0)
    """How many ended tasks stay known, for idempotency keys and for trainers restored from a checkpoint."""
    disk_floor_bytes: int = Field(256 * 1024 * 1024, ge=0)
    """Free disk space below which new tasks are refused as `disk_low`; results are still taken."""
    segment_bytes: int = Field(64 * 1024 * 1024, ge=4096)
    """Size at which a journal segment is closed and a new one begun."""

    @field_validator("bind", "news_bind")
    @classmethod
    def _loopback_only(cls, value: str) -> str:
        if value.startswith("ipc://"):
            return value
        if not value.startswith("tcp://"):
            raise ValueError(f"{value!r} must be tcp://host:port or ipc://path")
        if not value.removeprefix("tcp://").startswith(LOOPBACK_HOSTS):
            raise ValueError(f"{value!r} is not loopback, and this broker has no authentication: bind to 127.0.0.1")
        return value

    @model_validator(mode="after")
    def _timers(self) -> BrokerConfig:
        if self.dead_after_s <= 2 * self.heartbeat_s:
            raise ValueError("dead_after_s must be more than two heartbeats, or one late heartbeat ends a session")
        if self.lease_s < self.dead_after_s:
            raise ValueError("lease_s must be at least dead_after_s, or leases of live workers expire")
        return self


class WorkerConfig(Settings):
    """`rollmq worker`: one worker with one engine."""

    broker: str = DEFAULT_ADDRESS
    """Address of the broker."""
    name: str = Field(default_factory=lambda: f"{socket.gethostname()}-{os.getpid()}", min_length=1, max_length=128)
    """Unique name, by default from host and process; a second worker of the same name supersedes the first."""
    policy: str = "default"
    """The policy whose tasks it runs."""
    engine: Literal["embedded", "vllm", "sglang"] = "embedded"
    """Which inference server it launches."""
    model: str
    """Directory of a Hugging Face causal LM, or `sim:...` for the embedded engine without a model."""
    python: Path | None = None
    """Python that has the engine; default: what `rollmq engines install` made, or our own for embedded."""
    slots: int = Field(16, ge=1, le=2048)
    """Episodes at once."""
    prefetch: int = Field(2, ge=0)
    """Tasks held beyond the slots, so that a slot never waits for the broker."""
    update_mode: Literal["keep", "abort", "wait"] = "keep"
    """What happens to requests in flight during a weight update."""
    max_model_len: int | None = Field(None, ge=2)
    """Longest prompt + output; default: the model's own."""
    dtype: str = "auto"
    """Precision of the engine."""
    engine_args: list[str] = []
    """More arguments for the engine's command line."""
    engine_env: dict[str, str] = {}
    """More environment variables for the engine."""
    log_dir: Path = Path("rollmq-logs")
    """Where each launch of the engine writes its own log file."""
    launch_timeout_s: float = Field(600.0, gt=0)
    """How long a launch may take until the engine answers."""
    request_timeout_s: float = Field(3600.0, gt=0)
    """How long one generation may take."""
    workflows: dict[str, str] = {}
    """More workflows by name: `module:Class` importable here; `generate` is built in."""
    rewards: dict[str, str] = {}
    """Reward functions by name: `module:function`."""
    reward_processes: int = Field(1, ge=1)
    """Processes that run reward functions."""
    reward_timeout_s: float = Field(15.0, gt=0)
    """How long one reward may take; then its process is killed and the attempt counts as the task's fault."""
    max_restarts: int = Field(5, ge=0)
    """Engine restarts in a row without one finished task before the worker gives up."""
    drain_timeout_s: float = Field(20.0, ge=0)
    """After SIGTERM, how long running episodes may go on before they are given back."""

    @model_validator(mode="after")
    def _sim_needs_embedded(self) -> WorkerConfig:
        if self.model.startswith("sim:") and self.engine != "embedded":
            raise ValueError(f"model {self.model!r} is simulated: it needs engine embedded, not {self.engine}")
        return self


class NodeWorker(Settings):
    """One entry of a node: `count` workers with the same settings."""

    count: int = Field(1, ge=1)
    """How many; they are named `<name>-0`, `<name>-1`, ..."""
    name: str = "worker"
    """Stem of their names."""
    settings: dict[str, Any]
    """Settings of `rollmq worker`, without broker and name."""


class NodeConfig(Settings):
    """`rollmq node`: all workers of a machine."""

    broker: str = DEFAULT_ADDRESS
    """Address of the broker."""
    workers: list[NodeWorker] = Field(min_length=1)
    """The workers to keep running."""
    restart_pause_s: float = Field(0.5, gt=0)
    """First pause before a worker that ended is started again; doubles up to `restart_pause_max_s`."""
    restart_pause_max_s: float = Field(30.0, gt=0)
    """Longest pause between restarts."""
    stop_timeout_s: float = Field(45.0, gt=0)
    """How long workers may take to end after SIGTERM before they are killed."""

    def worker_configs(self) -> list[WorkerConfig]:
        """The settings of every single worker.

        Raises:
            ConfigError: an entry is wrong or two workers have the same name.
        """
        configs = [
            parse_settings(WorkerConfig, {**entry.settings, "broker": self.broker, "name": f"{entry.name}-{index}"})
            for entry in self.workers
            for index in range(entry.count)
        ]
        names = [config.name for config in configs]
        if len(set(names)) != len(names):
            raise ConfigError(f"worker names {names} are not unique; give the entries different `name`s")
        return configs


def parse_settings(cls: type[_S], values: dict[str, Any], where: str = "") -> _S:
    """Settings from plain values.

    Raises:
        ConfigError: naming each wrong field.
    """
    try:
        return cls(**values)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(str(part) for part in item['loc']) or cls.__name__}: {item['msg']}" for item in error.errors()
        )
        raise ConfigError(f"{where or cls.__name__}: {problems}") from error


def load_settings(cls: type[_S], path: Path | None, overrides: dict[str, Any]) -> _S:
    """Settings from a YAML file, with command-line values on top (those that are not None).

    Raises:
        ConfigError: the file is missing, is not a YAML map, or holds wrong values.
    """
    values: dict[str, Any] = {}
    if path is not None:
        values = read_yaml(path)
    values.update({key: value for key, value in overrides.items() if value is not None})
    return parse_settings(cls, values, str(path) if path else "")


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file's map.

    Raises:
        ConfigError: missing, unreadable or not a map.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"configuration file {path}: {error.strerror or error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"configuration file {path} is not YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"configuration file {path} must hold a map of settings")
    return values
