from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from workers.backends.embedded import EmbeddedBackend
from workers.engine import RemoteInfEngine
from workers.http_client import EngineHttp, HttpRequest
from workers.launch_spec import EngineInstallation, LaunchSpec

SCRIPTED_SERVER = Path(__file__).with_name("scripted_server.py")


class ScriptBackend(EmbeddedBackend):
    """The embedded backend with another program in place of the server."""

    def __init__(self, script: Path | str) -> None:
        self._script = script

    def launch_command(
        self, spec: LaunchSpec, installation: EngineInstallation, *, port: int, served_name: str
    ) -> tuple[str, ...]:
        code = (str(self._script),) if isinstance(self._script, Path) else ("-c", self._script)
        return (sys.executable, *code, "--port", str(port), "--served-name", served_name)

    def check_launch(self, spec: LaunchSpec, installation: EngineInstallation) -> None:
        return None


class Scripted:
    """A started engine over the scripted server, and the means to tell that server what to do."""

    def __init__(self, engine: RemoteInfEngine) -> None:
        self.engine = engine
        self.control = EngineHttp(engine.describe()["url"], "scripted")

    async def script(self, **what: Any) -> None:
        await self.control.call(HttpRequest("/script", what), timeout=10)

    async def log(self) -> dict[str, Any]:
        return await self.control.call(HttpRequest("/script", method="GET"), timeout=10)

    async def requests(self, path: str = "/generate") -> list[dict[str, Any]]:
        return [entry["body"] for entry in (await self.log())["seen"] if entry["path"] == path]

    async def until_hanging(self, count: int = 1) -> None:
        async with asyncio.timeout(20):
            while len((await self.log())["hanging"]) != count:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@pytest.fixture
def make_spec(tmp_path: Path) -> Callable[..., LaunchSpec]:
    def make(**changes: Any) -> LaunchSpec:
        values: dict[str, Any] = {
            "name": "w0",
            "model": "sim:",
            "log_dir": tmp_path / "logs",
            "startup_timeout_s": 60.0,
        }
        return LaunchSpec(**{**values, **changes})

    return make


@pytest.fixture
async def scripted(make_spec: Callable[..., LaunchSpec]) -> AsyncIterator[Scripted]:
    engine = RemoteInfEngine(ScriptBackend(SCRIPTED_SERVER), make_spec(shutdown_grace_s=2.0))
    await engine.start()
    server = Scripted(engine)
    try:
        yield server
    finally:
        await server.control.close()
        await engine.close()
