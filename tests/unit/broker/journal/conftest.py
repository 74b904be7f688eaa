"""Small journals of known records, to be damaged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from broker.journal.local import LocalJournal

Content = tuple[int, bytes, tuple[bytes, ...]]

CONTENTS: list[Content] = [
    (1, b"submit", ()),
    (2, b"task with a body", (b"prompt tokens",)),
    (3, b"", (b"", b"two bodies", b"x")),
    (7, b"result", (b"r" * 41,)),
]


def abandon(journal: LocalJournal) -> None:
    """Leave a journal as kill -9 does: what was committed is written, nothing marks a clean close."""
    journal._committer.stop(30.0)
    journal._closed = True
    journal._release()


@pytest.fixture
def make_journal() -> Callable[..., dict[int, Content]]:
    """Returns a function that writes a journal and returns its contents by sequence.

    `sync_each`: every record is synced before the next one is appended, so that each record states that the
    one before it was durable.
    """

    def make(
        directory: Path,
        contents: Sequence[Content] = CONTENTS,
        *,
        segment_bytes: int = 10**6,
        close: bool = False,
        sync_each: bool = True,
    ) -> dict[int, Content]:
        journal = LocalJournal(directory, segment_bytes=segment_bytes)
        written: dict[int, Content] = {}
        for kind, payload, bodies in contents:
            written[journal.append(kind, payload, bodies)] = (kind, payload, bodies)
            if sync_each:
                journal.sync(30.0)
        if close:
            journal.close()
        else:
            journal.commit()
            abandon(journal)
        return written

    return make
