"""WorkflowExecutor: runs leased tasks as episodes, a bounded number at once; stops, times out, and reports them.

It lives on one event loop. It knows leases only as things to run, no session and no engine process: who owns those
calls `attach`, `detach`, `hold`, `submit` and `cancel`, and is told of starts and outcomes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

from rollmq.bodies import decode_task_spec
from rollmq.errors import ProtocolError
from rollmq.messages import Reason
from workers.episode import Episode, Generator, Rewarder, check_result
from workers.failures import describe_failure
from workers.leases import Failed, Finished, Lease, Outcome
from workers.workflows.registry import WorkflowRegistry

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 2.0


@dataclass(slots=True, eq=False)
class _Run:
    """A running episode, its asyncio task, and the timer of its deadline."""

    episode: Episode
    task: asyncio.Task[None] | None = None
    timer: asyncio.TimerHandle | None = None


class WorkflowExecutor:
    """Runs up to `slots` episodes at once, in the order they came.

    Args:
        slots: episodes at once.
        workflows: by name.
        rewards: the worker's rewards.
        worker: the worker's name, for result bodies.
        on_started: a task's first request goes to the engine.
        on_outcome: a task is over; not called for what was cancelled.
    """

    def __init__(
        self,
        *,
        slots: int,
        workflows: WorkflowRegistry,
        rewards: Rewarder,
        worker: str,
        on_started: Callable[[Lease], None],
        on_outcome: Callable[[Lease, Outcome], None],
    ) -> None:
        self._slots = slots
        self._workflows = workflows
        self._rewards = rewards
        self._worker = worker
        self._on_started = on_started
        self._on_outcome = on_outcome
        self._engine: Generator | None = None
        self._held = True
        self._waiting: OrderedDict[Lease, float] = OrderedDict()
        self._runs: dict[Lease, _Run] = {}
        self._stopping: set[_Run] = set()
        self._background: set[asyncio.Task[Any]] = set()
        self.progress = 0
        self.finished = 0
        self.trouble = asyncio.Event()
        """Set when the engine failed a request: nothing more is started on it until somebody trusts it again."""
        self._idle = asyncio.Event()
        self._idle.set()

    # --- facts --------------------------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Episodes that run."""
        return len(self._runs)

    @property
    def waiting(self) -> int:
        """Tasks that wait for a slot."""
        return len(self._waiting)

    # --- engine -------------------------------------------------------------------------------------------------

    def attach(self, engine: Generator) -> None:
        """The engine that episodes use from now on."""
        self._engine = engine
        self.trouble.clear()

    def trust(self) -> None:
        """The engine was found to be well after it failed a request."""
        self.trouble.clear()
        self._fill()

    def detach(self, detail: str) -> None:
        """The engine is gone: what had requests in it fails, what waits is returned; rewards in progress go on."""
        self._engine = None
        self.hold()
        self.return_waiting(Reason.RETURNED, detail)
        for run in list(self._runs.values()):
            if run.episode.rids:
                self._end(run, Failed(Reason.ENGINE_FAILED, detail))

    def hold(self) -> None:
        """Starts no more episodes until `release`."""
        self._held = True

    def release(self) -> None:
        """Starts episodes again."""
        self._held = False
        self._fill()

    # --- tasks --------------------------------------------------------------------------------------------------

    def submit(self, lease: Lease) -> None:
        """Takes a task; its deadline counts from now."""
        self._waiting[lease] = time.monotonic() + lease.item.deadline_s
        self._idle.clear()
        self._fill()

    def cancel(self, lease: Lease) -> None:
        """Stops a task at once; no outcome follows. Unknown leases are ignored: they are over."""
        if self._waiting.pop(lease, None) is not None:
            self._check_idle()
        run = self._runs.get(lease)
        if run is not None:
            self._end(run, None)

    def return_waiting(self, reason: Reason, detail: str) -> None:
        """Gives back what has not begun."""
        waiting, self._waiting = list(self._waiting), OrderedDict()
        for lease in waiting:
            self._on_outcome(lease, Failed(reason, detail))
        self._check_idle()

    def return_running(self, reason: Reason, detail: str) -> None:
        """Stops and gives back what runs."""
        for run in list(self._runs.values()):
            self._end(run, Failed(reason, detail))

    async def idle(self) -> None:
        """Returns when nothing runs or waits."""
        await self._idle.wait()

    async def close(self) -> None:
        """Cancels everything and waits for it, briefly."""
        self.hold()
        for lease in [*self._waiting, *self._runs]:
            self.cancel(lease)
        tasks = [run.task for run in self._stopping if run.task is not None]
        pending = {*tasks, *self._background}
        if pending:
            await asyncio.wait(pending, timeout=CLOSE_TIMEOUT_S)
        if self._stopping:
            log.warning("%d workflows do not end although they were cancelled", len(self._stopping))

    # --- running ------------------------------------------------------------------------------------------------

    def _fill(self) -> None:
        while self._waiting and self._has_room():
            lease, deadline = self._waiting.popitem(last=False)
            run = _Run(Episode(lease, lambda: self._engine, self._rewards, self._on_started))
            self._runs[lease] = run
            self.progress += 1
            run.task = asyncio.create_task(self._run(run), name=f"task {lease.task_id}")
            # A task that is cancelled before its first step never enters `_run`, so its end is noticed here as well.
            run.task.add_done_callback(partial(self._task_done, run))
            run.timer = asyncio.get_running_loop().call_later(max(0.0, deadline - time.monotonic()), self._expire, run)

    def _has_room(self) -> bool:
        shut = self._held or self.trouble.is_set()
        return not shut and len(self._runs) + len(self._stopping) < self._slots

    async def _run(self, run: _Run) -> None:
        outcome: Outcome | None = None
        try:
            outcome = await self._work(run.episode)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            outcome = Failed(Reason.WORKFLOW_RAISED, "the workflow raised CancelledError")
        finally:
            self._over(run, outcome)

    async def _work(self, episode: Episode) -> Outcome:
        try:
            spec = decode_task_spec(episode.lease.body)
        except ProtocolError as error:
            return Failed(Reason.REQUEST_REJECTED, str(error))
        try:
            result = await self._workflows.get(spec.workflow).run(episode, spec)
        except (Exception, SystemExit) as error:
            log.debug("task %d failed", episode.task_id, exc_info=True)
            return describe_failure(error, started=episode.started)
        return check_result(result, episode.labels, worker=self._worker, attempt=episode.attempt)

    def _expire(self, run: _Run) -> None:
        deadline_s = run.episode.lease.item.deadline_s
        self._end(run, Failed(Reason.DEADLINE, f"its {deadline_s:.1f} s were over before its workflow was"))

    def _end(self, run: _Run, outcome: Failed | None) -> None:
        """Stops a run. Reported at once: a workflow that resists its cancellation must not delay the answer."""
        if self._runs.pop(run.episode.lease, None) is None:
            return
        run.episode.over = True
        self._stopping.add(run)
        self._abort_requests(run.episode)
        if run.task is not None:
            run.task.cancel()
        if outcome is not None:
            self._on_outcome(run.episode.lease, outcome)
        self._check_idle()

    def _abort_requests(self, episode: Episode) -> None:
        """Tells the engine. Begun before the episode's own cancellation, so that the request is still known there."""
        if self._engine is not None:
            for rid in tuple(episode.rids):
                self._in_background(self._engine.cancel(rid))

    def _over(self, run: _Run, outcome: Outcome | None) -> None:
        run.episode.over = True
        if run.timer is not None:
            run.timer.cancel()
        self._stopping.discard(run)
        if self._runs.pop(run.episode.lease, None) is not None and outcome is not None:
            self.progress += 1
            self.finished += isinstance(outcome, Finished)
            if isinstance(outcome, Failed) and outcome.reason is Reason.ENGINE_FAILED:
                self.trouble.set()  # a dying engine must not take the waiting tasks with it, one by one
            self._on_outcome(run.episode.lease, outcome)
        self._fill()
        self._check_idle()

    def _task_done(self, run: _Run, task: asyncio.Task[None]) -> None:
        if run in self._stopping:
            self._over(run, None)

    def _check_idle(self) -> None:
        if not self._waiting and not self._runs:
            self._idle.set()

    def _in_background(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
