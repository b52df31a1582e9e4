"""Estimates the records and bytes of each partition in this store, for plans and progress.

LMDB cannot tell the size of a part of a database. So a background scan counts again and again with
two per cent of a core: a step of about a millisecond, then a pause. It reads only lengths, so large
values are not read. The count of a partition is as old as the scan's last visit. The module keeps
the sequence through which the copy was complete then: once it has risen, the size is stale.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import Sequence
from itertools import chain, islice
from typing import Any

import lmdb
import numpy as np

from koinon_node.core.formats import records
from koinon_node.core.formats.records import BoolArray, U32Array, U64Array
from koinon_node.storage.environment import DATA_DB, PARTITIONS_DB
from koinon_node.storage.store import Store

_ALL_PARTITIONS = 65_536
_STEP_ROWS = 512
_STEP_S = 0.001
_DUTY = 0.02
_PASS_PAUSE_S = 5.0
_OVERHEAD_BYTES = records.KEY_AT + records.HEADER_BYTES  # of a row, without its key and value


class SizeEstimates:
    """The counts of each partition. The scan adds rows in key order."""

    def __init__(self) -> None:
        self._records = np.zeros(_ALL_PARTITIONS, np.uint64)  # by partition, like the next three
        self._bytes = np.zeros(_ALL_PARTITIONS, np.uint64)  # of keys and values
        self._hidden = np.zeros(_ALL_PARTITIONS, np.uint64)  # records that no client can read
        self._through = np.zeros(_ALL_PARTITIONS, np.uint64)  # the copy's position when counted
        self._partition_id = 0  # the partition that the scan is in
        self._visited_at = 0  # that copy's position at the scan's first row
        self._counted = [0, 0, 0]  # of that partition so far: records, bytes, hidden records

    def of(self, partition_id: int) -> tuple[int, int]:
        """Return (records, bytes of keys and values) of one partition."""
        return int(self._records[partition_id]), int(self._bytes[partition_id])

    def of_many(self, partition_ids: U32Array) -> tuple[U64Array, U64Array]:
        """Return the columns (records, bytes of keys and values) of these partitions."""
        return self._records[partition_ids], self._bytes[partition_ids]

    def hidden(self) -> int:
        """Return the number of records that no client can read, over all partitions, including
        their tombstones: staged records of bulk loads, and cursors of consumer groups.
        """
        return int(self._hidden.sum())

    def columns(self) -> tuple[list[int], list[int], list[int]]:
        """Return (partitions with records, records, bytes). Any thread may call it."""
        # A copy, since NumPy raises if a count changes from or to zero during flatnonzero.
        counted = self._records.copy()
        held = np.flatnonzero(counted)
        return held.tolist(), counted[held].tolist(), self._bytes[held].tolist()

    def stale(self, partition_ids: Sequence[int], through: U64Array) -> BoolArray:
        """Return a mask of the partitions that were written since they were counted. ``through`` is
        each partition's last sequence.
        """
        stale: BoolArray = self._through[list(partition_ids)] < through
        return stale

    def add(
        self, partition_id: int, rows: int, size: int, hidden: int = 0, through: int = 0
    ) -> None:
        """Add the scan's next rows, ``hidden`` of which no client can read; there are no other rows
        between them and the ones before. The copy was complete at least ``through`` this sequence
        when they were read.
        """
        if partition_id != self._partition_id:
            self._leave(partition_id)
        if not self._counted[0]:
            self._visited_at = through  # the scan may miss writes during the visit
        self._counted[0] += rows
        self._counted[1] += size - rows * _OVERHEAD_BYTES
        self._counted[2] += hidden

    def end_pass(self) -> None:
        """End a scan; the next one begins with the first partition."""
        self._leave(_ALL_PARTITIONS)
        self._partition_id = 0

    def _leave(self, partition_id: int) -> None:
        """Store the counts of the scan's partition, and zeros for the empty partitions up to
        ``partition_id``.
        """
        here = self._partition_id
        self._records[here], self._bytes[here], self._hidden[here] = self._counted
        self._through[here] = self._visited_at
        for column in (self._records, self._bytes, self._hidden, self._through):
            column[here + 1 : partition_id] = 0
        self._partition_id, self._counted = partition_id, [0, 0, 0]


class SizeScan:
    """The scan over a store."""

    def __init__(self, store: Store, estimates: SizeEstimates) -> None:
        self._store = store
        self._estimates = estimates
        self._start = b""

    async def run(self) -> None:
        """Scan until cancelled."""
        while True:
            began = time.perf_counter()
            more = self.step(_STEP_S)
            took_s = time.perf_counter() - began
            await asyncio.sleep(max(took_s * (1 / _DUTY - 1), 0.0 if more else _PASS_PAUSE_S))

    def step(self, seconds: float) -> bool:
        """Scan for about so many seconds; return False at the end of the store."""
        until = time.perf_counter() + seconds
        with (
            self._store.env.begin(self._store.databases[DATA_DB], buffers=True) as txn,
            txn.cursor() as cursor,
        ):
            while True:
                if not cursor.set_range(self._start):
                    self._start = b""
                    self._estimates.end_pass()
                    return False
                rows = list(islice(cursor.iternext(keys=True, values=True), _STEP_ROWS))
                self._count(txn, rows)
                if time.perf_counter() >= until:
                    return True

    def _count(self, txn: lmdb.Transaction[Any], rows: Sequence[tuple[Any, Any]]) -> None:
        """Count the rows, partition by partition; continue behind them next time."""
        at = 0
        while at < len(rows):
            partition_id = records.partition_of_data_key(bytes(rows[at][0]))
            end = len(rows)
            if records.partition_of_data_key(bytes(rows[-1][0])) != partition_id:
                following = records.prefix_of(partition_id + 1)
                end = bisect_left(rows, following, lo=at, key=_key_of)
            size = sum(map(len, chain.from_iterable(rows[at:end])))
            hidden_head = records.head_of(partition_id, records.USER + 1)
            first_hidden = end
            if bytes(rows[end - 1][0]) >= hidden_head:
                first_hidden = bisect_left(rows, hidden_head, lo=at, hi=end, key=_key_of)
            through = self._through(txn, partition_id)
            self._estimates.add(partition_id, end - at, size, end - first_hidden, through)
            at = end
        self._start = bytes(rows[-1][0]) + b"\x00"

    def _through(self, txn: lmdb.Transaction[Any], partition_id: int) -> int:
        database = self._store.databases[PARTITIONS_DB]
        data = txn.get(records.progress_key(partition_id), db=database)
        return 0 if data is None else records.decode_progress(bytes(data))[0]


def _key_of(row: tuple[Any, Any]) -> bytes:
    return bytes(row[0])
