"""`rollmq node`: keep all workers of a machine running."""

from __future__ import annotations

from pathlib import Path

import click

from rollmq.cli.output import log_level_option, reports_errors, set_up_logging
from rollmq.config import NodeConfig, load_settings


@click.command()
@click.option("--config", type=click.Path(path_type=Path), required=True, help="YAML file of the node's workers.")
@click.option("--broker", help="Address of the broker; wins over the file.")
@log_level_option
@reports_errors
def node(config: Path, broker: str | None, log_level: str) -> int:
    """Run all workers of this machine, one process each, and start those again that end.

    SIGTERM and Ctrl-C drain all workers; a second one kills them. Exit codes: 0 all ended, 1 some had to be killed,
    2 wrong settings.

    \b
    Example:
        rollmq node --config configs/node.yaml
    """
    set_up_logging(log_level, "[node] ")
    from workers.node import run_node

    return run_node(load_settings(NodeConfig, config, {"broker": broker}), log_level=log_level)


if __name__ == "__main__":
    node()
