"""Atomic batches against a plain model: all of a batch or nothing, decided at one moment."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from koinon_node.core.formats import record_layout, records
from koinon_node.core.writes.atomic_batch import AtomicSteps, Check, Decided, Step, decide_batch
from koinon_node.core.writes.updates import Increment, Look, Put, Remove
from koinon_proto.contract.errors import (
    CheckFailedError,
    NotANumberError,
    ResourceExhaustedError,
)
from koinon_proto.contract.table import first_sequence
from tests.node.core.test_replica import Bench

HEAD = records.head_of(0)
A, B, C = (HEAD + name for name in (b"a", b"b", b"c"))
START = first_sequence(1)
LOOK = Look()


def commit(bench: Bench, *steps: tuple[bytes, Step], goes_on: bool = False) -> Decided:
    batch = AtomicSteps(
        partition_id=0,
        keys=[key for key, _ in steps],
        steps=[step for _, step in steps],
        goes_on=goes_on,
    )
    decided = decide_batch(batch, bench.primaries, bench.pending, bench.stored, bench.now_ms)
    bench.take(decided.effects)
    return decided


def record_of(decided: Decided, key: bytes) -> records.Record:
    data = decided.effects.records[key]
    assert data is not None
    return records.decode_record(data)


def test_all_records_of_a_batch_have_its_one_sequence() -> None:
    bench = Bench()
    decided = commit(bench, (A, Put(b"1")), (B, Put(b"2", ttl_ms=500)), (C, Increment(3)))
    assert decided.version == START + 1
    assert {record_of(decided, key).sequence for key in (A, B, C)} == {START + 1}
    assert record_of(decided, B).expires_at_ms == bench.now_ms + 500
    assert decided.effects.expiry_keys == [record_layout.expiry_key(bench.now_ms + 500, B)]
    assert decided.results == [None, None, 3]
    assert commit(bench, (A, Put(b"9"))).version == START + 2


def test_failed_check_refuses_all_and_names_the_key() -> None:
    bench = Bench()
    first = commit(bench, (A, Put(b"1")))
    bench.seal()
    decided = commit(bench, (B, Put(b"2")), (A, Check(first.version + 7)), (C, Check(0)))
    refusal = decided.refusal
    assert isinstance(refusal, CheckFailedError)
    assert (refusal.key, refusal.expected_version) == (b"a", first.version + 7)
    assert refusal.current_version == first.version
    assert not decided.effects.records
    assert not decided.version
    assert decided.effects.observed, "it tells of a write that may not be complete"


def test_checks_look_at_what_is_there_before_the_batch_wherever_they_stand() -> None:
    bench = Bench()
    first = commit(bench, (A, Put(b"1")))
    assert commit(bench, (A, Put(b"2")), (A, Check(first.version)), (B, Check(0))).version


def test_later_steps_find_what_earlier_ones_left() -> None:
    bench = Bench()
    decided = commit(
        bench, (A, Put(b"4")), (A, Increment(2)), (B, Remove()), (A, Remove()), (A, Increment(1))
    )
    assert decided.results == [None, 6, False, True, 1]
    assert record_of(decided, A).value == b"1"
    assert list(decided.effects.records) == [A]


def test_record_that_the_batch_makes_and_deletes_leaves_nothing() -> None:
    bench = Bench()
    decided = commit(bench, (A, Put(b"1")), (A, Remove()))
    assert (decided.version, decided.effects.records) == (0, {})
    assert bench.primaries.last_sequences[0] == START


def test_increment_of_text_refuses_all_unless_the_batch_goes_on() -> None:
    bench = Bench()
    commit(bench, (A, Put(b"text")))
    steps: tuple[tuple[bytes, Step], ...] = ((B, Put(b"1")), (A, Increment(1)))
    refused = commit(bench, *steps)
    assert isinstance(refused.refusal, NotANumberError)
    assert not refused.effects.records
    went_on = commit(bench, *steps, goes_on=True)
    assert isinstance(went_on.results[1], NotANumberError)
    assert list(went_on.effects.records) == [B]


def test_expired_record_counts_as_absent_and_its_removal_comes_first() -> None:
    bench = Bench()
    commit(bench, (A, Put(b"1", ttl_ms=10)), (B, Put(b"1", ttl_ms=10)))
    bench.now_ms += 20
    decided = commit(bench, (A, Check(0)), (B, Check(0)), (B, Put(b"2")))
    assert decided.effects.records[A] is None
    assert record_of(decided, B).sequence == decided.version == START + 4
    bench.now_ms += 20
    commit(bench, (A, Put(b"1", ttl_ms=10)))
    bench.now_ms += 20
    refused = commit(bench, (A, Check(77)), (B, Check(1)))
    assert refused.refusal is not None
    assert list(refused.effects.records) == [A], "the removal, and nothing of the batch"


def test_look_shows_what_is_there_and_what_earlier_steps_left() -> None:
    bench = Bench()
    first = commit(bench, (A, Put(b"1", ttl_ms=500)))
    decided = commit(bench, (A, LOOK), (B, LOOK), (A, Put(b"2")), (A, LOOK), (A, Remove()))
    before, absent, _, after, _ = decided.results
    assert isinstance(before, bytes)
    expires_at_ms = bench.now_ms + 500
    assert records.decode_record(before) == records.Record(first.version, 1, expires_at_ms, b"1")
    assert absent is None
    assert isinstance(after, bytes)
    assert records.value_of(after) == b"2"
    looked = commit(bench, (A, LOOK))
    assert (looked.version, looked.effects.records, looked.results) == (0, {}, [None])
    assert looked.effects.observed, "it tells of a deletion that may not be complete"


def test_batch_that_shows_more_than_a_message_holds_is_refused_whole() -> None:
    bench = Bench()
    commit(bench, (A, Put(b"x" * 1024 * 1024)))
    decided = commit(bench, (B, Put(b"1")), *[(A, LOOK)] * 17, goes_on=True)
    assert isinstance(decided.refusal, ResourceExhaustedError)
    assert not decided.effects.records


# --- against a model -----------------------------------------------------------------------------

KEYS = [HEAD + bytes((97 + n,)) for n in range(4)]
keys = st.sampled_from(KEYS)
steps = st.one_of(
    st.builds(Put, st.sampled_from([b"1", b"20", b"text"])),
    st.builds(Increment, st.integers(-3, 3)),
    st.just(Remove()),
)
checks = st.tuples(st.just("check"), keys, st.booleans())
changes = st.tuples(st.just("change"), keys, steps)
batches = st.lists(st.one_of(changes, changes, checks), min_size=1, max_size=8)
events = st.lists(st.one_of(batches, st.just("seal"), st.just("commit")), max_size=25)


@given(events)
def test_any_batches_are_whole_or_nothing_like_the_model(script: list[Any]) -> None:
    bench = Bench()
    model: dict[bytes, tuple[bytes, int]] = {}
    for event in script:
        if event == "seal":
            bench.seal()
        elif event == "commit":
            if bench.sealed:
                bench.commit_oldest()
        else:
            _batch_as_model(bench, model, event)
        assert _visible(bench) == model


def _visible(bench: Bench) -> dict[bytes, tuple[bytes, int]]:
    found = {}
    for key in KEYS:
        group, data = bench.pending.find(key)
        data = data if group is not None else bench.store.get(key)
        if data is not None:
            record = records.decode_record(data)
            found[key] = (record.value, record.sequence)
    return found


def _batch_as_model(bench: Bench, model: dict[bytes, tuple[bytes, int]], event: Any) -> None:
    script: list[tuple[bytes, Step]] = []
    holds = True
    for kind, key, what in event:
        if kind == "check":
            there = model.get(key, (b"", 0))[1]
            script.append((key, Check(there if what else there + 1)))
            holds &= what
        else:
            script.append((key, what))
    after = {key: value for key, (value, _) in model.items()}
    touched: set[bytes] = set()
    for key, step in script:
        if isinstance(step, Put):
            after[key] = step.value
        elif isinstance(step, Remove):
            if after.pop(key, None) is None:
                continue
        elif isinstance(step, Increment):
            if after.get(key, b"0") == b"text":
                holds = False
                break
            after[key] = b"%d" % (int(after.get(key, b"0")) + step.by)
        else:
            continue
        touched.add(key)
    decided = commit(bench, *script)
    assert (decided.refusal is None) == holds
    if not holds:
        assert not decided.effects.records
        return
    for key in touched:
        if key in after:
            model[key] = (after[key], decided.version)
        else:
            model.pop(key, None)


def test_a_batch_takes_one_sequence_whatever_its_size() -> None:
    bench = Bench()
    many: list[tuple[bytes, Step]] = [(HEAD + b"%d" % n, Put(b"v")) for n in range(1_000)]
    commit(bench, *many)
    assert bench.primaries.last_sequences[0] == START + 1


@pytest.mark.parametrize("step", [Check(0), Remove()])
def test_batch_that_changes_nothing_takes_no_sequence(step: Step) -> None:
    bench = Bench()
    decided = commit(bench, (A, step))
    assert (decided.version, decided.refusal) == (0, None)
    assert bench.primaries.last_sequences[0] == START
