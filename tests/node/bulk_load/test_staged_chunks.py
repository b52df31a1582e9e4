"""Chunks that bulk loads have staged in a store, and the steps that merge them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from koinon_node.bulk_load import staged_chunks
from koinon_node.bulk_load.staged_chunks import (
    Duplicates,
    next_step,
    prepare,
    read_mark,
    staged_keys,
    staged_loads,
)
from koinon_node.core.formats import chunk_keys, records
from koinon_node.core.formats.chunk_keys import Mark, chunk_key, encode_mark, mark_key
from koinon_node.storage import environment, opened_store
from koinon_node.storage.store import Store
from koinon_node.store_config import StoreConfig
from koinon_proto.contract.cluster_errors import LoadIncompleteError
from tests.node.kit.staged_chunks import LOAD, Partition, manifest_of

LATER_MS = 2_000_000_000_000


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    opened = environment.open_environment
    monkeypatch.setattr(opened_store, "open_environment", lambda config: opened(config, sync=False))
    with Store(StoreConfig(directory=tmp_path, map_size_bytes=64 << 20)) as store:
        yield store


@pytest.fixture
def partition(store: Store) -> Partition:
    return Partition(store, 3)


def found(
    partition: Partition, *attempts: int, rows: int, find_duplicates: bool = True
) -> Duplicates:
    return prepare(
        partition.store,
        LOAD,
        frozenset(attempts),
        partition.id,
        rows,
        find_duplicates=find_duplicates,
    )


# --- preparing ---------------------------------------------------------------------------------


def test_prepare_counts_the_rows_of_the_named_attempts_only(partition: Partition) -> None:
    partition.stage(1, 0, [(b"a", b"1"), (b"b", b"1")])
    partition.stage(1, 4, [(b"c", b"1")])
    partition.stage(2, 0, [(b"d", b"2")])
    partition.stage(3, 0, [(b"a", b"lost")])  # a duplicate, if it counted
    partition.stage(1, 0, [(b"a", b"1")], load_id=LOAD + 1)
    assert found(partition, 1, 2, rows=4) == Duplicates()
    assert found(partition, 2, 99, rows=1) == Duplicates()
    assert found(partition, rows=0) == Duplicates()


@pytest.mark.parametrize("expected", [0, 2, 4])
def test_prepare_of_other_rows_than_are_staged_says_both_numbers(
    partition: Partition, expected: int
) -> None:
    partition.stage(1, 0, [(b"a", b"1"), (b"b", b"1"), (b"c", b"1")])
    with pytest.raises(LoadIncompleteError) as refused:
        found(partition, 1, rows=expected, find_duplicates=False)
    error = refused.value
    assert (error.load_id, error.partition_id) == (LOAD, partition.id)
    assert (error.expected_rows, error.staged_rows) == (expected, 3)


def test_prepare_does_not_count_chunks_that_were_deleted(partition: Partition) -> None:
    partition.stage(1, 0, [(b"a", b"1")])
    partition.stage(1, 1, [(b"b", b"1")])
    partition.delete_staged(chunk_key(LOAD, 1, 1))
    with pytest.raises(LoadIncompleteError):
        found(partition, 1, rows=2)
    assert found(partition, 1, rows=1) == Duplicates()


def test_prepare_counts_duplicates_within_and_across_chunks_once_a_row_too_many(
    partition: Partition,
) -> None:
    partition.stage(1, 0, [(b"a", b"1"), (b"b", b"1"), (b"b", b"2"), (b"c", b"1")])
    partition.stage(1, 1, [(b"a", b"2"), (b"d", b"1")])
    partition.stage(2, 0, [(b"a", b"3"), (b"e", b"1")])
    duplicates = found(partition, 1, 2, rows=8)
    assert duplicates.rows == 3  # two of a, one of b
    assert sorted(duplicates.keys) == [b"a", b"b"]
    assert found(partition, 1, 2, rows=8, find_duplicates=False) == Duplicates()


def test_prepare_shows_some_of_many_duplicates(partition: Partition) -> None:
    rows = [(b"%04d" % n, b"v") for n in range(500)]
    partition.stage(1, 0, rows)
    partition.stage(1, 1, rows)
    duplicates = found(partition, 1, rows=1000)
    assert duplicates.rows == 500
    assert len(duplicates.keys) == len(set(duplicates.keys)) == 10
    assert {key for key, _ in rows} >= set(duplicates.keys)


def test_prepare_takes_chunks_without_rows(partition: Partition) -> None:
    partition.stage(1, 0, [])
    assert found(partition, 1, rows=0) == Duplicates()
    partition.stage(1, 1, [(b"a", b"1")])
    assert found(partition, 1, rows=1) == Duplicates()


# --- what is there -----------------------------------------------------------------------------


def test_staged_loads_are_those_of_which_something_is_left(store: Store) -> None:
    one, two, three = (Partition(store, p) for p in (0, 1, 2))
    for load_id in (3, 5, 9):
        one.stage(1, 0, [(b"a", b"1")], load_id=load_id)
        one.stage(1, 1, [(b"b", b"1")], load_id=load_id)
    one.delete_staged(chunk_key(5, 1, 0))
    one.delete_staged(chunk_key(5, 1, 1))
    one.delete_staged(chunk_key(9, 1, 0))
    one.delete_staged(mark_key(2))
    two.delete_staged(chunk_key(4, 1, 0))
    two.put(b"k", b"v")
    three.put_staged(mark_key(6), encode_mark(Mark(True)))
    Partition(store, 7).stage(1, 0, [(b"a", b"1")])
    assert staged_loads(store, [0, 1, 2, 500]) == {0: [3, 9], 2: [6]}
    assert staged_loads(store, []) == {}


def test_staged_keys_are_some_of_the_loads_own_that_are_left(partition: Partition) -> None:
    partition.put_staged(mark_key(LOAD), encode_mark(Mark(False, b"k")))
    for number in range(5):
        partition.stage(2, number, [(b"a", b"1")])
    partition.stage(2, 0, [(b"a", b"1")], load_id=LOAD + 1)
    partition.delete_staged(chunk_key(LOAD, 2, 1))
    keys = [mark_key(LOAD), *(chunk_key(LOAD, 2, number) for number in (0, 2, 3, 4))]
    assert staged_keys(partition.store, partition.id, LOAD, 3) == keys[:3]
    assert staged_keys(partition.store, partition.id, LOAD, 100) == keys
    assert staged_keys(partition.store, partition.id, LOAD - 1, 100) == []
    assert staged_keys(partition.store, partition.id + 1, LOAD, 100) == []


def test_mark_is_read_as_it_was_left_and_none_where_it_was_deleted(partition: Partition) -> None:
    def mark() -> Mark:
        return read_mark(partition.store, partition.id, LOAD)

    assert mark() == Mark(False, b"")
    partition.put_staged(mark_key(LOAD), encode_mark(Mark(False, b"\x00\xffk")))
    assert mark() == Mark(False, b"\x00\xffk")
    partition.put_staged(mark_key(LOAD), encode_mark(Mark(True)))
    assert mark() == Mark(True, b"")
    partition.delete_staged(mark_key(LOAD))
    assert mark() == Mark(False, b"")


def test_names_of_chunks_sort_by_load_attempt_and_number_after_their_mark() -> None:
    names = [(1, 1, 0), (1, 1, 256), (1, 2**64 - 1, 0), (2, 1, 0), (256, 1, 2**32 - 1)]
    keys = [chunk_key(*name) for name in names]
    assert sorted(keys) == keys
    assert [chunk_keys.chunk_name(key) for key in keys] == names
    assert mark_key(1) < keys[0]
    assert keys[2] < mark_key(2) < keys[3]
    assert len({len(key) for key in (*keys, mark_key(7))}) == 1
    assert len(keys[0]) < records.REST_BYTES_MAX


# --- steps -------------------------------------------------------------------------------------


def test_step_names_the_chunks_of_the_manifest_in_the_order_of_tasks(partition: Partition) -> None:
    partition.stage(9, 1, [(b"a", b"12345")])
    partition.stage(9, 0, [(b"b", b"1")])
    partition.stage(4, 2, [(b"c", b"1")])
    partition.stage(5, 0, [(b"d", b"of an attempt that lost")])
    partition.stage(4, 0, [])
    step = next_step(partition.store, manifest_of(9, 4), partition.id)
    assert step is not None
    assert (step.partition_id, step.load_id) == (partition.id, LOAD)
    assert list(zip(step.attempts, step.numbers, strict=True)) == [(9, 0), (9, 1), (4, 2)]
    assert (step.rows, step.bytes, step.last, step.until_key) == (3, 10, True, b"")
    assert (step.replace, step.sequence, step.tombstone_at_ms) == (False, 0, 0)


def test_step_after_the_mark_has_only_chunks_with_rows_above_it(partition: Partition) -> None:
    partition.put_staged(mark_key(LOAD), encode_mark(Mark(False, b"m")))
    partition.stage(1, 0, [(b"a", b"1"), (b"m", b"1")])
    partition.stage(1, 1, [(b"m", b"1"), (b"m\x00", b"1")])
    step = next_step(partition.store, manifest_of(1), partition.id)
    assert step is not None
    assert list(step.numbers) == [1]
    assert (step.after_key, step.rows) == (b"m", 1)


def test_no_step_is_left_of_a_load_that_is_merged(partition: Partition) -> None:
    partition.stage(1, 0, [(b"a", b"1")])
    partition.put_staged(mark_key(LOAD), encode_mark(Mark(True)))
    assert next_step(partition.store, manifest_of(1), partition.id) is None


def test_partition_without_staged_rows_takes_one_last_step(partition: Partition) -> None:
    (step,) = partition.merge_all(manifest_of(1))
    assert (step.rows, step.last, len(step.attempts)) == (0, True, 0)


@pytest.mark.parametrize(("chunks", "rows"), [(2, 400), (20, 100), (100, 100)])
def test_steps_have_about_a_steps_bytes_however_many_chunks_there_are(
    partition: Partition, monkeypatch: pytest.MonkeyPatch, chunks: int, rows: int
) -> None:
    """Chunks of two steps' bytes down to half of one, and many of them."""
    bound = 8 * 1024
    monkeypatch.setattr(staged_chunks, "STEP_BYTES", bound)
    rng = random.Random(chunks)
    for number in range(chunks):
        keys = sorted(b"%016x" % rng.getrandbits(64) for _ in range(rows))
        partition.stage(1, number, [(key, bytes(24)) for key in keys])
    steps = partition.merge_all(manifest_of(1))
    assert sum(step.rows for step in steps) == rows * chunks
    assert max(step.bytes for step in steps) <= 3 * bound
    assert len(steps) <= 4 * (rows * chunks * 40) // bound
    for before, after in itertools.pairwise(steps):
        assert before.until_key == after.after_key
        assert not before.last
    assert steps[-1].last


def test_steps_have_a_bounded_number_of_rows_however_small(
    partition: Partition, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a step of tiny rows would be more than a node takes beside what clients write."""
    monkeypatch.setattr(staged_chunks, "STEP_BYTES", 8 * 1024)
    monkeypatch.setattr(staged_chunks, "STEP_ROWS", 100)
    for number in range(3):
        partition.stage(1, number, [(b"%04d" % n, b"") for n in range(number, 1_500, 3)])
    steps = partition.merge_all(manifest_of(1))
    assert sum(step.rows for step in steps) == 1_500
    assert max(step.rows for step in steps) <= 300
    assert sum(step.bytes for step in steps) < 8 * 1024


def test_steps_with_large_and_small_values_are_cut_by_bytes(
    partition: Partition, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staged_chunks, "STEP_BYTES", 10_000)
    partition.stage(1, 0, [(b"%03d" % n, bytes(5_000)) for n in range(20)])
    partition.stage(1, 1, [(b"%03d" % n, b"") for n in range(900)])
    steps = partition.merge_all(manifest_of(1))
    assert 5 <= len(steps) <= 40
    assert sum(step.rows for step in steps) == 920


def test_steps_of_one_key_repeated_do_not_split_it(
    partition: Partition, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staged_chunks, "STEP_BYTES", 100)
    partition.stage(1, 0, [(b"k", b"%03d" % n) for n in range(200)])
    partition.merge_all(manifest_of(1))
    assert partition.values == {b"k": b"199"}


@pytest.mark.parametrize(("prefix", "under"), [(b"", 25), (b"k1", 10), (b"k24", 1), (b"zz", 0)])
def test_replacing_steps_look_at_a_bounded_number_of_records(
    partition: Partition, monkeypatch: pytest.MonkeyPatch, prefix: bytes, under: int
) -> None:
    monkeypatch.setattr(staged_chunks, "STEP_RECORDS", 4)
    keys = [b"k%02d" % n for n in range(25)]
    for key in keys:
        partition.put(key, b"old")
    Partition(partition.store, partition.id + 1).put(b"k", b"theirs")
    partition.stage(1, 0, [(b"k10", b"new")])
    before = dict(partition.values)
    manifest = manifest_of(1, replace=True, prefix=prefix)
    steps = partition.merge_all(manifest, tombstone_at_ms=LATER_MS)
    assert [step.last for step in steps] == [False] * (len(steps) - 1) + [True]
    assert under // 4 <= len(steps) <= under // 4 + 2
    left = {key: b"old" for key in keys if not key.startswith(prefix)}
    assert partition.values == {**left, b"k10": b"new"}
    assert len(before) == 25
    deleted = [sum(r.sequence == 100 + n for r in partition.records.values()) for n in range(9)]
    assert max(deleted) <= 5  # those of a step, and its row


def test_replacing_steps_reach_what_is_staged_above_and_below_the_prefix(
    partition: Partition, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staged_chunks, "STEP_RECORDS", 2)
    for key in (b"a", b"pa", b"pb", b"pc", b"z"):
        partition.put(key, b"old")
    partition.stage(1, 0, [(b"a", b"new"), (b"pb", b"new"), (b"zz", b"new")])
    partition.merge_all(manifest_of(1, replace=True, prefix=b"p"))
    assert partition.values == {b"a": b"new", b"pb": b"new", b"z": b"old", b"zz": b"new"}
