"""`rollmq status` and `rollmq tasks`: what a running broker knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from rollmq.cli.output import print_json, reports_errors
from rollmq.config import DEFAULT_ADDRESS
from rollmq.messages import TaskState

broker_option = click.option("--broker", default=DEFAULT_ADDRESS, show_default=True, help="Address of the broker.")
timeout_option = click.option("--timeout", default=10.0, show_default=True, help="Seconds to wait for the broker.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.command("status")
@broker_option
@timeout_option
@json_option
@reports_errors
def status(broker: str, timeout: float, as_json: bool) -> int:
    """Show ledger, policies, workers and trainers of a broker.

    Example: rollmq status --json | jq .ledger
    """
    from trainer_client.admin import query

    document = query(broker, "status", timeout_s=timeout)
    if as_json:
        print_json(document)
    else:
        _show_status(Console(), document)
    return 0


@click.command("tasks")
@broker_option
@timeout_option
@json_option
@click.option("--state", type=click.Choice([s.value for s in TaskState]), help="Only tasks in this state.")
@click.option("--id", "task_id", type=int, default=0, help="Only this task.")
@click.option("--limit", type=click.IntRange(1, 10_000), default=100, show_default=True, help="Most rows.")
@reports_errors
def tasks(broker: str, timeout: float, as_json: bool, state: str | None, task_id: int, limit: int) -> int:
    """Show tasks, by default the open ones, with where they are and why.

    Example: rollmq tasks --state dead
    """
    from trainer_client.admin import query

    wanted = TaskState(state) if state else None
    rows = query(broker, "tasks", state=wanted, task_id=task_id, limit=limit, timeout_s=timeout)
    if as_json:
        print_json(rows)
    elif rows:
        columns = ("task_id", "state", "trainer", "key", "group", "attempts", "worker", "reason", "detail")
        Console().print(_table("", columns, rows))
    else:
        click.echo("no such tasks")
    return 1 if task_id and not rows else 0


def _show_status(console: Console, document: dict[str, Any]) -> None:
    broker, journal = document["broker"], document["journal"]
    console.print(f"broker epoch {broker['epoch']} at {broker['address']}, up {broker['uptime_s']:.0f} s")
    console.print(
        f"journal {journal['directory']}: {journal['last_sequence']} records, {journal['bytes'] / 1e6:.1f} MB, "
        f"{journal['mode']} ({journal['loss_window']})"
    )
    console.print(_ledger_line(document["ledger"]))
    console.print(_policy_table(document["policies"]))
    columns: Sequence[str] = ("name", "engine", "policy", "slots", "leases", "label", "weights", "detail")
    console.print(_table("workers", columns, document["workers"]))
    columns = ("name", "policy", "connected", "open_tasks", "ready")
    console.print(_table("trainers", columns, document["trainers"]))


def _ledger_line(ledger: dict[str, int]) -> str:
    """The ledger as the sum that it is."""
    states = " + ".join(f"{count} {name}" for name, count in ledger.items() if name != "submitted")
    return f"ledger: {ledger['submitted']} submitted = {states}"


def _policy_table(policies: dict[str, Any]) -> Table:
    short = {"running_groups": "running", "ready_groups": "ready", "consumed_since_version": "consumed"}
    rows = [{"policy": name, **{short.get(k, k): v for k, v in values.items()}} for name, values in policies.items()]
    columns = ("policy", "owner", "label", "running", "ready", "consumed", "capacity")
    return _table("policies, in groups; consumed since the version", columns, rows)


def _table(title: str, columns: Sequence[str], rows: list[dict[str, Any]]) -> Table:
    table = Table(*columns, title=title or None, title_justify="left")
    for row in rows:
        table.add_row(*["" if row.get(column) is None else str(row[column]) for column in columns])
    return table
