"""Atomic batches in the engine: one ticket, its fate, and what is refused before it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from koinon_node.core.writes.atomic_batch import Check, Step
from koinon_node.core.writes.updates import Increment, Put, Remove
from koinon_node.partition.batches import AtomicAnswer, AtomicBatch
from koinon_proto.contract.errors import (
    CheckFailedError,
    LeaseExpiredError,
    NotPrimaryError,
    PartitionOfflineError,
    ResourceExhaustedError,
    StorageFullError,
    UnavailableError,
    UnknownFateError,
)
from tests.node.kit.held_writer import ME, Bench, row_of, settle, table_of


async def commit(bench: Bench, *steps: tuple[bytes, Step], partition_id: int = 0) -> AtomicAnswer:
    batch = AtomicBatch(
        table_version=1,
        partition_id=partition_id,
        keys=[key for key, _ in steps],
        steps=[step for _, step in steps],
    )
    return await bench.engine.writes.commit(batch)


PUTS: tuple[tuple[bytes, Step], ...] = tuple((b"%d" % n, Put(b"v")) for n in range(1_000))


async def test_batch_is_one_ticket_of_one_group_among_many_writes(bench: Bench) -> None:
    bench.channel.held = True
    first = asyncio.ensure_future(bench.put(b"before"))
    await settle(first)
    pending = [asyncio.ensure_future(commit(bench, *PUTS)) for _ in range(20)]
    await asyncio.sleep(0)
    sizes = {len(t.records) for group in bench.pending for t in group.tickets if t.records}
    assert sizes == {1_000}, "those that wait; the group of the first has been sent"
    bench.channel.release()
    versions = {(await task).version for task in pending}
    assert len(versions) == 20
    found = await bench.get(*[key for key, _ in PUTS], want_versions=True)
    assert set(found.versions) == {max(versions)}


async def test_reads_wait_for_a_batch_and_see_all_of_it(bench: Bench) -> None:
    await commit(bench, (b"a", Put(b"1")), (b"b", Put(b"1")))
    bench.channel.held = True
    writing = asyncio.ensure_future(commit(bench, (b"a", Put(b"2")), (b"b", Remove())))
    await settle(writing)
    reading = asyncio.ensure_future(bench.get(b"b", b"a"))
    bench.channel.store_one()  # the store shows it a moment before its answer comes
    await settle(reading)
    assert not reading.done()
    bench.channel.release()
    answer = await reading
    assert (answer.values, answer.missing) == ([b"", b"2"], [0])
    await writing


async def test_refusal_waits_for_what_it_looked_at(bench: Bench) -> None:
    bench.channel.held = True
    writing = asyncio.ensure_future(bench.put(b"a"))
    await settle(writing)
    refused = asyncio.ensure_future(commit(bench, (b"b", Put(b"1")), (b"a", Check(0))))
    await settle(refused)
    assert not refused.done()
    bench.channel.release()
    with pytest.raises(CheckFailedError):
        await refused
    await writing
    assert (await bench.get(b"b")).missing == [0]


@pytest.mark.parametrize("lose", [Bench.lose_lease, Bench.lose_partition_0])
async def test_batch_whose_lease_or_epoch_ends_is_of_unknown_fate(
    bench: Bench, lose: Callable[[Bench], None]
) -> None:
    bench.channel.held = True
    writing = asyncio.ensure_future(commit(bench, (b"a", Increment(1)), (b"b", Put(b"1"))))
    await settle(writing)
    lose(bench)
    bench.channel.release()
    with pytest.raises(UnknownFateError):
        await writing
    with pytest.raises((LeaseExpiredError, PartitionOfflineError)):
        await commit(bench, (b"a", Put(b"1")))


@pytest.mark.parametrize("lose", [Bench.lose_lease, Bench.lose_partition_0])
async def test_refused_batch_whose_lease_or_epoch_ends_was_not_applied(
    bench: Bench, lose: Callable[[Bench], None]
) -> None:
    bench.channel.held = True
    before = asyncio.ensure_future(bench.put(b"a"))
    await settle(before)
    refused = asyncio.ensure_future(commit(bench, (b"a", Check(0)), (b"b", Put(b"1"))))
    await settle(refused)
    lose(bench)
    bench.channel.release()
    with pytest.raises(UnavailableError, match="nothing of the batch was written"):
        await refused
    with pytest.raises(UnknownFateError):
        await before


async def test_batch_that_finds_no_room_leaves_nothing(bench: Bench) -> None:
    bench.channel.held = True
    first = asyncio.ensure_future(bench.put(b"x"))
    await settle(first)
    writing = asyncio.ensure_future(commit(bench, (b"a", Put(b"1")), (b"b", Put(b"1"))))
    await settle(writing)
    bench.channel.commit_one()
    await settle(first)
    bench.channel.failing = {0: "no room"}
    bench.channel.release()
    with pytest.raises(StorageFullError):
        await writing
    assert (await bench.get(b"a", b"b")).missing == [0, 1]


async def test_batch_that_would_rewrite_too_much_is_refused(bench: Bench) -> None:
    large: tuple[tuple[bytes, Step], ...] = tuple(
        (b"%d" % n, Put(b"x" * 1_000_000)) for n in range(17)
    )
    with pytest.raises(ResourceExhaustedError, match="that a batch updates"):
        await commit(bench, *large)
    assert bench.pending.idle


async def test_batch_of_another_nodes_partition_is_refused(bench: Bench) -> None:
    rows: list[Any] = [row_of(0, (2,), primary=2), *(row_of(p) for p in range(1, 4))]
    bench.take_table(table_of(*rows, version=2))
    with pytest.raises(NotPrimaryError):
        await commit(bench, (b"a", Put(b"1")))
    assert (await commit(bench, (b"a", Put(b"1")), partition_id=1)).version
    assert bench.state.served.node_number == ME
