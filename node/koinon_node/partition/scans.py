"""Reads pages of whole partitions, in the order of their keys.

The rules of reads by key (``reads``) hold: the lease is checked before and after; every row of a
page is complete before the page is returned; expired records are removed first.
"""

from __future__ import annotations

import asyncio

import numpy as np

from koinon_node.core.formats import records
from koinon_node.core.membership.assignment import ServedPartitions
from koinon_node.core.writes.commit_group import CommitGroup
from koinon_node.partition.batches import (
    ScanAnswer,
    ScanPage,
)
from koinon_node.partition.expiry import Reclaimer
from koinon_node.partition.serving_context import ServingContext
from koinon_node.state import Expired
from koinon_node.storage.store import scan_end
from koinon_proto.contract.errors import (
    LeaseExpiredError,
)

_PARTITIONS_PER_STEP = 64


class Scans:
    """Reads pages of partitions in key order. Belongs to the event loop."""

    def __init__(self, context: ServingContext, reclaimer: Reclaimer) -> None:
        self._state = context.state
        self._store = context.store
        self._writer = context.writer
        self._pending = context.pending
        self._replicator = context.replicator
        self._traffic = context.traffic
        self._budget = context.budget
        self._limits = context.limits
        self._clock = context.clock
        self._reclaimer = reclaimer

    async def scan(self, page: ScanPage) -> ScanAnswer:
        """Return one page. It sees every write acknowledged before it began; rows that change
        while it runs may be seen either way.
        """
        self._state.check_lease()
        view = self._state.served
        answer = ScanAnswer()
        limit = min(page.limit or self._limits.scan_rows, self._limits.scan_rows)
        bytes_max = self._limits.scan_bytes
        counts = view.shares and page.counted and page.partition_ids
        quota = self._state.quota(view, page.partition_ids[0]) if counts else None
        if quota is not None:  # a smaller page: the next one continues after it
            rows_left, bytes_left = quota.room(self._state.now())
            limit, bytes_max = min(limit, rows_left), min(bytes_max, bytes_left)
        self._budget.take_rows(limit)
        try:
            with Expired(self._clock) as expired:
                visited = await self._scan_partitions(page, view, limit, bytes_max, answer, expired)
        finally:
            self._budget.release(limit)
        if quota is not None:
            quota.spend(len(answer.keys), sum(map(len, answer.keys + answer.values)))
        if not self._state.still_serves(view, np.array(visited, np.uint32)):
            raise LeaseExpiredError(node_id=self._state.node_id)
        self._traffic.rows_read += len(answer.keys)
        return answer

    async def _scan_partitions(
        self,
        page: ScanPage,
        view: ServedPartitions,
        limit: int,
        bytes_max: int,
        answer: ScanAnswer,
        expired: Expired,
    ) -> list[int]:
        incomplete: dict[CommitGroup, None] = {}
        visited: list[int] = []
        size, rows_seen, after_key = 0, 0, page.after_key
        await self._writer.settle(page.partition_ids)
        for index, partition_id in enumerate(page.partition_ids):
            if index % _PARTITIONS_PER_STEP == _PARTITIONS_PER_STEP - 1:
                await asyncio.sleep(0)
            if not view.epochs[partition_id] or self._state.stopped[partition_id]:
                answer.refusals[partition_id] = self._state.refusal(
                    view, partition_id, page.table_version
                )
                after_key = b""
                continue
            visited.append(partition_id)
            rows, more = self._store.scan(
                partition_id,
                page.prefix,
                after_key,
                limit - rows_seen,
                bytes_max - size,
                start=page.start,
                reverse=page.reverse,
            )
            seen = self._seen_in_scan(partition_id, page, after_key, rows, more=more)
            incomplete.update(dict.fromkeys(seen))
            after_key = b""
            rows_seen += len(rows)
            size += self._append_page(rows, partition_id, page.keys_only, answer, expired)
            full = rows_seen >= limit or size >= bytes_max
            if more or (full and index + 1 < len(page.partition_ids)):
                last = rows[-1][0][records.KEY_AT :] if rows else b""
                answer.next_cursor = (partition_id, last)
                if not more:
                    answer.next_cursor = (page.partition_ids[index + 1], b"")
                break
        await self._replicator.groups_done(incomplete, np.array(visited, np.uint32))
        if expired:
            await self._reclaimer.remove_expired(expired, view)
        return visited

    def _seen_in_scan(
        self,
        partition_id: int,
        page: ScanPage,
        after_key: bytes,
        rows: list[tuple[bytes, bytes]],
        *,
        more: bool,
    ) -> list[CommitGroup]:
        own = records.head_of(partition_id)
        below, after = b"", own + max(after_key, page.start)
        if page.reverse:
            below = scan_end(partition_id, page.prefix, page.start, after_key)
        return self._pending.seen_in_scan(own + page.prefix, after, rows, more=more, below=below)

    def _append_page(
        self,
        rows: list[tuple[bytes, bytes]],
        partition_id: int,
        keys_only: bool,
        answer: ScanAnswer,
        expired: Expired,
    ) -> int:
        """Append live rows to the page, and note expired ones; return the bytes that were read."""
        now_ms = self._clock.now_ms()
        size = live_bytes = 0
        live = -len(answer.keys)
        for key, data in rows:
            size += len(key) + len(data)
            record = records.decode_record(data)
            if record.tombstone:
                continue
            if record.expired(now_ms):
                expired.append(key)
                continue
            answer.keys.append(key[records.KEY_AT :])
            live_bytes += len(key) + len(record.value) - records.KEY_AT
            if not keys_only:
                answer.values.append(record.value)
            answer.partition_ids.append(partition_id)
            answer.versions.append(record.sequence)
            answer.expires_at_ms.append(record.expires_at_ms)
        self._traffic.count_scan(partition_id, live + len(answer.keys), live_bytes)
        return size
