"""One iteration of `batches`: submits ahead, waits for full batches, replaces what failed.

The user's iterable is not touched here: the front end pulls prompts in the user's own thread and hands them in. So
the blocking and the asyncio client share this, and a slow data loader never blocks the session.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence

from rollmq.errors import ConfigError
from rollmq.messages import EndedItem
from rollmq.rollout import Group
from trainer_client import submission
from trainer_client.batches import BatchPlan, GroupFailure, Prompt
from trainer_client.connection import Connection
from trainer_client.submission import TaskOptions
from trainer_client.submitter import Submitter

log = logging.getLogger(__name__)


class BatchRun:
    """See the module.

    Args:
        connection: to the broker.
        submitter: of the same client.
        plan: the pipeline, empty.
        options: workflow, deadline and priority of all tasks.
        run: text that makes the keys those of this training run.
        failures: where groups that failed are reported.
        resumed: whether a stored state was loaded for this iteration.
    """

    def __init__(
        self,
        connection: Connection,
        submitter: Submitter,
        plan: BatchPlan,
        options: TaskOptions,
        run: str,
        failures: deque[GroupFailure],
        resumed: bool,
    ) -> None:
        self.plan = plan
        self.over = False
        self.left_over = 0
        self._connection, self._core = connection, connection.core
        self._submitter = submitter
        self._options = options.checked()
        self._run = run
        self._failures = failures
        self._resumed = resumed
        self._replaced = False
        self._ended: deque[EndedItem] = deque()
        self._has_strays = False
        connection.listen(self._touched)

    async def advance(self, prompts: Sequence[Prompt], deadline: float) -> list[Group] | None:
        """Submits more prompts and waits for a batch.

        Args:
            prompts: the next ones, at most `plan.wanted()`; if fewer, `plan.exhausted` is set.
            deadline: on the monotonic clock.

        Returns:
            A full batch, or None: more prompts are wanted, or the iteration is `over`.

        Raises:
            DeadlineExceeded: no full batch by the deadline; the iteration may go on.
            ConfigError: a prompt cannot be sent, or another call of `batches` has replaced this one.
        """
        self._check_current()
        self._core.flush_consumed()
        for prompt in prompts:
            self.plan.offer(prompt)
        if not self.plan.is_over():
            await self._place()
        while True:
            self._check_current()
            self._cancel_leftovers()
            self._report_failures()
            batch = self._next_batch()
            if batch is not None:
                return batch
            if self.plan.is_over():
                self._finish()
                return None
            if self.plan.wanted():
                return None
            await self._wait(deadline)

    def abandon(self) -> None:
        """Ends the iteration early: another one begins. What it had submitted is cancelled."""
        self._replaced = True
        self._withdraw()

    # --- steps ----------------------------------------------------------------------------------------------------

    def _check_current(self) -> None:
        if self._replaced:
            raise ConfigError("a later call of `batches` replaced this iteration; use only the newest one")

    async def _place(self) -> None:
        """Submits the groups that are not yet; an interrupted call may have left some."""
        waiting = [group for group in self.plan.groups if not group.task_ids]
        if not waiting:
            return
        members = {
            group.position: submission.group(group.request, group.data, self._key(group.position), self._options)
            for group in waiting
        }
        entries = [entry for group in waiting for entry in members[group.position]]
        task_ids = iter(await self._submitter.submit(entries))
        for group in waiting:
            self.plan.placed(group, [next(task_ids) for _ in members[group.position]])
            for task_id in group.task_ids:
                self._touched(task_id)

    def _key(self, position: int) -> str:
        return f"batch/{self._run}/{self.plan.iteration}/{position}"

    def _cancel_leftovers(self) -> None:
        """A run that begins anew withdraws what an earlier process of this trainer left: it would use up the budget."""
        self._has_strays = False
        if self._resumed or self._core.submits_open():
            return
        leftovers = self._core.unclaimed
        if leftovers:
            log.warning("cancelled %d trajectories that an earlier run of this trainer had left", len(leftovers))
            self._core.cancel(leftovers)
            self._connection.pump()

    def _touched(self, task_id: int) -> None:
        fate = self._core.fate(task_id)
        if fate is not None:
            self._ended.append(fate)
        else:
            self.plan.touch(task_id, self._core.is_available)
            self._has_strays |= not self._resumed and self._core.is_unclaimed(task_id)

    def _report_failures(self) -> None:
        while self._ended:
            failed = self.plan.fail(self._ended.popleft())
            if failed is None:
                continue
            failure, members = failed
            self._failures.append(failure)
            log.warning(
                "prompt %d gave no group: task %d ended as %s: %s; the next prompt takes its place",
                failure.position, failure.task_id, failure.state, failure.reason,
            )  # fmt: skip
            self._cancel([task_id for task_id in members if task_id != failure.task_id])

    def _next_batch(self) -> list[Group] | None:
        if self.plan.complete < self.plan.batch_size:
            return None
        chosen = self.plan.next_batch(self._core.is_available)
        if chosen is None:
            self._connection.pump()
            return None
        trajectories = iter(self._core.take([task_id for group in chosen for task_id in group.task_ids]))
        batch = []
        for group in chosen:
            members = tuple(next(trajectories) for _ in group.task_ids)
            batch.append(Group(members[0].group, members))
        self.plan.yielded(chosen)
        self._connection.pump()
        return batch

    async def _wait(self, deadline: float) -> None:
        awaited = self.plan.task_ids
        self._core.expect(awaited)
        try:
            self._connection.pump()
            while not self._is_due():
                waiter = self._connection.waiter(())
                try:
                    await self._connection.until(waiter, deadline, self._what)
                finally:
                    self._connection.forget(waiter, ())
        finally:
            self._core.unexpect(awaited)

    def _is_due(self) -> bool:
        """Whether there is something to do."""
        full = self.plan.complete >= self.plan.batch_size
        return full or self._replaced or self._has_strays or bool(self._ended)

    def _what(self) -> str:
        groups = self.plan.groups
        missing = [t for g in groups for t in g.task_ids if t not in self._core.inbox]
        return (
            f"no batch of {self.plan.batch_size} groups in time: {self.plan.complete} of {len(groups)} groups in the "
            f"pipeline are complete, {len(missing)} tasks are awaited ({', '.join(map(str, missing[:5]))}, ...), the "
            f"policy is at version {self._core.version}. If workers are idle, the staleness bound may be used up: "
            "publish a newer version; see `rollmq status`"
        )

    def _finish(self) -> None:
        self.left_over = len(self.plan.groups)
        if self.left_over:
            log.warning(
                "the prompts ended %d groups short of a batch of %d; these %d groups are cancelled, not yielded",
                self.plan.batch_size - self.left_over, self.plan.batch_size, self.left_over,
            )  # fmt: skip
        self._withdraw()
        self.over = True

    def _withdraw(self) -> None:
        self._connection.listen(None)
        self._cancel(self.plan.task_ids)

    def _cancel(self, task_ids: Sequence[int]) -> None:
        open_ids = [task_id for task_id in task_ids if self._core.fate(task_id) is None]
        if open_ids:
            self._core.cancel(open_ids)
            self._connection.pump()
