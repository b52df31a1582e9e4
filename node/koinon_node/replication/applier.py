"""Writes a follower's records together with the copies' new positions, one ticket per change.

Invariants:
- A partition's records, its ``complete_through``, state and history change in one transaction, and
  ``Copies`` after it. Tickets are applied in order. If one finds no room, the tickets after it fail
  too (``after_group``): a copy is never complete above a gap.
- ``busy[p]`` counts the tickets of p that are not durable yet. Code that reads p's records from the
  store, to open p or to purge tombstones, first waits until the count is 0.

A follower's tickets have a bound of their own. The bound of writes that this node leads is freed
only when other nodes have acknowledged them. If followers' tickets counted against it, two full
nodes that follow each other would wait for each other's acknowledgements for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from koinon_node.config import Limits
from koinon_node.core.formats import record_layout, records
from koinon_node.core.formats.records import PartitionEpochs, U32Array, U64Array
from koinon_node.core.formats.writer_frames import Writes
from koinon_node.core.replication.copies import CopyState
from koinon_node.core.replication.replica_sync import ROW_OVERHEAD_BYTES, Followed
from koinon_node.core.writes.commit_group import CommitGroup
from koinon_node.storage.environment import DATA_DB, EXPIRY_DB, PARTITIONS_DB
from koinon_node.storage.local_replicas import LocalReplicas
from koinon_node.storage.writer import Writer, columns
from koinon_node.storage.writer_process import MERGES
from koinon_proto.contract.errors import KoinonError, ResourceExhaustedError, UnknownFateError
from koinon_proto.v1 import replication_pb2
from koinon_proto.v1.replication_pb2 import MergeStep

_BULK_BYTES_MAX = 16 * 1024 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """The writes of a ticket: columns over partitions, each of them once, and rows.

    ``purge_floors`` None: unchanged. ``epochs``: only of partitions whose epochs change.
    ``under_epoch``: the primary epoch that this node follows; an epoch that this node adopts
    meanwhile is higher.
    """

    partition_ids: U32Array
    complete_through: U64Array
    under_epoch: int = 0
    state: CopyState = CopyState.USABLE
    purge_floors: U64Array | None = None
    epochs: Mapping[int, PartitionEpochs] = field(default_factory=dict)
    keys: Sequence[bytes] = ()  # data keys
    records: Sequence[bytes] = ()
    removed: Sequence[bytes] = ()  # data keys
    dropped_entries: Sequence[bytes] = ()  # of the expiry index
    merges: Mapping[int, MergeStep] = field(default_factory=dict)  # after the rows
    metadata: Sequence[tuple[bytes, bytes | None]] = ()  # further entries of PARTITIONS_DB
    journalled: bool = True  # whether to enter the records in the journal
    loose: bool = False  # later tickets do not depend on this one
    bulk: bool = False  # a page of a pass

    @property
    def size(self) -> int:
        rows = len(self.keys) + len(self.removed) + len(self.dropped_entries)
        size = sum(map(len, self.keys)) + sum(map(len, self.records))
        size += sum(step.bytes for step in self.merges.values())
        return size + sum(map(len, self.removed)) + ROW_OVERHEAD_BYTES * rows


def one(partition_id: int, complete_through: int) -> tuple[U32Array, U64Array]:
    """Return the columns for a single partition."""
    return np.array([partition_id], np.uint32), np.array([complete_through], np.uint64)


class Held:
    """The rows that copies held in memory during a pass (``Followed.hold``), to be stored with
    their position.
    """

    def __init__(self) -> None:
        self.rows: dict[bytes, bytes] = {}  # b"": remove the key
        self.floors: dict[int, int] = {}  # purge floors after the removals, by partition

    def take(self, followed: Followed) -> None:
        """Move a copy's held rows here."""
        self.rows.update(followed.held)
        self.floors[followed.partition_id] = followed.held_floor
        followed.drop_held()


def change_of(
    ids: U32Array,
    through: U64Array,
    rows: Mapping[bytes, bytes],
    epochs: Mapping[int, PartitionEpochs] | None = None,
    state: CopyState = CopyState.USABLE,
    merges: Mapping[int, MergeStep] | None = None,
    held: Held | None = None,
) -> Change:
    """Build a change. An empty record removes the key and raises the purge floor; so does a merge
    step whose deletes leave no tombstones. Held rows are older than ``rows``; their removals raise
    the floor only to the held floor.
    """
    merges = merges or {}
    removed = [key for key, record in rows.items() if not record]
    floors: U64Array | None = None
    purging = [p for p, step in merges.items() if not step.tombstone_at_ms]
    if removed or purging:
        of = [records.partitions_of_data_keys(removed), np.array(purging, np.uint32)]
        floors = np.where(np.isin(ids, np.concatenate(of)), through, np.uint64(0))
    if held is not None and held.rows:
        rows = {**held.rows, **rows}
        removed = [key for key, record in rows.items() if not record]
        below = np.array([held.floors.get(p, 0) for p in ids.tolist()], np.uint64)
        floors = below if floors is None else np.maximum(floors, below)
    if removed:
        rows = {key: record for key, record in rows.items() if record}
    return Change(
        partition_ids=ids,
        complete_through=through,
        state=state,
        purge_floors=floors,
        epochs=epochs or {},
        keys=list(rows),
        records=list(rows.values()),
        removed=removed,
        merges=merges,
    )


Done = Callable[[KoinonError | None], None]


class Applier:
    """Queues a primary's records at the writer. Belongs to the event loop."""

    def __init__(self, local: LocalReplicas, writer: Writer, limits: Limits) -> None:
        self._writer = writer
        self._copies = local.copies
        self._journal = local.journal
        self._rows_max = limits.group_rows * 4
        self._bytes_max = limits.group_bytes * 2
        # The groups that unfinished tickets have joined, oldest first, by the tickets' futures.
        self._in_flight: dict[asyncio.Future[None], CommitGroup] = {}
        self._rows = self._size = 0  # of unfinished tickets; size in bytes
        self._settled = asyncio.Event()  # set whenever a ticket ends
        # Counters of what was queued since the process began.
        self.groups_applied = self.rows_applied = self.bytes_applied = 0
        # By partition: its unfinished tickets.
        self.busy = np.zeros(len(local.copies.complete_through), np.uint32)
        # By busy partition: the sequence through which its newest ticket makes the copy complete.
        self._queued_through = np.zeros(len(local.copies.complete_through), np.uint64)

    # --- room ------------------------------------------------------------------------------

    async def room(
        self,
        rows: int,
        size: int,
        stored: Sequence[bytes],
        *,
        merged_size: int = 0,
        bulk: bool = False,
    ) -> None:
        """Wait until so many more rows and bytes may be queued, and check that the store has room
        for the ``stored`` records and the rows of merge steps. The caller submits right after.
        ``bulk`` tickets have a lower bound, so that an urgent write, like a takeover or a client's
        write, waits behind few of them. A full store still accepts tickets that only remove
        records: the space reserved for tombstones serves them, as it serves clients' deletes.

        Raises:
            StorageFullError: the store is full.
            UnknownFateError: the writer has stopped.
        """
        bytes_max = _BULK_BYTES_MAX if bulk else self._bytes_max
        while self._in_flight and (
            self._rows + rows > self._rows_max or self._size + size > bytes_max
        ):
            await self.changed()
        put_size = 0 if self._writer.fits(size) else records.put_bytes(stored) + merged_size
        with contextlib.suppress(ResourceExhaustedError):  # the leading node's bound; see above
            self._writer.check_room(0, 0, put_size)

    async def idle(self, partition_ids: Sequence[int]) -> None:
        """Wait until no ticket of these partitions is unfinished."""
        while self.busy[partition_ids].any():
            await self.changed()

    def through(self, partition_ids: Sequence[int]) -> U64Array:
        """Return the sequences through which these copies are complete once all queued tickets are
        durable.
        """
        durable = self._copies.complete_through[partition_ids]
        busy = self.busy[partition_ids] != 0
        through: U64Array = np.where(busy, self._queued_through[partition_ids], durable)
        return through

    async def led(self, partition_ids: Sequence[int]) -> bool:
        """Wait until all writes that this node queued as primary of these partitions are durable or
        refused; return whether there were any. Until then neither the copy's position nor the
        journal includes them, and an unknown tail would not be repaired (rule 12).
        """
        partitions = np.zeros(len(self.busy), np.bool_)
        partitions[partition_ids] = True
        if not self._writer.pending.is_queued(partitions):
            return False
        await self._writer.barrier()
        return True

    async def settle(self, *partition_ids: int) -> None:
        """Wait until the store has taken over the durable log of these partitions."""
        await self._writer.settle(partition_ids)

    async def changed(self) -> None:
        """Wait until a ticket has ended."""
        self._settled.clear()
        await self._settled.wait()

    # --- tickets ---------------------------------------------------------------------------

    def submit(self, change: Change, on_done: Done | None = None) -> asyncio.Future[None]:
        """Queue the change; return a future of its end. ``on_done`` is called right after
        ``Copies`` has changed, in the order of the tickets, with the error, or None if the change
        was applied. Cancelling the future does not cancel the change.
        """
        ids = change.partition_ids
        if change.journalled and change.keys:
            self._journal.append(
                records.partitions_of_data_keys(change.keys),
                records.sequences_of(change.records),
                change.keys,
            )
        for p in change.merges:  # the journal cannot know the keys that a merge step writes
            self._journal.reset(p, int(change.complete_through[ids == p][0]))
        if change.purge_floors is not None:  # before it is durable: too high only costs a snapshot
            floors = np.maximum(self._copies.purge_floors[ids], change.purge_floors)
            self._copies.purge_floors[ids] = floors
        rows = len(change.keys) + len(change.removed) + len(change.dropped_entries) + len(ids)
        rows += sum(step.rows for step in change.merges.values())
        size = change.size
        self.groups_applied += bool(change.keys)
        self.rows_applied += rows - len(ids)
        self.bytes_applied += size
        oldest = next(iter(self._in_flight.values()), None)
        after = oldest.number if oldest is not None else 0
        group = self._writer.pending.open
        future = self._writer.submit(
            self._writes(change),
            rows,
            size,
            after_group=after,
            chained=True,
            loose=change.loose,
            bulk=change.bulk,
        )
        self._in_flight[future] = group
        self._rows += rows
        self._size += size
        self.busy[ids] += np.uint32(1)
        self._queued_through[ids] = change.complete_through

        def ended(done: asyncio.Future[None]) -> None:
            del self._in_flight[done]
            self._rows -= rows
            self._size -= size
            self.busy[ids] -= np.uint32(1)
            error = _error_of(done)
            if error is None:
                self._record(change)
            self._settled.set()
            if on_done is not None:
                on_done(error)

        future.add_done_callback(ended)
        told = asyncio.shield(future)
        told.add_done_callback(retrieved)
        return told

    def _writes(self, change: Change) -> Writes:
        ids = change.partition_ids
        keys = records.progress_keys(ids)
        values: list[bytes | None] = list(
            records.encode_progress(
                change.complete_through, self._copies.purge_floors[ids], int(change.state)
            )
        )
        for partition_id, epochs in change.epochs.items():
            keys.append(records.epochs_key(partition_id))
            values.append(records.encode_epochs(epochs))
        for key, value in change.metadata:
            keys.append(key)
            values.append(value)
        writes: Writes = ((PARTITIONS_DB, keys, values),)
        if change.removed:
            writes += ((DATA_DB, *columns(change.removed, None)),)
        if change.dropped_entries:
            writes += ((EXPIRY_DB, *columns(change.dropped_entries, None)),)
        if change.keys:
            writes += ((DATA_DB, list(change.keys), list(change.records)),)
            if entries := record_layout.expiry_keys_of(change.keys, change.records):
                writes += ((EXPIRY_DB, *columns(entries, b"")),)
        if change.merges:
            steps = [step.SerializeToString() for step in change.merges.values()]
            writes += ((MERGES, steps, [b""] * len(steps)),)
        return writes

    def _record(self, change: Change) -> None:
        """Enter a durable change in ``Copies``. Epochs that this node has adopted as primary
        meanwhile stay.
        """
        copies, ids = self._copies, change.partition_ids
        if not change.epochs and change.state == CopyState.USABLE:  # batches
            copies.complete_through[ids] = np.maximum(
                copies.complete_through[ids], change.complete_through
            )
            return
        for index, partition_id in enumerate(ids.tolist()):
            epochs = change.epochs.get(partition_id)
            under = epochs.primary_epoch if epochs is not None else change.under_epoch
            if under < copies.epochs_of(partition_id).primary_epoch:
                continue
            copies.complete_through[partition_id] = change.complete_through[index]
            copies.states[partition_id] = int(change.state)
            if epochs is not None:
                copies.epochs[partition_id] = epochs


def retrieved(done: asyncio.Future[None]) -> None:
    """Read a future's error, so that asyncio does not log it as never retrieved."""
    if not done.cancelled():
        done.exception()


def _error_of(done: asyncio.Future[None]) -> KoinonError | None:
    if done.cancelled():
        return UnknownFateError(reason="the node is stopping")
    error = done.exception()
    if error is not None and not isinstance(error, KoinonError):
        raise error
    return error


@dataclass(slots=True)
class TakenBatch:
    """A received batch. ``durable`` is True once all its rows are durable or need not be."""

    number: int
    durable: bool = False


class BatchAcks:
    """Acknowledges a stream's batches to its primary. For the event loop only.

    A batch is acknowledged when it and all batches before it are durable here, or need not be (they
    were kept back, or ignored). One message acknowledges all that became durable in one turn of the
    event loop.
    """

    def __init__(self, send: Callable[[replication_pb2.FollowRequest], None]) -> None:
        self._send = send
        self.last_number = 0  # of the newest batch received on this stream; 0: none yet
        self._taken: deque[TakenBatch] = deque()  # not acknowledged yet, in stream order
        self._flush_due = False  # whether this turn of the loop ends with an acknowledgement

    def begin(self) -> None:
        """Reset for a new stream."""
        self.last_number = 0
        self._taken = deque()

    def take(self, number: int) -> TakenBatch:
        """Note that the batch with this number was received."""
        self.last_number = number
        batch = TakenBatch(number)
        self._taken.append(batch)
        return batch

    def durable(self, batch: TakenBatch) -> None:
        """Acknowledge the batch, together with all batches that become durable in this turn of the
        event loop.
        """
        batch.durable = True
        if not self._flush_due:
            self._flush_due = True
            asyncio.get_running_loop().call_soon(self._acknowledge)

    def _acknowledge(self) -> None:
        self._flush_due = False
        number = 0
        while self._taken and self._taken[0].durable:
            number = self._taken.popleft().number
        if number:
            ack = replication_pb2.BatchAck(number=number)
            self._send(replication_pb2.FollowRequest(ack=ack))
