"""Reward functions by name, each call in a process of its own pool, with a timeout that is an error and not a zero.

A reward is a function `reward(*, prompt_ids: list[int], completion_ids: list[int], data: dict) -> float`. It may hang,
crash or block: its process is killed, its task fails, the others go on. The processes die with the worker.
"""

from __future__ import annotations

import asyncio
import logging
import math
import multiprocessing
import numbers
import os
import signal
from collections.abc import Mapping
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from pebble import ProcessExpired, ProcessPool

from rollmq.config import WorkerConfig
from rollmq.errors import ConfigError, RewardError
from workers.imports import load_object
from workers.parent_death import die_with_parent

log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 5.0
ERROR_LIMIT = 200


class RewardPool:
    """Runs the rewards of one worker. The processes start with the first call.

    Args:
        functions: `module:function` by name.
        processes: how many calls run at once.
        timeout_s: how long one call may take once it runs.
    """

    def __init__(self, functions: Mapping[str, str], processes: int = 1, timeout_s: float = 15.0) -> None:
        self._functions = dict(functions)
        self._processes = processes
        self._timeout_s = timeout_s
        self._pool: Any = None
        self._closed = False

    @classmethod
    def from_config(cls, config: WorkerConfig) -> RewardPool:
        """The pool that a worker's settings describe."""
        return cls(config.rewards, config.reward_processes, config.reward_timeout_s)

    @property
    def names(self) -> tuple[str, ...]:
        """The rewards there are, sorted."""
        return tuple(sorted(self._functions))

    async def call(self, name: str, *, prompt_ids: list[int], completion_ids: list[int], data: dict[str, Any]) -> float:
        """The value of a reward, a finite number.

        Args:
            name: as configured.
            prompt_ids, completion_ids: token ids.
            data: the task's data.

        Raises:
            RewardError: unknown name, or it raised, hung, crashed or returned no finite number.
        """
        if name not in self._functions:
            known = ", ".join(self.names) or "none"
            raise RewardError(f"reward {name!r} is not configured at this worker; configured are: {known}")
        arguments = {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "data": data}
        try:
            value, problem = await self._run(name, arguments)
        except BrokenProcessPool:
            # Idle processes were killed from outside. That says nothing about this call.
            value, problem = await self._run(name, arguments)
        if problem:
            raise RewardError(f"reward {name!r} {problem}")
        return value

    async def close(self) -> None:
        """Kills what still runs."""
        self._closed = True
        pool, self._pool = self._pool, None
        if pool is not None:
            await asyncio.to_thread(_stop, pool)

    async def _run(self, name: str, arguments: dict[str, Any]) -> tuple[float, str]:
        future = self._ready_pool().schedule(
            _evaluate, args=(self._functions[name], name, arguments), timeout=self._timeout_s
        )
        try:
            result: tuple[float, str] = await asyncio.wrap_future(future)
        except TimeoutError as error:
            raise RewardError(
                f"reward {name!r} did not return within {self._timeout_s:g} s; its process was killed "
                "(setting reward_timeout_s)"
            ) from error
        except BrokenProcessPool:
            raise
        except ProcessExpired as error:
            raise RewardError(f"reward {name!r}: its process died with exit code {error.exitcode}") from error
        return result

    def _ready_pool(self) -> Any:
        if self._closed:
            raise RewardError("the worker is closing; no reward can be computed any more")
        if self._pool is None or not self._pool.active:
            self._pool = ProcessPool(
                max_workers=self._processes,
                initializer=_prepare,
                initargs=(os.getpid(),),
                context=multiprocessing.get_context("spawn"),
            )
        return self._pool


def check_rewards(functions: Mapping[str, str]) -> None:
    """Imports every configured reward.

    Raises:
        ConfigError: one cannot be imported or called.
    """
    for name, path in functions.items():
        if not callable(load_object(path, f"reward {name!r}")):
            raise ConfigError(f"reward {name!r}: {path} is not callable")


def _stop(pool: Any) -> None:
    pool.stop()
    try:
        pool.join(timeout=STOP_TIMEOUT_S)
    except TimeoutError:
        log.error("reward processes did not end within %g s; they end with this process", STOP_TIMEOUT_S)


# --- in the reward's process --------------------------------------------------------------------------------------


def _prepare(owner: int) -> None:
    """A terminal's Ctrl-C is for the worker; its death is for this process as well."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(owner)


def _evaluate(path: str, name: str, arguments: dict[str, Any]) -> tuple[float, str]:
    """(value, "") or (0, what went wrong). Texts only: an exception of the user's may not survive the way back."""
    try:
        value = load_object(path, f"reward {name!r}")(**arguments)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - it is the user's code, and any failure is reported
        return 0.0, f"raised {type(error).__name__}: {str(error)[:ERROR_LIMIT]}"
    if not isinstance(value, numbers.Real):
        return 0.0, f"returned {repr(value)[:ERROR_LIMIT]} of type {type(value).__name__}, not a number"
    if not math.isfinite(value):
        return 0.0, f"returned {float(value)}, not a finite number"
    return float(value), ""
