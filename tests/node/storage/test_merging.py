"""Merge steps on a real store: what the rows of chunks become, and a plain model of whole loads."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from koinon_node.bulk_load import staged_chunks
from koinon_node.core.formats import chunk_keys, records
from koinon_node.core.formats.chunk_keys import ChunkName, Mark
from koinon_node.core.formats.records import Record
from koinon_node.storage import environment, opened_store
from koinon_node.storage.merge_executor import MergeError
from koinon_node.storage.store import Store
from koinon_node.store_config import StoreConfig
from koinon_proto.contract.columns import DELETED
from koinon_proto.v1.replication_pb2 import MergeStep
from tests.node.kit.staged_chunks import LOAD, Partition, manifest_of, step_of

LATER_MS = 2_000_000_000_000
_partition_ids = itertools.count()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    opened = environment.open_environment
    with mock.patch.object(opened_store, "open_environment", lambda c: opened(c, sync=False)):
        directory = tmp_path_factory.mktemp("merging")
        with Store(StoreConfig(directory=directory, map_size_bytes=256 << 20)) as store:
            yield store


@pytest.fixture
def partition(store: Store) -> Partition:
    """A partition that no other test uses."""
    return Partition(store, next(_partition_ids))


def versions(partition: Partition) -> dict[bytes, int]:
    return {key: record.sequence for key, record in partition.records.items()}


# --- what a step writes and leaves -------------------------------------------------------------


def test_step_writes_its_rows_under_its_sequence_and_over_what_was_there(
    partition: Partition,
) -> None:
    partition.put(b"b", b"old", sequence=99)
    partition.put(b"other", b"stays", sequence=98)
    partition.stage(1, 0, [(b"a", b"1"), (b"b", b"2"), (b"c", b"")])
    partition.merge(step_of((1, 0), rows=3, partition_id=partition.id))
    assert partition.values == {b"a": b"1", b"b": b"2", b"c": b"", b"other": b"stays"}
    assert versions(partition) == {b"a": 100, b"b": 100, b"c": 100, b"other": 98}


def test_last_step_deletes_every_chunk_of_the_load_and_marks_it_merged(
    partition: Partition,
) -> None:
    partition.stage(1, 0, [(b"a", b"1")])
    partition.stage(1, 7, [(b"b", b"1")])
    partition.stage(9, 0, [(b"c", b"of an attempt that nobody committed")])
    partition.stage(1, 0, [(b"d", b"1")], load_id=LOAD + 1)
    partition.stage(1, 0, [(b"e", b"1")], load_id=LOAD - 1)
    partition.merge(step_of((1, 0), (1, 7), rows=2, partition_id=partition.id))
    assert partition.values == {b"a": b"1", b"b": b"1"}
    assert set(partition.chunks) == {ChunkName(LOAD + 1, 1, 0), ChunkName(LOAD - 1, 1, 0)}
    assert partition.mark == Mark(True, b"")
    assert partition.expiry == set()


def test_step_before_the_last_leaves_the_chunks_and_marks_how_far_it_came(
    partition: Partition,
) -> None:
    partition.stage(1, 0, [(b"a", b"1"), (b"b", b"1"), (b"c", b"1")])
    partition.merge(step_of((1, 0), rows=2, until=b"b", partition_id=partition.id))
    assert partition.values == {b"a": b"1", b"b": b"1"}
    assert set(partition.chunks) == {ChunkName(LOAD, 1, 0)}
    assert partition.mark == Mark(False, b"b")
    assert partition.rows(records.STAGED)[chunk_keys.mark_key(LOAD)].sequence == 100


def test_last_step_of_a_partition_with_others_leaves_tombstones_of_its_chunks(
    partition: Partition,
) -> None:
    partition.stage(1, 3, [(b"a", b"1")])
    step = step_of((1, 3), rows=1, partition_id=partition.id, tombstone_at_ms=LATER_MS)
    partition.merge(step)
    key = chunk_keys.chunk_key(LOAD, 1, 3)
    left = partition.rows(records.STAGED)
    assert left[key] == Record(100, records.FLAG_TOMBSTONE | 1, LATER_MS, b"")
    assert not left[chunk_keys.mark_key(LOAD)].tombstone
    assert partition.expiry == {(LATER_MS, bytes([records.STAGED]) + key)}
    assert partition.mark == Mark(True, b"")


@pytest.mark.parametrize("key", [b"a", b"a\x00", b"a\x00\xff", b"b"])
def test_range_of_a_step_begins_above_its_first_key_and_ends_with_its_last(
    partition: Partition, key: bytes
) -> None:
    keys = sorted([b"", b"\x00", b"a", b"a\x00", b"a\x00\xff", b"aa", b"b", b"b\x00", b"\xff"])[1:]
    partition.stage(1, 0, [(k, b"new") for k in keys])
    for one in keys:
        partition.put(one, b"old")
    inside = [k for k in keys if key < k <= b"b"]
    step = step_of((1, 0), rows=len(inside), after=key, until=b"b", partition_id=partition.id)
    partition.merge(step)
    assert [k for k in keys if partition.values[k] == b"new"] == inside


@pytest.mark.parametrize("until", [b"", b"m"])
def test_step_without_rows_only_moves_the_mark(partition: Partition, until: bytes) -> None:
    partition.put(b"a", b"old")
    partition.merge(step_of(until=until, partition_id=partition.id))
    assert partition.values == {b"a": b"old"}
    assert partition.mark == Mark(not until, until)


# --- equal keys --------------------------------------------------------------------------------


def test_equal_keys_of_chunks_without_orders_the_last_chunk_of_the_step_wins(
    partition: Partition,
) -> None:
    partition.stage(5, 0, [(b"a", b"5.0"), (b"b", b"5.0"), (b"c", b"5.0")])
    partition.stage(5, 1, [(b"b", b"5.1")])
    partition.stage(2, 0, [(b"a", b"2.0"), (b"b", b"2.0")])
    step = step_of((5, 0), (5, 1), (2, 0), rows=6, partition_id=partition.id)
    partition.merge(step)
    assert partition.values == {b"a": b"2.0", b"b": b"2.0", b"c": b"5.0"}


def test_equal_keys_within_a_chunk_the_last_row_wins(partition: Partition) -> None:
    rows = [(b"a", b"1"), (b"a", b"2"), (b"b", b"1"), (b"c", b"1"), (b"c", b"2"), (b"c", b"3")]
    partition.stage(1, 0, rows)
    partition.merge(step_of((1, 0), rows=6, partition_id=partition.id))
    assert partition.values == {b"a": b"2", b"b": b"1", b"c": b"3"}


@pytest.mark.parametrize("chunks", [1, 2])
def test_equal_keys_the_greatest_order_wins_wherever_it_stands(
    partition: Partition, chunks: int
) -> None:
    rows = [(b"a", b"7"), (b"a", b"9"), (b"a", b"8"), (b"b", b"2"), (b"b", b"1")]
    partition.stage(1, 0, rows, orders=[7, 2**64 - 1, 8, 2, 1])
    if chunks == 2:
        partition.stage(2, 0, [(b"a", b"later"), (b"b", b"later")], orders=[2**64 - 2, 3])
    named = [(1, 0), (2, 0)][:chunks]
    partition.merge(step_of(*named, rows=3 + 2 * chunks, partition_id=partition.id))
    assert partition.values == {b"a": b"9", b"b": b"2" if chunks == 1 else b"later"}


def test_equal_orders_the_last_by_task_and_row_wins(partition: Partition) -> None:
    partition.stage(1, 0, [(b"a", b"1"), (b"a", b"2"), (b"b", b"1")], orders=[4, 4, 4])
    partition.stage(2, 0, [(b"a", b"3"), (b"a", b"4"), (b"b", b"2")], orders=[4, 4, 3])
    partition.merge(step_of((1, 0), (2, 0), rows=6, partition_id=partition.id))
    assert partition.values == {b"a": b"4", b"b": b"1"}


def test_chunk_without_orders_has_the_least_one(partition: Partition) -> None:
    partition.stage(1, 0, [(b"a", b"ordered"), (b"b", b"ordered")], orders=[1, 0])
    partition.stage(2, 0, [(b"a", b"plain"), (b"b", b"plain")])
    partition.merge(step_of((1, 0), (2, 0), rows=4, partition_id=partition.id))
    assert partition.values == {b"a": b"ordered", b"b": b"plain"}


# --- replace -----------------------------------------------------------------------------------


def test_replacing_step_deletes_what_the_load_lacks_in_its_range_only(
    partition: Partition, store: Store
) -> None:
    neighbours = [Partition(store, next(_partition_ids)) for _ in range(2)]
    for one in neighbours:
        one.put(b"m", b"theirs")
    old = [b"a", b"a\x00", b"f", b"m", b"m\x00", b"z"]
    for key in old:
        partition.put(key, b"old", sequence=9)
    partition.stage(1, 0, [(b"f", b"new"), (b"g", b"new")])
    step = step_of((1, 0), rows=2, after=b"a", until=b"m", replace=True, partition_id=partition.id)
    partition.merge(step)
    assert partition.values == {
        b"a": b"old",
        b"f": b"new",
        b"g": b"new",
        b"m\x00": b"old",
        b"z": b"old",
    }
    assert set(partition.chunks) == {ChunkName(LOAD, 1, 0)}
    assert [one.values for one in neighbours] == [{b"m": b"theirs"}] * 2


@pytest.mark.parametrize(("after", "until"), [(b"", b""), (b"a", b""), (b"q", b""), (b"", b"pz")])
def test_replacing_step_with_a_prefix_deletes_only_under_it(
    partition: Partition, after: bytes, until: bytes
) -> None:
    old = [b"a", b"o\xff", b"p", b"p\x00", b"pa", b"pz", b"pz\x00", b"q", b"z"]
    for key in old:
        partition.put(key, b"old")
    staged_rows = [
        (k, b"new") for k in (b"b", b"pa", b"pb") if after < k and (not until or k <= until)
    ]
    partition.stage(1, 0, [(b"b", b"new"), (b"pa", b"new"), (b"pb", b"new")])
    step = step_of(
        (1, 0),
        rows=len(staged_rows),
        after=after,
        until=until,
        replace=True,
        prefix=b"p",
        partition_id=partition.id,
    )
    partition.merge(step)
    kept = {k: b"old" for k in old if not k.startswith(b"p") or k <= after or (until and k > until)}
    assert partition.values == {**kept, **dict(staged_rows)}


def test_replacing_step_in_a_partition_with_others_leaves_tombstones_with_its_time(
    partition: Partition,
) -> None:
    partition.put(b"gone", b"old", sequence=9)
    partition.put(b"kept", b"old", sequence=9)
    partition.delete(b"long gone", sequence=8)
    partition.stage(1, 0, [(b"kept", b"new")])
    step = step_of(
        (1, 0), rows=1, replace=True, tombstone_at_ms=LATER_MS, partition_id=partition.id
    )
    partition.merge(step)
    found = partition.records
    assert found[b"gone"] == Record(100, records.FLAG_TOMBSTONE | 1, LATER_MS, b"")
    assert found[b"long gone"].sequence == 8  # it is a tombstone as it is
    assert found[b"kept"] == Record(100, 0, 0, b"new")
    assert (LATER_MS, b"\x00gone") in partition.expiry
    assert (LATER_MS, b"\x00long gone") not in partition.expiry


def test_replacing_step_in_a_partition_of_one_replica_leaves_nothing(partition: Partition) -> None:
    partition.put(b"gone", b"old")
    partition.put(b"gone too", b"old", expires_at_ms=LATER_MS)
    partition.merge(step_of(replace=True, partition_id=partition.id))
    assert partition.records == {}


def test_replacing_step_brings_back_what_was_deleted_if_the_load_has_it(
    partition: Partition,
) -> None:
    partition.delete(b"k", sequence=8)
    partition.stage(1, 0, [(b"k", b"new")])
    partition.merge(
        step_of((1, 0), rows=1, replace=True, tombstone_at_ms=9, partition_id=partition.id)
    )
    assert partition.values == {b"k": b"new"}


# --- expiry ------------------------------------------------------------------------------------


def test_rows_of_a_chunk_that_expires_expire_with_it(partition: Partition) -> None:
    partition.stage(1, 0, [(b"a", b"1"), (b"b", b"22")], expires_at_ms=LATER_MS)
    partition.merge(step_of((1, 0), rows=2, partition_id=partition.id))
    assert partition.records == {
        b"a": Record(100, records.FLAG_EXPIRES, LATER_MS, b"1"),
        b"b": Record(100, records.FLAG_EXPIRES, LATER_MS, b"22"),
    }
    assert partition.expiry == {(LATER_MS, b"\x00a"), (LATER_MS, b"\x00b")}


def test_rows_of_chunks_with_different_expiries_keep_their_own(partition: Partition) -> None:
    partition.stage(1, 0, [(b"a", b"1"), (b"c", b"1")], expires_at_ms=LATER_MS)
    partition.stage(1, 1, [(b"b", b"2"), (b"c", b"2")])
    partition.stage(1, 2, [(b"a", b"3"), (b"d", b"3")], expires_at_ms=LATER_MS + 1)
    partition.merge(step_of((1, 0), (1, 1), (1, 2), rows=6, partition_id=partition.id))
    found = {key: (r.value, r.expires_at_ms) for key, r in partition.records.items()}
    assert found == {
        b"a": (b"3", LATER_MS + 1),
        b"b": (b"2", 0),
        b"c": (b"2", 0),
        b"d": (b"3", LATER_MS + 1),
    }
    assert partition.expiry == {(LATER_MS + 1, b"\x00a"), (LATER_MS + 1, b"\x00d")}


def test_rows_that_expire_leave_no_entry_of_what_they_replace(partition: Partition) -> None:
    partition.put(b"a", b"old", expires_at_ms=LATER_MS + 5)
    partition.put(b"b", b"old", expires_at_ms=LATER_MS)
    partition.put(b"c", b"old", expires_at_ms=LATER_MS + 7)
    partition.stage(1, 0, [(b"a", b"1"), (b"b", b"2")], expires_at_ms=LATER_MS)
    partition.merge(step_of((1, 0), rows=2, partition_id=partition.id))
    assert partition.expiry == {
        (LATER_MS, b"\x00a"),
        (LATER_MS, b"\x00b"),
        (LATER_MS + 7, b"\x00c"),
    }


def test_expiry_beyond_signed_numbers_does_not_stop_a_merge(partition: Partition) -> None:
    """A stored chunk has to be merged whatever it says: an error would end every replica."""
    partition.stage(1, 0, [(b"a", b"1")], expires_at_ms=2**64 - 1)
    partition.stage(1, 1, [(b"b", b"2")])
    partition.merge(step_of((1, 0), (1, 1), rows=2, partition_id=partition.id))
    found = {key: r.expires_at_ms for key, r in partition.records.items()}
    assert found == {b"a": 2**64 - 1, b"b": 0}


def test_rows_with_expiries_of_their_own_keep_them(partition: Partition) -> None:
    partition.stage(1, 0, [(b"a", b"1"), (b"b", b"2")], expiries=[LATER_MS + 9, 0])
    partition.stage(1, 1, [(b"c", b"3")], expires_at_ms=LATER_MS)
    partition.merge(step_of((1, 0), (1, 1), rows=3, partition_id=partition.id))
    assert partition.records == {
        b"a": Record(100, records.FLAG_EXPIRES, LATER_MS + 9, b"1"),
        b"b": Record(100, 0, 0, b"2"),
        b"c": Record(100, records.FLAG_EXPIRES, LATER_MS, b"3"),
    }
    assert partition.expiry == {(LATER_MS + 9, b"\x00a"), (LATER_MS, b"\x00c")}


# --- rows that delete --------------------------------------------------------------------------


def test_rows_that_delete_leave_tombstones_in_a_partition_with_others(partition: Partition) -> None:
    partition.put(b"gone", b"old", sequence=9, expires_at_ms=LATER_MS + 5)
    partition.stage(
        1, 0, [(b"absent", b""), (b"gone", b""), (b"new", b"1")], expiries=[DELETED, DELETED, 0]
    )
    step = step_of((1, 0), rows=3, tombstone_at_ms=LATER_MS, partition_id=partition.id)
    partition.merge(step)
    tombstone = Record(100, records.FLAG_TOMBSTONE | records.FLAG_EXPIRES, LATER_MS, b"")
    assert partition.records == {
        b"absent": tombstone,
        b"gone": tombstone,
        b"new": Record(100, 0, 0, b"1"),
    }
    users = {(at_ms, key) for at_ms, key in partition.expiry if key[0] == records.USER}
    assert users == {(LATER_MS, b"\x00absent"), (LATER_MS, b"\x00gone")}


def test_rows_that_delete_leave_nothing_in_a_partition_of_one_replica(
    partition: Partition,
) -> None:
    partition.put(b"gone", b"old")
    partition.put(b"other", b"old")
    partition.stage(
        1, 0, [(b"absent", b""), (b"gone", b""), (b"new", b"1")], expiries=[DELETED, DELETED, 0]
    )
    partition.merge(step_of((1, 0), rows=3, partition_id=partition.id))
    assert partition.values == {b"new": b"1", b"other": b"old"}
    assert set(partition.records) == {b"new", b"other"}


@pytest.mark.parametrize(("orders", "left"), [([2, 1], {}), ([1, 2], {b"k": b"put"})])
def test_put_and_delete_of_one_key_the_greatest_order_stays(
    partition: Partition, orders: list[int], left: dict[bytes, bytes]
) -> None:
    partition.put(b"k", b"old")
    partition.stage(1, 0, [(b"k", b""), (b"k", b"put")], orders=orders, expiries=[DELETED, 0])
    partition.merge(step_of((1, 0), rows=2, partition_id=partition.id))
    assert partition.values == left


# --- other chunks than the step was made for ---------------------------------------------------


def test_missing_chunk_raises_and_nothing_is_changed(partition: Partition) -> None:
    partition.put(b"old", b"old")
    partition.stage(1, 0, [(b"a", b"1")])
    step = step_of((1, 0), (1, 1), rows=1, replace=True, partition_id=partition.id)
    with pytest.raises(MergeError, match="no chunk 1 of attempt 1"):
        partition.merge(step)
    assert partition.values == {b"old": b"old"}
    assert partition.mark == Mark()


def test_deleted_chunk_raises_and_nothing_is_changed(partition: Partition) -> None:
    partition.delete_staged(chunk_keys.chunk_key(LOAD, 1, 0))
    with pytest.raises(MergeError, match="no chunk 0"):
        partition.merge(step_of((1, 0), partition_id=partition.id))
    assert partition.mark == Mark()


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_other_number_of_rows_raises_and_nothing_is_changed(
    partition: Partition, rows: int
) -> None:
    partition.put(b"old", b"old")
    partition.stage(1, 0, [(b"a", b"1"), (b"a", b"2"), (b"z", b"1")])
    step = step_of((1, 0), rows=rows, until=b"m", replace=True, partition_id=partition.id)
    with pytest.raises(MergeError, match=f"2 staged rows where the step has {rows}"):
        partition.merge(step)
    assert partition.values == {b"old": b"old"}
    assert partition.mark == Mark()


# --- whole loads against a model ---------------------------------------------------------------

KEYS = [bytes(k) for n in (1, 2, 3) for k in itertools.product(b"ab", repeat=n)]
PREFIXES = [b"", b"a", b"ab", b"b"]
key = st.sampled_from(KEYS)


@dataclass
class Staged:
    """A chunk to stage: rows by key, each with an order."""

    attempt: int
    number: int
    keys: list[bytes]
    orders: list[int] | None
    expires_at_ms: int
    expiries: list[int] | None

    @property
    def rows(self) -> list[tuple[bytes, bytes]]:
        """Values say which row it was."""
        return [
            (
                k,
                b""
                if self.expiry(row) == DELETED
                else b"%d.%d.%d" % (self.attempt, self.number, row),
            )
            for row, k in enumerate(self.keys)
        ]

    def expiry(self, row: int) -> int:
        return self.expiries[row] if self.expiries else self.expires_at_ms


@st.composite
def chunks(draw: st.DrawFn) -> list[Staged]:
    found = []
    for attempt in draw(st.permutations([11, 5, 8]))[: draw(st.integers(0, 3))]:
        for number in draw(st.lists(st.integers(0, 9), max_size=3, unique=True)):
            keys = sorted(draw(st.lists(key, max_size=6)))
            ordered = draw(st.booleans())
            numbers = st.lists(st.integers(0, 3), min_size=len(keys), max_size=len(keys))
            times = st.sampled_from([0, DELETED, LATER_MS, LATER_MS + 1])
            own = st.lists(times, min_size=len(keys), max_size=len(keys))
            found.append(
                Staged(
                    attempt,
                    number,
                    keys,
                    draw(numbers) if ordered else None,
                    draw(st.sampled_from([0, 0, LATER_MS, LATER_MS + 1])),
                    draw(st.none() | own),
                )
            )
    return found


@dataclass
class Model:
    """A model of the records as they should be. A deleted one is a tombstone, or gone."""

    attempts: list[int]
    chunks: Sequence[Staged]
    replace: bool
    prefix: bytes
    tombstones: bool
    records: dict[bytes, Record] = field(default_factory=dict)

    def winners(self) -> dict[bytes, tuple[bytes, int]]:
        """Return the (value, expiry) that stays of each key."""
        best: dict[bytes, tuple[tuple[int, int, int, int], bytes, int]] = {}
        for chunk in self.chunks:
            if chunk.attempt not in self.attempts:
                continue
            task = self.attempts.index(chunk.attempt)
            for row, (k, value) in enumerate(chunk.rows):
                order = chunk.orders[row] if chunk.orders else 0
                place = (order, task, chunk.number, row)
                if k not in best or place > best[k][0]:
                    best[k] = (place, value, chunk.expiry(row))
        return {k: (value, expires) for k, (_, value, expires) in best.items()}

    def merge(self, after: bytes, until: bytes, sequence: int) -> None:
        """Every key in the range flips."""
        won = self.winners()
        for k in KEYS:
            if k <= after or (until and k > until):
                continue
            if k in won:
                value, expires = won[k]
                if expires == DELETED:
                    self.put_tombstone(k, sequence)
                else:
                    self.put(k, value, sequence, expires)
            elif self.replace and k.startswith(self.prefix):
                self.delete(k, sequence)

    def put(self, k: bytes, value: bytes, sequence: int, expires_at_ms: int = 0) -> None:
        self.records[k] = Record(sequence, int(bool(expires_at_ms)), expires_at_ms, value)

    def delete(self, k: bytes, sequence: int) -> None:
        known = self.records.get(k)
        if known is None or known.tombstone:
            return
        self.put_tombstone(k, sequence)

    def put_tombstone(self, k: bytes, sequence: int) -> None:
        if self.tombstones:
            flags = records.FLAG_TOMBSTONE | records.FLAG_EXPIRES
            self.records[k] = Record(sequence, flags, LATER_MS, b"")
        else:
            self.records.pop(k, None)


@settings(max_examples=120, deadline=None)
@given(
    staged_chunks=chunks(),
    attempts=st.permutations([11, 5, 8]).flatmap(lambda p: st.sampled_from([p, p[:2], p[:1]])),
    existing=st.dictionaries(key, st.sampled_from([0, LATER_MS, -1]), max_size=10),
    replace=st.booleans(),
    prefix=st.sampled_from(PREFIXES),
    tombstones=st.booleans(),
    data=st.data(),
)
def test_whole_load_in_small_steps_with_writes_between_equals_the_model(
    store: Store,
    staged_chunks: list[Staged],
    attempts: list[int],
    existing: dict[bytes, int],
    replace: bool,
    prefix: bytes,
    tombstones: bool,
    data: st.DataObject,
) -> None:
    """Each step is planned from the store alone, as by a primary that has just taken over, and cut
    by bounds of its own. A write between two steps stays if its key has flipped; else it is
    overwritten, or deleted by a replacing load, or none of the load's business.
    """
    partition = Partition(store, next(_partition_ids))
    model = Model(attempts, staged_chunks, replace, prefix, tombstones)
    for chunk in staged_chunks:
        partition.stage(
            chunk.attempt,
            chunk.number,
            chunk.rows,
            orders=chunk.orders,
            expires_at_ms=chunk.expires_at_ms,
            expiries=chunk.expiries,
        )
    for k, expires_at_ms in existing.items():
        if expires_at_ms < 0:
            partition.delete(k, sequence=1)
            flags = records.FLAG_TOMBSTONE | records.FLAG_EXPIRES
            model.records[k] = Record(1, flags, 5, b"")
        else:
            partition.put(k, b"old", sequence=1, expires_at_ms=expires_at_ms)
            model.put(k, b"old", 1, expires_at_ms)
    manifest = manifest_of(*attempts, replace=replace, prefix=prefix)
    sequence, mark = 100, b""
    while (step := planned(partition, manifest, data)) is not None:
        assert step.after_key == mark
        assert step.last or step.until_key > mark
        sequence += 1
        step.sequence, mark = sequence, step.until_key
        step.tombstone_at_ms = LATER_MS if tombstones else 0
        partition.merge(step)
        model.merge(step.after_key, step.until_key, sequence)
        assert partition.records == model.records
        for k in data.draw(st.lists(key, max_size=2), "live writes"):
            sequence += 1
            partition.put(k, b"live", sequence=sequence)
            model.put(k, b"live", sequence)
    assert partition.records == model.records
    indexed = {(r.expires_at_ms, b"\x00" + k) for k, r in model.records.items() if r.flags}
    assert {e for e in indexed if e[0] != 5} <= partition.expiry
    assert partition.mark == Mark(True, b"")
    assert all(r.tombstone for r in partition.chunks.values())
    assert tombstones or not partition.chunks


def planned(
    partition: Partition, manifest: staged_chunks.Manifest, data: st.DataObject
) -> MergeStep | None:
    bounds = data.draw(st.sampled_from([(1, 1), (12, 2), (12, 100), (40, 1), (10**6, 10**6)]))
    with (
        mock.patch.object(staged_chunks, "STEP_BYTES", bounds[0]),
        mock.patch.object(staged_chunks, "STEP_RECORDS", bounds[1]),
    ):
        return staged_chunks.next_step(partition.store, manifest, partition.id)
