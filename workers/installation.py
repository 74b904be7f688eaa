"""Finds out what engine an interpreter has, before anything is started with it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from pathlib import Path

from rollmq.errors import ConfigError
from workers.http_client import cut
from workers.launch_spec import EngineInstallation, EngineRequirement

PROBE_DEADLINE_S = 30.0

_PROBE = """
import importlib.metadata, importlib.util, json, sys
modules, distributions = json.loads(sys.argv[1])
def found(name):
    try: return importlib.util.find_spec(name) is not None
    except ImportError: return False
def version(name):
    try: return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError: return None
print(json.dumps([[m for m in modules if not found(m)], {d: version(d) for d in distributions}]))
"""


async def probe(engine: str, python: Path, requirement: EngineRequirement) -> EngineInstallation:
    """Asks an interpreter, without importing the engine, what it has; some 50 ms.

    Raises:
        ConfigError: it is none, or lacks what the engine needs.
    """
    if not _is_executable(python):
        raise ConfigError(f"python interpreter {python} does not exist or is not executable; see `rollmq engines list`")
    wanted = json.dumps([requirement.modules, requirement.distributions])
    try:
        process = await asyncio.create_subprocess_exec(
            str(python), "-c", _PROBE, wanted, env=base_environment(python),
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
    except OSError as error:
        raise ConfigError(f"{python} cannot be run: {error.strerror}; is it a python interpreter?") from error
    try:
        output, errors = await asyncio.wait_for(process.communicate(), PROBE_DEADLINE_S)
    except TimeoutError as error:
        raise ConfigError(f"{python} did not answer within {PROBE_DEADLINE_S:.0f} s; is it a python?") from error
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    try:
        missing, versions = json.loads(output)
    except ValueError:
        raise ConfigError(
            f"{python} is not a usable python interpreter (exit code {process.returncode}): "
            f"{cut(errors.decode('utf-8', 'replace'))}"
        ) from None
    if missing:
        raise ConfigError(
            f"engine {engine} needs {', '.join(missing)}, which {python} does not have; "
            f"install it ({requirement.install_hint}) or name another interpreter with --python"
        )
    distribution = next((name for name, version in versions.items() if version), "")
    return EngineInstallation(python, distribution, versions.get(distribution) or "")


def base_environment(python: Path) -> dict[str, str]:
    """Our own environment; without what would lead another interpreter to our packages."""
    environment = dict(os.environ)
    if python.absolute() != Path(sys.executable).absolute():
        for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
            environment.pop(name, None)
        environment["PATH"] = f"{python.absolute().parent}{os.pathsep}{environment.get('PATH', '')}"
    return environment


def _is_executable(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)
