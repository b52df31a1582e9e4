"""Beside a merge step: who waits for it, who goes on, and who wins."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from koinon_node.bulk_load import staged_chunks
from koinon_node.config import Limits
from koinon_node.core.formats import records
from koinon_node.partition.batches import WriteBatch
from koinon_proto.contract.errors import StorageFullError
from koinon_proto.v1.replication_pb2 import MergeStep
from tests.kit.waiting import until
from tests.node.kit.held_writer import in_partition
from tests.node.kit.loads_bench import (
    MERGING,
    LoadsBench,
    acknowledged,
    claimed,
    many_turns,
    reported,
    retried,
    with_one_replica_more,
)
from tests.node.kit.played_follower import joined, turn

# --- reads beside a step -----------------------------------------------------------------------

READS: dict[str, Callable[[LoadsBench], Awaitable[Any]]] = {
    "get": lambda bench: bench.get(b"k"),
    "get with versions": lambda bench: bench.get(b"k", want_versions=True),
    "scan": lambda bench: bench.scan(0),
    "columns": lambda bench: bench.read_columns(0),
}
every_read = pytest.mark.parametrize("read", READS.values(), ids=READS.keys())


async def held_step(bench: LoadsBench) -> None:
    """Have a step of partition 0 on its way to the disk, as long as the channel is held."""
    await bench.put(b"k", value=b"old")
    await bench.put(b"k", value=b"old", partition_id=1)
    await bench.stage([(b"k", b"new")])
    bench.merge(1)
    bench.channel.held = True


@every_read
async def test_read_waits_for_a_step_of_its_partition_that_is_in_the_store(
    bench: LoadsBench, read: Callable[[LoadsBench], Awaitable[Any]]
) -> None:
    """It is there a moment before the writer says so."""
    await held_step(bench)
    async with bench.loading():
        await claimed(bench)
        await turn()
        bench.channel.store_one()
        reading = asyncio.ensure_future(read(bench))
        await turn()
        assert not reading.done()
        bench.channel.release()
        assert (await reading).values == [b"new"]


@every_read
def test_read_waits_for_a_step_that_a_follower_has_not_acknowledged(
    tmp_path: Path, read: Callable[[LoadsBench], Awaitable[Any]]
) -> None:
    async def use(bench: LoadsBench) -> None:
        two = await joined(bench, 0)
        await acknowledged(two, bench.stage([(b"k", b"new")]))
        bench.merge(1)
        async with bench.loading():
            await until(lambda: bench.partition().mark.merged, "it is stored here")
            await turn()
            reading = asyncio.ensure_future(read(bench))
            await turn()
            assert not reading.done()
            assert bench.coordinators.reports == []
            await two.acknowledge()
            assert (await reading).values == [b"new"]
            await reported(bench, 0)

    with_one_replica_more(tmp_path, use)


async def test_get_waits_for_a_step_that_is_not_stored_yet_and_sees_its_rows(
    bench: LoadsBench,
) -> None:
    await held_step(bench)
    async with bench.loading():
        await claimed(bench)
        reading = asyncio.ensure_future(bench.get(b"k", b"absent"))
        await turn()
        assert not reading.done()
        bench.channel.release()
        answer = await reading
        assert (answer.values, answer.missing) == ([b"new", b""], [1])


async def test_reads_of_other_partitions_do_not_wait_for_a_step(bench: LoadsBench) -> None:
    await held_step(bench)
    async with bench.loading():
        await claimed(bench)
        one = await bench.engine.reads.read([b"k"], in_partition(1, 1), 1, want_versions=False)
        assert one.values == [b"old"]
        assert (await bench.scan(1)).values == [b"old"]
        assert (await bench.read_columns(1)).values == [b"old"]
        assert bench.pending.claimed
        bench.channel.release()


# --- writes beside a step ----------------------------------------------------------------------


async def test_conditions_are_decided_on_what_a_step_under_way_leaves(bench: LoadsBench) -> None:
    before = int((await bench.put(b"k", value=b"old")).versions[0])
    await bench.stage([(b"fresh", b"new"), (b"k", b"new")])
    bench.merge(1)
    bench.channel.held = True
    async with bench.loading():
        await claimed(bench)
        writes = [
            asyncio.ensure_future(bench.put(b"k", value=b"mine", if_version=before)),
            asyncio.ensure_future(bench.put(b"fresh", value=b"mine", if_version=0)),
            asyncio.ensure_future(bench.put(b"fresh", delete=True)),
            asyncio.ensure_future(bench.put(b"absent", value=b"mine", if_version=0)),
        ]
        await turn()
        assert not any(write.done() for write in writes)
        step = int(bench.primaries.last_sequences[0])
        bench.channel.release()
        results = await asyncio.gather(*writes, return_exceptions=True)
    current = [results[n].row_errors[0].current_version for n in (0, 1)]  # type: ignore[union-attr]
    assert current == [step, step]
    assert results[2].absent == []  # type: ignore[union-attr]
    assert bench.partition().values == {b"k": b"new", b"absent": b"mine"}


async def test_delete_beside_a_replacing_step_finds_nothing_to_delete(bench: LoadsBench) -> None:
    await bench.put(b"k", value=b"old")
    bench.coordinators.commit(1, replace=True)
    bench.loads_are(MERGING)
    bench.channel.held = True
    async with bench.loading():
        await claimed(bench)
        delete = asyncio.ensure_future(bench.put(b"k", delete=True))
        await turn()
        assert not delete.done()
        bench.channel.release()
        assert (await delete).absent == [0]


async def test_decisions_in_other_partitions_do_not_wait_for_a_step(bench: LoadsBench) -> None:
    await held_step(bench)
    async with bench.loading():
        await claimed(bench)
        write = asyncio.ensure_future(bench.put(b"k", partition_id=1, if_version=0))
        await turn()
        assert int(bench.engine.context.claims.waits[1]) == 0
        bench.channel.release()
        assert list((await write).row_errors) == [0]


def test_step_of_a_silent_follower_holds_up_no_other_partition_of_its_group(tmp_path: Path) -> None:
    """Both steps are in one group, which is complete only when both are."""

    async def use(bench: LoadsBench) -> None:
        two = await joined(bench, 0)
        await acknowledged(two, bench.stage([(b"k", b"new")]))
        await bench.stage([(b"k", b"new")], partition_id=1)
        bench.merge(1, partition_ids=(0, 1))
        async with bench.ticking(), bench.loading():
            await until(lambda: bench.partition(1).mark.merged, "both are stored here")
            refused = await bench.put(b"k", partition_id=1, if_version=0)
            assert list(refused.row_errors) == [0]
            assert (await bench.put(b"k", partition_id=1, delete=True)).absent == []
            assert (await bench.scan(1)).keys == []
            await reported(bench, 1)
            await two.acknowledge()
            await reported(bench, 0, 1)

    with_one_replica_more(tmp_path, use, limits=Limits(write_timeout_ms=1_000))


async def test_plain_write_beside_a_step_goes_on_and_wins(bench: LoadsBench) -> None:
    await held_step(bench)
    async with bench.loading():
        await claimed(bench)
        write = asyncio.ensure_future(bench.put(b"k", value=b"live"))
        await turn()
        assert len(bench.channel.waiting) == 1
        assert bench.writer.pending_rows > 2  # it is queued
        bench.channel.release()
        version = int((await write).versions[0])
        await reported(bench, 0)
    assert bench.partition().records[b"k"] == records.Record(version, 0, 0, b"live")


async def test_plain_write_queued_before_a_step_loses(bench: LoadsBench) -> None:
    await bench.stage([(b"k", b"new")])
    bench.channel.held = True
    first = asyncio.ensure_future(bench.put(b"another"))
    await until(lambda: bench.channel.waiting, "a group is under way")
    write = asyncio.ensure_future(bench.put(b"k", value=b"live"))
    await turn()
    bench.merge(1)
    async with bench.loading():
        await claimed(bench)
        bench.channel.release()
        await asyncio.gather(first, write)
        await reported(bench, 0)
    assert bench.partition().values[b"k"] == b"new"


def test_rows_of_a_partition_written_after_its_step_are_in_a_later_batch(tmp_path: Path) -> None:
    """A batch's rows come before its steps: what is to win over one has to be in the next."""

    async def use(bench: LoadsBench) -> None:
        two = await joined(bench, 0)
        await acknowledged(two, bench.stage([(b"k", b"new")]))
        bench.channel.held = True
        first = asyncio.ensure_future(bench.put(b"another"))
        await until(lambda: bench.channel.waiting, "a group is under way")
        bench.merge(1)
        before = asyncio.ensure_future(bench.put(b"k", value=b"before"))
        async with bench.loading():
            await claimed(bench)
            after = asyncio.ensure_future(bench.put(b"k", value=b"after"))
            await turn()
            bench.channel.release()
            await acknowledged(two, asyncio.gather(first, before, after))
            await acknowledged(two, reported(bench, 0))
        for batch in two.batches:
            assert_rows_come_before_steps(batch)
        assert bench.partition().values[b"k"] == b"after"

    with_one_replica_more(tmp_path, use)


def assert_rows_come_before_steps(batch: Any) -> None:
    steps = [MergeStep.FromString(merge) for merge in batch.merges]
    merged = {step.partition_id: step.sequence for step in steps}
    for key, record in zip(batch.keys, batch.records, strict=True):
        p = records.partition_of_data_key(key)
        assert records.decode_record(record).sequence < merged.get(p, records.NO_SEQUENCE)


def test_step_is_the_last_of_its_partition_in_its_group_whatever_stops_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store without room for the next step: what clients write goes into a later group all the
    same. In one group, followers would apply the step over the write.
    """

    async def use(bench: LoadsBench) -> None:
        two = await joined(bench, 0)
        await acknowledged(two, bench.stage([(b"k", b"new")]))
        await bench.stage([(b"k", b"new")], partition_id=1)
        bench.channel.held = True
        first = asyncio.ensure_future(bench.put(b"another", partition_id=2))
        await until(lambda: bench.channel.waiting, "a group is under way")
        room = bench.writer.check_room

        def check_room(rows: int, size: int, put_size: int) -> None:
            if bench.pending.claimed:
                raise StorageFullError(node_id="n1", reason="full")
            room(rows, size, put_size)

        with monkeypatch.context() as patched:
            patched.setattr(bench.writer, "check_room", check_room)
            bench.merge(1, partition_ids=(0, 1))
            loading = asyncio.create_task(bench.merger.run())
            await claimed(bench)
            await many_turns()
        write = asyncio.ensure_future(bench.put(b"k", value=b"live"))
        await turn()
        bench.channel.release()
        await acknowledged(two, asyncio.gather(first, write))
        await acknowledged(two, reported(bench, 0, 1))
        loading.cancel()
        for batch in two.batches:
            assert_rows_come_before_steps(batch)

    with_one_replica_more(tmp_path, use)


def test_no_further_step_is_begun_where_somebody_waits_to_decide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for steps of two partitions; else those of one would go on before it, one by one."""
    monkeypatch.setattr(staged_chunks, "STEP_BYTES", 4)

    async def use(bench: LoadsBench) -> None:
        two = await joined(bench, 0)
        await acknowledged(two, bench.stage([(b"k", b"new")]))
        keys = [b"%03d" % n for n in range(300)]
        await bench.stage([(key, b"new") for key in keys], partition_id=1)
        bench.merge(1, partition_ids=(0, 1))
        async with bench.ticking(), bench.loading():
            await until(lambda: retried(bench) and bench.partition(1).mark.key > b"005", "at work")
            batch = WriteBatch(
                table_version=1,
                keys=[b"k", keys[0]],
                values=[b"mine"] * 2,
                partition_ids=np.array([0, 1], np.uint32),
                conditions={0: 1, 1: 1},
            )
            write = asyncio.ensure_future(bench.engine.writes.write(batch))
            await many_turns()
            begun = int(bench.primaries.last_sequences[1])
            await many_turns()
            assert int(bench.primaries.last_sequences[1]) == begun
            assert not bench.partition(1).mark.merged
            await two.acknowledge()
            assert list((await write).row_errors) == [0, 1]
            await acknowledged(two, reported(bench, 0, 1))

    with_one_replica_more(tmp_path, use, limits=Limits(write_timeout_ms=400))


# --- expiry beside a step ----------------------------------------------------------------------


async def test_reclaimer_leaves_alone_what_a_step_under_way_may_overwrite(
    bench: LoadsBench,
) -> None:
    await bench.put(b"k", b"gone", value=b"old", ttl_ms=50)
    await bench.stage([(b"k", b"new")])
    bench.clock.ms += 50
    bench.merge(1)
    bench.channel.held = True
    async with bench.loading():
        await claimed(bench)
        reclaiming = asyncio.ensure_future(bench.engine.sweeper.step(100))
        await turn()
        bench.channel.release()
        await reclaiming
        await reported(bench, 0)
    assert bench.partition().values == {b"k": b"new", b"gone": b"old"}
    await bench.engine.sweeper.step(100)
    assert bench.partition().values == {b"k": b"new"}
    assert bench.partition().expiry == set()


@every_read
async def test_read_that_found_an_expired_record_removes_nothing_that_a_step_brings(
    bench: LoadsBench, read: Callable[[LoadsBench], Awaitable[Any]]
) -> None:
    await bench.put(b"k", value=b"old", ttl_ms=50)
    await bench.stage([(b"k", b"new")])
    bench.clock.ms += 50
    bench.merge(1)
    bench.channel.held = True
    async with bench.loading():
        await claimed(bench)
        await turn()
        data_key = b"\0\0\0k"
        view = bench.state.served
        removing = asyncio.ensure_future(bench.engine.expiry.remove_expired([data_key], view))
        reading = asyncio.ensure_future(read(bench))
        await turn()
        assert not reading.done()
        assert not removing.done()
        bench.channel.release()
        await asyncio.gather(reading, removing)
        assert bench.partition().values == {b"k": b"new"}
