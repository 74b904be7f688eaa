"""Records, the report's verdict, the display on pipes and terminals, and the picture."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from examples.grpo.config import DemoConfig, DemoEngine
from examples.grpo.display import LiveDisplay, PlainDisplay, make_display, sparkline, summary
from examples.grpo.history import DemoReport, StepRecord, ledger_balances, recent_reward
from examples.grpo.plot import plot_run
from rollmq.errors import ConfigError

LEDGER = {"submitted": 30, "queued": 0, "leased": 0, "ready": 2, "delivered": 4, "consumed": 20, "cancelled": 3,
          "expired": 0, "stale": 1, "dead": 0}  # fmt: skip


def record(step: int, reward: float) -> StepRecord:
    return StepRecord(
        step=step, version=step - 1, reward=reward, staleness_mean=0.5, staleness_max=1, tokens=576, seconds=0.5,
        wait_seconds=0.2, worker_versions={"worker-0": step, "worker-1": None},
    )  # fmt: skip


def report(rewards: list[float], ledger: dict[str, int] = LEDGER, leftovers: tuple[int, ...] = ()) -> DemoReport:
    history = [record(step, reward) for step, reward in enumerate(rewards, start=1)]
    return DemoReport(
        engine="embedded", seed=0, history=history, window=2, seconds=60.0, ledger=ledger, run_dir=Path("run"),
        plot=Path("reward.png"), leftovers=leftovers,
    )  # fmt: skip


def test_a_run_that_rises_and_cleans_up_passes() -> None:
    assert report([0.06, 0.5, 0.85, 0.95]).passed


@pytest.mark.parametrize(
    "failing",
    [
        report([0.25, 0.9, 0.9]),
        report([0.06, 0.7, 0.8]),
        report([0.06, 0.9, 0.9], leftovers=(4711,)),
        report([0.06, 0.9, 0.9], ledger={**LEDGER, "submitted": 31}),
    ],
    ids=["not low at the start", "not high at the end", "a process is left", "the ledger does not balance"],
)
def test_a_run_with_one_fault_does_not_pass(failing: DemoReport) -> None:
    assert not failing.passed


def test_recent_reward_takes_the_last_steps_only() -> None:
    history = [record(1, 0.0), record(2, 0.4), record(3, 0.6)]
    assert recent_reward(history, 2) == pytest.approx(0.5)
    assert recent_reward(history, 9) == pytest.approx(1 / 3)
    assert recent_reward([], 5) == 0.0


def test_an_empty_ledger_does_not_balance() -> None:
    assert not ledger_balances({})
    assert ledger_balances(LEDGER)


def test_a_pipe_gets_plain_lines_without_control_codes() -> None:
    stream = io.StringIO()
    display = make_display(DemoConfig(), Console(file=stream, width=100))
    assert isinstance(display, PlainDisplay)
    with display:
        display.phase("training")
        display.step([record(1, 0.0625)])
        display.step([record(1, 0.0625), record(2, 0.1)])
    text = stream.getvalue()
    assert "\x1b" not in text
    assert text.splitlines() == [
        "training",
        "step   1/80  reward 0.062  staleness 0.50 (max 1)  1152 tok/s  workers worker-0=1  worker-1=?",
    ]


def test_a_terminal_gets_a_live_table_with_every_number() -> None:
    stream = io.StringIO()
    display = make_display(DemoConfig(), Console(file=stream, width=100, force_terminal=True))
    assert isinstance(display, LiveDisplay)
    with display:
        display.phase("training")
        display.step([record(1, 0.1), record(2, 0.25)])
    text = stream.getvalue()
    for part in ("2 of at most 80", "0.250", "bound 1", "1152 tok/s", "worker-0=2", "worker-1=?"):
        assert part in text


def test_the_summary_states_verdict_rewards_and_ledger() -> None:
    stream = io.StringIO()
    Console(file=stream, width=120).print(summary(report([0.06, 0.5, 0.85, 0.95])))
    text = stream.getvalue()
    for part in ("PASSED", "0.060", "0.900", "30 submitted = 2 ready + 4 delivered + 20 consumed", "balances"):
        assert part in text
    assert "NOT PASSED" not in text


def test_sparkline_spans_the_range_and_clamps() -> None:
    assert sparkline([0.0, 0.5, 1.0, 1.7]) == "▁▅██"


def test_the_plot_is_a_png_of_a_readable_size(tmp_path: Path) -> None:
    history = [record(step, step / 20) for step in range(1, 20)]
    path = plot_run(history, tmp_path / "deep" / "reward.png", title="demo", bound=1, window=5)
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    assert int.from_bytes(data[16:20], "big") >= 800


def test_a_run_without_steps_cannot_be_plotted(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no training step"):
        plot_run([], tmp_path / "reward.png", title="demo", bound=1, window=5)


def test_defaults_depend_on_the_engine() -> None:
    embedded, vllm = DemoConfig(), DemoConfig(engine=DemoEngine.VLLM)
    assert (embedded.worker_count, embedded.slots, embedded.dtype) == (2, 24, "float32")
    assert (vllm.worker_count, vllm.slots, vllm.dtype) == (1, 48, "bfloat16")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("group_size", 1),
        ("max_steps", 0),
        ("workers", 0),
        ("target_reward", 1.5),
        ("max_head_offpolicyness", -1),
        ("engine", "x"),
    ],
)
def test_settings_that_cannot_train_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field):
        DemoConfig(**{field: value})  # type: ignore[arg-type]
