"""Power cuts on a simulated device: only what was synced is sure to be there, the rest arrives in any part.

Killing a process cannot show a missing fsync, since the page cache survives it; this can.
"""

from __future__ import annotations

import os
import random
import stat
import threading
from pathlib import Path

import pytest

from broker.journal.durability import parse_durability_mode
from broker.journal.files import FileOperations
from broker.journal.local import LocalJournal

DEADLINE_S = 30.0
SECTOR = 32


class Device:
    """Follows which bytes and which directory entries were synced."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._synced: dict[int, bytes] = {}
        self._entries: dict[str, int] = {}

    @property
    def files(self) -> FileOperations:
        return FileOperations(fdatasync=self._sync, fsync=self._sync)

    def _sync(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        with self._lock:
            if stat.S_ISDIR(status.st_mode):
                self._entries = self._listing()
            else:
                self._synced[status.st_ino] = Path(f"/proc/self/fd/{descriptor}").read_bytes()

    def _listing(self) -> dict[str, int]:
        return {path.name: path.stat().st_ino for path in self._directory.glob("*.segment")}

    def power_cut(self, target: Path, chance: random.Random) -> None:
        """Write to `target` what a disk may hold now."""
        target.mkdir()
        with self._lock:
            entries = self._entries | (self._listing() if chance.random() < 0.5 else {})
            for name, inode in entries.items():
                (target / name).write_bytes(self._content(name, inode, chance))

    def _content(self, name: str, inode: int, chance: random.Random) -> bytes:
        synced = self._synced.get(inode, b"")
        unsynced = bytearray((self._directory / name).read_bytes()[len(synced) :])
        del unsynced[chance.randint(0, len(unsynced)) :]
        for start in range(0, len(unsynced), SECTOR):
            if chance.random() < 0.3:
                unsynced[start : start + SECTOR] = bytes(len(unsynced[start : start + SECTOR]))
        return synced + unsynced


@pytest.mark.parametrize("mode", ["always", "interval=5", "none"])
@pytest.mark.parametrize("seed", range(8))
def test_what_was_synced_survives_every_power_cut(tmp_path: Path, mode: str, seed: int) -> None:
    chance = random.Random(seed)
    directory = tmp_path / "journal"
    directory.mkdir()
    device = Device(directory)
    written: dict[int, tuple[bytes, tuple[bytes, ...]]] = {}
    with LocalJournal(directory, parse_durability_mode(mode), segment_bytes=600, files=device.files) as journal:
        for cut in range(30):
            for _ in range(chance.randint(1, 4)):
                payload, bodies = chance.randbytes(chance.randint(0, 90)), (chance.randbytes(20),)
                written[journal.append(1, payload, bodies)] = (payload, bodies)
            if chance.random() < 0.3:
                journal.sync(DEADLINE_S)
            else:
                journal.commit()
            acknowledged = journal.durable if mode == "always" else journal.stat().synced_sequence
            device.power_cut(tmp_path / f"cut-{cut}", chance)
            with LocalJournal(tmp_path / f"cut-{cut}") as recovered:
                found = {record.sequence: (record.payload, record.bodies()) for record in recovered.records()}
            assert list(found) == list(range(1, len(found) + 1))
            assert len(found) >= acknowledged
            assert all(written[sequence] == content for sequence, content in found.items())
