"""The primary's promises: what is complete, who serves when, and to whom it hands over."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from koinon_node.batches import Durability, WriteAnswer, WriteBatch
from koinon_node.config import Limits
from koinon_node.core import records
from koinon_node.core.assignment import Adoption
from koinon_node.seams import RowChange
from koinon_node.sizes import SizeScan
from koinon_proto.errors import (
    KoinonError,
    LeaseExpiredError,
    NodeFencedError,
    NotEnoughReplicasError,
    NotPrimaryError,
    PartitionOfflineError,
    StorageFullError,
    TableBehindError,
    UnavailableError,
    UnknownFateError,
    WrongClusterError,
)
from koinon_proto.table import PartitionRow, Table, first_sequence
from koinon_proto.v1 import replication_pb2 as wire
from tests.node.held_writer import EPOCH, F2, F3, ME, Bench, row_of, table_of, with_engine
from tests.node.played_follower import PlayedFollower, turn

START = first_sequence(EPOCH)
Use = Callable[[Bench], Awaitable[None]]
TWO = row_of(0, (1, 2))
THREE = row_of(0, (1, 2, 3))
LEAVES = wire.FollowRequest(close=wire.ClosePartitions(leaves=True))


def with_rows(
    directory: Path, use: Use, *rows: PartitionRow, limits: Limits | None = None, **facts: Any
) -> None:
    """Run ``use`` with these rows adopted; partitions with others in sync are not served yet."""

    async def run(bench: Bench) -> None:
        await bench.lead_all(table_of(*rows, **facts))
        await use(bench)

    with_engine(directory, run, limits=limits, lead=False)


def newer(bench: Bench, *rows: PartitionRow, **facts: Any) -> Table:
    """Give the node a newer table with these rows."""
    table = table_of(*rows, version=bench.state.table().table_version + 1, **facts)
    bench.take_table(table)
    return table


async def tick(bench: Bench, seconds: float = 0.0) -> None:
    bench.now += seconds
    bench.replicator.tick()
    await turn()


def proposed(bench: Bench) -> RowChange:
    """Return the one change of the newest call."""
    (change,) = bench.coordinator.calls[-1][0]
    return change


def start(call: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    return asyncio.create_task(call)


async def answered(task: asyncio.Task[Any]) -> bool:
    await turn()
    return task.done()


# --- what is complete --------------------------------------------------------------------------


def test_write_is_answered_when_every_in_sync_follower_has_it(tmp_path: Path) -> None:
    async def use(bench: Bench) -> None:
        two, three = PlayedFollower(bench, 2), PlayedFollower(bench, 3)
        await two.join(0)
        await three.join(0)
        write = start(bench.put(b"k"))
        assert not await answered(write)
        await two.acknowledge()
        assert not await answered(write)
        await three.acknowledge()
        assert await answered(write)
        assert bench.writer.pending_rows == 0
        (batch,) = two.batches
        assert list(batch.previous) == [START]
        assert list(batch.last) == [START + 1]
        assert list(batch.keys) == [b"\0\0\0k"]
        assert records.decode_record(batch.records[0]).sequence == START + 1

    with_rows(tmp_path, use, THREE)


def test_write_acknowledged_elsewhere_first_waits_for_the_own_commit(tmp_path: Path) -> None:
    async def use(bench: Bench) -> None:
        two = PlayedFollower(bench)
        await two.join(0)
        bench.channel.held = True
        write = start(bench.put(b"k"))
        await turn()
        await two.acknowledge()
        assert not await answered(write)
        bench.channel.release()
        assert await answered(write)

    with_rows(tmp_path, use, TWO)


def test_acknowledgement_counts_only_where_the_follower_is_positioned(tmp_path: Path) -> None:
    async def use(bench: Bench) -> None:
        two = PlayedFollower(bench)
        await two.join(0)
        await two.open(0)  # again: it is not positioned any more
        write = start(bench.put(b"k"))
        await turn()
        await two.acknowledge()
        assert not await answered(write)
        await two.position(0, sequence=START + 1)
        assert await answered(write)

    with_rows(tmp_path, use, TWO)


def test_position_above_what_was_streamed_does_not_count(tmp_path: Path) -> None:
    async def use(bench: Bench) -> None:
        two = PlayedFollower(bench)
        await two.open(0)
        await two.position(0, sequence=START + 1)
        assert bench.ready == []

    with_rows(tmp_path, use, TWO)


def test_lost_stream_takes_along_what_its_follower_had_said(tmp_path: Path) -> None:
    async def use(bench: Bench) -> None:
        two = PlayedFollower(bench)
        await two.join(0)
        bench.channel.held = True
        write = start(bench.put(b"k"))
        await turn()
        await two.acknowledge()
        await two.leave()
        bench.channel.release()
        assert not await answered(write)
        again = PlayedFollower(bench)
        await again.join(0)
        assert await answered(write)

    with_rows(tmp_path, use, TWO)


def test_write_at_durability_primary_waits_for_nobody_but_reads_of_it_do(tmp_path: Path) -> None:
    async def use(bench: Bench) -> None:
        two = PlayedFollower(bench)
        await two.join(0)
        await bench.put(b"k", durability=Durability.PRIMARY)
        read = start(bench.get(b"k"))
        scan = start(bench.scan())
        condition = start(bench.put(b"k", if_version=1))
        absent = start(bench.put(b"gone", delete=True))
        assert await answered(absent)
        for task in (read, scan, condition):
            assert not await answered(task)
        await two.acknowledge()
        assert await answered(read)
        assert read.result().values == [b"v"]
        assert await answered(scan)
        assert scan.result().keys == [b"k"]
        assert await answered(condition)
        assert list(condition.result().row_errors) == [0]

    with_rows(tmp_path, use, TWO)


def test_read_under_constant_writes_ends_with_what_it_first_found(tmp_path: Path) -> None:
    """A key that is always in flight does not starve its readers."""

    async def use(bench: Bench) -> None:
        two = PlayedFollower(bench)
        await two.join(0)
        first = start(bench.put(b"k", value=b"1"))
        await turn()
        read, scan = start(bench.get(b"k")), start(bench.scan())
        await turn()
        second = start(bench.put(b"k", value=b"2"))
        await turn()
        await two.acknowledge(1 + two_groups_before(two))
        assert await answered(first)
        third = start(bench.put(b"k", value=b"3"))
        await turn()
        assert not read.done()  # it found the second, which is not complete
        two.take()
        await two.acknowledge(two.batches[1].number)
        assert await answered(second)
        assert await answered(read)
        assert read.result().values == [b"2"]
        assert await answered(scan)
        assert not third.done()
        third.cancel()

    def two_groups_before(two: PlayedFollower) -> int:
        two.take()
        return two.batches[0].number - 1

    with_rows(tmp_path, use, TWO)


@pytest.mark.parametrize("how", ["get", "scan"])
def test_read_of_a_write_that_is_stored_and_not_answered_waits_for_it(
    tmp_path: Path, how: str
) -> None:
    """The writer process commits a moment before this process hears of it."""

    async def use(bench: Bench) -> None:
        two = PlayedFollower(bench)
        await two.join(0)
        first = start(bench.put(b"k", value=b"1"))
        await turn()
        read = start(bench.get(b"k"))
        await turn()
        bench.channel.held = True
        second = start(bench.put(b"k", value=b"2"))
        await turn()
        bench.channel.store_one()
        scan = start(bench.scan()) if how == "scan" else read
        two.take()
        await two.acknowledge(two.batches[0].number)
        assert await answered(first)
        assert not await answered(scan)
        bench.channel.release()
        assert not await answered(scan)
        await two.acknowledge()
        assert await answered(scan)
        assert scan.result().values == [b"2"]
        for task in (second, read):
            await task

    with_rows(tmp_path, use, TWO)


def test_partition_that_waits_for_a_follower_does_not_hold_up_another(tmp_path: Path) -> None:
    async def use(bench: Bench) -> None:
        two, three = PlayedFollower(bench, 2), PlayedFollower(bench, 3)
        await two.join(0)
        await three.join(1)
        stuck = start(bench.put(b"k"))
        await turn()
        other = start(bench.put(b"k", partition_id=1))
        await turn()
        await three.acknowledge()
        assert await answered(other)
        assert not stuck.done()
        # and of one group, each partition by itself, once the group has been stuck for long
        both = [start(bench.put(b"l")), start(bench.put(b"l", partition_id=1))]
        await turn()
        await three.acknowledge()
        assert not await answered(both[1])
        await tick(bench, 1.1)
        await tick(bench)
        assert await answered(both[1])
        assert not both[0].done()
        for task in (stuck, both[0]):
            task.cancel()

    with_rows(tmp_path, use, row_of(0, (1, 2, 3), (1, 2)), row_of(1, (1, 3)), min_in_sync=2)


def test_condition_on_a_key_of_a_stuck_group_sees_the_newest_write(tmp_path: Path) -> None:
    """Groups complete in any order: an older one that is stuck hides nothing of a newer."""

    async def use(bench: Bench) -> None:
        two, three = PlayedFollower(bench, 2), PlayedFollower(bench, 3)
        await two.join(0)
        await three.join(1)
        mixed = [start(bench.put(b"q")), start(bench.put(b"k", partition_id=1))]
        await turn()
        newest = start(bench.put(b"k", partition_id=1))
        await turn()
        await three.acknowledge()
        version = int((await newest).versions[0])
        change = start(bench.put(b"k", partition_id=1, if_version=version))
        await turn()
        await three.acknowledge()
        await tick(bench, 1.1)
        await tick(bench)
        assert await answered(change)
        assert not change.result().row_errors
        mixed[0].cancel()

    with_rows(tmp_path, use, row_of(0, (1, 2, 3), (1, 2)), row_of(1, (1, 3)), min_in_sync=2)


def test_batch_under_which_a_partition_is_handed_on_loses_only_its_rows(tmp_path: Path) -> None:
    async def use(bench: Bench) -> None:
        two = PlayedFollower(bench)
        await two.join(0, 1)
        batch = WriteBatch(
            table_version=1,
            keys=[b"a", b"b", b"c"],
            values=[b"v"] * 3,
            partition_ids=np.array([0, 1, 0], np.uint32),
        )
        write = start(bench.engine.write(batch))
        await turn()
        newer(bench, row_of(0, (1, 2), primary=2, epoch=EPOCH + 1), row_of(1, (1, 2)))
        await two.acknowledge()
        await tick(bench)
        answer = await write
        assert {row: type(e) for row, e in answer.row_errors.items()} == {
            0: UnknownFateError,
            2: UnknownFateError,
        }
        assert int(answer.versions[1]) == START + 1
        assert not answer.versions[[0, 2]].any()

    with_rows(tmp_path, use, TWO, row_of(1, (1, 2)))


def test_step_that_was_complete_before_its_partition_was_handed_on_is_acknowledged(
    tmp_path: Path,
) -> None:
    async def use(bench: Bench) -> None:
        two, three = PlayedFollower(bench, 2), PlayedFollower(bench, 3)
        await two.join(0)
        await three.join(1)
        batch = WriteBatch(
            table_version=1,
            keys=[b"a", b"b"],
            values=[b"v"] * 2,
            partition_ids=np.array([0, 1], np.uint32),
        )
        write = start(bench.engine.write(batch))
        await turn()
        await three.acknowledge()
        await tick(bench, 1.1)
        await tick(bench)
        newer(bench, row_of(0, (1, 2)), row_of(1, (1, 3), primary=3, epoch=EPOCH + 1))
        assert not await answered(write)
        await two.acknowledge()
        await tick(bench)
        answer = await write
        assert not answer.row_errors
        assert answer.versions.tolist() == [START + 1, START + 1]

    with_rows(tmp_path, use, TWO, row_of(1, (1, 3)), limits=Limits(step_rows=1))


def test_write_not_complete_in_time_is_unknown_and_stays_pending(tmp_path: Path) -> None:
    async def use(bench: Bench) -> None:
        two = PlayedFollower(bench)
        await two.join(0)
        with pytest.raises(UnknownFateError):
            await bench.put(b"k")
        assert bench.writer.pending_rows == 1
        read = start(bench.get(b"k"))
        assert not await answered(read)
        await two.acknowledge()
        assert await answered(read)
        assert bench.writer.pending_rows == 0

    with_rows(tmp_path, use, TWO, limits=Limits(write_timeout_ms=20))


def test_partition_lost_meanwhile_ends_what_waits_as_unknown(tmp_path: Path) -> None:
    async def use(bench: Bench) -> None:
        two = PlayedFollower(bench)
        await two.join(0)
        write = start(bench.put(b"k"))
        await turn()
        read = start(bench.get(b"k"))
        await turn()
        newer(bench, row_of(0, (1, 2), primary=2, epoch=EPOCH + 1, partition_epoch=2))
        with pytest.raises(UnknownFateError):
            await write
        with pytest.raises(LeaseExpiredError):
            await read
        two.take()
        (closed,) = [m.closed for m in two.others if m.WhichOneof("kind") == "closed"]
        assert list(closed.partition_ids) == [0]

    with_rows(tmp_path, use, TWO)


def test_follower_too_far_behind_is_cut_off(tmp_path: Path) -> None:
    async def use(bench: Bench) -> None:
        two = PlayedFollower(bench)
        await two.join(0)
        writes = [start(bench.put(b"k%d" % n, value=bytes(900))) for n in range(4)]
        await turn()
        writes += [start(bench.put(b"l%d" % n, value=bytes(900))) for n in range(4)]
        await turn()
        writes += [start(bench.put(b"m%d" % n, value=bytes(900))) for n in range(4)]
        await turn()
        assert two.end.ended
        for write in writes:
            write.cancel()

    with_rows(tmp_path, use, TWO, limits=Limits(stream_bytes=5000))


def test_followers_that_have_the_same_partitions_open_get_one_message(tmp_path: Path) -> None:
    async def use(bench: Bench) -> None:
        two, three = PlayedFollower(bench, 2), PlayedFollower(bench, 3)
        await two.join(0, 1)
        await three.join(0)
        writes = [start(bench.put(b"k")), start(bench.put(b"k", partition_id=1))]
        await turn()
        two.take()
        three.take()
        assert list(two.batches[0].partition_ids) == [0, 1]
        assert sorted(two.batches[0].keys) == [b"\0\0\0k", b"\0\1\0k"]
        assert list(three.batches[0].partition_ids) == [0]
        assert list(three.batches[0].keys) == [b"\0\0\0k"]
        await three.join(1)
        writes.append(start(bench.put(b"l", partition_id=1)))
        await turn()
        two.take()
        three.take()
        assert two.batches[1] == three.batches[1]
        for write in writes:
            write.cancel()

    with_rows(tmp_path, use, THREE, row_of(1, (1, 2, 3), (1, 2)))


# --- who may follow ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"cluster_id": "other"}, WrongClusterError),
        ({"to_node_number": 7}, NotPrimaryError),
        ({"node_epoch": 0}, NodeFencedError),
        ({"node_epoch": 2}, TableBehindError),
        ({"node_number": 9}, TableBehindError),
    ],
)
def test_hello_that_is_not_in_order_is_refused(
    tmp_path: Path, changes: dict[str, Any], error: type[KoinonError]
) -> None:
    async def use(bench: Bench) -> None:
        two = PlayedFollower(bench)
        request = await two.end.other.inbox.get()
        assert request is not None
        for name, value in changes.items():
            setattr(request.hello, name, value)
        two.end.other.inbox.put_nowait(request)
        with pytest.raises(error):
            await two.serving

    with_rows(tmp_path, use, TWO)


def test_second_stream_of_a_node_ends_the_first(tmp_path: Path) -> None:
    async def use(bench: Bench) -> None:
        first = PlayedFollower(bench)
        await first.join(0)
        second = PlayedFollower(bench)
        await turn()
        assert first.end.ended
        write = start(bench.put(b"k"))
        await turn()
        await second.join(0)
        assert await answered(write)

    with_rows(tmp_path, use, TWO)


def test_follower_registered_anew_is_cut_off(tmp_path: Path) -> None:
    async def use(bench: Bench) -> None:
        two = PlayedFollower(bench)
        await two.join(0)
        newer(bench, TWO, node_epochs={2: 2})
        assert two.end.ended
        assert isinstance(two.end.error, NodeFencedError)

    with_rows(tmp_path, use, TWO)


@pytest.mark.parametrize(
    ("asked", "kind"),
    [
        ({"epoch": EPOCH + 1}, "table_behind"),
        ({"epoch": EPOCH - 1}, "not_primary"),
        ({}, ""),
    ],
)
def test_opening_of_another_epoch_is_refused(
    tmp_path: Path, asked: dict[str, Any], kind: str
) -> None:
    async def use(bench: Bench) -> None:
        (answer,) = await PlayedFollower(bench).open(0, **asked)
        assert (answer.refusal.WhichOneof("kind") or "") == kind

    with_rows(tmp_path, use, TWO)


def test_opening_tells_how_much_the_partition_holds_as_it_was_counted(tmp_path: Path) -> None:
    async def use(bench: Bench) -> None:
        await bench.put(b"a", b"bb", value=b"12345678")
        scan = SizeScan(bench.store, bench.sizes)
        while scan.step(1.0):
            pass
        answers = await PlayedFollower(bench).open(0, 1)
        assert [(a.records, a.bytes) for a in answers] == [(2, 19), (0, 0)]

    with_rows(tmp_path, use, row_of(0, (1, 2), (1,)), row_of(1, (1, 2), (1,)))


def test_opening_by_a_node_that_is_no_replica_is_put_off(tmp_path: Path) -> None:
    async def use(bench: Bench) -> None:
        (answer,) = await PlayedFollower(bench, 3).open(0)
        assert answer.refusal.HasField("table_behind")

    with_rows(tmp_path, use, TWO)


def test_opening_names_where_a_deposed_tail_begins(tmp_path: Path) -> None:
    async def use(bench: Bench) -> None:
        two = PlayedFollower(bench)
        await two.join(0)
        write = start(bench.put(b"k", b"l"))
        await turn()
        await two.acknowledge()
        await write
        newer(bench, row_of(0, (1, 2), epoch=EPOCH + 1, partition_epoch=2))
        await bench.replicator.adopt([Adoption(0, EPOCH + 1)])
        (answer,) = await two.open(
            0, epoch=EPOCH + 1, complete_through=START + 9, history=[(EPOCH, 0)]
        )
        assert answer.common_point == START + 2
        assert answer.stream_from == first_sequence(EPOCH + 1)
        # One that is exactly where the epoch began lacks nothing up to its beginning.
        (answer,) = await two.open(
            0, epoch=EPOCH + 1, complete_through=START + 2, history=[(EPOCH, 0)]
        )
        assert answer.common_point == answer.stream_from

    with_rows(tmp_path, use, TWO)


def test_removal_without_a_tombstone_that_was_not_sent_puts_an_opening_off(tmp_path: Path) -> None:
    """The row got its second replica while a delete by the rules of one was queued."""

    async def use(bench: Bench) -> None:
        await bench.put(b"k")
        bench.channel.held = True
        first = start(bench.put(b"other"))
        await turn()
        removal = start(bench.put(b"k", delete=True))
        await turn()
        newer(bench, row_of(0, (1, 2), (1,), partition_epoch=2))
        two = PlayedFollower(bench)
        (answer,) = await two.open(0)
        assert answer.refusal.HasField("table_behind")
        bench.channel.release()
        await first
        await removal
        (answer,) = await two.open(0)
        assert answer.take_snapshot  # it is below the floor

    with_rows(tmp_path, use, row_of(0))


# --- rule 4: taking over -----------------------------------------------------------------------


def test_partition_is_served_only_when_all_in_sync_hold_its_epoch(tmp_path: Path) -> None:
    async def use(bench: Bench) -> None:
        assert bench.ready == []
        copy = bench.store.read_copies([0])[0]
        assert copy.complete_through == START
        assert copy.epochs.history == ((EPOCH, 0),)
        for refused in (bench.put(b"k"), bench.get(b"k")):
            answer = await refused
            assert isinstance(answer.refusals[0], PartitionOfflineError)
        two, three = PlayedFollower(bench, 2), PlayedFollower(bench, 3)
        await two.join(0)
        assert bench.ready == []
        await three.join(0)
        assert bench.ready == [Adoption(0, EPOCH)]

    with_rows(tmp_path, use, THREE)


def test_takeover_leaves_out_who_does_not_come_in_time(tmp_path: Path) -> None:
    async def use(bench: Bench) -> None:
        two = PlayedFollower(bench)
        await two.join(0)
        await tick(bench, 0.9)
        assert not bench.coordinator.calls
        await tick(bench, 0.2)
        assert proposed(bench).in_sync == (ME, F2)
        assert bench.ready == []  # until it is committed
        newer(bench, row_of(0, (1, 2, 3), (1, 2), partition_epoch=2), min_in_sync=2)
        assert bench.ready == [Adoption(0, EPOCH)]

    with_rows(tmp_path, use, THREE, min_in_sync=2)


def test_takeover_never_proposes_less_than_the_minimum(tmp_path: Path) -> None:
    async def use(bench: Bench) -> None:
        await tick(bench, 1.1)
        await tick(bench, 5.0)
        assert not bench.coordinator.calls

    with_rows(tmp_path, use, row_of(0, (1, 2, 3), (1, 2)), min_in_sync=2, fenced=(2,))


def test_takeover_brings_in_another_for_the_one_that_is_missing(tmp_path: Path) -> None:
    async def use(bench: Bench) -> None:
        three = PlayedFollower(bench, 3)
        await three.join(0)
        await tick(bench, 1.1)
        await tick(bench)
        bench.now += 0.3
        await tick(bench)
        assert set(proposed(bench).in_sync) == {ME, F3}
        newer(bench, row_of(0, (1, 2, 3), (1, 3), partition_epoch=2), min_in_sync=2)
        assert bench.ready == [Adoption(0, EPOCH)]

    with_rows(tmp_path, use, row_of(0, (1, 2, 3), (1, 2)), min_in_sync=2, fenced=(2,))


def test_adoption_of_a_copy_with_a_tail_is_no_clean_beginning(tmp_path: Path) -> None:
    """Its tail is the truth now: who has the common past only has to pull it."""

    async def use(bench: Bench) -> None:
        old = first_sequence(1)
        epochs = records.PartitionEpochs(primary_epoch=1, history=(records.EpochStart(1, 0),))
        bench.take_table(table_of(TWO))
        import numpy as np

        (progress,) = records.encode_progress(
            np.array([old + 2], np.uint64), np.zeros(1, np.uint64), 2
        )
        await bench.writer.submit(
            (
                (
                    2,
                    [records.epochs_key(0), records.progress_key(0)],
                    [records.encode_epochs(epochs), progress],
                ),
            ),
            1,
            0,
        )
        await bench.replicator.adopt([Adoption(0, EPOCH)])
        (answer,) = await PlayedFollower(bench).open(0, complete_through=old + 2, history=[(1, 0)])
        assert (answer.common_point, answer.stream_from) == (old + 2, START)
        assert bench.store.read_copies([0])[0].state == 0

    with_engine(tmp_path, use, lead=False)


# --- rule 5: who is in sync --------------------------------------------------------------------


def test_follower_that_does_not_answer_is_left_out_before_its_write_is(tmp_path: Path) -> None:
    async def use(bench: Bench) -> None:
        two = PlayedFollower(bench)
        await two.join(0)
        write = start(bench.put(b"k"))
        await turn()
        await tick(bench, 1.1)
        assert proposed(bench).in_sync == (ME,)
        assert not await answered(write)
        newer(bench, row_of(0, (1, 2), (1,), partition_epoch=2))
        assert await answered(write)

    with_rows(tmp_path, use, TWO)


async def wait(bench: Bench, seconds: float) -> None:
    """Let time pass in which the node runs."""
    for _ in range(round(seconds / 0.1)):
        await tick(bench, 0.1)


def test_silent_follower_is_left_out_of_all_and_added_when_it_answers(tmp_path: Path) -> None:
    """Not only of what is written: else a write to each partition would wait for it once."""

    async def use(bench: Bench) -> None:
        two = PlayedFollower(bench)
        await two.join(0, 1)
        await wait(bench, 3.0)  # nothing is asked of it
        assert not bench.coordinator.calls
        write = start(bench.put(b"k"))
        await wait(bench, 0.9)
        assert not bench.coordinator.calls
        await wait(bench, 0.3)
        changes, done = bench.coordinator.calls[-1]
        assert [(c.partition_id, c.in_sync) for c in changes] == [(0, (ME,)), (1, (ME,))]
        newer(bench, *(row_of(p, (1, 2), (1,), partition_epoch=2) for p in (0, 1)))
        done.set_result(frozenset())
        assert await answered(write)
        await wait(bench, 1.0)
        assert len(bench.coordinator.calls) == 1  # its stream still stands, and it holds all of 1
        await two.acknowledge()
        await wait(bench, 0.3)
        changes, _ = bench.coordinator.calls[-1]
        assert [(c.partition_id, c.in_sync) for c in changes] == [(0, (ME, F2)), (1, (ME, F2))]

    with_rows(tmp_path, use, TWO, row_of(1, (1, 2)))


def test_follower_without_a_stream_is_left_out_before_anything_waits(tmp_path: Path) -> None:
    async def use(bench: Bench) -> None:
        two = PlayedFollower(bench)
        await two.join(0)
        await two.leave()
        await tick(bench, 5.0)  # this node stood still: that is no silence of others
        assert not bench.coordinator.calls
        await wait(bench, 0.6)
        assert not bench.coordinator.calls
        await wait(bench, 0.6)
        assert proposed(bench).in_sync == (ME,)

    with_rows(tmp_path, use, TWO)


def test_follower_that_has_all_is_added_and_required_from_the_proposal_on(tmp_path: Path) -> None:
    async def use(bench: Bench) -> None:
        await bench.put(b"k")
        two = PlayedFollower(bench)
        await two.open(0, complete_through=START, history=[(EPOCH, 0)])
        await two.position(0, sequence=START)  # it lacks a write that is complete
        await tick(bench)
        assert not bench.coordinator.calls
        await two.position(0, sequence=START + 1)
        await tick(bench)
        assert proposed(bench).in_sync == (ME, F2)
        write = start(bench.put(b"l"))
        assert not await answered(write)
        bench.coordinator.calls[-1][1].set_exception(UnknownFateError(reason="cut off"))
        assert not await answered(write)  # it may be committed
        newer(bench, row_of(0, (1, 2), (1,), partition_epoch=2), fenced=(2,))
        await tick(bench)
        assert await answered(write)

    with_rows(tmp_path, use, row_of(0, (1, 2), (1,)))


def test_follower_that_says_it_leaves_is_left_out_at_once(tmp_path: Path) -> None:
    async def use(bench: Bench) -> None:
        two, three = PlayedFollower(bench, 2), PlayedFollower(bench, 3)
        await two.join(0, 1)
        await three.join(0)
        write = start(bench.put(b"k"))
        await turn()
        await three.acknowledge()
        two.end.send(LEAVES)
        await turn()
        await tick(bench)
        assert (proposed(bench).partition_id, proposed(bench).in_sync) == (0, (ME, F3))
        # Where the minimum needs it, new writes are refused instead of kept waiting.
        answer = await bench.put(b"k", partition_id=1)
        assert isinstance(answer.refusals[1], NotEnoughReplicasError)
        newer(
            bench,
            row_of(0, (1, 2, 3), (1, 3), partition_epoch=2),
            row_of(1, (1, 2, 3), (1, 2)),
            min_in_sync=2,
        )
        assert await answered(write)

    with_rows(tmp_path, use, THREE, row_of(1, (1, 2, 3), (1, 2)), min_in_sync=2)


def test_follower_that_leaves_counts_until_it_is_out_and_is_not_taken_in_again(
    tmp_path: Path,
) -> None:
    async def use(bench: Bench) -> None:
        two, three = PlayedFollower(bench, 2), PlayedFollower(bench, 3)
        await two.join(0)
        await three.join(0)
        two.end.send(LEAVES)
        write = start(bench.put(b"k"))
        await turn()
        await three.acknowledge()
        assert not write.done()
        await two.acknowledge()
        assert await answered(write)
        await tick(bench)
        bench.coordinator.calls[-1][1].set_result(frozenset())
        newer(bench, row_of(0, (1, 2, 3), (1, 3), partition_epoch=2), min_in_sync=2)
        await tick(bench, 0.3)
        await tick(bench, 0.3)
        assert len(bench.coordinator.calls) == 1
        await two.leave()
        write = start(bench.put(b"k"))
        await turn()
        await three.acknowledge()
        assert await answered(write)

    with_rows(tmp_path, use, THREE, min_in_sync=2)


def test_proposal_of_unknown_fate_is_settled_by_another(tmp_path: Path) -> None:
    """Who was perhaps added, and is gone, is left out by a change that keeps the row as it is."""

    async def use(bench: Bench) -> None:
        two = PlayedFollower(bench)
        await two.join(0)
        await tick(bench)
        assert proposed(bench).in_sync == (ME, F2)
        bench.coordinator.calls[-1][1].set_exception(UnknownFateError(reason="cut off"))
        await two.leave()
        write = start(bench.put(b"k"))
        await turn()
        await tick(bench, 1.1)
        assert len(bench.coordinator.calls) == 2
        assert proposed(bench).in_sync == (ME,)
        bench.coordinator.calls[-1][1].set_result(frozenset((0,)))
        assert not await answered(write)  # that the second was rejected says nothing of the first
        newer(bench, row_of(0, (1, 2), (1,), partition_epoch=2))
        assert await answered(write)

    with_rows(tmp_path, use, row_of(0, (1, 2), (1,)))


def test_rejected_proposal_requires_nobody(tmp_path: Path) -> None:
    async def use(bench: Bench) -> None:
        two = PlayedFollower(bench)
        await two.join(0)
        await tick(bench)
        bench.coordinator.calls[-1][1].set_result(frozenset((0,)))
        await two.leave()
        await tick(bench)
        assert await answered(start(bench.put(b"k")))

    with_rows(tmp_path, use, row_of(0, (1, 2), (1,)))


def test_writes_are_refused_while_too_few_live_replicas_are_in_sync(tmp_path: Path) -> None:
    async def use(bench: Bench) -> None:
        two = PlayedFollower(bench)
        await two.join(0)
        assert bench.ready
        newer(bench, row_of(0, (1, 2, 3), (1, 2)), row_of(1), min_in_sync=2, fenced=(2,))
        last = int(bench.primaries.last_sequences[0])
        answer = await bench.put(b"k")
        error = answer.refusals[0]
        assert isinstance(error, NotEnoughReplicasError)
        assert (error.in_sync, error.min_in_sync) == (1, 2)
        assert int(bench.primaries.last_sequences[0]) == last  # nothing was sequenced
        assert (await bench.get(b"k")).missing == [0]  # reads go on
        assert not (await bench.put(b"k", partition_id=1)).refusals

    with_rows(tmp_path, use, row_of(0, (1, 2, 3), (1, 2)), row_of(1), min_in_sync=2)


# --- rules 6, 7, 8: hand-overs -----------------------------------------------------------------


def test_primary_cut_off_from_live_replicas_hands_over_to_one(tmp_path: Path) -> None:
    async def use(bench: Bench) -> None:
        await tick(bench)
        await tick(bench, 1.9)
        assert not bench.coordinator.calls
        await tick(bench, 0.2)
        assert proposed(bench).hand_over_to == F2
        assert proposed(bench).in_sync == (ME, F2)

    with_rows(tmp_path, use, row_of(0, (1, 2, 3), (1, 2)), min_in_sync=2)


def test_hand_over_waits_for_what_is_in_flight_and_serves_nothing_meanwhile(
    tmp_path: Path,
) -> None:
    async def use(bench: Bench) -> None:
        two = PlayedFollower(bench)
        await two.join(0)
        write = start(bench.put(b"k"))
        await turn()
        newer(bench, row_of(0, (1, 2), partition_epoch=2, wanted=F2))
        await tick(bench)
        for refused in (bench.put(b"l"), bench.get(b"other")):
            answer = await refused
            assert isinstance(answer.refusals[0], PartitionOfflineError)
        scan = await bench.scan()
        assert isinstance(scan.refusals[0], PartitionOfflineError)
        assert not bench.coordinator.calls
        await two.acknowledge()
        assert await answered(write)  # it is on all replicas
        await tick(bench)
        assert proposed(bench) == RowChange(
            partition_id=0,
            primary_epoch=EPOCH,
            partition_epoch=2,
            in_sync=(ME, F2),
            hand_over_to=F2,
        )

    with_rows(tmp_path, use, TWO)


def test_read_under_which_a_hand_over_begins_is_refused(tmp_path: Path) -> None:
    async def use(bench: Bench) -> None:
        two = PlayedFollower(bench)
        await two.join(0)
        newer(bench, row_of(0, (1, 2), partition_epoch=2, wanted=F2))
        bench.store.after_read = bench.replicator.tick
        with pytest.raises(LeaseExpiredError):
            await bench.get(b"k")

    with_rows(tmp_path, use, TWO)


@pytest.mark.parametrize("fate", ["unknown", "rejected"])
def test_hand_over_proposed_serves_again_only_on_a_newer_row(tmp_path: Path, fate: str) -> None:
    async def use(bench: Bench) -> None:
        two = PlayedFollower(bench)
        await two.join(0)
        newer(bench, row_of(0, (1, 2), partition_epoch=2, wanted=F2))
        await tick(bench)
        assert proposed(bench).hand_over_to == F2
        outcome = bench.coordinator.calls[-1][1]
        if fate == "unknown":
            outcome.set_exception(UnknownFateError(reason="cut off"))
        else:
            outcome.set_result(frozenset((0,)))
        for _ in range(5):
            await tick(bench, 10.0)
            assert (await bench.get(b"k")).refusals
        assert len(bench.coordinator.calls) == 2  # it is proposed again
        # The wanted one has died: a change of nothing is proposed, for its newer row.
        newer(bench, row_of(0, (1, 2), partition_epoch=2, wanted=F2), fenced=(2,))
        bench.coordinator.calls[-1][1].set_exception(UnknownFateError(reason="cut off"))
        await turn()
        await tick(bench, 1.0)
        await tick(bench)
        assert (proposed(bench).hand_over_to, proposed(bench).in_sync) == (0, (ME, F2))
        assert (await bench.get(b"k")).refusals
        newer(bench, row_of(0, (1, 2), (1,), partition_epoch=3), fenced=(2,))
        assert not (await bench.get(b"k")).refusals

    with_rows(tmp_path, use, TWO)


def test_hand_over_that_was_not_proposed_is_given_up_if_it_cannot_drain(tmp_path: Path) -> None:
    async def use(bench: Bench) -> None:
        two = PlayedFollower(bench)
        await two.join(0)
        write = start(bench.put(b"k"))
        await turn()
        newer(bench, row_of(0, (1, 2, 3), (1, 2), partition_epoch=2, wanted=F2), min_in_sync=2)
        await tick(bench)
        assert (await bench.get(b"other")).refusals
        await tick(bench, 1.1)
        assert not (await bench.get(b"other")).refusals
        await tick(bench, 0.3)  # nor is it begun again while that write cannot be completed
        assert not (await bench.get(b"other")).refusals
        assert not bench.coordinator.calls
        await two.acknowledge()
        await tick(bench, 0.1)
        await tick(bench, 0.1)
        assert proposed(bench).hand_over_to == F2
        await write

    with_rows(tmp_path, use, row_of(0, (1, 2, 3), (1, 2)), min_in_sync=2)


def test_removed_primary_hands_over_once_all_added_are_in_sync(tmp_path: Path) -> None:
    async def use(bench: Bench) -> None:
        two = PlayedFollower(bench)
        await two.join(0)
        moving = row_of(0, (2, 1), (1,), partition_epoch=2, adding=(2,), removing=(1,))
        newer(bench, moving)
        await tick(bench)
        assert proposed(bench).hand_over_to == 0
        newer(bench, replace(moving, in_sync=(ME, F2), partition_epoch=3), paused=True)
        await tick(bench, 1.0)
        assert not (await bench.get(b"k")).refusals  # not while moves are paused
        newer(bench, replace(moving, in_sync=(ME, F2), partition_epoch=3))
        bench.coordinator.calls[-1][1].set_result(frozenset())
        await turn()
        await tick(bench, 1.0)
        await tick(bench)
        assert proposed(bench).hand_over_to == F2

    with_rows(tmp_path, use, row_of(0, (1, 2), (1,)))


def test_own_commit_that_fails_after_it_was_sent_hands_over_and_leaves(tmp_path: Path) -> None:
    async def use(bench: Bench) -> None:
        two = PlayedFollower(bench)
        await two.join(0)
        bench.channel.held = True
        failing = start(bench.put(b"k", value=b"lost here"))
        await turn()
        queued = start(bench.put(b"l"))
        beside = start(bench.put(b"l", partition_id=1))
        await turn()
        bench.channel.failing = {0: "no room"}
        bench.channel.release()
        with pytest.raises(UnknownFateError):
            await failing
        with pytest.raises(StorageFullError):
            await queued  # never sent anywhere
        await beside
        two.take()
        assert [list(batch.keys) for batch in two.batches] == [[b"\0\0\0k"]]
        assert int(bench.copies.complete_through[0]) == START
        assert bench.store.read_copies([0])[0].complete_through == START
        await tick(bench)
        assert (proposed(bench).hand_over_to, proposed(bench).in_sync) == (F2, (F2,))
        assert (await bench.get(b"k")).refusals

    with_rows(tmp_path, use, TWO, row_of(1))


def test_own_commit_that_fails_with_nobody_else_in_sync_begins_a_new_epoch(tmp_path: Path) -> None:
    """The follower that has what was not stored here has a tail from then on."""

    async def use(bench: Bench) -> None:
        two = PlayedFollower(bench)
        await two.open(0)
        bench.channel.failing = {0: "no room"}
        with pytest.raises(UnknownFateError):
            await bench.put(b"k")
        await tick(bench)
        assert (proposed(bench).hand_over_to, proposed(bench).in_sync) == (ME, (ME,))
        newer(bench, row_of(0, (1, 2), (1,), epoch=EPOCH + 1, partition_epoch=2))
        await bench.replicator.adopt([Adoption(0, EPOCH + 1)])
        assert (await bench.get(b"k")).missing == [0]
        (answer,) = await two.open(
            0, epoch=EPOCH + 1, complete_through=START + 1, history=[(EPOCH, 0)]
        )
        assert answer.common_point == START

    with_rows(tmp_path, use, row_of(0, (1, 2), (1,)))


def test_own_commit_that_fails_unsent_is_only_refused(tmp_path: Path) -> None:
    async def use(bench: Bench) -> None:
        bench.channel.failing = {0: "no room"}
        with pytest.raises(StorageFullError):
            await bench.put(b"k")
        await bench.put(b"l")
        assert (await bench.get(b"k", b"l")).missing == [0]

    with_rows(tmp_path, use, row_of(0))


# --- rules 13 and 14: expiry, tombstones, passes -----------------------------------------------


def test_delete_and_expiry_of_a_replicated_partition_leave_tombstones(tmp_path: Path) -> None:
    async def use(bench: Bench) -> None:
        two = PlayedFollower(bench)
        await two.join(0)

        async def done(call: Coroutine[Any, Any, WriteAnswer]) -> None:
            task = start(call)
            await turn()
            await two.acknowledge()
            await task

        await done(bench.put(b"a"))
        await done(bench.put(b"b", ttl_ms=50))
        await done(bench.put(b"a", delete=True))
        bench.clock.ms += 50
        read = start(bench.get(b"b"))
        assert not await answered(read)
        await two.acknowledge()
        assert (await read).missing == [0]
        for key in (b"\0\0\0a", b"\0\0\0b"):
            record = records.decode_record(bench.store.get(key) or b"")
            assert record.tombstone
        assert int(bench.copies.purge_floors[0]) == 0
        assert (await bench.scan()).keys == []
        assert (await bench.get(b"a")).missing == [0]
        assert (await bench.put(b"a", delete=True)).absent == [0]

    with_rows(tmp_path, use, TWO)


def test_tombstone_is_purged_late_and_only_below_what_every_follower_and_pass_has(
    tmp_path: Path,
) -> None:
    async def use(bench: Bench) -> None:
        two, three = PlayedFollower(bench, 2), PlayedFollower(bench, 3)
        await two.join(0)
        write = start(bench.put(b"a"))
        await turn()
        await two.acknowledge()
        await write
        removal = start(bench.put(b"a", delete=True))
        await turn()
        await two.acknowledge()
        await removal
        (answer,) = await three.open(0, complete_through=START, history=[(EPOCH, 0)])
        assert answer.common_point == START
        await bench.engine.reclaim_step(100)
        assert bench.store.get(b"\0\0\0a") is not None  # too young
        bench.clock.ms += 600_000
        await bench.engine.reclaim_step(100)
        assert bench.store.get(b"\0\0\0a") is not None  # a pass needs it
        await three.position(0, sequence=START + 2)
        await two.open(0)  # a required follower has said nothing
        await bench.engine.reclaim_step(100)
        assert bench.store.get(b"\0\0\0a") is not None
        await two.position(0, sequence=START + 2)
        await bench.engine.reclaim_step(100)
        assert bench.store.get(b"\0\0\0a") is None
        assert bench.store.read_copies([0])[0].purge_floor == START + 2
        # Who is below the floor takes a snapshot; one in sync leaves in_sync first.
        (answer,) = await three.open(0, complete_through=START, history=[(EPOCH, 0)])
        assert answer.take_snapshot
        await tick(bench)
        two.take()
        (floors,) = [m.floors for m in two.others if m.WhichOneof("kind") == "floors"]
        assert (list(floors.partition_ids), list(floors.sequences)) == ([0], [START + 2])
        (answer,) = await two.open(0, complete_through=START, history=[(EPOCH, 0)])
        assert answer.refusal.HasField("table_behind")
        await tick(bench)
        assert proposed(bench).in_sync == (ME,)

    with_rows(tmp_path, use, row_of(0, (1, 2, 3), (1, 2)))


def test_rule_14_tombstone_stays_while_a_required_follower_is_away(tmp_path: Path) -> None:
    async def use(bench: Bench) -> None:
        two = PlayedFollower(bench)
        await two.join(0)
        for delete in (False, True):
            write = start(bench.put(b"a", delete=delete))
            await turn()
            await two.acknowledge()
            await write
        bench.clock.ms += 600_000
        await two.leave()
        await bench.engine.reclaim_step(100)
        assert bench.store.get(b"\0\0\0a") is not None
        await PlayedFollower(bench).join(0)
        await bench.engine.reclaim_step(100)
        assert bench.store.get(b"\0\0\0a") is None

    with_rows(tmp_path, use, TWO)


def page_request(**changes: Any) -> wire.ReadPageRequest:
    request = wire.ReadPageRequest(cluster_id="c", partition_id=0, primary_epoch=EPOCH)
    for name, value in changes.items():
        setattr(request, name, value)
    return request


@pytest.mark.parametrize("journal", [True, False])
def test_page_of_a_pass_has_what_is_above_its_start_up_to_its_bound(
    tmp_path: Path, journal: bool
) -> None:
    async def use(bench: Bench) -> None:
        await bench.put(b"a", b"b", b"c")
        await bench.put(b"b")
        if not journal:
            bench.journal.reset(0, START + 100)
        page = await bench.replicator.read_page(page_request(after_sequence=START + 2))
        assert list(page.keys) == [b"\0b", b"\0c"]
        assert (page.bound, page.end) == (START + 4, True)
        page = await bench.replicator.read_page(
            page_request(after_sequence=START + 2, after_key=b"\0b")
        )
        assert list(page.keys) == [b"\0c"]

    with_rows(tmp_path, use, row_of(0, (1, 2), (1,)))


def test_page_waits_until_the_own_copy_reaches_where_the_stream_begins(tmp_path: Path) -> None:
    async def use(bench: Bench) -> None:
        bench.channel.held = True
        write = start(bench.put(b"a"))
        await turn()
        page = start(bench.replicator.read_page(page_request(reach=START + 1)))
        assert not await answered(page)
        bench.channel.release()
        assert list((await page).keys) == [b"\0a"]
        await write
        with pytest.raises(UnavailableError):
            await bench.replicator.read_page(page_request(reach=START + 2))
        with pytest.raises(NotPrimaryError):
            await bench.replicator.read_page(page_request(primary_epoch=EPOCH - 1))
        with pytest.raises(TableBehindError):
            await bench.replicator.read_page(page_request(primary_epoch=EPOCH + 1))

    with_rows(tmp_path, use, row_of(0, (1, 2), (1,)))


def test_pages_go_on_where_the_last_one_ended(tmp_path: Path) -> None:
    async def use(bench: Bench) -> None:
        keys = [b"%03d" % n for n in range(50)]
        await bench.put(*keys)
        found: list[bytes] = []
        after, pages = b"", 0
        while True:
            page = await bench.replicator.read_page(page_request(after_key=after, snapshot=True))
            found += page.keys
            pages += 1
            if page.end:
                break
            after = page.last_key
        assert (found, pages > 5) == ([b"\0" + key for key in keys], True)
        asked = wire.ReadKeysRequest(
            cluster_id="c",
            partition_id=0,
            primary_epoch=EPOCH,
            keys=[b"\x00001", b"\x00absent", b"\x00002"],
        )
        page = await bench.replicator.read_keys(asked)
        assert [bool(record) for record in page.records] == [True, False, True]

    with_rows(tmp_path, use, row_of(0, (1, 2), (1,)), limits=Limits(page_rows=7))


def test_group_of_an_epoch_that_is_over_answers_nothing_in_the_next(tmp_path: Path) -> None:
    """Registered anew, the same process leads on: what was pending is what the store holds."""

    async def use(bench: Bench) -> None:
        two = PlayedFollower(bench)
        await two.join(0)
        write = start(bench.put(b"k"))
        await turn()
        row = row_of(0, (1, 2), epoch=EPOCH + 1, partition_epoch=2)
        newer(bench, row)
        await bench.replicator.adopt([Adoption(0, EPOCH + 1)])
        with pytest.raises(UnknownFateError):
            await write
        await two.join(0, epoch=EPOCH + 1)
        assert bench.ready[-1] == Adoption(0, EPOCH + 1)
        assert (await bench.get(b"k")).values == [b"v"]
        history = bench.store.read_copies([0])[0].epochs.history
        assert history[-1] == (EPOCH + 1, START + 1)

    with_rows(tmp_path, use, TWO)
