"""`rollmq replay`: drive the core, or a live fleet, from a journal."""

from __future__ import annotations

import sys
from pathlib import Path

import click
from rich.console import Console
from rich.progress import Progress

from rollmq.cli.output import print_json, reports_errors
from rollmq.config import DEFAULT_ADDRESS

journal_argument = click.argument("journal", type=click.Path(path_type=Path))
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group("replay")
def replay() -> None:
    """Replay a journal: its decisions in the real core, or its tasks on a live fleet.

    Example: rollmq replay decisions ./journal
    """


@replay.command("decisions")
@journal_argument
@json_option
@reports_errors
def decisions(journal: Path, as_json: bool) -> int:
    """Drive the real core from a journal and compare every decision; prints the final state hash.

    Exit code 1 at the first decision that differs, with its sequence, or at a damaged record.

    Example: rollmq replay decisions ./journal
    """
    from broker.core.fingerprint import state_hash
    from broker.core.machine import Machine
    from broker.journal.reader import read_journal
    from broker.replay import replay as replay_records

    machine = Machine()
    with read_journal(journal) as reader:
        report = replay_records(machine, reader.records(check_bodies=True))
        torn_tail = reader.torn_tail
    document = {
        "events": report.events,
        "decisions": report.decisions,
        "identical": True,
        "torn_tail": str(torn_tail) if torn_tail is not None else None,
        "state_hash": state_hash(machine.state),
        "balanced": machine.state.ledger.balances(),
        "ledger": machine.state.ledger.as_dict(),
    }
    if as_json:
        print_json(document)
    else:
        if torn_tail is not None:
            click.echo(f"an interrupted write ends the journal: {torn_tail}")
        click.echo(f"{report.events} events, {report.decisions} decisions: all identical")
        click.echo(f"state hash {document['state_hash']}")
        click.echo(f"ledger {document['ledger']}")
    return 0


@replay.command("tasks")
@journal_argument
@click.option("--to", "address", default=DEFAULT_ADDRESS, show_default=True, help="Broker of the fleet to replay on.")
@click.option("--policy", default="default", show_default=True, help="Policy of that fleet.")
@click.option("--limit", type=int, default=0, help="Most tasks; 0 = all.")
@click.option("--timeout", default=600.0, show_default=True, help="Seconds to wait for each task.")
@json_option
@reports_errors
def tasks(journal: Path, address: str, policy: str, limit: int, timeout: float, as_json: bool) -> int:
    """Submit a journal's tasks to a live fleet and report differences in the tokens of greedy and seeded ones.

    Exit code 1 if any differs or fails.

    Example: rollmq replay tasks ./journal --to tcp://127.0.0.1:5555
    """
    from broker.journal.reader import read_journal
    from broker.recorded import recorded_tasks
    from trainer_client import RolloutClient
    from trainer_client.replay import replay_tasks

    with read_journal(journal) as reader:
        log_id = reader.stat().log_id
        wanted = list(recorded_tasks(reader))
    wanted = wanted[:limit] if limit else wanted
    if not wanted:
        click.echo("the journal holds no tasks", err=True)
        return 1
    name = f"replay-{log_id[:12]}"
    with (
        RolloutClient(address, trainer=name, policy=policy, consumer_batch_size=len(wanted)) as client,
        Progress(console=Console(file=sys.stderr), transient=True) as bar,
    ):
        row = bar.add_task("replaying", total=len(wanted))
        outcome = replay_tasks(client, wanted, log_id, timeout_s=timeout, progress=lambda: bar.advance(row))
    if as_json:
        print_json(outcome.as_dict())
    else:
        click.echo(
            f"{outcome.submitted} tasks: {outcome.identical} identical, {len(outcome.different)} different, "
            f"{outcome.other_version} of other versions, {outcome.not_comparable} not comparable, "
            f"{len(outcome.failed)} failed"
        )
        for task_id in outcome.different[:20]:
            click.echo(f"different: task {task_id}")
        for task_id, why in list(outcome.failed.items())[:20]:
            click.echo(f"failed: task {task_id}: {why}")
    return 0 if outcome.agrees else 1
