"""Reads the staged chunks of bulk loads in short transactions, and plans merge steps.

All functions run on a thread: they read whole partitions, and Arrow and LMDB release the GIL.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import lmdb
import numpy as np

from koinon_node.core.formats import chunk_keys, records
from koinon_node.core.formats.chunk_keys import ChunkName, Mark, Slice, slice_of
from koinon_node.storage.environment import DATA_DB
from koinon_node.storage.store import Store
from koinon_proto.contract import columns
from koinon_proto.contract.cluster_errors import LoadIncompleteError
from koinon_proto.contract.columns import Columns
from koinon_proto.v1.loads_pb2 import LOAD_MODE_OVERWRITE, LoadManifest
from koinon_proto.v1.replication_pb2 import MergeStep

STEP_BYTES = 4 * 1024 * 1024
"""Roughly the bytes that one merge step writes: about 50 ms of the writer's time."""
STEP_ROWS = 50_000
"""Roughly the most rows that one merge step writes, however small they are."""
STEP_RECORDS = 20_000
"""The existing records that one step of an overwriting load reads."""
_DELETE_BYTES = 80  # roughly what a deleted record writes: a tombstone and its index entry
_SAMPLES = 8  # sampled keys per chunk, to find the key where a step ends
_DUPLICATES_SHOWN = 10


# --- staged chunks -----------------------------------------------------------------------------


def staged_loads(store: Store, partition_ids: Sequence[int]) -> dict[int, list[int]]:
    """Return the loads with staged chunks by partition; partitions without any are left out.
    Tombstones of deleted chunks do not count.
    """
    found: dict[int, list[int]] = {}
    with store.env.begin(store.databases[DATA_DB], buffers=True) as txn, txn.cursor() as cursor:
        for p in partition_ids:
            head = records.head_of(p, records.STAGED)
            loads = []
            start = head
            while cursor.set_range(start) and (key := bytes(cursor.key())).startswith(head):
                load_id = chunk_keys.chunk_name(key[records.KEY_AT :]).load_id
                if next(_live_keys(cursor, head + chunk_keys.load_key(load_id)), None) is not None:
                    loads.append(load_id)
                start = head + chunk_keys.load_key(load_id + 1)
            if loads:
                found[p] = loads
    return found


def staged_keys(store: Store, partition_id: int, load_id: int, limit: int) -> list[bytes]:
    """Return up to ``limit`` keys of the load's chunks, without their partition prefix and kind."""
    head = records.head_of(partition_id, records.STAGED)
    with store.env.begin(store.databases[DATA_DB], buffers=True) as txn, txn.cursor() as cursor:
        inside = head + chunk_keys.load_key(load_id)
        if not cursor.set_range(inside):
            return []
        keys = itertools.islice(_live_keys(cursor, inside), limit)
        return [key[records.KEY_AT :] for key in keys]


def _live_keys(cursor: lmdb.Cursor, inside: bytes) -> Iterator[bytes]:
    """Yield the data keys from the cursor on that begin with ``inside`` and are no tombstones. The
    transaction must use buffers, since a record may be a large chunk.
    """
    for key, record in cursor.iternext(keys=True, values=True):
        if not bytes(key).startswith(inside):
            return
        if not record[records.FLAGS_AT] & records.FLAG_TOMBSTONE:
            yield bytes(key)


def read_mark(store: Store, partition_id: int, load_id: int) -> Mark:
    """Return the load's mark in the partition: how far it is merged there."""
    record = store.get(records.head_of(partition_id, records.STAGED) + chunk_keys.mark_key(load_id))
    if record is None or record[records.FLAGS_AT] & records.FLAG_TOMBSTONE:
        return Mark()
    return chunk_keys.decode_mark(record[records.HEADER_BYTES :])


class Chunk(NamedTuple):
    """A staged chunk, as views into the map that are valid during the read transaction."""

    name: ChunkName
    columns: Columns


def _chunks(txn: lmdb.Transaction, partition_id: int, load_id: int) -> Iterator[Chunk]:
    """Yield the load's chunks in the partition. The transaction must use buffers."""
    head = records.head_of(partition_id, records.STAGED)
    inside, mark = head + chunk_keys.load_key(load_id), head + chunk_keys.mark_key(load_id)
    with txn.cursor() as cursor:
        if not cursor.set_range(inside):
            return
        for key, record in cursor.iternext(keys=True, values=True):
            name = bytes(key)
            if not name.startswith(inside):
                return
            if name != mark and not record[records.FLAGS_AT] & records.FLAG_TOMBSTONE:
                body = memoryview(record)[records.HEADER_BYTES :]
                unpacked = columns.unpack(body, check=False)
                yield Chunk(chunk_keys.chunk_name(name[records.KEY_AT :]), unpacked)


# --- before the commit -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Duplicates:
    """The number of rows whose key another row of the load has, and some of these keys."""

    rows: int = 0
    keys: tuple[bytes, ...] = ()


def prepare(
    store: Store,
    load_id: int,
    attempts: frozenset[int],
    partition_id: int,
    expected_rows: int,
    *,
    find_duplicates: bool,
) -> Duplicates:
    """Check that all rows of the attempts are staged in the partition, and look for duplicate keys.

    Raises:
        LoadIncompleteError: rows are missing.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    from koinon_node.storage.merge_executor import keys_array
    from koinon_proto.contract import arrow

    with store.env.begin(store.databases[DATA_DB], buffers=True) as txn:
        chunks = [c for c in _chunks(txn, partition_id, load_id) if c.name.attempt in attempts]
        rows = sum(chunk.columns.header.rows for chunk in chunks)
        if rows != expected_rows:
            raise LoadIncompleteError(
                load_id=load_id,
                partition_id=partition_id,
                expected_rows=expected_rows,
                staged_rows=rows,
            )
        if not find_duplicates or not chunks:
            return Duplicates()
        whole = [chunk_keys.Slice(c.columns, 0, c.columns.header.rows) for c in chunks]
        keys = pa.chunked_array([keys_array(part) for part in whole])
        distinct = pc.count_distinct(keys).as_py()
        if distinct == rows:
            return Duplicates()
        counted = pc.value_counts(keys)
        repeated = np.flatnonzero(arrow.numbers_of(counted.field("counts")) > 1)
        shown = (
            counted.field("values").take(arrow.indices(repeated[:_DUPLICATES_SHOWN])).to_pylist()
        )
        return Duplicates(rows - distinct, tuple(shown))


# --- after the commit --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Manifest:
    """A committed load with the facts that a merge needs. ``ranks`` orders attempts by their
    tasks.
    """

    load_id: int
    replace: bool
    prefix: bytes
    ranks: Mapping[int, int]
    partition_ids: frozenset[int]

    @classmethod
    def of(cls, message: LoadManifest) -> Manifest:
        return cls(
            load_id=message.load_id,
            replace=message.mode == LOAD_MODE_OVERWRITE,
            prefix=message.prefix,
            ranks={attempt: rank for rank, attempt in enumerate(message.attempts)},
            partition_ids=frozenset(message.partition_ids),
        )


def next_step(store: Store, manifest: Manifest, partition_id: int) -> MergeStep | None:
    """Return the partition's next merge step without its sequence and times, or None if the load is
    merged there.
    """
    mark = read_mark(store, partition_id, manifest.load_id)
    if mark.merged:
        return None
    step = MergeStep(
        partition_id=partition_id,
        load_id=manifest.load_id,
        after_key=mark.key,
        replace=manifest.replace,
        prefix=manifest.prefix,
    )
    with store.env.begin(store.databases[DATA_DB], buffers=True) as txn:
        chunks = [
            chunk
            for chunk in _chunks(txn, partition_id, manifest.load_id)
            if chunk.name.attempt in manifest.ranks
        ]
        chunks.sort(key=lambda chunk: (manifest.ranks[chunk.name.attempt], chunk.name.number))
        ends = [_staged_end(chunks, mark.key)]
        if manifest.replace:
            end, looked_at = _records_end(txn, partition_id, mark.key, manifest.prefix)
            ends.append(end)
            step.bytes = looked_at * _DELETE_BYTES
        step.until_key = min((end for end in ends if end), default=b"")
        step.last = not step.until_key
        for chunk in chunks:
            part = slice_of(chunk.columns, step.after_key, step.until_key)
            if part.rows:
                step.attempts.append(chunk.name.attempt)
                step.numbers.append(chunk.name.number)
                step.rows += part.rows
                step.bytes += part.bytes
    return step


def weight(rows: int, size: int) -> int:
    """Return the weight of rows with so many bytes, in bytes of STEP_BYTES: each row counts for at
    least STEP_BYTES / STEP_ROWS.
    """
    return max(size, rows * (STEP_BYTES // STEP_ROWS))


def _staged_end(chunks: Sequence[Chunk], after_key: bytes) -> bytes:
    """Return a key up to which the chunks hold about STEP_BYTES; b"" if they hold no more in
    all.
    """
    until, enough = b"", STEP_BYTES
    while True:
        parts = [slice_of(chunk.columns, after_key, until) for chunk in chunks]
        if sum(weight(part.rows, part.bytes) for part in parts) <= enough:
            return until
        # Many similar chunks hold a lot below their first samples: then sample that part again.
        key = _sampled_end(parts)
        if not key or key == until:
            return until
        until, enough = key, 2 * STEP_BYTES


def _sampled_end(parts: Sequence[Slice]) -> bytes:
    """Return one of the sampled keys up to which the parts hold about STEP_BYTES; b"" if no sample
    lies beyond.
    """
    samples: list[tuple[bytes, int]] = []
    for part in parts:
        stride = max(1, part.rows // _SAMPLES)
        share = weight(part.rows, part.bytes) * stride // max(part.rows, 1)
        for row in range(part.start + stride - 1, part.end, stride):
            samples.append((chunk_keys.key_at(part.columns, row), share))
    samples.sort()
    size = 0
    for key, share in samples:
        size += share
        if size >= STEP_BYTES:
            return key
    return b""


def _records_end(
    txn: lmdb.Transaction, partition_id: int, after_key: bytes, prefix: bytes
) -> tuple[bytes, int]:
    """Return (the key that ends the next STEP_RECORDS records, their number); the key is b"" if no
    more records follow.
    """
    head = records.head_of(partition_id)
    inside = head + prefix
    start = max(inside, head + after_key + b"\x00" if after_key else head)
    with txn.cursor() as cursor:
        if not cursor.set_range(start):
            return b"", 0
        keys: Any = itertools.islice(cursor.iternext(keys=True, values=False), STEP_RECORDS)
        found = list(itertools.takewhile(lambda key: bytes(key).startswith(inside), keys))
        if len(found) < STEP_RECORDS:
            return b"", len(found)
        return bytes(found[-1])[records.KEY_AT :], len(found)
