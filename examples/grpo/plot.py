"""The picture of a run: reward and staleness over steps. matplotlib is imported only when it draws."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples.grpo.config import PASS_REWARD
from examples.grpo.history import StepRecord, recent_reward

_REWARD_COLOUR = "#1f77b4"
_STALENESS_COLOUR = "#d95f02"
_GUIDE_COLOUR = "#777777"


def plot_run(history: Sequence[StepRecord], path: Path, *, title: str, bound: int, window: int) -> Path:
    """Draw reward per step above staleness per step, as a PNG.

    Args:
        history: at least one step.
        path: the PNG; an existing file is replaced.
        title: heading of the picture.
        bound: the staleness bound, drawn as a line.
        window: steps in the running mean of the reward.

    Raises:
        ValueError: there is no step to draw.
        ImportError: matplotlib is not installed (extra `demo`).
    """
    if not history:
        raise ValueError("there is no training step to plot; look at the run's logs for why none ended")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 6.0), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1.3))
    figure.suptitle(title, fontsize=12)
    _draw_reward(upper, history, window)
    _draw_staleness(lower, history, bound)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")
    return path


def _draw_reward(axes: Any, history: Sequence[StepRecord], window: int) -> None:
    steps = [record.step for record in history]
    means = [recent_reward(history[: index + 1], window) for index in range(len(history))]
    axes.plot(steps, [r.reward for r in history], "o", markersize=3.5, alpha=0.45, color=_REWARD_COLOUR,
              label="mean of the step's samples")  # fmt: skip
    axes.plot(steps, means, linewidth=2.0, color=_REWARD_COLOUR, label=f"mean of the last {window} steps")
    axes.axhline(PASS_REWARD, linestyle="--", linewidth=1.0, color=_GUIDE_COLOUR, label=f"goal {PASS_REWARD:g}")
    axes.set_ylim(0.0, 1.03)
    axes.set_ylabel("reward (share of right characters)")
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right", frameon=False)


def _draw_staleness(axes: Any, history: Sequence[StepRecord], bound: int) -> None:
    from matplotlib.ticker import MaxNLocator

    steps = [record.step for record in history]
    axes.bar(steps, [r.staleness_mean for r in history], width=0.8, color=_STALENESS_COLOUR, alpha=0.55,
             label="mean over the step's groups")  # fmt: skip
    axes.plot(steps, [r.staleness_max for r in history], "o", markersize=3.5,
              color=_STALENESS_COLOUR, label="worst group")  # fmt: skip
    axes.axhline(bound, linestyle="--", linewidth=1.0, color=_GUIDE_COLOUR, label=f"bound {bound}")
    axes.set_ylim(0.0, max(bound, *(r.staleness_max for r in history)) + 0.75)
    axes.set_ylabel("staleness\n(versions)")
    axes.set_xlabel("training step (one published version each)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
    axes.grid(alpha=0.25, axis="y")
    axes.legend(loc="upper right", ncols=3, frameon=False, fontsize=8)
