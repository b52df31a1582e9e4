"""The driver of loads: what it merges and reports, and in which order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from koinon_node.bulk_load import merge_scheduler, staged_chunks
from koinon_node.config import Limits
from koinon_node.core.formats.chunk_keys import ChunkName, Mark
from koinon_proto.contract.errors import (
    ResourceExhaustedError,
    StorageFullError,
    UnavailableError,
    UnknownFateError,
)
from koinon_proto.contract.table import ActiveLoad
from koinon_proto.v1.replication_pb2 import MergeStep
from tests.kit.waiting import until
from tests.node.kit.held_writer import EPOCH
from tests.node.kit.loads_bench import (
    ALL,
    MERGING,
    OPEN,
    LoadsBench,
    acknowledged,
    many_turns,
    reported,
    retried,
    with_one_replica_more,
)
from tests.node.kit.played_follower import PlayedFollower, joined, turn
from tests.node.kit.staged_chunks import LOAD

# --- merging -----------------------------------------------------------------------------------


async def test_load_is_merged_in_every_partition_led_here_and_reported(
    bench: LoadsBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staged_chunks, "STEP_BYTES", 40)
    for p in ALL:
        await bench.put(b"k03", b"other", value=b"old", partition_id=p)
        for number in range(4):
            rows = [(b"k%02d" % n, b"new") for n in range(number, 12, 4)]
            await bench.stage(rows, attempt=5, number=number, partition_id=p)
        await bench.stage([(b"stray", b"lost")], attempt=6, partition_id=p)
    bench.lose_partition_0()
    bench.merge(5, partition_ids=ALL)
    async with bench.loading():
        await reported(bench, 1, 2, 3)
        await many_turns()
    assert bench.partition(0).mark == Mark()
    for p in (1, 2, 3):
        found = bench.partition(p)
        merged = {b"k%02d" % n: b"new" for n in range(12)}
        assert found.values == {**merged, b"other": b"old"}
        assert found.chunks == {}
        assert found.mark == Mark(True, b"")
    assert bench.merger.rows_merged == 3 * 12
    assert len(bench.coordinators.asked) == 1


async def test_replacing_load_also_visits_partitions_without_staged_rows(bench: LoadsBench) -> None:
    for p in ALL:
        await bench.put(b"a", b"pa", b"pb", value=b"old", partition_id=p)
    await bench.stage([(b"pb", b"new")], partition_id=2)
    bench.coordinators.commit(1, partition_ids=ALL, replace=True, prefix=b"p")
    bench.loads_are(MERGING)
    async with bench.loading():
        await reported(bench, *ALL)
    for p in ALL:
        kept = {b"a": b"old", b"pb": b"new"} if p == 2 else {b"a": b"old"}
        assert bench.partition(p).values == kept


async def test_load_that_the_coordinators_do_not_know_as_merging_is_left_alone(
    bench: LoadsBench,
) -> None:
    await bench.stage([(b"k", b"new")])
    bench.loads_are(MERGING)
    async with bench.loading():
        await until(lambda: bench.coordinators.asked, "the manifest is asked for")
        await many_turns()
        assert len(bench.coordinators.asked) == 1  # until the next table
        bench.merge(1)
        await reported(bench, 0)


async def test_manifest_that_could_not_be_had_is_asked_for_again(bench: LoadsBench) -> None:
    await bench.stage([(b"k", b"new")])
    bench.coordinators.errors = [UnavailableError(reason="no leader")] * 3
    bench.merge(1)
    async with bench.loading():
        await reported(bench, 0)
    assert len(bench.coordinators.asked) == 4


async def test_report_that_was_lost_is_made_again_and_nothing_is_merged_again(
    bench: LoadsBench,
) -> None:
    await bench.stage([(b"k", b"new")])
    await bench.stage([(b"k", b"new")], partition_id=1)
    bench.merge(1, partition_ids=(0, 1))
    bench.coordinators.gate.clear()
    async with bench.loading():
        await until(lambda: bench.coordinators.asked, "the manifest is asked for")
        bench.coordinators.gate.set()
        await until(lambda: bench.partition(1).mark.merged, "merged")
        bench.coordinators.errors = [UnknownFateError(reason="lost")]
        await reported(bench, 0, 1)
    versions = [bench.partition(p).records[b"k"].sequence for p in (0, 1)]
    stored = [int(bench.primaries.last_sequences[p]) for p in (0, 1)]
    assert versions == stored  # one step each, and nothing after it
    assert bench.merger.rows_merged == 2


async def test_second_load_of_the_same_keys_is_merged_after_the_first(bench: LoadsBench) -> None:
    other = ActiveLoad(load_id=LOAD + 1, merging=False)
    bench.loads_are(OPEN, other)
    await bench.stage([(b"a", b"1"), (b"k", b"1")])
    await bench.stage([(b"k", b"2")], load_id=LOAD + 1)
    bench.merge(1)
    bench.loads_are(MERGING, other)
    async with bench.loading():
        await reported(bench, 0)
        assert set(bench.partition().chunks) == {ChunkName(LOAD + 1, 1, 0)}
        bench.coordinators.commit(1, load_id=LOAD + 1)
        bench.loads_are(MERGING, replace(other, merging=True))
        await reported(bench, 0, load_id=LOAD + 1)
    assert bench.partition().values == {b"a": b"1", b"k": b"2"}


def merging(load_id: int, committed_at: int) -> ActiveLoad:
    return ActiveLoad(load_id=load_id, merging=True, committed_at=committed_at)


async def test_loads_merged_at_once_are_merged_in_the_order_of_their_commits(
    bench: LoadsBench,
) -> None:
    bench.loads_are(*(ActiveLoad(load_id=n, merging=False) for n in (7, 8, 9)))
    for load_id in (7, 8, 9):
        await bench.stage([(b"k", b"%d" % load_id)], load_id=load_id)
        bench.coordinators.commit(1, load_id=load_id)
    bench.loads_are(merging(7, 30), merging(8, 20), merging(9, 10))
    async with bench.loading():
        await until(lambda: len(bench.coordinators.reports) == 3, "all are reported")
    assert [load_id for load_id, _ in bench.coordinators.reports] == [9, 8, 7]
    assert bench.partition().values == {b"k": b"7"}


async def test_later_load_is_not_merged_first_though_the_lease_comes_back_between_the_two(
    bench: LoadsBench,
) -> None:
    bench.loads_are(OPEN, ActiveLoad(load_id=8, merging=False))
    for load_id in (7, 8):
        await bench.stage([(b"k", b"%d" % load_id)], load_id=load_id)
        bench.coordinators.commit(1, load_id=load_id)
    bench.loads_are(merging(7, 10), merging(8, 20))
    serving = bench.state.serving
    looks = iter([False])
    patched = mock.Mock(side_effect=lambda: next(looks, True) and serving())
    with mock.patch.object(bench.state, "serving", patched):
        async with bench.loading():
            await until(lambda: len(bench.coordinators.reports) == 2, "both are reported")
    assert [load_id for load_id, _ in bench.coordinators.reports] == [7, 8]
    assert bench.partition().values == {b"k": b"8"}


def test_load_waits_for_an_earlier_one_only_where_that_is_not_merged(tmp_path: Path) -> None:
    async def use(bench: LoadsBench) -> None:
        two = await joined(bench, 0)
        bench.loads_are(OPEN, ActiveLoad(load_id=8, merging=False))
        for load_id in (7, 8):
            rows = [(b"k", b"%d" % load_id)]
            await acknowledged(two, bench.stage(rows, load_id=load_id))
            await bench.stage(rows, load_id=load_id, partition_id=1)
            bench.coordinators.commit(1, load_id=load_id, partition_ids=(0, 1))
        bench.loads_are(merging(7, 20), merging(8, 10))
        async with bench.ticking(), bench.loading():
            await reported(bench, 1, load_id=8)  # partition 0 waits for its follower
            await reported(bench, 1, load_id=7)
            assert bench.partition(1).values == {b"k": b"7"}
            assert bench.partition(0).values == {b"k": b"8"}
            assert LOAD in staged_chunks.staged_loads(bench.store, [0])[0]
            await acknowledged(two, reported(bench, 0, 1, load_id=7))
            assert bench.coordinators.merged(8) == {0, 1}
        assert bench.partition(0).values == {b"k": b"7"}

    with_one_replica_more(tmp_path, use, limits=Limits(write_timeout_ms=400))


async def test_load_whose_step_found_no_room_is_not_overtaken_there(bench: LoadsBench) -> None:
    bench.loads_are(OPEN, ActiveLoad(load_id=8, merging=False))
    for load_id in (7, 8):
        await bench.stage([(b"k", b"%d" % load_id)], load_id=load_id)
        bench.coordinators.commit(1, load_id=load_id)
    bench.channel.failing = {0: "no room"}
    bench.loads_are(merging(7, 20), merging(8, 10))
    async with bench.loading():
        await until(lambda: len(bench.coordinators.reports) == 2, "both are reported")
    assert [load_id for load_id, _ in bench.coordinators.reports] == [8, 7]
    assert bench.partition().values == {b"k": b"7"}


# --- no room -----------------------------------------------------------------------------------


async def test_step_that_found_no_room_is_tried_again_later(bench: LoadsBench) -> None:
    await bench.stage([(b"k", b"new")])
    await bench.stage([(b"k", b"new")], partition_id=1)
    bench.channel.failing = {0: "no room"}
    bench.merge(1, partition_ids=(0, 1))
    async with bench.loading():
        await reported(bench, 0, 1)
    for p in (0, 1):
        assert bench.partition(p).values == {b"k": b"new"}
    assert not bench.pending.claimed
    assert bench.writer.pending_rows == 0


@pytest.mark.parametrize(
    "error",
    [
        ResourceExhaustedError(resource="rows", limit=1),
        StorageFullError(node_id="n", reason="full"),
    ],
)
async def test_step_for_which_there_is_no_room_waits_before_it_is_planned_again(
    bench: LoadsBench, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Planning reads all that is staged there; it would keep a processor busy for nothing."""
    planned: list[int] = []
    plan = staged_chunks.next_step

    def next_step(*args: Any) -> Any:
        planned.append(args[2])
        return plan(*args)

    await bench.stage([(b"k", b"new")])
    monkeypatch.setattr(staged_chunks, "next_step", next_step)

    def no_room(*_: int) -> None:
        raise error

    monkeypatch.setattr(bench.writer, "check_room", no_room)
    bench.merge(1)
    with mock.patch.multiple(merge_scheduler, _RETRY_S=60.0, _NOTHING_TAKEN_S=60.0):
        async with bench.loading():
            await until(lambda: planned, "a step is planned")
            await many_turns()
    assert len(planned) <= 2


def test_partition_whose_follower_is_silent_does_not_hold_up_the_others(tmp_path: Path) -> None:
    other = ActiveLoad(load_id=LOAD + 1, merging=False)

    async def use(bench: LoadsBench) -> None:
        two = await joined(bench, 0)
        bench.loads_are(OPEN, other)
        await acknowledged(two, bench.stage([(b"k", b"new")]))
        await bench.stage([(b"k", b"new")], partition_id=1, load_id=LOAD + 1)
        bench.merge(1)
        bench.loads_are(MERGING, other)
        async with bench.loading():
            await until(lambda: bench.partition().mark.merged, "it is stored here")
            await until(lambda: retried(bench), "nobody waits for the step any more")
            bench.coordinators.commit(1, load_id=LOAD + 1, partition_ids=(1,))
            bench.loads_are(MERGING, replace(other, merging=True))
            await reported(bench, 1, load_id=LOAD + 1)
            assert bench.coordinators.merged() == set()
            await two.acknowledge()
            await reported(bench, 0)

    with_one_replica_more(tmp_path, use, limits=Limits(write_timeout_ms=400))


# --- with followers ----------------------------------------------------------------------------


def test_step_goes_to_followers_as_one_entry_with_its_times(tmp_path: Path) -> None:
    async def use(bench: LoadsBench) -> None:
        two = await joined(bench, 0)
        await acknowledged(two, bench.stage([(b"k", b"new"), (b"l", b"new")], attempt=9, number=3))
        streamed = len(two.batches)
        last = int(bench.primaries.last_sequences[0])
        bench.coordinators.commit(9, replace=True, prefix=b"p")
        bench.loads_are(MERGING)
        async with bench.loading():
            await until(lambda: bench.partition().mark.merged, "it is stored here")
            await turn()
            two.take()
            (batch,) = two.batches[streamed:]
            assert not bench.replicator.leading.drained(0)
            await two.acknowledge()
            await reported(bench, 0)
            assert bench.replicator.leading.drained(0)
        assert (list(batch.partition_ids), list(batch.keys), list(batch.records)) == ([0], [], [])
        assert (list(batch.previous), list(batch.last)) == ([last], [last + 1])
        (merge,) = batch.merges
        step = MergeStep.FromString(merge)
        assert (step.partition_id, step.sequence, step.load_id) == (0, last + 1, LOAD)
        assert (list(step.attempts), list(step.numbers), step.rows) == ([9], [3], 2)
        assert (step.replace, step.prefix, step.last) == (True, b"p", True)
        assert step.tombstone_at_ms == bench.clock.ms + bench.limits.tombstone_ms
        assert int(bench.copies.complete_through[0]) == last + 1

    with_one_replica_more(tmp_path, use)


def test_journal_answers_nothing_from_before_a_step(tmp_path: Path) -> None:
    async def use(bench: LoadsBench) -> None:
        two = await joined(bench, 0)
        await acknowledged(two, bench.put(b"a"))
        await acknowledged(two, bench.stage([(b"k", b"new")]))
        before = int(bench.primaries.last_sequences[0])
        assert bench.journal.since(0, before - 1)
        bench.merge(1)
        async with bench.loading():
            await acknowledged(two, reported(bench, 0))
            await acknowledged(two, bench.put(b"b"))
        assert bench.journal.since(0, before) is None
        assert bench.journal.since(0, before + 1) == [b"\0\0\0b"]

    with_one_replica_more(tmp_path, use)


async def test_step_of_a_partition_of_one_replica_raises_the_purge_floor(bench: LoadsBench) -> None:
    """It leaves no tombstones: a copy from before it cannot be caught up."""
    await bench.stage([(b"k", b"new")])
    bench.merge(1)
    async with bench.loading():
        await reported(bench, 0)
    last = int(bench.primaries.last_sequences[0])
    copy = bench.store.read_copies([0])[0]
    assert (copy.complete_through, copy.purge_floor) == (last, last)
    assert int(bench.store.read_copies([1])[1].purge_floor) == 0


def test_follower_opens_after_a_step_from_where_it_left(tmp_path: Path) -> None:
    """It is caught up by a scan: the pages hold what the step wrote."""

    async def use(bench: LoadsBench) -> None:
        two = await joined(bench, 0)
        await acknowledged(two, bench.stage([(b"k", b"new")]))
        before = int(bench.primaries.last_sequences[0])
        await two.leave()
        again = PlayedFollower(bench)
        bench.merge(1)
        async with bench.loading():
            await until(lambda: bench.partition().mark.merged, "it is stored here")
            await turn()
            (answer,) = await again.open(0, complete_through=before, history=[(EPOCH, 0)])
            assert (answer.common_point, answer.stream_from) == (before, before + 1)
            await again.position(0, sequence=before + 1)
            await reported(bench, 0)

    with_one_replica_more(tmp_path, use)
