"""A node that is about to stop hands over what it leads, if others can lead it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from koinon_node.core.membership.assignment import Adoption
from koinon_node.core.replication import in_sync_and_hand_over
from koinon_node.ports import RowChange
from koinon_proto.contract.errors import PartitionOfflineError, UnknownFateError
from koinon_proto.contract.table import NO_NODE, PartitionRow, PartitionStatus
from tests.node.kit.held_writer import EPOCH, F2, F3, ME, WAIT_S, Bench, row_of
from tests.node.kit.played_follower import PlayedFollower, joined, turn
from tests.node.kit.primary import LEAVES, answered, newer, start, tick, with_rows

LONG_S = 10 * WAIT_S
Leaving = asyncio.Task[None]


def changes_of(bench: Bench, call: int = -1) -> dict[int, RowChange]:
    return {change.partition_id: change for change in bench.coordinator.calls[call][0]}


def leaving(
    directory: Path,
    use: Callable[[Bench, Leaving], Awaitable[None]],
    before: Callable[[Bench], Awaitable[None]],
    *rows: PartitionRow,
    **facts: Any,
) -> None:
    """Run ``use`` on a node that leaves, after ``before``."""

    async def run(bench: Bench) -> None:
        await before(bench)
        leaves = start(bench.replicator.hand_over_all(LONG_S))
        await turn()
        try:
            await use(bench, leaves)
        finally:
            leaves.cancel()

    with_rows(directory, run, *rows, **facts)


async def both_follow(bench: Bench) -> None:
    for number in (2, 3):
        await PlayedFollower(bench, number).join(0, 1)


def test_node_that_leaves_hands_over_all_at_once_and_waits_until_it_is_served(
    tmp_path: Path,
) -> None:
    async def use(bench: Bench, leaves: Leaving) -> None:
        await tick(bench)
        (changes,) = [changes for changes, _ in bench.coordinator.calls]
        assert {(c.partition_id, c.in_sync, c.hand_over_to) for c in changes} == {
            (0, (F2, F3), F2),
            (1, (F2, F3), F2),
        }
        for p in (0, 1):
            answer = await bench.put(b"k", partition_id=p)
            assert isinstance(answer.refusals[p], PartitionOfflineError)
        after = [
            replace(
                row_of(p, (1, 2, 3), (2, 3), primary=2, epoch=EPOCH + 1, partition_epoch=2),
                status=PartitionStatus.ASSIGNED,
            )
            for p in (0, 1)
        ]
        newer(bench, *after, min_in_sync=2)
        assert not await answered(leaves)
        newer(
            bench,
            *[replace(r, status=PartitionStatus.ONLINE, partition_epoch=3) for r in after],
            min_in_sync=2,
        )
        await asyncio.wait_for(leaves, WAIT_S)

    rows = [row_of(p, (1, 2, 3)) for p in (0, 1)]
    leaving(tmp_path, use, both_follow, *rows, min_in_sync=2)


def test_node_that_leaves_drains_each_partition_before_it_proposes(tmp_path: Path) -> None:
    two: list[PlayedFollower] = []
    write: list[asyncio.Task[Any]] = []

    async def before(bench: Bench) -> None:
        two.append(PlayedFollower(bench))
        await two[0].join(0, 1)
        write.append(start(bench.put(b"k")))
        await turn()

    async def use(bench: Bench, leaves: Leaving) -> None:
        await tick(bench)
        assert changes_of(bench).keys() == {1}
        await two[0].acknowledge()
        assert await answered(write[0])
        bench.coordinator.calls[-1][1].set_exception(UnknownFateError(reason="cut off"))
        await turn()
        await tick(bench)
        assert changes_of(bench).keys() == {0}

    leaving(tmp_path, use, before, row_of(0, (1, 2)), row_of(1, (1, 2)))


def test_node_that_leaves_hands_over_some_after_the_others(tmp_path: Path) -> None:
    """A partition is not served while it changes hands: not all at a time."""
    count = in_sync_and_hand_over._LEAVING_AT_ONCE + 10

    async def before(bench: Bench) -> None:
        await PlayedFollower(bench).join(*range(count))

    async def use(bench: Bench, leaves: Leaving) -> None:
        await tick(bench)
        first = changes_of(bench)
        assert len(first) == in_sync_and_hand_over._LEAVING_AT_ONCE
        assert int(bench.state.stopped.sum()) == len(first)
        bench.coordinator.calls[-1][1].set_result(frozenset())
        rows = [row_of(p, (1, 2)) for p in range(count)]
        for p in first:
            rows[p] = row_of(p, (1, 2), (2,), primary=2, epoch=EPOCH + 1, partition_epoch=2)
        newer(bench, *rows)
        await turn()
        await tick(bench)
        assert changes_of(bench).keys() == set(range(count)) - first.keys()

    leaving(tmp_path, use, before, *[row_of(p, (1, 2)) for p in range(count)])


def test_node_that_leaves_hands_over_to_nobody_who_leaves_too(tmp_path: Path) -> None:
    async def before(bench: Bench) -> None:
        two, three = PlayedFollower(bench, 2), PlayedFollower(bench, 3)
        await two.join(0, 1)
        await three.join(0)
        two.end.send(LEAVES)
        await turn()

    async def use(bench: Bench, leaves: Leaving) -> None:
        await tick(bench)
        changes = changes_of(bench)
        assert (changes[0].in_sync, changes[0].hand_over_to) == ((F3,), F3)
        assert changes[1].hand_over_to == NO_NODE

    leaving(tmp_path, use, before, row_of(0, (1, 2, 3)), row_of(1, (1, 2)))


def test_node_that_leaves_alone_just_stops(tmp_path: Path) -> None:
    async def before(bench: Bench) -> None:
        two = PlayedFollower(bench)
        await two.open(1)  # a replica that is not in sync cannot lead

    async def use(bench: Bench, leaves: Leaving) -> None:
        await asyncio.wait_for(leaves, WAIT_S)
        await tick(bench, 5.0)
        assert not bench.coordinator.calls
        assert not (await bench.put(b"k")).refusals

    leaving(tmp_path, use, before, row_of(0), row_of(1, (1, 2), (1,)))


def test_node_that_leaves_without_a_lease_just_stops(tmp_path: Path) -> None:
    async def before(bench: Bench) -> None:
        await both_follow(bench)
        bench.lose_lease()

    async def use(bench: Bench, leaves: Leaving) -> None:
        await asyncio.wait_for(leaves, WAIT_S)

    leaving(tmp_path, use, before, row_of(0, (1, 2, 3)), row_of(1, (1, 2, 3)))


def test_node_that_leaves_stays_in_sync_where_the_minimum_needs_it(tmp_path: Path) -> None:
    async def before(bench: Bench) -> None:
        await PlayedFollower(bench).join(0)

    async def use(bench: Bench, leaves: Leaving) -> None:
        await tick(bench)
        assert (changes_of(bench)[0].in_sync, changes_of(bench)[0].hand_over_to) == ((ME, F2), F2)

    leaving(tmp_path, use, before, row_of(0, (1, 2, 3), (1, 2)), min_in_sync=2)


def test_node_that_leaves_takes_another_successor_if_the_first_has_died(tmp_path: Path) -> None:
    async def use(bench: Bench, leaves: Leaving) -> None:
        await tick(bench)
        assert changes_of(bench)[0].hand_over_to == F2
        bench.coordinator.calls[-1][1].set_exception(UnknownFateError(reason="cut off"))
        rows = [row_of(p, (1, 2, 3)) for p in (0, 1)]
        newer(bench, *rows, fenced=(2,))
        await turn()
        await tick(bench, 0.3)
        assert changes_of(bench)[0].hand_over_to == F3
        assert (await bench.get(b"k")).refusals

    leaving(tmp_path, use, both_follow, row_of(0, (1, 2, 3)), row_of(1, (1, 2, 3)))


def test_node_that_leaves_keeps_a_partition_that_comes_back(tmp_path: Path) -> None:
    """Of two that leave at once none goes on handing over to the other."""

    async def use(bench: Bench, leaves: Leaving) -> None:
        await tick(bench)
        bench.coordinator.calls[-1][1].set_result(frozenset())
        newer(bench, row_of(0, (1, 2), (1, 2), epoch=EPOCH + 2, partition_epoch=3))
        await bench.replicator.adopt([Adoption(0, EPOCH + 2)])
        await joined(bench, 0, epoch=EPOCH + 2)
        await tick(bench, 1.0)
        await tick(bench)
        assert len(bench.coordinator.calls) == 1
        await asyncio.wait_for(leaves, WAIT_S)

    async def before(bench: Bench) -> None:
        await PlayedFollower(bench).join(0)

    leaving(tmp_path, use, before, row_of(0, (1, 2)))
