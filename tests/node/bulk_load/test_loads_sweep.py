"""The sweep deletes the leftovers of loads that have ended, and nothing else."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from koinon_node.bulk_load import merge_scheduler, staged_chunks
from koinon_node.core.membership.assignment import Adoption
from koinon_proto.contract.errors import UnavailableError
from koinon_proto.contract.table import ActiveLoad
from tests.kit.waiting import until
from tests.node.kit.held_writer import EPOCH, table_of
from tests.node.kit.held_writer import row_of as row
from tests.node.kit.loads_bench import (
    ALL,
    OPEN,
    LoadsBench,
    many_turns,
    reported,
    table,
    with_loads,
)
from tests.node.kit.played_follower import turn
from tests.node.kit.staged_chunks import LOAD

# --- what is left of loads that have ended -----------------------------------------------------


def load(number: int, *, merging: bool = False) -> ActiveLoad:
    return ActiveLoad(load_id=number, merging=merging)


async def swept(bench: LoadsBench, left: dict[int, list[int]]) -> None:
    def staged() -> dict[int, list[int]]:
        return staged_chunks.staged_loads(bench.store, list(ALL))

    await until(lambda: staged() == left, f"only {left} is left, not {staged()}")


async def test_what_is_staged_for_loads_that_the_table_does_not_name_is_deleted(
    bench: LoadsBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge_scheduler, "_DELETE_KEYS", 2)
    bench.loads_are(load(5), load(6), load(7))
    for p, load_id in itertools.product((0, 2), (5, 6, 7)):
        for number in range(5):
            await bench.stage([(b"k", b"v")], number=number, partition_id=p, load_id=load_id)
    await bench.put(b"k", value=b"a user's")
    bench.coordinators.errors = [UnavailableError(reason="no leader")] * 1000
    bench.loads_are(load(5), load(7, merging=True))
    async with bench.loading():
        await many_turns()
    bench.coordinators.errors = []
    async with bench.loading():
        await swept(bench, {0: [5, 7], 2: [5, 7]})
        await many_turns()
        await swept(bench, {0: [5, 7], 2: [5, 7]})
        bench.loads_are()
        await swept(bench, {})
    assert bench.partition(0).values == {b"k": b"a user's"}
    assert bench.store.count() == 1


async def test_marks_and_strays_of_a_merged_load_are_deleted_once_it_is_done(
    bench: LoadsBench,
) -> None:
    await bench.stage([(b"k", b"new")])
    bench.merge(1)
    async with bench.loading():
        await reported(bench, 0)
        await many_turns()
        await swept(bench, {0: [LOAD]})  # its mark: whoever takes over has to know
        bench.loads_are()
        await swept(bench, {})
    assert bench.partition().values == {b"k": b"new"}


def test_partition_with_others_is_swept_by_deletes_that_leave_tombstones(tmp_path: Path) -> None:
    rows = [row(0, (1, 2), (1,)), *(row(p) for p in ALL[1:])]

    async def use(bench: LoadsBench) -> None:
        await bench.stage([(b"k", b"v")])
        bench.loads_are()
        async with bench.loading():
            await swept(bench, {})
            await many_turns()
            sent = bench.channel.groups_sent
            bench.loads_are(load(9))
            await many_turns()
            assert bench.channel.groups_sent <= sent + 1  # tombstones are not deleted again
        (record,) = bench.partition().chunks.values()
        assert record.tombstone

    with_loads(tmp_path, use, table=table(*rows))


def test_leftovers_of_an_earlier_process_are_deleted(tmp_path: Path) -> None:
    async def first(bench: LoadsBench) -> None:
        bench.loads_are(load(5), load(6))
        await bench.stage([(b"k", b"v")], load_id=5)
        await bench.stage([(b"k", b"v")], load_id=6, partition_id=3)

    async def second(bench: LoadsBench) -> None:
        await swept(bench, {0: [5], 3: [6]})
        async with bench.loading():
            await swept(bench, {3: [6]})
            await many_turns()
            await swept(bench, {3: [6]})

    with_loads(tmp_path, first)
    rows = [row(p, epoch=EPOCH + 1) for p in ALL]
    with_loads(tmp_path, second, table=table(*rows, load=load(6)))


async def test_partitions_led_elsewhere_are_swept_when_they_come_here(bench: LoadsBench) -> None:
    await bench.stage([(b"k", b"v")])
    await bench.stage([(b"k", b"v")], partition_id=1)
    theirs = [row(0, (2,), primary=2, epoch=EPOCH + 1), *(row(p) for p in ALL[1:])]
    bench.take_table(table_of(*theirs, version=2))
    async with bench.loading():
        await swept(bench, {0: [LOAD]})
        await many_turns()
        mine = [row(0, epoch=EPOCH + 2), *(row(p) for p in ALL[1:])]
        bench.take_table(table_of(*mine, version=3))
        await bench.replicator.adopt([Adoption(0, EPOCH + 2)])
        await swept(bench, {})


async def test_chunk_of_a_load_that_opens_while_leftovers_are_looked_for_is_kept(
    bench: LoadsBench,
) -> None:
    """It is staged under a newer table than the one that the search began with."""
    await bench.stage([(b"k", b"v")])
    bench.channel.held = True
    write = asyncio.ensure_future(bench.put(b"k"))
    await until(lambda: bench.channel.waiting, "a group is under way")
    bench.loads_are()
    async with bench.loading():
        await turn()  # it waits for what is queued
        bench.loads_are(load(9))
        staging_one = asyncio.ensure_future(bench.stage([(b"k", b"v")], load_id=9))
        await until(lambda: bench.writer.pending_rows > 1, "the chunk is queued")
        bench.channel.release()
        await asyncio.gather(write, staging_one)
        await swept(bench, {0: [9]})
        await many_turns()
        await swept(bench, {0: [9]})


async def test_chunk_queued_when_its_load_ended_is_deleted_too(bench: LoadsBench) -> None:
    bench.channel.held = True
    staging_one = asyncio.ensure_future(bench.stage([(b"k", b"v")]))
    await until(lambda: bench.channel.waiting, "it is on its way to the disk")
    bench.loads_are()
    async with bench.loading():
        await turn()
        bench.channel.release()
        await staging_one
        await swept(bench, {})


async def test_load_is_merged_while_another_is_being_deleted(
    bench: LoadsBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge_scheduler, "_DELETE_KEYS", 1)
    monkeypatch.setattr(merge_scheduler, "_DELETE_DUTY", 0.001)
    other = ActiveLoad(load_id=LOAD + 1, merging=False)
    bench.loads_are(OPEN, other)
    for number in range(50):
        await bench.stage([(b"a%03d" % number, b"1")], number=number)
    await bench.stage([(b"k", b"2")], load_id=LOAD + 1)
    bench.loads_are(other)  # the first was aborted
    async with bench.loading():
        await until(lambda: len(bench.partition().chunks) < 51, "it is being deleted")
        bench.coordinators.commit(1, load_id=LOAD + 1)
        bench.loads_are(replace(other, merging=True))
        await reported(bench, 0, load_id=LOAD + 1)
        assert len(bench.partition().chunks) > 10
    assert bench.partition().values == {b"k": b"2"}


async def test_sweep_that_was_refused_is_made_again(bench: LoadsBench) -> None:
    for p in ALL:
        await bench.stage([(b"k", b"v")], partition_id=p)
    bench.channel.failing = {0: "no room"}
    bench.loads_are()
    bench.state.too_few[1] = bench.state.any_too_few = True
    async with bench.loading():
        await swept(bench, {1: [LOAD]})
        bench.state.too_few[1] = False
        await swept(bench, {})
