"""`rollmq demo`: a whole asynchronous RL run on this machine, from random weights."""

from __future__ import annotations

from pathlib import Path

import click

from rollmq.cli.output import FAILED, reports_errors


@click.command("demo")
@click.option("--engine", type=click.Choice(["embedded", "vllm"]), default="embedded", show_default=True)
@click.option("--python", type=click.Path(path_type=Path), help="Python that has the engine.")
@click.option("--seed", type=int, default=0, show_default=True, help="Decides weights and prompts.")
@click.option("--steps", type=int, help="Most optimiser steps.")
@click.option("--output", type=click.Path(path_type=Path), default=Path("demo-run"), show_default=True)
@click.option("--plot", type=click.Path(path_type=Path), default=Path("reward.png"), show_default=True)
@reports_errors
def demo(engine: str, python: Path | None, seed: int, steps: int | None, output: Path, plot: Path) -> int:
    """Train a tiny language model from scratch with GRPO, asynchronously, through a broker and real workers.

    Ends with a plot, a summary and the balanced ledger; everything it started is gone. Exit code 1 if the reward did
    not rise as it must.

    Example: rollmq demo --engine vllm
    """
    import logging

    from examples.grpo.config import DemoConfig, DemoEngine
    from examples.grpo.run import run_demo

    logging.basicConfig(level=logging.WARNING)
    config = DemoConfig(engine=DemoEngine(engine), python=python, seed=seed, output=output, plot=plot)
    if steps is not None:
        from dataclasses import replace

        config = replace(config, max_steps=steps)
    return 0 if run_demo(config).passed else FAILED
