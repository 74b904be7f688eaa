"""`rollmq log`: read a journal, also one that a broker is writing."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rollmq.cli.output import print_json, reports_errors

if TYPE_CHECKING:
    from broker.records import RecordedEvent

journal_argument = click.argument("journal", type=click.Path(path_type=Path))
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group("log")
def log() -> None:
    """Read a journal: stat, verify, cat.

    Example: rollmq log verify ./journal
    """


@log.command("stat")
@journal_argument
@json_option
@reports_errors
def stat(journal: Path, as_json: bool) -> int:
    """Show what a journal holds: segments, records, bytes, and the ledger at its end.

    Example: rollmq log stat ./journal
    """
    from broker.core.machine import Machine
    from broker.journal.reader import read_journal
    from broker.replay import replay

    with read_journal(journal) as reader:
        facts = asdict(reader.stat())
        machine = Machine()
        report = replay(machine, reader.records())
    document = {**facts, "events": report.events, "ledger": machine.state.ledger.as_dict()}
    if as_json:
        print_json(document)
    else:
        for key, value in document.items():
            click.echo(f"{key}: {value}")
    return 0


@log.command("verify")
@journal_argument
@json_option
@reports_errors
def verify(journal: Path, as_json: bool) -> int:
    """Check every byte of a journal; names each damage by file, offset and sequence. Exit code 1 if there is any.

    Example: rollmq log verify ./journal
    """
    from broker.journal.reader import read_journal

    with read_journal(journal) as reader:
        result = reader.verify()
    if as_json:
        print_json(json.loads(json.dumps({**asdict(result), "intact": result.intact}, default=str)))
    else:
        for finding in result.findings:
            click.echo(f"{'torn tail' if finding.torn_tail else 'damage'}: {finding}")
        state = "intact" if result.intact else "DAMAGED"
        click.echo(f"{state}: {result.records} records, {result.bodies} bodies, {result.segments} segments")
    return 0 if result.intact else 1


@log.command("cat")
@journal_argument
@click.option("--from", "from_sequence", default=1, show_default=True, help="First sequence.")
@click.option("--limit", type=int, default=0, help="Most records; 0 = all.")
@reports_errors
def cat(journal: Path, from_sequence: int, limit: int) -> int:
    """Print a journal as JSON lines: each event with what was decided on it.

    Example: rollmq log cat ./journal --from 100 --limit 20
    """
    from broker.journal.reader import read_journal
    from broker.records import decode_event

    with read_journal(journal) as reader:
        for count, record in enumerate(reader.records(from_sequence)):
            if limit and count >= limit:
                break
            click.echo(json.dumps(_line(decode_event(record))))
    return 0


def _line(recorded: RecordedEvent) -> dict[str, Any]:
    from broker.core.states import STATES

    event = recorded.event
    decisions = [
        {"task": subject or None, "state": STATES[index].value if index >= 0 else None, "detail": detail}
        for subject, index, detail in recorded.decisions
    ]
    return {
        "sequence": recorded.sequence,
        "clock_ns": event.now_ns,
        "event": type(event.message).__name__,
        "fields": _plain(event.message),
        "body_lengths": list(event.lengths),
        "decisions": decisions,
    }


def _plain(value: Any) -> Any:
    """Dataclasses, enums and bytes as JSON values; bodies are left out."""
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value) if f.name != "bodies"}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value
