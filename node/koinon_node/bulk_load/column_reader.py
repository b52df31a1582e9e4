"""Reads pages of the partitions that this node serves as columns: scans for Spark and the command
line.

A page sees every write acknowledged before it began, and shows no row whose commit group is not
complete. Reading yields to the event loop every few thousand rows.
"""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from koinon_node.core.formats import records
from koinon_node.core.formats.records import U32Array
from koinon_node.core.writes.commit_group import CommitGroup
from koinon_node.partition.engine import Engine
from koinon_node.partition.row_metrics import RowCounts
from koinon_node.state import Expired
from koinon_node.storage.store import values_of
from koinon_proto.contract import columns
from koinon_proto.contract.errors import KoinonError, LeaseExpiredError, ResourceExhaustedError
from koinon_proto.server import admission

PAGE_BYTES = 4 * 1024 * 1024
_SCAN_BYTES = 512 * 1024  # read between two yields to the event loop
_SCAN_ROWS = 8_192
_ROWS_MAX = 1 << 32  # of a page without a quota: its bytes bound it
_DEAD_ROWS_MAX = 8_192
"""Dead rows (expired or deleted) after which a page ends: there may be any number of them."""
_NO_LENGTHS = np.zeros(0, np.uint32)
_flags_of = operator.itemgetter(records.FLAGS_AT)
_user_key = operator.itemgetter(slice(records.KEY_AT, None))
_first, _second = operator.itemgetter(0), operator.itemgetter(1)


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnsPage:
    """A request for a page. ``partition_ids`` ascend; ``after_key`` belongs to the first of
    them.
    """

    table_version: int
    partition_ids: Sequence[int]
    prefix: bytes
    after_key: bytes
    bytes_max: int
    keys_only: bool
    want_versions: bool


@dataclass(kw_only=True, slots=True)
class ColumnsAnswer:
    """A page's columns over rows; ``runs`` has the number of rows by partition."""

    keys: list[bytes] = field(default_factory=list)
    values: list[bytes] = field(default_factory=list)
    key_lengths: list[U32Array] = field(default_factory=list)  # in pieces
    value_lengths: list[U32Array] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    expires_at_ms: list[int] = field(default_factory=list)
    runs: dict[int, int] = field(default_factory=dict)
    next_cursor: tuple[int, bytes] | None = None
    refusals: dict[int, KoinonError] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """The bytes of the keys and values."""
        return sum(int(lengths.sum()) for lengths in self.key_lengths + self.value_lengths)

    def packed(self) -> bytes:
        """Return keys and values as packed columns."""
        return columns.pack(
            np.concatenate([_NO_LENGTHS, *self.key_lengths]),
            b"".join(self.keys),
            np.concatenate([_NO_LENGTHS, *self.value_lengths]),
            b"".join(self.values),
        )


class ColumnReader:
    """Reads pages of records as columns. Belongs to the event loop."""

    def __init__(self, engine: Engine, counts: RowCounts | None = None) -> None:
        context = engine.context
        self._engine = engine
        self._counts = counts or RowCounts()
        self._state = context.state
        self._store = context.store
        self._pending = context.pending
        self._replicator = context.replicator
        self._limits = context.limits
        self._clock = context.clock
        self._reading_bytes = 0  # of all pages being read now, each counted at its full size

    async def read_columns(self, page: ColumnsPage) -> ColumnsAnswer:
        """Return one page. It sees every write acknowledged before it began; rows that change
        while it runs may be seen either way.

        Raises:
            LeaseExpiredError, ResourceExhaustedError
        """
        self._state.check_lease()
        view = self._state.served
        answer = ColumnsAnswer()
        bytes_max = min(page.bytes_max or PAGE_BYTES, PAGE_BYTES)
        rows_max = _ROWS_MAX
        first = page.partition_ids[0] if page.partition_ids else 0
        quota = self._state.quota(view, first)
        if quota is not None:  # a smaller page: the next one continues after it
            rows_max, bytes_left = quota.room(self._state.now())
            bytes_max = min(bytes_max, bytes_left)
        if self._reading_bytes and self._reading_bytes + bytes_max > self._limits.reading_bytes:
            raise ResourceExhaustedError(
                resource="bytes being read", limit=self._limits.reading_bytes
            )
        admission.hold(bytes_max)
        self._reading_bytes += bytes_max
        try:
            with Expired(self._clock) as expired:
                visited = await self._read_partitions(page, bytes_max, rows_max, answer, expired)
        finally:
            self._reading_bytes -= bytes_max
        if quota is not None:
            quota.spend(len(answer.keys), answer.size)
        if not self._state.still_serves(view, np.array(visited, np.uint32)):
            raise LeaseExpiredError(node_id=self._state.node_id)
        self._engine.context.traffic.rows_read += len(answer.keys)
        self._counts.scanned_rows(
            len(answer.keys), sum(int(lengths.sum()) for lengths in answer.value_lengths)
        )
        return answer

    async def _read_partitions(
        self,
        page: ColumnsPage,
        bytes_max: int,
        rows_max: int,
        answer: ColumnsAnswer,
        expired: Expired,
    ) -> list[int]:
        view = self._state.served
        incomplete: dict[CommitGroup, None] = {}
        visited: list[int] = []
        size, dead, at, after_key = 0, 0, 0, page.after_key
        looked = read = 0  # bytes and rows since the last yield
        await self._engine.context.writer.settle(page.partition_ids)
        while at < len(page.partition_ids):
            p = page.partition_ids[at]
            if not view.epochs[p] or self._state.stopped[p]:
                answer.refusals[p] = self._state.refusal(view, p, page.table_version)
                at, after_key = at + 1, b""
                continue
            rows_left = rows_max - len(answer.keys)
            if size >= bytes_max or dead >= _DEAD_ROWS_MAX or rows_left <= 0:
                answer.next_cursor = (p, after_key)
                break
            rows, more = self._store.scan(
                p,
                page.prefix,
                after_key,
                min(_SCAN_ROWS, rows_left),
                min(_SCAN_BYTES, bytes_max - size),
            )
            visited.append(p)
            keys, found = list(map(_first, rows)), list(map(_second, rows))
            head = records.head_of(p)
            seen = self._pending.seen_in_scan(head + page.prefix, head + after_key, rows, more=more)
            incomplete.update(dict.fromkeys(seen))
            live = len(answer.keys)
            grown, scanned = self._append(p, keys, found, page, answer, expired)
            size += grown
            dead += len(rows) - (len(answer.keys) - live)
            read += scanned
            if more:
                after_key = rows[-1][0][records.KEY_AT :]
            else:
                at, after_key = at + 1, b""
            looked += len(rows) + 1
            if looked > _SCAN_ROWS or read > _SCAN_BYTES:
                looked = read = 0
                await asyncio.sleep(0)
        await self._replicator.groups_done(incomplete, np.array(visited, np.uint32))
        if expired:
            await self._engine.expiry.remove_expired(expired, view)
        return visited

    def _append(
        self,
        partition_id: int,
        keys: Sequence[bytes],
        found: Sequence[bytes],
        page: ColumnsPage,
        answer: ColumnsAnswer,
        expired: Expired,
    ) -> tuple[int, int]:
        """Append live rows of these data keys and records to the answer, and note expired ones.
        Return the bytes that the answer grew by, and the bytes of all records.
        """
        sizes = np.fromiter(map(len, found), np.uint32, len(found))
        scanned = int(sizes.sum())
        decoded: list[records.Record] = []  # only where a record may carry more than a value
        with_flags = any(map(_flags_of, found))
        if with_flags:
            keys, found, decoded = self._live(keys, found, expired)
        if not keys:
            return 0, scanned
        if page.keys_only:
            values = [b""] * len(keys)
            sizes = np.zeros(len(keys), np.uint32)
        elif with_flags:
            values = [record.value for record in decoded]
            sizes = np.fromiter(map(len, values), np.uint32, len(values))
        else:
            values = values_of(found, with_expiry=False)
            sizes -= np.uint32(records.HEADER_BYTES)
        if page.want_versions:
            answer.versions += records.sequences_of(found).tolist()
            answer.expires_at_ms += [r.expires_at_ms for r in decoded] or [0] * len(keys)
        answer.keys += map(_user_key, keys)
        answer.values += values
        key_sizes = np.fromiter(map(len, keys), np.uint32, len(keys)) - np.uint32(records.KEY_AT)
        answer.key_lengths.append(key_sizes)
        answer.value_lengths.append(sizes)
        answer.runs[partition_id] = answer.runs.get(partition_id, 0) + len(keys)
        grown = int(key_sizes.sum() + sizes.sum())
        self._engine.context.traffic.count_scan(partition_id, len(keys), grown)
        return grown, scanned

    def _live(
        self, keys: Sequence[bytes], found: Sequence[bytes], expired: Expired
    ) -> tuple[list[bytes], list[bytes], list[records.Record]]:
        """Return the rows that are neither tombstones nor expired, encoded and decoded."""
        now_ms = self._clock.now_ms()
        live_keys, live, decoded = [], [], []
        for key, data in zip(keys, found, strict=True):
            record = records.decode_record(data)
            if record.tombstone:
                continue
            if record.expired(now_ms):
                expired.append(key)
            else:
                live_keys.append(key)
                live.append(data)
                decoded.append(record)
        return live_keys, live, decoded
