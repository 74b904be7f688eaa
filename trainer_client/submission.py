"""Requests of the user as SUBMIT items: checks, bodies, idempotency keys, and pieces that fit a message. No I/O."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rollmq.bodies import encode_task_spec
from rollmq.errors import ConfigError
from rollmq.messages import Priority, SubmitItem
from rollmq.rollout import ModelRequest, TaskSpec

ITEMS_PER_SUBMIT = 100
"""An outcome is at most 34 bytes of the answer's head, and a head holds 4096."""
BYTES_PER_SUBMIT = 8 * 1024 * 1024
KEY_LIMIT = 240
"""Shorter than the wire's limit, since members of a group get a suffix."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One task ready to be submitted."""

    item: SubmitItem
    body: bytes


@dataclass(frozen=True, slots=True)
class TaskOptions:
    """What applies to all tasks of one call.

    Attributes:
        workflow: name of a workflow in the workers' configuration.
        deadline_s: seconds until a task expires; None = the broker's default.
        priority: `train` or `eval`.
    """

    workflow: str = "generate"
    deadline_s: float | None = None
    priority: str = "train"

    def checked(self) -> TaskOptions:
        """Itself.

        Raises:
            ConfigError: a value is wrong.
        """
        if not self.workflow or len(self.workflow) > 128:
            raise ConfigError(f"workflow {self.workflow!r:.60} must be a name of 1 to 128 characters")
        if self.deadline_s is not None and not (math.isfinite(self.deadline_s) and self.deadline_s > 0):
            raise ConfigError(f"deadline_s is {self.deadline_s!r}; it must be a number of seconds > 0, or None")
        if self.priority not in tuple(Priority):
            raise ConfigError(f"priority {self.priority!r} must be one of {', '.join(Priority)}")
        return self


def single(request: ModelRequest, data: Mapping[str, Any] | None, key: str, options: TaskOptions) -> Entry:
    """One task.

    Raises:
        ConfigError: it asks for several samples, the key is too long, or the data cannot be sent.
    """
    samples = request.gconfig.n_samples
    if samples != 1:
        raise ConfigError(f"gconfig.n_samples is {samples}; `submit` makes one task: use `submit_group` or `batches`")
    return _entry(request, data, SubmitItem(key=_checked_key(key)), options.checked())


def group(request: ModelRequest, data: Mapping[str, Any] | None, key: str, options: TaskOptions) -> list[Entry]:
    """The `n_samples` tasks of one prompt. A seed is raised by one per member, or all samples would be the same.

    Raises:
        ConfigError: the key is too long or the data cannot be sent.
    """
    _checked_key(key)
    options.checked()
    size = request.gconfig.n_samples
    return [
        _entry(
            _member_request(request, member),
            data,
            SubmitItem(key=f"{key}/{member}", group=key, member=member, size=size),
            options,
        )
        for member in range(size)
    ]


def _member_request(request: ModelRequest, member: int) -> ModelRequest:
    seed = request.gconfig.seed
    changed = request.gconfig.new(n_samples=1, seed=None if seed is None else (seed + member) % 2**63)
    return replace(request, gconfig=changed)


def _entry(request: ModelRequest, data: Mapping[str, Any] | None, item: SubmitItem, options: TaskOptions) -> Entry:
    body = encode_task_spec(TaskSpec(request, options.workflow, dict(data or {})))
    meta = replace(
        item,
        deadline_s=float(options.deadline_s or 0.0),
        priority=Priority(options.priority),
        cost=request.gconfig.max_new_tokens,
    )
    return Entry(meta, body)


def _checked_key(key: str) -> str:
    if not key or len(key) > KEY_LIMIT:
        raise ConfigError(f"key {key!r:.60} must have 1 to {KEY_LIMIT} characters; it has {len(key)}")
    return key


def check_sizes(entries: list[Entry], max_body_bytes: int) -> None:
    """Refuses here what the broker would refuse.

    Raises:
        ConfigError: a body is over the broker's limit.
    """
    for entry in entries:
        if len(entry.body) > max_body_bytes:
            raise ConfigError(
                f"task {entry.item.key} has a body of {len(entry.body)} bytes, over the broker's {max_body_bytes}; "
                "shorten its prompt, data or metadata"
            )


def pieces(entries: list[Entry], max_items: int = ITEMS_PER_SUBMIT) -> Iterator[list[Entry]]:
    """The entries in order, in pieces that one SUBMIT may carry."""
    most = max(1, min(max_items, ITEMS_PER_SUBMIT))
    piece: list[Entry] = []
    size = 0
    for entry in entries:
        if piece and (len(piece) == most or size + len(entry.body) > BYTES_PER_SUBMIT):
            yield piece
            piece, size = [], 0
        piece.append(entry)
        size += len(entry.body)
    if piece:
        yield piece
