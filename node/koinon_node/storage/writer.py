"""Group commit: queued tickets form a group, which is made durable at once and then answered.

With a log a group is one record of it, else one transaction. Transactions are made by a process of
their own (writer_process.py), fed over a socket pair from the event loop. py-lmdb takes and drops
the GIL at every row, so that a thread that writes and a loop that serves slow one another down.
Measured on 2 cores with a client process that keeps 8 batches of 1,000 rows (16 B keys, 100 B
values) of writes in flight, and 12 of reads beside them; "stall" is the longest that the loop kept
a timer waiting:

    writes alone     mixed: writes   reads        stall
    108,000 rows/s   88,700 rows/s   489,000/s    20.4 ms   a thread
    115,000          94,000          404,000       9.9 ms   a thread, switch interval 0.5 ms
    119,500          97,500          451,000      20.5 ms   a thread, switch interval 0.1 ms
     88,000          81,000           53,000      29.7 ms   putting and committing on the loop
    120,000         115,300          483,000      28.3 ms   a process, fed by a thread
    119,000         115,000          587,000       4.0 ms   a process, fed by the loop (this)

(Putting on the loop and committing on a thread is not to be had: LMDB's write lock belongs to the
thread that took it. The mixed reads of the fourth line are from a run with 2 batches in flight.)

Invariant: groups are applied and answered in order (commit_group.py has their life). Every
queue is bounded: what does not fit is refused before it is sequenced. What a group holds of the
bounds as a primary's writes it holds until it is complete, which may be long after it was committed
here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from koinon_node.config import Limits
from koinon_node.core.formats.records import U32Array
from koinon_node.core.formats.writer_frames import Writes
from koinon_node.core.writes.commit_group import QUEUED, CommitGroup, GroupState, Ticket
from koinon_node.storage.environment import META_DB
from koinon_node.storage.local_replicas import LocalReplicas
from koinon_node.storage.logged_channel import LoggedChannel, in_front_of
from koinon_node.storage.writer_channel import Answer, ProcessChannel, WriterChannel
from koinon_proto.contract.errors import (
    ResourceExhaustedError,
    StorageFullError,
    UnknownFateError,
)
from koinon_proto.process.measures import Histogram

log = logging.getLogger(__name__)

_GROUPS_IN_FLIGHT = 1  # 2 and 3 gave no more rows, only smaller groups and more fsyncs
_STOP_TIMEOUT_S = 30.0
_TELL_FULL_EVERY_S = 1.0
_ROWS = (1, 4, 16, 64, 256, 1_024, 4_096, 16_384)
_BYTES = tuple(4**n * 1_024 for n in range(8))  # 1 KiB to 16 MiB


class GroupFlow(Protocol):
    """The way of groups from here: to followers, and to their completion (CommitTracker)."""

    def on_handed_over(self, group: CommitGroup) -> None:
        """The group is on its way to the disk. Of its tickets that were refused nothing is stored
        here: it must not be elsewhere.
        """

    def on_durable(self, group: CommitGroup, unstored: Sequence[Ticket], *, whole: bool) -> None:
        """The group is durable here, but for the tickets ``unstored``, which found no room.
        ``whole``: no ticket is missing, nor one that was refused before the group was handed over.
        Who waits for tickets is told right after this.
        """


class Writer:
    """The event loop's end of the writer process. All methods belong to the loop's thread."""

    def __init__(
        self,
        local: LocalReplicas,
        flow: GroupFlow,
        limits: Limits,
        on_failure: Callable[[str], None],
        channel: WriterChannel | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        store, disk = local.store, local.disk
        self._store = store
        self.pending = local.pending
        self._flow = flow
        self._limits = limits
        self._on_failure = on_failure
        self._process = ProcessChannel(store)
        self._channel = channel or in_front_of(self._process, store)
        if isinstance(self._channel, LoggedChannel):
            self._channel.on_progress = lambda: disk.progressed(clock())
        self._clock = clock
        self.disk = disk
        self._in_flight = 0  # groups that are out, at most _GROUPS_IN_FLIGHT
        self._promised_rows = self._promised_size = 0  # of batches that are being queued
        self._used_bytes = store.used_bytes()  # of the map, by the newest answer
        self._refused_full = 0  # since that was logged
        self._told_full_at = float("-inf")  # monotonic seconds
        self._kick_due = False  # whether the open group is looked at when this turn ends
        self._failed = ""  # why nothing is taken any more; "" while all is well
        self._idle = asyncio.Event()  # set while nothing is queued or out
        self._idle.set()
        self.commit_rows = Histogram(_ROWS)
        self.commit_bytes = Histogram(_BYTES)
        self.commit_seconds = Histogram()

    async def start(self) -> None:
        """Start what applies the groups."""
        await self._channel.open(self._on_answer, self._on_lost)

    @property
    def process_id(self) -> int:
        return self._process.process_id

    @property
    def take_over_seconds(self) -> Histogram:
        """Return how long the store takes to take over stretches of the log; empty without one."""
        channel = self._channel
        return channel.take_over_seconds if isinstance(channel, LoggedChannel) else Histogram()

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    @property
    def pending_rows(self) -> int:
        return self.pending.rows

    def check_room(self, rows: int, size: int, put_size: int) -> None:
        """Check that so many more rows and bytes may be queued, ``put_size`` of them to be stored.

        Called before sequences are given. Twice the pending size is set aside for pages that are
        half full.

        Raises:
            ResourceExhaustedError: the queue is full.
            StorageFullError: the store is full.
        """
        if self._failed:
            raise UnknownFateError(reason=self._failed)
        held_rows = self.pending.rows + self._promised_rows
        held_size = self.pending.size + self._promised_size
        if held_rows and held_rows + rows > self._limits.pending_rows:
            raise ResourceExhaustedError(
                resource="rows waiting to be written", limit=self._limits.pending_rows
            )
        if held_size and held_size + size > self._limits.pending_bytes:
            raise ResourceExhaustedError(
                resource="bytes waiting to be written", limit=self._limits.pending_bytes
            )
        if put_size and not self.fits(put_size):
            limit = self._store.config.map_size_bytes
            reason = (
                f"the store holds {self._used_bytes} of {limit} bytes, {put_size} more do not fit"
            )
            self._tell_full(1, reason)
            raise StorageFullError(node_id=self.pending.node_id, reason=reason)

    def fits(self, put_size: int) -> bool:
        """Return whether so much more may be stored. What only removes may always try."""
        held_size = self.pending.size + self._promised_size + self._store.overlay.size
        limit = self._store.config.map_size_bytes
        return self._used_bytes + 2 * (held_size + put_size) <= limit

    def promise(self, rows: int, size: int, put_size: int) -> None:
        """Set room aside for a batch that is queued in steps, so that batches side by side are
        refused at once or taken whole. To be given back, step by step, with ``redeem``.

        Raises:
            As ``check_room``.
        """
        self.check_room(rows, size, put_size)
        self._promised_rows += rows
        self._promised_size += size

    def redeem(self, rows: int, size: int) -> None:
        """Give back promised room: what it was for is queued now, or will not be."""
        self._promised_rows -= rows
        self._promised_size -= size

    def submit(
        self,
        writes: Writes,
        rows: int,
        size: int,
        *,
        after_group: int = 0,
        urgent: bool = False,
        chained: bool = False,
        loose: bool = False,
        bulk: bool = False,
        touched: U32Array | None = None,
    ) -> asyncio.Future[None]:
        """Queue a ticket of the node's own work; see Ticket. The future ends as ``queue`` says."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        ticket = Ticket(
            durable=future,
            writes=writes,
            after=after_group,
            chained=chained,
            loose=loose,
            bulk=bulk,
        )
        if touched is not None:
            ticket.touched = touched
        self.queue(ticket, rows, size, urgent=urgent)
        return future

    def queue(self, ticket: Ticket, rows: int, size: int, *, urgent: bool = False) -> None:
        """Have the ticket join the open group. Its future ends when it is durable here; its errors:
        StorageFullError (nothing was applied), UnknownFateError (the writer is gone).
        """
        if self._failed:
            ticket.end(UnknownFateError(reason=self._failed))
            return
        if not self.pending.join(ticket, rows, size, urgent=urgent):
            return
        self._idle.clear()
        group = self.pending.open
        if group.rows >= self._limits.group_rows or group.size >= self._limits.group_bytes:
            self._seal()
        elif not self._kick_due and self._in_flight < _GROUPS_IN_FLIGHT:
            self._kick_due = True
            asyncio.get_running_loop().call_soon(self._kick)

    def end_group(self) -> None:
        """Let what is queued from now on go into a later group than what is queued."""
        if self.pending.open.tickets:
            self._seal()

    def begin(self, size: int) -> None:
        """End the open group if it would be too large with so much more: it goes to followers as
        one message. Called before what is to be written is decided, in the open group.
        """
        group = self.pending.open
        if group.tickets and group.size + size > self._limits.group_bytes:
            self._seal()

    async def barrier(self) -> None:
        """Wait until all that is queued now has been committed here, or refused."""
        if not self._idle.is_set():
            await self.submit((), 0, 0)

    async def settle(self, partition_ids: Iterable[int]) -> None:
        """Wait until the store itself has all of these partitions that is durable now: for what
        reads more of it than some keys.

        Raises:
            UnavailableError: the store does not catch up with its log.
        """
        if self._store.lacks(partition_ids):
            await self._channel.settle()

    async def put_meta(self, values: Mapping[bytes, str]) -> None:
        """Store facts about the node, durably whatever the durability of records is."""
        keys = list(values)
        encoded: list[bytes | None] = [value.encode() for value in values.values()]
        await self.submit(((META_DB, keys, encoded),), len(keys), 0, urgent=True)

    async def group_done(self, group: CommitGroup) -> None:
        """Wait until the group is durable here, or has failed.

        Raises:
            UnavailableError: the disk does not answer.
        """
        if group.state is GroupState.OUT or group.state in QUEUED:
            if group.stored is None:
                stored = group.stored = asyncio.get_running_loop().create_future()
                # Its error is looked at once, since all who waited may have gone by then.
                stored.add_done_callback(asyncio.Future.exception)
            assert isinstance(group.stored, asyncio.Future)
            await asyncio.shield(group.stored)

    async def drain(self) -> None:
        """Wait until nothing is queued."""
        await self._idle.wait()

    async def stop(self) -> bool:
        """Drain, unless the disk hangs, and end the process; return whether it ended clean. Nothing
        looks at the disk any more by now: one that begins to hang is waited for, but not for ever.
        """
        if not self._failed and not self.disk.hangs:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_STOP_TIMEOUT_S):
                    await self.drain()
        self._failed = self._failed or "the node is stopping"
        if self.disk.oldest:
            self._channel.kill()
        return await self._channel.close()

    # --- inside --------------------------------------------------------------------------------

    def _seal(self) -> None:
        """Close the open group; it waits for its turn."""
        if self._failed:
            return
        self.pending.seal()
        self._pump()

    def _kick(self) -> None:
        self._kick_due = False  # whether the open group is looked at when this turn ends
        pending = self.pending
        if pending.open.tickets and self._in_flight < _GROUPS_IN_FLIGHT and not pending.sealed:
            self._seal()
        else:
            self._pump()

    def _pump(self) -> None:
        """Hand over sealed groups, oldest first, while the process may have more."""
        while self._in_flight < _GROUPS_IN_FLIGHT and self.pending.sealed:
            now = self._clock()
            group = self.pending.hand_over(now)
            self._in_flight += 1
            self.disk.handed_over(group)
            self._channel.send(group.frame())
            self._flow.on_handed_over(group)
            for ticket in group.tickets:  # what is sent is sent
                ticket.writes, ticket.records = (), {}

    def _on_answer(self, answer: Answer) -> None:
        number, failures, self._used_bytes = answer
        now = self._clock()
        group = self.pending.made_durable(now)
        assert group.number == number
        self._in_flight -= 1
        self.commit_rows.observe(group.rows)
        self.commit_bytes.observe(group.size)
        self.commit_seconds.observe(self.disk.answered(now))
        whole = all(ticket.failed is None for ticket in group.tickets)
        unstored: list[Ticket] = []
        for index, reason in failures.items():
            ticket = group.tickets[index]
            ticket.failed = ticket.failed or StorageFullError(
                node_id=self.pending.node_id, reason=reason
            )
            if not ticket.loose:
                unstored.append(ticket)
        self._flow.on_durable(group, unstored, whole=whole and not unstored)
        group.answer()
        if failures:
            self._tell_full(len(failures), next(iter(failures.values())))
        self._pump()
        if self.pending.open.tickets:
            self._kick()
        elif self.pending.idle:
            self._idle.set()

    def _tell_full(self, refused: int, reason: str) -> None:
        """Log it, at most once a second: everyone who writes meets it."""
        self._refused_full += refused
        now = time.monotonic()
        if now - self._told_full_at >= _TELL_FULL_EVERY_S:
            log.warning("store full: writes refused count=%d reason=%s", self._refused_full, reason)
            self._told_full_at, self._refused_full = now, 0

    def _on_lost(self) -> None:
        if self._failed:
            return
        self._failed = "the writer process ended"
        self.pending.lose(self._failed)
        self._idle.set()
        self._on_failure(self._failed)


def columns(keys: Sequence[bytes], value: bytes | None) -> tuple[list[bytes], list[bytes | None]]:
    """Return ``keys`` and as many times ``value``."""
    return list(keys), [value] * len(keys)
