from __future__ import annotations

import pytest

from broker.journal.durability import ALWAYS, NONE, DurabilityMode, SyncPolicy, parse_durability_mode
from rollmq.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        ("always", ALWAYS),
        ("none", NONE),
        ("interval=1", DurabilityMode(SyncPolicy.INTERVAL, 1)),
        (" interval=60000 ", DurabilityMode(SyncPolicy.INTERVAL, 60000)),
    ],
)
def test_a_mode_is_parsed_and_printed_alike(text: str, mode: DurabilityMode) -> None:
    assert parse_durability_mode(text) == mode
    assert str(mode) == text.strip()


@pytest.mark.parametrize(
    "text",
    ["", "allways", "always=1", "none=", "interval", "interval=", "interval=0", "interval=-5", "interval=1.5",
     "interval=60001", "interval=" + "9" * 5000, "interval=٣"],
)  # fmt: skip
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="durability mode"):
        parse_durability_mode(text)


def test_each_mode_states_its_loss_window() -> None:
    assert "nothing" in ALWAYS.loss_window
    assert "250 ms" in parse_durability_mode("interval=250").loss_window
    assert "every acknowledged record since" in NONE.loss_window
