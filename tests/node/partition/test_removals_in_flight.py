"""Reads beside a delete that leaves no tombstone: what is seen of it is complete before the answer.

With one replica a delete removes the record, so that what is found of it in the store is nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from koinon_node.core.formats import records
from koinon_node.core.writes.pending_writes import PendingWrites
from koinon_proto.contract.errors import StorageFullError
from tests.node.kit.groups import add, claim, make_durable, numbers
from tests.node.kit.loads_bench import LoadsBench
from tests.node.kit.played_follower import turn
from tests.node.kit.primary import answered, start


async def get(bench: LoadsBench) -> list[bytes]:
    answer = await bench.get(b"j", b"k")
    return [key for row, key in enumerate((b"j", b"k")) if row not in answer.missing]


async def scan(bench: LoadsBench) -> list[bytes]:
    return (await bench.scan(0)).keys


async def columns(bench: LoadsBench) -> list[bytes]:
    return (await bench.read_columns(0)).keys


A, K, Z = (records.head_of(0) + key for key in (b"a", b"k", b"z"))


@pytest.mark.parametrize("others", [[], [b"j", b"l"]], ids=["alone", "among others"])
@pytest.mark.parametrize("read", [get, scan, columns])
async def test_read_that_finds_a_key_gone_waits_for_the_delete_that_is_not_answered(
    bench: LoadsBench,
    read: Callable[[LoadsBench], Coroutine[Any, Any, list[bytes]]],
    others: list[bytes],
) -> None:
    if others:
        await bench.put(*others)
    bench.channel.held = True
    put = start(bench.put(b"k"))
    await turn()
    # A get waits for what is in flight when it begins, here the put, and reads then.
    reading = start(read(bench)) if read is get else None
    deleting = start(bench.put(b"k", delete=True))
    await turn()
    bench.channel.commit_one()
    bench.channel.store_one()  # the delete is in the store, and the writer has not said so
    await turn()
    reading = reading or start(read(bench))
    assert not await answered(reading)
    bench.channel.release()
    assert await reading == (others[:1] if read is get else others)
    await put
    await deleting


def in_flight(**written: bytes | None) -> PendingWrites:
    pending = PendingWrites("n1")
    add(pending, {records.head_of(0) + key.encode(): record for key, record in written.items()})
    pending.seal()
    return pending


def test_removal_is_seen_by_who_finds_nothing_under_its_key_only() -> None:
    pending = in_flight(k=None)
    assert numbers(pending.seen([K], [])) == [1]
    assert pending.seen([K], [(K, b"before")]) == pending.seen([A], []) == []
    group = make_durable(pending)
    assert pending.seen([K], []) == [group]
    pending.complete(group)
    assert pending.seen([K], []) == []


def test_removal_is_seen_by_a_scan_over_its_key_only() -> None:
    head = records.head_of(0)
    pending = in_flight(k=None)
    for _ in range(2):
        for after, rows, more, expected in (
            (head, [], False, [1]),
            (head, [(A, b"1"), (Z, b"1")], False, [1]),
            (head, [(A, b"1"), (Z, b"1")], True, [1]),
            (A, [(Z, b"1")], True, [1]),
            (head, [(A, b"1")], True, []),  # it did not come so far
            (Z, [], False, []),  # nor begin before it
            (head, [], True, []),
        ):
            assert numbers(pending.seen_in_scan(head, after, rows, more=more)) == expected
        assert numbers(pending.seen_in_scan(head + b"k", head, [], more=False)) == [1]
        assert pending.seen_in_scan(head + b"l", head, [], more=False) == []
        other = records.head_of(1)
        assert pending.seen_in_scan(other, other, [], more=False) == []
        for below, rows, more, expected in (
            (Z, [], False, [1]),
            (Z, [(A, b"1")], False, [1]),
            (Z, [(A, b"1")], True, [1]),
            (Z, [(head + b"l", b"1")], True, []),  # it did not come so far down
            (A, [], False, []),  # it began below
            (Z, [], True, []),
        ):
            seen = pending.seen_in_scan(head, head, rows, more=more, below=below)
            assert numbers(seen) == expected
        if not pending.incomplete([K]):
            make_durable(pending)


def test_removal_that_was_refused_is_not_waited_for() -> None:
    pending, head = PendingWrites("n1"), records.head_of(0)
    add(pending, {K: None}, touched=np.array([0], np.uint32))
    add(pending, {A: b"1"}, touched=np.array([1], np.uint32))
    sealed = pending.seal()
    assert pending.seen_in_scan(head, head, [], more=False) == [sealed]
    refused = np.array([True, False])
    pending.refuse_queued(refused, StorageFullError(node_id="n1", reason="handed over"))
    assert pending.seen_in_scan(head, head, [], more=False) == pending.seen([K], []) == []
    assert sealed.records == {A: b"1"}


def test_scan_that_finds_nothing_waits_for_the_merge_step_of_its_partition() -> None:
    pending = PendingWrites("n1")
    claim(pending, 0)
    sealed = pending.seal()
    head, other = records.head_of(0), records.head_of(1)
    assert pending.seen_in_scan(head, head, [], more=False) == [sealed]
    assert pending.seen_in_scan(other, other, [], more=False) == []
