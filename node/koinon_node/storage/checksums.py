"""Computes checksums of copies, so that copies on several nodes can be compared.

One read transaction serves a partition. It runs on the event loop in bounded steps of C-level
calls, with a pause after each as long as the step. (On a thread, py-lmdb would release and take the
GIL at every row: slower for both, see writer.py.)

The digest covers (key, record) in key order, without tombstones, and does not depend on the size of
the steps: two copies that are complete through the same sequence have the same digest. Expired
records count until they are deleted, which is a write like any other.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import operator
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np

from koinon_node.core.formats import records
from koinon_node.core.replication.copies import CopyState
from koinon_node.storage.environment import DATA_DB, PARTITIONS_DB
from koinon_node.storage.store import Store
from koinon_node.storage.writer import Writer
from koinon_proto.v1 import replication_pb2

Row = tuple[Any, Any]
"""Data key and record: bytes, or views of them."""

_FIRST_ROWS = 32
_STEP_ROWS = 512
_STEP_S = 0.001
_STEP_BYTES = 512 * 1024
_flags_of = operator.itemgetter(records.FLAGS_AT)
_second = operator.itemgetter(1)


class Digest:
    """The digest of rows added in key order."""

    def __init__(self) -> None:
        self.records = 0
        self.bytes = 0
        self._lengths = hashlib.blake2b(digest_size=32)
        self._data = hashlib.blake2b(digest_size=32)

    def add(self, rows: Sequence[Row]) -> None:
        """Add the next (data key, record) rows; tombstones are skipped."""
        flags = bytes(map(_flags_of, map(_second, rows)))
        if any(flag & records.FLAG_TOMBSTONE for flag in set(flags)):
            rows = [r for r, f in zip(rows, flags, strict=True) if not f & records.FLAG_TOMBSTONE]
            flags = bytes(f for f in flags if not f & records.FLAG_TOMBSTONE)
        if not rows:
            return
        lengths = np.fromiter(map(len, chain.from_iterable(rows)), "<u4", 2 * len(rows))
        self._lengths.update(lengths.tobytes())
        self._data.update(b"".join(chain.from_iterable(rows)))
        expiring = sum(1 for f in flags if f & records.FLAG_EXPIRES)
        header_bytes = len(rows) * records.HEADER_BYTES + expiring * (
            records.HEADER_WITH_EXPIRY_BYTES - records.HEADER_BYTES
        )
        self.records += len(rows)
        self.bytes += int(lengths.sum()) - header_bytes - len(rows) * records.KEY_AT

    def value(self) -> int:
        """Return the digest of all rows so far."""
        both = self._lengths.digest() + self._data.digest()
        return int.from_bytes(hashlib.blake2b(both, digest_size=8).digest(), "big")


class WorkPace:
    """Measures CPU time, and pauses for as long once it amounts to a step."""

    def __init__(self) -> None:
        self._worked_s = 0.0
        self._since = 0.0

    def begin(self) -> None:
        self._since = time.thread_time()

    async def pause(self) -> None:
        self._worked_s += time.thread_time() - self._since
        if self._worked_s >= _STEP_S:
            await asyncio.sleep(self._worked_s)
            self._worked_s = 0.0
        self._since = time.thread_time()


class Checksums:
    """Checksums of the copies in a store, one at a time."""

    def __init__(self, store: Store, writer: Writer) -> None:
        self._store = store
        self._writer = writer
        self._one_at_a_time = asyncio.Lock()

    async def of(self, partition_ids: Iterable[int]) -> list[replication_pb2.CopyChecksum]:
        """Return the checksums of these copies; ``usable`` is False for a copy that is missing or
        being replaced.
        """
        pace = WorkPace()
        found = []
        for partition_id in partition_ids:
            async with self._one_at_a_time:
                await self._writer.settle((partition_id,))
                pace.begin()
                found.append(await self._of(partition_id, pace))
        return found

    async def positions(self, partition_ids: Sequence[int]) -> list[replication_pb2.CopyChecksum]:
        """Return whether each copy is usable and the sequence through which it is complete, without
        reading records.
        """
        await self._writer.settle(partition_ids)
        with self._store.env.begin() as txn:
            through = [(p, self._usable_through(txn, p)) for p in partition_ids]
        return [
            replication_pb2.CopyChecksum(
                partition_id=p, usable=sequence is not None, complete_through=sequence or 0
            )
            for p, sequence in through
        ]

    async def _of(self, partition_id: int, pace: WorkPace) -> replication_pb2.CopyChecksum:
        digest = Digest()
        with self._store.env.begin(self._store.databases[DATA_DB], buffers=True) as txn:
            complete_through = self._usable_through(txn, partition_id)
            if complete_through is None:
                return replication_pb2.CopyChecksum(partition_id=partition_id)
            with txn.cursor() as cursor:
                more = cursor.set_range(records.prefix_of(partition_id))
                rows = cursor.iternext(keys=True, values=True)
                step = _FIRST_ROWS
                while more:
                    inside = _of_partition(list(islice(rows, step)), partition_id)
                    more = len(inside) == step
                    step = _STEP_ROWS
                    for piece in _pieces(inside):
                        digest.add(piece)
                        await pace.pause()
        await pace.pause()
        return replication_pb2.CopyChecksum(
            partition_id=partition_id,
            usable=True,
            complete_through=complete_through,
            records=digest.records,
            bytes=digest.bytes,
            digest=digest.value(),
        )

    def _usable_through(self, txn: Any, partition_id: int) -> int | None:
        """Return the sequence through which the copy is complete, or None if the copy is not
        usable.
        """
        facts = self._store.databases[PARTITIONS_DB]
        if txn.get(records.epochs_key(partition_id), db=facts) is None:
            return None
        if txn.get(records.dropping_key(partition_id), db=facts) is not None:
            return None
        progress = txn.get(records.progress_key(partition_id), db=facts)
        if progress is None:
            return 0
        complete_through, _, state = records.decode_progress(bytes(progress))
        return complete_through if state & ~CopyState.UNTRUSTED == 0 else None


def _of_partition(rows: Sequence[Row], partition_id: int) -> Sequence[Row]:
    """Return the rows up to the end of this partition."""
    if not rows or records.partition_of_data_key(bytes(rows[-1][0][:2])) == partition_id:
        return rows
    following = records.prefix_of(partition_id + 1)
    return rows[: bisect_left(rows, following, key=lambda row: bytes(row[0]))]


def _pieces(rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    """Split the rows into pieces of about ``_STEP_BYTES``: a value may have a MiB."""
    sizes = np.fromiter(map(len, map(_second, rows)), np.int64, len(rows))
    place = np.cumsum(sizes) // _STEP_BYTES
    cuts = [0, *(np.flatnonzero(np.diff(place)) + 1).tolist(), len(rows)]
    for start, end in itertools.pairwise(cuts):
        if end > start:
            yield rows[start:end]
