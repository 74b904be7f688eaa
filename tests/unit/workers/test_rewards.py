"""RewardPool with real processes: values, faults, time limits, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollmq.errors import ConfigError, RewardError
from workers.rewards import RewardPool, check_rewards

HERE = Path(__file__).parent
NAMES = ("length", "correct", "hang", "crash", "fail", "leave", "give")
FUNCTIONS = {name: f"reward_functions:{name}" for name in NAMES}


@pytest.fixture
async def pool(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RewardPool]:
    monkeypatch.syspath_prepend(str(HERE))
    made = RewardPool(FUNCTIONS, processes=1, timeout_s=2.0)
    yield made
    await made.close()


async def call(pool: RewardPool, name: str, **data: object) -> float:
    async with asyncio.timeout(60):
        return await pool.call(name, prompt_ids=[1, 2], completion_ids=[1, 2], data=data)


async def until_dead(pid: int) -> None:
    async with asyncio.timeout(10):
        while Path(f"/proc/{pid}").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text():  # noqa: ASYNC110, ASYNC240
            await asyncio.sleep(0.02)


async def test_values_come_back_as_floats(pool: RewardPool) -> None:
    assert await call(pool, "length", bonus=0.5) == 2.5
    value = await call(pool, "correct")
    assert value == 1.0 and type(value) is float


async def test_an_unknown_name_lists_the_known_ones(pool: RewardPool) -> None:
    with pytest.raises(RewardError, match=r"'other'.*correct, crash.*length"):
        await call(pool, "other")


@pytest.mark.parametrize(
    ("name", "data", "text"),
    [
        ("fail", {}, "'fail' raised Unpicklable: 1 and 2"),
        ("leave", {}, "'leave' raised SystemExit: 4"),
        ("length", {"bonus": "x"}, "'length' raised TypeError"),
        ("give", {"what": "nan"}, "returned nan, not a finite"),
        ("give", {"what": "inf"}, "returned inf, not a finite"),
        ("give", {"what": "none"}, "None of type NoneType, not a number"),
        ("give", {"what": "text"}, "of type str, not a number"),
        ("give", {"what": "list"}, "of type list, not a number"),
    ],
)
async def test_a_failing_reward_is_an_error_that_names_it(
    pool: RewardPool, name: str, data: dict[str, object], text: str
) -> None:
    with pytest.raises(RewardError, match=text):
        await call(pool, name, **data)


async def test_a_hanging_reward_is_killed_named_and_no_zero(pool: RewardPool, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    with pytest.raises(RewardError, match=r"'hang' did not return within 2 s"):
        await call(pool, "hang", pid_file=str(pid_file))
    await until_dead(int(pid_file.read_text()))
    assert await call(pool, "length") == 2.0


async def test_a_reward_that_ends_its_process_fails_alone(pool: RewardPool) -> None:
    with pytest.raises(RewardError, match=r"'crash': its process died with exit code 7"):
        await call(pool, "crash")
    assert await call(pool, "length") == 2.0


async def test_cancelling_the_caller_stops_the_reward(pool: RewardPool, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    task = asyncio.create_task(call(pool, "hang", pid_file=str(pid_file)))
    async with asyncio.timeout(30):
        while not (pid_file.exists() and pid_file.read_text()):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    task.cancel()
    await until_dead(int(pid_file.read_text()))


async def test_after_close_nothing_runs(pool: RewardPool) -> None:
    await call(pool, "length")
    await pool.close()
    with pytest.raises(RewardError, match="closing"):
        await call(pool, "length")


async def test_no_reward_process_survives_a_killed_owner(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    code = (
        "import asyncio, sys\n"
        "from workers.rewards import RewardPool\n"
        "async def main():\n"
        "    pool = RewardPool({'hang': 'reward_functions:hang'}, timeout_s=600)\n"
        "    await pool.call('hang', prompt_ids=[1], completion_ids=[1], data={'pid_file': sys.argv[1]})\n"
        "if __name__ == '__main__':\n"
        "    asyncio.run(main())\n"
    )
    script = tmp_path / "owner.py"
    script.write_text(code)
    owner = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, str(script), str(pid_file)], env={**os.environ, "PYTHONPATH": str(HERE)}, cwd=HERE
    )
    try:
        async with asyncio.timeout(60):
            while not (pid_file.exists() and pid_file.read_text()):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait(10)
    await until_dead(int(pid_file.read_text()))


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("reward_functions:absent", "has no absent"),
        ("no_such_module_here:f", "cannot be imported"),
        ("reward_functions", "form module:name"),
        ("reward_functions:not_callable", "not callable"),
    ],
)
def test_wrong_settings_are_found_early(path: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    with pytest.raises(ConfigError, match=text):
        check_rewards({"mine": path})
