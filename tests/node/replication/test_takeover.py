"""A new primary: whom it waits for before it serves (rule 4)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from koinon_node.core.formats import records
from koinon_node.core.membership.assignment import Adoption
from koinon_node.storage.environment import DATA_DB, PARTITIONS_DB
from koinon_proto.contract.errors import PartitionOfflineError, UnknownFateError
from koinon_proto.contract.table import first_sequence
from tests.node.kit.held_writer import (
    EPOCH,
    F2,
    F3,
    ME,
    Bench,
    engine_bench,
    row_of,
    table_of,
    with_engine,
)
from tests.node.kit.played_follower import PlayedFollower, joined, turn
from tests.node.kit.primary import START, THREE, TWO, newer, proposed, start, tick, with_rows
from tests.node.kit.scripted_primary import in_keyspace


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
        await joined(bench, 0)
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
        await joined(bench, 0, number=3)
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


@pytest.mark.parametrize("first_epoch", [1, EPOCH])
async def test_copy_of_a_keyspace_before_is_not_taken_over(
    tmp_path: Path, first_epoch: int
) -> None:
    """The row names this node, whose disk was set back: what it holds of partition 1 was erased
    once, and would be read in the keyspace that has the partition now.
    """
    key, old = records.head_of(1) + b"k", first_sequence(1) + 1
    epochs = records.PartitionEpochs(primary_epoch=1, history=(records.EpochStart(1, 0),))
    (progress,) = records.encode_progress(np.array([old], np.uint64), np.zeros(1, np.uint64), 0)
    async with engine_bench(tmp_path, lead=False) as bench:
        table = table_of(row_of(0), row_of(1))
        bench.take_table(in_keyspace(table, range(1, 2), first_epoch=first_epoch))
        metadata = {
            records.epochs_key(1): records.encode_epochs(epochs),
            records.progress_key(1): progress,
        }
        await bench.writer.submit(
            (
                (DATA_DB, [key], [records.encode_record(old, b"of another")]),
                (PARTITIONS_DB, list(metadata), list(metadata.values())),
            ),
            1,
            0,
        )
        await bench.replicator.adopt([Adoption(0, EPOCH), Adoption(1, EPOCH)])
        is_led = first_epoch == 1
        assert bench.ready == [Adoption(0, EPOCH), Adoption(1, EPOCH)][: 1 + is_led]
        assert bench.store.read_copies([1])[1].epochs.primary_epoch == (EPOCH if is_led else 1)


PAST = first_sequence(1) + 2
"""Where the copies ended before the node took over again and again, without a write."""


async def take_over_after(bench: Bench, *, tail: bool, written: int = 0) -> None:
    """Lead in epoch 5 what an earlier process took over in epochs 2 and 3: in 2 perhaps with a
    tail, and with so many writes then.
    """
    bench.take_table(table_of(row_of(0, (1, 2), epoch=5)))
    epochs = records.PartitionEpochs(primary_epoch=0).adopted(1, 0, clean=True)
    epochs = epochs.adopted(2, PAST, clean=not tail)
    epochs = epochs.adopted(3, first_sequence(2) + written, clean=True)
    through = np.array([first_sequence(3)], np.uint64)
    progress = records.encode_progress(through, np.zeros(1, np.uint64), 0)
    keys = [records.epochs_key(0), records.progress_key(0)]
    values: list[bytes | None] = [records.encode_epochs(epochs), *progress]
    await bench.writer.submit(((2, keys, values),), 1, 0)
    await bench.replicator.adopt([Adoption(0, 5)])


@pytest.mark.parametrize(
    ("history", "through", "unchanged_from"),
    [
        ([(1, 0)], PAST, None),
        ([(1, 0), (2, PAST)], first_sequence(2), None),
        ([(1, 0), (2, PAST), (3, first_sequence(2))], first_sequence(3), None),
        # It took over itself, in epochs that this node never heard of.
        ([(1, 0), (4, PAST)], first_sequence(4), PAST),
    ],
)
def test_follower_goes_on_with_the_stream_after_takeovers_without_a_write(
    tmp_path: Path, history: list[tuple[int, int]], through: int, unchanged_from: int | None
) -> None:
    async def use(bench: Bench) -> None:
        await take_over_after(bench, tail=False)
        (answer,) = await PlayedFollower(bench).open(
            0,
            epoch=5,
            complete_through=through,
            history=history,
            unchanged_from=unchanged_from,
        )
        assert answer.common_point == answer.stream_from == first_sequence(5)
        assert answer.unchanged_from == PAST

    with_engine(tmp_path, use, lead=False)


@pytest.mark.parametrize(
    ("tail", "written", "through", "unchanged_from"),
    [
        (True, 0, PAST, None),  # the tail of the second epoch is not in it
        (False, 1, PAST, None),  # nor is a write of it
        (False, 0, PAST - 1, None),  # it lacks a write of the first
        (False, 0, PAST + 1, None),  # it has one of its own
        (False, 0, PAST + 2, PAST + 1),
    ],
)
def test_follower_that_lacks_or_has_a_write_does_not_go_on_with_the_stream(
    tmp_path: Path, tail: bool, written: int, through: int, unchanged_from: int | None
) -> None:
    async def use(bench: Bench) -> None:
        await take_over_after(bench, tail=tail, written=written)
        (answer,) = await PlayedFollower(bench).open(
            0,
            epoch=5,
            complete_through=through,
            history=[(1, 0)],
            unchanged_from=unchanged_from,
        )
        assert answer.common_point == min(PAST, through)
        assert answer.stream_from == first_sequence(5)

    with_engine(tmp_path, use, lead=False)


def test_group_of_an_epoch_that_is_over_answers_nothing_in_the_next(tmp_path: Path) -> None:
    """Registered anew, the same process leads on: what was pending is what the store holds."""

    async def use(bench: Bench) -> None:
        two = await joined(bench, 0)
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
