"""Tasks and results as opaque bodies: what sender and final receiver alone understand.

The broker never decodes a body: its sender puts a CRC-32 in front, its final receiver checks it. Token ids travel
as little-endian int32 bytes and log-probabilities as float32 bytes, since msgpack lists of numbers are slow.
"""

from __future__ import annotations

import struct
import sys
import zlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

import msgpack

from rollmq.errors import ConfigError, ProtocolError
from rollmq.rollout import EpisodeResult, GenerationHyperparameters, ModelRequest, TaskSpec, Trajectory

BODY_FORMAT = 1
_CRC = struct.Struct("<I")
_Number = TypeVar("_Number", int, float)


def encode_task_spec(spec: TaskSpec) -> bytes:
    """A task's body.

    Raises:
        ConfigError: `data` or `metadata` holds something msgpack cannot carry.
    """
    gconfig = spec.request.gconfig
    return _pack(
        {
            "format": BODY_FORMAT,
            "workflow": spec.workflow,
            "input_ids": _ints_to_bytes(spec.request.input_ids),
            "gconfig": {f.name: getattr(gconfig, f.name) for f in fields(gconfig)},
            "data": spec.data,
            "metadata": spec.request.metadata,
        },
        "the task's data or metadata",
    )


def decode_task_spec(body: bytes) -> TaskSpec:
    """The inverse of `encode_task_spec`.

    Raises:
        ProtocolError: the bytes are not a task body.
    """
    raw = _unpack(body, "task body")
    try:
        request = ModelRequest(
            input_ids=_bytes_to_ints(raw["input_ids"]),
            gconfig=GenerationHyperparameters(**raw["gconfig"]),
            metadata=raw["metadata"],
        )
        return TaskSpec(request=request, workflow=str(raw["workflow"]), data=dict(raw["data"]))
    except (KeyError, TypeError, ValueError, ConfigError) as error:
        raise ProtocolError(f"task body does not decode: {error}") from error


def encode_episode(episode: EpisodeResult, *, worker: str, attempt: int) -> bytes:
    """A result's body.

    Raises:
        ConfigError: metrics or metadata hold something msgpack cannot carry.
    """
    return _pack(
        {
            "format": BODY_FORMAT,
            "input_ids": _ints_to_bytes(episode.input_ids),
            "output_ids": _ints_to_bytes(episode.output_ids),
            "output_logprobs": _little_endian(array("f", episode.output_logprobs)).tobytes(),
            "version_spans": [list(span) for span in episode.version_spans],
            "stop_reason": episode.stop_reason,
            "reward": episode.reward,
            "loss_mask": bytes(episode.loss_mask),
            "metrics": episode.metrics,
            "metadata": episode.metadata,
            "worker": worker,
            "attempt": attempt,
        },
        "the episode's metrics or metadata",
    )


def decode_trajectory(
    body: bytes, *, task_id: int, group: int = 0, member: int = 0, sequence: int = 0, stale: bool = False
) -> Trajectory:
    """The trajectory in a result's body, with what the broker's meta says of the task.

    Raises:
        ProtocolError: the bytes are not a result body.
    """
    raw = _unpack(body, "result body")
    try:
        episode = EpisodeResult(
            input_ids=_bytes_to_ints(raw["input_ids"]),
            output_ids=_bytes_to_ints(raw["output_ids"]),
            output_logprobs=_bytes_to_floats(raw["output_logprobs"]),
            version_spans=[(int(v), int(s), int(e)) for v, s, e in raw["version_spans"]],
            stop_reason=str(raw["stop_reason"]),
            reward=raw["reward"],
            loss_mask=list(raw["loss_mask"]),
            metrics=dict(raw["metrics"]),
            metadata=dict(raw["metadata"]),
        )
        worker, attempt = str(raw["worker"]), int(raw["attempt"])
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"result body does not decode: {error}") from error
    problem = episode.problem()
    if problem is not None:
        raise ProtocolError(f"result body of task {task_id} is inconsistent: {problem}")
    return Trajectory(
        task_id=task_id,
        input_ids=episode.input_ids,
        output_ids=episode.output_ids,
        output_logprobs=episode.output_logprobs,
        version_spans=episode.version_spans,
        head_version=episode.head_version,
        tail_version=episode.tail_version,
        stop_reason=episode.stop_reason,
        reward=episode.reward,
        loss_mask=episode.loss_mask,
        worker=worker,
        attempts=attempt,
        metrics=episode.metrics,
        metadata=episode.metadata,
        stale=stale,
        group=group,
        member=member,
        sequence=sequence,
    )


def _pack(value: Mapping[str, Any], what: str) -> bytes:
    try:
        content: bytes = msgpack.packb(value, use_bin_type=True)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"{what} cannot be sent: {error}; use only None, bool, int, float, str, bytes, list and dict"
        ) from error
    return _CRC.pack(zlib.crc32(content)) + content


def _unpack(body: bytes, what: str) -> dict[str, Any]:
    content = body[_CRC.size :]
    if len(body) < _CRC.size or _CRC.unpack_from(body)[0] != zlib.crc32(content):
        raise ProtocolError(f"{what} of {len(body)} bytes fails its checksum")
    try:
        raw = msgpack.unpackb(content, raw=False, strict_map_key=True, ext_hook=_refuse_ext)
    except (ValueError, OverflowError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise ProtocolError(f"{what} of {len(body)} bytes is not msgpack: {error}") from error
    if not isinstance(raw, dict) or raw.get("format") != BODY_FORMAT:
        raise ProtocolError(f"{what} of {len(body)} bytes is not of format {BODY_FORMAT}")
    return raw


def _refuse_ext(code: int, data: bytes) -> object:
    raise ValueError(f"extension type {code} is not allowed")


def _ints_to_bytes(values: Sequence[int]) -> bytes:
    return _little_endian(array("i", values)).tobytes()


def _bytes_to_ints(data: bytes) -> list[int]:
    values = array("i")
    values.frombytes(data)
    return _little_endian(values).tolist()


def _bytes_to_floats(data: bytes) -> list[float]:
    values = array("f")
    values.frombytes(data)
    return _little_endian(values).tolist()


def _little_endian(values: array[_Number]) -> array[_Number]:
    if sys.byteorder == "big":
        values.byteswap()
    return values
