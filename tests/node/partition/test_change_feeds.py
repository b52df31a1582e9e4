"""Change feeds over a real store: what is told is complete, in order, and nothing is skipped."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from koinon_node.core.formats import records
from koinon_node.core.writes.change_tail import ChangeTail
from koinon_node.partition import change_feeds
from koinon_node.partition.change_feeds import (
    FROM_NOW,
    ChangeFeeds,
    Feed,
    FeedMessage,
    FeedRequest,
    Position,
)
from koinon_proto.contract.errors import (
    HistoryBranchedError,
    LeaseExpiredError,
    PartitionOfflineError,
    SnapshotNeededError,
)
from tests.node.kit.held_writer import Bench
from tests.node.kit.loads_bench import LoadsBench, with_loads
from tests.node.kit.played_follower import joined, turn
from tests.node.kit.primary import START, TWO, with_rows

Told = list[tuple[bytes, bytes | None, int]]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress is told soon, so that a test need not wait for a second."""
    monkeypatch.setattr(change_feeds, "PROGRESS_S", 0.02)


@contextmanager
def following(bench: Bench, *positions: Position, **how: Any) -> Iterator[Feed]:
    feeds = ChangeFeeds(bench.engine.context, bench.commits)
    feed = feeds.open(FeedRequest(positions=positions or (Position(0),), **how))
    try:
        yield feed
    finally:
        feed.close()


async def next_of(feed: Feed) -> FeedMessage:
    message = await feed.next()
    assert message is not None
    return message


async def told_until(feed: Feed, done: Callable[[FeedMessage], bool]) -> Told:
    """Return the messages up to the first one for which ``done`` is true."""
    told: Told = []
    while True:
        message = await next_of(feed)
        for advance in message.advances:
            told += [(c.key, c.value, c.sequence - START) for c in advance.changes]
        if done(message):
            return told


def caught_up(message: FeedMessage) -> bool:
    return any(advance.caught_up for advance in message.advances)


def is_progress(message: FeedMessage) -> bool:
    return not message.rows


async def test_feed_tells_what_is_there_and_then_what_changes(bench: Bench) -> None:
    await bench.put(b"a", b"b")
    with following(bench) as feed:
        assert await told_until(feed, caught_up) == [(b"a", b"v", 1), (b"b", b"v", 2)]
        await bench.put(b"b", value=b"w")
        await bench.put(b"a", delete=True)
        told: Told = []
        while len(told) < 2:
            told += await told_until(feed, lambda message: message.rows > 0)
        assert told == [(b"b", b"w", 3), (b"a", None, 4)]


async def test_feed_from_now_tells_only_what_changes(bench: Bench) -> None:
    await bench.put(b"a")
    with following(bench, Position(0, FROM_NOW)) as feed:
        assert await told_until(feed, caught_up) == []
        await bench.put(b"b")
        assert await told_until(feed, lambda m: m.rows > 0) == [(b"b", b"v", 2)]


def test_change_is_not_told_before_every_in_sync_copy_has_it(tmp_path: Path) -> None:
    async def use(bench: Bench) -> None:
        two = await joined(bench, 0)
        with following(bench) as feed:
            assert await told_until(feed, caught_up) == []
            write = asyncio.create_task(bench.put(b"k"))
            await turn()  # it is durable here
            assert int(bench.copies.complete_through[0]) == START + 1
            assert await told_until(feed, is_progress) == []
            assert await told_until(feed, is_progress) == []
            await two.acknowledge()
            assert await told_until(feed, lambda m: m.rows > 0) == [(b"k", b"v", 1)]
            await write

    with_rows(tmp_path, use, TWO)


def test_backfill_tells_no_record_that_is_not_complete(tmp_path: Path) -> None:
    async def use(bench: Bench) -> None:
        two = await joined(bench, 0)
        write = asyncio.create_task(bench.put(b"k"))
        await turn()
        with following(bench) as feed:
            assert await told_until(feed, is_progress) == []
            await two.acknowledge()
            assert await told_until(feed, caught_up) == [(b"k", b"v", 1)]
        await write

    with_rows(tmp_path, use, TWO)


def test_backfill_waits_for_the_record_that_hides_one_it_would_tell(tmp_path: Path) -> None:
    """If it did not, and the newer one was lost in a failover, the older would never be told."""

    async def use(bench: Bench) -> None:
        two = await joined(bench, 0)
        first = asyncio.create_task(bench.put(b"k", value=b"old"))
        await turn()
        await two.acknowledge()
        await first
        with following(bench) as feed:
            read_page = feed._read_page

            async def overwritten(member: Any) -> Any:
                if not member.bound:  # the pass begins before, and reads after the second put
                    member.bound = START + 1
                    bench.second = asyncio.create_task(bench.put(b"k", value=b"new"))  # type: ignore[attr-defined]
                    await turn()
                return await read_page(member)

            feed._read_page = overwritten  # type: ignore[method-assign]
            for _ in range(2):
                message = await next_of(feed)
                assert not message.rows
                assert all(not a.position.sequence for a in message.advances)
            await two.acknowledge()
            assert await told_until(feed, lambda m: m.rows > 0) == [(b"k", b"new", 2)]

    with_rows(tmp_path, use, TWO)


@pytest.mark.parametrize("tail_bytes", [0, 400, 1 << 20])
async def test_position_goes_on_where_it_was(bench: Bench, tail_bytes: int) -> None:
    bench.commits.tail = ChangeTail(tail_bytes)
    with following(bench) as feed:
        await told_until(feed, caught_up)
        seen: dict[bytes, tuple[bytes | None, int]] = {}
        position = Position(0)
        for n in range(30):
            await bench.put(b"k%d" % (n % 7), value=b"%d" % n, delete=n % 5 == 4)
            if n % 6:
                continue
            message = await next_of(feed)
            for advance in message.advances:
                for change in advance.changes:
                    assert change.sequence > seen.get(change.key, (b"", 0))[1]
                    seen[change.key] = change.value, change.sequence
                position = advance.position.copy()
    with following(bench, position) as feed:
        for key, value, counter in await told_until(feed, caught_up):
            assert START + counter > seen.get(key, (b"", 0))[1]
            seen[key] = value, START + counter
    answer = await bench.get(*sorted(seen))
    values = [None if i in answer.missing else v for i, v in enumerate(answer.values)]
    assert [seen[key][0] for key in sorted(seen)] == values
    assert len(seen) == 7


async def test_backfill_goes_on_after_the_key_it_had_reached(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(change_feeds, "_PAGE_ROWS", 3)
    monkeypatch.setattr(change_feeds, "MESSAGE_BYTES", 1)
    keys = [b"%02d" % n for n in range(10)]
    await bench.put(*keys)
    found: list[bytes] = []
    position = Position(0)
    for _ in range(20):
        with following(bench, position) as feed:  # a new one for each message
            message = await next_of(feed)
        found += [change.key for advance in message.advances for change in advance.changes]
        position = message.advances[-1].position.copy()
        if caught_up(message):
            break
    assert found == keys
    assert position.sequence == START + 10


async def test_prefix_and_keys_only_choose_what_is_told(bench: Bench) -> None:
    await bench.put(b"a/1", b"b/1", b"b/2", b"c/1")
    with following(bench, prefix=b"b/", keys_only=True) as feed:
        assert [row[:2] for row in await told_until(feed, caught_up)] == [
            (b"b/1", b""),
            (b"b/2", b""),
        ]
        await bench.put(b"a/2", b"b/3")
        assert [row[:2] for row in await told_until(feed, lambda m: m.rows > 0)] == [(b"b/3", b"")]
        await bench.put(b"a/3")
        message = await next_of(feed)
        while not message.advances:
            message = await next_of(feed)
        assert message.advances[0].position.sequence == START + 7, "progress tells of the others"


async def test_position_below_forgotten_deletes_needs_a_snapshot(bench: Bench) -> None:
    await bench.put(b"a", b"b")
    await bench.put(b"a", delete=True)  # with one copy, and nobody who follows, nothing is left
    with following(bench, Position(0, START + 1)) as feed:
        message = await next_of(feed)
        (error,) = message.refusals.values()
        assert isinstance(error, SnapshotNeededError)
        assert (error.partition_id, error.sequence, error.purge_floor) == (0, START + 1, START + 3)
        assert await feed.next() is None
    with following(bench) as feed:
        assert await told_until(feed, caught_up) == [(b"b", b"v", 2)]


async def test_position_that_the_lineage_lacks_has_branched_off(bench: Bench) -> None:
    await bench.put(b"a")
    with following(bench, Position(0, START + 9)) as feed:
        message = await next_of(feed)
        (error,) = message.refusals.values()
        assert isinstance(error, HistoryBranchedError)
        assert (error.sequence, error.common_sequence) == (START + 9, START + 1)


async def test_partition_that_is_lost_ends_and_the_others_go_on(bench: Bench) -> None:
    with following(bench, Position(0), Position(1)) as feed:
        await told_until(feed, caught_up)
        bench.lose_partition_0()
        message = await next_of(feed)
        while not message.refusals:
            message = await next_of(feed)
        assert isinstance(message.refusals[0], PartitionOfflineError)
        await bench.put(b"k", partition_id=1)
        assert await told_until(feed, lambda m: m.rows > 0) == [(b"k", b"v", 1)]
        bench.lose_lease()
        with pytest.raises(LeaseExpiredError):
            await feed.next()


async def test_group_that_found_no_room_is_not_told(bench: Bench) -> None:
    with following(bench) as feed:
        await told_until(feed, caught_up)
        bench.channel.failing = {0: "no room"}
        with pytest.raises(Exception, match="no room"):
            await bench.put(b"lost")
        await bench.put(b"kept")
        assert await told_until(feed, lambda m: m.rows > 0) == [(b"kept", b"v", 2)]


def test_rows_of_a_bulk_load_are_told_once_they_are_merged(tmp_path: Path) -> None:
    async def use(bench: LoadsBench) -> None:
        with following(bench) as feed:
            await told_until(feed, caught_up)
            await bench.stage([(b"a", b"1"), (b"b", b"2")])
            assert await told_until(feed, is_progress) == []
            bench.merge(1)
            async with bench.loading():
                told = await told_until(feed, lambda m: m.rows > 0)
            assert [row[:2] for row in told] == [(b"a", b"1"), (b"b", b"2")]

    with_loads(tmp_path, use)


async def test_deletes_leave_tombstones_only_while_somebody_follows(bench: Bench) -> None:
    await bench.put(b"a", b"b")
    key = records.head_of(0) + b"a"
    with following(bench) as feed:
        await told_until(feed, caught_up)
        await bench.put(b"a", delete=True)
        stored = bench.store.get(key)
        assert stored is not None
        assert records.decode_record(stored).tombstone
    feed._feeds._leave(feed._followed)
    await bench.put(b"b", delete=True)
    assert bench.store.get(records.head_of(0) + b"b") is None
    assert not np.any(bench.primaries.followed)
