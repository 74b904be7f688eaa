from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from broker.journal.local import LocalJournal
from rollmq.errors import JournalLocked

HOLDER = """
import sys
from broker.journal.local import LocalJournal
journal = LocalJournal(sys.argv[1])
journal.append(1, b"acknowledged")
journal.sync(30.0)
journal.append(1, b"never committed")
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_second_opener_is_told_who_holds_the_journal(tmp_path: Path) -> None:
    with LocalJournal(tmp_path) as journal:
        with pytest.raises(JournalLocked, match=rf"{tmp_path} is in use by process {os.getpid()};"):
            LocalJournal(tmp_path)
        journal.append(1, b"the holder goes on")
        journal.sync(30.0)
    LocalJournal(tmp_path).close()


def test_the_lock_of_a_killed_holder_is_free_and_what_it_synced_is_there(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "ready\n"
        with pytest.raises(JournalLocked, match=f"process {holder.pid};"):
            LocalJournal(tmp_path)
        holder.send_signal(signal.SIGKILL)
        holder.wait(timeout=30)
        with LocalJournal(tmp_path) as journal:
            assert [record.payload for record in journal.records()] == [b"acknowledged"]
    finally:
        holder.kill()
        holder.wait(timeout=30)
        for stream in (holder.stdin, holder.stdout):
            if stream is not None:
                stream.close()
