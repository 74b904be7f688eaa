"""`rollmq broker`: the queue itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from rollmq.cli.output import reports_errors, set_up_logging
from rollmq.config import BrokerConfig, load_settings


@click.command("broker")
@click.option("--config", type=click.Path(path_type=Path), help="YAML file with any of the settings below.")
@click.option("--bind", help="Address of the ROUTER socket [tcp://127.0.0.1:5555]; port 0 picks a free one.")
@click.option("--news-bind", help="Address of the PUB socket [a free port, told to clients].")
@click.option("--journal", type=click.Path(path_type=Path), help="Directory of the journal [rollmq-journal].")
@click.option("--durability", help="always | interval=<ms> | none [always].")
@click.option("--heartbeat-s", type=float, help="How often peers send a heartbeat [2].")
@click.option("--dead-after-s", type=float, help="Silence that ends a session [10].")
@click.option("--adoption-grace-s", type=float, help="How long leases wait for their workers after a restart [10].")
@click.option("-v", "--verbose", is_flag=True, help="Debug logging.")
@reports_errors
def broker(config: Path | None, verbose: bool, **overrides: Any) -> int:
    """Run the broker: it owns every task from submit to consumed, in a durable journal.

    Example: rollmq broker --bind tcp://127.0.0.1:5555 --journal ./journal
    """
    set_up_logging("debug" if verbose else "info")
    from broker.run import BrokerReady, run_broker

    def announce(ready: BrokerReady) -> None:
        click.echo(
            f"rollmq broker ready: address={ready.address} news={ready.news_address} journal={ready.journal} "
            f"epoch={ready.broker_epoch} recovered={ready.recovered_events} open={ready.open_tasks} "
            f"durability={ready.durability}"
        )

    return run_broker(load_settings(BrokerConfig, config, overrides), announce)
