"""Rows come out as chunks of one partition each, in key order, none lost and none doubled."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from koinon.spark.writing.chunking import CHUNK_BYTES, Batcher, Chunk
from koinon.spark.writing.sorting import sort_rows
from koinon_proto.contract import columns
from koinon_proto.partitioner import partitioner

Row = tuple[bytes, bytes, int]

KEYS = st.one_of(
    st.binary(min_size=1, max_size=10),
    st.binary(min_size=1, max_size=3).map(lambda tail: b"order:" * 5 + tail),
    st.binary(min_size=1, max_size=3).map(lambda tail: b"x" * 90 + tail),
    st.integers(0, 30).map(lambda zeros: b"a" + bytes(zeros)),
)


def batcher(partitions: int = 16, memory_bytes: int = 1 << 20, expires_at_ms: int = 0) -> Batcher:
    chosen = partitioner("murmur2", partitions)
    return Batcher(chosen, memory_bytes=memory_bytes, expires_at_ms=expires_at_ms)


def rows_of(chunk: Chunk) -> list[Row]:
    rows = columns.unpack(chunk.data)
    assert rows.header.rows == chunk.rows
    return [
        (
            bytes(rows.keys[rows.key_offsets[i] : rows.key_offsets[i + 1]]),
            bytes(rows.values[rows.value_offsets[i] : rows.value_offsets[i + 1]]),
            int(rows.orders[i]) if rows.orders is not None else 0,
        )
        for i in range(chunk.rows)
    ]


def add(to: Batcher, rows: list[Row], *, with_orders: bool = False) -> None:
    keys, values, orders = zip(*rows, strict=True)
    to.add(
        pa.array(keys, pa.binary()),
        pa.array(values, pa.binary()),
        np.array(orders, np.uint64) if with_orders else None,
    )


# --- the order ----------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 3), KEYS), min_size=1, max_size=60))
def test_sort_rows_is_by_partition_then_key_then_row(rows: list[tuple[int, bytes]]) -> None:
    partition_ids = np.array([p for p, _ in rows], np.uint32)
    order = sort_rows(partition_ids, pa.array([key for _, key in rows], pa.binary()))
    expected = sorted(range(len(rows)), key=lambda row: (*rows[row], row))
    assert order.tolist() == expected


@pytest.mark.parametrize(
    "keys",
    [
        [b"%012d" % (i * 7919 % 5_000) for i in range(5_000)],
        [b"tenant-7/" + b"z" * 70 + b"%d" % (i * 7919 % 5_000) for i in range(5_000)],
        [bytes((i * 31 % 256, i * 7 % 256, i % 256)) * 4 for i in range(5_000)],
        [b"x" * (i * 37 % 500 + 1) for i in range(2_000)],
        [b"y" * 400 + bytes((i * 7 % 256, i * 3 % 256)) * (i % 3) for i in range(2_000)],
        [b"same"] * 1_000,
        [bytes((i % 3 * 90,)) + b"z" * 70 + b"%d" % (i * 7919 % 5_000) for i in range(5_000)],
        [b"%d" % (10**20 // (i % 7 + 2)) + b"%d" % (i * 7919 % 5_000) for i in range(5_000)],
    ],
    ids=["digits", "long prefix", "random", "nested", "late", "equal", "far apart", "heads"],
)
def test_sort_rows_many_keys_of_all_shapes_are_in_order(keys: list[bytes]) -> None:
    partition_ids = partitioner("murmur2", 7).partitions_of(keys)
    order = sort_rows(partition_ids, pa.array(keys, pa.binary()))
    ranked = [(int(partition_ids[row]), keys[row], row) for row in order.tolist()]
    assert ranked == sorted(ranked)
    assert sorted(order.tolist()) == list(range(len(keys)))


def test_sort_rows_of_a_sliced_array_reads_its_own_keys() -> None:
    keys = pa.array([b"z", b"c", b"b", b"a"]).slice(1, 3)
    assert sort_rows(np.zeros(3, np.uint32), keys).tolist() == [2, 1, 0]


# --- chunks -------------------------------------------------------------------------------------


@given(
    st.lists(
        st.lists(
            st.tuples(KEYS, st.binary(max_size=20), st.integers(0, (1 << 64) - 1)),
            min_size=1,
            max_size=20,
        ),
        min_size=1,
        max_size=4,
    ),
    st.booleans(),
)
def test_chunks_hold_every_row_in_order_in_its_partition(
    batches: list[list[Row]], with_orders: bool
) -> None:
    made = batcher(partitions=5)
    expected: dict[int, list[Row]] = defaultdict(list)
    for batch in batches:
        add(made, batch, with_orders=with_orders)
        for key, value, order in batch:
            partition_id = partitioner("murmur2", 5).partition_of(key)
            expected[partition_id].append((key, value, order if with_orders else 0))
    found: dict[int, list[Row]] = defaultdict(list)
    for chunk in made.chunks():
        found[chunk.partition_id] += rows_of(chunk)
    for rows in expected.values():
        rows.sort(key=lambda row: row[0])  # stable: equal keys stay in their order
    assert found == expected
    assert made.rows_of.tolist() == [len(expected[p]) for p in range(5)]
    assert list(made.chunks()) == []


def test_chunks_large_partitions_are_cut_and_small_ones_are_whole() -> None:
    made = batcher(partitions=2)
    add(made, [(b"key-%05d" % i, b"v" * 100, 0) for i in range(10_000)])
    sizes: dict[int, list[int]] = defaultdict(list)
    for chunk in made.chunks():
        sizes[chunk.partition_id].append(len(chunk.data))
    for of_partition in sizes.values():
        assert max(of_partition) <= CHUNK_BYTES + columns.HEADER_BYTES
        assert all(size > CHUNK_BYTES * 0.9 for size in of_partition[:-1])
    assert sorted(sizes) == [0, 1]


def test_chunks_a_row_larger_than_a_chunk_has_one_of_its_own() -> None:
    made = batcher(partitions=1)
    add(made, [(b"a", b"small", 0), (b"b", b"x" * (CHUNK_BYTES * 2), 0), (b"c", b"small", 0)])
    assert [chunk.rows for chunk in made.chunks()] == [1, 1, 1]


def test_batcher_is_full_at_its_memory_and_counts_bytes() -> None:
    made = batcher(memory_bytes=10_000)
    add(made, [(b"k", b"v" * 5_000, 0)])
    assert not made.full
    add(made, [(b"l", b"v" * 5_000, 0)])
    assert made.full
    assert made.bytes == 10_002
    assert sum(chunk.rows for chunk in made.chunks()) == 2
    assert not made.full


def test_chunks_say_when_their_rows_expire() -> None:
    made = batcher(expires_at_ms=1_234_567_890_123)
    add(made, [(b"k", b"v", 0)])
    (chunk,) = made.chunks()
    assert columns.read_header(chunk.data).expires_at_ms == 1_234_567_890_123


def test_chunks_hold_the_expiry_of_each_row_beside_it() -> None:
    made = batcher(partitions=3)
    keys = [b"%05d" % (i * 7919 % 5_000) for i in range(5_000)]
    for at in range(0, 5_000, 1_000):
        lot = pa.array(keys[at : at + 1_000], pa.binary())
        made.add(lot, lot, None, np.array(list(map(int, keys[at : at + 1_000])), np.uint64))
    found: list[tuple[bytes, int]] = []
    for chunk in made.chunks():
        expiries = columns.unpack(chunk.data).expiries
        assert expiries is not None
        found += zip((key for key, _, _ in rows_of(chunk)), expiries.tolist(), strict=True)
    assert len(found) == 5_000
    assert all(int(key) == expiry for key, expiry in found)


def test_batcher_without_rows_has_no_chunks() -> None:
    made = batcher()
    made.add(pa.array([], pa.binary()), pa.array([], pa.binary()), None)
    assert list(made.chunks()) == []


def test_chunks_of_sliced_batches_hold_their_rows_only() -> None:
    made = batcher(partitions=1)
    keys: Any = pa.array([b"a", b"b", b"c"], pa.binary())
    made.add(keys.slice(1, 1), pa.array([b"x", b"y"], pa.binary()).slice(1, 1), None)
    (chunk,) = made.chunks()
    assert rows_of(chunk) == [(b"b", b"y", 0)]
