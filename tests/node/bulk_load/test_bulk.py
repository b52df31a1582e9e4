"""Staging and preparing over a real store: what is taken, what is refused, and how much at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from koinon_node.bulk_load import staged_chunks, stager
from koinon_node.bulk_load.stager import Prepared, _Room
from koinon_node.config import Limits
from koinon_node.core.formats.chunk_keys import ChunkName, chunk_key
from koinon_proto.contract.cluster_errors import LoadClosedError, LoadIncompleteError
from koinon_proto.contract.columns import DELETED
from koinon_proto.contract.errors import (
    InvalidArgumentError,
    LeaseExpiredError,
    NotEnoughReplicasError,
    PartitionOfflineError,
    TableBehindError,
    UnknownFateError,
)
from koinon_proto.contract.table import ActiveLoad
from tests.kit.waiting import until
from tests.node.kit.held_writer import row_of as row
from tests.node.kit.held_writer import settle, table_of
from tests.node.kit.loads_bench import MERGING, OPEN, LoadsBench, with_loads
from tests.node.kit.played_follower import joined, turn
from tests.node.kit.staged_chunks import LOAD, chunk_of

ROWS = [(b"a", b"1"), (b"b", b"2")]
Use = Callable[[LoadsBench], Awaitable[None]]


async def sent(bench: LoadsBench) -> None:
    """Wait until the writer has a group."""
    await until(lambda: bench.channel.waiting, "a group is sent")


# --- staging -----------------------------------------------------------------------------------


async def test_staged_chunk_is_kept_under_its_name_and_answered_when_it_is_durable(
    bench: LoadsBench,
) -> None:
    bench.channel.held = True
    staging_one = asyncio.ensure_future(bench.stage(ROWS, attempt=5, number=9))
    await sent(bench)
    await settle(staging_one)
    assert not staging_one.done()
    bench.channel.release()
    assert await staging_one == {}
    ((name, record),) = bench.partition().chunks.items()
    assert name == ChunkName(LOAD, 5, 9)
    assert record.value == chunk_of(ROWS)


@pytest.mark.bench(table=table_of(row(0, (1, 2)), loads=[OPEN]))
async def test_staged_chunk_is_answered_when_every_in_sync_follower_has_it(
    bench: LoadsBench,
) -> None:
    two = await joined(bench, 0)
    staging_one = asyncio.ensure_future(bench.stage(ROWS))
    await until(lambda: bench.partition().chunks, "it is stored here")
    await turn()
    assert not staging_one.done()
    await two.acknowledge()
    assert await staging_one == {}
    assert list(two.batches[-1].keys) == [b"\0\0\1" + chunk_key(LOAD, 1, 0)]


@pytest.mark.parametrize(
    ("loads", "state"),
    [
        ((), "unknown"),
        ((ActiveLoad(load_id=8, merging=False),), "unknown"),
        ((MERGING,), "merging"),
    ],
)
def test_stage_of_a_load_that_is_not_open_is_refused_and_writes_nothing(
    tmp_path: Path, loads: tuple[ActiveLoad, ...], state: str
) -> None:
    async def use(bench: LoadsBench) -> None:
        sent = bench.channel.groups_sent
        with pytest.raises(LoadClosedError) as refused:
            await bench.stage(ROWS)
        assert (refused.value.load_id, refused.value.state) == (LOAD, state)
        assert bench.channel.groups_sent == sent

    with_loads(tmp_path, use, table=table_of(loads=loads))


@pytest.mark.bench(table=table_of())
async def test_stage_by_a_newer_table_than_the_nodes_is_to_be_sent_again(bench: LoadsBench) -> None:
    """The node may not have heard of the load yet: that is not a load that is closed."""
    with pytest.raises(TableBehindError) as refused:
        await bench.stage(ROWS, table_version=2)
    assert (refused.value.table_version, refused.value.required_version) == (1, 2)
    assert bench.partition().chunks == {}


async def test_stage_without_a_lease_is_refused(bench: LoadsBench) -> None:
    bench.lose_lease()
    with pytest.raises(LeaseExpiredError):
        await bench.stage(ROWS)


async def test_stage_that_waits_for_room_while_its_load_is_closed_stages_nothing(
    bench: LoadsBench,
) -> None:
    bench.stager._room = stager._Room(100)
    bench.channel.held = True
    first = asyncio.ensure_future(bench.stage(ROWS))
    await sent(bench)
    second = asyncio.ensure_future(bench.stage(ROWS, number=1))
    await settle(second)
    bench.loads_are(MERGING)
    bench.channel.release()
    await first
    with pytest.raises(LoadClosedError):
        await second
    assert set(bench.partition().chunks) == {ChunkName(LOAD, 1, 0)}


@pytest.mark.bench(limits=Limits(step_rows=1))
async def test_stage_in_steps_stops_at_the_step_before_which_its_load_was_closed(
    bench: LoadsBench,
) -> None:
    chunks = {(p, p): chunk_of(ROWS) for p in range(4)}
    staging_all = asyncio.ensure_future(bench.stage_chunks(chunks))
    bench.channel.held = True
    for _ in range(100_000):
        if bench.writer.pending_rows:  # a step is queued, and the next one is not
            break
        await asyncio.sleep(0)
    bench.loads_are()
    bench.channel.release()
    with pytest.raises(LoadClosedError):
        await staging_all
    staged = [p for p in range(4) if bench.partition(p).chunks]
    assert staged
    assert staged == list(range(len(staged)))
    assert len(staged) < 4


async def test_chunk_staged_twice_is_there_once(bench: LoadsBench) -> None:
    await bench.stage(ROWS)
    before = bench.partition().chunks
    await bench.stage(ROWS)
    after = bench.partition().chunks
    assert after.keys() == before.keys()
    name = ChunkName(LOAD, 1, 0)
    assert after[name].value == before[name].value
    assert after[name].sequence > before[name].sequence
    prepared = await prepare(bench, {0: 2})
    assert (prepared.refusals, prepared.duplicate_rows) == ({}, 0)


async def test_staged_rows_are_seen_by_no_read(bench: LoadsBench) -> None:
    await bench.put(b"zz", value=b"a user's")
    await bench.stage([(b"k", b"staged"), (b"zz", b"staged")])
    hidden = chunk_key(LOAD, 1, 0)
    answer = await bench.get(b"k", b"zz", hidden, b"\1" + hidden)
    assert answer.values == [b"", b"a user's", b"", b""]
    assert answer.missing == [0, 2, 3]
    assert (await bench.scan()).keys == [b"zz"]
    assert (await bench.read_columns()).keys == [b"zz"]
    assert (await bench.read_columns(prefix=hidden)).keys == []


async def test_users_key_that_looks_like_a_chunks_name_is_another_record(bench: LoadsBench) -> None:
    name = chunk_key(LOAD, 1, 0)
    await bench.stage(ROWS)
    await bench.put(name, b"\1" + name, value=b"theirs")
    assert (await bench.get(name)).values == [b"theirs"]
    assert bench.partition().chunks[ChunkName(LOAD, 1, 0)].value == chunk_of(ROWS)
    await bench.put(name, delete=True)
    assert set(bench.partition().chunks) == {ChunkName(LOAD, 1, 0)}


@pytest.mark.parametrize("keys", [(b"b", b"a"), (b"a", b"c", b"b"), (b"\x80", b"\x7f")])
async def test_chunk_whose_keys_do_not_ascend_is_refused_by_its_place(
    bench: LoadsBench, keys: tuple[bytes, ...]
) -> None:
    chunks = {(0, 0): chunk_of(ROWS), (1, 1): chunk_of([(key, b"v") for key in keys])}
    with pytest.raises(InvalidArgumentError) as refused:
        await bench.stage_chunks(chunks)
    assert refused.value.field == "chunks[1]"
    assert bench.partition(0).chunks == {}


async def test_chunk_with_equal_keys_or_without_rows_is_taken(bench: LoadsBench) -> None:
    await bench.stage([(b"a", b"1"), (b"a", b"2"), (b"\x7f", b""), (b"\x80", b"")])
    await bench.stage([], number=1)
    assert len(bench.partition().chunks) == 2


async def test_chunk_damaged_on_its_way_is_refused(bench: LoadsBench) -> None:
    damaged = bytearray(chunk_of(ROWS))
    damaged[-1] ^= 1
    with pytest.raises(InvalidArgumentError, match="checksum"):
        await bench.stage_chunks({(0, 0): bytes(damaged)})
    assert bench.partition().chunks == {}


async def test_chunk_that_expires_later_than_records_may_is_refused(bench: LoadsBench) -> None:
    with pytest.raises(InvalidArgumentError, match="longer than a hundred years"):
        await bench.stage(ROWS, expires_at_ms=2**63)
    await bench.stage(ROWS, expires_at_ms=bench.clock.ms + 1000)
    await bench.stage(ROWS, number=1, expires_at_ms=1)  # expired already: so be it


async def test_put_and_delete_of_one_key_are_equal_keys(bench: LoadsBench) -> None:
    await bench.stage([(b"a", b"1"), (b"b", b"2")])
    await bench.stage([(b"b", b"")], number=1, expiries=[DELETED])
    prepared = await prepare(bench, {0: 3})
    assert (prepared.duplicate_rows, prepared.duplicate_keys) == (1, [b"b"])


async def test_partition_that_is_not_led_is_refused_and_the_others_are_staged(
    bench: LoadsBench,
) -> None:
    bench.lose_partition_0()
    refusals = await bench.stage_chunks({(0, 0): chunk_of(ROWS), (1, 1): chunk_of(ROWS)})
    assert list(refusals) == [0]
    assert isinstance(refusals[0], PartitionOfflineError)
    assert bench.partition(0).chunks == {}
    assert set(bench.partition(1).chunks) == {ChunkName(LOAD, 1, 1)}


def test_partition_with_too_few_replicas_is_refused_before_it_is_written(tmp_path: Path) -> None:
    rows = [row(0, (1, 2, 3), (1, 2)), row(1)]

    async def use(bench: LoadsBench) -> None:
        await joined(bench, 0)
        table = table_of(*rows, version=2, min_in_sync=2, fenced=[2, 3], loads=[OPEN])
        bench.take_table(table)
        bench.replicator.tick()
        refusals = await bench.stage_chunks({(0, 0): chunk_of(ROWS), (1, 1): chunk_of(ROWS)})
        assert isinstance(refusals[0], NotEnoughReplicasError)
        assert bench.partition(0).chunks == {}

    with_loads(tmp_path, use, table=table_of(*rows, min_in_sync=2, loads=[OPEN]))


async def test_chunk_durable_after_its_partition_was_lost_is_of_unknown_fate(
    bench: LoadsBench,
) -> None:
    bench.channel.held = True
    staging_one = asyncio.ensure_future(bench.stage(ROWS))
    await sent(bench)
    bench.lose_partition_0()
    bench.channel.release()
    with pytest.raises(UnknownFateError):
        await staging_one


# --- how much at once --------------------------------------------------------------------------


class Visitors:
    """Tasks that take room, and what became of them."""

    def __init__(self, limit: int) -> None:
        self.room = _Room(limit)
        self.inside: list[str] = []
        self.came: list[str] = []
        self._leave: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def come(self, name: str, size: int) -> None:
        self._leave[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._visit(name, size))
        await turn()

    async def _visit(self, name: str, size: int) -> None:
        async with self.room.of(size):
            self.inside.append(name)
            self.came.append(name)
            try:
                await self._leave[name].wait()
            finally:
                self.inside.remove(name)

    async def go(self, name: str) -> None:
        self._leave[name].set()
        await turn()

    async def cancel(self, name: str) -> None:
        self.tasks[name].cancel()
        await turn()


async def test_room_is_given_up_to_its_bound_in_the_order_of_arrival() -> None:
    visitors = Visitors(10)
    await visitors.come("a", 6)
    await visitors.come("b", 4)
    await visitors.come("c", 5)
    await visitors.come("d", 1)  # it would fit sooner than c
    assert visitors.inside == ["a", "b"]
    await visitors.go("b")
    assert visitors.inside == ["a"]
    await visitors.go("a")
    assert visitors.inside == ["c", "d"]
    await visitors.go("c")
    await visitors.go("d")
    await visitors.come("e", 10)
    assert visitors.inside == ["e"]


async def test_room_for_more_than_the_bound_is_given_alone() -> None:
    visitors = Visitors(10)
    await visitors.come("small", 1)
    await visitors.come("big", 50)
    await visitors.come("after", 1)
    assert visitors.inside == ["small"]
    await visitors.go("small")
    assert visitors.inside == ["big"]
    await visitors.go("big")
    assert visitors.inside == ["after"]


async def test_room_is_free_again_after_who_waits_or_stages_was_cancelled() -> None:
    visitors = Visitors(10)
    await visitors.come("a", 10)
    await visitors.come("b", 5)
    await visitors.come("c", 10)
    await visitors.cancel("b")
    await visitors.cancel("a")
    assert visitors.inside == ["c"]
    await visitors.go("c")
    await visitors.come("d", 10)
    assert visitors.inside == ["d"]


async def test_chunks_under_way_are_bounded_and_room_comes_back_after_a_refusal(
    bench: LoadsBench,
) -> None:
    size = len(chunk_of(ROWS))
    bench.stager._room = stager._Room(2 * size)
    bench.channel.held = True
    calls = [asyncio.ensure_future(bench.stage(ROWS, number=n)) for n in range(5)]
    await sent(bench)
    await turn()
    assert bench.writer.pending_rows == 2
    bench.channel.failing = {0: "no room"}
    bench.channel.release()
    fates = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(fate) for fate in fates if fate] != []
    assert len(bench.partition().chunks) == sum(fate == {} for fate in fates)
    assert len(bench.partition().chunks) >= 3


# --- preparing ---------------------------------------------------------------------------------


async def prepare(
    bench: LoadsBench,
    rows: dict[int, int],
    *,
    attempts: tuple[int, ...] = (1,),
    table_version: int = 1,
    find_duplicates: bool = True,
) -> Prepared:
    return await bench.stager.prepare(
        LOAD, frozenset(attempts), rows, table_version, find_duplicates=find_duplicates
    )


async def test_prepare_adds_up_duplicates_and_refuses_by_partition(bench: LoadsBench) -> None:
    for p in range(4):
        await bench.stage([(b"a", b"1"), (b"a", b"2"), (b"b%d" % p, b"")], partition_id=p)
    bench.lose_partition_0()
    prepared = await prepare(bench, {0: 3, 1: 3, 2: 4, 3: 3})
    assert isinstance(prepared.refusals.pop(0), PartitionOfflineError)
    incomplete = prepared.refusals.pop(2)
    assert isinstance(incomplete, LoadIncompleteError)
    assert (incomplete.partition_id, incomplete.staged_rows) == (2, 3)
    assert not prepared.refusals
    assert prepared.duplicate_rows == 2
    assert prepared.duplicate_keys == [b"a", b"a"]
    allowed = await prepare(bench, {1: 3}, find_duplicates=False)
    assert (allowed.duplicate_rows, allowed.duplicate_keys) == (0, [])


async def test_prepare_counts_only_the_attempts_it_names(bench: LoadsBench) -> None:
    await bench.stage([(b"a", b"1")], attempt=1)
    await bench.stage([(b"a", b"1"), (b"b", b"1")], attempt=2)
    await bench.stage([(b"c", b"1")], attempt=3)
    assert not (await prepare(bench, {0: 2}, attempts=(2,))).refusals
    assert not (await prepare(bench, {0: 3}, attempts=(2, 3))).refusals
    assert (await prepare(bench, {0: 3}, attempts=(2,))).refusals
    assert not (await prepare(bench, {0: 0}, attempts=(4,))).refusals


@pytest.mark.parametrize("loads", [(), (MERGING,)])
def test_prepare_of_a_load_that_is_not_open_is_refused(
    tmp_path: Path, loads: tuple[ActiveLoad, ...]
) -> None:
    async def use(bench: LoadsBench) -> None:
        with pytest.raises(LoadClosedError):
            await prepare(bench, {0: 0})

    with_loads(tmp_path, use, table=table_of(loads=loads))


@pytest.mark.bench(table=table_of())
async def test_prepare_by_a_newer_table_than_the_nodes_is_to_be_sent_again(
    bench: LoadsBench,
) -> None:
    """The partition has moved to a node that has not heard of the load: the load is not closed."""
    with pytest.raises(TableBehindError):
        await prepare(bench, {0: 0}, table_version=2)


@pytest.mark.parametrize("staged_rows", [2, 0])
@pytest.mark.parametrize("lose", [LoadsBench.lose_lease, LoadsBench.lose_partition_0])
async def test_prepare_under_which_the_lease_or_partition_is_lost_says_nothing_of_it(
    bench: LoadsBench,
    monkeypatch: pytest.MonkeyPatch,
    lose: Callable[[LoadsBench], None],
    staged_rows: int,
) -> None:
    """Nor that rows are missing: a partition that was moved away is erased here."""
    await bench.stage(ROWS)
    looked = staged_chunks.prepare

    def and_lost(*args: Any, **how: Any) -> Any:
        lose(bench)
        return looked(*args, **how)

    monkeypatch.setattr(staged_chunks, "prepare", and_lost)
    with pytest.raises(LeaseExpiredError):
        await prepare(bench, {0: staged_rows})


async def test_prepare_without_a_lease_is_refused(bench: LoadsBench) -> None:
    bench.lose_lease()
    with pytest.raises(LeaseExpiredError):
        await prepare(bench, {0: 0})
