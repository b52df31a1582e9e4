"""Group commit: queued tickets form a group, which is made durable as a whole and then answered.

With a log a group is one record of it, else one transaction. A process of its own executes the
transactions (writer_process.py), fed over a socket pair from the event loop. py-lmdb takes and
releases the GIL at every row, so a writing thread and a serving event loop would slow each other
down. Measured on 2 cores with a client process that keeps 8 batches of 1,000 rows (16 B keys, 100 B
values) of writes in flight, and 12 of reads beside them; "stall" is the longest delay of a timer on
the loop:

    writes alone     mixed: writes   reads        stall
    108,000 rows/s   88,700 rows/s   489,000/s    20.4 ms   a thread
    115,000          94,000          404,000       9.9 ms   a thread, switch interval 0.5 ms
    119,500          97,500          451,000      20.5 ms   a thread, switch interval 0.1 ms
     88,000          81,000           53,000      29.7 ms   putting and committing on the loop
    120,000         115,300          483,000      28.3 ms   a process, fed by a thread
    119,000         115,000          587,000       4.0 ms   a process, fed by the loop (this)

(Putting on the loop and committing on a thread is impossible: LMDB's write lock belongs to the
thread that took it. The mixed reads of the fourth line are from a run with 2 batches in flight.)

Invariant: groups are applied and answered in order (commit_group.py has their states). Every queue
is bounded: a write that does not fit is refused before it gets a sequence. A primary's writes count
against the bounds until their group is complete, which may be long after it is durable here.
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
    """Gets groups from the writer, for followers and for their completion (CommitTracker)."""

    def on_handed_over(self, group: CommitGroup) -> None:
        """Note that the group was handed over to the disk. Its refused tickets are not stored here,
        and must not be stored on followers.
        """

    def on_durable(self, group: CommitGroup, unstored: Sequence[Ticket], *, whole: bool) -> None:
        """Note that the group is durable here, except for the tickets ``unstored``, which found no
        room. ``whole``: no ticket failed or was refused before the hand-over. The tickets are
        answered right after this call.
        """


class Writer:
    """The event loop's side of the writer process. Belongs to the loop's thread."""

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
        self._promised_rows = self._promised_size = 0  # reserved by batches that are being queued
        self._used_bytes = store.used_bytes()  # of the store, by the newest answer
        self._refused_full = 0  # writes refused since the last log line about a full store
        self._logged_full_at = float("-inf")  # time of that log line, monotonic seconds
        self._kick_due = False  # whether ``_kick`` is scheduled for the end of this turn
        self._failed = ""  # why no more tickets are accepted; '': they are
        self._idle = asyncio.Event()  # set while no ticket is queued or out
        self._idle.set()
        self.commit_rows = Histogram(_ROWS)
        self.commit_bytes = Histogram(_BYTES)
        self.commit_seconds = Histogram()

    async def start(self) -> None:
        """Start the writer process."""
        await self._channel.open(self._on_answer, self._on_lost)

    @property
    def process_id(self) -> int:
        return self._process.process_id

    @property
    def take_over_seconds(self) -> Histogram:
        """Return the durations of the store's take-overs of the log; empty without a log."""
        channel = self._channel
        return channel.take_over_seconds if isinstance(channel, LoggedChannel) else Histogram()

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    @property
    def pending_rows(self) -> int:
        return self.pending.rows

    def check_room(self, rows: int, size: int, put_size: int) -> None:
        """Check that so many more rows and bytes may be queued, and ``put_size`` bytes stored.

        Must be called before sequences are given. The store counts as full at twice the pending
        size, since pages may be half full.

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
            self._log_full(1, reason)
            raise StorageFullError(node_id=self.pending.node_id, reason=reason)

    def fits(self, put_size: int) -> bool:
        """Return whether so many more bytes may be stored. Deletes may always be tried."""
        held_size = self.pending.size + self._promised_size + self._store.overlay.size
        limit = self._store.config.map_size_bytes
        return self._used_bytes + 2 * (held_size + put_size) <= limit

    def promise(self, rows: int, size: int, put_size: int) -> None:
        """Reserve room for a batch that is queued in steps, so that each of several concurrent
        batches is accepted or refused as a whole. The caller releases the room by ``redeem``.

        Raises:
            The errors of ``check_room``.
        """
        self.check_room(rows, size, put_size)
        self._promised_rows += rows
        self._promised_size += size

    def redeem(self, rows: int, size: int) -> None:
        """Release reserved room: its rows are queued now, or will not be."""
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
        """Queue a ticket of the node's own work; see Ticket. The future ends like a ticket's in
        ``queue``.
        """
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
        """Add the ticket to the open group. Its waiter ends when it is durable here, or with
        StorageFullError (nothing was applied) or UnknownFateError (the writer has stopped).
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
        """Seal the open group, so that later tickets join a later group."""
        if self.pending.open.tickets:
            self._seal()

    def begin(self, size: int) -> None:
        """Seal the open group if ``size`` more bytes would make it too large for one message to
        followers. Must be called before a decision, which reads the open group.
        """
        group = self.pending.open
        if group.tickets and group.size + size > self._limits.group_bytes:
            self._seal()

    async def barrier(self) -> None:
        """Wait until all tickets that are queued now are durable here or refused."""
        if not self._idle.is_set():
            await self.submit((), 0, 0)

    async def settle(self, partition_ids: Iterable[int]) -> None:
        """Wait until the store has taken over all durable rows of these partitions from the log.
        Readers of whole ranges need that, since they do not read the overlay.

        Raises:
            UnavailableError: the store does not catch up with its log in time.
        """
        if self._store.lacks(partition_ids):
            await self._channel.settle()

    async def put_meta(self, values: Mapping[bytes, str]) -> None:
        """Store facts about the node, synced whatever the durability of records is."""
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
                # Retrieve its error once, since all waiters may be gone by then.
                stored.add_done_callback(asyncio.Future.exception)
            assert isinstance(group.stored, asyncio.Future)
            await asyncio.shield(group.stored)

    async def drain(self) -> None:
        """Wait until no ticket is queued or out."""
        await self._idle.wait()

    async def stop(self) -> bool:
        """Drain, unless the disk hangs, and end the process; return whether it ended cleanly. The
        disk's health is not watched any more, so the drain has a timeout.
        """
        if not self._failed and not self.disk.hangs:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_STOP_TIMEOUT_S):
                    await self.drain()
        self._failed = self._failed or "the node is stopping"
        if self.disk.oldest:
            self._channel.kill()
        return await self._channel.close()

    # --- internal ------------------------------------------------------------------------------

    def _seal(self) -> None:
        """Seal the open group, and hand over sealed groups if the process is free."""
        if self._failed:
            return
        self.pending.seal()
        self._pump()

    def _kick(self) -> None:
        self._kick_due = False
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
            for ticket in group.tickets:  # the process has the writes now
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
            self._log_full(len(failures), next(iter(failures.values())))
        self._pump()
        if self.pending.open.tickets:
            self._kick()
        elif self.pending.idle:
            self._idle.set()

    def _log_full(self, refused: int, reason: str) -> None:
        """Log refusals of a full store, at most once a second."""
        self._refused_full += refused
        now = time.monotonic()
        if now - self._logged_full_at >= _TELL_FULL_EVERY_S:
            log.warning("store full: writes refused count=%d reason=%s", self._refused_full, reason)
            self._logged_full_at, self._refused_full = now, 0

    def _on_lost(self) -> None:
        if self._failed:
            return
        self._failed = "the writer process ended"
        self.pending.lose(self._failed)
        self._idle.set()
        self._on_failure(self._failed)


def columns(keys: Sequence[bytes], value: bytes | None) -> tuple[list[bytes], list[bytes | None]]:
    """Return ``keys``, and ``value`` as often."""
    return list(keys), [value] * len(keys)
