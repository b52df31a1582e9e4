"""A commit group: tickets that become durable together and go to each follower as one message.

Tickets that are queued while a commit is under way make up the next group. A group is this object
from its first ticket to its last answer. Only outside this process, in the writer process and on
followers' streams, its number identifies it.

    OPEN ---------> SEALED ---------> OUT ---------------> DURABLE ---------> COMPLETE
          seal            hand over    |  the disk answers          held by all
                                       '--> followers commit it too, and acknowledge it

A put with three copies: its ticket joins group 8 (OPEN) while 7 is out. The disk answers for 7; 8
is SEALED and handed over (OUT): its frame goes to the disk, its batch to both followers. One of
them acknowledges it, then the disk answers (DURABLE: the put is in the store, and a read that finds
it there waits), then the other follower acknowledges it: COMPLETE, and the put is answered. (With
``durability="primary"`` it is answered when the group is DURABLE.)

A group's state only moves forward (``NEXT``). Events that end a group or its tickets early:

- There is no room in the queue or the store: the write is refused with a typed error and joins no
  group, since room is checked before sequences are given (rule 8).
- A ticket depends on a refused ticket: it is refused at once. Its sequences are given already, so a
  primary's ticket still joins, without its writes.
- Partitions are handed over while the group is QUEUED (rules 8 and 22): its tickets in these
  partitions, and the tickets that depend on them, are refused. They are stored nowhere.
- A ticket finds no room at the commit: the group is DURABLE without this ticket and those that
  depend on it (none depends on a loose ticket). The write is refused; but if a follower was sent it
  (``spilled``) its fate is unknown, and its partitions are handed over (rule 8).
- The disk hangs (rule 22): the group stays OUT until the disk answers, and then continues. Waiters
  for a partition that is handed over meanwhile end at once: writes that are OUT with unknown fate,
  QUEUED ones refused. No write of it is acknowledged.
- A follower is gone or late: the group is DURABLE and, after a moment, ``stuck``. From then on each
  partition of the group counts by itself, until that follower has left the set. So a write of a
  partition that does not need this follower does not wait for another partition that does.
- Another node becomes primary of a partition: its followers are no longer required here, and the
  group may become COMPLETE; the engine sees that it no longer leads, and answers "unknown fate".
- A partition is adopted again: DURABLE groups forget their records and claims of it.
- The writer process ends: groups that are not DURABLE are LOST. All waiters end with unknown fate,
  and the node stops.

Rules of order:
- Groups are sealed, handed over and made durable in the order of their numbers, and completed in
  any order. (Those that write one partition complete in order all the same: a follower acknowledges
  in order.)
- Records of a DURABLE group are in the store or, until the store has taken over the log, in the
  overlay (overlay.py). Reads and conditions find them there, and records that are not durable in
  ``records``.
- Tickets are answered after the group has changed its state: first ``spilled`` and the refusals
  that follow from it, then answers.

Pure: the driver creates the waiters; only this module ends them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

import numpy as np

from koinon_node.core.formats.records import BoolArray, U32Array, U64Array
from koinon_node.core.formats.writer_frames import (
    BULK,
    CHAINED,
    LOOSE,
    GroupFrame,
    TicketFrame,
    Writes,
)
from koinon_proto.contract.errors import KoinonError

_NO_PARTITIONS = np.zeros(0, np.uint32)
_NO_SEQUENCES = np.zeros(0, np.uint64)


class GroupState(Enum):
    """The states of a group's life."""

    OPEN = auto()  # tickets join
    SEALED = auto()  # no ticket joins; waits for the disk
    OUT = auto()  # handed over to the disk, and sent to followers
    DURABLE = auto()  # durable here, except for failed tickets
    COMPLETE = auto()  # durable on every required replica, too
    LOST = auto()  # the fate stays unknown

    __hash__ = object.__hash__  # Enum hashes the name in Python, which is slow


class GroupEvent(Enum):
    """The events that change a group's state."""

    SEAL = auto()
    HAND_OVER = auto()
    MADE_DURABLE = auto()
    HELD_BY_ALL = auto()
    WRITER_ENDED = auto()

    __hash__ = object.__hash__


NEXT: Mapping[tuple[GroupState, GroupEvent], GroupState] = {
    (GroupState.OPEN, GroupEvent.SEAL): GroupState.SEALED,
    (GroupState.SEALED, GroupEvent.HAND_OVER): GroupState.OUT,
    (GroupState.OUT, GroupEvent.MADE_DURABLE): GroupState.DURABLE,
    (GroupState.DURABLE, GroupEvent.HELD_BY_ALL): GroupState.COMPLETE,
    (GroupState.OPEN, GroupEvent.WRITER_ENDED): GroupState.LOST,
    (GroupState.SEALED, GroupEvent.WRITER_ENDED): GroupState.LOST,
    (GroupState.OUT, GroupEvent.WRITER_ENDED): GroupState.LOST,
}

QUEUED = frozenset({GroupState.OPEN, GroupState.SEALED})
"""The states in which no part of the group has left this process: tickets can still be refused."""


class Waiter(Protocol):
    """Waits for one outcome: an asyncio future without a result, or a callback."""

    def done(self) -> bool: ...

    def set_result(self, result: None, /) -> None: ...

    def set_exception(self, exception: BaseException, /) -> None: ...


@dataclass(kw_only=True, slots=True, eq=False)
class Ticket:
    """Writes that are stored atomically. The fields of the decision do not change; ``group``,
    ``failed`` and ``spilled`` change until the ticket is answered.
    """

    durable: Waiter  # ends when the ticket is durable here, or has failed
    writes: Writes = ()  # for the disk; dropped once they are handed over
    after: int = 0
    """The oldest group that its decision read; 0: none. The ticket is refused if a ticket of that
    group or a later one was refused."""
    chained: bool = False
    """The ticket is refused if an earlier ticket of its group was refused that writes metadata of
    the same partition. So no write of a partition is stored above a gap."""
    loose: bool = False  # no ticket depends on it
    bulk: bool = False  # many rows of a partition in key order: the log would save nothing
    touched: U32Array = field(default_factory=lambda: _NO_PARTITIONS)  # partitions, each once
    sequenced: bool = False
    """True for a primary's writes: they count against the bounds until their group is complete,
    followers get them, and clients wait for them. Only such tickets use the next four fields."""
    lasts: U64Array = field(default_factory=lambda: _NO_SEQUENCES)  # by ``touched``
    records: Mapping[bytes, bytes | None] = field(default_factory=dict)  # dropped with ``writes``
    observed: Mapping[CommitGroup, Collection[int]] = field(default_factory=dict)
    """Groups that its decision read, with the partitions in them. They must be complete before the
    ticket is answered, since the answer reveals their writes."""
    merge: bytes = b""  # a merge step of one partition (MergeStep, serialized); b"": none
    group: CommitGroup | None = None  # the group that it joined; None: refused at once
    failed: KoinonError | None = None  # why nothing of the ticket is stored here
    spilled: bool = False  # failed here, but a follower may have stored it

    def touches(self, partitions: BoolArray) -> bool:
        return bool(len(self.touched)) and bool(partitions[self.touched].any())

    def end(self, error: KoinonError | None) -> None:
        """End the ticket's waiter, unless it has ended."""
        end(self.durable, error)

    def frame(self) -> TicketFrame:
        """Return the ticket as the disk gets it; a refused ticket has no writes."""
        if self.failed is not None:
            return 0, 0, ()
        ties = CHAINED * self.chained | LOOSE * self.loose | BULK * self.bulk
        return self.after, ties, self.writes


@dataclass(slots=True, eq=False)
class CommitGroup:
    """One group; see the module's docstring. Only ``PendingWrites`` changes its state."""

    number: int  # one more for each group; its name for followers and the writer process
    state: GroupState = GroupState.OPEN
    tickets: list[Ticket] = field(default_factory=list)
    """In the order of their decisions: the last write of a key wins. Empty once they are
    answered."""
    urgent: bool = False  # sync at once, whatever the durability of records is
    rows: int = 0  # of all tickets; counts against the bounds until the group is durable
    size: int = 0  # bytes, likewise
    held_rows: int = 0  # of sequenced tickets; counts until the group is complete
    held_size: int = 0
    records: dict[bytes, bytes | None] = field(default_factory=dict)
    """By key: the record after the sequenced tickets, None for no record. Reads wait for these
    records, conditions see them before they are in the store, and followers get them."""
    claims: set[bytes] = field(default_factory=set)
    """Prefixes of the partitions in which the group executes merge steps: only the store knows the
    rows that these write."""
    removed: list[bytes] | None = None  # keys whose record is None, sorted; built on demand
    touched: U32Array = field(default_factory=lambda: _NO_PARTITIONS)
    """Partitions of sequenced tickets; ``lasts`` has their last sequences, which followers must
    hold. Empty before the hand-over to the disk. Without followers a partition may appear more than
    once; then its last entry counts."""
    lasts: U64Array = field(default_factory=lambda: _NO_SEQUENCES)
    # Partitions sent to followers.
    spilled: U32Array = field(default_factory=lambda: _NO_PARTITIONS)
    sent_at: float = 0.0  # time of the hand-over to the disk, monotonic seconds
    committed_at: float = 0.0  # time at which it became durable here, monotonic seconds
    stuck: bool = False  # DURABLE but late: checked only in ticks, partition by partition
    led_in: U64Array | None = None
    """By partition: the epoch in which this node led under its lease when the group became
    complete; None: the group is not complete, or there was no lease."""
    led_early: dict[int, int] = field(default_factory=dict)
    """The same for partitions that became complete before the whole group: they may be handed over
    before the group is complete."""
    stored: Waiter | None = None  # ends when the group is durable here or has failed
    waiting: list[tuple[U32Array, Waiter]] = field(default_factory=list)
    """Waiters with the partitions whose completion they wait for."""

    def __hash__(self) -> int:  # the same in every run, since sets of groups are iterated
        return self.number

    def take(self, event: GroupEvent) -> None:
        """Change the state. An event that does not fit the state is a defect: KeyError."""
        self.state = NEXT[self.state, event]

    def sequences(self) -> tuple[U32Array, U64Array]:
        """Return (partitions, last sequences) of its sequenced tickets, one after the other.
        Refused tickets are included: else the gap that they leave would stay open until the next
        write.
        """
        tickets = [ticket for ticket in self.tickets if ticket.sequenced and len(ticket.touched)]
        if not tickets:
            return _NO_PARTITIONS, _NO_SEQUENCES
        if len(tickets) == 1:
            return tickets[0].touched, tickets[0].lasts
        touched = np.concatenate([ticket.touched for ticket in tickets])
        return touched, np.concatenate([ticket.lasts for ticket in tickets])

    def merges(self) -> dict[int, bytes]:
        """Return its merge steps by partition, without refused ones."""
        return {
            int(ticket.touched[0]): ticket.merge
            for ticket in self.tickets
            if ticket.merge and ticket.failed is None
        }

    def frame(self) -> GroupFrame:
        """Return the group as the disk gets it."""
        return self.number, self.urgent, [ticket.frame() for ticket in self.tickets]

    def answer(self) -> None:
        """End the waiters of its tickets and of its durability. The tickets are dropped then, since
        they refer to the groups that they read, those to their tickets, and so on.
        """
        tickets, self.tickets = self.tickets, []
        for ticket in tickets:
            ticket.end(ticket.failed)
        self.end_stored()

    def end_stored(self, error: KoinonError | None = None) -> None:
        """End the waiter for its durability here."""
        stored, self.stored = self.stored, None
        if stored is not None:
            end(stored, error)

    def end_waiting(self, error: KoinonError | None = None) -> None:
        """End the waiters for complete partitions."""
        waiting, self.waiting = self.waiting, []
        for _, waiter in waiting:
            end(waiter, error)


def end(waiter: Waiter, error: KoinonError | None = None) -> None:
    """End the waiter, unless it has ended."""
    if waiter.done():
        return
    if error is None:
        waiter.set_result(None)
    else:
        waiter.set_exception(error)
