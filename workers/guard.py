"""The small process between a worker and its engine: whatever happens, no engine process outlives its owner.

Run as a script, `python -I -S guard.py OWNER_PID -- COMMAND...`; standard library only, since it must start in
milliseconds and stay tiny. The worker imports it only for the helpers that read the process table.

- stdin is a pipe whose other end only the owner holds. End of file, or another parent than OWNER_PID, means that
  the owner died (kill -9 included) or wants the end now: everything below is killed.
- The guard leads its own session and is the *subreaper* of all that starts below it: a process whose parent died
  becomes a child of the guard, also after `setsid`. So the guard finds them all, and "no child left" is a proof.
- The engine leads another session, and asks the kernel for a SIGKILL should the guard itself die.
- SIGTERM is passed on to the engine's leader. When the leader ends, by itself or not, the rest is killed: an
  engine's helper processes may keep the accelerator's memory for ever.
- stdout carries one JSON object per line to the owner: {"pid": n} or {"error": text} first, {"exit": code} last
  (negative: the signal), when nothing is left. stderr is the engine's log.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from typing import NamedTuple

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
OWNER_CHECK_S = 0.5
KILL_DEADLINE_S = 120.0

EXIT_CANNOT_START = 127
EXIT_SURVIVORS = 125


class ProcessRow(NamedTuple):
    """One line of the process table: state letter (Z is a zombie), parent, process group, session."""

    state: str
    parent: int
    group: int
    session: int


def process_table() -> dict[int, ProcessRow]:
    """All processes of this machine by pid, as /proc shows them; empty where there is no /proc."""
    table: dict[int, ProcessRow] = {}
    try:
        names = os.listdir("/proc")
    except OSError:
        return table
    for name in names:
        if name.isdigit():
            row = _read_row(name)
            if row is not None:
                table[int(name)] = row
    return table


def _read_row(pid: str) -> ProcessRow | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except OSError:
        return None  # ended while we looked
    # The command name stands in parentheses and may itself hold spaces and parentheses.
    fields = text[text.rfind(b")") + 2 :].split()
    return ProcessRow(fields[0].decode(), int(fields[1]), int(fields[2]), int(fields[3]))


def descendants(root: int, table: dict[int, ProcessRow]) -> list[int]:
    """All processes below `root`, without it, zombies included."""
    children: dict[int, list[int]] = {}
    for pid, row in table.items():
        children.setdefault(row.parent, []).append(pid)
    found: list[int] = []
    open_list = [root]
    while open_list:
        below = children.get(open_list.pop(), [])
        found.extend(below)
        open_list.extend(below)
    return found


def send_signal(pid: int, number: int) -> None:
    """Sends a signal to a process that may already be gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


class Guard:
    """Starts the engine, watches owner and engine, and clears everything away at the end."""

    def __init__(self, owner: int) -> None:
        self._owner = owner
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._leader = 0
        self._leader_status: int | None = None
        self._wake_read, wake_write = os.pipe()
        for descriptor in (self._wake_read, wake_write):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, _only_wake)

    def run(self, command: list[str]) -> int:
        """Runs the engine until it or the owner ends; returns the guard's own exit code."""
        with contextlib.suppress(PermissionError):  # already a session leader
            os.setsid()
        self._prctl(PR_SET_CHILD_SUBREAPER, 1)
        try:
            engine = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno(),
                stderr=sys.stderr.fileno(),
                start_new_session=True,
                preexec_fn=self._die_with_guard,
            )
        except OSError as error:
            _report({"error": f"cannot start {command[0]}: {error}"})
            return EXIT_CANNOT_START
        self._leader = engine.pid
        _report({"pid": engine.pid})
        while self._leader_status is None and self._owner_lives():
            self._handle_signals()
        survivors = self._kill_all()
        engine.returncode = self._exit_code()  # reaped here: keeps Popen from looking for it
        _report({"exit": self._exit_code(), "survivors": survivors})
        if survivors:
            return EXIT_SURVIVORS
        code = self._exit_code()
        return code if code >= 0 else 128 - code

    def _owner_lives(self) -> bool:
        if os.getppid() != self._owner:
            return False
        ready, _, _ = select.select([0, self._wake_read], [], [], OWNER_CHECK_S)
        return not (0 in ready and os.read(0, 4096) == b"")

    def _handle_signals(self) -> None:
        try:
            numbers = os.read(self._wake_read, 4096)
        except BlockingIOError:
            numbers = b""
        self._reap()
        if signal.SIGTERM in numbers and self._leader_status is None:
            send_signal(self._leader, signal.SIGTERM)

    def _reap(self) -> bool:
        """Reaps all dead children; returns whether any child, dead or alive, may be left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self._leader:
                self._leader_status = status

    def _kill_all(self) -> list[int]:
        """SIGKILLs everything below until nothing is left; returns what the kernel did not let go in time."""
        deadline = time.monotonic() + KILL_DEADLINE_S
        pause = 0.005
        if self._leader_status is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._leader, signal.SIGKILL)
        while True:
            below = descendants(os.getpid(), process_table())
            for pid in below:
                send_signal(pid, signal.SIGKILL)
            if not self._reap():
                return []
            if time.monotonic() > deadline:
                return below
            time.sleep(pause)
            pause = min(pause * 2, 0.25)

    def _exit_code(self) -> int:
        return -signal.SIGKILL if self._leader_status is None else os.waitstatus_to_exitcode(self._leader_status)

    def _die_with_guard(self) -> None:
        self._prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    def _prctl(self, option: int, value: int) -> None:
        if self._libc.prctl(option, value, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def _only_wake(number: int, frame: object) -> None:
    """The signal's number reaches the loop through the wake-up descriptor."""


def _report(message: dict[str, object]) -> None:
    with contextlib.suppress(BrokenPipeError):  # the owner is gone; nobody to tell
        os.write(1, json.dumps(message).encode() + b"\n")


def main(arguments: list[str]) -> int:
    """Command line: OWNER_PID -- COMMAND..."""
    if len(arguments) < 3 or arguments[1] != "--":
        sys.stderr.write("usage: guard.py OWNER_PID -- COMMAND...\n")
        return 2
    return Guard(int(arguments[0])).run(arguments[2:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
