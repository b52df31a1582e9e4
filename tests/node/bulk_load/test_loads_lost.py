"""Losses of a primary that merges: its lease, its partition, its room, the load itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from koinon_node.bulk_load import staged_chunks
from koinon_node.config import Limits
from koinon_node.core.membership.assignment import Adoption
from koinon_proto.contract.table import ActiveLoad
from tests.kit.waiting import until
from tests.node.kit.held_writer import EPOCH, table_of
from tests.node.kit.held_writer import row_of as row
from tests.node.kit.loads_bench import (
    ALL,
    MERGING,
    LoadsBench,
    acknowledged,
    claimed,
    many_turns,
    reported,
    retried,
    table,
    with_loads,
    with_one_replica_more,
)
from tests.node.kit.played_follower import joined
from tests.node.kit.staged_chunks import LOAD

# --- what is lost between two looks ------------------------------------------------------------

LOSSES: dict[str, Callable[[LoadsBench], None]] = {
    "lease": LoadsBench.lose_lease,
    "partition": LoadsBench.lose_partition_0,
    "stopped": lambda bench: stop_partition_0(bench),
    "too few": lambda bench: bench.state.too_few.__setitem__(0, True),
}


def stop_partition_0(bench: LoadsBench) -> None:
    bench.state.stopped[0] = bench.state.any_stopped = True


@pytest.mark.parametrize("lose", LOSSES.values(), ids=LOSSES.keys())
async def test_primary_that_may_not_write_any_more_queues_no_step_it_has_planned(
    bench: LoadsBench, monkeypatch: pytest.MonkeyPatch, lose: Callable[[LoadsBench], None]
) -> None:
    planned = staged_chunks.next_step
    await bench.stage([(b"k", b"new")])
    lost = False

    def next_step(*args: Any) -> Any:
        nonlocal lost
        step = planned(*args)
        if not lost:
            lose(bench)
        lost = True
        return step

    monkeypatch.setattr(staged_chunks, "next_step", next_step)
    before = (bench.channel.groups_sent, int(bench.primaries.last_sequences[0]))
    bench.merge(1)
    async with bench.loading():
        await until(lambda: lost, "a step is planned")
        await many_turns()
    assert (bench.channel.groups_sent, int(bench.primaries.last_sequences[0])) == before
    assert not bench.pending.claimed
    assert bench.coordinators.reports == []


async def test_lease_that_ended_for_a_while_does_not_end_the_merging(
    bench: LoadsBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No table comes when a node has its lease again. It ends at the second try of a step."""
    plan = staged_chunks.next_step
    planned = 0
    lease = bench.state.lease

    def next_step(*args: Any) -> Any:
        nonlocal planned
        planned += 1
        if planned == 2:
            bench.lose_lease()
        return plan(*args)

    monkeypatch.setattr(staged_chunks, "next_step", next_step)
    await bench.stage([(b"k", b"new")])
    bench.channel.failing = {0: "no room"}
    bench.merge(1)
    async with bench.loading():
        await until(lambda: planned == 2, "it is planned again")
        await many_turns()
        assert bench.coordinators.reports == []
        bench.state.lease = lease
        await reported(bench, 0)


@pytest.mark.parametrize("stored", [False, True])
def test_step_of_a_partition_that_was_lost_meanwhile_is_not_reported(
    tmp_path: Path, stored: bool
) -> None:
    """The next primary may not have it. Nothing waits for followers any more, who are another's;
    were it reported, the load would count as merged, and the next primary would drop its chunks.
    """

    async def use(bench: LoadsBench) -> None:
        two = await joined(bench, 0)
        await acknowledged(two, bench.stage([(b"k", b"new")]))
        await bench.stage([(b"k", b"new")], partition_id=1)
        bench.merge(1, partition_ids=(0, 1))
        bench.channel.held = not stored
        async with bench.loading():
            await claimed(bench)
            if stored:
                await until(lambda: bench.partition().mark.merged, "it is stored here")
            rows = [row(0, (1, 2), primary=2, epoch=EPOCH + 1), *(row(p) for p in ALL[1:])]
            bench.take_table(table(*rows, load=MERGING, version=9))
            bench.channel.release()
            await reported(bench, 1)
            await many_turns()
            assert bench.coordinators.merged() == {1}

    with_one_replica_more(tmp_path, use)


def test_mark_of_a_step_whose_fate_was_unknown_counts_only_while_the_partition_is_led(
    tmp_path: Path,
) -> None:
    """The step is in the store here, and timed out; then the partition is lost."""

    async def use(bench: LoadsBench) -> None:
        two = await joined(bench, 0)
        await acknowledged(two, bench.stage([(b"k", b"new")]))
        bench.merge(1)
        async with bench.loading():
            await until(lambda: bench.partition().mark.merged, "it is stored here")
            await until(lambda: retried(bench), "nobody waits for the step any more")
            for _ in range(5):
                await many_turns()  # it is looked at again
            rows = [row(0, (1, 2), primary=2, epoch=EPOCH + 1), *(row(p) for p in ALL[1:])]
            bench.take_table(table(*rows, load=MERGING, version=9))
            await many_turns()
            assert bench.coordinators.reports == []

    limits = Limits(write_timeout_ms=400)
    with_one_replica_more(tmp_path, use, limits=limits)


@pytest.mark.bench(lead=False)
async def test_partition_that_comes_when_the_load_has_ended_is_not_merged(
    bench: LoadsBench,
) -> None:
    """Its mark is gone with the load: by the old manifest, a replacing load would erase all that
    has been written since.
    """
    theirs = [row(0, (2,), primary=2), *(row(p) for p in ALL[1:])]
    other = ActiveLoad(load_id=LOAD + 1, merging=True)
    await bench.lead_all(table(*theirs, load=MERGING))
    coordinators = bench.coordinators
    coordinators.commit(1, partition_ids=(0, 1), replace=True)
    coordinators.commit(1, load_id=LOAD + 1, partition_ids=(2,))
    report = coordinators.report_merged
    asked = asyncio.Event()

    async def report_merged(cluster_id: str, load_id: int, partition_ids: Sequence[int]) -> None:
        if not asked.is_set():
            coordinators.gate.clear()
        asked.set()
        await report(cluster_id, load_id, partition_ids)

    coordinators.report_merged = report_merged  # type: ignore[method-assign]
    async with bench.loading():
        await asked.wait()  # the answer takes a while
        await take_partition_0(bench, other)
        coordinators.gate.set()
        await reported(bench, 2, load_id=LOAD + 1)
    assert bench.partition(0).values == {b"k": b"mine"}
    assert coordinators.merged() == {1}


async def take_partition_0(bench: LoadsBench, *loads: ActiveLoad) -> None:
    """Partition 0 comes to this node, with a record, by a table with other loads."""
    rows = [row(0, epoch=EPOCH + 1), *(row(p) for p in ALL[1:])]
    version = bench.state.table().table_version + 1
    bench.take_table(table_of(*rows, version=version, loads=loads))
    await bench.replicator.adopt([Adoption(0, EPOCH + 1)])
    await bench.put(b"k", value=b"mine")


@pytest.mark.bench(lead=False)
async def test_load_that_ends_while_another_is_merged_is_not_taken_up_again(
    bench: LoadsBench,
) -> None:
    theirs = [row(0, (2,), primary=2), *(row(p) for p in ALL[1:])]
    other = ActiveLoad(load_id=LOAD - 1, merging=True)
    await bench.lead_all(table(*theirs, load=MERGING))
    bench.coordinators.commit(1, partition_ids=(0, 1), replace=True)
    async with bench.loading():
        await reported(bench, 1)
        bench.coordinators.gate.clear()
        asked = len(bench.coordinators.asked)
        bench.loads_are(other, MERGING)
        await until(lambda: len(bench.coordinators.asked) > asked, "the other one is next")
        await take_partition_0(bench, other)
        bench.coordinators.commit(1, load_id=LOAD - 1, partition_ids=(2,))
        bench.coordinators.gate.set()
        await reported(bench, 2, load_id=LOAD - 1)
        await many_turns()
    assert bench.partition(0).values == {b"k": b"mine"}
    assert bench.coordinators.merged() == {1}


def test_takeover_in_the_middle_goes_on_by_the_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staged_chunks, "STEP_BYTES", 20)
    keys = [b"%02d" % n for n in range(30)]

    async def first(bench: LoadsBench) -> bytes:
        await bench.stage([(key, b"new") for key in keys])
        bench.merge(1)
        async with bench.loading():
            await until(lambda: bench.partition().mark.key, "a step is done")
        await bench.writer.drain()
        mark = bench.partition().mark
        assert not mark.merged
        await bench.put(keys[0], keys[-1], value=b"live")
        return mark.key

    async def second(bench: LoadsBench) -> None:
        mark = bench.partition().mark
        merged = {key: r.sequence for key, r in bench.partition().records.items()}
        bench.coordinators.commit(1)
        async with bench.loading():
            await reported(bench, 0)
        found = bench.partition().records
        for key in keys[1:]:
            assert found[key].value == b"new"
            assert (found[key].sequence == merged.get(key)) == (key <= mark.key)
        assert found[keys[0]].value == b"live"

    mark = with_loads(tmp_path, first)
    assert mark
    rows = [row(p, epoch=EPOCH + 1) for p in ALL]
    with_loads(tmp_path, second, table=table(*rows, load=MERGING, version=5))
