"""A commit group: tickets that become durable together and go to each follower as one message.

All that is queued while a commit is under way makes the next group. It is this object from the
first ticket to the last answer; its number names it only where it leaves this process: towards the
writer's process, and on followers' streams.

    OPEN ---------> SEALED ---------> OUT ---------------> DURABLE ---------> COMPLETE
          seal            hand over    |  the disk answers          held by all
                                       '--> followers commit it too, and acknowledge it

A put with three copies: its ticket joins group 8 (OPEN) while 7 is out. The disk answers for 7; 8
is SEALED and handed over (OUT): its frame goes to the disk, its batch to both followers. One of
them acknowledges it, then the disk answers (DURABLE: the put is in the store, and a read that finds
it there waits), then the other follower acknowledges it: COMPLETE, and the put is answered. (With
``durability="primary"`` it is answered when the group is DURABLE.)

A group goes forward only (``NEXT``). What cuts it short, or its tickets:

- No room in the queue or the store: the group never hears of it, since room is checked before
  sequences are given (rule 8). Refused, typed.
- A ticket builds on a refused one: it is refused on the spot. Its sequences are given, so that a
  primary's ticket joins all the same, without what it would have stored.
- Partitions are handed over while the group is QUEUED (rules 8 and 22): what it has for them, and
  what was decided upon that, is refused: nothing of it is stored, here or elsewhere.
- A ticket finds no room at the commit: the group is DURABLE without it and what builds on it
  (nothing does on a loose one). Refused; but of unknown fate where a follower was sent it
  (``spilled``), and then its partitions are handed over (rule 8).
- The disk hangs (rule 22): the group stays OUT until it answers and goes on then. Who waits for a
  partition that is handed over meanwhile ends at once: what is OUT as unknown, what is QUEUED
  refused. Nothing of it is acknowledged.
- A follower is gone, or late: the group is DURABLE and, after a moment, ``stuck``: from then on it
  counts partition by partition, until that follower has left the set. So a write of a partition
  that does without this follower is not held up by one in its group that does not.
- A partition is another's to lead: followers are required no more, and the group is COMPLETE as far
  as that goes; the engine sees that it leads no more, and answers unknown.
- A partition is adopted anew: DURABLE groups forget what they have of it.
- The writer's process ends: what is not DURABLE is LOST. All that waits ends as unknown; so does
  the node.

Rules of order:
- Groups are sealed, handed over and made durable in the order of their numbers, and completed in
  any order. (Those that write one partition complete in order all the same: a follower acknowledges
  in order.)
- What is DURABLE is in the store, or lies over it (overlay.py) until that has taken over the
  log that the group was handed over to: reads and conditions find it there, and what is not durable
  they find in ``records``.
- Tickets learn their fate after the group has taken its: first ``spilled`` and what is refused for
  it, then answers.

Pure: the driver makes the waiters; they are only ever ended here.
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
    SEALED = auto()  # nothing joins; it waits for its turn at the disk
    OUT = auto()  # handed over to the disk, and sent to followers
    DURABLE = auto()  # here, but for the tickets that failed
    COMPLETE = auto()  # and on every replica that has to hold it
    LOST = auto()  # its fate stays unknown

    __hash__ = object.__hash__  # an enum's own hashes the name, in Python, at each change of state


class GroupEvent(Enum):
    """The events that take a group from state to state."""

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
"""Nothing of the group has left this process: its tickets can be refused."""


class Waiter(Protocol):
    """Waits for one end: an asyncio future without a result, or a callback."""

    def done(self) -> bool: ...

    def set_result(self, result: None, /) -> None: ...

    def set_exception(self, exception: BaseException, /) -> None: ...


@dataclass(kw_only=True, slots=True, eq=False)
class Ticket:
    """Writes that were queued in one piece: all of them are stored or none. Its decision does not
    change; the fields below ``group`` do, until it is answered.
    """

    durable: Waiter  # ends when it is durable here, or has failed
    writes: Writes = ()  # what the disk gets; dropped when that has it
    after: int = 0
    """The oldest group that its decision looked at; 0: none. It is refused if a ticket of that
    group or a later one was."""
    chained: bool = False
    """It is refused if a ticket before it in its group was that wrote the metadata of a partition
    which this one writes too; so nothing of a partition is stored on top of a gap."""
    loose: bool = False  # nothing builds on it: nothing is refused where it finds no room
    bulk: bool = False  # rows in key order, many of a partition: the log would save nothing
    touched: U32Array = field(default_factory=lambda: _NO_PARTITIONS)  # partitions, each once
    sequenced: bool = False
    """A primary's: what it writes counts against the bounds until its group is complete, followers
    get it, and a client waits for it. The next four are of such tickets only."""
    lasts: U64Array = field(default_factory=lambda: _NO_SEQUENCES)  # by ``touched``
    records: Mapping[bytes, bytes | None] = field(default_factory=dict)  # dropped with ``writes``
    observed: Mapping[CommitGroup, Collection[int]] = field(default_factory=dict)
    """Groups that its decision looked at, with the partitions there: these are complete before it
    is answered, since it tells of what they did."""
    merge: bytes = b""  # the step (MergeStep, serialized), if it is one: of one partition
    group: CommitGroup | None = None  # that it joined; None: refused on the spot
    failed: KoinonError | None = None  # why nothing of it is stored here
    spilled: bool = False  # it failed here, and a follower may have it

    def touches(self, partitions: BoolArray) -> bool:
        return bool(len(self.touched)) and bool(partitions[self.touched].any())

    def end(self, error: KoinonError | None) -> None:
        """Tell who waits for it, unless that was told before."""
        end(self.durable, error)

    def frame(self) -> TicketFrame:
        """Return what the disk gets of it: of one that was refused, nothing to store."""
        if self.failed is not None:
            return 0, 0, ()
        ties = CHAINED * self.chained | LOOSE * self.loose | BULK * self.bulk
        return self.after, ties, self.writes


@dataclass(slots=True, eq=False)
class CommitGroup:
    """One group; see the module's docstring. ``PendingWrites`` takes it from state to state."""

    number: int  # rises by one a group; what followers and the writer's process call it
    state: GroupState = GroupState.OPEN
    tickets: list[Ticket] = field(default_factory=list)
    """In the order of their decisions: of one key the last wins. None once they are answered."""
    urgent: bool = False  # synced now, whatever the durability of records is
    rows: int = 0  # of all tickets, and their bytes: what is queued and out counts
    size: int = 0
    held_rows: int = 0  # of these, those of sequenced tickets: they count until it is complete
    held_size: int = 0
    records: dict[bytes, bytes | None] = field(default_factory=dict)
    """The record that sequenced tickets leave of each key, None where they leave none. Reads wait
    for these records, conditions see them before they are in the store, and followers are sent
    them."""
    claims: set[bytes] = field(default_factory=set)
    """Prefixes of the partitions in which it carries out merge steps: what it writes there the
    store alone knows."""
    removed: list[bytes] | None = None  # keys whose record is None, sorted; made when asked for
    touched: U32Array = field(default_factory=lambda: _NO_PARTITIONS)
    """Partitions of sequenced tickets, and their last sequences in ``lasts``: what followers have
    to hold. Empty before it is handed over. A partition may be there more than once where none has
    followers; then its last entry counts."""
    lasts: U64Array = field(default_factory=lambda: _NO_SEQUENCES)
    spilled: U32Array = field(default_factory=lambda: _NO_PARTITIONS)  # that followers were sent
    sent_at: float = 0.0  # when it was handed over, and when it was durable here: monotonic s
    committed_at: float = 0.0
    stuck: bool = False  # DURABLE, and late: looked at in ticks only, partition by partition
    led_in: U64Array | None = None
    """By partition, the epoch that this node led in under its lease when the group was complete;
    None: it is not complete, or there was no lease."""
    led_early: dict[int, int] = field(default_factory=dict)
    """The same of partitions whose part was complete before the rest: they may be handed on before
    the group is complete."""
    stored: Waiter | None = None  # ends when it is durable here (or has failed), if somebody waits
    waiting: list[tuple[U32Array, Waiter]] = field(default_factory=list)
    """The partitions that some caller waits for, and what ends once they are complete."""

    def __hash__(self) -> int:  # the same in every run, as sets of groups are gone through
        return self.number

    def take(self, event: GroupEvent) -> None:
        """Change the state. An event that has no place in it is a defect: KeyError."""
        self.state = NEXT[self.state, event]

    def sequences(self) -> tuple[U32Array, U64Array]:
        """Return (partitions, last sequences) of its sequenced tickets, one after the other. Those
        that were refused are among them: the gap that they leave would else stay open until the
        next write.
        """
        tickets = [ticket for ticket in self.tickets if ticket.sequenced and len(ticket.touched)]
        if not tickets:
            return _NO_PARTITIONS, _NO_SEQUENCES
        if len(tickets) == 1:
            return tickets[0].touched, tickets[0].lasts
        touched = np.concatenate([ticket.touched for ticket in tickets])
        return touched, np.concatenate([ticket.lasts for ticket in tickets])

    def merges(self) -> dict[int, bytes]:
        """Return its merge steps by partition, but for those that were refused."""
        return {
            int(ticket.touched[0]): ticket.merge
            for ticket in self.tickets
            if ticket.merge and ticket.failed is None
        }

    def frame(self) -> GroupFrame:
        """Return what the disk gets."""
        return self.number, self.urgent, [ticket.frame() for ticket in self.tickets]

    def answer(self) -> None:
        """Tell who waits for its tickets, and for it to be durable here. The tickets are forgotten
        with that: they have the groups that they looked at, those have their tickets, and so on.
        """
        tickets, self.tickets = self.tickets, []
        for ticket in tickets:
            ticket.end(ticket.failed)
        self.end_stored()

    def end_stored(self, error: KoinonError | None = None) -> None:
        """Tell who waits for it to be durable here."""
        stored, self.stored = self.stored, None
        if stored is not None:
            end(stored, error)

    def end_waiting(self, error: KoinonError | None = None) -> None:
        """Tell who waits for partitions to be complete."""
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
