"""The guard's view of the process table."""

from __future__ import annotations

import os
import subprocess
import sys

from workers.guard import ProcessRow, descendants, process_table


def test_descendants_are_found_at_every_depth() -> None:
    parents = {1: 0, 10: 1, 11: 10, 12: 11, 13: 10, 20: 1, 21: 20}
    table = {pid: ProcessRow("S", parent, pid, pid) for pid, parent in parents.items()}
    assert sorted(descendants(10, table)) == [11, 12, 13]
    assert descendants(12, table) == []


def test_the_process_table_holds_this_process_as_it_is() -> None:
    row = process_table()[os.getpid()]
    assert (row.parent, row.group, row.session) == (os.getppid(), os.getpgrp(), os.getsid(0))


def test_a_command_that_cannot_start_is_reported() -> None:
    import workers.guard

    command = [sys.executable, "-I", "-S", workers.guard.__file__, str(os.getpid()), "--", "/no/such/program"]
    result = subprocess.run(command, input=b"", capture_output=True, timeout=60)
    assert result.returncode == 127
    assert b"/no/such/program" in result.stdout and b"error" in result.stdout
