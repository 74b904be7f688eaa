"""Settings: files, overrides, and combinations that cannot work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollmq.config import BrokerConfig, NodeConfig, WorkerConfig, load_settings, parse_settings
from rollmq.errors import ConfigError


def test_command_line_values_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "broker.yaml"
    path.write_text("durability: none\nheartbeat_s: 1.0\n")
    config = load_settings(BrokerConfig, path, {"heartbeat_s": 0.5, "durability": None})
    assert (config.durability, config.heartbeat_s) == ("none", 0.5)


@pytest.mark.parametrize(
    ("text", "message"),
    [("- 1\n", "map"), ("a: [", "not YAML"), ("colour: red\n", "colour"), ("heartbeat_s: soon\n", "heartbeat_s")],
)
def test_a_wrong_file_is_named_with_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "broker.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        load_settings(BrokerConfig, path, {})
    assert str(path) in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no\.yaml"):
        load_settings(BrokerConfig, tmp_path / "no.yaml", {})


@pytest.mark.parametrize(
    "values",
    [
        {"bind": "tcp://0.0.0.0:5555"},
        {"bind": "tcp://*:5555"},
        {"bind": "udp://127.0.0.1:1"},
        {"dead_after_s": 3.0},
        {"lease_s": 5.0},
    ],
)
def test_broker_settings_that_cannot_work_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        parse_settings(BrokerConfig, values)


def test_a_simulated_model_needs_the_embedded_engine() -> None:
    with pytest.raises(ConfigError, match="embedded"):
        parse_settings(WorkerConfig, {"model": "sim:", "engine": "vllm"})


def test_a_node_expands_its_entries_and_refuses_equal_names() -> None:
    entry = {"count": 2, "name": "a", "settings": {"model": "sim:"}}
    configs = parse_settings(NodeConfig, {"workers": [entry]}).worker_configs()
    assert [config.name for config in configs] == ["a-0", "a-1"]
    with pytest.raises(ConfigError, match="unique"):
        parse_settings(NodeConfig, {"workers": [entry, entry]}).worker_configs()
