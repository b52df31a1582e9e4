"""Deletes the copies that this node is not to keep any more (rule 15).

A drop first erases what the store knows of the partition and leaves a marker, in one transaction:
from then on the copy is unusable, whatever is left of its data. Then the data goes in small steps,
the marker last. Before each step the current row is looked at again, under a lease: if it names
this node, the drop ends where it is, and the copy is taken whole from its primary. Steps are shared
by all copies that are to go: a transaction has a price, however little it deletes.

Of a keyspace that is dropped all copies go. Once none is left here, and nothing under way can make
one, the node says so (``erased``): the keyspace's partitions are another's only after every node
has.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import numpy as np

from koinon_node.core.formats import records
from koinon_node.core.formats.records import PartitionEpochs
from koinon_node.core.replication.copies import CopyState
from koinon_node.replication.applier import Applier, Change, Done
from koinon_node.state import NodeState
from koinon_node.storage.local_replicas import LocalReplicas
from koinon_proto.contract.errors import KoinonError, StorageFullError, UnavailableError
from koinon_proto.contract.table import NodeNumber, PartitionRow, Table

log = logging.getLogger(__name__)

STEP_ROWS = 1_000
_STEP_PARTITIONS = 64
_DUTY = 0.1  # of the time: no caller waits for it, and moves and clients go first
_RETRY_S = 1.0


class CopyDropper:
    """Background work. All methods belong to the event loop's thread."""

    def __init__(self, local: LocalReplicas, state: NodeState, applier: Applier) -> None:
        self._state = state
        self._store = local.store
        self._applier = applier
        self._copies = local.copies
        self._due = asyncio.Event()
        self.erased: tuple[int, ...] = ()  # ids of dropped keyspaces of which nothing is here

    def on_table(self, table: Table, number: NodeNumber, node_epoch: int) -> None:
        """Rows have changed: look again at what is to be dropped."""
        self._due.set()

    async def run(self) -> None:
        """Drop until cancelled."""
        while True:
            self._due.clear()
            left = False
            try:
                await self._drop(self.candidates())
                await self._look_for_erased()
            except (StorageFullError, UnavailableError) as error:
                log.warning("copies are not deleted now error=%s", error)
                left = True
            if left or not self._state.serving():
                await asyncio.sleep(_RETRY_S)
            else:
                await self._due.wait()

    async def _look_for_erased(self) -> None:
        """Say of which dropped keyspaces nothing is here. Of those no copy can come back: no row
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
        """Return what is held here, whole or half deleted, and left out by the current rows."""
        copies = self._copies
        rows, number = self._rows()
        left_out = {row.partition_id for row in rows if number not in row.replicas}
        held = np.flatnonzero((copies.complete_through != 0) | (copies.states != 0))
        return sorted(left_out.intersection((*held.tolist(), *copies.epochs)))

    def _left_out(self, partition_ids: Sequence[int]) -> list[int]:
        """Return of which of them the current row says that this node is not to keep them."""
        rows, number = self._rows()
        return [p for p in partition_ids if p < len(rows) and number not in rows[p].replicas]

    def _rows(self) -> tuple[Sequence[PartitionRow], NodeNumber]:
        """Return the current rows, none unless this node is registered and has a lease; and its
        number.
        """
        served = self._state.served
        table, number = served.table, served.node_number
        if table is None or not served.node_epoch or not self._state.serving():
            return (), number
        node = table.nodes.get(number)
        known = node is not None and node.node_epoch == served.node_epoch
        return table.rows if known else (), number

    async def _drop(self, partition_ids: Sequence[int]) -> None:
        """Drop these, all in the same transactions: many small copies go at a time."""
        await self._applier.idle(partition_ids)
        await self._applier.led(partition_ids)  # a dropped keyspace's primary has not drained
        left = self._left_out(partition_ids)
        if not left:
            return
        loop = asyncio.get_running_loop()
        await self._erase(left)
        log.debug("copies dropped, deletes their data partitions=%d", len(left))
        while left := self._left_out(left):
            began = loop.time()
            deleted = await self._step(left)
            left = [p for p in left if p not in deleted]
            await asyncio.sleep((loop.time() - began) * (1 / _DUTY - 1))

    async def _erase(self, partition_ids: Sequence[int]) -> None:
        """Forget, durably, all that would make the data count."""
        markers = [(records.dropping_key(p), b"") for p in partition_ids]
        await self._change(partition_ids, CopyState.UNUSABLE, metadata=markers)

    async def _step(self, partition_ids: Sequence[int]) -> set[int]:
        """Delete the next rows, and what is known of those that have none; return the latter."""
        keys: list[bytes] = []
        holding: list[int] = []
        empty: list[int] = []
        await self._applier.settle(*partition_ids[:_STEP_PARTITIONS])
        for partition_id in partition_ids[:_STEP_PARTITIONS]:
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
        """Delete the last entries of these: a copy that is made here later begins from nothing."""
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
        """Write that the copies are complete through nothing. Queued before anybody waits."""
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
