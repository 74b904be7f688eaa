"""`python -m workers.embedded`: load the model, then listen, until SIGTERM.

Exit codes: 0 after SIGTERM or SIGINT, 1 if the server cannot start (one line on stderr says why), 2 for a wrong
command line. The port is bound after the model is loaded, so that a server that accepts connections is ready.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

from aiohttp import web

from rollmq.errors import ConfigError, EngineLaunchError
from workers.embedded.interface import Model
from workers.embedded.options import ServerOptions, parse_arguments
from workers.embedded.scheduler import Scheduler
from workers.embedded.server import Server
from workers.embedded.sim import SimModel
from workers.embedded.sim_options import is_sim, parse_sim_options

logger = logging.getLogger("workers.embedded")

SHUTDOWN_SECONDS = 2.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the server; returns the exit code."""
    options = parse_arguments(arguments)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for number in _SIGNALS:
        signal.signal(number, _exit_while_loading)
    try:
        model = make_model(options)
        asyncio.run(serve(options, model))
    except (ConfigError, EngineLaunchError) as error:
        logger.error("cannot start: %s", error)
        return 1
    return 0


def make_model(options: ServerOptions) -> Model:
    """The model that `--model` names; torch is only imported for a real one.

    Raises:
        ConfigError: a sim option, the model directory or the device is wrong.
    """
    if is_sim(options.model):
        sim_options = parse_sim_options(options.model)
        if options.max_model_len is not None:
            sim_options = dataclasses.replace(sim_options, max_len=options.max_model_len)
        return SimModel(sim_options, name=options.model)
    return _make_torch_model(options)


async def serve(options: ServerOptions, model: Model) -> None:
    """Listen until a signal, then answer what is in flight with partial output and stop.

    Raises:
        EngineLaunchError: the address cannot be bound.
    """
    stop = asyncio.Event()
    for number in _SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    # With the name, since servers that are launched with one seed must not draw the same samples.
    seed = None if options.seed is None else f"{options.seed}:{options.served_name}"
    scheduler = Scheduler(model, max_batch=options.max_batch, weight_version=options.weight_version, seed=seed)
    app = Server(scheduler, model, options.served_name).application()
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_SECONDS / 2)
    await runner.setup()
    try:
        await _listen(runner, options)
        scheduler.start()
        logger.info("serving %s as %r on %s:%d", options.model, options.served_name, options.host, options.port)
        await stop.wait()
        logger.info("signal received: aborting what is in flight and stopping")
    finally:
        stopped = await asyncio.to_thread(scheduler.close, SHUTDOWN_SECONDS)
        await runner.cleanup()
    if not stopped:
        logger.warning("a step of the model did not end within %.1f s; leaving it", SHUTDOWN_SECONDS)
        logging.shutdown()
        os._exit(0)


async def _listen(runner: web.AppRunner, options: ServerOptions) -> None:
    try:
        await web.TCPSite(runner, options.host, options.port).start()
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        raise EngineLaunchError(
            f"cannot listen on {options.host}:{options.port}: {reason}; free the port or give another --port"
        ) from error


def _make_torch_model(options: ServerOptions) -> Model:
    from workers.embedded.model_directory import check_model_directory

    check_model_directory(options.model)
    try:
        import torch

        from workers.embedded.model import load_model
    except ImportError as error:
        raise ConfigError(f"a real model needs torch and transformers ({error}); install rollmq[embedded]") from error
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    return load_model(options.model, dtype=options.dtype, device=options.device, max_model_len=options.max_model_len)


def _exit_while_loading(_number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(0)


if __name__ == "__main__":
    sys.exit(main())
