"""The demo as one call: make a model, start broker and workers, train, draw, report, end everything.

`rollmq demo` is a thin shell around `run_demo`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from examples.grpo.config import DemoConfig, DemoEngine
from examples.grpo.display import Display, make_display, summary
from examples.grpo.fleet import Fleet
from examples.grpo.history import DemoReport, StepRecord
from examples.grpo.plot import plot_run
from examples.grpo.task import REWARD_NAME, REWARD_PATH
from rollmq.errors import ConfigError, DeadlineExceeded, RollmqError
from trainer_client import RolloutClient

log = logging.getLogger(__name__)

_MAX_MODEL_LEN = 128
_PACKAGES = ("torch", "transformers", "safetensors", "tokenizers", "matplotlib")
_POLL_S = 0.2
_SIGTERM_EXIT = 128 + signal.SIGTERM


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What is left of a run when its processes are gone."""

    history: list[StepRecord]
    ledger: Mapping[str, int]
    leftovers: list[int]


def run_demo(config: DemoConfig, *, console: Console | None = None) -> DemoReport:
    """Run the demo from nothing to the closing table.

    Whatever happens, SIGTERM and Ctrl-C included, every process it started is ended.

    Args:
        config: the settings.
        console: where to show the run; the standard output by default.

    Raises:
        ConfigError: a package that the demo needs is not installed.
        RoleEnded: a broker or worker ended by itself.
        DeadlineExceeded: workers or a batch took too long.
    """
    _check_packages()
    console = console or Console()
    began = time.monotonic()
    run_dir = _make_run_dir(config.output)
    with _sigterm_as_exit(), make_display(config, console) as display:
        outcome = _run_processes(config, run_dir, display)
        display.phase(f"drawing {config.plot}")
        plot = plot_run(
            outcome.history,
            config.plot,
            title=f"rollmq demo: GRPO from random weights, {config.engine} engine, seed {config.seed}",
            bound=config.max_head_offpolicyness,
            window=config.window,
        )
    report = DemoReport(
        engine=config.engine.value,
        seed=config.seed,
        history=tuple(outcome.history),
        window=config.window,
        seconds=time.monotonic() - began,
        ledger=outcome.ledger,
        run_dir=run_dir,
        plot=plot,
        leftovers=tuple(outcome.leftovers),
    )
    console.print(summary(report))
    return report


def worker_settings(config: DemoConfig, model_dir: Path) -> dict[str, Any]:
    """Settings of one worker, those of `rollmq.config.WorkerConfig` that the demo sets."""
    settings: dict[str, Any] = {
        "engine": config.engine.value,
        "model": str(model_dir),
        "dtype": config.dtype,
        "slots": config.slots,
        "max_model_len": _MAX_MODEL_LEN,
        "rewards": {REWARD_NAME: REWARD_PATH},
        "engine_env": {"OMP_NUM_THREADS": "1"},
        "launch_timeout_s": config.start_timeout_s,
    }
    if config.engine is DemoEngine.EMBEDDED:
        settings["engine_args"] = ["--device", "cpu", "--threads", "1", "--seed", str(config.seed)]
    if config.python is not None:
        settings["python"] = str(config.python)
    return settings


def _run_processes(config: DemoConfig, run_dir: Path, display: Display) -> _Outcome:
    display.phase("making a model with random weights")
    model_dir = _make_model(config, run_dir / "model")
    with Fleet(run_dir, config.stop_timeout_s) as fleet:
        display.phase(f"starting a broker at {fleet.address}")
        fleet.start_broker()
        for index in range(config.worker_count):
            fleet.start_worker(f"worker-{index}", worker_settings(config, model_dir))
        history, ledger = _train_on(fleet, config, run_dir, model_dir, display)
        display.phase("ending all processes")
        leftovers = fleet.stop()
    return _Outcome(history, ledger, leftovers)


def _train_on(
    fleet: Fleet, config: DemoConfig, run_dir: Path, model_dir: Path, display: Display
) -> tuple[list[StepRecord], Mapping[str, int]]:
    from examples.grpo.checkpoint import CheckpointShelf
    from examples.grpo.learner import GrpoLearner
    from examples.grpo.training import cancel_open_tasks, train

    learner = GrpoLearner(model_dir, learning_rate=config.learning_rate, warmup_steps=config.warmup_steps)
    client = RolloutClient(
        fleet.address,
        trainer="demo",
        consumer_batch_size=config.groups_per_step,
        max_head_offpolicyness=config.max_head_offpolicyness,
    )
    with contextlib.closing(client):
        display.phase(f"waiting for {config.worker_count} worker(s) with engine {config.engine}")
        _wait_until_ready(client, fleet, config)
        display.phase(f"training; logs in {run_dir / 'logs'}")
        shelf = CheckpointShelf(run_dir / "weights")
        check_fleet = functools.partial(fleet.check, least_workers=1)
        try:
            history = train(client, learner, shelf, config, display, check_fleet)
        except RollmqError:
            check_fleet()  # A broker that ended explains more than the client's view of it.
            raise
        cancel_open_tasks(client)
        return history, dict(client.status()["ledger"])


def _wait_until_ready(client: RolloutClient, fleet: Fleet, config: DemoConfig) -> None:
    """Wait until every worker's engine has proved its weights.

    Raises:
        RoleEnded: a process ended.
        DeadlineExceeded: not all were ready in time.
    """
    from examples.grpo.training import worker_versions

    deadline = time.monotonic() + config.start_timeout_s
    while True:
        fleet.check(least_workers=config.worker_count)
        versions = worker_versions(client.status())
        ready = [name for name, version in versions.items() if version is not None]
        if len(ready) >= config.worker_count:
            return
        if time.monotonic() > deadline:
            raise DeadlineExceeded(
                f"{len(ready)} of {config.worker_count} workers were ready within {config.start_timeout_s:g} s; "
                f"ready: {', '.join(ready) or 'none'}; look at the logs in {fleet.log_dir}"
            )
        time.sleep(_POLL_S)


def _make_model(config: DemoConfig, directory: Path) -> Path:
    import torch
    from transformers.utils import logging as transformers_logging

    from examples.tiny_model import make_tiny_model

    torch.set_num_threads(1)  # Trainer and engines share the cores; more threads only get in each other's way.
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    return make_tiny_model(
        directory,
        hidden_size=config.hidden_size,
        layers=config.layers,
        heads=config.heads,
        seed=config.seed,
        dtype=config.dtype,
    )


def _check_packages() -> None:
    """Say at the start, and not after the training, what is missing."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"the demo needs {', '.join(missing)}: install the extra with `pip install 'rollmq[demo]'`")


def _make_run_dir(output: Path) -> Path:
    """A new folder named after the time, so that no earlier run's journal is taken for this one's."""
    stem = datetime.now().strftime("%Y%m%d-%H%M%S")
    output.mkdir(parents=True, exist_ok=True)
    for suffix in ("", *(f"-{number}" for number in range(2, 100))):
        with contextlib.suppress(FileExistsError):
            run_dir = (output / f"{stem}{suffix}").resolve()
            run_dir.mkdir()
            return run_dir
    raise FileExistsError(f"{output} already holds 99 runs of {stem}; name another output folder")


@contextlib.contextmanager
def _sigterm_as_exit() -> Iterator[None]:
    """Turn SIGTERM into SystemExit while inside, so that context managers end their processes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: object) -> None:
        raise SystemExit(_SIGTERM_EXIT)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
