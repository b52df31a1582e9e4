"""The replicated log in one member's memory.

Indexes start at 1. The log has the entries after `base`, which is at or below the newest snapshot:
some entries before a snapshot are kept for followers that are only a little late.

Four cursors, each <= the next where both apply:
    applied_index    handed out for apply
    commit_index     known to be committed; never falls, never truncated
    persisted_index  durable on this member
    last_index       appended in memory
"""

import zlib
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from koinon_coordinator.core.raft.configuration import Configuration, ConfigurationHistory

ENTRY_OVERHEAD_BYTES = 32


class InvariantError(Exception):
    """A state that Raft proves impossible was observed: this member must stop."""


class LostEntriesError(InvariantError):
    """The leader knows that this member had entries which it lacks: its disk lost them."""


class EntryKind(IntEnum):
    COMMAND = 1
    NOOP = 2  # opens a leader's term; within it: has all disks written to
    CONFIGURATION = 3


class Entry(NamedTuple):
    """One log entry. (A named tuple, since each member creates one per proposal.)"""

    index: int  # type: ignore[assignment]  # hides tuple.index
    term: int
    kind: EntryKind
    data: bytes

    @property
    def size_bytes(self) -> int:
        return len(self.data) + ENTRY_OVERHEAD_BYTES


class LogPosition(NamedTuple):
    index: int  # type: ignore[assignment]  # hides tuple.index
    term: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state machine's state after `index`, and the configuration in force there.

    A new group begins with index 0 and empty data: the configuration is the initial one.
    """

    index: int
    term: int
    configuration: Configuration
    data: bytes
    checksum: int

    @classmethod
    def of(cls, index: int, term: int, configuration: Configuration, data: bytes) -> "Snapshot":
        return cls(
            index=index,
            term=term,
            configuration=configuration,
            data=data,
            checksum=zlib.crc32(data),
        )


class RaftLog:
    """Entries, cursors, the newest snapshot and the configurations that the entries carry."""

    def __init__(self, snapshot: Snapshot, base: LogPosition, entries: Iterable[Entry]) -> None:
        """Restore from storage: everything in it is durable, and no entry above the snapshot is
        known to be committed.
        """
        self.snapshot = snapshot
        self._base = base
        self._entries = list(entries)
        self.commit_index = snapshot.index
        self.applied_index = snapshot.index
        self.persisted_index = self.last_index
        self._next_to_persist = self.last_index + 1
        self._handed_out_to = self.last_index
        self.configurations = ConfigurationHistory(snapshot.index, snapshot.configuration)
        for offset, entry in enumerate(self._entries):
            if entry.index != base.index + 1 + offset:
                raise InvariantError(
                    f"log gap: entry {entry.index} stands where {base.index + 1 + offset} belongs"
                )
        if not base.index <= snapshot.index <= self.last_index:
            raise InvariantError(
                f"snapshot {snapshot.index} outside the log {base.index}..{self.last_index}"
            )
        for entry in self._entries[snapshot.index - base.index :]:
            self._note_configuration(entry)

    # -- reading

    @property
    def base(self) -> LogPosition:
        """The position just before the first entry in this log."""
        return self._base

    @property
    def last_index(self) -> int:
        return self._base.index + len(self._entries)

    @property
    def last_position(self) -> LogPosition:
        if self._entries:
            return LogPosition(self._entries[-1].index, self._entries[-1].term)
        return self._base

    @property
    def configuration(self) -> Configuration:
        """The configuration in force: the newest appended one, committed or not."""
        return self.configurations.current

    def is_configured(self, member_id: str) -> bool:
        """Return whether the newest configuration, or the committed one, names the member."""
        committed = self.configurations.at(self.commit_index)
        return member_id in self.configuration or member_id in committed

    @property
    def has_uncommitted_configuration(self) -> bool:
        return self.configurations.current_index > self.commit_index

    def term_at(self, index: int) -> int | None:
        """The term of the entry at `index`; None if this log does not have it (any more)."""
        offset = index - self._base.index
        if 0 < offset <= len(self._entries):
            return self._entries[offset - 1].term
        return self._base.term if offset == 0 else None

    def slice(self, first: int, last: int) -> tuple[Entry, ...]:
        """Entries first..last, both included."""
        return tuple(self._entries[first - self._base.index - 1 : last - self._base.index])

    def batch_from(self, first: int, entries_max: int, bytes_max: int) -> tuple[Entry, ...]:
        """Entries from `first` on within both bounds, but at least one if there is one."""
        candidates = self.slice(first, min(self.last_index, first + entries_max - 1))
        room_bytes = bytes_max
        for count, entry in enumerate(candidates):
            room_bytes -= entry.size_bytes
            if room_bytes < 0:
                return candidates[: max(count, 1)]
        return candidates

    def last_at_or_below(self, index: int, term: int) -> LogPosition:
        """The last position <= `index` with a term <= `term`: two logs may still agree there.

        Terms never fall along a log, so a binary search finds it (Raft paper, end of 5.3). Returns
        the base if all entries here come after it.
        """
        end = min(index, self.last_index) - self._base.index
        found = bisect_right(self._entries, term, 0, max(end, 0), key=lambda entry: entry.term)
        return self._position(self._base.index + found)

    def _position(self, index: int) -> LogPosition:
        term = self.term_at(index)
        assert term is not None
        return LogPosition(index, term)

    # -- appending

    def append(self, term: int, kind: EntryKind, data: bytes) -> Entry:
        """Append as leader."""
        entry = Entry(self._base.index + len(self._entries) + 1, term, kind, data)
        self._entries.append(entry)
        if kind is EntryKind.CONFIGURATION:
            self._note_configuration(entry)
        return entry

    def append_replicated(self, entries: Sequence[Entry]) -> None:
        """Append as follower, after an agreed position. Existing equal entries stay, and only a
        real conflict truncates: a late message must not cut off later entries.
        """
        for offset, entry in enumerate(entries):
            if self.term_at(entry.index) != entry.term:
                self._truncate_from(entry.index)
                for new_entry in entries[offset:]:
                    self._entries.append(new_entry)
                    if new_entry.kind is EntryKind.CONFIGURATION:
                        self._note_configuration(new_entry)
                return

    def _truncate_from(self, index: int) -> None:
        if index > self.last_index:
            return
        if index <= self.commit_index:
            raise InvariantError(
                f"asked to truncate from {index}, but {self.commit_index} is committed"
            )
        del self._entries[index - self._base.index - 1 :]
        self.persisted_index = min(self.persisted_index, index - 1)
        self._next_to_persist = min(self._next_to_persist, index)
        self._handed_out_to = min(self._handed_out_to, index - 1)
        self.configurations.truncate_from(index)

    def _note_configuration(self, entry: Entry) -> None:
        if entry.kind is EntryKind.CONFIGURATION:
            self.configurations.append(entry.index, Configuration.decode(entry.data))

    # -- the cursors

    def commit_to(self, index: int) -> bool:
        """Raise the commit index; True if that changed it."""
        if index <= self.commit_index:
            return False
        if index > self.last_index:
            raise LostEntriesError(
                f"told that {index} is committed, but the log ends at {self.last_index}: "
                "acknowledged entries are missing here"
            )
        self.commit_index = index
        return True

    @property
    def has_unpersisted(self) -> bool:
        return self._next_to_persist <= self.last_index

    def hand_out_unpersisted(self) -> tuple[Entry, ...]:
        """Return the entries to persist next. At most one such batch is out at a time."""
        entries = self.slice(self._next_to_persist, self.last_index)
        self._next_to_persist = self.last_index + 1
        self._handed_out_to = self.last_index
        return entries

    @property
    def saving_through(self) -> int:
        """The last index that was handed out to be made durable."""
        return self._handed_out_to

    def confirm_persisted(self) -> None:
        """Count the last batch handed out as durable, without entries that were replaced since
        then.
        """
        self.persisted_index = max(self.persisted_index, self._handed_out_to)

    def take_committed(self, count_max: int) -> tuple[Entry, ...]:
        """Return the next committed and durable entries to apply; they count as applied from now
        on.
        """
        last = min(self.commit_index, self.persisted_index, self.applied_index + count_max)
        if last <= self.applied_index:
            return ()
        entries = self.slice(self.applied_index + 1, last)
        self.applied_index = last
        return entries

    # -- snapshots

    def compact(self, index: int, data: bytes, retained_entries_max: int) -> Snapshot:
        """Store `data` as the state at `index` (applied), and drop most of the entries that it
        covers.
        """
        term = self.term_at(index)
        if term is None or not self.snapshot.index < index <= self.applied_index:
            raise InvariantError(
                f"cannot compact to {index}: snapshot {self.snapshot.index}, "
                f"applied {self.applied_index}"
            )
        self.snapshot = Snapshot.of(index, term, self.configurations.at(index), data)
        new_base = max(self._base.index, index - retained_entries_max)
        base = self._position(new_base)
        del self._entries[: new_base - self._base.index]
        self._base = base
        self.configurations.compact_to(index)
        return self.snapshot

    def install(self, snapshot: Snapshot) -> None:
        """Replace the whole log by a snapshot from the leader. It is not durable until
        persisted.
        """
        self.snapshot = snapshot
        self._base = LogPosition(snapshot.index, snapshot.term)
        self._entries.clear()
        self.commit_index = snapshot.index
        self.applied_index = snapshot.index
        self.persisted_index = 0
        self._next_to_persist = snapshot.index + 1
        self._handed_out_to = 0
        self.configurations = ConfigurationHistory(snapshot.index, snapshot.configuration)
