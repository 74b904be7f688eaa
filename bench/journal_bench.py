"""Records per second of the journal next to a raw write + fdatasync loop on the same disk in the same run.

Closed loop: append a batch, commit, wait until it is durable, repeat. The raw loop writes the same number of
bytes per batch in one write and syncs it, so the ratio shows what framing, CRC and the thread hand-over cost.

    python bench/journal_bench.py [--directory DIR] [--seconds 1.0]
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from pathlib import Path

from broker.journal.durability import NONE
from broker.journal.local import LocalJournal

SIZES = (300, 10_000)
BATCHES = (1, 8, 64)
INLINE_BYTES = 1024


def split(size: int) -> tuple[bytes, list[bytes]]:
    """Small records are all payload; larger ones carry their bytes as a body."""
    content = os.urandom(size)
    return (content, []) if size <= INLINE_BYTES else (content[:200], [content[200:]])


def journal_rate(directory: Path, size: int, batch: int, seconds: float) -> float:
    """Records per second, each durable before the next batch is appended."""
    payload, bodies = split(size)
    count = 0
    with LocalJournal(directory) as journal:
        start = time.perf_counter()
        while time.perf_counter() - start < seconds:
            for _ in range(batch):
                journal.append(1, payload, bodies)
            journal.sync(10.0)
            count += batch
        return count / (time.perf_counter() - start)


def raw_rate(directory: Path, size: int, batch: int, seconds: float) -> float:
    """Records per second of one write and one fdatasync per batch."""
    directory.mkdir()
    content = os.urandom(size) * batch
    descriptor = os.open(directory / "raw", os.O_WRONLY | os.O_CREAT)
    count = 0
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        os.write(descriptor, content)
        os.fdatasync(descriptor)
        count += batch
    elapsed = time.perf_counter() - start
    os.close(descriptor)
    return count / elapsed


def append_microseconds(directory: Path, size: int) -> float:
    """Time of one append alone, in microseconds; committed every 64 records, nothing waited for."""
    payload, bodies = split(size)
    rounds, spent = 100, 0.0
    with LocalJournal(directory, NONE) as journal:
        for _ in range(rounds):
            start = time.perf_counter()
            for _ in range(64):
                journal.append(1, payload, bodies)
            spent += time.perf_counter() - start
            journal.sync(10.0)
    return spent / (rounds * 64) * 1e6


def main() -> None:
    """Print one line per size and batch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, default=None, help="on the disk to measure")
    parser.add_argument("--seconds", type=float, default=1.0, help="per measurement")
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="journal-bench-", dir=options.directory))
    try:
        print(f"{'bytes':>7} {'batch':>6} {'journal/s':>11} {'raw/s':>11} {'ratio':>6}")
        for size in SIZES:
            for batch in BATCHES:
                name = f"{size}-{batch}"
                raw = raw_rate(root / f"raw-{name}", size, batch, options.seconds)
                journal = journal_rate(root / f"journal-{name}", size, batch, options.seconds)
                print(f"{size:>7} {batch:>6} {journal:>11,.0f} {raw:>11,.0f} {journal / raw:>6.2f}", flush=True)
                for kind in ("raw", "journal"):
                    shutil.rmtree(root / f"{kind}-{name}")
        for size in SIZES:
            cost = append_microseconds(root / f"append-{size}", size)
            print(f"append of {size} bytes: {cost:.1f} microseconds")
    finally:
        shutil.rmtree(root, ignore_errors=True)


if __name__ == "__main__":
    main()
