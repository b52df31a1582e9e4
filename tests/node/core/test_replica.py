"""Sequences and conditions against a plain model: whatever is pending, stored or expired."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from koinon_node.core.formats import records
from koinon_node.core.writes.pending_writes import PendingWrites
from koinon_node.core.writes.updates import Append, GetAndDelete, Increment, Update
from koinon_node.core.writes.write_decisions import (
    Effects,
    Primaries,
    WriteRows,
    decide_expiry,
    decide_write,
)
from koinon_proto.contract.errors import ConditionFailedError, NotANumberError
from koinon_proto.contract.table import first_sequence
from tests.node.kit.groups import add, claim, make_durable, numbers

KEYS = [records.prefix_of(p) + name for p in (0, 1) for name in (b"a", b"b")]


@dataclass
class Bench:
    """A replica whose writer is the test's hand: groups are committed when it says so."""

    primaries: Primaries = field(
        default_factory=lambda: Primaries(np.zeros(2, np.uint64), np.zeros(2, np.uint64))
    )
    pending: PendingWrites = field(default_factory=lambda: PendingWrites("n1"))
    store: dict[bytes, bytes] = field(default_factory=dict)
    sealed: list[dict[bytes, bytes | None]] = field(default_factory=list)
    open_records: dict[bytes, bytes | None] = field(default_factory=dict)
    now_ms: int = 1000

    def __post_init__(self) -> None:
        self.primaries.adopt(np.array([0, 1], np.uint32), np.array([1, 1], np.uint64))

    def stored(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        return {key: self.store[key] for key in keys if key in self.store}

    def write(
        self,
        keys: Sequence[bytes],
        *,
        deletes: frozenset[int] = frozenset(),
        conditions: dict[int, int] | None = None,
        expires_at_ms: list[int] | None = None,
        updates: dict[int, Update] | None = None,
    ) -> Effects:
        rows = WriteRows(
            partition_ids=np.array([key[1] for key in keys], np.uint32),
            keys=keys,
            values=[b"v"] * len(keys),
            deletes=deletes,
            conditions=conditions or {},
            expires_at_ms=expires_at_ms,
            updates=updates or {},
        )
        return self.take(decide_write(rows, self.primaries, self.pending, self.stored, self.now_ms))

    def expire(self, keys: Sequence[bytes]) -> Effects:
        return self.take(
            decide_expiry(keys, self.primaries, self.pending, self.stored, self.now_ms)
        )

    def take(self, effects: Effects) -> Effects:
        add(self.pending, effects.records)
        self.open_records.update(effects.records)
        return effects

    def seal(self) -> None:
        self.pending.seal()
        self.sealed.append(self.open_records)
        self.open_records = {}

    def commit_oldest(self) -> None:
        for key, record in self.sealed.pop(0).items():
            if record is None:
                self.store.pop(key, None)
            else:
                self.store[key] = record
        self.pending.complete(make_durable(self.pending))


def test_sequences_rise_by_one_within_each_partition() -> None:
    bench = Bench()
    a, b = KEYS[0], KEYS[2]
    effects = bench.write([a, b, a, b, a])
    start = first_sequence(1)
    assert effects.versions.tolist() == [start + 1, start + 1, start + 2, start + 2, start + 3]
    record = effects.records[a]
    assert record is not None
    assert records.decode_record(record).sequence == start + 3


def test_primary_epoch_adopted_twice_breaks_the_invariant() -> None:
    bench = Bench()
    with pytest.raises(AssertionError, match="adopted twice"):
        bench.primaries.adopt(np.array([0], np.uint32), np.array([1], np.uint64))


def test_condition_zero_twice_in_one_batch_applies_the_first_only() -> None:
    bench = Bench()
    effects = bench.write([KEYS[0], KEYS[0]], conditions={0: 0, 1: 0})
    assert list(effects.failed) == [1]
    failed = effects.failed[1]
    assert isinstance(failed, ConditionFailedError)
    assert failed.current_version == effects.versions[0]


def test_condition_on_a_pending_write_names_the_group_it_builds_on() -> None:
    bench = Bench()
    first = bench.write([KEYS[0]])
    bench.seal()
    second = bench.write([KEYS[0]], conditions={0: int(first.versions[0])})
    assert not second.failed
    assert second.observed_group == 1


def test_delete_absent_writes_nothing_but_names_the_group_it_observed() -> None:
    bench = Bench()
    bench.write([KEYS[0]])
    bench.write([KEYS[0]], deletes=frozenset({0}))
    effects = bench.write([KEYS[0]], deletes=frozenset({0}))
    assert effects.absent == [0]
    assert not effects.records
    assert effects.observed_group == 1


def test_delete_raises_the_purge_floor_to_its_sequence() -> None:
    bench = Bench()
    bench.write([KEYS[0]])
    effects = bench.write([KEYS[0]], deletes=frozenset({0}))
    assert int(bench.primaries.purge_floors[0]) == int(effects.versions[0])


def test_condition_on_an_expired_record_counts_as_absent_and_removal_comes_first() -> None:
    bench = Bench()
    bench.write([KEYS[0]], expires_at_ms=[500])
    effects = bench.write([KEYS[0]], conditions={0: 0})
    start = first_sequence(1)
    assert int(bench.primaries.purge_floors[0]) == start + 2  # the removal
    assert effects.versions.tolist() == [start + 3]  # what replaces it


def test_expiry_of_a_record_that_was_rewritten_is_left_alone() -> None:
    bench = Bench()
    bench.write([KEYS[0]], expires_at_ms=[500])
    bench.write([KEYS[0]])
    effects = bench.expire([KEYS[0]])
    assert not effects.records


def value_of(record: bytes | None) -> bytes | None:
    return records.decode_record(record).value if record is not None else None


def test_updates_of_one_key_in_a_batch_build_on_one_another() -> None:
    bench, key = Bench(), KEYS[0]
    effects = bench.write([key] * 3, updates={0: Increment(2), 1: Increment(3), 2: Append(b"0", 9)})
    start = first_sequence(1)
    assert effects.results == {0: 2, 1: 5, 2: 2}
    assert effects.versions.tolist() == [start + 1, start + 2, start + 3]
    assert value_of(effects.records[key]) == b"50"


def test_update_builds_on_what_is_pending_and_names_its_group() -> None:
    bench, key = Bench(), KEYS[0]
    bench.write([key], updates={0: Increment(2)})
    bench.seal()
    effects = bench.write([key], updates={0: Increment(3)})
    assert effects.results == {0: 5}
    assert effects.observed_group == 1


def test_update_that_is_refused_writes_nothing_but_names_the_group_it_observed() -> None:
    bench, key = Bench(), KEYS[0]
    bench.write([key])
    effects = bench.write([key], updates={0: Increment(1)})
    assert isinstance(effects.failed[0], NotANumberError)
    assert not effects.records
    assert not effects.results
    assert effects.versions.tolist() == [0]
    assert effects.observed_group == 1


def test_update_of_an_expired_record_finds_none_and_removal_comes_first() -> None:
    bench, key = Bench(), KEYS[0]
    bench.write([key], expires_at_ms=[500])
    effects = bench.write([key], updates={0: Increment(1)})
    start = first_sequence(1)
    assert effects.results == {0: 1}
    assert int(bench.primaries.purge_floors[0]) == start + 2  # the removal
    assert effects.versions.tolist() == [start + 3]


def test_update_that_deletes_leaves_a_tombstone_where_there_are_replicas() -> None:
    bench, key = Bench(), KEYS[0]
    bench.primaries.replicated[0] = True
    bench.write([key])
    effects = bench.write([key], updates={0: GetAndDelete()})
    assert effects.results == {0: b"v"}
    record = effects.records[key]
    assert record is not None
    assert records.decode_record(record).tombstone
    assert effects.expiry_keys
    assert bench.write([key], updates={0: GetAndDelete()}).results == {0: None}


# --- claims ------------------------------------------------------------------------------------

P0, P1 = records.prefix_of(0), records.prefix_of(1)


def test_claim_makes_reads_and_decisions_of_the_partition_wait_for_its_group() -> None:
    pending = PendingWrites("n1")
    assert not pending.claimed
    pending.seal()
    claim(pending, 0)
    unknown = P0 + b"nobody writes it"
    pending.complete(make_durable(pending))
    for go_on in (pending.seal, lambda: make_durable(pending), lambda: None):
        assert pending.claimed
        assert numbers(pending.claiming({P0})) == numbers(pending.claiming({P0, P1})) == [2]
        assert pending.claiming({P1}) == []
        assert numbers(pending.overlapping([unknown])) == [2]
        assert numbers(pending.seen([unknown], [])) == [2]
        assert pending.overlapping([P1 + b"k"]) == pending.seen([P1 + b"k"], []) == []
        go_on()
    (group,) = pending.durable()
    pending.complete(group)
    assert not pending.claimed
    assert pending.claiming({P0}) == pending.overlapping([unknown]) == []
    assert pending.seen([unknown], []) == []


def test_claims_of_two_groups_end_one_by_one() -> None:
    pending = PendingWrites("n1")
    claim(pending, 0)
    claim(pending, 1)
    first = pending.seal()
    claim(pending, 1)
    second = pending.seal()
    assert pending.claiming({P0}) == [first]
    assert pending.claiming({P1}) == [first, second]
    for group in (first, second):
        assert make_durable(pending) is group
    pending.complete(second)
    assert pending.claiming({P0, P1}) == [first]
    pending.complete(first)
    assert not pending.claimed


def test_claim_and_records_of_a_partition_are_both_waited_for() -> None:
    pending = PendingWrites("n1")
    claim(pending, 0)
    first = pending.seal()
    add(pending, {P0 + b"k": b"r"})
    second = pending.seal()
    assert set(pending.overlapping([P0 + b"k"])) == {first, second}
    assert set(pending.overlapping([P0 + b"other"])) == {first}


def test_partition_led_anew_forgets_claims_of_committed_groups_only() -> None:
    pending = PendingWrites("n1")
    claim(pending, 0)
    claim(pending, 1)
    committed = pending.seal()
    claim(pending, 0)
    queued = pending.seal()
    make_durable(pending)
    pending.forget({P0})
    assert pending.claiming({P0}) == [queued]
    assert pending.claiming({P1}) == [committed]
    pending.complete(committed)
    assert pending.claiming({P1}) == []


KINDS = ["put", "expiring", "delete", "if_absent", "if_current", "if_old", "append", "take"]
Steps = list[tuple[str, list[tuple[bytes, str]]]]
operation: st.SearchStrategy[Any] = st.one_of(
    st.tuples(
        st.just("write"),
        st.lists(
            st.tuples(
                st.sampled_from(KEYS),
                st.sampled_from(KINDS),
            ),
            min_size=1,
            max_size=4,
        ),
    ),
    st.tuples(st.sampled_from(["seal", "commit", "expire", "later"]), st.just([])),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(operation, max_size=25))
def test_decisions_equal_a_plain_model_whatever_is_in_flight(
    steps: Steps,
) -> None:
    bench, model = Bench(), Model()
    for name, rows in steps:
        if name == "write":
            write_both(bench, model, rows)
        elif name == "seal":
            bench.seal()
        elif name == "commit" and bench.sealed:
            bench.commit_oldest()
        elif name == "later":
            bench.now_ms += 300
        elif name == "expire":
            bench.expire(KEYS)
            for key in KEYS:
                model.current(key, bench.now_ms)
    bench.seal()
    while bench.sealed:
        bench.commit_oldest()
    stored = {key: records.decode_record(record) for key, record in bench.store.items()}
    assert {key: (r.sequence, r.expires_at_ms, r.value) for key, r in stored.items()} == {
        key: (*model.records[key], model.values[key]) for key in model.records
    }


@dataclass
class Model:
    """A model of the records as they should be: key -> (sequence, expires_at_ms)."""

    records: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    values: dict[bytes, bytes] = field(default_factory=dict)
    counters: dict[int, int] = field(default_factory=dict)

    def take(self, key: bytes) -> int:
        self.counters[key[1]] = self.counters.get(key[1], first_sequence(1)) + 1
        return self.counters[key[1]]

    def current(self, key: bytes, now_ms: int) -> int:
        sequence, expires = self.records.get(key, (0, 0))
        if expires and expires <= now_ms:
            self.take(key)
            del self.records[key]
            return 0
        return sequence


def write_both(bench: Bench, model: Model, rows: list[tuple[bytes, str]]) -> None:
    looks = any(kind not in ("put", "expiring") for _, kind in rows)
    conditions, deletes, expires = {}, set(), []
    versions, failed, absent = [], [], []
    updates: dict[int, Update] = {}
    results: dict[int, bytes | int | None] = {}
    for row, (key, kind) in enumerate(rows):
        expires_at_ms = bench.now_ms + 200 if kind == "expiring" else 0
        expires.append(expires_at_ms)
        # Only a row that looks meets the expired record; the others overwrite it unseen.
        seen = model.current(key, bench.now_ms) if kind not in ("put", "expiring") else 0
        if kind == "delete":
            deletes.add(row)
            if not seen:
                absent.append(row)
                versions.append(0)
                continue
        elif kind == "take":
            updates[row] = GetAndDelete()
            results[row] = model.values[key] if seen else None
            if not seen:
                versions.append(0)
                continue
        elif kind == "append":
            updates[row] = Append(b"+", 99)
            expires_at_ms = model.records[key][1] if seen else 0
            value = (model.values[key] if seen else b"") + b"+"
            results[row] = len(value)
        elif kind.startswith("if_"):
            conditions[row] = {"if_absent": 0, "if_current": seen, "if_old": 1}[kind]
            if conditions[row] != seen:
                failed.append(row)
                versions.append(0)
                continue
        versions.append(model.take(key))
        if kind in ("delete", "take"):
            del model.records[key]
        else:
            model.records[key] = (versions[-1], expires_at_ms)
            model.values[key] = value if kind == "append" else b"v"
    effects = bench.write(
        [key for key, _ in rows],
        deletes=frozenset(deletes),
        conditions=conditions,
        expires_at_ms=expires,
        updates=updates,
    )
    assert effects.results == results
    assert effects.versions.tolist() == versions
    assert sorted(effects.failed) == failed
    assert effects.absent == absent
    assert looks or not effects.failed
