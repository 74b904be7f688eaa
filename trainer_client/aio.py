"""The asyncio trainer client; `trainer_client.client` is the same for blocking code."""

from __future__ import annotations

import itertools
import json
import secrets
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

from rollmq.errors import ConfigError, Refused
from rollmq.messages import (
    Cancel,
    Message,
    Publish,
    Published,
    Query,
    RefusalCode,
    Report,
    Resume,
    Resumed,
    Settled,
    TaskState,
)
from rollmq.rollout import ModelRequest, Trajectory
from trainer_client import submission
from trainer_client.batches import BatchPlan, GroupFailure, Prompt, split_prompt
from trainer_client.connection import Connection
from trainer_client.pipeline import BatchRun
from trainer_client.positions import Positions
from trainer_client.prompts import AsyncBatches, PromptFeed, batch_timeout
from trainer_client.requests import Request
from trainer_client.settings import WAIT_LIMIT_S, ClientSettings, check_timeout
from trainer_client.state import BatchProgress, ClientState
from trainer_client.submission import TaskOptions
from trainer_client.submitter import Submitter
from trainer_client.weights import DiskWeights

REMEMBERED_FAILURES = 1000

_M = TypeVar("_M", bound=Message)


class AsyncRolloutClient:
    """Submits prompts, takes trajectories that obey the staleness bound, and publishes weights. One event loop only.

    Use it as `async with AsyncRolloutClient(...) as client`, or `await client.connect()` ... `await client.close()`.

    Args:
        address: of the broker, `tcp://host:port` or `ipc://path`.
        trainer: name of this trainer; a newer process of the same name supersedes this one.
        policy: name of the policy it trains.
        consumer_batch_size: B, groups consumed per version; also the size of batches.
        max_head_offpolicyness: eta, the largest allowed staleness.
        max_concurrent_rollouts: most groups that run at once; None = only the staleness bound limits them.
        on_stale: what happens to a trajectory older than the bound: `retry`, `drop` or `deliver`.
        keys: must be None: authentication comes with a later version.
        timeout: seconds that connecting, a request's answer, or a wait without any session may take.
        owner: whether it publishes the policy's weights; others submit with `owner=False`.

    Raises:
        ConfigError: an argument is wrong; names it.

    Every method may raise `NotConnected` (no session for `timeout` seconds), `SessionSuperseded` (a newer process took
    over) and `Refused` (the broker said no, with a code).
    """

    def __init__(
        self,
        address: str,
        trainer: str = "math",
        policy: str = "default",
        consumer_batch_size: int = 4,
        max_head_offpolicyness: int = 1,
        max_concurrent_rollouts: int | None = None,
        on_stale: str = "retry",
        keys: object = None,
        timeout: float = 30.0,
        owner: bool = True,
    ) -> None:
        self._settings = ClientSettings(
            address,
            trainer,
            policy,
            consumer_batch_size,
            max_head_offpolicyness,
            max_concurrent_rollouts,
            on_stale,
            keys,
            timeout,
            owner,
        )
        self._connection = Connection(address, trainer, policy, self._settings.policy_settings, owner, timeout)
        self._core = self._connection.core
        self._submitter = Submitter(self._connection, timeout)
        self._run = secrets.token_hex(8)
        self._instance = secrets.token_hex(8)
        self._keys = itertools.count(1)
        self._failures: deque[GroupFailure] = deque(maxlen=REMEMBERED_FAILURES)
        self._batches: BatchRun | None = None
        self._progress = BatchProgress()

    # --- life -----------------------------------------------------------------------------------------------------

    async def connect(self) -> AsyncRolloutClient:
        """Opens the session with the broker. Later losses of it are repaired silently.

        Raises:
            NotConnected: no session within the client's timeout; names the address.
        """
        await self._connection.open(self._settings.timeout)
        return self

    async def close(self) -> None:
        """Acknowledges what was taken and ends the session; idempotent. Open tasks stay with the broker."""
        self._core.flush_consumed()
        await self._connection.close()

    async def __aenter__(self) -> AsyncRolloutClient:
        try:
            return await self.connect()
        except BaseException:
            await self.close()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def version(self) -> int:
        """The policy's current version."""
        return self._core.version

    @property
    def epoch(self) -> int:
        """The policy's run epoch: raised each time a new process of the owner connects."""
        return self._core.epoch

    @property
    def consumer_batch_size(self) -> int:
        """B: groups in a batch."""
        return self._settings.consumer_batch_size

    @property
    def failures(self) -> list[GroupFailure]:
        """Prompts of `batches` that gave no group, the last 1000, oldest first."""
        return list(self._failures)

    @property
    def left_over(self) -> int:
        """Groups that the newest iteration of `batches` did not yield, since they made no full batch."""
        return self._batches.left_over if self._batches is not None else 0

    # --- tasks ----------------------------------------------------------------------------------------------------

    async def submit(
        self,
        request: ModelRequest,
        workflow: str = "generate",
        data: Mapping[str, Any] | None = None,
        key: str | None = None,
        deadline_s: float | None = None,
        priority: str = "train",
    ) -> int:
        """Submits one task; returns its id once the broker has it on disk.

        Args:
            request: prompt and sampling parameters, with `n_samples` 1.
            workflow: name of a workflow in the workers' configuration.
            data: values for the workflow and its reward.
            key: idempotency key, unique per trainer: the same key and request is the same task. None = a new one.
            deadline_s: seconds until the task expires; None = the broker's default.
            priority: `train` or `eval`.

        Raises:
            ConfigError: an argument is wrong, or `n_samples` is not 1.
            Refused: e.g. `conflict`, when the key is used by another request.
            DeadlineExceeded: no acknowledgement in time; submitting again with the same key is safe.
        """
        entry = submission.single(request, data, key or self._new_key(), TaskOptions(workflow, deadline_s, priority))
        return (await self._submit([entry]))[0]

    async def submit_many(
        self,
        requests: Iterable[Prompt],
        workflow: str = "generate",
        keys: Sequence[str] | None = None,
        deadline_s: float | None = None,
        priority: str = "train",
    ) -> list[int]:
        """Submits many tasks in few messages; returns their ids in order.

        Args:
            requests: requests with `n_samples` 1, or pairs of (request, data).
            keys: one idempotency key per request, or None.
            workflow, deadline_s, priority: as in `submit`, for all.

        Raises:
            As `submit`. Tasks that were taken before an error stay submitted.
        """
        options = TaskOptions(workflow, deadline_s, priority)
        pairs = [split_prompt(prompt) for prompt in requests]
        if keys is not None and len(keys) != len(pairs):
            raise ConfigError(f"{len(keys)} keys for {len(pairs)} requests; give one per request, or None")
        names = keys if keys is not None else [self._new_key() for _ in pairs]
        entries = [
            submission.single(request, data, name, options) for (request, data), name in zip(pairs, names, strict=True)
        ]
        return await self._submit(entries)

    async def submit_group(
        self,
        request: ModelRequest,
        workflow: str = "generate",
        data: Mapping[str, Any] | None = None,
        key: str | None = None,
        deadline_s: float | None = None,
        priority: str = "train",
    ) -> list[int]:
        """Submits the `n_samples` tasks of one prompt as a group; returns the members' ids in order.

        A seed in the request is raised by one per member. Arguments and errors as in `submit`.
        """
        options = TaskOptions(workflow, deadline_s, priority)
        return await self._submit(submission.group(request, data, key or self._new_key(), options))

    async def _submit(self, entries: list[submission.Entry]) -> list[int]:
        self._connection.check_usable()
        self._core.begin()
        return await self._submitter.submit(entries)

    def _new_key(self) -> str:
        return f"task/{self._instance}/{next(self._keys)}"

    async def wait(self, task_id: int, timeout: float | None = None) -> Trajectory:
        """Takes a task's trajectory when it is there; survives restarts of the broker.

        Args:
            task_id: from `submit`, also of an earlier process of this trainer.
            timeout: seconds; 0 = only if it is here already; None = an hour.

        Raises:
            TaskFailed: it ended without a trajectory, or its trajectory was taken before.
            DeadlineExceeded: it did not come in time; says what is known of it.
        """
        deadline = time.monotonic() + check_timeout("timeout", WAIT_LIMIT_S if timeout is None else timeout)
        self._connection.check_usable()
        self._core.flush_consumed()
        self._core.expect([task_id])
        try:
            self._connection.pump()
            while True:
                trajectory = self._core.collect(task_id)
                self._connection.pump()
                if trajectory is not None:
                    return trajectory
                await self._until_touched(task_id, deadline)
        finally:
            self._core.unexpect([task_id])

    async def _until_touched(self, task_id: int, deadline: float) -> None:
        waiter = self._connection.waiter([task_id])
        try:
            await self._connection.until(waiter, deadline, lambda: self._known_of(task_id))
        finally:
            self._connection.forget(waiter, [task_id])

    def _known_of(self, task_id: int) -> str:
        unclaimed = self._core.unclaimed
        text = f"task {task_id} had no trajectory in time: it has not ended as far as the broker has said, and the "
        text += (
            f"policy is at version {self.version}. If workers are idle, the staleness bound may be used up: publish a "
        )
        text += f"newer version; see `rollmq tasks --id {task_id}`"
        if unclaimed:
            shown = ", ".join(map(str, unclaimed[:5]))
            text += (
                f". {len(unclaimed)} delivered trajectories of tasks not submitted by this process wait to be taken "
                f"and use up the staleness bound ({shown}): `wait` for them or `cancel` them"
            )
        return text

    async def cancel(self, task_id: int) -> bool:
        """Withdraws a task. True if it is cancelled now, False if it was over before.

        Raises:
            Refused: `unknown_task`.
        """
        answer = await self._ask(Cancel, Settled, f"cancel of task {task_id}", tasks=(task_id,))
        code = answer.outcomes[0].code if answer.outcomes else None
        if code in (RefusalCode.ALREADY_DONE, RefusalCode.CANCELLED):
            return False
        if code is not None:
            raise Refused(code, f"cancel of task {task_id}: this trainer has no such task")
        self._core.cancelled([task_id])
        self._connection.pump()
        return True

    # --- batches --------------------------------------------------------------------------------------------------

    def batches(
        self,
        requests: Iterable[Prompt],
        workflow: str = "generate",
        data: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        deadline_s: float | None = None,
    ) -> AsyncBatches:
        """Iterates over lists of exactly `consumer_batch_size` complete groups, oldest first; keeps the pipeline full.

        Each prompt becomes a group of `gconfig.n_samples` tasks. (eta + 2) * B groups are submitted ahead. Freshness is
        checked at the moment of the yield; what has become too old is handed back and comes again. A prompt whose task
        ended without a trajectory is logged, noted in `failures`, and replaced by the next prompt. When the
        prompts end, groups that make no full batch are cancelled and counted in `left_over`. After `load_state_dict`,
        pass the same prompts from their beginning: those that had been yielded are skipped. A new call replaces an
        unfinished one.

        Unless a state was loaded, trajectories that an earlier process of this trainer left behind are cancelled.

        Args:
            requests: requests, or pairs of (request, data); may be endless.
            workflow: name of a workflow in the workers' configuration.
            data: values for the workflow of every prompt; a pair's own data is laid over it.
            timeout: seconds that one batch may take; None = an hour.
            deadline_s: seconds until a task expires; None = the broker's default.

        Raises:
            DeadlineExceeded: no full batch in time; says what is in the pipeline. One may ask for the next again.
        """
        seconds = batch_timeout(timeout)
        run = self.begin_batches(TaskOptions(workflow, deadline_s))
        return AsyncBatches(run, PromptFeed(requests, data, run), seconds)

    def begin_batches(self, options: TaskOptions) -> BatchRun:
        """The next iteration, for front ends that pull prompts themselves; an unfinished one is abandoned."""
        self._connection.check_usable()
        progress = self._progress
        if self._batches is not None:
            progress = BatchProgress(self._batches.plan.iteration + 1)
            self._batches.abandon()
        plan = BatchPlan(
            batch_size=self._settings.consumer_batch_size,
            depth=self._settings.pipeline_depth,
            iteration=progress.iteration,
            settled=Positions(progress.floor, progress.settled),
        )
        self._batches = BatchRun(
            self._connection, self._submitter, plan, options, self._run, self._failures, self._core.restored
        )
        return self._batches

    # --- weights and facts ----------------------------------------------------------------------------------------

    async def publish_weights(self, weights: DiskWeights, version: int, check: bool = True) -> None:
        """Publishes a new version; returns once the broker has it on disk and has broadcast it.

        Args:
            weights: where they are, complete.
            version: greater than the current one.
            check: look at the directory from here, unless all workers of the policy simulate their engine; False if
                only the workers can see it.

        Raises:
            ConfigError: the directory does not exist or holds no weights.
            Refused: `stale_version` if the version does not grow, `not_allowed` if this trainer is not the owner.
        """
        if not isinstance(version, int) or isinstance(version, bool) or version < 0:
            raise ConfigError(f"version is {version!r}; it must be an int >= 0, greater than {self.version}")
        source = await self._checked_source(weights) if check else weights.source(check=False)
        self._connection.check_usable()
        self._core.flush_consumed()
        await self._ask(Publish, Published, f"publish of version {version}", version=version, source=source)

    async def _checked_source(self, weights: DiskWeights) -> str:
        """The source, looked at from here unless every worker of the policy simulates its engine."""
        try:
            return weights.source(check=True)
        except ConfigError:
            status = await self.status()
            engines = {worker["engine"] for worker in status["workers"] if worker["policy"] == self._settings.policy}
            if engines != {"sim"}:
                raise
        return weights.source(check=False)

    async def status(self) -> dict[str, Any]:
        """The broker's facts: ledger, policies, workers, trainers, journal, broker."""
        report = await self._ask(Query, Report, "status", what="status")
        found: dict[str, Any] = json.loads(report.bodies[0])
        return found

    async def tasks(
        self, state: str | None = None, task_id: int | None = None, limit: int = 100
    ) -> list[dict[str, Any]]:
        """Rows about tasks that the broker knows.

        Args:
            state: only tasks in this state.
            task_id: only this task.
            limit: most rows.

        Raises:
            ConfigError: there is no such state.
        """
        if state is not None and state not in tuple(TaskState):
            raise ConfigError(f"state {state!r} must be one of {', '.join(TaskState)}")
        wanted = None if state is None else TaskState(state)
        report = await self._ask(Query, Report, "tasks", what="tasks", state=wanted, task_id=task_id or 0, limit=limit)
        found = json.loads(report.bodies[0])
        rows: list[dict[str, Any]] = found["tasks"] if isinstance(found, dict) else found
        return rows

    async def _ask(self, kind: type[Request], answer_type: type[_M], name: str, **values: Any) -> _M:
        deadline = time.monotonic() + self._settings.timeout
        return await self._connection.ask(kind, answer_type, deadline, name, **values)

    # --- the checkpoint -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What to store with the trainer's checkpoint, JSON-serialisable; take it between two batches.

        It counts everything handed out so far as used. A trainer that is restarted with it gets what was handed out
        after it again, and nothing before it.
        """
        self._core.flush_consumed()
        self._connection.pump()
        cursor, taken = self._core.inbox.position()
        return ClientState(
            trainer=self._settings.trainer,
            policy=self._settings.policy,
            run=self._run,
            version=self.version,
            epoch=self.epoch,
            cursor=cursor,
            taken=taken,
            unconfirmed=self._core.unconfirmed,
            batches=self._current_progress(),
        ).to_dict()

    def _current_progress(self) -> BatchProgress:
        if self._batches is None:
            return self._progress
        if self._batches.over:
            return BatchProgress(self._batches.plan.iteration + 1)
        return self._batches.plan.progress

    async def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes back to a stored state; right after connecting, before anything is submitted or waited for.

        The policy returns to the state's version, and what was taken after the state is delivered again.

        Raises:
            ConfigError: it is not a state of this trainer and policy, or the client is already in use.
            Refused: `conflict`, when the broker cannot go back to that version.
        """
        restored = ClientState.from_dict(state, trainer=self._settings.trainer, policy=self._settings.policy)
        self._connection.check_usable()
        if self._core.has_begun or self._core.restored or self._batches is not None:
            raise ConfigError(
                "load_state_dict must come right after connecting, before any other call that asks for work"
            )
        self._core.restore(restored.cursor, restored.taken, restored.unconfirmed)
        try:
            await self._ask(
                Resume,
                Resumed,
                f"resume at version {restored.version}",
                version=restored.version,
                cursor=restored.cursor,
                taken=restored.taken,
            )
        except Refused:
            self._core.forget_restored()
            raise
        self._run, self._progress = restored.run, restored.batches
