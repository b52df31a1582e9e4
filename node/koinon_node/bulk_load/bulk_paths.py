"""The bulk paths of the partitions that this node leads: staging, preparing, reading in columns.

What is staged is written like any record, under keys that no client can name, and only while its
load is open by the newest table. How much of it is under way at once is bounded, and far below the
bounds of the writer: a client's write never waits behind more than that.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import operator
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from koinon_node.bulk_load import staging
from koinon_node.config import Limits
from koinon_node.core import chunk_keys, records
from koinon_node.core.commit_group import CommitGroup
from koinon_node.core.pending_writes import PendingWrites
from koinon_node.core.records import U32Array
from koinon_node.primary.replicator import Replicator
from koinon_node.serving.batches import WriteBatch
from koinon_node.serving.engine import Engine
from koinon_node.serving.row_metrics import RowCounts
from koinon_node.state import Expired, NodeState, WallClock
from koinon_node.storage.store import Store, values_of
from koinon_proto.contract import columns
from koinon_proto.contract.columns import Gathered
from koinon_proto.contract.errors import (
    InvalidArgumentError,
    KoinonError,
    LeaseExpiredError,
    ResourceExhaustedError,
    TableBehindError,
)
from koinon_proto.contract.table import MAX_TTL_MS
from koinon_proto.server import admission

STAGING_BYTES = 8 * 1024 * 1024
"""What is staged at once; the rest waits for its turn."""
WAITING_BYTES = 64 * 1024 * 1024
PAGE_BYTES = 4 * 1024 * 1024
_SCAN_BYTES = 512 * 1024  # between two chances for others to run
_SCAN_ROWS = 8_192
_DEAD_ROWS_MAX = 8_192
"""Rows of a page that have expired or were deleted; there may be as many as ever were."""
_NO_LENGTHS = np.zeros(0, np.uint32)
_flags_of = operator.itemgetter(records.FLAGS_AT)
_user_key = operator.itemgetter(slice(records.KEY_AT, None))
_first, _second = operator.itemgetter(0), operator.itemgetter(1)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageBatch:
    """Checked chunks to stage; columns over chunks."""

    table_version: int
    load_id: int
    attempt: int
    partition_ids: U32Array
    numbers: Sequence[int]
    chunks: Sequence[bytes]
    gathered: Gathered  # of the chunks


@dataclass(kw_only=True, slots=True)
class Prepared:
    """What was found in the partitions; ``refusals`` are those that could not be looked at."""

    refusals: dict[int, KoinonError] = field(default_factory=dict)
    duplicate_rows: int = 0
    duplicate_keys: list[bytes] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnsPage:
    """A page asked for. ``partition_ids`` ascend; ``after_key`` belongs to the first of them."""

    table_version: int
    partition_ids: Sequence[int]
    prefix: bytes
    after_key: bytes
    bytes_max: int
    keys_only: bool
    want_versions: bool


@dataclass(kw_only=True, slots=True)
class ColumnsAnswer:
    """Columns over rows; ``runs`` says how many rows there are of each partition."""

    keys: list[bytes] = field(default_factory=list)
    values: list[bytes] = field(default_factory=list)
    key_lengths: list[U32Array] = field(default_factory=list)  # in pieces
    value_lengths: list[U32Array] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    expires_at_ms: list[int] = field(default_factory=list)
    runs: dict[int, int] = field(default_factory=dict)
    next_cursor: tuple[int, bytes] | None = None
    refusals: dict[int, KoinonError] = field(default_factory=dict)

    def packed(self) -> bytes:
        """Return keys and values as packed columns."""
        return columns.pack(
            np.concatenate([_NO_LENGTHS, *self.key_lengths]),
            b"".join(self.keys),
            np.concatenate([_NO_LENGTHS, *self.value_lengths]),
            b"".join(self.values),
        )


class Bulk:
    """All methods belong to the event loop's thread."""

    def __init__(
        self,
        state: NodeState,
        store: Store,
        engine: Engine,
        pending: PendingWrites,
        replicator: Replicator,
        limits: Limits,
        clock: WallClock,
        counts: RowCounts | None = None,
    ) -> None:
        self._state = state
        self._store = store
        self._engine = engine
        self._counts = counts or RowCounts()
        self._pending = pending
        self._replicator = replicator
        self._limits = limits
        self._clock = clock
        self._room = _Room(STAGING_BYTES)
        self._reading_bytes = 0

    # --- staging ---------------------------------------------------------------------------

    @property
    def staging_bytes(self) -> int:
        """The bytes that are being staged now."""
        return self._room.used

    async def stage(self, batch: StageBatch) -> dict[int, KoinonError]:
        """Stage the chunks; return why partitions were refused, of which nothing was staged.

        Raises:
            LoadClosedError: the load is not open.
            TableBehindError: this node's table is older than the sender's.
            InvalidArgumentError: a chunk's keys do not ascend, or it expires too late.
            KoinonError: as Engine.write; sending the same again is safe.
        """
        try:
            refusals = await self._stage(batch)
        except BaseException as error:
            self._counts.stage_failed(int(batch.gathered.rows.sum()), error)
            raise
        self._counts.staged(batch.partition_ids, batch.gathered.rows, batch.chunks, refusals)
        return refusals

    async def _stage(self, batch: StageBatch) -> dict[int, KoinonError]:
        self._check_load(batch.load_id, batch.table_version)
        await self._check_chunks(batch.gathered)
        async with self._room.of(sum(map(len, batch.chunks))):
            answer = await self._engine.write(
                WriteBatch(
                    table_version=batch.table_version,
                    keys=[
                        chunk_keys.chunk_key(batch.load_id, batch.attempt, number)
                        for number in batch.numbers
                    ],
                    values=batch.chunks,
                    partition_ids=batch.partition_ids,
                    kind=records.STAGED,
                    load_id=batch.load_id,
                )
            )
        for error in answer.row_errors.values():
            raise error
        return answer.refusals

    def _check_load(self, load_id: int, table_version: int) -> None:
        """Raise unless the load is open; who has a newer table than this node's may know more."""
        table = self._state.table()
        if table_version > table.table_version:
            raise TableBehindError(
                table_version=table.table_version, required_version=table_version
            )
        self._state.check_load(load_id)

    async def _check_chunks(self, rows: Gathered) -> None:
        # Arrow, which nodes without bulk loads never need, takes a while to import.
        merging = await _imported("koinon_node.storage.merge_steps")
        latest_ms = self._clock.now_ms() + MAX_TTL_MS
        for index, header in enumerate(rows.headers):
            if header.expires_at_ms > latest_ms:
                raise InvalidArgumentError(
                    field=f"chunks[{index}]",
                    reason="expires too late",
                    limit=latest_ms,
                    actual=header.expires_at_ms,
                )
        index = merging.first_out_of_order(rows)
        if index is not None:
            raise InvalidArgumentError(field=f"chunks[{index}]", reason="keys must ascend")

    # --- preparing -------------------------------------------------------------------------

    async def prepare(
        self,
        load_id: int,
        attempts: frozenset[int],
        rows: Mapping[int, int],
        table_version: int,
        *,
        find_duplicates: bool,
    ) -> Prepared:
        """Check that these partitions hold so many rows of the attempts, and find duplicates.

        Raises:
            LoadClosedError, TableBehindError, LeaseExpiredError
        """
        self._state.check_lease()
        self._check_load(load_id, table_version)
        view = self._state.served
        partition_ids = np.fromiter(rows, np.uint32, len(rows))
        prepared = Prepared(refusals=self._state.refusals(view, partition_ids, table_version))
        looked = [p for p in rows if p not in prepared.refusals]
        await _imported("koinon_node.storage.merge_steps")
        await self._engine.settle(looked)

        def prepare() -> None:
            for partition_id in looked:
                try:
                    found = staging.prepare(
                        self._store,
                        load_id,
                        attempts,
                        partition_id,
                        rows[partition_id],
                        find_duplicates=find_duplicates,
                    )
                except KoinonError as error:
                    prepared.refusals[partition_id] = error
                else:
                    prepared.duplicate_rows += found.rows
                    prepared.duplicate_keys += found.keys

        await asyncio.to_thread(prepare)
        # What is missing counts likewise: a partition that has moved away is erased here.
        if not self._state.still_serves(view, np.array(looked, np.uint32)):
            raise LeaseExpiredError(node_id=self._state.node_id)
        return prepared

    # --- reading ---------------------------------------------------------------------------

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
        if self._reading_bytes and self._reading_bytes + bytes_max > self._limits.reading_bytes:
            raise ResourceExhaustedError(
                resource="bytes being read", limit=self._limits.reading_bytes
            )
        admission.hold(bytes_max)
        self._reading_bytes += bytes_max
        try:
            with Expired(self._clock) as expired:
                visited = await self._read_partitions(page, bytes_max, answer, expired)
        finally:
            self._reading_bytes -= bytes_max
        if not self._state.still_serves(view, np.array(visited, np.uint32)):
            raise LeaseExpiredError(node_id=self._state.node_id)
        self._engine.rows_read += len(answer.keys)
        self._counts.scanned_rows(
            len(answer.keys), sum(int(lengths.sum()) for lengths in answer.value_lengths)
        )
        return answer

    async def _read_partitions(
        self, page: ColumnsPage, bytes_max: int, answer: ColumnsAnswer, expired: Expired
    ) -> list[int]:
        view = self._state.served
        incomplete: set[CommitGroup] = set()
        visited: list[int] = []
        size, dead, at, after_key = 0, 0, 0, page.after_key
        looked = read = 0  # since others could run
        await self._engine.settle(page.partition_ids)
        while at < len(page.partition_ids):
            p = page.partition_ids[at]
            if not view.epochs[p] or self._state.stopped[p]:
                answer.refusals[p] = self._state.refusal(view, p, page.table_version)
                at, after_key = at + 1, b""
                continue
            if size >= bytes_max or dead >= _DEAD_ROWS_MAX:
                answer.next_cursor = (p, after_key)
                break
            rows, more = self._store.scan(
                p, page.prefix, after_key, _SCAN_ROWS, min(_SCAN_BYTES, bytes_max - size)
            )
            visited.append(p)
            keys, found = list(map(_first, rows)), list(map(_second, rows))
            head = records.head_of(p)
            incomplete.update(
                self._pending.seen_in_scan(head + page.prefix, head + after_key, rows, more=more)
            )
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
        for group in incomplete:
            await self._replicator.group_done(group, np.array(visited, np.uint32))
        if expired:
            await self._engine.remove_expired(expired, view)
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
        """Append live rows of these data keys and records to the answer, note expired ones; return
        the bytes that it grew by, and those of all records.
        """
        sizes = np.fromiter(map(len, found), np.uint32, len(found))
        scanned = int(sizes.sum())
        with_flags = any(map(_flags_of, found))
        if with_flags:
            keys, found = self._live(keys, found, expired)
        if not keys:
            return 0, scanned
        if page.keys_only:
            values = [b""] * len(keys)
            sizes = np.zeros(len(keys), np.uint32)
        elif with_flags:
            values = [records.decode_record(record).value for record in found]
            sizes = np.fromiter(map(len, values), np.uint32, len(values))
        else:
            values = values_of(found, with_expiry=False)
            sizes -= np.uint32(records.HEADER_BYTES)
        if page.want_versions:
            decoded = list(map(records.decode_record, found))
            answer.versions += [record.sequence for record in decoded]
            answer.expires_at_ms += [record.expires_at_ms for record in decoded]
        answer.keys += map(_user_key, keys)
        answer.values += values
        key_sizes = np.fromiter(map(len, keys), np.uint32, len(keys)) - np.uint32(records.KEY_AT)
        answer.key_lengths.append(key_sizes)
        answer.value_lengths.append(sizes)
        answer.runs[partition_id] = answer.runs.get(partition_id, 0) + len(keys)
        grown = int(key_sizes.sum() + sizes.sum())
        self._engine.traffic.count_scan(partition_id, len(keys), grown)
        return grown, scanned

    def _live(
        self, keys: Sequence[bytes], found: Sequence[bytes], expired: Expired
    ) -> tuple[list[bytes], list[bytes]]:
        """Return the rows that are no tombstones and have not expired."""
        now_ms = self._clock.now_ms()
        live_keys, live = [], []
        for key, data in zip(keys, found, strict=True):
            record = records.decode_record(data)
            if record.tombstone:
                continue
            if record.expired(now_ms):
                expired.append(key)
            else:
                live_keys.append(key)
                live.append(data)
        return live_keys, live


class _Room:
    """Bounds what is under way; who is bigger than the bound goes alone."""

    def __init__(self, limit: int, waiting_max: int = WAITING_BYTES) -> None:
        self._limit = limit
        self._waiting_max = waiting_max
        self.used = self._waiting = 0
        self._turn = asyncio.Lock()  # first come, first served
        self._freed = asyncio.Event()

    @contextlib.asynccontextmanager
    async def of(self, size: int) -> AsyncIterator[None]:
        """Wait for room.

        Raises:
            ResourceExhaustedError: too much is waiting already.
        """
        if self._waiting and self._waiting + size > self._waiting_max:
            raise ResourceExhaustedError(
                resource="bytes waiting to be staged", limit=self._waiting_max
            )
        self._waiting += size
        try:
            async with self._turn:
                while self.used and self.used + size > self._limit:
                    self._freed.clear()
                    await self._freed.wait()
                self.used += size
        finally:
            self._waiting -= size
        try:
            yield
        finally:
            self.used -= size
            self._freed.set()


_modules: dict[str, Any] = {}


async def _imported(name: str) -> Any:
    """Import the module off the loop, once."""
    if name not in _modules:
        _modules[name] = await asyncio.to_thread(importlib.import_module, name)
    return _modules[name]
