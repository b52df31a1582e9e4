"""A node whose disk hangs: others take what it leads, and it holds up no write (rule 22)."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from koinon_node.config import Limits
from koinon_node.core.membership.assignment import Adoption
from koinon_node.core.membership.disk_health import DiskHealth
from koinon_node.core.replication import in_sync_and_hand_over
from koinon_node.core.writes.commit_group import CommitGroup
from koinon_proto.contract.errors import StorageFullError, UnavailableError, UnknownFateError
from koinon_proto.contract.table import NO_NODE
from koinon_proto.v1 import replication_pb2 as wire
from tests.kit.waiting import until
from tests.node.kit.held_writer import EPOCH, F2, F3, ME, Bench, row_of, table_of
from tests.node.kit.played_follower import PlayedFollower, joined, turn
from tests.node.kit.primary import (
    LEAVES,
    START,
    THREE,
    TWO,
    newer,
    proposed,
    start,
    tick,
    with_rows,
)
from tests.node.kit.scripted_primary import Rig, ScriptedPrimary, follow, live, one_row

SESSION_S = 1.5


async def wait(bench: Bench, seconds: float) -> None:
    """Let time pass in which the node runs and its disk does what the test says."""
    for _ in range(round(seconds / 0.1)):
        await tick(bench, 0.1)


async def hang(bench: Bench, *keys: bytes) -> list[asyncio.Task[Any]]:
    """Have the disk answer nothing, with a write on its way to it and others behind that."""
    bench.channel.held = True
    writes = []
    for key in keys or (b"k",):
        writes.append(start(bench.put(key)))
        await turn()
    return writes


async def unknown(write: asyncio.Task[Any]) -> bool:
    await turn()
    return write.done() and isinstance(write.exception(), UnknownFateError)


@pytest.mark.bench(table=table_of(THREE, row_of(1, (1, 2, 3)), min_in_sync=2))
async def test_primary_whose_disk_hangs_hands_over_to_one_whose_disk_does_not(bench: Bench) -> None:
    two, three = PlayedFollower(bench, 2), PlayedFollower(bench, 3)
    await two.join(0, 1)
    await three.join(0, 1)
    flying, queued = await hang(bench, b"k", b"l")
    reading = start(bench.get(b"k"))
    await three.acknowledge()
    await wait(bench, SESSION_S)
    assert not bench.coordinator.calls
    assert not flying.done()
    await wait(bench, 0.2)
    changes = {change.partition_id: change for change in bench.coordinator.calls[-1][0]}
    assert changes.keys() == {0, 1}  # partitions without writes as well
    for change in changes.values():
        assert (change.in_sync, change.hand_over_to) == ((F2, F3), F3)
    assert await unknown(flying)  # F3 has it, and leads soon
    with pytest.raises(UnavailableError):
        await queued  # it was sent nowhere, and never will be
    with pytest.raises(UnavailableError):
        await reading
    assert (await bench.put(b"m")).refusals
    three.take()
    assert [list(batch.keys) for batch in three.batches] == [[b"\0\0\0k"]]


@pytest.mark.bench(table=table_of(THREE, row_of(1, (1, 2, 3)), min_in_sync=2))
async def test_read_that_nobody_waits_for_leaves_no_complaint_when_the_disk_is_given_up(
    bench: Bench,
) -> None:
    """A read's deadline ends before the hang is noticed: no caller is left to see its error."""
    complaints: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: complaints.append(context))
    for number in (2, 3):
        await PlayedFollower(bench, number).join(0, 1)
    (flying,) = await hang(bench)
    reading = start(bench.get(b"k"))
    await turn()
    reading.cancel()
    await turn()
    everything = np.ones(2, np.bool_)
    bench.pending.give_up(everything, UnavailableError(reason="the disk does not answer"))
    assert await unknown(flying)
    bench.channel.release()
    gc.collect()
    await turn()
    loop.set_exception_handler(None)
    assert complaints == []


@pytest.mark.bench(table=table_of(THREE, row_of(1, (1, 2, 3)), min_in_sync=2))
async def test_own_work_behind_what_was_refused_is_told_to_try_again(bench: Bench) -> None:
    """Drops and followers' batches know one refusal, and any other error ends their node."""
    for number in (2, 3):
        await PlayedFollower(bench, number).join(0, 1)
    flying, queued = await hang(bench, b"k", b"l")
    behind = bench.writer.submit((), 1, 0, after_group=bench.writer.pending.open.number)
    given_up = np.zeros(2, np.bool_)
    given_up[0] = True
    bench.pending.give_up(given_up, UnavailableError(reason="the disk does not answer"))
    assert await unknown(flying)
    with pytest.raises(UnavailableError):
        await queued
    bench.channel.release()
    with pytest.raises(StorageFullError, match="depends on"):
        await behind


@pytest.mark.bench(table=table_of(THREE, min_in_sync=2))
async def test_disk_that_all_share_deposes_nobody(bench: Bench) -> None:
    """No replica has made durable what is not durable here, so none is put out of a set."""
    two, three = PlayedFollower(bench, 2), PlayedFollower(bench, 3)
    await two.join(0)
    await three.join(0)
    (write,) = await hang(bench)
    await wait(bench, 1.0)
    two.end.send(LEAVES)  # its disk hangs too, it says
    await wait(bench, 3.0)
    assert not bench.coordinator.calls
    bench.channel.release()
    await two.acknowledge()
    await three.acknowledge()
    assert not (await write).refusals


@pytest.mark.bench(table=table_of(TWO))
async def test_disk_that_is_not_much_slower_than_others_deposes_nobody(bench: Bench) -> None:
    two = await joined(bench, 0)
    await hang(bench)
    await wait(bench, 1.4)
    await two.acknowledge()
    await wait(bench, 2.0)
    assert not bench.coordinator.calls
    await wait(bench, 1.2)
    assert proposed(bench).hand_over_to == F2  # three times as slow as that it is by now


@pytest.mark.bench(table=table_of(row_of(0), row_of(1, (1, 2))))
async def test_follower_that_a_hanging_group_does_not_concern_is_asked_to_show_its_disk(
    bench: Bench,
) -> None:
    two = await joined(bench, 1)
    (write,) = await hang(bench)
    await wait(bench, 1.2)
    two.take()
    (probe,) = two.batches
    assert (list(probe.partition_ids), list(probe.keys)) == ([1], [])
    assert list(probe.previous) == list(probe.last) == [START]
    await two.acknowledge()
    await wait(bench, 0.5)
    assert (proposed(bench).partition_id, proposed(bench).hand_over_to) == (1, F2)
    assert not write.done()  # no other node can lead that one
    bench.channel.release()
    assert not (await write).refusals
    await bench.put(b"l")
    assert (await bench.put(b"m", partition_id=1)).refusals


@pytest.mark.bench(table=table_of(row_of(0, (1, 2, 3), (1, 2)), min_in_sync=2))
async def test_partition_that_cannot_do_without_the_hanging_copy_stays(bench: Bench) -> None:
    two = await joined(bench, 0)
    (write,) = await hang(bench)
    await two.acknowledge()
    await wait(bench, 4.0)
    assert not bench.coordinator.calls
    assert (await bench.get(b"other")).missing == [0]
    bench.channel.release()
    assert not (await write).refusals


def test_more_than_coordinators_take_at_once_is_handed_over_in_parts(tmp_path: Path) -> None:
    async def use(bench: Bench) -> None:
        two = await joined(bench, 0, 1, 2)
        await hang(bench)
        await two.acknowledge()
        await wait(bench, 1.7)
        first, call = bench.coordinator.calls[-1]
        assert [change.partition_id for change in first] == [0, 1]
        rows = [
            row_of(p, (1, 2), (2,), primary=2, epoch=EPOCH + 1, partition_epoch=2) for p in (0, 1)
        ]
        newer(bench, *rows, row_of(2, (1, 2)))
        call.set_result(frozenset())
        await wait(bench, 0.2)
        assert (proposed(bench).partition_id, proposed(bench).hand_over_to) == (2, F2)

    with mock.patch.object(in_sync_and_hand_over, "_CHANGES_MAX", 2):
        with_rows(tmp_path, use, *(row_of(p, (1, 2)) for p in range(3)))


@pytest.mark.bench(table=table_of(TWO))
async def test_deposed_primary_acknowledges_nothing_when_its_disk_answers(bench: Bench) -> None:
    two = await joined(bench, 0)
    (write,) = await hang(bench)
    await two.acknowledge()
    await wait(bench, 1.7)
    assert await unknown(write)
    bench.channel.release()  # before it hears what became of its proposal
    await wait(bench, 1.0)
    assert (await bench.put(b"l")).refusals
    assert (await bench.get(b"k")).refusals
    newer(bench, row_of(0, (1, 2), (2,), primary=2, epoch=EPOCH + 1, partition_epoch=2))
    assert (await bench.get(b"k")).refusals


@pytest.mark.bench(table=table_of(TWO))
async def test_hand_over_that_was_refused_for_certain_ends_only_by_a_newer_row(
    bench: Bench,
) -> None:
    two = await joined(bench, 0)
    await hang(bench)
    await two.acknowledge()
    await wait(bench, 1.7)
    bench.coordinator.calls[-1][1].set_result(frozenset((0,)))
    await turn()
    bench.channel.release()
    await wait(bench, 0.5)
    assert (proposed(bench).hand_over_to, proposed(bench).in_sync) == (NO_NODE, (ME, F2))
    assert (await bench.get(b"k")).refusals  # what was proposed before it may yet be committed
    newer(bench, row_of(0, (1, 2), partition_epoch=2))
    await bench_answers(bench, two)


async def bench_answers(bench: Bench, two: PlayedFollower) -> None:
    write = start(bench.put(b"l"))
    await turn()
    await two.acknowledge()
    assert not (await write).refusals


@pytest.mark.bench(table=table_of(TWO, row_of(1)))
async def test_disk_that_answers_before_anything_was_proposed_is_led_on(bench: Bench) -> None:
    two = await joined(bench, 0)
    newer(bench, row_of(0, (1, 2), partition_epoch=2), row_of(1))
    await tick(bench)
    (write,) = await hang(bench)
    await two.acknowledge()
    bench.replicator._call = start(asyncio.sleep(60))  # another call is under way
    await wait(bench, 1.7)
    assert await unknown(write)
    assert (await bench.get(b"k")).refusals
    bench.channel.release()
    await tick(bench, 0.1)
    assert not (await bench.get(b"k")).refusals
    await bench_answers(bench, two)
    bench.replicator._call.cancel()


@pytest.mark.bench(table=table_of(TWO))
async def test_merge_step_that_a_hanging_disk_was_not_given_goes_nowhere(bench: Bench) -> None:
    """Else followers would hold its rows, and the primary, which leads on, would not."""
    two = await joined(bench, 0)
    (write,) = await hang(bench)
    sequence = bench.primaries.take(0)
    step = wire.MergeStep(partition_id=0, sequence=sequence, load_id=7).SerializeToString()
    merging = bench.replicator.submit_merge(0, step, 1, 1)
    bench.writer.end_group()
    await two.acknowledge()
    bench.replicator._call = start(asyncio.sleep(60))  # nothing is proposed meanwhile
    await wait(bench, 1.7)
    assert await unknown(write)
    with pytest.raises(UnavailableError):
        await bench.replicator.finish(merging)
    bench.channel.release()
    await tick(bench, 0.1)
    two.take()
    gap = two.batches[-1]
    assert (list(gap.last), list(gap.merges)) == ([sequence], [])
    await bench_answers(bench, two)
    bench.replicator._call.cancel()


@pytest.mark.bench(table=table_of(TWO))
async def test_merge_step_that_fills_its_group_is_sent_at_once(bench: Bench) -> None:
    """The group is on its way before the step has anything to wait for."""
    two = await joined(bench, 0)
    bench.channel.held = True
    sequence = bench.primaries.take(0)
    step = wire.MergeStep(partition_id=0, sequence=sequence, load_id=7).SerializeToString()
    bench.replicator.submit_merge(0, step, Limits().group_rows, 1)
    two.take()
    assert list(two.batches[-1].merges) == [step]
    bench.channel.release()
    await bench_answers(bench, two)


@pytest.mark.bench(table=table_of(row_of(0), row_of(1, (2, 1), (1, 2), primary=2)))
async def test_partition_that_a_hanging_disk_cannot_take_over_is_given_back(bench: Bench) -> None:
    await hang(bench)
    given = row_of(1, (1, 2), (1, 2), epoch=EPOCH + 1, partition_epoch=2)
    newer(bench, row_of(0), given)
    adopting = start(bench.replicator.adopt([Adoption(1, EPOCH + 1)]))
    await wait(bench, 1.7)
    assert (proposed(bench).partition_id, proposed(bench).in_sync) == (1, (F2,))
    assert proposed(bench).hand_over_to == F2
    bench.coordinator.calls[-1][1].set_exception(UnknownFateError(reason="cut off"))
    bench.channel.release()
    await adopting
    bench.on_ready([Adoption(1, EPOCH + 1)])
    await wait(bench, 1.0)
    assert (await bench.put(b"k", partition_id=1)).refusals  # it may be another's by now


def test_follower_whose_disk_hangs_is_put_out_where_nothing_is_written(tmp_path: Path) -> None:
    """And is taken in again on a new stream, once its disk answers."""

    primary = ScriptedPrimary()
    primary.lead(0, 5)

    def leaves() -> int:
        return sum(request.close.leaves for request in primary.requests)

    async def test(rig: Rig) -> None:
        rig.on_table(one_row())
        await live(rig, primary)
        hung = primary.stream
        rig.writer.disk.hangs = True
        await until(lambda: leaves() == 1, "it asks to be put out")
        rig.writer.disk.hangs = False
        await until(lambda: primary.stream is not hung and 0 in primary.stream.open, "it is back")
        primary.write(0, {b"k": b"v"})
        await until(lambda: primary.acknowledged() == 1, "it follows")
        assert leaves() == 1

    follow(tmp_path, primary, test)


@pytest.mark.bench(table=table_of(TWO))
async def test_primary_puts_out_a_follower_that_says_that_it_leaves(bench: Bench) -> None:
    two = await joined(bench, 0)
    two.end.send(wire.FollowRequest(close=wire.ClosePartitions(leaves=True)))
    await turn()
    await tick(bench)
    assert (proposed(bench).in_sync, proposed(bench).hand_over_to) == ((ME,), NO_NODE)


def test_pause_of_the_process_is_not_its_disk() -> None:
    disk = DiskHealth()
    disk.handed_over(CommitGroup(1, sent_at=0.0))
    for now in (0.1, 0.2, 9.0):
        disk.look(now, 1.5)
    assert not disk.hangs
    assert disk.out_s < 0.5
    for tenths in range(20):
        disk.look(9.0 + tenths / 10, 1.5)
    assert disk.hangs
    disk.answered(11.0)
    assert (disk.hangs, disk.out_s, disk.oldest) == (False, 0.0, 0)


def test_disk_tells_the_median_of_its_last_minute() -> None:
    disk = DiskHealth()
    for group, took_s in enumerate((0.1, 0.2, 5.0), 1):
        disk.handed_over(CommitGroup(group, sent_at=10.0 * group))
        disk.answered(10.0 * group + took_s)
    assert disk.typical_s(40.0) == pytest.approx(0.2)
    assert disk.typical_s(200.0) == 0.0
