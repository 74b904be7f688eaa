"""Reading `sim:` model names."""

from __future__ import annotations

import pytest

from rollmq.errors import ConfigError
from workers.embedded.sim_options import SimOptions, is_sim, parse_sim_options


def test_options_are_all_optional() -> None:
    assert parse_sim_options("sim:") == SimOptions()


def test_options_are_read() -> None:
    options = parse_sim_options("sim:tpot_ms=0.5,tokens=8,vocab=100,seed=-3,fail=0.1,hang=0.2,crash=1,max_len=99")
    assert options == SimOptions(tpot_ms=0.5, tokens=8, vocab=100, seed=-3, fail=0.1, hang=0.2, crash=1.0, max_len=99)


def test_only_the_prefix_makes_a_sim() -> None:
    assert is_sim("sim:tokens=1")
    assert not is_sim("./sim")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("sim:speed=1", "unknown sim option 'speed'"),
        ("sim:tokens", "sim option tokens=''"),
        ("sim:tokens=x", "sim option tokens='x'.*not an int"),
        ("sim:tokens=0", "sim option tokens=0.*at least 1"),
        ("sim:vocab=0", "sim option vocab=0.*at least 1"),
        ("sim:tpot_ms=-1", "sim option tpot_ms=-1"),
        ("sim:tpot_ms=nan", "sim option tpot_ms=nan"),
        ("sim:fail=1.5", "sim option fail=1.5.*probability"),
        ("sim:hang=nan", "sim option hang=nan.*probability"),
        ("sim:tokens=1,tokens=2", "'tokens' is given twice"),
    ],
)
def test_bad_option_is_named(model: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_sim_options(model)
