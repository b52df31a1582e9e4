"""Cursors in the engine: a replaced owner commits nothing, and no user's request meets a cursor."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from koinon_node.core.formats import records
from koinon_node.core.writes.atomic_batch import Check, Step
from koinon_node.core.writes.cursor_updates import (
    BEGINNING,
    ClaimCursor,
    CommitCursor,
    CursorPosition,
    GroupCursor,
    cursor_key,
    decode_cursor,
)
from koinon_node.core.writes.updates import Increment, Put, Update
from koinon_node.partition.batches import AtomicAnswer, AtomicBatch, WriteAnswer, WriteBatch
from koinon_node.storage.sizes import SizeEstimates, SizeScan
from koinon_proto.contract.errors import (
    CheckFailedError,
    CursorMovedError,
    KoinonError,
    PartitionOfflineError,
    StaleGenerationError,
)
from tests.node.kit.held_writer import Bench, in_partition, settle
from tests.node.kit.loads_bench import MERGING, LoadsBench, reported
from tests.node.partition.test_change_feeds import caught_up, following, told_until

GROUP = cursor_key(9)
AT_4 = CursorPosition(4)


async def update(bench: Bench, *updates: Update) -> WriteAnswer:
    """Carry out one update of the group's cursor in each of the first partitions."""
    count = len(updates)
    return await bench.engine.writes.write(
        WriteBatch(
            table_version=1,
            keys=[GROUP] * count,
            values=[b""] * count,
            partition_ids=np.arange(count, dtype=np.uint32),
            updates=dict(enumerate(updates)),
            kind=records.CURSOR,
        )
    )


async def cursor_of(bench: Bench) -> GroupCursor | None:
    found, _ = await bench.engine.reads.read_cursors(GROUP, in_partition(0, 1), 1)
    return decode_cursor(found[0]) if found else None


async def commit(bench: Bench, cursor: CommitCursor, *steps: tuple[bytes, Step]) -> AtomicAnswer:
    return await bench.engine.writes.commit(
        AtomicBatch(
            table_version=1,
            partition_id=0,
            keys=[key for key, _ in steps],
            steps=[step for _, step in steps],
            cursor=(GROUP, cursor),
        )
    )


async def test_zombie_is_refused_although_the_new_claim_is_not_complete_yet(bench: Bench) -> None:
    await update(bench, ClaimCursor(0, 1, "old"))
    bench.channel.held = True
    claim = asyncio.ensure_future(update(bench, ClaimCursor(0, 2, "new")))
    await settle(claim)
    zombie = asyncio.ensure_future(update(bench, CommitCursor(0, 1, AT_4)))
    await settle(zombie)
    assert not zombie.done(), "the refusal rests on a claim that may still be lost"
    bench.channel.release()
    assert isinstance((await zombie).row_errors[0], StaleGenerationError)
    assert decode_cursor_of(await claim) == GroupCursor(2, BEGINNING, 0, "new")
    assert await cursor_of(bench) == GroupCursor(2, BEGINNING, 0, "new")


def decode_cursor_of(answer: WriteAnswer) -> GroupCursor:
    value = answer.results[0]
    assert isinstance(value, bytes)
    return decode_cursor(value)


async def test_partitions_are_answered_one_by_one(bench: Bench) -> None:
    await update(bench, ClaimCursor(0, 2, "m"), ClaimCursor(0, 2, "m"))
    bench.lose_partition_0()
    answer = await update(bench, CommitCursor(0, 2, AT_4), CommitCursor(0, 1, AT_4))
    assert set(answer.refusals) == {0}
    assert isinstance(answer.row_errors[1], StaleGenerationError)
    found, refusals = await bench.engine.reads.read_cursors(GROUP, np.arange(3, dtype=np.uint32), 1)
    assert (set(found), set(refusals)) == ({1}, {0})


async def test_no_request_of_a_user_meets_a_cursor(bench: Bench) -> None:
    await update(bench, ClaimCursor(0, 1, "m"))
    assert (await bench.get(GROUP)).missing == [0]
    await bench.put(GROUP, value=b"of a user")
    await update(bench, CommitCursor(0, 1, AT_4))
    assert (await bench.scan()).keys == [GROUP]
    with following(bench) as feed:
        assert [key for key, _, _ in await told_until(feed, caught_up)] == [GROUP]
        await update(bench, CommitCursor(0, 1, AT_4))
        await bench.put(b"b")
        assert [key for key, _, _ in await told_until(feed, lambda m: m.rows > 0)] == [b"b"]
    await bench.put(GROUP, delete=True)
    assert (await cursor_of(bench)) == GroupCursor(1, AT_4, bench.clock.ms, "m")


async def test_cursors_are_not_counted_as_records(bench: Bench) -> None:
    await update(bench, ClaimCursor(0, 1, "m"))
    await bench.put(b"a", b"b")
    sizes = SizeEstimates()
    scan = SizeScan(bench.store, sizes)
    while scan.step(1.0):
        pass
    assert bench.store.count() - sizes.hidden() == 2


async def test_overwrite_and_columns_leave_cursors_alone(bench: LoadsBench) -> None:
    await update(bench, ClaimCursor(0, 1, "m"))
    await bench.put(b"a")
    answer = await bench.read_columns()
    assert list(answer.keys) == [b"a"]
    bench.coordinators.commit(replace=True)
    bench.loads_are(MERGING)
    async with bench.loading():
        await reported(bench, 0)
    assert (await bench.scan()).keys == []
    assert await cursor_of(bench) is not None


async def test_results_and_cursor_are_written_together_or_not_at_all(bench: Bench) -> None:
    await update(bench, ClaimCursor(0, 1, "m"))
    moves = CommitCursor(0, 1, AT_4, after=BEGINNING)
    answer = await commit(bench, moves, (b"n", Increment(2)), (b"a", Put(b"1")))
    assert list(answer.results) == [2, None]
    assert (await cursor_of(bench)) == GroupCursor(1, AT_4, bench.clock.ms, "m")
    refused: list[tuple[type[KoinonError], CommitCursor, tuple[bytes, Step]]] = [
        (CursorMovedError, moves, (b"n", Increment(2))),
        (StaleGenerationError, CommitCursor(0, 0, AT_4), (b"n", Increment(2))),
        (CheckFailedError, CommitCursor(0, 1, AT_4), (b"n", Check(99))),
    ]
    for error, cursor, step in refused:
        with pytest.raises(error):
            await commit(bench, cursor, step)
    assert (await bench.get(b"n")).values == [b"2"]
    assert (await cursor_of(bench)) == GroupCursor(1, AT_4, bench.clock.ms, "m")


async def test_commit_of_only_a_cursor_needs_the_partition(bench: Bench) -> None:
    await update(bench, ClaimCursor(0, 1, "m"))
    await commit(bench, CommitCursor(0, 1, AT_4))
    bench.lose_partition_0()
    with pytest.raises(PartitionOfflineError):
        await commit(bench, CommitCursor(0, 1, AT_4))
