"""Purges tombstones of followed partitions, and stale entries of the expiry index.

A follower purges only up to the floor that the primary has announced (rule 14), and only where the
copy is live. It compares the index with the store's records, and skips keys with writes that are
not in the store yet, which the journal names. The purge floor rises in the transaction that removes
the tombstones. An expired record stays until the primary removes it (rule 13). The deletion of a
copy leaves its index entries behind: only the deleted records knew their places. They are removed
when their time comes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence, Set

import numpy as np

from koinon_node.core.formats import record_layout, records
from koinon_node.core.replication.replica_sync import Followed, Stage
from koinon_node.replication.applier import Change
from koinon_node.replication.stream_context import StreamContext
from koinon_node.storage.environment import EXPIRY_DB
from koinon_node.storage.writer import Writer, columns


class BackupPurge:
    """The follower's part of the work on the expiry index (storage/index_sweeper.py)."""

    def __init__(self, context: StreamContext, writer: Writer) -> None:
        self._context = context
        self._writer = writer

    def look(self, start: bytes, rows_max: int) -> tuple[bytes, list[Awaitable[None]]]:
        """Check some entries of the index, and queue the removals that they need."""
        context = self._context
        entries, start = context.store.expired_entries(start, context.state.wall.now_ms(), rows_max)
        if not entries:
            return start, []
        looked = [(entry, *record_layout.split_expiry_key(entry)) for entry in entries]
        partition_ids = {records.partition_of_data_key(key) for _, _, key in looked}
        live = self._live(partition_ids)
        queued = self._drop_left(partition_ids, [(entry, key) for entry, _, key in looked])
        coming = self._coming(live)
        looked = [
            e for e in looked if records.partition_of_data_key(e[2]) in live and e[2] not in coming
        ]
        stored = dict(context.store.get_many([key for _, _, key in looked]))
        dropped: list[bytes] = []
        floors: dict[int, int] = {}
        removed: list[bytes] = []
        for entry, at_ms, key in looked:
            data = stored.get(key)
            record = records.decode_record(data) if data is not None else None
            if record is None or record.expires_at_ms != at_ms:
                dropped.append(entry)
                continue
            partition_id = records.partition_of_data_key(key)
            if record.tombstone and record.sequence <= live[partition_id].purge_floor:
                dropped.append(entry)
                removed.append(key)
                floors[partition_id] = max(floors.get(partition_id, 0), record.sequence)
        if not dropped:
            return start, queued
        ids = sorted({records.partition_of_data_key(entry[8:]) for entry in dropped})
        change = Change(
            partition_ids=np.array(ids, np.uint32),
            complete_through=context.applier.through(ids),
            purge_floors=np.array([floors.get(p, 0) for p in ids], np.uint64),
            removed=removed,
            dropped_entries=dropped,
            loose=True,
        )
        return start, [*queued, context.applier.submit(change)]

    def _drop_left(
        self, partition_ids: Set[int], looked: Sequence[tuple[bytes, bytes]]
    ) -> list[Awaitable[None]]:
        """Remove the entries of deleted copies. Later writes of these partitions are queued behind
        the removal.
        """
        gone = self._gone(partition_ids)
        if not gone:
            return []
        left = [one for one in looked if records.partition_of_data_key(one[1]) in gone]
        stored = dict(self._context.store.get_many([key for _, key in left]))
        entries = [entry for entry, key in left if key not in stored]
        if not entries:
            return []
        writes = ((EXPIRY_DB, *columns(entries, None)),)
        return [self._writer.submit(writes, len(entries), 0, loose=True)]

    def _gone(self, partition_ids: Set[int]) -> set[int]:
        """Return the partitions of which this store holds nothing, and is about to store
        nothing.
        """
        context = self._context
        if context.table is None:
            return set()
        rows, copies = context.table.rows, context.copies
        return {
            p
            for p in partition_ids
            if context.number not in rows[p].replicas
            and p not in copies.epochs
            and not copies.complete_through[p]
            and not copies.states[p]
            and not context.applier.busy[p]
        }

    def _coming(self, live: dict[int, Followed]) -> set[bytes]:
        """Return the keys with writes that are not in the store yet. Partitions whose keys the
        journal does not know are removed from ``live``.
        """
        context = self._context
        busy = np.array([p for p in live if context.applier.busy[p]], np.uint32)
        if not len(busy):
            return set()
        coming, unknown = context.journal.above(busy, context.copies.complete_through[busy])
        for p in unknown:
            del live[p]
        return coming

    def _live(self, partition_ids: Set[int]) -> dict[int, Followed]:
        """Return the partitions whose copies are live."""
        context = self._context
        return {
            partition_id: followed
            for link in context.links.values()
            for partition_id, followed in link.following.partitions.items()
            if partition_id in partition_ids
            and followed.stage is Stage.LIVE
            and context.current(partition_id, link.node.number, followed.want.primary_epoch)
        }
