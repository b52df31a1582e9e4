"""Deletes copies that the table no longer assigns to this node (rule 15), and copies of the past.

A drop first erases the partition's metadata and writes a marker, in one transaction: from then on
the copy is unusable, although data is left. Small steps then delete the data, and at last the
marker. Before each step the current row is checked again, under a lease. If it names this node, the
drop stops there, and a snapshot from the primary replaces the copy. One step serves all copies that
are being dropped: a transaction costs time, however little it deletes.

All copies of a dropped keyspace are deleted. Once none is left here, and no write under way can
create one, the node reports the keyspace (``erased``). Another keyspace gets its partitions only
after every node has reported it.

A disk may be set back after that report: by an old copy of the directory, or by a crash of the
machine with ``durability = interval``. The node then holds the erased rows again, and another
keyspace may have the partitions. Such a copy is of the past (``is_of_past``) until it is erased,
whoever has a lease. It is erased first and at full speed: this node neither leads nor follows the
partition before (``erased_past``, ``Wanted``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np

from koinon_node.core.formats import records
from koinon_node.core.formats.records import PartitionEpochs
from koinon_node.core.replication.copies import CopyState
from koinon_node.replication.applier import Change, Done
from koinon_node.replication.follower import Follower
from koinon_node.state import NodeState
from koinon_node.storage.local_replicas import LocalReplicas
from koinon_proto.contract.errors import KoinonError, StorageFullError, UnavailableError
from koinon_proto.contract.table import NodeNumber, PartitionRow, Table

log = logging.getLogger(__name__)

STEP_ROWS = 1_000
_STEP_PARTITIONS = 64
_DUTY = 0.1  # the share of time spent on drops: no caller waits for them
_RETRY_S = 1.0
_Which = Callable[[Sequence[int]], list[int]]
"""Returns those of the partitions that still have to go."""


class CopyDropper:
    """Drops copies in the background. Belongs to the event loop's thread."""

    def __init__(self, local: LocalReplicas, state: NodeState, follower: Follower) -> None:
        self._state = state
        self._store = local.store
        self._follower = follower
        self._applier = follower.applier
        self._copies = local.copies
        self._due = asyncio.Event()
        self.erased: tuple[int, ...] = ()  # ids of dropped keyspaces without any data here

    def on_table(self, table: Table, number: NodeNumber, node_epoch: int) -> None:
        """Check again which copies to drop: rows have changed."""
        self._due.set()

    async def run(self) -> None:
        """Drop until cancelled."""
        while True:
            self._due.clear()
            left = False
            try:
                if past := self._of_past():
                    await self._drop(past, self._still_of_past, duty=1.0)
                    self._follower.look_again()
                await self._drop(self.candidates(), self._still_left_out, duty=_DUTY)
                await self._look_for_erased()
            except (StorageFullError, UnavailableError) as error:
                log.warning("copies were not deleted, retrying error=%s", error)
                left = True
            if left or not self._state.serving():
                await asyncio.sleep(_RETRY_S)
            else:
                await self._due.wait()

    async def _look_for_erased(self) -> None:
        """Find the dropped keyspaces without data here. None of their copies can come back: no row
        of theirs will name a node again.
        """
        rows, _ = self._rows()
        table = self._state.served.table
        if table is None or not rows:
            return
        erased = []
        for keyspace in table.keyspaces.dropping:
            ids = list(keyspace.partition_ids)
            await self._applier.idle(ids)
            await self._applier.led(ids)
            if not self._copies.are_held(keyspace.partition_ids):
                erased.append(keyspace.keyspace_id)
        self.erased = tuple(erased)

    def candidates(self) -> list[int]:
        """Return the partitions of which some data is here and whose current row does not list this
        node.
        """
        copies = self._copies
        rows, number = self._rows()
        left_out = {row.partition_id for row in rows if number not in row.replicas}
        held = np.flatnonzero((copies.complete_through != 0) | (copies.states != 0))
        return sorted(left_out.intersection((*held.tolist(), *copies.epochs)))

    def _still_left_out(self, partition_ids: Sequence[int]) -> list[int]:
        """Return the partitions whose current row does not list this node; none while copies of the
        past have to be erased first.
        """
        rows, number = self._rows()
        left = [p for p in partition_ids if p < len(rows) and number not in rows[p].replicas]
        return left if left and not self._of_past() else []

    def _of_past(self) -> list[int]:
        """Return the partitions that have a keyspace, and copies of the past here."""
        table = self._state.served.table
        if table is None:
            return []
        ids = [keyspace.partition_ids for keyspace in table.keyspaces if keyspace.first_epoch > 1]
        return self._still_of_past(list(chain.from_iterable(ids)))

    def _still_of_past(self, partition_ids: Sequence[int]) -> list[int]:
        table = self._state.served.table
        return self._copies.of_past(table.keyspaces, partition_ids) if table is not None else []

    async def erased_past(self, partition_ids: Sequence[int]) -> None:
        """Wait until no copy of the past is here of these, which are about to be led."""
        while self._still_of_past(partition_ids):
            await self._applier.changed()

    def _rows(self) -> tuple[Sequence[PartitionRow], NodeNumber]:
        """Return the current rows and this node's number. There are no rows unless the node is
        registered and has a lease.
        """
        served = self._state.served
        table, number = served.table, served.node_number
        if table is None or not served.node_epoch or not self._state.serving():
            return (), number
        node = table.nodes.get(number)
        known = node is not None and node.node_epoch == served.node_epoch
        return table.rows if known else (), number

    async def _drop(self, partition_ids: Sequence[int], still: _Which, *, duty: float) -> None:
        """Drop these copies in shared transactions. ``duty``: the share of time spent on it."""
        await self._applier.idle(partition_ids)
        await self._applier.led(partition_ids)  # a dropped keyspace's primary was not drained
        left = still(partition_ids)
        if not left:
            return
        loop = asyncio.get_running_loop()
        await self._erase(left)
        log.debug("copies dropped, deleting their data partitions=%d", len(left))
        while left := still(left):
            began = loop.time()
            deleted = await self._step(left, still)
            left = [p for p in left if p not in deleted]
            await asyncio.sleep((loop.time() - began) * (1 / duty - 1))

    async def _erase(self, partition_ids: Sequence[int]) -> None:
        """Durably delete the metadata that makes the copies' data count."""
        markers = [(records.dropping_key(p), b"") for p in partition_ids]
        await self._change(partition_ids, CopyState.UNUSABLE, metadata=markers)

    async def _step(self, partition_ids: Sequence[int], still: _Which) -> set[int]:
        """Delete the next rows, and the metadata of copies without rows left; return these copies.
        Once the store has settled, nothing runs between the check of the row and the change.
        """
        keys: list[bytes] = []
        holding: list[int] = []
        empty: list[int] = []
        await self._applier.settle(*partition_ids[:_STEP_PARTITIONS])
        for partition_id in still(partition_ids[:_STEP_PARTITIONS]):
            found = self._store.scan_keys(partition_id, b"", b"", STEP_ROWS - len(keys))
            keys += found
            (holding if found else empty).append(partition_id)
            if len(keys) >= STEP_ROWS:
                break
        writing = []
        if holding:
            writing.append(self._change(holding, CopyState.UNUSABLE, removed=keys))
        if empty:
            writing.append(self._finish(empty))
        await asyncio.gather(*writing)
        if empty:
            log.info("copies deleted partitions=%d", len(empty))
        return set(empty)

    def _finish(self, partition_ids: Sequence[int]) -> asyncio.Future[None]:
        """Delete the last entries of these copies: a later copy begins from nothing."""
        entries = (records.dropping_key, records.progress_key, records.epochs_key)
        gone = [(key_of(p), None) for p in partition_ids for key_of in entries]

        def done(error: KoinonError | None) -> None:
            if error is None:
                for partition_id in partition_ids:
                    self._copies.epochs.pop(partition_id, None)
                    self._copies.purge_floors[partition_id] = 0

        return self._change(partition_ids, CopyState.USABLE, metadata=gone, on_done=done)

    def _change(
        self,
        partition_ids: Sequence[int],
        state: CopyState,
        *,
        removed: Sequence[bytes] = (),
        metadata: Sequence[tuple[bytes, bytes | None]] = (),
        on_done: Done | None = None,
    ) -> asyncio.Future[None]:
        """Queue a change that makes the copies complete through 0. It is queued before the first
        await.
        """
        epochs = {p: self._copies.epochs_of(p).primary_epoch for p in partition_ids}
        change = Change(
            partition_ids=np.array(partition_ids, np.uint32),
            complete_through=np.zeros(len(partition_ids), np.uint64),
            state=state,
            epochs={p: PartitionEpochs(primary_epoch=epoch) for p, epoch in epochs.items()},
            removed=removed,
            metadata=metadata,
        )
        return self._applier.submit(change, on_done)
