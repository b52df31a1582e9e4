"""Reads the primary's copy for followers: pages of passes, and records by key.

A page comes from one short read transaction over the records and the partition's
``complete_through``, which is the page's bound. Records are stored together with it, so the page
has no record above the bound, and within its key range lacks none below. Pending writes are not
durable: the reader waits for those that lie below the beginning of the follower's stream.
"""

from __future__ import annotations

import numpy as np

from koinon_node.config import Limits
from koinon_node.core.formats import records
from koinon_node.core.replication.replica_tracker import ReplicaTracker
from koinon_node.replication.catch_up import crc_of
from koinon_node.storage.environment import PARTITIONS_DB
from koinon_node.storage.local_replicas import LocalReplicas
from koinon_node.storage.store import Range
from koinon_node.storage.writer import Writer
from koinon_proto.contract.errors import (
    InvalidArgumentError,
    TableBehindError,
    UnavailableError,
)
from koinon_proto.v1 import replication_pb2

READ_KEYS_MAX = 1_000
_JOURNAL_KEYS_MAX = 1_000  # a pass over more changed keys than this is a scan


class PageReader:
    """Reads pages and keys for followers. It keeps no state but a counter."""

    def __init__(
        self,
        local: LocalReplicas,
        leading: ReplicaTracker,
        writer: Writer,
        limits: Limits,
    ) -> None:
        self._leading = leading
        self._store = local.store
        self._writer = writer
        self._copies = local.copies
        self._journal = local.journal
        self._limits = limits
        self.bytes_served = 0  # of keys and records, since the start

    async def read_page(
        self, request: replication_pb2.ReadPageRequest
    ) -> replication_pb2.RecordPage:
        """Return the next page of a pass.

        Raises:
            WrongClusterError, NotPrimaryError, TableBehindError: as the contract says.
            UnavailableError: this copy is not complete through the requested sequence.
            StorageFullError: the same, and the store has no room to fill the gap.
        """
        p = request.partition_id
        self._check(request.cluster_id, p, request.primary_epoch)
        if len(request.after_key) > records.REST_BYTES_MAX:
            raise InvalidArgumentError(field="after_key", reason="longer than a key")
        if int(self._copies.complete_through[p]) < request.reach:
            await self._writer.barrier()
            self._check(request.cluster_id, p, request.primary_epoch)
            if int(self._copies.complete_through[p]) < request.reach:
                await self.fill_gap(p)
                self._check(request.cluster_id, p, request.primary_epoch)
            if int(self._copies.complete_through[p]) < request.reach:
                reason = f"partition {p} is not complete through {request.reach} here"
                raise UnavailableError(reason=reason)
        if self._store.stored_through(p) < request.reach:
            await self._settle(request.cluster_id, p, request.primary_epoch)
        bytes_max = min(request.bytes_max or self._limits.page_bytes, self._limits.page_bytes)
        after_sequence = 0 if request.snapshot else request.after_sequence
        page = None if request.snapshot else self._by_journal(p, request, bytes_max)
        if page is None:
            page = self._store.read_range(
                p, request.after_key, after_sequence, self._limits.page_rows, bytes_max
            )
        return self._message(page)

    async def fill_gap(self, p: int) -> None:
        """Make the copy's position durable through the last sequence given, as the next write
        would. A write that found no room before it was sent has left its sequence unused. A write
        that failed after it was sent leaves no such gap: its partition refuses queued writes (rule
        8).

        Raises:
            StorageFullError: there is no room for the position either, or the partition is being
                handed over.
        """
        if self._leading.broken[p]:
            return
        ids = np.array([p], np.uint32)
        progress = (PARTITIONS_DB, *self._leading.primaries.progress(ids))
        await self._writer.submit((progress,), 0, 0, chained=True, loose=True, touched=ids)
        self._copies.complete_through[p] = self._store.read_copies([p])[p].complete_through

    def _by_journal(
        self, p: int, request: replication_pb2.ReadPageRequest, bytes_max: int
    ) -> Range | None:
        """Return the page by the journal's keys, or None if the journal does not reach back to the
        pass's start.
        """
        keys = self._journal.since(p, request.after_sequence)
        if keys is None:
            return None
        after = records.prefix_of(p) + request.after_key
        keys = [key for key in keys if key > after][: _JOURNAL_KEYS_MAX + 1]
        more = len(keys) > _JOURNAL_KEYS_MAX
        page = self._store.read_keys(p, keys[:_JOURNAL_KEYS_MAX], bytes_max)
        above = [
            row
            for row in page.rows
            if records.decode_record(row[1]).sequence > request.after_sequence
        ]
        return page._replace(rows=above, end=page.end and not more)

    async def read_keys(
        self, request: replication_pb2.ReadKeysRequest
    ) -> replication_pb2.RecordPage:
        """Return the current records of the keys, from the first on; b"" for a missing record.

        Raises:
            The errors of ``read_page``.
        """
        p = request.partition_id
        self._check(request.cluster_id, p, request.primary_epoch)
        if len(request.keys) > READ_KEYS_MAX:
            raise InvalidArgumentError(
                field="keys", reason="too many", limit=READ_KEYS_MAX, actual=len(request.keys)
            )
        await self._settle(request.cluster_id, p, request.primary_epoch)
        head = records.prefix_of(p)
        asked = [head + key for key in request.keys]
        page = self._store.read_keys(p, asked, self._limits.page_bytes)
        found = dict(page.rows)
        reached = asked if page.end else asked[: asked.index(head + page.last_key) + 1]
        rows = [(key, found.get(key, b"")) for key in reached]
        return self._message(page._replace(rows=rows, end=True))

    async def _settle(self, cluster_id: str, p: int, primary_epoch: int) -> None:
        """Wait until the store has taken over the durable log of the partition."""
        if self._store.lacks((p,)):
            await self._writer.settle((p,))
            self._check(cluster_id, p, primary_epoch)

    def _check(self, cluster_id: str, p: int, primary_epoch: int) -> None:
        """Raise unless this node leads the partition in that epoch."""
        leading, table = self._leading, self._leading.table
        if table is None:
            raise UnavailableError(reason="this node has no table yet")
        table.cluster.check_id(cluster_id, required=True)
        if p >= len(table.rows):
            raise InvalidArgumentError(field="partition_id", reason="no such partition")
        if int(leading.epochs[p]) == primary_epoch and primary_epoch:
            return
        row = table.rows[p]
        if primary_epoch >= row.primary_epoch:  # newer than this node's table, or not adopted yet
            raise TableBehindError(
                table_version=table.table_version, required_version=table.table_version + 1
            )
        raise table.not_primary(p)

    def _message(self, page: Range) -> replication_pb2.RecordPage:
        keys = [key[2:] for key, _ in page.rows]
        rows = [record for _, record in page.rows]
        self.bytes_served += sum(map(len, keys)) + sum(map(len, rows))
        return replication_pb2.RecordPage(
            keys=keys,
            records=rows,
            crc32=crc_of(keys, rows),
            bound=page.complete_through,
            last_key=page.last_key,
            end=page.end,
            purge_floor=page.purge_floor,
        )
