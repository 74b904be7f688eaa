"""Workflows by name: the built-in ones, and those of the worker's own configuration."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

from rollmq.errors import ConfigError, WorkflowError
from workers.imports import load_object
from workers.workflows.base import Workflow
from workers.workflows.single_turn import SingleTurnWorkflow

BUILT_IN: Mapping[str, Callable[[], Workflow]] = {"generate": SingleTurnWorkflow}


class WorkflowRegistry:
    """The workflows of one worker.

    Args:
        configured: `module:Class` by name; the class is made without arguments, once.

    Raises:
        ConfigError: one cannot be imported or made, is not a workflow, or takes a built-in name.
    """

    def __init__(self, configured: Mapping[str, str]) -> None:
        self._workflows: dict[str, Workflow] = {name: make() for name, make in BUILT_IN.items()}
        for name, path in configured.items():
            if name in BUILT_IN:
                raise ConfigError(f"workflow {name!r} is built in; give {path} another name")
            self._workflows[name] = _make(name, path)

    @property
    def names(self) -> tuple[str, ...]:
        """All names, sorted."""
        return tuple(sorted(self._workflows))

    def get(self, name: str) -> Workflow:
        """The workflow of that name.

        Raises:
            WorkflowError: there is none; the message lists those there are.
        """
        try:
            return self._workflows[name]
        except KeyError:
            raise WorkflowError(
                f"workflow {name!r} is not configured at this worker; configured are: {', '.join(self.names)}"
            ) from None


def _make(name: str, path: str) -> Workflow:
    factory = load_object(path, f"workflow {name!r}")
    try:
        workflow = factory()
    except Exception as error:
        raise ConfigError(f"workflow {name!r}: {path}() raised {type(error).__name__}: {error}") from error
    if not inspect.iscoroutinefunction(getattr(workflow, "run", None)):
        raise ConfigError(f"workflow {name!r}: {path} has no `async def run(self, context, spec)`")
    return workflow  # type: ignore[no-any-return]
