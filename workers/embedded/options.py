"""The command line of the embedded server."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from workers.embedded.sim_options import is_sim

DEFAULT_MAX_BATCH = 32
DEFAULT_SIM_MAX_BATCH = 1024


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What one server process is told; see `--help` for the meaning of each."""

    model: str
    host: str
    port: int
    served_name: str
    weight_version: str
    max_batch: int
    max_model_len: int | None
    dtype: str
    device: str
    seed: int | None
    threads: int | None


def parse_arguments(arguments: Sequence[str] | None = None) -> ServerOptions:
    """Read the command line; ends the process with code 2 and a message if it is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m workers.embedded",
        description="A small inference server for laptops and tests.",
        epilog="example: python -m workers.embedded --model sim:tpot_ms=1,tokens=32 --port 8100",
    )
    parser.add_argument("--model", required=True, help="model directory, or sim:option=value,...")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=_port, required=True, help="port to listen on")
    parser.add_argument("--served-name", default="", help="name that /info reports (default: the model)")
    parser.add_argument("--weight-version", default="0.0", help="label of the weights at start (default: %(default)s)")
    parser.add_argument(
        "--max-batch",
        type=_positive,
        help=f"most sequences that advance together (default: {DEFAULT_MAX_BATCH}, sim: {DEFAULT_SIM_MAX_BATCH})",
    )
    parser.add_argument(
        "--max-model-len", type=_positive, help="most tokens of prompt and output (default: the model's)"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="default: %(default)s")
    parser.add_argument("--device", choices=("cpu", "cuda", "auto"), default="auto", help="default: %(default)s")
    parser.add_argument(
        "--seed", type=int, help="with the served name, decides the seeds of requests without one (default: random)"
    )
    parser.add_argument("--threads", type=_positive, help="torch threads (default: torch's own)")
    values = parser.parse_args(arguments)
    default_batch = DEFAULT_SIM_MAX_BATCH if is_sim(values.model) else DEFAULT_MAX_BATCH
    return ServerOptions(
        model=values.model,
        host=values.host,
        port=values.port,
        served_name=values.served_name or values.model,
        weight_version=values.weight_version,
        max_batch=values.max_batch or default_batch,
        max_model_len=values.max_model_len,
        dtype=values.dtype,
        device=values.device,
        seed=values.seed,
        threads=values.threads,
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


def _port(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"{text} is not a port from 1 to 65535")
    return value
