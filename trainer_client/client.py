"""The blocking trainer client: the asyncio one, run in a thread of its own. Same names, same meaning."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

from rollmq.rollout import ModelRequest, Trajectory
from trainer_client.aio import AsyncRolloutClient
from trainer_client.batches import GroupFailure, Prompt
from trainer_client.portal import Portal
from trainer_client.prompts import Batches, PromptFeed, batch_timeout
from trainer_client.submission import TaskOptions
from trainer_client.weights import DiskWeights


class RolloutClient:
    """Submits prompts, takes trajectories that obey the staleness bound, and publishes weights.

    The constructor connects. Use it as a context manager or call `close`. Callable from any thread of the process that
    made it, but not from a forked child. Heartbeats go on while the trainer computes.

    Arguments and errors are those of `AsyncRolloutClient`; besides, the constructor raises `NotConnected` when there is
    no session within `timeout` seconds.
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
        self._client = AsyncRolloutClient(
            address,
            trainer=trainer,
            policy=policy,
            consumer_batch_size=consumer_batch_size,
            max_head_offpolicyness=max_head_offpolicyness,
            max_concurrent_rollouts=max_concurrent_rollouts,
            on_stale=on_stale,
            keys=keys,
            timeout=timeout,
            owner=owner,
        )
        self._portal = Portal(f"rollmq-client-{trainer}")
        try:
            self._portal.run(self._client.connect())
        except BaseException:
            self.close()
            raise

    # --- life -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Acknowledges what was taken and ends the session; idempotent. Open tasks stay with the broker."""
        if self._portal.is_running():
            self._portal.run(self._client.close())
            self._portal.stop()

    def __enter__(self) -> RolloutClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def version(self) -> int:
        """The policy's current version."""
        return self._client.version

    @property
    def epoch(self) -> int:
        """The policy's run epoch: raised each time a new process of the owner connects."""
        return self._client.epoch

    @property
    def consumer_batch_size(self) -> int:
        """B: groups in a batch."""
        return self._client.consumer_batch_size

    @property
    def failures(self) -> list[GroupFailure]:
        """Prompts of `batches` that gave no group, the last 1000, oldest first."""
        return self._client.failures

    @property
    def left_over(self) -> int:
        """Groups that the newest iteration of `batches` did not yield, since they made no full batch."""
        return self._client.left_over

    # --- tasks ----------------------------------------------------------------------------------------------------

    def submit(
        self,
        request: ModelRequest,
        workflow: str = "generate",
        data: Mapping[str, Any] | None = None,
        key: str | None = None,
        deadline_s: float | None = None,
        priority: str = "train",
    ) -> int:
        """Submits one task; see `AsyncRolloutClient.submit`."""
        return self._portal.run(self._client.submit(request, workflow, data, key, deadline_s, priority))

    def submit_many(
        self,
        requests: Iterable[Prompt],
        workflow: str = "generate",
        keys: Sequence[str] | None = None,
        deadline_s: float | None = None,
        priority: str = "train",
    ) -> list[int]:
        """Submits many tasks in few messages; see `AsyncRolloutClient.submit_many`."""
        return self._portal.run(self._client.submit_many(list(requests), workflow, keys, deadline_s, priority))

    def submit_group(
        self,
        request: ModelRequest,
        workflow: str = "generate",
        data: Mapping[str, Any] | None = None,
        key: str | None = None,
        deadline_s: float | None = None,
        priority: str = "train",
    ) -> list[int]:
        """Submits the `n_samples` tasks of one prompt; see `AsyncRolloutClient.submit_group`."""
        return self._portal.run(self._client.submit_group(request, workflow, data, key, deadline_s, priority))

    def wait(self, task_id: int, timeout: float | None = None) -> Trajectory:
        """Takes a task's trajectory when it is there; see `AsyncRolloutClient.wait`."""
        return self._portal.run(self._client.wait(task_id, timeout))

    def cancel(self, task_id: int) -> bool:
        """Withdraws a task; see `AsyncRolloutClient.cancel`."""
        return self._portal.run(self._client.cancel(task_id))

    def tasks(self, state: str | None = None, task_id: int | None = None, limit: int = 100) -> list[dict[str, Any]]:
        """Rows about tasks that the broker knows; see `AsyncRolloutClient.tasks`."""
        return self._portal.run(self._client.tasks(state, task_id, limit))

    def status(self) -> dict[str, Any]:
        """The broker's facts: ledger, policies, workers, trainers, journal, broker."""
        return self._portal.run(self._client.status())

    # --- batches --------------------------------------------------------------------------------------------------

    def batches(
        self,
        requests: Iterable[Prompt],
        workflow: str = "generate",
        data: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        deadline_s: float | None = None,
    ) -> Batches:
        """Iterates over lists of exactly `consumer_batch_size` complete groups; see `AsyncRolloutClient.batches`.

        The iterable is only ever advanced in the calling thread.
        """
        seconds, options = batch_timeout(timeout), TaskOptions(workflow, deadline_s)
        run = self._portal.call(lambda: self._client.begin_batches(options))
        return Batches(run, PromptFeed(requests, data, run), self._portal, seconds)

    # --- weights and checkpoint -----------------------------------------------------------------------------------

    def publish_weights(self, weights: DiskWeights, version: int, check: bool = True) -> None:
        """Publishes a new version; see `AsyncRolloutClient.publish_weights`."""
        self._portal.run(self._client.publish_weights(weights, version, check))

    def state_dict(self) -> dict[str, Any]:
        """What to store with the trainer's checkpoint; see `AsyncRolloutClient.state_dict`."""
        return self._portal.call(self._client.state_dict)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes back to a stored state, right after connecting; see `AsyncRolloutClient.load_state_dict`."""
        self._portal.run(self._client.load_state_dict(state))
