"""`rollmq worker`: run one worker with one inference server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from rollmq.cli.output import log_level_option, reports_errors, set_up_logging
from rollmq.config import DEFAULT_ADDRESS, WorkerConfig, load_settings
from rollmq.errors import ConfigError


@click.command()
@click.option("--config", type=click.Path(path_type=Path), help="YAML file of settings; options here win over it.")
@click.option("--broker", help=f"Address of the broker. [default: {DEFAULT_ADDRESS}]")
@click.option("--engine", type=click.Choice(["embedded", "vllm", "sglang"]), help="The inference server to launch.")
@click.option("--model", help="Directory of a Hugging Face causal LM, or sim:... for embedded without a model.")
@click.option("--slots", type=int, help="Episodes at once.")
@click.option("--prefetch", type=int, help="Tasks held beyond the slots.")
@click.option("--python", type=click.Path(path_type=Path), help="Python that has the engine.")
@click.option("--name", help="Name of this worker, unique at the broker.")
@click.option("--policy", help="The policy whose tasks it runs.")
@click.option(
    "--update-mode", type=click.Choice(["keep", "abort", "wait"]), help="What a weight update does to requests."
)
@click.option("--log-dir", type=click.Path(path_type=Path), help="Folder of the engine's log files.")
@click.option("--max-model-len", type=int, help="Longest prompt + output in tokens.")
@click.option("--dtype", help="Precision of the engine.")
@click.option("--engine-arg", "engine_args", multiple=True, help="One more argument for the engine; repeatable.")
@click.option("--workflow", "workflows", multiple=True, metavar="NAME=MODULE:CLASS", help="A workflow; repeatable.")
@click.option("--reward", "rewards", multiple=True, metavar="NAME=MODULE:FUNCTION", help="A reward; repeatable.")
@click.option("--owner-pid", type=int, hidden=True, help="End, killed, when this parent process ends.")
@log_level_option
@reports_errors
def worker(config: Path | None, owner_pid: int | None, log_level: str, **values: Any) -> int:
    """Run one worker: it launches an inference server, pulls tasks from the broker, and returns trajectories.

    SIGTERM and Ctrl-C drain: what runs may finish, the rest is given back. A second one ends it at once.
    Exit codes: 0 drained, 1 failed, 2 wrong settings.

    \b
    Example:
        rollmq worker --model sim:tpot_ms=1,tokens=32 --slots 8
        rollmq worker --broker tcp://127.0.0.1:5555 --engine vllm --model ./my-model --reward math=my_rewards:math
    """
    if owner_pid is not None:
        from workers.parent_death import die_with_parent

        die_with_parent(owner_pid)
    settings = load_settings(WorkerConfig, config, _overrides(values))
    set_up_logging(log_level, f"[{settings.name}] ".replace("%", "%%"))
    from workers.worker import run_worker

    return run_worker(settings)


def _overrides(values: dict[str, Any]) -> dict[str, Any]:
    """Options that were given, in the form of the settings."""
    overrides = dict(values)
    overrides["engine_args"] = list(values["engine_args"]) or None
    for key in ("workflows", "rewards"):
        overrides[key] = dict(_pair(item) for item in values[key]) or None
    return overrides


def _pair(item: str) -> tuple[str, str]:
    name, separator, path = item.partition("=")
    if not separator or not name:
        raise ConfigError(f"{item!r} must have the form name=module:object")
    return name, path


if __name__ == "__main__":
    worker()
