"""The primary's side of replication: carries groups to followers, and says when one is complete.

A group is streamed when it is handed over to be committed here, so that followers commit beside
this node. It is complete when it is durable here and on every required follower (core/leading.py);
until then its records are pending: reads of its keys wait, and its rows count against the bounds.
What needs no follower is complete as soon as it is committed here.

Groups complete in any order, but for two that write one partition: a partition that has lost its
followers does not hold up the others.

All methods belong to the event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from koinon_node.config import Limits
from koinon_node.core import records
from koinon_node.core.assignment import Adoption
from koinon_node.core.commit_group import CommitGroup, GroupState, Ticket, Writes, end
from koinon_node.core.copies import Copies, Copy, CopyState
from koinon_node.core.pending_writes import PendingWrites
from koinon_node.core.proposals import Proposal, Proposals
from koinon_node.core.recent_writes import Journal
from koinon_node.core.records import PartitionEpochs, U32Array, U64Array
from koinon_node.core.replica_tracker import Leading
from koinon_node.core.write_decisions import Effects, Primaries
from koinon_node.ports import CoordinatorCalls, PrimaryEnd, RowChange
from koinon_node.primary.follower_streams import Followers
from koinon_node.primary.page_reader import Pages
from koinon_node.primary.sender import Lag
from koinon_node.state import NodeState
from koinon_node.storage.disk_watch import DiskWatch
from koinon_node.storage.sizes import SizeEstimates
from koinon_node.storage.store import DATA_DB, EXPIRY_DB, PARTITIONS_DB, Store
from koinon_node.storage.writer import Writer, columns
from koinon_node.storage.writer_process import MERGES
from koinon_proto.contract.errors import (
    KoinonError,
    NotEnoughReplicasError,
    StorageFullError,
    UnknownFateError,
)
from koinon_proto.contract.table import NodeNumber, Table, first_sequence
from koinon_proto.process.measures import Histogram
from koinon_proto.v1 import replication_pb2

log = logging.getLogger(__name__)

_TICK_S = 0.05
_TICKS_APART_S = 0.005  # what happens meanwhile is looked at together
_HANDING_OVER_S = 0.01  # between two looks at how far it is


class Replicator:
    """``on_ready`` is told which adopted partitions may be served, as they become so."""

    def __init__(
        self,
        state: NodeState,
        store: Store,
        writer: Writer,
        pending: PendingWrites,
        primaries: Primaries,
        copies: Copies,
        journal: Journal,
        coordinator: CoordinatorCalls,
        limits: Limits,
        clock: Callable[[], float],
        on_ready: Callable[[Sequence[Adoption]], None],
        sizes: SizeEstimates,
    ) -> None:
        self._state = state
        self._store = store
        self._writer = writer
        self._pending = pending
        self._primaries = primaries
        self._copies = copies
        self._journal = journal
        self._coordinator = coordinator
        self._limits = limits
        self._clock = clock
        self._on_ready = on_ready
        self.leading = Leading(copies, primaries, pending)
        self._proposals = Proposals(self.leading, state, writer.disk)
        self._pages = Pages(self.leading, store, writer, copies, journal, limits, self._fill_gap)
        self._kick = asyncio.Event()
        self._followers = Followers(
            sizes, copies, journal, self.leading, limits, clock, self.advance, self._kick.set
        )
        self._disk_watch = DiskWatch(writer, state.node_id, self._followers.probe)
        self._adopting = asyncio.Lock()
        self._call: asyncio.Task[None] | None = None
        self._node_epoch = 0
        self.completion_seconds = Histogram()  # from when a group was handed over
        writer.listener = self

    # --- writes ----------------------------------------------------------------------------

    def submit(
        self, effects: Effects, size: int, dropped_expiry_keys: Sequence[bytes] = ()
    ) -> Ticket | None:
        """Queue what the decision changes; None if it changes nothing and looked at nothing."""
        writes: Writes = ()
        touched = effects.touched if effects.records else effects.touched[:0]
        lasts = self._primaries.last_sequences[touched]
        if effects.records:
            progress: list[bytes | None] = list(
                records.encode_progress(lasts, self._primaries.purge_floors[touched])
            )
            writes = (
                (DATA_DB, list(effects.records), list(effects.records.values())),
                (PARTITIONS_DB, records.progress_keys(touched), progress),
            )
        if effects.expiry_keys:
            writes += ((EXPIRY_DB, *columns(effects.expiry_keys, b"")),)
        if dropped_expiry_keys:
            writes += ((EXPIRY_DB, *columns(dropped_expiry_keys, None)),)
        if not writes and not effects.observed:
            return None
        rows = len(effects.records) + len(effects.expiry_keys) + len(dropped_expiry_keys)
        ticket = Ticket(
            durable=asyncio.get_running_loop().create_future(),
            writes=writes,
            after=effects.observed_group,
            chained=self._chained(touched),
            touched=touched,
            sequenced=True,
            lasts=lasts,
            records=effects.records,
            observed=effects.observed,
        )
        self._writer.queue(ticket, rows, size)
        return ticket

    def submit_merge(self, partition_id: int, step: bytes, rows: int, size: int) -> Ticket:
        """Queue a merge step (MergeStep, serialized), whose sequence is the partition's last. The
        partition is claimed until the step is complete. The caller ends the group: of one group,
        followers apply a step after all rows.
        """
        touched = np.array([partition_id], np.uint32)
        lasts = self._primaries.last_sequences[touched]
        progress: list[bytes | None] = list(
            records.encode_progress(lasts, self._primaries.purge_floors[touched])
        )
        writes: Writes = (
            (MERGES, [step], [b""]),
            (PARTITIONS_DB, records.progress_keys(touched), progress),
        )
        ticket = Ticket(
            durable=asyncio.get_running_loop().create_future(),
            writes=writes,
            chained=self._chained(touched),
            touched=touched,
            sequenced=True,
            lasts=lasts,
            merge=step,
        )
        self._writer.queue(ticket, rows, size)
        return ticket

    def _chained(self, touched: U32Array) -> bool:
        """Return whether a gap in these partitions would show: a follower has to hold the same."""
        return self.leading.any_replicated and bool(self._primaries.replicated[touched].any())

    def submit_purge(
        self, partition_ids: U32Array, keys: Sequence[bytes], entries: Sequence[bytes]
    ) -> asyncio.Future[None]:
        """Queue the removal of tombstones and their index entries, with the purge floors as they
        are now. Nothing of it is sequenced or streamed: followers purge by themselves.
        """
        lasts = self._primaries.last_sequences[partition_ids]
        floors = self._primaries.purge_floors[partition_ids]
        progress: list[bytes | None] = list(records.encode_progress(lasts, floors))
        writes: Writes = (
            (DATA_DB, *columns(keys, None)),
            (EXPIRY_DB, *columns(entries, None)),
            (PARTITIONS_DB, records.progress_keys(partition_ids), progress),
        )
        return self._writer.submit(
            writes, len(keys), 0, chained=True, loose=True, touched=partition_ids
        )

    async def finish(self, ticket: Ticket, *, all_in_sync: bool = True) -> None:
        """Wait until the ticket is durable here and, if asked for, on all in-sync replicas.

        Raises:
            StorageFullError: nothing of it was applied, anywhere.
            UnknownFateError: it may be, now or later.
        """
        try:
            await ticket.durable
        except StorageFullError as error:
            if not ticket.spilled:
                raise
            raise UnknownFateError(
                reason=f"followers may have stored it, this node could not: {error}"
            ) from error
        if not all_in_sync:
            return
        group = ticket.group
        assert group is not None  # what was refused on the spot has raised
        if not ticket.observed and group.state is GroupState.COMPLETE:
            return
        try:
            async with asyncio.timeout(self._limits.write_timeout_ms / 1000):
                await self._reached(group, ticket.touched)
                for other, observed in ticket.observed.items():
                    await self._reached(other, np.array(list(observed), np.uint32))
        except TimeoutError:
            raise UnknownFateError(reason="not every in-sync replica has it in time") from None

    async def group_done(self, group: CommitGroup, partition_ids: U32Array) -> None:
        """Wait until what the group in flight writes in these partitions is complete.

        Raises:
            UnknownFateError: the writer is gone.
        """
        await self._writer.group_done(group)
        await self._reached(group, partition_ids)

    async def _reached(self, group: CommitGroup, partition_ids: U32Array) -> None:
        """Wait until the durable group's part in these partitions is complete."""
        if group.state is GroupState.COMPLETE or not len(group.touched) or not len(partition_ids):
            return
        if self._pending.lost:
            raise UnknownFateError(reason=self._pending.lost)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        group.waiting.append((partition_ids, future))
        await future

    def is_merging(self, partition_id: int) -> bool:
        """Return whether a merge step in the partition is not complete there. (Its group may wait
        for other partitions.)
        """
        for group in self._pending.claiming({records.prefix_of(partition_id)}):
            mine = group.touched == partition_id
            if group.state is not GroupState.DURABLE or not self.leading.covers(
                group.touched[mine], group.lasts[mine]
            ):
                return True
        return False

    def not_enough(self, partition_id: int) -> NotEnoughReplicasError:
        """Return why the partition takes no new writes."""
        leading = self.leading
        return NotEnoughReplicasError(
            partition_id=partition_id,
            in_sync=int(leading.live_in_sync()[partition_id]),
            min_in_sync=int(leading.minima[partition_id]),
        )

    # --- groups: called by the writer ------------------------------------------------------

    def on_handed_over(self, group: CommitGroup) -> None:
        """The group is on its way to the disk: send it to followers as well. Of what was refused
        they are sent the sequences alone, whose gaps would stay open until the next write.
        """
        leading = self.leading
        touched, lasts = group.sequences()
        if not len(touched):
            return
        if self._state.any_stopped and leading.broken[touched].any():
            kept = ~leading.broken[touched]  # what was queued of the others was refused
            touched, lasts = touched[kept], lasts[kept]
        if not leading.any_replicated or not self._primaries.replicated[touched].any():
            leading.send(group, touched, lasts)
            return
        touched, lasts = _each_once(touched, lasts)
        previous = leading.send(group, touched, lasts)
        self._followers.stream(group, previous)

    def on_durable(self, group: CommitGroup, unstored: Sequence[Ticket], *, whole: bool) -> None:
        """The group is durable here, but for tickets that found no room."""
        if not len(group.touched):
            self._pending.complete(group)
            return
        if whole:
            self._copies.complete_through[group.touched] = group.lasts
        else:
            self._on_failed(group, unstored)
        self.advance()

    def _on_failed(self, group: CommitGroup, unstored: Sequence[Ticket]) -> None:
        """Rule 8: what a follower may have and this node could not store is handed over."""
        for p, copy in self._store.read_copies(np.unique(group.touched).tolist()).items():
            self._copies.complete_through[p] = copy.complete_through
        failed = [ticket.touched for ticket in unstored]
        if not len(group.spilled) or not failed:
            return
        broken = np.intersect1d(np.concatenate(failed), group.spilled)
        for ticket in group.tickets:
            ticket.spilled = ticket.sequenced and bool(np.isin(ticket.touched, broken).any())
        fresh = [p for p in broken.tolist() if not self.leading.broken[p]]
        if not fresh:
            return
        log.error("own commit failed after it was sent: hands over partitions=%d", len(fresh))
        self._proposals.break_off(fresh)
        node_id = self._state.node_id
        refusal = StorageFullError(node_id=node_id, reason="a write before this one found no room")
        self._pending.refuse_queued(self._broken_everywhere(), refusal, node_id)
        self._kick.set()

    async def _fill_gap(self, p: int) -> None:
        """Make durable that the copy reaches what was decided last, as the next write would: one
        that found no room before it was sent to anybody has left its sequence unused. Nothing is
        written on top of one that was sent and failed: that refuses what is queued (rule 8).

        Raises:
            StorageFullError: there is no room for that either, or the partition is handed over.
        """
        if self.leading.broken[p]:
            return
        await self.submit_purge(np.array([p], np.uint32), (), ())
        self._copies.complete_through[p] = self._store.read_copies([p])[p].complete_through

    def _broken_everywhere(self) -> records.BoolArray:
        mask = np.zeros(len(self._copies.complete_through), np.bool_)
        mask[: len(self.leading.broken)] = self.leading.broken
        return mask

    def advance(self, *, stuck_too: bool = False) -> None:
        """Take the consequences of what has become complete, and of who is ready."""
        for group in self.leading.now_complete(stuck_too=stuck_too):
            self.completion_seconds.observe(max(0.0, self._clock() - group.sent_at))
            self._pending.complete(group)
        if stuck_too:
            for group in self._pending.durable():
                if group.stuck:
                    self._tell_parts(group)
        if self._proposals.hand_overs:
            self._kick.set()
        self._tell_ready()

    def _tell_parts(self, group: CommitGroup) -> None:
        """Tell those who wait for partitions of a group that is stuck for others of its; what it
        has merged in these waits for the others no more.
        """
        there = group.touched[~self.leading.missing(group.touched, group.lasts).any(axis=0)]
        if group.claims:
            group.claims.difference_update(map(records.prefix_of, there.tolist()))
        waiting = []
        for part, waiter in group.waiting:
            mine = np.isin(group.touched, part)
            if self.leading.covers(group.touched[mine], group.lasts[mine]):
                end(waiter)
            elif not waiter.done():
                waiting.append((part, waiter))
        group.waiting = waiting

    def _tell_ready(self) -> None:
        ready = self.leading.take_ready()
        if ready:
            self._on_ready([Adoption(p, int(self.leading.epochs[p])) for p in ready])

    # --- the table, and taking over --------------------------------------------------------

    def on_table(self, table: Table, number: NodeNumber, node_epoch: int) -> None:
        """Take the newest table; ``number`` and ``node_epoch`` are this node's."""
        leading = self.leading
        opened, replicated = leading.opened.copy(), self._primaries.replicated.copy()
        self._node_epoch = node_epoch
        lost, changed = leading.on_table(table, number, node_epoch)
        if not table.rows:
            return
        fresh = self._primaries.replicated & ~replicated
        # What was written without replicas is not in the journal; nor is it if this row's epoch is
        # yet to be adopted.
        for p in np.flatnonzero(fresh & (self._primaries.epochs != 0)).tolist():
            self._journal.reset(p, int(self._primaries.last_sequences[p]))
        self._proposals.on_rows(changed, lost)
        self._followers.on_table(table, opened)
        self.advance(stuck_too=bool(lost or changed))
        self._kick.set()

    async def adopt(self, adoptions: Iterable[Adoption]) -> None:
        """Persist the epochs, then take over. An epoch that a later one has overtaken is passed
        over.

        Raises:
            StorageFullError: there is no room; nothing was adopted.
        """
        async with self._adopting:
            # What is queued of these partitions comes first: their copies are what it leaves.
            await self._writer.barrier()
            wanted = {a.partition_id: a.primary_epoch for a in adoptions}
            copies = {
                p: copy
                for p, copy in self._store.read_copies(list(wanted)).items()
                if wanted[p] > copy.epochs.primary_epoch
            }
            entries = {
                p: copy.epochs.adopted(wanted[p], copy.complete_through)
                for p, copy in copies.items()
            }
            await self._persist(entries, copies)
            for p, epochs in entries.items():
                self._adopted(p, epochs, copies[p])
            self._pending.forget({records.prefix_of(p) for p in entries})
        self.advance(stuck_too=True)
        self._kick.set()

    async def _persist(self, entries: dict[int, PartitionEpochs], copies: dict[int, Copy]) -> None:
        """Make the epochs durable, and with each that the copy is complete at its beginning."""
        ids = np.array(list(entries), np.uint32)
        starts = np.array([first_sequence(e.primary_epoch) for e in entries.values()], np.uint64)
        floors = np.array([copies[p].purge_floor for p in entries], np.uint64)
        keys = [records.epochs_key(p) for p in entries] + records.progress_keys(ids)
        values: list[bytes | None] = [
            *(records.encode_epochs(e) for e in entries.values()),
            *records.encode_progress(starts, floors),
        ]
        await self._writer.submit(((PARTITIONS_DB, keys, values),), len(keys), 0, urgent=True)

    def _adopted(self, p: int, epochs: PartitionEpochs, copy: Copy) -> None:
        clean = copy.state == CopyState.USABLE
        start = first_sequence(epochs.primary_epoch)
        self._copies.epochs[p] = epochs
        self._copies.complete_through[p] = start
        self._copies.states[p] = int(CopyState.USABLE)
        if not clean:  # what it holds above its past is part of the lineage now
            self._journal.reset(p, start)
        if epochs.primary_epoch > int(self._primaries.epochs[p]):
            self._primaries.adopt(p, epochs.primary_epoch)
        self.leading.adopt(
            p, epochs.primary_epoch, copy.complete_through, clean=clean, now=self._clock()
        )

    # --- followers -------------------------------------------------------------------------

    async def serve(self, stream: PrimaryEnd) -> None:
        """Serve one follower until its stream ends.

        Raises:
            KoinonError: why it was refused, or cut off.
        """
        await self._followers.serve(stream)

    @property
    def bytes_served(self) -> int:
        """Bytes of records that followers have pulled, of passes and of named keys."""
        return self._pages.bytes_served

    def follower_lags(self) -> list[Lag]:
        """Return how far behind each follower is that has a stream from here."""
        return self._followers.lags(self._clock())

    async def read_page(
        self, request: replication_pb2.ReadPageRequest
    ) -> replication_pb2.RecordPage:
        return await self._pages.read_page(request)

    async def read_keys(
        self, request: replication_pb2.ReadKeysRequest
    ) -> replication_pb2.RecordPage:
        return await self._pages.read_keys(request)

    # --- in time ---------------------------------------------------------------------------

    async def run(self) -> None:
        """Notice who is late, propose, hand over, announce; until cancelled."""
        try:
            while True:
                began = self._clock()
                self.tick()
                self._kick.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_TICK_S):
                        await self._kick.wait()
                await asyncio.sleep(max(0.0, began + _TICKS_APART_S - self._clock()))
        finally:
            if self._call is not None:
                self._call.cancel()

    async def hand_over_all(self, timeout_s: float) -> None:
        """Hand over what this node leads to others that are in sync, all at once, because it is
        about to stop; return when they serve it. What nobody else can lead stays. Returns after the
        time-out, or when the lease is lost, at the latest; ``run`` has to be under way.
        """
        self._proposals.leave()
        self._kick.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._state.serving() and self._proposals.handing_over():  # noqa: ASYNC110
                    await asyncio.sleep(_HANDING_OVER_S)

    def tick(self) -> None:
        """Do what is due now; ``run`` calls it."""
        table = self.leading.table
        self._disk_watch.look(self._clock(), table)
        if table is None or not table.rows:
            return
        if self._call is not None and self._call.done():
            self._call.result()
            self._call = None
        self.advance(stuck_too=True)
        wanted = self._proposals.decide(self._clock(), table.cluster.replica_timeout_ms / 1000)
        self._disk_watch.give_up(self._proposals.take_given_up())
        self.advance()
        if wanted and self._call is None and self._node_epoch:
            self._proposals.sent(wanted)
            self._call = asyncio.create_task(self._propose(wanted))
        self._followers.announce_floors()

    async def _propose(self, proposals: list[Proposal]) -> None:
        changes = [RowChange(**proposal._asdict()) for proposal in proposals]
        try:
            rejected = await self._coordinator.alter_partitions(changes)
        except UnknownFateError as error:
            log.warning("proposals of unknown fate count=%d error=%s", len(proposals), error)
            self._proposals.unknown(proposals, self._clock())
        except KoinonError as error:
            log.info("nothing was proposed count=%d error=%s", len(proposals), error)
            self._proposals.answered(proposals, self._clock())
        else:
            # What was committed has shown in a newer row; where it has not, it is not known here.
            refused = [q for q in proposals if q.partition_id in rejected]
            others = [q for q in proposals if q.partition_id not in rejected]
            self._proposals.answered(refused, self._clock())
            self._proposals.unknown(others, self._clock())
        self.advance(stuck_too=True)
        self._kick.set()


def _each_once(touched: U32Array, lasts: U64Array) -> tuple[U32Array, U64Array]:
    """Return each partition once, with its last entry."""
    order = np.argsort(touched, kind="stable")
    ordered = touched[order]
    ends = np.flatnonzero(np.append(ordered[1:] != ordered[:-1], True))
    return ordered[ends], lasts[order][ends]
