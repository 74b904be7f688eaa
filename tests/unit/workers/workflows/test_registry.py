"""Workflows by name."""

from __future__ import annotations

import pytest

from rollmq.errors import ConfigError, WorkflowError
from rollmq.rollout import EpisodeResult, TaskSpec
from workers.workflows.base import EpisodeContext
from workers.workflows.registry import WorkflowRegistry
from workers.workflows.single_turn import SingleTurnWorkflow


class Mine:
    async def run(self, context: EpisodeContext, spec: TaskSpec) -> EpisodeResult:
        raise NotImplementedError


class Blocking:
    def run(self, context: EpisodeContext, spec: TaskSpec) -> None:
        return None


class NeedsArguments(Mine):
    def __init__(self, url: str) -> None:
        self.url = url


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "my_workflows", sys.modules[__name__])


def test_generate_is_built_in() -> None:
    assert isinstance(WorkflowRegistry({}).get("generate"), SingleTurnWorkflow)


def test_configured_workflows_are_found_by_name() -> None:
    registry = WorkflowRegistry({"mine": "my_workflows:Mine"})
    assert isinstance(registry.get("mine"), Mine)
    assert registry.names == ("generate", "mine")


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(WorkflowError, match=r"'os:system' is not configured.*generate, mine"):
        WorkflowRegistry({"mine": "my_workflows:Mine"}).get("os:system")


@pytest.mark.parametrize(
    ("name", "path", "text"),
    [
        ("generate", "my_workflows:Mine", "built in"),
        ("mine", "my_workflows:Blocking", "no `async def run"),
        ("mine", "my_workflows:NeedsArguments", "raised TypeError"),
        ("mine", "my_workflows:Absent", "has no Absent"),
        ("mine", "no_such_module_here:X", "cannot be imported"),
    ],
)
def test_wrong_settings_are_refused(name: str, path: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        WorkflowRegistry({name: path})
