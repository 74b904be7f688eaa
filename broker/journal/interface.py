"""What the core and the server may know of a journal: append, commit, wait, read back.

Nothing here assumes a local file; `local.LocalJournal` is the implementation on one disk. The journal never
looks into a payload or a body: what a kind means is the caller's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol


class StoredBodies(Protocol):
    """Reads the bodies of one record from where they are kept."""

    def read(self, index: int) -> bytes:
        """Return body `index`, its CRC checked; raises `JournalDamaged` or `IndexError`."""
        ...


@dataclass(frozen=True, slots=True)
class Record:
    """One record as it was appended.

    Attributes:
        sequence: its number; grows from record to record.
        time_ns: wall time of the append in nanoseconds since 1970; for people, never for ordering.
        kind: the caller's record kind, 0..65535.
        payload: the caller's bytes, CRC checked.
        body_lengths: length in bytes of each body, in order.
    """

    sequence: int
    time_ns: int
    kind: int
    payload: bytes
    body_lengths: tuple[int, ...] = ()
    _stored: StoredBodies | None = field(default=None, repr=False, compare=False)

    def body(self, index: int) -> bytes:
        """Read body `index` now; raises `IndexError` if there is none, `JournalDamaged` if it is bad."""
        if self._stored is None or not 0 <= index < len(self.body_lengths):
            raise IndexError(f"record {self.sequence} has {len(self.body_lengths)} bodies, asked for {index}")
        return self._stored.read(index)

    def bodies(self) -> tuple[bytes, ...]:
        """Read all bodies now."""
        return tuple(self.body(index) for index in range(len(self.body_lengths)))


@dataclass(frozen=True, slots=True)
class JournalStat:
    """Facts about a journal, for `status`, metrics and `rollmq log stat`.

    Attributes:
        directory: where it is, as text.
        log_id: random id of this log in hex; a cursor is only valid together with it.
        segments: number of segment files.
        bytes: size of all segments, appended but unwritten bytes included.
        unwritten_bytes: appended but not yet handed to the file system.
        first_sequence: of the oldest record kept (last_sequence + 1 when there is none).
        last_sequence: of the newest record appended; 0 if none.
        durable_sequence: highest sequence that the durability mode lets the broker acknowledge.
        synced_sequence: highest sequence known to be on the device.
        mode: durability mode as written in the configuration.
        loss_window: what the mode may lose, in words.
    """

    directory: str
    log_id: str
    segments: int
    bytes: int
    unwritten_bytes: int
    first_sequence: int
    last_sequence: int
    durable_sequence: int
    synced_sequence: int
    mode: str
    loss_window: str


class Journal(Protocol):
    """A log of opaque records. All methods but `stat` are called by one thread, the one that owns the journal.

    Sequences grow by one with every record, records of the journal's own (`close`) included; those are never
    returned by `records`, so a caller sees its own sequences 1, 2, 3, … without gaps within one opening and
    may see one number missing after a clean restart.
    """

    @property
    def durable(self) -> int:
        """Highest sequence that may be acknowledged: on the device in mode `always`, else written."""
        ...

    @property
    def last_sequence(self) -> int:
        """Sequence of the newest record appended; 0 in an empty journal."""
        ...

    @property
    def log_id(self) -> str:
        """Random id of this log in hex; a stored sequence is only valid together with it."""
        ...

    @property
    def wakeup_fd(self) -> int:
        """Becomes readable when `durable` advanced or the journal failed; see `drain_wakeup`."""
        ...

    @property
    def failed(self) -> BaseException | None:
        """The error that ended this journal, or None. Nothing becomes durable after it."""
        ...

    def append(self, kind: int, payload: bytes, bodies: Sequence[bytes] = ()) -> int:
        """Buffer a record in memory and return its sequence; nothing is written before `commit`.

        Raises:
            JournalFailed: the journal failed earlier or is closed.
            ValueError: kind, payload or bodies exceed the limits of the format.
        """
        ...

    def commit(self) -> None:
        """Hand what was appended to the committer and return at once.

        Raises:
            JournalFailed: the journal failed earlier or is closed.
        """
        ...

    def sync(self, timeout_s: float) -> None:
        """Commit and wait until every record appended is on the device, whatever the mode.

        Raises:
            JournalFailed: a write or fsync failed.
            DeadlineExceeded: the device did not answer in time.
        """
        ...

    def read_body(self, sequence: int, index: int) -> bytes:
        """Return a body, its CRC checked, whether it is still in memory or on disk.

        Raises:
            KeyError: there is no such record, or it has no bodies.
            IndexError: the record has fewer bodies.
            JournalDamaged: the bytes on disk are not those that were written.
            JournalError: the file cannot be read.
        """
        ...

    def records(self, from_sequence: int = 1) -> Iterator[Record]:
        """Iterate over the records that were written when the call was made, oldest first.

        Raises:
            JournalDamaged: while iterating, at a record that is not what was written.
        """
        ...

    def drain_wakeup(self) -> None:
        """Make `wakeup_fd` unreadable again; call it before looking at `durable` and `failed`."""
        ...

    def close(self, timeout_s: float = 30.0) -> None:
        """Sync, mark the log as closed cleanly, release everything; does nothing the second time.

        Raises:
            JournalFailed: the closing itself failed; what `durable` said before still holds.
            DeadlineExceeded: the device did not answer in time.
        """
        ...

    def stat(self) -> JournalStat:
        """Return facts for people and metrics; costs no I/O."""
        ...
