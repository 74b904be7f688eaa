"""The `rollmq` command. Each group of commands is a file beside this one; heavy imports happen inside them."""

from __future__ import annotations

import importlib
from typing import Any

import click

from rollmq import __version__

COMMANDS: dict[str, tuple[str, str]] = {
    "broker": ("rollmq.cli.broker", "Run the broker."),
    "worker": ("rollmq.cli.worker", "Run one worker with its inference server."),
    "node": ("rollmq.cli.node", "Run all workers of this machine."),
    "status": ("rollmq.cli.facts", "Ledger, policies, workers and trainers of a broker."),
    "tasks": ("rollmq.cli.facts", "Tasks of a broker, with their states and reasons."),
    "log": ("rollmq.cli.log", "Read a journal: stat, verify, cat."),
    "replay": ("rollmq.cli.replay", "Replay a journal: decisions, tasks."),
    "engines": ("rollmq.cli.engines", "Inference engines: install, list."),
    "demo": ("rollmq.cli.demo", "Train a tiny model from scratch through the queue."),
}
"""Command name -> module that defines it under that name, and its one-line help."""


class LazyGroup(click.Group):
    """Loads a command's module only when the command is used, so that `rollmq --help` is quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All commands, in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, imported now."""
        if cmd_name not in COMMANDS:
            return None
        command = getattr(importlib.import_module(COMMANDS[cmd_name][0]), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands, without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="rollmq")
def cli() -> None:
    """A durable, framework-neutral rollout queue for reinforcement learning of language models.

    Example: rollmq demo
    """


def main(*args: Any, **kwargs: Any) -> None:
    """Entry point of the console script."""
    cli(*args, **kwargs)


if __name__ == "__main__":
    main()
