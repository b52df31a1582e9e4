"""The cost of rows against a keyspace's limits: each counts as one row, with the bytes of its key
and of the value that a client sends or receives. An increment's number counts no bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from koinon_node.core.formats import records
from koinon_node.core.quotas import I64Array
from koinon_node.core.writes.atomic_batch import Check, Joint
from koinon_node.core.writes.updates import Increment, IncrementDecimal, Result, Update
from koinon_node.partition.batches import AtomicBatch, WriteBatch


def of_batch(batch: AtomicBatch) -> tuple[int, int]:
    """Return the rows and bytes that an atomic batch costs when it is sent. Checks are no rows."""
    updates = [step for step in batch.steps if not isinstance(step, Check)]
    return len(updates), sum(map(len, batch.keys)) + sum(map(_brought, updates))


def of_rows(batch: WriteBatch, rows: I64Array, sizes: I64Array) -> I64Array:
    """Return the bytes that some rows of a batch cost. ``sizes`` are the bytes of all rows' keys
    and values, without updates.
    """
    costs: I64Array = sizes[rows]
    if batch.updates:
        updates = (batch.updates.get(row) for row in rows.tolist())
        costs += np.fromiter((_brought(u) if u else 0 for u in updates), np.int64, len(rows))
    return costs


def answered(results: Iterable[Result]) -> int:
    """Return the bytes of the values in updates' results."""
    found = (result[1] if isinstance(result, tuple) else result for result in results)
    return sum(len(value) for value in found if isinstance(value, bytes))


def copied(batch: AtomicBatch, written: Mapping[bytes, bytes | None]) -> int:
    """Return the bytes that operations on several keys (COPY, RENAME, BITOP) wrote beyond the bytes
    sent: they write existing values. ``written`` are encoded records by data key.
    """
    keys: set[bytes] = set()
    brought = 0
    for at, step in enumerate(batch.steps):
        if isinstance(step, Joint):
            keys.update(batch.keys[at : at + 1 + step.parts])
            brought += step.size
    found = (written.get(records.head_of(batch.partition_id) + key) for key in keys)
    return max(0, sum(len(record) - records.HEADER_BYTES for record in found if record) - brought)


def read(keys: Sequence[bytes], found: Sequence[bytes | None]) -> int:
    """Return the bytes of the keys and of the values in their encoded records."""
    there = [len(record) for record in found if record is not None]
    return sum(map(len, keys)) + sum(there) - records.HEADER_BYTES * len(there)


def _brought(update: Update | Joint) -> int:
    return 0 if isinstance(update, Increment | IncrementDecimal) else update.size
