"""This node's part of a backup's cut: a snapshot of its store, taken while no commit group
completes.

docs/protocols.md (Backups) explains the protocol, and why the snapshots of all nodes together are
one moment of the cluster. The states of the cut on one node:

    WAITING --------> HOLDING ------------> MADE
       |      make       |       release     |
       '-----------------+-------------------'----> ENDED: nothing is held, no snapshot is left
         the stream ends, making or releasing fails, 250 ms of holding, no room, too long

A cut only moves forward: another try opens another cut, with another number. So a late message
cannot hold or release groups for a newer cut.

While WAITING, the store takes over its log repeatedly, so that little is left to take over during
HOLDING. While HOLDING, groups become durable here and on followers, but no group completes. The
node ends HOLDING by itself after ``HOLD_S_MAX``, since the program that drives the cut may have
died.

A snapshot is a read transaction of LMDB. While it is open, LMDB does not reuse the pages that were
freed after it began, so the file may grow by every write. The node drops the snapshot before the
file takes the room that is kept for deletes, or the last of the disk.

All methods belong to the event loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
import operator
import os
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from enum import Enum, auto
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from koinon_node.core.formats import records
from koinon_node.core.formats.records import U32Array
from koinon_node.core.membership.assignment import ServedPartitions
from koinon_node.partition.serving_context import ServingContext
from koinon_node.replication.commit_tracker import CommitTracker
from koinon_node.storage.checksums import WorkPace
from koinon_node.storage.environment import DATA_DB, PARTITIONS_DB
from koinon_node.storage.store import values_of
from koinon_proto.contract import columns
from koinon_proto.contract.cluster_errors import BackupStoppedError, CutFailedError
from koinon_proto.contract.errors import InvalidArgumentError, ResourceExhaustedError

log = logging.getLogger(__name__)

HOLD_S_MAX = 0.25
WAITING_S_MAX = 60.0
SNAPSHOT_S_MAX = 24 * 3600.0
_SETTLE_EVERY_S = 0.02
_LOOK_EVERY_S = 0.2
_FREE_BYTES_MIN = 1 << 30  # that the disk must have free; a twentieth of a disk below 20 GiB
_PAGE_ROWS, _PAGE_BYTES = 2_048, 256 * 1024
_LOOKED_FIRST, _LOOKED_AT_ONCE = 4, 64  # rows read between two checks of a page's size
_PIECE_BYTES = 4 << 20  # the most of one message: a value may have a MiB
_flags_of = operator.itemgetter(records.FLAGS_AT)
_user_key = operator.itemgetter(slice(records.KEY_AT, None))
_first, _second = operator.itemgetter(0), operator.itemgetter(1)


Row = tuple[bytes, bytes]
"""A data key and its record."""


class CutState(Enum):
    """The states of a node's part of a cut."""

    WAITING = auto()
    HOLDING = auto()
    MADE = auto()
    ENDED = auto()


class CutPoint(NamedTuple):
    """The position of a snapshot: for each partition the sequence through which the snapshot is
    complete, and the version of the table by which the node served the partitions.
    """

    partition_ids: list[int]
    sequences: list[int]
    table_version: int


class Cut:
    """One backup's part on this node: the held groups, then the snapshot."""

    def __init__(
        self,
        number: int,
        owner: str,
        keyspace_ids: Sequence[int],
        context: ServingContext,
        commits: CommitTracker,
    ) -> None:
        self.number = number  # chosen by the caller that opened the cut; names it in each call
        self.owner = owner  # that caller; the cut refuses all others
        self.state = CutState.WAITING
        self._keyspace_ids = frozenset(keyspace_ids)
        self._context = context
        self._commits = commits
        self._snapshot: Any = None  # LMDB's read transaction, from the end of HOLDING on
        self._view = ServedPartitions()  # the partitions served here when HOLDING began
        self._ids: U32Array = np.zeros(0, np.uint32)  # those of the chosen keyspaces, ascending
        self._timer: asyncio.TimerHandle | None = None  # ends HOLDING
        self._since = time.monotonic()  # when the present state began
        self._why = ""  # the reason of ENDED
        self._file_bytes = context.store.file_bytes  # the store's size at the snapshot

    # --- the cut ---------------------------------------------------------------------------

    async def make(self) -> CutPoint:
        """Hold groups, have the store take over its durable log, and take the snapshot.

        Raises:
            LeaseExpiredError, CutFailedError, UnavailableError: the cut has failed and ended.
        """
        if self.state is not CutState.WAITING:
            raise self._failed(self._why or "the cut is made already")
        try:
            self._context.state.check_lease()
            self._view, store = self._context.state.served, self._context.store
            self._ids = self._partitions_served(self._view)
            self._hold()
            await self._context.writer.settle(self._ids.tolist())
            self._check_held()
            self._snapshot, self._file_bytes = store.env.begin(), store.file_bytes
            self._check_served()
            self._check_loads()
        except BaseException:
            self.end("the cut could not be made")
            raise
        assert self._view.table is not None
        return CutPoint(
            self._ids.tolist(),
            [self._complete_through(p) for p in self._ids.tolist()],
            self._view.table.table_version,
        )

    def release(self) -> float:
        """Complete the held groups; return how long they were held, in seconds. The snapshot is
        part of the cut only if this method returns.

        Raises:
            CutFailedError: HOLDING had ended before, or another node may have served a partition
                meanwhile. The cut has ended.
        """
        try:
            self._check_held()
            if self._snapshot is None:
                raise self._failed("the cut is not made yet")
            self._check_served()
        except CutFailedError:
            self.end("the cut was not valid when it was released")
            raise
        held_s = time.monotonic() - self._since
        self._end_hold()
        self.state, self._since = CutState.MADE, time.monotonic()
        return held_s

    def end(self, why: str) -> None:
        """Complete the held groups and drop the snapshot. The cut stays ENDED."""
        if self.state is CutState.ENDED:
            return
        if self.state is CutState.HOLDING:
            self._end_hold()
        self.state, self._why = CutState.ENDED, why
        snapshot, self._snapshot = self._snapshot, None
        if snapshot is not None:
            snapshot.abort()

    def _check_held(self) -> None:
        if self.state is not CutState.HOLDING:
            raise self._failed(self._why or "no groups are held")

    def _hold(self) -> None:
        self.state, self._since = CutState.HOLDING, time.monotonic()
        self._timer = asyncio.get_running_loop().call_later(HOLD_S_MAX, self._expire)
        self._commits.hold()

    def _expire(self) -> None:
        made = "made" if self._snapshot is not None else "not made"
        log.info("a cut was not released in time held_ms=%d cut=%s", HOLD_S_MAX * 1000, made)
        what = (
            "the cut was not released"
            if self._snapshot is not None
            else "the store did not take over its log"
        )
        self.end(f"groups were held for {HOLD_S_MAX * 1000:.0f} ms, and {what}")

    def _end_hold(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._commits.release()

    def _partitions_served(self, view: ServedPartitions) -> U32Array:
        """Return the partitions of the chosen keyspaces that this node serves.

        Raises:
            CutFailedError: a keyspace was dropped.
        """
        assert view.table is not None, "a node with a lease has a table"
        found: list[int] = []
        for keyspace_id in self._keyspace_ids:
            keyspace = view.table.keyspaces.by_id(keyspace_id)
            if keyspace is None or keyspace.is_dropping:
                raise self._failed(f"the keyspace with id {keyspace_id} is dropped")
            found += keyspace.partition_ids
        ids = np.array(sorted(found), np.uint32)
        served: U32Array = ids[view.epochs[ids] != 0]
        return served

    def _check_served(self) -> None:
        if not self._context.state.still_serves(self._view, self._ids):
            raise self._failed("a partition changes hands, or the node has lost its lease")

    def _check_loads(self) -> None:
        """Raise CutFailedError if a bulk load is being merged in one of the keyspaces: the snapshot
        may have some of its rows.
        """
        table = self._context.state.served.table
        for load in table.loads if table is not None else ():
            if load.merging and load.keyspace_id in self._keyspace_ids:
                raise self._failed(f"bulk load {load.load_id} is being merged")

    def _complete_through(self, partition_id: int) -> int:
        facts = self._context.store.databases[PARTITIONS_DB]
        data = self._snapshot.get(records.progress_key(partition_id), db=facts)
        return records.decode_progress(bytes(data))[0] if data is not None else 0

    def _failed(self, reason: str) -> CutFailedError:
        return CutFailedError(node_id=self._context.state.node_id, reason=reason)

    # --- while it is open ------------------------------------------------------------------

    def check_open(self) -> None:
        """Raise BackupStoppedError if the cut has ended."""
        if self.state is CutState.ENDED:
            raise BackupStoppedError(node_id=self._context.state.node_id, reason=self._why)

    @property
    def grown_bytes(self) -> int:
        """The growth of the store's file since the snapshot was taken, in bytes."""
        return max(0, self._context.store.file_bytes - self._file_bytes)

    async def attend(self) -> None:
        """Run one round of upkeep: check time and room, settle the log while WAITING, then sleep.

        Raises:
            BackupStoppedError: the file or the disk has no room for the snapshot, or the cut took
                too long.
        """
        waiting, age_s = self.state is CutState.WAITING, time.monotonic() - self._since
        if age_s > (WAITING_S_MAX if waiting else SNAPSHOT_S_MAX):
            self.end(f"the {'cut' if waiting else 'backup'} took longer than {age_s:.0f} s")
        await self._check_room()
        self.check_open()
        if waiting:
            await self._context.writer.settle(self._partitions_now())
        await asyncio.sleep(_SETTLE_EVERY_S if waiting else _LOOK_EVERY_S)

    def _partitions_now(self) -> list[int]:
        view = self._context.state.served
        if view.table is None or not len(view.epochs):
            return []
        ids: list[int] = self._partitions_served(view).tolist()
        return ids

    async def _check_room(self) -> None:
        """End the cut if the store's file is about to use the room that is kept for deletes, or the
        disk is almost full.
        """
        store = self._context.store
        used, limit = store.file_bytes, store.config.map_size_bytes
        if used > limit and (self.state is CutState.WAITING or self.grown_bytes):
            self.end(
                f"the store's file has {used} bytes, and the rest of its {limit} is kept for "
                "deletes: give the node a larger --map-size-bytes"
            )
        disk = await asyncio.to_thread(os.statvfs, store.config.directory)
        free, size = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
        if free < min(_FREE_BYTES_MIN, size // 20) and self.grown_bytes:
            self.end(f"the disk has {free} bytes free, and the store's file grows beside it")

    # --- the snapshot's records ------------------------------------------------------------

    async def pages(self, partition_id: int) -> AsyncIterator[bytes]:
        """Yield the live records of a partition as packed columns, in key order. The method works
        in small steps and pauses after each for as long as the step took.

        Raises:
            InvalidArgumentError: the snapshot does not have the partition.
            BackupStoppedError: the cut has ended meanwhile.
        """
        self._check_made(partition_id)
        head, pace, step = records.head_of(partition_id), WorkPace(), _LOOKED_FIRST
        with self._snapshot.cursor(self._context.store.databases[DATA_DB]) as cursor:
            more = cursor.set_range(head)
            rows = cursor.iternext(keys=True, values=True)
            while more:
                pace.begin()
                page: list[Row] = []
                size = 0
                while more and size < _PAGE_BYTES and len(page) < _PAGE_ROWS:
                    some = [row for row in islice(rows, step) if row[0].startswith(head)]
                    more = len(some) == step
                    page += some
                    size += sum(map(len, map(_second, some)))
                    step = max(1, min(_LOOKED_AT_ONCE, _PAGE_BYTES * len(page) // max(size, 1)))
                packed = [_packed(piece) for piece in _pieces(page)]
                await pace.pause()
                for piece in filter(None, packed):
                    yield piece
                self._check_made(partition_id)

    def _check_made(self, partition_id: int) -> None:
        self.check_open()
        if self.state is not CutState.MADE or self._snapshot is None:
            raise InvalidArgumentError(field="cut", reason="was not made and released yet")
        if partition_id not in self._ids:
            raise InvalidArgumentError(
                field="partition_id", reason="not in this snapshot", actual=partition_id
            )


class Cuts:
    """The cut that is open on this node, at most one."""

    def __init__(self, context: ServingContext, commits: CommitTracker) -> None:
        self._context = context
        self._commits = commits
        self._open: Cut | None = None

    def open(self, number: int, owner: str, keyspace_ids: Sequence[int]) -> Cut:
        """Open a cut. The caller ends it by ``close``.

        Raises:
            ResourceExhaustedError: another cut is open.
        """
        if self._open is not None:
            raise ResourceExhaustedError(resource="backups under way", limit=1)
        self._open = Cut(number, owner, keyspace_ids, self._context, self._commits)
        return self._open

    def close(self, cut: Cut) -> None:
        """End the cut, and allow another one to be opened."""
        cut.end("its stream has ended")
        self._open = None

    def opened(self, number: int, owner: str) -> Cut:
        """Return the cut with this number.

        Raises:
            CutFailedError: no such cut is open, or another caller opened it.
        """
        found = self._open
        if found is None or (found.number, found.owner) != (number, owner):
            node_id = self._context.state.node_id
            raise CutFailedError(node_id=node_id, reason="the cut was not opened, or has ended")
        return found


def _pieces(rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    """Split rows into runs of up to ``_PIECE_BYTES``; a larger row is a run of its own."""
    first = size = 0
    for at, (_, record) in enumerate(rows):
        if at > first and size + len(record) > _PIECE_BYTES:
            yield rows[first:at]
            first, size = at, 0
        size += len(record)
    if first < len(rows):
        yield rows[first:]


def _packed(rows: Sequence[Row]) -> bytes:
    """Pack the rows that are no tombstones into columns; return b"" if there are none."""
    flags = bytes(map(_flags_of, map(_second, rows)))
    expiries = None
    if any(flags):
        live = [not flag & records.FLAG_TOMBSTONE for flag in flags]
        rows = [row for row, is_live in zip(rows, live, strict=True) if is_live]
        decoded = [records.decode_record(record) for _, record in rows]
        values = [record.value for record in decoded]
        expiries = np.array([record.expires_at_ms for record in decoded], np.uint64)
    else:
        values = values_of(list(map(_second, rows)), with_expiry=False)
    if not rows:
        return b""
    keys = list(map(_user_key, map(_first, rows)))
    return columns.pack(
        np.fromiter(map(len, keys), np.uint32, len(keys)),
        b"".join(keys),
        np.fromiter(map(len, values), np.uint32, len(values)),
        b"".join(values),
        orders=records.sequences_of(list(map(_second, rows))),
        expiries=expiries,
    )
