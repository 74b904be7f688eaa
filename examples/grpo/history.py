"""What a run recorded, step by step, and how it ended; the shared language of display, plot and report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from examples.grpo.config import PASS_REWARD, START_REWARD_BELOW

TERMINAL_AND_OPEN_STATES = (
    "queued",
    "leased",
    "ready",
    "delivered",
    "consumed",
    "cancelled",
    "expired",
    "stale",
    "dead",
)
"""The counters whose sum is `submitted` in a ledger that balances."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One training step.

    Attributes:
        step: from 1.
        version: version of the weights that took the batch (those before this step's update).
        reward: mean reward of the batch, in [0, 1].
        staleness_mean, staleness_max: consumer version minus head version, over the groups of the batch.
        tokens: generated tokens trained on.
        seconds: wall time since the step before, waiting for the batch included.
        wait_seconds: the part of it spent waiting for the batch.
        loss, grad_norm, ratio_max, clipped_fraction: as in `learner.StepReport`.
        worker_versions: version of each worker's weights when the step ended; None is unknown.
    """

    step: int
    version: int
    reward: float
    staleness_mean: float
    staleness_max: int
    tokens: int
    seconds: float
    wait_seconds: float
    loss: float = 0.0
    grad_norm: float = 0.0
    ratio_max: float = 1.0
    clipped_fraction: float = 0.0
    worker_versions: Mapping[str, int | None] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        """Generated and trained tokens per second of wall time."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class DemoReport:
    """How a run of the demo ended.

    Attributes:
        engine: name of the inference server.
        seed: of the run.
        history: every step, in order.
        window: number of last steps in `final_reward`.
        seconds: wall time of the whole run, start and end of all processes included.
        ledger: the broker's task counters at the end, `submitted` among them.
        run_dir: folder of journal, logs and the last checkpoints.
        plot: the picture of the run.
        leftovers: processes of the run that could not be ended; empty when all is well.
    """

    engine: str
    seed: int
    history: Sequence[StepRecord]
    window: int
    seconds: float
    ledger: Mapping[str, int]
    run_dir: Path
    plot: Path
    leftovers: Sequence[int] = ()

    @property
    def first_reward(self) -> float:
        """Mean reward of the first step: samples of the untrained model."""
        return self.history[0].reward

    @property
    def final_reward(self) -> float:
        """Mean reward of the last `window` steps."""
        return recent_reward(self.history, self.window)

    @property
    def worst_staleness(self) -> int:
        """The largest staleness of any group trained on."""
        return max(record.staleness_max for record in self.history)

    @property
    def ledger_balances(self) -> bool:
        """Whether every submitted task is in exactly one counted state."""
        return ledger_balances(self.ledger)

    @property
    def passed(self) -> bool:
        """Whether the reward rose from below 0.2 to at least 0.8, the ledger balances and nothing is left."""
        learned = self.first_reward < START_REWARD_BELOW and self.final_reward >= PASS_REWARD
        return learned and self.ledger_balances and not self.leftovers


def recent_reward(history: Sequence[StepRecord], window: int) -> float:
    """Mean reward of the last `window` steps, or of all when there are fewer; 0.0 when there is none."""
    recent = history[-window:]
    return sum(record.reward for record in recent) / len(recent) if recent else 0.0


def ledger_balances(ledger: Mapping[str, int]) -> bool:
    """Whether `submitted` equals the sum of all states."""
    return "submitted" in ledger and ledger["submitted"] == sum(
        ledger.get(state, 0) for state in TERMINAL_AND_OPEN_STATES
    )
