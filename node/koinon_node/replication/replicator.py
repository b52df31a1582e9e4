"""Queues a primary's writes, takes partitions over, and proposes changes of their rows.

A put's way through a node goes forward only:

    service > engine        decides: sequences, conditions (core/writes/write_decisions.py)
            > Replicator    makes a ticket of the effects, and waits for its fate
            > Writer        adds the ticket to the open group; seals the group and hands it over
            > the disk, and followers' streams
            > CommitTracker    gets the answers of both, and completes the group
            > answers       to the callers that wait for tickets

All methods belong to the event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from koinon_node.config import Limits
from koinon_node.core.formats import records
from koinon_node.core.formats.records import PartitionEpochs, U32Array
from koinon_node.core.formats.writer_frames import Writes
from koinon_node.core.membership.assignment import Adoption
from koinon_node.core.replication.copies import Copy, CopyState, is_of_past
from koinon_node.core.replication.in_sync_and_hand_over import RowChange
from koinon_node.core.writes.commit_group import CommitGroup, GroupState, Ticket, Waiter
from koinon_node.core.writes.write_decisions import Effects
from koinon_node.ports import CoordinatorCalls
from koinon_node.replication.commit_tracker import CommitTracker
from koinon_node.replication.follower_streams import Followers
from koinon_node.replication.group_sender import Lag
from koinon_node.replication.page_reader import PageReader
from koinon_node.replication.ticket_callback import TicketCallback, fate_of, too_late
from koinon_node.storage.disk_watch import DiskWatch
from koinon_node.storage.environment import DATA_DB, EXPIRY_DB, PARTITIONS_DB
from koinon_node.storage.local_replicas import LocalReplicas
from koinon_node.storage.sizes import SizeEstimates
from koinon_node.storage.writer import Writer, columns
from koinon_node.storage.writer_process import MERGES
from koinon_proto.contract.errors import (
    KoinonError,
    NotEnoughReplicasError,
    StorageFullError,
    UnavailableError,
    UnknownFateError,
)
from koinon_proto.contract.table import (
    SEQUENCE_COUNTER_BITS,
    NodeNumber,
    Table,
    first_sequence,
)
from koinon_proto.process.rounds import until_round_s

log = logging.getLogger(__name__)

_TICK_S = 0.05
_RESTING_TICK_S = 0.2  # while nothing is due (events still wake it); below _STEP_S_MAX
_TICKS_APART_S = 0.005  # events within this time are handled in one tick
_HANDING_OVER_S = 0.01  # between two checks of the hand-overs' progress


class Replicator:
    """Queues the engine's writes, takes tables, adopts partitions, proposes changes of rows."""

    def __init__(
        self,
        local: LocalReplicas,
        commits: CommitTracker,
        writer: Writer,
        coordinator: CoordinatorCalls,
        limits: Limits,
        sizes: SizeEstimates,
    ) -> None:
        self._commits = commits
        self._state = commits.state
        self._clock = commits.clock
        self._kick = commits.kick
        self._proposals = commits.proposals
        self.leading = commits.leading
        self._primaries = local.primaries
        self._copies = local.copies
        self._pending = local.pending
        self._writer = writer
        self._store = local.store
        self._journal = local.journal
        self._coordinator = coordinator
        self._limits = limits
        self.pages = PageReader(local, self.leading, writer, limits)
        self.followers = Followers(commits, sizes, limits)
        self._disk_watch = DiskWatch(writer, self._state.node_id)
        self._adopting = asyncio.Lock()  # one takeover at a time: each reads what the last left
        self._call: asyncio.Task[None] | None = None  # the proposal under way, one at a time
        self._node_epoch = 0  # of the newest table; 0: not registered, nothing is proposed

    # --- writes ----------------------------------------------------------------------------

    def submit(
        self,
        effects: Effects,
        size: int,
        dropped_expiry_keys: Sequence[bytes] = (),
        *,
        callback: TicketCallback | None = None,
    ) -> Ticket | None:
        """Queue a decision's effects; return None if it has no effect and read no pending group.
        With ``callback`` the ticket's fate goes to that callback, else the caller awaits
        ``finish``.
        """
        writes: Writes = ()
        touched = effects.touched if effects.records else effects.touched[:0]
        if effects.records:
            writes = (
                (DATA_DB, list(effects.records), list(effects.records.values())),
                (PARTITIONS_DB, *self._primaries.progress(touched)),
            )
        if effects.expiry_keys:
            writes += ((EXPIRY_DB, *columns(effects.expiry_keys, b"")),)
        if dropped_expiry_keys:
            writes += ((EXPIRY_DB, *columns(dropped_expiry_keys, None)),)
        if not writes and not effects.observed:
            return None
        rows = len(effects.records) + len(effects.expiry_keys) + len(dropped_expiry_keys)
        ticket = self._ticket(writes, touched, callback)
        if callback is not None:
            callback.ticket = ticket
        ticket.after, ticket.observed = effects.observed_group, effects.observed
        ticket.records = effects.records
        self._writer.queue(ticket, rows, size)
        return ticket

    def submit_merge(self, partition_id: int, step: bytes, rows: int, size: int) -> Ticket:
        """Queue a merge step (MergeStep, serialized), which has the partition's last sequence. The
        partition is claimed until the step is complete. The caller seals the group: followers apply
        a merge step after all rows of its group.
        """
        touched = np.array([partition_id], np.uint32)
        writes: Writes = (
            (MERGES, [step], [b""]),
            (PARTITIONS_DB, *self._primaries.progress(touched)),
        )
        ticket = self._ticket(writes, touched)
        ticket.merge = step
        self._writer.queue(ticket, rows, size)
        return ticket

    def _ticket(self, writes: Writes, touched: U32Array, waiter: Waiter | None = None) -> Ticket:
        """Build a ticket of a primary's writes in these partitions, up to the last sequences given
        there.
        """
        primaries = self._primaries
        # Without a required follower, nobody misses the sequences of a gap.
        chained = self.leading.any_replicated and bool(primaries.replicated[touched].any())
        return Ticket(
            durable=waiter or asyncio.get_running_loop().create_future(),
            writes=writes,
            chained=chained,
            touched=touched,
            sequenced=True,
            lasts=primaries.last_sequences[touched],
        )

    def submit_purge(
        self, partition_ids: U32Array, keys: Sequence[bytes], entries: Sequence[bytes]
    ) -> asyncio.Future[None]:
        """Queue the removal of tombstones and their index entries, with the present purge floors.
        The removal has no sequence and is not streamed: followers purge by themselves.
        """
        writes: Writes = (
            (DATA_DB, *columns(keys, None)),
            (EXPIRY_DB, *columns(entries, None)),
            (PARTITIONS_DB, *self._primaries.progress(partition_ids)),
        )
        return self._writer.submit(
            writes, len(keys), 0, chained=True, loose=True, touched=partition_ids
        )

    async def finish(self, ticket: Ticket, *, all_in_sync: bool = True) -> None:
        """Wait until the ticket is durable here and, if asked for, on all in-sync replicas.

        Raises:
            StorageFullError: the write was applied nowhere.
            UnknownFateError: the write may be applied, now or later.
        """
        assert isinstance(ticket.durable, asyncio.Future)  # a ticket without a callback
        try:
            await ticket.durable
        except StorageFullError as error:
            raise fate_of(error, ticket) from None
        if not all_in_sync:
            return
        group = ticket.group
        assert group is not None  # a ticket that was refused at once has raised above
        if not ticket.observed and group.state is GroupState.COMPLETE:
            return
        try:
            async with asyncio.timeout(self._limits.write_timeout_ms / 1000):
                await self._reached(group, ticket.touched)
                for other, observed in ticket.observed.items():
                    await self._reached(other, np.array(list(observed), np.uint32))
        except TimeoutError:
            raise too_late() from None

    async def groups_done(self, groups: Collection[CommitGroup], partition_ids: U32Array) -> None:
        """Wait until the writes of these groups in these partitions are complete, with the timeout
        of a write.

        Raises:
            UnavailableError: the timeout has passed; the waiting operation has no effect yet.
            UnknownFateError: the writer has stopped.
        """
        if not groups:
            return
        try:
            async with asyncio.timeout(self._limits.write_timeout_ms / 1000):
                for group in groups:
                    await self._writer.group_done(group)
                    await self._reached(group, partition_ids)
        except TimeoutError:
            reason = "an earlier write of the key did not reach every in-sync replica in time"
            raise UnavailableError(reason=reason) from None

    async def _reached(self, group: CommitGroup, partition_ids: U32Array) -> None:
        """Wait until a durable group's writes in these partitions are complete."""
        if group.state is GroupState.COMPLETE or not len(group.touched) or not len(partition_ids):
            return
        if self._pending.lost:
            raise UnknownFateError(reason=self._pending.lost)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        group.waiting.append((partition_ids, future))
        await future

    def is_merging(self, partition_id: int) -> bool:
        """Return whether a merge step in the partition is not complete yet. (Its group may still
        wait for other partitions.)
        """
        for group in self._pending.claiming({records.prefix_of(partition_id)}):
            mine = group.touched == partition_id
            if group.state is not GroupState.DURABLE or not self.leading.covers(
                group.touched[mine], group.lasts[mine]
            ):
                return True
        return False

    def not_enough(self, partition_id: int) -> NotEnoughReplicasError:
        """Build the error of a partition that takes no new writes."""
        leading = self.leading
        return NotEnoughReplicasError(
            partition_id=partition_id,
            in_sync=int(leading.live_in_sync()[partition_id]),
            min_in_sync=int(leading.minima[partition_id]),
        )

    # --- the table, and takeovers ----------------------------------------------------------

    def on_table(self, table: Table, number: NodeNumber, node_epoch: int) -> None:
        """Apply the newest table. ``number`` and ``node_epoch`` are this node's."""
        leading = self.leading
        opened, replicated = leading.opened.copy(), self._primaries.replicated.copy()
        self._node_epoch = node_epoch
        lost, changed = leading.on_table(table, number, node_epoch)
        if not table.rows:
            return
        fresh = self._primaries.replicated & ~replicated
        # The journal lacks writes that were made without replicas, also where the row's epoch is
        # not adopted yet.
        for p in np.flatnonzero(fresh & (self._primaries.epochs != 0)).tolist():
            self._journal.reset(p, int(self._primaries.last_sequences[p]))
        self._proposals.on_rows(changed, lost)
        self.followers.on_table(table, opened)
        self._commits.advance(stuck_too=bool(lost or changed))
        self._kick.set()

    async def adopt(self, adoptions: Iterable[Adoption]) -> None:
        """Persist the epochs, then take the partitions over. An epoch below a newer one is skipped.
        So is a copy of the past: it was erased before this call, or the partition is another
        keyspace's since, and has a newer epoch.

        Raises:
            StorageFullError: there is no room; no partition was adopted.
        """
        async with self._adopting:
            # Queued writes of these partitions come first: they change the copies.
            await self._writer.barrier()
            wanted = {a.partition_id: a.primary_epoch for a in adoptions}
            table = self._state.served.table
            copies = {
                p: copy
                for p, copy in self._store.read_copies(list(wanted)).items()
                if wanted[p] > copy.epochs.primary_epoch
                and not (table is not None and is_of_past(copy.epochs, table.keyspaces.of(p)))
            }
            entries = {
                p: copy.epochs.adopted(
                    wanted[p], copy.complete_through, clean=copy.state == CopyState.USABLE
                )
                for p, copy in copies.items()
            }
            await self._persist(entries, copies)
            self._count_adopted(entries, copies)
            epochs = {p: entry.primary_epoch for p, entry in entries.items()}
            self.leading.adopt(epochs, self._clock())
            self._pending.forget({records.prefix_of(p) for p in entries})
        self._commits.advance(stuck_too=True)
        self._kick.set()

    async def _persist(self, entries: dict[int, PartitionEpochs], copies: dict[int, Copy]) -> None:
        """Make the epochs durable, and each copy complete through the beginning of its epoch."""
        ids = np.array(list(entries), np.uint32)
        starts = np.array([first_sequence(e.primary_epoch) for e in entries.values()], np.uint64)
        floors = np.array([copies[p].purge_floor for p in entries], np.uint64)
        keys = [records.epochs_key(p) for p in entries] + records.progress_keys(ids)
        values: list[bytes | None] = [
            *(records.encode_epochs(e) for e in entries.values()),
            *records.encode_progress(starts, floors),
        ]
        await self._writer.submit(((PARTITIONS_DB, keys, values),), len(keys), 0, urgent=True)

    def _count_adopted(self, entries: dict[int, PartitionEpochs], copies: dict[int, Copy]) -> None:
        """Enter the adopted epochs in ``Copies``, all at once: a failover brings thousands."""
        ids = list(entries)
        epochs = np.array([entry.primary_epoch for entry in entries.values()], np.uint64)
        starts = epochs << np.uint64(SEQUENCE_COUNTER_BITS)
        self._copies.epochs.update(entries)
        self._copies.complete_through[ids] = starts
        self._copies.states[ids] = CopyState.USABLE
        for p, start in zip(ids, starts.tolist(), strict=True):
            # The copy's tail is part of the lineage now.
            if copies[p].state != CopyState.USABLE:
                self._journal.reset(p, start)
        newer = epochs > self._primaries.epochs[ids]
        self._primaries.adopt(np.array(ids, np.uint32)[newer], epochs[newer])

    # --- followers -------------------------------------------------------------------------

    def follower_lags(self) -> list[Lag]:
        """Return the lag of each follower that has a stream from here."""
        return self._commits.sender.lags(self._clock())

    # --- periodic work ---------------------------------------------------------------------

    async def run(self) -> None:
        """Find late followers, propose, hand over, announce purge floors; until cancelled."""
        try:
            while True:
                began = self._clock()
                self.tick()
                self._kick.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._next_tick_s()):
                        await self._kick.wait()
                await asyncio.sleep(max(0.0, began + _TICKS_APART_S - self._clock()))
        finally:
            if self._call is not None:
                self._call.cancel()

    def _next_tick_s(self) -> float:
        now = asyncio.get_running_loop().time()
        return until_round_s(now, _RESTING_TICK_S if self._rests() else _TICK_S)

    def _rests(self) -> bool:
        """Return whether no write is under way and no proposal is due."""
        under_way = self._call is not None or not self._pending.idle or self._pending.durable()
        return not under_way and self._proposals.rests

    async def hand_over_all(self, timeout_s: float) -> None:
        """Hand over every partition that another in-sync replica can lead, since this node is about
        to stop; return when the others serve them, after the timeout, or when the lease is lost.
        ``run`` has to be under way.
        """
        self._proposals.leave()
        self._kick.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._state.serving() and self._proposals.handing_over():  # noqa: ASYNC110
                    await asyncio.sleep(_HANDING_OVER_S)

    def tick(self) -> None:
        """Do the work that is due now. ``run`` calls it."""
        table = self.leading.table
        if self._disk_watch.look(self._clock(), table):
            disk = self._writer.disk
            self._commits.sender.probe(disk.oldest, disk.out_since, self._clock())
        if table is None or not table.rows:
            return
        if self._call is not None and self._call.done():
            self._call.result()
            self._call = None
        self._commits.advance(stuck_too=True)
        wanted = self._proposals.decide(self._clock(), table.cluster.replica_timeout_ms / 1000)
        self._disk_watch.give_up(self._proposals.take_given_up())
        self._commits.advance()
        if wanted and self._call is None and self._node_epoch:
            self._proposals.sent(wanted)
            self._call = asyncio.create_task(self._propose(wanted))
        self._commits.sender.announce_floors()

    async def _propose(self, proposals: list[RowChange]) -> None:
        try:
            rejected = await self._coordinator.alter_partitions(proposals)
        except UnknownFateError as error:
            log.warning("proposals of unknown fate count=%d error=%s", len(proposals), error)
            self._proposals.unknown(proposals, self._clock())
        except KoinonError as error:
            log.info("proposals were not made count=%d error=%s", len(proposals), error)
            self._proposals.answered(proposals, self._clock())
        else:
            # A newer row shows which proposals were committed.
            refused = [q for q in proposals if q.partition_id in rejected]
            others = [q for q in proposals if q.partition_id not in rejected]
            self._proposals.answered(refused, self._clock())
            self._proposals.unknown(others, self._clock())
        self._commits.advance(stuck_too=True)
        self._kick.set()
