"""Reads rows by their keys, from partitions that this node leads.

Rules that hold here:
- The lease is checked before a read and again after it (rule 10).
- A read waits once for the writes in flight of its keys. A record that it then finds may still be
  of a later write that is in the store but not on every in-sync replica. Then the read waits for
  that write too and returns the record: at the end of the wait it is the newest complete write.
  (The store shows a write a moment before the writer reports it.)
- A read that meets an expired record has it removed, and waits for the removal (rule 13).
- Many keys are read in steps, with yields to the event loop between them.
"""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Collection, Sequence

import numpy as np

from koinon_node.core.formats import records
from koinon_node.core.formats.records import Record, U32Array
from koinon_node.core.membership.assignment import ServedPartitions
from koinon_node.core.quotas import Quota
from koinon_node.core.writes.commit_group import CommitGroup
from koinon_node.partition import quota_costs
from koinon_node.partition.batches import (
    ReadAnswer,
)
from koinon_node.partition.expiry import Reclaimer
from koinon_node.partition.serving_context import ServingContext
from koinon_node.state import Expired
from koinon_node.storage.store import values_of
from koinon_proto.contract.errors import (
    KoinonError,
    LeaseExpiredError,
    ReplyTooLargeError,
)
from koinon_proto.contract.table import MAX_BATCH_BYTES

_FIRST_READ_ROWS = 32  # before the size of the values is known
_flags_of = operator.itemgetter(records.FLAGS_AT)
_second = operator.itemgetter(1)


class Reads:
    """Reads records by key from the partitions that this node leads. Belongs to the event loop."""

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

    async def read(
        self,
        keys: Sequence[bytes],
        partition_ids: U32Array,
        table_version: int,
        *,
        want_versions: bool,
    ) -> ReadAnswer:
        """Read the rows. Refused partitions are listed in the answer; their rows have an empty
        value.
        """
        self._state.check_lease()
        view = self._state.served
        answer = ReadAnswer(refusals=self._state.refusals(view, partition_ids, table_version))
        quota = self._within_quota(view, keys, partition_ids, answer) if view.shares else None
        self._budget.take_rows(len(keys))
        try:
            if not answer.refusals:
                data_keys = records.data_keys(partition_ids, keys)
                await self._read_rows(view, data_keys, answer, want_versions)
                served = partition_ids
                self._traffic.count_reads(served, keys, answer.values)
            else:
                served = await self._read_served(view, keys, partition_ids, answer, want_versions)
        finally:
            self._budget.release(len(keys), answer.held_bytes)
        if quota is not None:
            quota.spend(0, sum(map(len, answer.values)))
        if not self._state.still_serves(view, served):
            raise LeaseExpiredError(node_id=self._state.node_id)
        self._traffic.rows_read += len(keys)
        return answer

    async def read_cursors(
        self, key: bytes, partition_ids: U32Array, table_version: int
    ) -> tuple[dict[int, bytes], dict[int, KoinonError]]:
        """Read the cursor with this key in each partition. Return the values and the refusals, both
        by partition; a partition without the cursor is in neither.
        """
        self._state.check_lease()
        view = self._state.served
        refusals = self._state.refusals(view, partition_ids, table_version)
        served = partition_ids[~np.isin(partition_ids, list(refusals))]
        answer = ReadAnswer()
        self._budget.take_rows(len(served))
        try:
            data_keys = records.data_keys(served, [key] * len(served), records.CURSOR)
            await self._read_rows(view, data_keys, answer, want_versions=False)
        finally:
            self._budget.release(len(served), answer.held_bytes)
        if not self._state.still_serves(view, served):
            raise LeaseExpiredError(node_id=self._state.node_id)
        found = dict(zip(served.tolist(), answer.values, strict=True))
        for row in answer.missing:
            del found[int(served[row])]
        return found, refusals

    def _within_quota(
        self,
        view: ServedPartitions,
        keys: Sequence[bytes],
        partition_ids: U32Array,
        answer: ReadAnswer,
    ) -> Quota | None:
        """Refuse the partitions that exceed the keyspace's quota. Return the quota, against which
        the values count once they are read.
        """
        quota = self._state.quota(view, int(partition_ids[0])) if len(keys) else None
        if quota is None:
            return None
        sizes = np.fromiter(map(len, keys), np.int64, len(keys))
        if answer.refusals:
            led = ~np.isin(partition_ids, list(answer.refusals))
            partition_ids, sizes = partition_ids[led], sizes[led]
        answer.refusals.update(quota.cut(self._state.now(), partition_ids, sizes))
        return quota

    def read_now(
        self, keys: Sequence[bytes], partition_ids: Sequence[int]
    ) -> list[bytes | None] | None:
        """Return the encoded records of these keys (None: no record), without waiting. Return None
        if a key is refused or has to wait; then the caller uses ``read``.

        The rules of ``read`` hold. No other task runs between the checks and the reading, so the
        first check finds the group of every record that is in the store and not complete.
        """
        state, view = self._state, self._state.served
        led = view.led
        if not state.serving() or not all(map(led.__getitem__, partition_ids)):
            return None
        if state.any_stopped and state.stopped[partition_ids].any():
            return None
        heads = records.heads(len(led))
        data_keys = [heads[p] + key for p, key in zip(partition_ids, keys, strict=True)]
        if self._writer.pending_rows and self._pending.overlapping(data_keys):
            return None
        quota = state.quota(view, partition_ids[0]) if view.shares else None
        if quota is not None and not quota.fits(state.now(), len(keys)):
            return None
        found = self._store.get_each(data_keys)
        for record in found:
            if record is not None and record[records.FLAGS_AT]:
                if (live := self._live(found)) is None:
                    return None
                found = live
                break
        if not state.serving():
            return None
        if quota is not None:
            quota.spend(len(keys), quota_costs.read(keys, found))
        self._traffic.rows_read += len(keys)
        if len(keys) == 1:
            self._traffic.count_read(partition_ids[0], keys[0], len(found[0] or b""))
        else:
            ids = np.array(partition_ids, np.uint32)
            self._traffic.count_reads(ids, keys, [record or b"" for record in found])
        return found

    def _live(self, found: list[bytes | None]) -> list[bytes | None] | None:
        """Return these records with None for tombstones; return None if a record has expired."""
        now_ms = self._clock.now_ms()
        live: list[bytes | None] = []
        for data in found:
            record = records.decode_record(data) if data is not None else None
            if record is None or record.tombstone:
                live.append(None)
            elif record.expired(now_ms):
                return None
            else:
                live.append(data)
        return live

    async def _read_served(
        self,
        view: ServedPartitions,
        keys: Sequence[bytes],
        partition_ids: U32Array,
        answer: ReadAnswer,
        want_versions: bool,
    ) -> U32Array:
        """Read the rows that are not refused into their places of the answer; return their
        partitions.
        """
        refused = np.fromiter(answer.refusals, np.uint32, len(answer.refusals))
        rows = np.flatnonzero(~np.isin(partition_ids, refused)).tolist()
        part = ReadAnswer()
        served = partition_ids[rows]
        if rows:
            chosen = [keys[row] for row in rows]
            try:
                await self._read_rows(view, records.data_keys(served, chosen), part, want_versions)
            finally:
                answer.held_bytes = part.held_bytes
            self._traffic.count_reads(served, chosen, part.values)
        answer.values = [b""] * len(keys)
        if want_versions:
            answer.versions, answer.expires_at_ms = [0] * len(keys), [0] * len(keys)
        for index, row in enumerate(rows):
            answer.values[row] = part.values[index]
            if want_versions:
                answer.versions[row] = part.versions[index]
                answer.expires_at_ms[row] = part.expires_at_ms[index]
        answer.missing = [rows[index] for index in part.missing]
        return served

    async def _read_rows(
        self,
        view: ServedPartitions,
        data_keys: list[bytes],
        answer: ReadAnswer,
        want_versions: bool,
    ) -> None:
        """Append the rows to ``answer``, in steps bounded by rows and by bytes."""
        if self._writer.pending_rows:
            wanted = data_keys if len(data_keys) == 1 else set(data_keys)
            await self._complete(self._pending.overlapping(wanted), data_keys)
        incomplete: dict[CommitGroup, None] = {}
        start, size, step = 0, 0, _FIRST_READ_ROWS
        with Expired(self._clock) as expired:
            while start < len(data_keys):
                keys = data_keys[start : start + step]
                read = self._read_step(keys, start, answer, want_versions, expired, incomplete)
                self._budget.hold(answer, read)
                size += read
                if size > MAX_BATCH_BYTES:
                    raise ReplyTooLargeError(limit=MAX_BATCH_BYTES, actual=size)
                start += len(keys)
                mean = size // start + 1
                step = max(1, min(self._limits.step_rows, self._limits.step_bytes // mean))
                if start > self._limits.step_rows or size > self._limits.step_bytes:
                    await asyncio.sleep(0)
            await self._complete(incomplete, data_keys)
            if expired:
                await self._reclaimer.remove_expired(expired, view)

    async def _complete(self, groups: Collection[CommitGroup], data_keys: Sequence[bytes]) -> None:
        """Wait until the writes of these groups in the keys' partitions are complete."""
        if groups:
            partition_ids = np.unique(records.partitions_of_data_keys(data_keys))
            await self._replicator.groups_done(groups, partition_ids)

    def _read_step(
        self,
        keys: list[bytes],
        start: int,
        answer: ReadAnswer,
        want_versions: bool,
        expired: Expired,
        incomplete: dict[CommitGroup, None],
    ) -> int:
        """Read some rows, append them to ``answer``, and return the bytes of their records. Add to
        ``incomplete`` the groups that have to complete before these rows may be returned.
        """
        rows = self._store.get_many(keys)
        incomplete.update(dict.fromkeys(self._pending.seen(keys, rows)))
        found = list(map(_second, rows))
        flags = set(map(_flags_of, found))
        if len(rows) == len(keys) and flags == {0} and not want_versions:
            answer.values += values_of(found, with_expiry=False)
            return sum(map(len, found))
        by_key = dict(rows)
        if flags <= {0} and not want_versions:
            for row, record in enumerate(map(by_key.get, keys), start):
                if record is None:
                    answer.missing.append(row)
                    answer.values.append(b"")
                else:
                    answer.values.append(record[records.HEADER_BYTES :])
            return sum(map(len, found))
        now_ms = self._clock.now_ms()
        for row, key in enumerate(keys, start):
            data = by_key.get(key)
            live = records.decode_record(data) if data is not None else None
            if live is not None and live.expired(now_ms) and not live.tombstone:
                expired.append(key)
                live = None
            _append_record(answer, row, live, want_versions)
        return sum(map(len, found))


def _append_record(
    answer: ReadAnswer, row: int, record: Record | None, want_versions: bool
) -> None:
    if record is None or record.tombstone:
        answer.missing.append(row)
        record = records.Record(0, 0, 0, b"")
    answer.values.append(record.value)
    if want_versions:
        answer.versions.append(record.sequence)
        answer.expires_at_ms.append(record.expires_at_ms)
