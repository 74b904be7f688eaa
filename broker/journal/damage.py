"""How damage is described: one finding with file, offset and sequence, and the error made from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rollmq.errors import JournalDamaged


@dataclass(frozen=True, slots=True)
class Finding:
    """Something in a journal that is not what was written.

    Attributes:
        file: the file, or the directory when a whole file is missing.
        offset: byte offset in the file.
        sequence: number of the first record concerned.
        what: what is wrong, in words.
        torn_tail: True if an interrupted write explains it: it is in the last segment and nothing says that
            the record was ever durable. Opening the journal sets such a tail aside and goes on.
    """

    file: Path
    offset: int
    sequence: int
    what: str
    torn_tail: bool = False

    def __str__(self) -> str:
        kind = "torn tail" if self.torn_tail else "damage"
        return f"{kind} in {self.file} at offset {self.offset}, record {self.sequence}: {self.what}"

    def as_error(self) -> JournalDamaged:
        """Return the error that refuses the journal because of this finding."""
        directory = self.file if self.file.is_dir() else self.file.parent
        return JournalDamaged(
            f"{self}. Nothing was changed. Run `rollmq log verify {directory}` to list all damage; "
            "restore the directory from a copy, or start a new journal in another one."
        )
