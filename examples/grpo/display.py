"""What the person at the terminal sees: a live table on a terminal, plain lines anywhere else, a summary at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from examples.grpo.config import PASS_REWARD, DemoConfig
from examples.grpo.history import DemoReport, StepRecord, recent_reward

_SPARKS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 48
_PLAIN_EVERY = 5


class Display(Protocol):
    """Shows the run as it goes. A context manager, so that the terminal is always restored."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def phase(self, text: str) -> None:
        """Say what is going on now."""

    def step(self, history: Sequence[StepRecord]) -> None:
        """Show the newest of the steps so far."""


def make_display(config: DemoConfig, console: Console) -> Display:
    """The live display on a terminal, plain lines elsewhere."""
    return LiveDisplay(config, console) if console.is_terminal else PlainDisplay(config, console)


class PlainDisplay:
    """One line per phase and per few steps, for pipes and log files."""

    def __init__(self, config: DemoConfig, console: Console) -> None:
        self._config = config
        self._console = console

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def phase(self, text: str) -> None:
        """Print what is going on now."""
        self._write(text)

    def step(self, history: Sequence[StepRecord]) -> None:
        """Print the first step and every fifth."""
        record = history[-1]
        if record.step == 1 or record.step % _PLAIN_EVERY == 0:
            self._write(
                f"step {record.step:3d}/{self._config.max_steps}  reward {record.reward:.3f}  "
                f"staleness {record.staleness_mean:.2f} (max {record.staleness_max})  "
                f"{record.tokens_per_second:.0f} tok/s  workers {_versions_text(record.worker_versions)}"
            )

    def _write(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class LiveDisplay:
    """A table that is redrawn in place: step, reward, staleness, speed and the version of every worker."""

    def __init__(self, config: DemoConfig, console: Console) -> None:
        self._config = config
        self._phase = "starting"
        self._history: Sequence[StepRecord] = ()
        self._live = Live(console=console, refresh_per_second=4, get_renderable=self._render)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def phase(self, text: str) -> None:
        """Show what is going on now, above the numbers."""
        self._phase = text
        self._live.refresh()

    def step(self, history: Sequence[StepRecord]) -> None:
        """Redraw with the newest step."""
        self._history = history
        self._live.refresh()

    def _render(self) -> RenderableType:
        lines: list[RenderableType] = [Text(self._phase, style="bold")]
        if self._history:
            lines.append(_progress_table(self._config, self._history))
        return Panel(Group(*lines), title="rollmq demo", title_align="left", border_style="blue")


def summary(report: DemoReport) -> RenderableType:
    """The closing table: reward, staleness, speed, ledger, and where everything lies."""
    table = Table(title="rollmq demo: summary", title_justify="left", show_header=False, min_width=72)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    tokens = sum(record.tokens for record in report.history)
    verdict = Text("PASSED", "bold green") if report.passed else Text("NOT PASSED", "bold red")
    rows: list[tuple[str, RenderableType]] = [
        ("result", verdict),
        ("engine, seed", f"{report.engine}, {report.seed}"),
        ("mean reward", _reward_text(report)),
        ("steps", f"{len(report.history)} ({len(report.history)} versions published)"),
        ("staleness", f"worst {report.worst_staleness}"),
        ("tokens trained on", f"{tokens:,}"),
        ("wall time", f"{report.seconds:.1f} s"),
        ("ledger", _ledger_text(report)),
        ("processes left", ", ".join(map(str, report.leftovers)) or "none"),
        ("plot", str(report.plot)),
        ("journal, logs", str(report.run_dir)),
    ]
    for name, value in rows:
        table.add_row(name, value)
    return table


def sparkline(values: Sequence[float]) -> str:
    """The last values, each in [0, 1], as one bar character each."""
    top = len(_SPARKS) - 1
    return "".join(_SPARKS[min(top, max(0, round(value * top)))] for value in values[-_SPARK_WIDTH:])


def _progress_table(config: DemoConfig, history: Sequence[StepRecord]) -> Table:
    record = history[-1]
    table = Table.grid(padding=(0, 2))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column()
    table.add_row("step", f"{record.step} of at most {config.max_steps}")
    table.add_row("", ProgressBar(total=config.max_steps, completed=record.step, width=_SPARK_WIDTH))
    recent = recent_reward(history, config.window)
    table.add_row("reward", f"{record.reward:.3f}   last {config.window}: {recent:.3f}   goal {PASS_REWARD:g}")
    table.add_row("", Text(sparkline([item.reward for item in history]), style="green"))
    table.add_row(
        "staleness",
        f"mean {record.staleness_mean:.2f}   max {record.staleness_max}   bound {config.max_head_offpolicyness}",
    )
    table.add_row("speed", f"{record.tokens_per_second:.0f} tok/s   {record.seconds:.2f} s per step")
    table.add_row("policy version", str(record.version + 1))
    table.add_row("worker versions", _versions_text(record.worker_versions))
    return table


def _versions_text(versions: Mapping[str, int | None]) -> str:
    return "  ".join(f"{name}={'?' if version is None else version}" for name, version in versions.items()) or "?"


def _reward_text(report: DemoReport) -> str:
    last = min(report.window, len(report.history))
    rise = f"{report.first_reward:.3f} (first step) -> {report.final_reward:.3f} (last {last} steps)"
    return f"{rise}; goal {PASS_REWARD:g}"


def _ledger_text(report: DemoReport) -> str:
    submitted = report.ledger.get("submitted", 0)
    parts = [f"{count} {name}" for name, count in report.ledger.items() if name != "submitted" and count]
    verdict = "balances" if report.ledger_balances else "DOES NOT BALANCE"
    return f"{submitted} submitted = {' + '.join(parts) or '0'}\n{verdict}"
