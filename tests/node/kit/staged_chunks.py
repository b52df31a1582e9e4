"""Chunks as bulk loads stage them, and one partition of a real store to stage and merge them in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import lmdb
import numpy as np

from koinon_node.bulk_load import staged_chunks
from koinon_node.bulk_load.staged_chunks import Manifest
from koinon_node.core.formats import chunk_keys, record_layout, records
from koinon_node.core.formats.chunk_keys import ChunkName, Mark
from koinon_node.core.formats.records import Record
from koinon_node.storage import merge_executor
from koinon_node.storage.environment import DATA_DB, EXPIRY_DB
from koinon_node.storage.store import Store
from koinon_node.storage.transactions import stored_entries
from koinon_proto.contract import columns
from koinon_proto.v1.replication_pb2 import MergeStep

LOAD = 7
Rows = Sequence[tuple[bytes, bytes]]


def chunk_of(
    rows: Rows,
    *,
    orders: Sequence[int] | None = None,
    expiries: Sequence[int] | None = None,
    expires_at_ms: int = 0,
) -> bytes:
    """Return the rows, whose keys have to ascend, as a chunk."""
    keys, values = [key for key, _ in rows], [value for _, value in rows]
    return columns.pack(
        np.array(list(map(len, keys)), np.uint32),
        b"".join(keys),
        np.array(list(map(len, values)), np.uint32),
        b"".join(values),
        orders=None if orders is None else np.array(orders, np.uint64),
        expiries=None if expiries is None else np.array(expiries, np.uint64),
        expires_at_ms=expires_at_ms,
    )


def rows_of(packed: bytes) -> list[tuple[bytes, bytes]]:
    """Return the rows of packed columns."""
    unpacked = columns.unpack(packed)
    keys, values = unpacked.key_offsets.tolist(), unpacked.value_offsets.tolist()
    return [
        (
            bytes(unpacked.keys[keys[row] : keys[row + 1]]),
            bytes(unpacked.values[values[row] : values[row + 1]]),
        )
        for row in range(unpacked.header.rows)
    ]


def manifest_of(
    *attempts: int,
    load_id: int = LOAD,
    replace: bool = False,
    prefix: bytes = b"",
    partition_ids: Sequence[int] = (0,),
) -> Manifest:
    """Return a manifest with the attempts in the order of their tasks."""
    return Manifest(
        load_id=load_id,
        replace=replace,
        prefix=prefix,
        ranks={attempt: rank for rank, attempt in enumerate(attempts)},
        partition_ids=frozenset(partition_ids),
    )


def step_of(
    *chunks: tuple[int, int],
    rows: int = 0,
    partition_id: int = 0,
    sequence: int = 100,
    after: bytes = b"",
    until: bytes = b"",
    replace: bool = False,
    prefix: bytes = b"",
    tombstone_at_ms: int = 0,
) -> MergeStep:
    """Return a step over chunks, each (attempt, number); it is the last if it is open-ended."""
    return MergeStep(
        partition_id=partition_id,
        sequence=sequence,
        load_id=LOAD,
        attempts=[attempt for attempt, _ in chunks],
        numbers=[number for _, number in chunks],
        after_key=after,
        until_key=until,
        rows=rows,
        replace=replace,
        prefix=prefix,
        tombstone_at_ms=tombstone_at_ms,
        last=not until,
    )


class Partition:
    """One partition of a store, written without a writer."""

    def __init__(self, store: Store, partition_id: int = 0) -> None:
        self.store = store
        self.id = partition_id

    def begin(self) -> lmdb.Transaction[bytes]:
        """Begin a write transaction on the records."""
        return self.store.env.begin(self.store.databases[DATA_DB], write=True)

    # --- what is written -------------------------------------------------------------------

    def stage(
        self,
        attempt: int,
        number: int,
        rows: Rows,
        *,
        orders: Sequence[int] | None = None,
        expiries: Sequence[int] | None = None,
        expires_at_ms: int = 0,
        load_id: int = LOAD,
    ) -> None:
        chunk = chunk_of(rows, orders=orders, expiries=expiries, expires_at_ms=expires_at_ms)
        self.put_staged(chunk_keys.chunk_key(load_id, attempt, number), chunk)

    def put_staged(self, key: bytes, value: bytes) -> None:
        """Put a record under a hidden key."""
        with self.begin() as txn:
            txn.put(records.head_of(self.id, records.STAGED) + key, records.encode_record(1, value))

    def delete_staged(self, key: bytes) -> None:
        """Leave a tombstone under a hidden key."""
        with self.begin() as txn:
            data_key = records.head_of(self.id, records.STAGED) + key
            txn.put(data_key, records.encode_tombstone(2, 5))

    def put(self, key: bytes, value: bytes, *, sequence: int = 1, expires_at_ms: int = 0) -> None:
        """Put a user's record."""
        data_key = records.head_of(self.id) + key
        with self.begin() as txn:
            txn.put(data_key, records.encode_record(sequence, value, expires_at_ms))
            if expires_at_ms:
                entry = record_layout.expiry_key(expires_at_ms, data_key)
                txn.put(entry, b"", db=self.store.databases[EXPIRY_DB])

    def delete(self, key: bytes, *, sequence: int = 1) -> None:
        """Leave a tombstone under a user's key."""
        with self.begin() as txn:
            txn.put(records.head_of(self.id) + key, records.encode_tombstone(sequence, 5))

    def merge(self, step: MergeStep) -> None:
        data, expiry = self.store.databases[DATA_DB], self.store.databases[EXPIRY_DB]
        with self.begin() as txn, self.store.env.begin(data, buffers=True) as before:
            merge_executor.merge(txn, data, expiry, step, partial(stored_entries, before))

    def merge_all(
        self, manifest: Manifest, *, sequence: int = 100, tombstone_at_ms: int = 0
    ) -> list[MergeStep]:
        """Merge the load to its end, step by step; return the steps."""
        steps: list[MergeStep] = []
        while (step := staged_chunks.next_step(self.store, manifest, self.id)) is not None:
            step.sequence = sequence + len(steps)
            step.tombstone_at_ms = tombstone_at_ms
            self.merge(step)
            steps.append(step)
        return steps

    # --- what is there ---------------------------------------------------------------------

    def rows(self, kind: int) -> dict[bytes, Record]:
        head = records.head_of(self.id, kind)
        with self.begin() as txn, txn.cursor() as cursor:
            cursor.set_range(head)
            return {
                bytes(key[records.KEY_AT :]): records.decode_record(bytes(value))
                for key, value in cursor.iternext()
                if key.startswith(head)
            }

    @property
    def records(self) -> dict[bytes, Record]:
        """The users' records, tombstones among them."""
        return self.rows(records.USER)

    @property
    def values(self) -> dict[bytes, bytes]:
        return {key: r.value for key, r in self.records.items() if not r.tombstone}

    @property
    def chunks(self) -> dict[ChunkName, Record]:
        """All that is staged, but for marks; tombstones among them."""
        found = {chunk_keys.chunk_name(key): r for key, r in self.rows(records.STAGED).items()}
        return {name: record for name, record in found.items() if name.attempt}

    @property
    def mark(self) -> Mark:
        return staged_chunks.read_mark(self.store, self.id, LOAD)

    @property
    def expiry(self) -> set[tuple[int, bytes]]:
        """The entries of the expiry index: when, and what follows the partition in the key."""
        with self.store.env.begin(self.store.databases[EXPIRY_DB]) as txn:
            split = [record_layout.split_expiry_key(bytes(key)) for key, _ in txn.cursor()]
        prefix = records.prefix_of(self.id)
        return {(at_ms, key[2:]) for at_ms, key in split if key.startswith(prefix)}


def content(store: Store) -> tuple[Mapping[bytes, bytes], Mapping[bytes, bytes]]:
    """Return all records and the whole expiry index of a store, byte by byte."""
    with store.env.begin() as txn:
        data, expiry = (
            {bytes(key): bytes(value) for key, value in txn.cursor(store.databases[database])}
            for database in (DATA_DB, EXPIRY_DB)
        )
    return data, expiry
