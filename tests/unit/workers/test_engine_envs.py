"""Engine environments, with recipes of a module that needs no download."""

from __future__ import annotations

import fcntl
import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from rollmq.cli.engines import engines
from rollmq.errors import ConfigError, EngineLaunchError
from workers import engine_envs
from workers.engine_envs import EngineRecipe


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROLLMQ_CACHE", str(tmp_path))
    recipes = {
        "toy": EngineRecipe("toy", "toyengine", ("toy==1.5",), (), "toy"),
        "toy-cpu": EngineRecipe("toy-cpu", "toyengine", ("toy-cpu==1.5",), (), "toy"),
    }
    monkeypatch.setattr(engine_envs, "RECIPES", recipes)
    return tmp_path / "engines"


def fake_environment(folder: Path, version: str = "1.5") -> None:
    """An interpreter that finds a module `toy`."""
    (folder / "bin").mkdir(parents=True)
    (folder / "toy.py").write_text(f"__version__ = {version!r}\n")
    python = folder / "bin" / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={folder} exec {sys.executable} "$@"\n')
    python.chmod(0o755)


def test_a_working_environment_is_checked_and_recorded(cache: Path) -> None:
    fake_environment(cache / "toy-cpu")
    lines: list[str] = []
    environment = engine_envs.install("toy-cpu", lines.append)
    assert (environment.version, environment.engine) == ("1.5", "toyengine")
    assert engine_envs.installed() == [environment]
    assert engine_envs.python_for("toyengine") == cache / "toy-cpu" / "bin" / "python"
    assert lines == ["checking that toy can be imported"]


def test_an_environment_without_its_record_does_not_count(cache: Path) -> None:
    fake_environment(cache / "toy")
    assert engine_envs.installed() == []
    with pytest.raises(ConfigError, match="rollmq engines install toy-cpu"):
        engine_envs.python_for("toyengine")


def test_a_record_whose_interpreter_is_gone_does_not_count(cache: Path) -> None:
    fake_environment(cache / "toy")
    engine_envs.install("toy")
    (cache / "toy" / "bin" / "python").unlink()
    assert engine_envs.installed() == []


def test_the_first_recipe_is_preferred(cache: Path) -> None:
    for name in ("toy-cpu", "toy"):
        fake_environment(cache / name)
        engine_envs.install(name)
    assert engine_envs.python_for("toyengine").parent.parent.name == "toy"


def test_a_failed_step_names_the_log_and_leaves_no_record(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(EngineLaunchError, match=r"(?s)pip.*exit code.*toy\.log.*No matching distribution"):
        engine_envs.install("toy")
    assert engine_envs.installed() == []
    assert not (cache / "toy" / "engine.json").exists()


def test_two_installs_of_one_engine_exclude_each_other(cache: Path) -> None:
    cache.mkdir(parents=True)
    with (cache / "toy.lock").open("a") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another process is installing toy"):
            engine_envs.install("toy")


def test_unknown_names_are_refused(cache: Path) -> None:
    with pytest.raises(ConfigError, match=r"no engine named 'nope'.*toy"):
        engine_envs.install("nope")
    with pytest.raises(ConfigError, match="unknown"):
        engine_envs.python_for("nope")
    assert engine_envs.python_for("embedded") == Path(sys.executable)


def test_command_line(cache: Path) -> None:
    runner = CliRunner()
    assert "none installed" in runner.invoke(engines, ["list"]).output
    fake_environment(cache / "toy")
    assert runner.invoke(engines, ["install", "toy"]).exit_code == 0
    (row,) = json.loads(runner.invoke(engines, ["list", "--json"]).output)
    assert row["name"] == "toy" and row["version"] == "1.5"
    assert "toyengine" in runner.invoke(engines, ["list"]).output
    assert runner.invoke(engines, ["install", "nope"]).exit_code == 2
