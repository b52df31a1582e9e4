"""The commit groups that are not complete: reads wait for them, and conditions see their records.

Tickets join a group until it is sealed. Groups become durable here in order, and complete when all
required replicas hold them (commit_group.py). A condition reads the records of groups that are not
durable here, and below them the store; a read never returns a record that is not complete. Within a
group the last record of a key wins.

A group that merges staged rows of a bulk load in a partition *claims* the partition: only the store
knows the rows that the group writes there. Until it is complete, reads of the partition wait for
it, and no decision is based on the partition's records; unconditional writes continue in later
groups.

A record of None is a removal that leaves nothing in the store. A read recognises it like any
record: by finding the same in the store as the group has for the key, here nothing.

Invariants: numbers are consecutive. The groups that are not durable here are, oldest first, at most
one that is out (more, if the driver allows it), any number of sealed ones, and the open one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice

from koinon_node.core.formats.records import BoolArray, prefix_of
from koinon_node.core.writes.commit_group import QUEUED, CommitGroup, GroupEvent, GroupState, Ticket
from koinon_proto.contract.errors import KoinonError, StorageFullError, UnknownFateError


class PendingWrites:
    """All groups that are not complete. Only this class changes their states."""

    def __init__(self, node_id: str) -> None:
        self.node_id = node_id  # named in refusals
        self.open = CommitGroup(1)
        # Groups not durable here, oldest first; the open one last.
        self._ahead = deque((self.open,))
        # Groups that are durable here but not complete: by number, oldest first.
        self._durable: dict[int, CommitGroup] = {}
        self._claiming: list[CommitGroup] = []  # groups that claim a partition, oldest first
        # Sums over groups that count against the bounds, see CommitGroup.rows.
        self.rows = self.size = 0
        self.lost = ""  # why no more answers will come; '': they will
        self._refused_group = 0  # the newest group of which a queued ticket was refused

    # --- a group's life --------------------------------------------------------------------

    def join(self, ticket: Ticket, rows: int, size: int, *, urgent: bool) -> bool:
        """Add the ticket to the open group. Return False if it is refused since it depends on a
        refused ticket. A primary's ticket is in the group even then, since its sequences are given.
        """
        if refused := 0 < ticket.after <= self._refused_group:
            ticket.failed = self._dependent_error()
            ticket.end(ticket.failed)
            if not ticket.sequenced or not len(ticket.touched):
                return False
            rows = size = 0
        group = ticket.group = self.open
        group.tickets.append(ticket)
        group.urgent |= urgent
        group.rows += rows
        group.size += size
        self.rows += rows
        self.size += size
        if ticket.sequenced:
            group.held_rows += rows
            group.held_size += size
        if not refused:
            group.records.update(ticket.records)
            if ticket.merge:
                self._claim(group, int(ticket.touched[0]))
        return True

    def _claim(self, group: CommitGroup, partition_id: int) -> None:
        if not group.claims:
            self._claiming.append(group)
        group.claims.add(prefix_of(partition_id))

    def seal(self) -> CommitGroup:
        """Close the open group, open the next, and return the closed one."""
        sealed = self.open
        sealed.take(GroupEvent.SEAL)
        self.open = CommitGroup(sealed.number + 1)
        self._ahead.append(self.open)
        return sealed

    def hand_over(self, now: float) -> CommitGroup:
        """Hand the oldest sealed group over to the disk, and return it."""
        group = next(group for group in self._ahead if group.state is GroupState.SEALED)
        group.take(GroupEvent.HAND_OVER)
        group.sent_at = now
        return group

    def made_durable(self, now: float) -> CommitGroup:
        """Note that the oldest group is durable here, except for failed tickets, and return it.
        From now on the store or the overlay has its records.
        """
        group = self._ahead[0]
        group.take(GroupEvent.MADE_DURABLE)
        group.committed_at = now
        self._durable[group.number] = self._ahead.popleft()
        self.rows -= group.rows - group.held_rows
        self.size -= group.size - group.held_size
        return group

    def complete(self, group: CommitGroup) -> None:
        """Note that all required replicas hold the group; end the waiters for that."""
        group.take(GroupEvent.HELD_BY_ALL)
        del self._durable[group.number]
        if group in self._claiming:
            self._claiming.remove(group)
        self.rows -= group.held_rows
        self.size -= group.held_size
        group.end_waiting()

    def lose(self, reason: str) -> None:
        """End all waiters with unknown fate: no more answers will come."""
        self.lost = reason
        for group in self._ahead:
            group.take(GroupEvent.WRITER_ENDED)
            for ticket in group.tickets:
                ticket.end(UnknownFateError(reason=reason))
            group.end_stored()
        for group in self:
            group.end_waiting(UnknownFateError(reason=reason))

    # --- early ends ------------------------------------------------------------------------

    def refuse_queued(self, partitions: BoolArray, error: KoinonError) -> None:
        """Refuse the tickets of these partitions that are queued and not handed over yet, and the
        tickets that depend on them. They are stored nowhere. A client's writes get the error; the
        node's own tickets get the error of a dependent ticket, and are retried. All are answered
        when their group is durable.
        """
        for group in self._ahead:
            if group.state not in QUEUED:
                continue
            for ticket in group.tickets:
                if ticket.touches(partitions) or 0 < ticket.after <= self._refused_group:
                    refusal = error if ticket.sequenced else self._dependent_error()
                    ticket.failed = ticket.failed or refusal
                    self._refused_group = max(self._refused_group, group.number)
            group.removed = None
            group.records = {}
            for ticket in group.tickets:
                if ticket.failed is None:
                    group.records.update(ticket.records)

    def give_up(self, partitions: BoolArray, error: KoinonError) -> None:
        """End all waiters for these partitions at once, since the disk does not answer: writes
        handed over with unknown fate, queued writes and waiting reads with the error.
        """
        self.refuse_queued(partitions, error)
        for group in self._ahead:
            for ticket in group.tickets:
                fate: KoinonError | None = ticket.failed
                if group.state is GroupState.OUT:
                    ends = ticket.touches(partitions)
                    fate = UnknownFateError(reason=str(error)) if ends else None
                if fate is not None and ticket.sequenced:
                    ticket.end(fate)
            group.end_stored(error)

    def forget(self, prefixes: Collection[bytes]) -> None:
        """Drop the records and claims of durable groups in these partitions, which this node adopts
        again.
        """
        for group in self._durable.values():
            group.records = {k: r for k, r in group.records.items() if k[:2] not in prefixes}
            group.removed = None
            group.claims.difference_update(prefixes)

    def _dependent_error(self) -> StorageFullError:
        reason = "a write that this write depends on was refused"
        return StorageFullError(node_id=self.node_id, reason=reason)

    # --- groups under way ------------------------------------------------------------------

    @property
    def sealed(self) -> bool:
        """Return whether a sealed group waits for the disk."""
        return len(self._ahead) > 1 and self._ahead[-2].state is GroupState.SEALED

    @property
    def idle(self) -> bool:
        """Return whether no group is out and no ticket is queued."""
        return len(self._ahead) == 1 and not self.open.tickets

    def durable(self) -> list[CommitGroup]:
        """Return the groups that are durable here but not complete, oldest first."""
        return list(self._durable.values())

    def sent(self) -> Iterator[CommitGroup]:
        """Return the groups that were sent to followers, oldest first."""
        return (group for group in self if len(group.touched))

    def is_queued(self, partitions: BoolArray) -> bool:
        """Return whether a ticket of any of these partitions is not durable here yet."""
        return any(ticket.touches(partitions) for group in self._ahead for ticket in group.tickets)

    def __iter__(self) -> Iterator[CommitGroup]:
        yield from self._durable.values()
        yield from self._ahead

    # --- for reads and conditions ----------------------------------------------------------

    @property
    def claimed(self) -> bool:
        """Return whether any group claims a partition."""
        return bool(self._claiming)

    def claiming(self, prefixes: Collection[bytes]) -> list[CommitGroup]:
        """Return the groups that claim one of these partitions."""
        return [group for group in self._claiming if not group.claims.isdisjoint(prefixes)]

    def _claiming_keys(self, keys: Collection[bytes]) -> list[CommitGroup]:
        return self.claiming({key[:2] for key in keys}) if self._claiming else []

    def overlapping(self, keys: Collection[bytes]) -> list[CommitGroup]:
        """Return the groups that write one of ``keys``, newest first, and the groups that claim the
        partition of one.
        """
        return [
            *_overlapping(reversed(self._ahead), keys),
            *_overlapping(reversed(self._durable.values()), keys),
            *self._claiming_keys(keys),
        ]

    def incomplete(self, keys: Collection[bytes]) -> list[CommitGroup]:
        """Return the groups that are in the store but not complete, and write one of ``keys``."""
        return _overlapping(reversed(self._durable.values()), keys) if self._durable else []

    def seen(
        self, keys: Collection[bytes], rows: Sequence[tuple[bytes, bytes]]
    ) -> list[CommitGroup]:
        """Return the incomplete groups whose writes a read of ``keys`` from the store may have
        seen; ``rows`` are the (key, record) pairs that it found. A group that is being committed is
        in the store a moment before the disk's answer: it counts if a key has the group's record
        there.
        """
        return [*self._seen(keys, rows), *self._claiming_keys(keys)]

    def seen_in_scan(
        self,
        head: bytes,
        after: bytes,
        rows: Sequence[tuple[bytes, bytes]],
        *,
        more: bool,
        below: bytes = b"",
    ) -> list[CommitGroup]:
        """Like ``seen``, for a scan of all data keys with the prefix ``head`` after ``after``, up
        to the last of ``rows`` if there are ``more``, else to the end. A descending scan covers the
        keys with this prefix from ``below`` down.
        """
        if more and not rows:
            return []  # the scan read nothing
        keys = [key for key, _ in rows]
        first, last = max(head, after), keys[-1] if more else None
        if below:
            first, last = last or head, below
        for group in self:
            if group is not self.open:
                removed = _removed_by(group)
                for key in islice(removed, bisect_left(removed, first), None):
                    if not key.startswith(head) or (last is not None and key > last):
                        break
                    keys.append(key)
        claiming = self.claiming((head[:2],)) if self._claiming else []
        return [*self._seen(keys, rows), *claiming]

    def _seen(
        self, keys: Collection[bytes], rows: Sequence[tuple[bytes, bytes]]
    ) -> list[CommitGroup]:
        sealed = [
            group
            for group in self._ahead
            if group is not self.open
            and group.records
            and not group.records.keys().isdisjoint(keys)
        ]
        if not sealed:
            return self.incomplete(keys)
        found = dict(rows)
        committing = [
            group
            for group in sealed
            if any(key in group.records and group.records[key] == found.get(key) for key in keys)
        ]
        return [*committing, *self.incomplete(keys)]

    def find(self, key: bytes) -> tuple[CommitGroup | None, bytes | None]:
        """Return (group, record) of the newest write of ``key`` that is not durable here; (None,
        None) if there is none.
        """
        for group in reversed(self._ahead):
            if key in group.records:
                return group, group.records[key]
        return None, None


def _removed_by(group: CommitGroup) -> list[bytes]:
    if group.removed is None:
        gone = (key for key, record in group.records.items() if record is None)
        group.removed = sorted(gone) if None in group.records.values() else []
    return group.removed


def _overlapping(groups: Iterable[CommitGroup], keys: Collection[bytes]) -> list[CommitGroup]:
    return [
        group for group in groups if group.records and not group.records.keys().isdisjoint(keys)
    ]
