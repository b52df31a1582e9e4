"""Executes merge steps, which turn the staged rows of a bulk load into records (rule 20).

Runs in the writer process, inside the transaction of its group. Every replica builds the same rows
from the same chunks: a step names its chunks, its range of keys, its sequence and all times, and
the result depends on nothing else. A replica with other chunks than the primary is damaged: then
this module raises, and the process ends with the error.

Rows are handled as Arrow arrays, in C: 1,000 rows in about a millisecond, most of it LMDB's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import lmdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from koinon_node.core.formats import chunk_keys, record_layout, records
from koinon_node.core.formats.chunk_keys import Slice, slice_of
from koinon_node.core.formats.records import BoolArray, U64Array
from koinon_proto.contract import arrow, columns
from koinon_proto.contract.arrow import I64Array
from koinon_proto.contract.columns import Gathered
from koinon_proto.v1.replication_pb2 import MergeStep

_HEAD = np.dtype([("sequence", ">u8"), ("flags", "u1"), ("expiry", ">u8")])
"""The header of a record that expires; other records lack the last field."""


class MergeError(Exception):
    """The chunks in this store are not the ones that the step names."""


def keys_array(part: Slice) -> Any:
    """Return the keys as an Arrow array that shares their memory."""
    return arrow.binaries(part.columns.key_offsets, part.columns.keys, part.start, part.end)


def first_out_of_order(rows: Gathered) -> int | None:
    """Return the index of the first chunk whose keys do not ascend (equal keys are allowed), or
    None.
    """
    count = len(rows.key_lengths)
    if count < 2:
        return None
    keys = arrow.binaries(rows.offsets, memoryview(rows.keys), 0, count)
    ordered = arrow.truths_of(pc.less_equal(keys[: count - 1], keys[1:]))
    ends = np.cumsum(rows.rows)
    ordered[ends[:-1][(ends[:-1] > 0) & (ends[:-1] < count)] - 1] = True  # from chunk to chunk
    wrong = np.flatnonzero(~ordered)
    return int(np.searchsorted(ends, wrong[0], side="right")) if len(wrong) else None


def merge(
    txn: lmdb.Transaction,
    data: Any,
    expiry: Any,
    step: MergeStep,
    stored_entries: Callable[[Sequence[bytes]], list[bytes]],
) -> None:
    """Execute the step in a write transaction, on the databases of records and of expiries.
    ``stored_entries`` returns the expiry entries that records of some data keys had before.

    Raises:
        MergeError: a chunk is missing, or the chunks hold another number of rows than the step
        says.
    """
    rows = _merged(txn, data, step)
    with txn.cursor(data) as cursor:
        if step.replace:
            _delete_others(txn, cursor, expiry, step, set(rows.keys))
        _delete(txn, cursor, expiry, step, rows.gone)
        cursor.putmulti(zip(rows.keys, rows.values, strict=True))
    if rows.expiry_keys:  # otherwise reading the replaced records would cost too much
        with txn.cursor(expiry) as cursor:
            for entry in set(stored_entries(rows.keys)).difference(rows.expiry_keys):
                if cursor.set_key(entry):
                    cursor.delete()
            cursor.putmulti((key, b"") for key in sorted(rows.expiry_keys))
    _leave_mark(txn, data, expiry, step)


@dataclass(frozen=True, slots=True)
class _Rows:
    keys: list[bytes]  # data keys, ascending, each once
    values: list[bytes]  # records
    expiry_keys: list[bytes]
    gone: list[bytes] = field(default_factory=list)
    """Data keys to delete without a tombstone; deletes with a tombstone are among the rows."""


def _merged(txn: lmdb.Transaction, data: Any, step: MergeStep) -> _Rows:
    """Return the rows of the step's chunks in its range, one winner per key."""
    parts = [p for p in _slices(txn, data, step) if p.rows]
    staged_rows = sum(part.rows for part in parts)
    if staged_rows != step.rows:
        raise MergeError(
            f"partition {step.partition_id}, load {step.load_id}: {staged_rows} staged rows "
            f"where the step has {step.rows}"
        )
    if not parts:
        return _Rows([], [], [])
    keys = pa.concat_arrays([keys_array(part) for part in parts])
    values = pa.concat_arrays(
        [arrow.binaries(p.columns.value_offsets, p.columns.values, p.start, p.end) for p in parts]
    )
    chosen = _winners(keys, parts)
    if chosen is not None:
        taken = arrow.indices(chosen)
        keys, values = keys.take(taken), values.take(taken)
    head, empty = arrow.binary_scalar(records.head_of(step.partition_id)), arrow.binary_scalar(b"")
    data_keys = pc.binary_join_element_wise(head, keys, empty)
    expiries, deleted = _expiries(step, parts, chosen)
    gone: list[bytes] = []
    if deleted is not None and not step.tombstone_at_ms:
        gone = data_keys.filter(arrow.truths(deleted)).to_pylist()
        kept = arrow.truths(~deleted)
        data_keys, values = data_keys.filter(kept), values.filter(kept)
        expiries, deleted = expiries[~deleted], None
    headers = _headers(step.sequence, expiries, deleted)
    rows = pc.binary_join_element_wise(headers, values, empty).to_pylist()
    listed = data_keys.to_pylist()
    return _Rows(listed, rows, _expiry_keys(listed, expiries), gone)


def _slices(txn: lmdb.Transaction, data: Any, step: MergeStep) -> Iterator[Slice]:
    head = records.head_of(step.partition_id, records.STAGED)
    for attempt, number in zip(step.attempts, step.numbers, strict=True):
        record = txn.get(head + chunk_keys.chunk_key(step.load_id, attempt, number), db=data)
        if record is None or record[records.FLAGS_AT] & records.FLAG_TOMBSTONE:
            raise MergeError(
                f"partition {step.partition_id}, load {step.load_id}: there is no chunk {number} "
                f"of attempt {attempt:x}"
            )
        chunk = columns.unpack(memoryview(record)[records.HEADER_BYTES :])
        yield slice_of(chunk, step.after_key, step.until_key)


def _winners(keys: Any, parts: Sequence[Slice]) -> I64Array | None:
    """Return the indexes of the winning rows by ascending key, or None if all rows stay as they
    are.

    Of equal keys the row with the greatest order wins, and among equal orders the last by task and
    row. The chunks come in that order, and Arrow's sort is stable.
    """
    rows = len(keys)
    order: I64Array | None = None
    if len(parts) > 1:
        order = arrow.numbers_of(pc.array_sort_indices(keys))
        ordered = keys.take(arrow.indices(order))
    else:
        ordered = keys
    same = arrow.truths_of(pc.equal(ordered[: rows - 1], ordered[1:]))
    if not same.any():
        return order
    places = order if order is not None else np.arange(rows)
    group = np.concatenate(([0], np.cumsum(~same)))
    if any(part.columns.orders is not None for part in parts):
        orders = np.concatenate([_orders(part) for part in parts])[places]
        by_order = np.lexsort((np.arange(rows), orders, group))
        places = places[by_order]
    ends = np.append(np.flatnonzero(~same), rows - 1)
    return np.asarray(places[ends], np.int64)


def _orders(part: Slice) -> U64Array:
    orders = part.columns.orders
    if orders is None:
        return np.zeros(part.rows, np.uint64)
    return orders[part.start : part.end]


def _expiries(
    step: MergeStep, parts: Sequence[Slice], chosen: I64Array | None
) -> tuple[U64Array, BoolArray | None]:
    """Return the expiry of each row (0: never), and a mask of the rows that delete their key (None:
    no row does). The expiry of a delete is the time from which its tombstone may be purged.
    """
    columns_of = [part.columns for part in parts]
    times = np.array([chunk.header.expires_at_ms for chunk in columns_of], np.uint64)
    expiries = np.repeat(times, [part.rows for part in parts])
    deleted = None
    if any(chunk.expiries is not None for chunk in columns_of):
        deleted = np.zeros(len(expiries), np.bool_)
        at = 0
        for part in parts:
            own, rows = part.columns.expiries, slice(at, at + part.rows)
            if own is not None:
                expiries[rows] = own[part.start : part.end]
                deleted[rows] = expiries[rows] == columns.DELETED
            at += part.rows
        expiries[deleted] = step.tombstone_at_ms
        if chosen is not None:
            deleted = deleted[chosen]
    return expiries if chosen is None else expiries[chosen], deleted


def _headers(sequence: int, expiries: U64Array, deleted: BoolArray | None) -> Any:
    """Return the records' headers: one for all rows, or one per row."""
    if deleted is None and (expiries == expiries[:1]).all():
        expires_at_ms = int(expiries[0]) if len(expiries) else 0
        return arrow.binary_scalar(records.encode_record(sequence, b"", expires_at_ms))
    heads = np.empty(len(expiries), _HEAD)
    heads["sequence"], heads["expiry"] = sequence, expiries
    heads["flags"] = np.where(expiries > 0, records.FLAG_EXPIRES, 0)
    if deleted is not None:
        heads["flags"][deleted] |= records.FLAG_TOMBSTONE
    lengths = np.where(expiries > 0, records.HEADER_WITH_EXPIRY_BYTES, records.HEADER_BYTES)
    matrix = heads.view(np.uint8).reshape(-1, records.HEADER_WITH_EXPIRY_BYTES)
    data = matrix[np.arange(records.HEADER_WITH_EXPIRY_BYTES) < lengths[:, None]]
    ends = np.concatenate(([0], np.cumsum(lengths)))
    return arrow.binaries(ends, data.data, 0, len(lengths))


def _expiry_keys(data_keys: Sequence[bytes], expiries: U64Array) -> list[bytes]:
    if not expiries.any():
        return []
    pairs = zip(expiries.tolist(), data_keys, strict=True)
    return [record_layout.expiry_key(at, key) for at, key in pairs if at]


def _delete_others(
    txn: lmdb.Transaction, cursor: lmdb.Cursor, expiry: Any, step: MergeStep, kept: set[bytes]
) -> None:
    """Delete the records in the step's range for which the load has no row."""
    head = records.head_of(step.partition_id)
    inside = head + step.prefix
    start = max(inside, head + step.after_key + b"\x00" if step.after_key else head)
    until = head + step.until_key if step.until_key else None
    gone: list[bytes] = []
    if cursor.set_range(start):
        for key, record in cast("Iterator[tuple[bytes, bytes]]", cursor.iternext()):
            if not key.startswith(inside) or (until is not None and key > until):
                break
            if key not in kept and not record[records.FLAGS_AT] & records.FLAG_TOMBSTONE:
                gone.append(key)
    _delete(txn, cursor, expiry, step, gone)


def _delete(
    txn: lmdb.Transaction, cursor: lmdb.Cursor, expiry: Any, step: MergeStep, keys: Sequence[bytes]
) -> None:
    """Delete the records, with tombstones if the step says so."""
    if not step.tombstone_at_ms:
        for key in keys:
            if cursor.set_key(key):
                cursor.delete()
        return
    tombstone = records.encode_tombstone(step.sequence, step.tombstone_at_ms)
    for key in keys:
        cursor.put(key, tombstone)
        txn.put(record_layout.expiry_key(step.tombstone_at_ms, key), b"", db=expiry)


def _leave_mark(txn: lmdb.Transaction, data: Any, expiry: Any, step: MergeStep) -> None:
    """Write the load's mark; once the load is merged, delete its chunks."""
    head = records.head_of(step.partition_id, records.STAGED)
    mark_key = head + chunk_keys.mark_key(step.load_id)
    if step.last:
        inside = head + chunk_keys.load_key(step.load_id)
        with txn.cursor(data) as cursor:
            found: list[bytes] = []
            if cursor.set_range(mark_key):
                for key in cast("Iterator[bytes]", cursor.iternext(keys=True, values=False)):
                    if not key.startswith(inside):
                        break
                    found.append(key)
            _delete(txn, cursor, expiry, step, [key for key in found if key != mark_key])
    mark = chunk_keys.Mark(step.last, b"" if step.last else step.until_key)
    txn.put(mark_key, records.encode_record(step.sequence, chunk_keys.encode_mark(mark)), db=data)
