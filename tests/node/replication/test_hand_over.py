"""Hand-overs: of a primary that is cut off, leaves, or cannot commit (rules 6 to 8)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from koinon_node.core.membership.assignment import Adoption
from koinon_node.core.writes.write_decisions import SPARE_SEQUENCES
from koinon_node.ports import RowChange
from koinon_proto.contract.errors import (
    LeaseExpiredError,
    PartitionOfflineError,
    StorageFullError,
    UnavailableError,
    UnknownFateError,
)
from koinon_proto.contract.table import PartitionRow, first_sequence
from koinon_proto.v1 import replication_pb2 as wire
from tests.node.kit.held_writer import EPOCH, F2, F3, ME, Bench, row_of
from tests.node.kit.played_follower import PlayedFollower, joined, turn
from tests.node.kit.primary import START, TWO, answered, newer, proposed, start, tick, with_rows


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
        two = await joined(bench, 0)
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
        await joined(bench, 0)
        newer(bench, row_of(0, (1, 2), partition_epoch=2, wanted=F2))
        bench.store.after_read = bench.replicator.tick
        with pytest.raises(LeaseExpiredError):
            await bench.get(b"k")

    with_rows(tmp_path, use, TWO)


@pytest.mark.parametrize("fate", ["unknown", "rejected"])
def test_hand_over_proposed_serves_again_only_on_a_newer_row(tmp_path: Path, fate: str) -> None:
    async def use(bench: Bench) -> None:
        await joined(bench, 0)
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
        two = await joined(bench, 0)
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
        await joined(bench, 0)
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


def test_removed_primary_hands_over_to_another_if_the_wanted_one_is_down(tmp_path: Path) -> None:
    """The preferred replica was dead before the move began, and may never come back."""

    async def use(bench: Bench) -> None:
        await joined(bench, 0)
        moving = row_of(0, (3, 2, 1), (1, 2), partition_epoch=2, removing=(1,), wanted=F3)
        newer(bench, moving, fenced=(3,))
        await tick(bench, 1.0)
        await tick(bench)
        assert proposed(bench).hand_over_to == F2

    with_rows(tmp_path, use, row_of(0, (3, 2, 1), (1, 2)), fenced=(3,))


def test_own_commit_that_fails_after_it_was_sent_hands_over_and_leaves(tmp_path: Path) -> None:
    async def use(bench: Bench) -> None:
        two = await joined(bench, 0)
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


def test_purge_without_room_leaves_its_partition_and_what_is_queued_behind_it(
    tmp_path: Path,
) -> None:
    """It is in the group of a write that was sent and stored; nothing builds on the purge."""

    async def use(bench: Bench) -> None:
        two = await joined(bench, 0)
        bench.channel.held = True
        first = start(bench.put(b"k"))
        await turn()
        beside = start(bench.put(b"l"))
        await turn()
        purge = bench.replicator.submit_purge(np.array([0], np.uint32), [b"\0\0\0old"], [])
        bench.channel.commit_one()
        await turn()
        behind = start(bench.put(b"m"))
        await turn()
        bench.channel.failing = {1: "no room"}  # of [the put of l, the purge]
        bench.channel.release()
        with pytest.raises(StorageFullError):
            await purge
        for write in (first, beside, behind):
            await two.acknowledge()
            assert await answered(write)
            write.result()
        await tick(bench)
        assert not bench.coordinator.calls
        assert not (await bench.get(b"l")).missing
        assert int(bench.copies.complete_through[0]) == START + 3

    with_rows(tmp_path, use, TWO)


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


def test_own_commit_that_fails_unsent_beside_one_that_was_sent_breaks_nothing_off(
    tmp_path: Path,
) -> None:
    async def use(bench: Bench) -> None:
        two = await joined(bench, 0)
        sent = start(bench.put(b"k"))
        unsent = start(bench.put(b"k", partition_id=1))  # of the same group
        bench.channel.failing = {1: "no room"}
        await turn()
        with pytest.raises(StorageFullError):
            await unsent
        await two.acknowledge()
        await sent
        await tick(bench)
        assert not bench.coordinator.calls
        assert not (await bench.get(b"k")).refusals

    with_rows(tmp_path, use, TWO, row_of(1))


def test_follower_joins_after_an_own_commit_that_failed_unsent(tmp_path: Path) -> None:
    """It need not wait for the partition's next write, nor for more than room for one entry."""

    async def use(bench: Bench) -> None:
        two = PlayedFollower(bench)
        await bench.put(b"a")
        bench.channel.failing = {0: "no room"}
        with pytest.raises(StorageFullError):
            await bench.put(b"k")
        (opened,) = await two.open(0)
        assert opened.stream_from == START + 2
        request = wire.ReadPageRequest(
            cluster_id="c", partition_id=0, primary_epoch=EPOCH, reach=opened.stream_from
        )
        bench.channel.failing = {0: "no room"}
        with pytest.raises(StorageFullError):
            await bench.replicator.pages.read_page(request)
        page = await bench.replicator.pages.read_page(request)
        assert (page.bound, list(page.keys)) == (START + 2, [b"\0a"])
        assert bench.store.read_copies([0])[0].complete_through == START + 2
        await two.position(0, sequence=page.bound)
        await bench.put(b"k")
        two.take()
        assert [(*batch.previous, *batch.last) for batch in two.batches] == [(START + 2, START + 3)]

    with_rows(tmp_path, use, row_of(0, (1, 2), (1,)))


def test_gap_of_a_commit_that_was_sent_is_never_filled(tmp_path: Path) -> None:
    async def use(bench: Bench) -> None:
        two = PlayedFollower(bench)
        await two.open(0)
        bench.channel.held = True
        failing = start(bench.put(b"k"))
        await turn()
        request = wire.ReadPageRequest(
            cluster_id="c", partition_id=0, primary_epoch=EPOCH, reach=START + 1
        )
        filling = start(bench.replicator.pages.fill_gap(0))
        asking = start(bench.replicator.pages.read_page(request))
        await turn()
        bench.channel.failing = {0: "no room"}
        bench.channel.release()
        with pytest.raises(UnknownFateError):
            await failing
        with pytest.raises(StorageFullError):
            await filling
        with pytest.raises(UnavailableError):
            await asking
        assert bench.store.read_copies([0])[0].complete_through == START

    with_rows(tmp_path, use, row_of(0, (1, 2), (1,)))


# --- an epoch whose sequences are used up ------------------------------------------------------


@pytest.mark.parametrize("row", [row_of(0), TWO], ids=["alone", "two replicas"])
def test_partition_with_few_sequences_left_goes_on_under_a_new_epoch(
    tmp_path: Path, row: PartitionRow
) -> None:
    async def use(bench: Bench) -> None:
        two = PlayedFollower(bench)
        if row is TWO:
            await two.join(0)
        bench.primaries.last_sequences[0] += np.uint64((1 << 40) - SPARE_SEQUENCES - 2)
        for key, due in ((b"a", False), (b"b", True)):
            write = start(bench.put(key))
            await turn()
            if row is TWO:
                await two.acknowledge()
            await write
            await tick(bench)
            assert bool(bench.coordinator.calls) is due
        assert (proposed(bench).hand_over_to, proposed(bench).in_sync) == (ME, row.in_sync)
        assert isinstance((await bench.put(b"c")).refusals[0], PartitionOfflineError)
        newer(bench, replace(row, primary_epoch=EPOCH + 1, partition_epoch=2))
        await bench.replicator.adopt([Adoption(0, EPOCH + 1)])
        if row is TWO:
            await two.join(0, epoch=EPOCH + 1)
            await tick(bench)
        write = start(bench.put(b"c"))
        await turn()
        if row is TWO:
            await two.acknowledge()
        assert int((await write).versions[0]) == first_sequence(EPOCH + 1) + 1

    with_rows(tmp_path, use, row)


def test_write_beyond_the_last_sequence_of_an_epoch_is_refused_and_takes_none(
    tmp_path: Path,
) -> None:
    async def use(bench: Bench) -> None:
        last = first_sequence(EPOCH + 1) - 1
        bench.primaries.last_sequences[0] = last - 2
        for keys in ((b"a", b"b", b"c"), (b"a", b"b"), (b"c",)):
            if keys == (b"a", b"b"):
                assert (await bench.put(*keys)).versions.tolist() == [last - 1, last]
                continue
            with pytest.raises(PartitionOfflineError):
                await bench.put(*keys)
        assert int(bench.primaries.last_sequences[0]) == last
        with pytest.raises(PartitionOfflineError):
            await bench.put(b"a", delete=True)
        assert not (await bench.get(b"a", b"b")).missing

    with_rows(tmp_path, use, row_of(0))


def test_write_that_builds_on_a_refused_group_is_not_sent_to_followers(tmp_path: Path) -> None:
    """Refused on the spot, it is stored nowhere; its sequence is taken, and goes on alone."""

    async def use(bench: Bench) -> None:
        two = await joined(bench, 0, 1)
        bench.channel.held = True
        failing = start(bench.put(b"k", value=b"lost here"))
        await turn()
        refused = start(bench.put(b"l"))
        kept = start(bench.put(b"m", partition_id=1))
        await turn()
        bench.channel.failing = {0: "no room"}
        bench.channel.held = False
        bench.channel.commit_one()  # partition 0 is handed over, what is queued for it is refused
        bench.channel.held = True
        building = start(bench.put(b"m", value=b"newer", partition_id=1, if_version=START + 1))
        other = start(bench.put(b"n", partition_id=1))
        await turn()
        with pytest.raises(StorageFullError):
            await building
        bench.channel.release()
        for write, error in ((failing, UnknownFateError), (refused, StorageFullError)):
            with pytest.raises(error):
                await write
        await turn()
        await two.acknowledge()
        for write in (kept, other):
            assert await answered(write)
            write.result()
        sent = [record for batch in two.batches for record in batch.records]
        assert not any(b"newer" in record for record in sent)
        assert bench.store.read_copies([1])[1].complete_through == START + 3
        assert two.batches[-1].last[-1] == START + 3

    with_rows(tmp_path, use, TWO, row_of(1, (1, 2)))
