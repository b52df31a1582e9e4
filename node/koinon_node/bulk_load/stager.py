"""Stages the chunks of open bulk loads, and confirms before a commit that all rows are staged.

A chunk is written like any record, under a key that no client can name, and only while its load is
open by the newest table. The bytes being staged at once are bounded far below the writer's bounds,
so that a client's write never waits behind more of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from koinon_node.bulk_load import staged_chunks
from koinon_node.core.formats import chunk_keys, records
from koinon_node.core.formats.records import U32Array
from koinon_node.partition.batches import WriteBatch
from koinon_node.partition.engine import Engine
from koinon_node.partition.request_limits import loaded_expiries, loaded_expiry
from koinon_node.partition.row_metrics import RowCounts
from koinon_proto.contract import columns
from koinon_proto.contract.columns import Gathered
from koinon_proto.contract.errors import (
    InvalidArgumentError,
    KoinonError,
    LeaseExpiredError,
    ResourceExhaustedError,
    TableBehindError,
)

STAGING_BYTES = 8 * 1024 * 1024
"""The most bytes staged at once; further chunks wait."""
WAITING_BYTES = 64 * 1024 * 1024
"""The most bytes of waiting chunks; further chunks are refused."""


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
    """The result of ``prepare``. ``refusals`` are the partitions that could not be checked."""

    refusals: dict[int, KoinonError] = field(default_factory=dict)
    duplicate_rows: int = 0
    duplicate_keys: list[bytes] = field(default_factory=list)


class Stager:
    """Stages chunks of open loads, and confirms them. Belongs to the event loop."""

    def __init__(self, engine: Engine, counts: RowCounts | None = None) -> None:
        self._engine = engine
        self._state = engine.context.state
        self._store = engine.context.store
        self._clock = engine.context.clock
        self._counts = counts or RowCounts()
        self._room = _Room(STAGING_BYTES)

    @property
    def staging_bytes(self) -> int:
        """The bytes being staged now."""
        return self._room.used

    async def stage(self, batch: StageBatch) -> dict[int, KoinonError]:
        """Stage the chunks; return the errors of refused partitions, in which nothing was staged.

        Raises:
            LoadClosedError: the load is not open.
            TableBehindError: this node's table is older than the sender's.
            InvalidArgumentError: a chunk's keys do not ascend, or it expires too late.
            KoinonError: the errors of Writes.write; a retry is safe.
        """
        try:
            refusals = await self._stage(batch)
        except BaseException as error:
            self._counts.stage_failed(int(batch.gathered.rows.sum()), error)
            raise
        self._counts.staged(batch.partition_ids, batch.gathered.rows, batch.chunks, refusals)
        return refusals

    async def _stage(self, batch: StageBatch) -> dict[int, KoinonError]:
        self.check_load(batch.load_id, batch.table_version)
        await self._check_order(batch.gathered)
        write = WriteBatch(
            table_version=batch.table_version,
            keys=[
                chunk_keys.chunk_key(batch.load_id, batch.attempt, number)
                for number in batch.numbers
            ],
            values=self._with_expiries(batch),
            partition_ids=batch.partition_ids,
            kind=records.STAGED,
            load_id=batch.load_id,
        )
        refusals = self._over_quota(batch)
        if refusals:
            write = write.taking(np.flatnonzero(~np.isin(batch.partition_ids, list(refusals))))
        async with self._room.of(sum(map(len, write.values))):
            answer = await self._engine.writes.write(write)
        for error in answer.row_errors.values():
            raise error
        return refusals | answer.refusals

    def _over_quota(self, batch: StageBatch) -> dict[int, KoinonError]:
        """Return the partitions that exceed the keyspace's quota. Rows count when they are staged,
        with their packed bytes, and not again when they are merged.
        """
        view = self._state.served
        quota = self._state.quota(view, int(batch.partition_ids[0]))
        if quota is None:
            return {}
        sizes = np.fromiter(map(len, batch.chunks), np.int64, len(batch.chunks))
        return dict(quota.cut(self._state.now(), batch.partition_ids, sizes, batch.gathered.rows))

    def check_load(self, load_id: int, table_version: int) -> None:
        """Raise LoadClosedError unless the load is open, or TableBehindError if the sender's table
        is newer than this node's.
        """
        self.check_version(table_version)
        self._state.check_load(load_id)

    def check_version(self, table_version: int) -> None:
        """Raise TableBehindError if the sender's table is newer than this node's."""
        table = self._state.table()
        if table_version > table.table_version:
            raise TableBehindError(
                table_version=table.table_version, required_version=table_version
            )

    def _with_expiries(self, batch: StageBatch) -> Sequence[bytes]:
        """Return the chunks, with the expiries that the keyspace's rules give their rows now. A
        later change of the rules does not affect staged rows.
        """
        keyspace = self._state.table().keyspaces.of(int(batch.partition_ids[0]))
        if keyspace is None:
            return batch.chunks  # the write will refuse the partition
        chunks, now_ms = list(batch.chunks), self._clock.now_ms()
        rows = batch.gathered
        for index, (header, own) in enumerate(zip(rows.headers, rows.expiries, strict=True)):
            if own is not None:
                expiries = loaded_expiries(keyspace, own, now_ms, f"chunks[{index}]")
                if (expiries != own).any():
                    chunks[index] = columns.with_expiries(chunks[index], expiries)
                continue
            expires_at_ms = loaded_expiry(
                keyspace, header.expires_at_ms, now_ms, f"chunks[{index}]"
            )
            if expires_at_ms != header.expires_at_ms:
                chunks[index] = columns.with_expiry(chunks[index], expires_at_ms)
        return chunks

    async def _check_order(self, rows: Gathered) -> None:
        # Importing Arrow takes a while, and nodes without bulk loads never need it.
        merging = await _imported("koinon_node.storage.merge_executor")
        index = merging.first_out_of_order(rows)
        if index is not None:
            raise InvalidArgumentError(field=f"chunks[{index}]", reason="keys must ascend")

    async def prepare(
        self,
        load_id: int,
        attempts: frozenset[int],
        rows: Mapping[int, int],
        table_version: int,
        *,
        find_duplicates: bool,
    ) -> Prepared:
        """Check that these partitions hold as many rows of the attempts as given, and find
        duplicate keys.

        Raises:
            LoadClosedError, TableBehindError, LeaseExpiredError
        """
        self._state.check_lease()
        self.check_load(load_id, table_version)
        view = self._state.served
        partition_ids = np.fromiter(rows, np.uint32, len(rows))
        prepared = Prepared(refusals=self._state.refusals(view, partition_ids, table_version))
        looked = [p for p in rows if p not in prepared.refusals]
        await _imported("koinon_node.storage.merge_executor")
        await self._engine.context.writer.settle(looked)

        def prepare() -> None:
            for partition_id in looked:
                try:
                    found = staged_chunks.prepare(
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
        # Missing rows are checked only if still served: a partition that moved away is erased here.
        if not self._state.still_serves(view, np.array(looked, np.uint32)):
            raise LeaseExpiredError(node_id=self._state.node_id)
        return prepared


class _Room:
    """Bounds the bytes being staged. A larger batch than the bound is staged alone."""

    def __init__(self, limit: int, waiting_max: int = WAITING_BYTES) -> None:
        self._limit = limit
        self._waiting_max = waiting_max
        self.used = self._waiting = 0
        self._turn = asyncio.Lock()  # first come, first served
        self._freed = asyncio.Event()

    @contextlib.asynccontextmanager
    async def of(self, size: int) -> AsyncIterator[None]:
        """Wait until ``size`` bytes fit, and occupy them while the context lasts.

        Raises:
            ResourceExhaustedError: ``waiting_max`` bytes are waiting already.
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
    """Import the module on a thread, once."""
    if name not in _modules:
        _modules[name] = await asyncio.to_thread(importlib.import_module, name)
    return _modules[name]
