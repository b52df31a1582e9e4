"""Deletes the copies that this node is not to keep any more (rule 15).

A drop first erases what the store knows of the partition and leaves a marker, in one transaction:
from then on the copy is unusable, whatever is left of its data. Then the data goes in small steps,
the marker last. Before each step the current row is looked at again, under a lease: if it names
this node, the drop ends where it is, and the copy is taken whole from its primary.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import numpy as np

from koinon_node.applying import Applier, Change, one
from koinon_node.core import records
from koinon_node.core.copies import Copies, CopyState
from koinon_node.core.records import PartitionEpochs
from koinon_node.state import NodeState
from koinon_node.storage import Store
from koinon_proto.errors import StorageFullError
from koinon_proto.table import NodeNumber, Table

log = logging.getLogger(__name__)

STEP_ROWS = 1_000
_PAUSE_S = 0.005
_RETRY_S = 1.0


class Drops:
    """Background work. All methods belong to the event loop's thread."""

    def __init__(self, state: NodeState, store: Store, applier: Applier, copies: Copies) -> None:
        self._state = state
        self._store = store
        self._applier = applier
        self._copies = copies
        self._due = asyncio.Event()

    def on_table(self, table: Table, number: NodeNumber, node_epoch: int) -> None:
        """Rows have changed: look again at what is to be dropped."""
        self._due.set()

    async def run(self) -> None:
        """Drop until cancelled."""
        while True:
            self._due.clear()
            left = False
            for partition_id in self.candidates():
                try:
                    await self._drop(partition_id)
                except StorageFullError as error:
                    log.warning("no room even to delete partition=%d error=%s", partition_id, error)
                    left = True
            if left or not self._state.serving():
                await asyncio.sleep(_RETRY_S)
            else:
                await self._due.wait()

    def candidates(self) -> list[int]:
        """Return what is held here, whole or half deleted, and left out by the current rows."""
        copies = self._copies
        held = np.flatnonzero((copies.complete_through != 0) | (copies.states != 0))
        return sorted(p for p in {*held.tolist(), *copies.epochs} if self._left_out(p))

    def _left_out(self, partition_id: int) -> bool:
        """Return whether this node is registered, has a lease, and is not in the current row."""
        served = self._state.served
        table, number = served.table, served.node_number
        if table is None or not served.node_epoch or not self._state.serving():
            return False
        node = table.nodes.get(number)
        if node is None or node.node_epoch != served.node_epoch:
            return False
        return partition_id < len(table.rows) and number not in table.rows[partition_id].replicas

    async def _drop(self, partition_id: int) -> None:
        await self._applier.idle([partition_id])
        if not self._left_out(partition_id):
            return
        await self._erase(partition_id)
        log.info("copy dropped, deletes its data partition=%d", partition_id)
        while self._left_out(partition_id):
            keys = self._store.scan_keys(partition_id, b"", b"", STEP_ROWS)
            if not keys:
                await self._finish(partition_id)
                log.info("copy deleted partition=%d", partition_id)
                return
            await self._change(partition_id, CopyState.UNUSABLE, removed=keys)
            await asyncio.sleep(_PAUSE_S)

    async def _erase(self, partition_id: int) -> None:
        """Forget, durably, all that would make the data count."""
        marker = [(records.dropping_key(partition_id), b"")]
        await self._change(partition_id, CopyState.UNUSABLE, metadata=marker)

    async def _finish(self, partition_id: int) -> None:
        """Nothing is left: a copy that is made here later begins from nothing."""
        entries = (records.dropping_key, records.progress_key, records.epochs_key)
        gone = [(key_of(partition_id), None) for key_of in entries]
        await self._change(partition_id, CopyState.USABLE, metadata=gone)
        self._copies.epochs.pop(partition_id, None)
        self._copies.purge_floors[partition_id] = 0

    async def _change(
        self,
        partition_id: int,
        state: CopyState,
        *,
        removed: Sequence[bytes] = (),
        metadata: Sequence[tuple[bytes, bytes | None]] = (),
    ) -> None:
        """Write that the copy is complete through nothing. Queued before this first waits."""
        ids, nothing = one(partition_id, 0)
        epoch = self._copies.epochs_of(partition_id).primary_epoch
        await self._applier.submit(
            Change(
                partition_ids=ids,
                complete_through=nothing,
                state=state,
                epochs={partition_id: PartitionEpochs(primary_epoch=epoch)},
                removed=removed,
                metadata=metadata,
            )
        )
