"""Tests of the set in sync, and of the followers that a write waits for (rule 5)."""

from __future__ import annotations

from pathlib import Path

from koinon_proto.contract.errors import NotEnoughReplicasError, UnknownFateError
from tests.node.kit.held_writer import EPOCH, F2, F3, ME, Bench, row_of
from tests.node.kit.played_follower import PlayedFollower, joined, turn
from tests.node.kit.primary import (
    LEAVES,
    START,
    THREE,
    TWO,
    answered,
    newer,
    proposed,
    start,
    tick,
    with_rows,
)


def test_follower_that_does_not_answer_is_left_out_before_its_write_is(tmp_path: Path) -> None:
    async def use(bench: Bench) -> None:
        await joined(bench, 0)
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
        two = await joined(bench, 0, 1)
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
        two = await joined(bench, 0)
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


def test_follower_is_added_at_once_though_a_call_was_out_when_it_was_ready(tmp_path: Path) -> None:
    """A decision that is not proposed does not count for how often sets are widened."""

    async def use(bench: Bench) -> None:
        two = await joined(bench, 0)
        await tick(bench, 1.0)
        assert proposed(bench).partition_id == 0
        await two.join(1)
        await tick(bench, 1.0)  # nothing is called beside that call
        assert len(bench.coordinator.calls) == 1
        newer(bench, row_of(0, (1, 2), partition_epoch=2), row_of(1, (1, 2), (1,)))
        bench.coordinator.calls[-1][1].set_result(frozenset())
        await turn()
        await tick(bench, 0.01)
        assert (proposed(bench).partition_id, proposed(bench).in_sync) == (1, (ME, F2))

    with_rows(tmp_path, use, row_of(0, (1, 2), (1,)), row_of(1, (1, 2), (1,)))


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
    """A follower that was perhaps added, and is gone, is left out by proposing the row as it is."""

    async def use(bench: Bench) -> None:
        two = await joined(bench, 0)
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
        two = await joined(bench, 0)
        await tick(bench)
        bench.coordinator.calls[-1][1].set_result(frozenset((0,)))
        await two.leave()
        await tick(bench)
        assert await answered(start(bench.put(b"k")))

    with_rows(tmp_path, use, row_of(0, (1, 2), (1,)))


def test_writes_are_refused_while_too_few_live_replicas_are_in_sync(tmp_path: Path) -> None:
    async def use(bench: Bench) -> None:
        await joined(bench, 0)
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
