"""Rewards for the tests, good and bad; imported by the reward processes."""

from __future__ import annotations

import os
import subprocess
import time
from typing import Any


def length(*, prompt_ids: list[int], completion_ids: list[int], data: dict[str, Any]) -> float:
    return len(completion_ids) + data.get("bonus", 0)


def correct(*, prompt_ids: list[int], completion_ids: list[int], data: dict[str, Any]) -> bool:
    return prompt_ids == completion_ids


def hang(*, prompt_ids: list[int], completion_ids: list[int], data: dict[str, Any]) -> float:
    with open(data["pid_file"], "w") as file:
        file.write(str(os.getpid()))
    time.sleep(3600)
    return 0.0


def crash(*, prompt_ids: list[int], completion_ids: list[int], data: dict[str, Any]) -> float:
    os._exit(7)


class Unpicklable(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")
        self.process = subprocess.Popen


def fail(*, prompt_ids: list[int], completion_ids: list[int], data: dict[str, Any]) -> float:
    raise Unpicklable(1, 2)


def leave(*, prompt_ids: list[int], completion_ids: list[int], data: dict[str, Any]) -> float:
    raise SystemExit(4)


def give(*, prompt_ids: list[int], completion_ids: list[int], data: dict[str, Any]) -> Any:
    return {"nan": float("nan"), "inf": float("inf"), "none": None, "text": "0.5", "list": [1.0]}[data["what"]]


not_callable = 3
