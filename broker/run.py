"""Starting a broker process: open the journal, replay it, bind, serve."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from broker.core.machine import Machine
from broker.journal.durability import parse_durability_mode
from broker.journal.local import LocalJournal
from broker.replay import replay
from broker.server import BrokerServer
from broker.sockets import BrokerSockets
from rollmq.config import BrokerConfig
from rollmq.errors import JournalFailed

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BrokerReady:
    """What a started broker tells its starter."""

    address: str
    news_address: str
    journal: str
    broker_epoch: int
    recovered_events: int
    open_tasks: int
    durability: str


def run_broker(config: BrokerConfig, announce: Callable[[BrokerReady], None]) -> int:
    """Runs a broker until it is stopped; returns its exit code.

    Raises:
        ConfigError: an address cannot be bound.
        JournalLocked: another broker has this journal.
        JournalDamaged: the journal must be looked at first.
        ReplayMismatch: the journal was written by a core that decides otherwise.
    """
    journal = LocalJournal(config.journal, parse_durability_mode(config.durability), segment_bytes=config.segment_bytes)
    machine = Machine()
    replayed = replay(machine, journal.records())
    sockets = BrokerSockets(config.bind, config.news_bind)
    server = BrokerServer(config, journal, machine, replayed, sockets)
    server.install_signals()
    try:
        server.start()
        stat = journal.stat()
        announce(
            BrokerReady(
                address=sockets.address,
                news_address=sockets.news_address,
                journal=stat.directory,
                broker_epoch=machine.state.broker_epoch,
                recovered_events=replayed.events,
                open_tasks=len(machine.state.open_ids),
                durability=f"{stat.mode} ({stat.loss_window})",
            )
        )
        server.run()
    except JournalFailed as error:
        log.critical("the broker stops, since the journal cannot be trusted any more: %s", error)
        return 1
    return 0
