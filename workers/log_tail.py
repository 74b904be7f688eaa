"""What a server's log says at its end, bounded, for error messages."""

from __future__ import annotations

import re
from pathlib import Path

READ_BYTES = 131_072
TAIL_LINES = 20
ERROR_LINES = 5
LINE_CHARACTERS = 300

# Python's own last line of a traceback, behind whatever prefix a logger put before it.
_ERROR = re.compile(r"(^|\s)([A-Za-z_][\w.]*\.)?[A-Z]\w*(Error|Exception)\b: \S")
_NOISE = re.compile(r"^\s*- (leaked |\.\.\. skipped)|^nanobind: |nanobind.readthedocs")


def log_tail(path: Path, lines: int = TAIL_LINES) -> list[str]:
    """The last non-empty lines of a log file, each cut to 300 characters; empty if it cannot be read."""
    return [_cut(line) for line in _read(path)[-lines:]]


def describe_log(path: Path) -> str:
    """`; log file PATH, last lines: ...` for the end of an error message.

    Errors that stand further up are shown first: servers of several processes tend to end with a traceback of the
    process that noticed, not of the one that failed.
    """
    lines = _read(path)
    if not lines:
        return f"; log file {path} is empty"
    earlier = list(dict.fromkeys(_cut(line) for line in lines[:-TAIL_LINES] if _ERROR.search(line)))[:ERROR_LINES]
    shown = ["earlier errors:", *earlier, "last lines:"] if earlier else ["last lines:"]
    shown += [_cut(line) for line in lines[-TAIL_LINES:]]
    return f"; log file {path}, " + "\n".join([shown[0], *(f"    {line}" for line in shown[1:])])


def _read(path: Path) -> list[str]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - READ_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip() and not _NOISE.search(line)]


def _cut(line: str) -> str:
    return line if len(line) <= LINE_CHARACTERS else line[: LINE_CHARACTERS - 3] + "..."
