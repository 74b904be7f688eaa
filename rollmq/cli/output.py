"""What all commands share: one console, errors as one line with an exit code, logging to standard error."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec

import click

from rollmq.errors import ConfigError, RollmqError

FAILED = 1
MISUSE = 2

P = ParamSpec("P")


LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def set_up_logging(level: str, prefix: str = "") -> None:
    """Log lines go to standard error, each with the prefix in front."""
    logging.basicConfig(level=level.upper(), format=prefix + LOG_FORMAT, stream=sys.stderr, force=True)


def log_level_option(function: Any) -> Any:
    """The option `--log-level`."""
    return click.option(
        "--log-level",
        type=click.Choice(["debug", "info", "warning", "error"]),
        default="info",
        show_default=True,
        help="How much is logged to stderr.",
    )(function)


def print_json(document: Any) -> None:
    """One JSON document on standard output."""
    click.echo(json.dumps(document, indent=2, sort_keys=False))


def reports_errors(command: Callable[P, int | None]) -> Callable[P, None]:
    """Turns our own errors into one clear line and an exit code: 2 for misuse, 1 for failure."""

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            code = command(*args, **kwargs)
        except ConfigError as error:
            click.echo(f"rollmq: {error}", err=True)
            sys.exit(MISUSE)
        except RollmqError as error:
            click.echo(f"rollmq: {error}", err=True)
            sys.exit(FAILED)
        sys.exit(code or 0)

    return run
