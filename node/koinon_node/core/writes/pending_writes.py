"""The commit groups that are not complete: what reads wait for and conditions look at.

A group is filled until it is sealed, is made durable here in order, and is complete when all
replicas that have to hold it do (commit_group.py). A condition looks at what is not durable
here and else at the store; a read does not see what is not complete. Within a group the last record
of a key wins.

A group that merges what a bulk load staged in a partition *claims* it: what it writes there is
known to the store alone. Until it is complete, reads of the partition wait for it, and nothing is
decided upon what the partition holds; rows that are written without looking go on, in later groups.

A record of None is a removal that leaves nothing in the store. A read sees it as it sees any other:
by finding what the group leaves of the key, here nothing.

Invariants: numbers are consecutive; what is not durable here is, oldest first, at most one group
that is out (more, if the driver lets it), any number of sealed ones, and the open one.
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
    """All groups that are not complete. Only here do groups change their states."""

    def __init__(self, node_id: str) -> None:
        self.node_id = node_id  # named in refusals
        self.open = CommitGroup(1)
        self._ahead = deque((self.open,))  # not durable here, oldest first; the open one is last
        # Durable here, and not complete: by number, oldest first.
        self._durable: dict[int, CommitGroup] = {}
        self._claiming: list[CommitGroup] = []  # those that claim a partition, oldest first
        # What counts against the bounds, see CommitGroup.rows: changed where groups change.
        self.rows = self.size = 0
        self.lost = ""  # why nothing is answered any more
        self._refused_group = 0  # the newest of which a ticket was refused while it was queued

    # --- a group's life --------------------------------------------------------------------

    def join(self, ticket: Ticket, rows: int, size: int, *, urgent: bool) -> bool:
        """Add the ticket to the open group. False: it is refused, since what it builds on was. Its
        sequences are given, though, so that a primary's ticket is in the group all the same.
        """
        if refused := 0 < ticket.after <= self._refused_group:
            ticket.failed = self._built_on_a_refused_one()
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
        """Return the oldest sealed group, whose way to the disk begins now."""
        group = next(group for group in self._ahead if group.state is GroupState.SEALED)
        group.take(GroupEvent.HAND_OVER)
        group.sent_at = now
        return group

    def made_durable(self, now: float) -> CommitGroup:
        """The oldest group is durable here, but for tickets that failed: from now on the store says
        what it left. Return it.
        """
        group = self._ahead[0]
        group.take(GroupEvent.MADE_DURABLE)
        group.committed_at = now
        self._durable[group.number] = self._ahead.popleft()
        self.rows -= group.rows - group.held_rows
        self.size -= group.size - group.held_size
        return group

    def complete(self, group: CommitGroup) -> None:
        """All replicas that have to hold the group do; who waits for that is told."""
        group.take(GroupEvent.HELD_BY_ALL)
        del self._durable[group.number]
        if group in self._claiming:
            self._claiming.remove(group)
        self.rows -= group.held_rows
        self.size -= group.held_size
        group.end_waiting()

    def lose(self, reason: str) -> None:
        """Tell all who wait for anything that nothing will be answered any more."""
        self.lost = reason
        for group in self._ahead:
            group.take(GroupEvent.WRITER_ENDED)
            for ticket in group.tickets:
                ticket.end(UnknownFateError(reason=reason))
            group.end_stored()
        for group in self:
            group.end_waiting(UnknownFateError(reason=reason))

    # --- what cuts it short ----------------------------------------------------------------

    def refuse_queued(self, partitions: BoolArray, error: KoinonError) -> None:
        """Refuse what is queued, and not handed over yet, for any of these partitions, and what
        was decided upon it. Nothing of that will be stored, here or elsewhere. A client's writes
        end with the error; the node's own work as what builds on a refused ticket, and tries again.
        They are told when their group is made durable.
        """
        for group in self._ahead:
            if group.state not in QUEUED:
                continue
            for ticket in group.tickets:
                if ticket.touches(partitions) or 0 < ticket.after <= self._refused_group:
                    refusal = error if ticket.sequenced else self._built_on_a_refused_one()
                    ticket.failed = ticket.failed or refusal
                    self._refused_group = max(self._refused_group, group.number)
            group.removed = None
            group.records = {}
            for ticket in group.tickets:
                if ticket.failed is None:
                    group.records.update(ticket.records)

    def give_up(self, partitions: BoolArray, error: KoinonError) -> None:
        """End at once what waits for these partitions, since the disk does not answer: what was
        handed over is of unknown fate, what is only queued is refused, and so are reads that wait.
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
        """Drop what durable groups hold of these partitions: this node leads them anew."""
        for group in self._durable.values():
            group.records = {k: r for k, r in group.records.items() if k[:2] not in prefixes}
            group.removed = None
            group.claims.difference_update(prefixes)

    def _built_on_a_refused_one(self) -> StorageFullError:
        reason = "a write that this one builds on was refused"
        return StorageFullError(node_id=self.node_id, reason=reason)

    # --- what is under way -----------------------------------------------------------------

    @property
    def sealed(self) -> bool:
        """Return whether a group waits for its turn at the disk."""
        return len(self._ahead) > 1 and self._ahead[-2].state is GroupState.SEALED

    @property
    def idle(self) -> bool:
        """Return whether nothing is queued or out."""
        return len(self._ahead) == 1 and not self.open.tickets

    def durable(self) -> list[CommitGroup]:
        """Return the groups that are durable here and not complete, oldest first."""
        return list(self._durable.values())

    def sent(self) -> Iterator[CommitGroup]:
        """Return the groups of which followers may have to hold something, oldest first."""
        return (group for group in self if len(group.touched))

    def is_queued(self, partitions: BoolArray) -> bool:
        """Return whether a ticket that has ``touched`` any of these is not durable here yet."""
        return any(ticket.touches(partitions) for group in self._ahead for ticket in group.tickets)

    def __iter__(self) -> Iterator[CommitGroup]:
        yield from self._durable.values()
        yield from self._ahead

    # --- what reads and conditions ask -----------------------------------------------------

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
        """Return the groups that write one of ``keys``, newest first; those that claim its
        partition are among them.
        """
        return [
            *_overlapping(reversed(self._ahead), keys),
            *_overlapping(reversed(self._durable.values()), keys),
            *self._claiming_keys(keys),
        ]

    def incomplete(self, keys: Collection[bytes]) -> list[CommitGroup]:
        """Return the groups that are in the store, not complete, and write one of ``keys``."""
        return _overlapping(reversed(self._durable.values()), keys) if self._durable else []

    def seen(
        self, keys: Collection[bytes], rows: Sequence[tuple[bytes, bytes]]
    ) -> list[CommitGroup]:
        """Return the groups, not complete, of which a read of ``keys`` from the store may have seen
        something; ``rows`` are the (key, record) that it found. One that is being committed is in
        the store a moment before its answer comes: it may have been seen where a key has what it
        leaves there.
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
        """As ``seen``, of a read of all data keys that begin with ``head`` and follow ``after``, up
        to the last of ``rows`` if there are ``more``, else to the end. Where keys descend, of all
        that begin with ``head`` from ``below`` down.
        """
        if more and not rows:
            return []  # it looked at nothing
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
        """Return (group, record) of the newest write of ``key`` that is not durable here; None if
        there is no such group.
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
