"""A bounded buffer of recent changes, by commit group, of the partitions that feeds follow.

A feed that is up to date is served from this buffer and does not read the store. The buffer has
each partition's changes in the order of their sequences: every version, in whole groups. A group
enters it when it is durable here. A feed may deliver a group once the group is complete; the caller
of ``read`` names the sequence through which groups are complete.

    sequences of p   1 2 3 | 4 5 | 6 7 8 | 9
    groups kept            | 4 5 | 6 7 8 | 9        floors[p] = 3
    complete                           ^

Changes that the buffer lacks lie at or below ``floor``: they are older than the first reader, were
pushed out by newer groups, or were written by a merge step in the store. A reader whose position is
below ``floor`` reads the store instead.

Pure. A partition is followed in one primary epoch; in another epoch its buffer begins empty.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Final, NamedTuple

from koinon_node.core.formats.records import (
    FLAG_TOMBSTONE,
    KEY_AT,
    NO_SEQUENCE,
    USER,
    BoolArray,
    decode_record,
    partition_of_data_key,
)
from koinon_node.core.writes.commit_group import CommitGroup

BYTES_MAX: Final = 32 * 1024 * 1024
"""The most bytes of kept changes (``size_of``), over all partitions."""
_CHANGE_BYTES = 160  # of the Python objects of one change, without its key and value
_sequence = itemgetter(0)


class Change(NamedTuple):
    """One change of a key. ``value`` is None for a delete."""

    sequence: int
    key: bytes  # the user's key
    value: bytes | None
    expires_at_ms: int


def change_of(key: bytes, encoded: bytes | None, last: int = 0) -> Change:
    """Return the change that this record made to its key. Without a record the change is a delete
    with the sequence ``last``.
    """
    if encoded is None:
        return Change(last, key, None, 0)
    sequence, flags, expires_at_ms, value = decode_record(encoded)
    if flags & FLAG_TOMBSTONE:
        return Change(sequence, key, None, 0)
    return Change(sequence, key, value, expires_at_ms)


def size_of(change: Change) -> int:
    """Return roughly how many bytes of memory a change takes."""
    return _CHANGE_BYTES + len(change.key) + len(change.value or b"")


@dataclass(slots=True, eq=False)
class _Kept:
    """The changes that one group made in one partition."""

    last: int  # the group's last sequence in the partition
    changes: list[Change]  # in sequence order
    size: int  # bytes (``size_of``)


@dataclass(slots=True)
class _Followed:
    """The kept changes of a partition that at least one feed follows."""

    epoch: int
    floor: int  # the buffer has every durable change above this sequence
    groups: deque[_Kept] = field(default_factory=deque)
    readers: int = 0  # feeds that follow the partition


class ChangeTail:
    """The changes of all followed partitions. Beyond ``bytes_max`` the oldest groups are
    dropped.
    """

    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._followed: dict[int, _Followed] = {}
        # Groups in the order of their arrival. ``_forget`` leaves its groups in here.
        self._order: deque[tuple[_Followed, _Kept]] = deque()
        self._forgotten = 0  # the number of such entries of ``_order``
        self.size = 0  # bytes of kept changes

    def __bool__(self) -> bool:
        """Return whether any partition is followed."""
        return bool(self._followed)

    def follow(self, partition_id: int, epoch: int, durable: int) -> None:
        """Add a reader of the partition, which this node leads in this epoch and holds durably
        through the sequence ``durable``.
        """
        followed = self._followed.get(partition_id)
        if followed is None:
            followed = self._followed[partition_id] = _Followed(epoch, durable)
        elif followed.epoch != epoch:
            self._forget(followed, durable)
            followed.epoch = epoch
        followed.readers += 1

    def leave(self, partition_ids: Iterable[int]) -> None:
        """Remove a reader of each partition; drop a partition that has no reader left."""
        for p in partition_ids:
            followed = self._followed[p]
            followed.readers -= 1
            if not followed.readers:
                self._forget(followed, NO_SEQUENCE)
                del self._followed[p]

    def mark(self, mask: BoolArray) -> None:
        """Set the mask to True at followed partitions, and to False elsewhere."""
        mask[:] = False
        mask[list(self._followed)] = True

    def restart(self, partition_ids: Iterable[int], durable: Iterable[int]) -> None:
        """Drop all changes of these partitions, and set each floor to its durable sequence."""
        for p, last in zip(partition_ids, durable, strict=True):
            if (followed := self._followed.get(p)) is not None:
                self._forget(followed, last)

    def append(self, group: CommitGroup) -> None:
        """Add the changes of a group that is durable here without a failure. A partition in which
        the group carries out a merge step begins empty: only the store knows the merged rows.
        """
        lasts = {
            p: last
            for p, last in zip(group.touched.tolist(), group.lasts.tolist(), strict=True)
            if p in self._followed
        }
        if not lasts:
            return
        merged = {partition_of_data_key(prefix) for prefix in group.claims}
        rows: dict[int, list[Change]] = {p: [] for p in lasts}
        for data_key, encoded in group.records.items():
            p = partition_of_data_key(data_key)
            if p in rows and data_key[KEY_AT - 1] == USER:
                rows[p].append(change_of(data_key[KEY_AT:], encoded, lasts[p]))
        for p, changes in rows.items():
            followed, last = self._followed[p], lasts[p]
            if p in merged:
                self._forget(followed, last)
            elif changes:
                changes.sort(key=_sequence)
                size = sum(map(size_of, changes))
                kept = _Kept(last, changes, size)
                followed.groups.append(kept)
                self._order.append((followed, kept))
                self.size += size
        self._make_room()

    def read(
        self, partition_id: int, epoch: int, after: int, through: int, *, bytes_max: int
    ) -> tuple[list[Change], int] | None:
        """Return the changes above ``after`` and through ``through``, and the sequence that they
        reach. Return None if the buffer lacks some of them. The list ends after the version that
        brings it to ``bytes_max``.
        """
        followed = self._followed.get(partition_id)
        if followed is None or followed.epoch != epoch or after < followed.floor:
            return None
        wanted: list[_Kept] = []
        for kept in reversed(followed.groups):
            if kept.last <= after:
                break
            if kept.last <= through:
                wanted.append(kept)
        found: list[Change] = []
        size = 0
        for kept in reversed(wanted):
            for change in kept.changes:
                if change.sequence <= after:
                    continue
                if size >= bytes_max and found and change.sequence != found[-1].sequence:
                    return found, found[-1].sequence
                found.append(change)
                size += size_of(change)
        return found, max(after, through)

    def _make_room(self) -> None:
        while self.size > self._bytes_max:
            followed, kept = self._order.popleft()
            if followed.groups and followed.groups[0] is kept:
                followed.groups.popleft()
                followed.floor = kept.last
                self.size -= kept.size
            else:
                self._forgotten -= 1
        if self._forgotten > len(self._order) // 2:
            here = {id(kept) for one in self._followed.values() for kept in one.groups}
            self._order = deque(entry for entry in self._order if id(entry[1]) in here)
            self._forgotten = 0

    def _forget(self, followed: _Followed, floor: int) -> None:
        self.size -= sum(kept.size for kept in followed.groups)
        self._forgotten += len(followed.groups)
        followed.groups.clear()
        followed.floor = floor
