"""The primary's promises: what is complete, and who may follow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from koinon_node.config import Limits
from koinon_node.core.formats import records
from koinon_node.core.membership.assignment import Adoption
from koinon_node.partition.batches import Durability, WriteBatch
from koinon_node.storage.sizes import SizeScan
from koinon_proto.contract.cluster_errors import NodeFencedError
from koinon_proto.contract.errors import (
    KoinonError,
    LeaseExpiredError,
    NotPrimaryError,
    TableBehindError,
    UnknownFateError,
    WrongClusterError,
)
from koinon_proto.contract.table import first_sequence
from tests.node.kit.held_writer import EPOCH, Bench, row_of
from tests.node.kit.played_follower import PlayedFollower, joined, turn
from tests.node.kit.primary import START, THREE, TWO, answered, newer, start, tick, with_rows

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
        two = await joined(bench, 0)
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
        two = await joined(bench, 0)
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
        two = await joined(bench, 0)
        bench.channel.held = True
        write = start(bench.put(b"k"))
        await turn()
        await two.acknowledge()
        await two.leave()
        bench.channel.release()
        assert not await answered(write)
        await joined(bench, 0)
        assert await answered(write)

    with_rows(tmp_path, use, TWO)


def test_write_at_durability_primary_waits_for_nobody_but_reads_of_it_do(tmp_path: Path) -> None:
    async def use(bench: Bench) -> None:
        two = await joined(bench, 0)
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
        two = await joined(bench, 0)
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
        two = await joined(bench, 0)
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
        # and of one group, each partition by itself, once the follower has been silent for a moment
        both = [start(bench.put(b"l")), start(bench.put(b"l", partition_id=1))]
        await turn()
        await three.acknowledge()
        assert not await answered(both[1])
        for _ in range(3):
            await tick(bench, 0.25)
        assert await answered(both[1])
        assert not both[0].done()
        assert not bench.coordinator.calls  # no follower is late yet
        for task in (stuck, both[0]):
            task.cancel()

    with_rows(tmp_path, use, row_of(0, (1, 2, 3), (1, 2)), row_of(1, (1, 3)), min_in_sync=2)


@pytest.mark.parametrize("lost", [False, True])
def test_group_is_stuck_where_a_follower_has_lost_its_stream_and_not_where_one_is_slow(
    tmp_path: Path, lost: bool
) -> None:
    async def use(bench: Bench) -> None:
        two, three = PlayedFollower(bench, 2), PlayedFollower(bench, 3)
        await two.join(0)
        await three.join(1)
        await tick(bench)
        both = [start(bench.put(b"l")), start(bench.put(b"l", partition_id=1))]
        await turn()
        await three.acknowledge()
        if lost:
            two.end.close()
            await turn()
        for _ in range(4):
            bench.replicator.leading.heard[:] = True  # acknowledges others meanwhile
            await tick(bench, 0.1)
        assert await answered(both[1]) is lost
        if not lost:
            two.take()
            await two.acknowledge()
            assert await answered(both[1])
        both[0].cancel()

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
        two = await joined(bench, 0, 1)
        batch = WriteBatch(
            table_version=1,
            keys=[b"a", b"b", b"c"],
            values=[b"v"] * 3,
            partition_ids=np.array([0, 1, 0], np.uint32),
        )
        write = start(bench.engine.writes.write(batch))
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


@pytest.mark.parametrize("limits", [Limits(step_rows=1), None], ids=["two steps", "one group"])
def test_part_that_was_complete_before_its_partition_was_handed_on_is_acknowledged(
    tmp_path: Path, limits: Limits | None
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
        write = start(bench.engine.writes.write(batch))
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

    with_rows(tmp_path, use, TWO, row_of(1, (1, 3)), limits=limits)


def test_write_not_complete_in_time_is_unknown_and_stays_pending(tmp_path: Path) -> None:
    async def use(bench: Bench) -> None:
        two = await joined(bench, 0)
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
        two = await joined(bench, 0)
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
        two = await joined(bench, 0)
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
        first = await joined(bench, 0)
        second = PlayedFollower(bench)
        await turn()
        assert first.end.ended
        write = start(bench.put(b"k"))
        await turn()
        await second.join(0)
        assert await answered(write)

    with_rows(tmp_path, use, TWO)


@pytest.mark.parametrize("stranger", ["", "made up"])
def test_stream_of_a_stranger_does_not_end_that_of_the_node(tmp_path: Path, stranger: str) -> None:
    async def use(bench: Bench) -> None:
        newer(bench, TWO, registration_ids={2: "its own"})
        first = PlayedFollower(bench, registration_id="its own")
        await first.join(0)
        other = PlayedFollower(bench, registration_id=stranger)
        with pytest.raises(NodeFencedError):
            await other.serving
        write = start(bench.put(b"k"))
        await turn()
        await first.acknowledge()
        assert await answered(write)
        again = PlayedFollower(bench, registration_id="its own")
        await turn()
        assert first.end.ended
        assert not again.serving.done()

    with_rows(tmp_path, use, TWO)


def test_follower_registered_anew_is_cut_off(tmp_path: Path) -> None:
    async def use(bench: Bench) -> None:
        two = await joined(bench, 0)
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
        two = await joined(bench, 0)
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
