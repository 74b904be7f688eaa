"""Worker: one session with the broker, one engine, and the leases between them.

It glues parts that each know one thing: leases (bookkeeping), executor (episodes), weight keeper (versions),
supervisor (engine process), broker session (messages). Everything here runs on one event loop but `hello` and
`progress`.

While the broker is away, episodes go on and outcomes are kept; they are sent again in the next session until they
are settled. SIGTERM drains; a second one ends the process at once, and the engine's guard clears away the rest.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

from rollmq.codec import MAX_BODY_BYTES, MAX_ITEMS
from rollmq.config import WorkerConfig
from rollmq.errors import ConfigError, RollmqError
from rollmq.messages import (
    Drain,
    Drop,
    Grant,
    HeartbeatAck,
    Hello,
    Message,
    News,
    Reason,
    Refusal,
    Role,
    Settled,
    StartedItem,
    Task,
    Weights,
    Welcome,
)
from workers.broker_session import BrokerSession
from workers.embedded.sim_options import is_sim
from workers.executor import WorkflowExecutor
from workers.leases import Failed, Lease, LeaseTable, Outcome
from workers.outbox import fitting, outcome_messages, return_messages, started_messages
from workers.rewards import RewardPool, check_rewards
from workers.supervise import Engine, EngineSupervisor, Watch
from workers.weights import WeightKeeper, WeightReport
from workers.workflows.registry import WorkflowRegistry

log = logging.getLogger(__name__)

EXIT_OK, EXIT_FAILED, EXIT_MISUSE = 0, 1, 2
SETTLE_TIMEOUT_S = 5.0
FLUSH_INTERVAL_S = 1.0


class Worker:
    """One worker. Made and run inside one event loop.

    Args:
        config: its settings.
        make_engine: gives an engine, not started, for the label of its launch weights.
        watch: how the engine is watched.

    Raises:
        ConfigError: a configured workflow or reward cannot be used.
    """

    def __init__(self, config: WorkerConfig, make_engine: Callable[[str], Engine], watch: Watch | None = None) -> None:
        check_rewards(config.rewards)
        self._config = config
        self._nonce = os.urandom(16)
        self._leases = LeaseTable(config.slots + config.prefetch)
        self._rewards = RewardPool.from_config(config)
        self._executor = WorkflowExecutor(
            slots=config.slots,
            workflows=WorkflowRegistry(config.workflows),
            rewards=self._rewards,
            worker=config.name,
            on_started=self._task_started,
            on_outcome=self._task_over,
        )
        self._keeper = WeightKeeper(config.policy, config.update_mode, self._weights_changed)
        self._supervisor = EngineSupervisor(make_engine, self._keeper, self._executor, config.max_restarts, watch)
        self._broker = BrokerSession(config.broker, self)
        self._session = 0
        self._max_items = MAX_ITEMS
        self._max_body_bytes = MAX_BODY_BYTES
        self._started: list[Lease] = []
        self._flush_planned = False
        self._loop_turns = 0
        self._draining = False
        self._stop = asyncio.Event()
        self._changed = asyncio.Event()
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    # --- life ---------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Begins to drain; the second time ends the process at once."""
        if self._stop.is_set():
            log.warning("second signal: ending now")
            logging.shutdown()
            os._exit(EXIT_FAILED)
        log.info("draining: running episodes get %g s; a second signal ends at once", self._config.drain_timeout_s)
        self._stop.set()

    async def run(self) -> None:
        """Runs until `stop`.

        Raises:
            ConfigError: the engine cannot be launched as configured.
            EngineError: it failed too often.
            SessionSuperseded, Refused: the broker has no use for this worker.
        """
        self._broker.start()
        supervised = asyncio.create_task(self._supervisor.run())
        flushed = asyncio.create_task(self._flush_now_and_then())
        stopped: asyncio.Future[Any] = asyncio.create_task(self._stop.wait())
        try:
            causes: tuple[asyncio.Future[None], ...] = (supervised, self._ended)
            await asyncio.wait([*causes, stopped], return_when=asyncio.FIRST_COMPLETED)
            for ended in causes:
                if ended.done():
                    await self._settle(SETTLE_TIMEOUT_S)
                    ended.result()
            await self._drain()
        finally:
            for task in (flushed, stopped):
                task.cancel()
            await self._close(supervised)

    async def _close(self, supervised: asyncio.Task[None]) -> None:
        await self._executor.close()
        await self._broker.close()
        supervised.cancel()
        await asyncio.gather(supervised, return_exceptions=True)
        await self._rewards.close()

    async def _drain(self) -> None:
        self._draining = True
        if self._session:
            self._broker.send(Drain(self._session, 1))
        self._executor.return_waiting(Reason.RETURNED, "the worker drains")
        try:
            await asyncio.wait_for(self._executor.idle(), self._config.drain_timeout_s)
        except TimeoutError:
            log.warning("%d episodes did not end in time and are given back", self._executor.running)
            self._executor.return_running(Reason.DRAINED, "the worker drains; the episode did not end in time")
        await self._settle(SETTLE_TIMEOUT_S)

    async def _settle(self, timeout_s: float) -> None:
        """Until the broker has settled all outcomes, but no longer than it may take."""
        deadline = time.monotonic() + timeout_s
        while self._leases.unsettled and not self._ended.done():
            self._changed.clear()
            self._plan_flush()
            try:
                await asyncio.wait_for(self._changed.wait(), deadline - time.monotonic())
            except TimeoutError:
                log.warning("%d outcomes were not settled; their tasks will run again", self._leases.unsettled)
                return

    # --- session: on its thread ---------------------------------------------------------------------------------

    def hello(self) -> Hello:
        """See `SessionOwner.hello`."""
        held, unsent = self._leases.greeting()
        return Hello(
            role=Role.WORKER,
            name=self._config.name,
            nonce=self._nonce,
            policy=self._config.policy,
            engine="sim" if is_sim(self._config.model) else self._config.engine,
            slots=self._config.slots,
            label=self._keeper.report.label if self._keeper.ready else "",
            held=held,
            unsent=unsent,
            host=socket.gethostname()[:128],
            pid=os.getpid(),
        )

    def progress(self) -> tuple[int, int]:
        """See `SessionOwner.progress`."""
        return self._executor.progress + self._loop_turns, self._executor.running

    # --- session: on the loop -----------------------------------------------------------------------------------

    def opened(self, welcome: Welcome) -> None:
        """Reconciles leases, then says again all that counts: weights, starts, outcomes, credit."""
        log.info("session %d with the broker at %s", welcome.session, self._config.broker)
        self._session = welcome.session
        self._max_items = min(welcome.max_items, MAX_ITEMS)
        self._max_body_bytes = min(welcome.max_body_bytes, MAX_BODY_BYTES)
        reconciled = self._leases.opened(welcome.adopted, welcome.dropped)
        for lease in reconciled.dropped:
            self._executor.cancel(lease)
        for nack in return_messages(self._session, reconciled.orphans, "the lease is unknown to its worker"):
            self._broker.send(nack)
        self._keeper.follow(welcome.policies, authoritative=True)
        self._say_weights(self._keeper.report)
        if self._draining:
            self._broker.send(Drain(self._session, 1))
        self._started = self._leases.started()
        self._plan_flush()

    def lost(self, reason: str, error: RollmqError | None) -> None:
        """Goes on without a session, or ends."""
        if self._session or error is not None:
            log.warning("session with the broker lost: %s", reason)
        else:
            log.info("no session with the broker at %s: %s", self._config.broker, reason)
        self._session = 0
        if error is not None and not self._ended.done():
            self._ended.set_exception(error)

    def received(self, message: Message) -> None:
        """Acts on a message; those of an older session say nothing any more."""
        if isinstance(message, News):
            self._keeper.follow(message.policies)
            return
        if getattr(message, "session", 0) != self._session:
            return
        match message:
            case Task():
                self._take_tasks(message)
            case Settled(outcomes=outcomes):
                for outcome in outcomes:
                    if self._leases.settle(outcome.task_id, outcome.epoch) and outcome.code is not None:
                        log.info("outcome of task %d was of no use: %s", outcome.task_id, outcome.code)
                self._changed.set()
            case Drop(items=items):
                for item in items:
                    lease = self._leases.drop(item.task_id, item.epoch)
                    if lease is not None:
                        self._executor.cancel(lease)
                self._changed.set()
            case HeartbeatAck(policies=policies):
                self._keeper.follow(policies)
                return
            case Refusal(code=code, message=text):
                log.error("the broker refused a message: %s: %s", code, text)
            case _:
                return
        self._plan_flush()

    def _take_tasks(self, message: Task) -> None:
        self._keeper.follow(message.policies)
        for item, body in zip(message.items, message.bodies, strict=True):
            lease, older = self._leases.receive(item, body)
            if older is not None:
                self._executor.cancel(older)
            if self._draining or not self._supervisor.serving:
                detail = "the worker drains" if self._draining else "the engine is down"
                self._task_over(lease, Failed(Reason.RETURNED, detail))
            else:
                self._executor.submit(lease)

    # --- parts report -------------------------------------------------------------------------------------------

    def _task_started(self, lease: Lease) -> None:
        self._started.append(lease)
        self._plan_flush()

    def _task_over(self, lease: Lease, outcome: Outcome) -> None:
        outcome = fitting(outcome, self._max_body_bytes)
        if isinstance(outcome, Failed):
            log.info("task %d given back: %s: %s", lease.task_id, outcome.reason, outcome.detail)
        if self._leases.finish(lease, outcome):
            self._plan_flush()

    def _weights_changed(self, report: WeightReport) -> None:
        log.info("weights %s %s %s", report.state, report.label or "unknown", report.detail)
        self._say_weights(report)
        if self._keeper.ready:
            self._executor.release()
        else:
            self._executor.hold()
        self._plan_flush()

    # --- sending ------------------------------------------------------------------------------------------------

    def _say_weights(self, report: WeightReport) -> None:
        if self._session:
            self._broker.send(Weights(self._session, report.state, report.label, report.detail))

    def _plan_flush(self) -> None:
        """Sends at the end of this turn of the loop, so that what happens together travels together."""
        if not self._flush_planned:
            self._flush_planned = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_planned = False
        if not self._session:
            return
        started, self._started = self._started, []
        items = [StartedItem(lease.task_id, lease.epoch, lease.started_label or "") for lease in started]
        for message in started_messages(self._session, items, self._max_items):
            self._broker.send(message)
        for outcomes in outcome_messages(self._session, self._leases.due(time.monotonic()), self._max_items):
            self._broker.send(outcomes)
        if self._keeper.ready and not self._draining:
            credit = self._leases.credit()
            if credit is not None:
                self._broker.send(Grant(self._session, *credit))

    async def _flush_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_INTERVAL_S)
            self._loop_turns += 1  # shown in heartbeats: the loop is not stuck, even while no episode ends
            self._plan_flush()


def run_worker(config: WorkerConfig) -> int:
    """Runs a worker until it is told to end; returns the exit code.

    0: drained. 1: the engine failed too often, or the broker has no use for it. 2: wrong settings.
    """
    try:
        asyncio.run(_run(config))
    except ConfigError as error:
        log.error("%s", error)
        return EXIT_MISUSE
    except RollmqError as error:
        log.error("worker %s ends: %s", config.name, error)
        return EXIT_FAILED
    return EXIT_OK


async def _run(config: WorkerConfig) -> None:
    from workers.engine_setup import EngineSetup

    setup = EngineSetup(config)
    await setup.check()
    worker = Worker(config, setup.make)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, worker.stop)
    await worker.run()
