"""The rooms of the house: who may import whom, and what each room may never import."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("rollmq", "broker", "workers", "trainer_client", "examples")
STANDARD_LIBRARY = sys.stdlib_module_names


def imports(path: Path, *, top_level_only: bool) -> set[str]:
    """Top-level packages that a file imports; `top_level_only` leaves out those inside functions and TYPE_CHECKING."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = tree.body if top_level_only else list(ast.walk(tree))
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module.split(".")[0])
    return found


def files(room: str) -> list[Path]:
    paths = sorted((ROOT / room).rglob("*.py"))
    assert paths, f"no files in {room}"
    return paths


@pytest.mark.parametrize(
    ("room", "others"),
    [
        ("broker", {"workers", "trainer_client", "examples"}),
        ("workers", {"broker", "trainer_client"}),
        ("trainer_client", {"broker", "workers", "examples"}),
    ],
)
def test_rooms_never_import_each_other(room: str, others: set[str]) -> None:
    for path in files(room):
        assert not imports(path, top_level_only=False) & others, path


def test_the_shared_room_imports_no_sockets_http_or_torch() -> None:
    for path in files("rollmq"):
        forbidden = {"zmq", "aiohttp", "numpy", "transformers"}
        assert not imports(path, top_level_only=False) & forbidden, path
        assert not imports(path, top_level_only=True) & {"torch", "broker", "workers", "trainer_client", "examples"}, (
            path
        )


def test_only_the_command_line_reaches_into_other_rooms_and_only_when_used() -> None:
    for path in files("rollmq"):
        if path.parent.name != "cli":
            used = imports(path, top_level_only=False) & {"broker", "workers", "trainer_client", "examples"}
            assert not used, path


def test_the_core_imports_nothing_but_the_shared_room_the_standard_library_and_msgpack() -> None:
    for path in files("broker/core"):
        assert imports(path, top_level_only=False) <= STANDARD_LIBRARY | {"rollmq", "broker", "msgpack"}, path
        text = path.read_text(encoding="utf-8")
        assert "from broker.journal" not in text and "import socket" not in text and "import time" not in text, path


def test_the_core_takes_the_time_as_an_argument() -> None:
    for path in files("broker/core"):
        assert not imports(path, top_level_only=False) & {"time", "datetime", "random", "threading", "os"}, path


def test_nothing_unpickles_and_nothing_is_swallowed() -> None:
    for room in ROOMS:
        for path in files(room):
            assert "pickle" not in imports(path, top_level_only=False), path
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ExceptHandler) and node.type is None:
                    raise AssertionError(f"{path}:{node.lineno}: a bare except")
