"""Pages read in columns over a real store: every row once, and only what may be served."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from koinon_node.bulk_load import column_reader
from koinon_node.bulk_load.column_reader import ColumnsAnswer
from koinon_node.config import Limits
from koinon_node.core.formats import records
from koinon_proto.contract.errors import (
    LeaseExpiredError,
    PartitionOfflineError,
    ResourceExhaustedError,
    TableBehindError,
)
from tests.node.kit.held_writer import PARTITIONS, settle, table_of
from tests.node.kit.held_writer import row_of as row
from tests.node.kit.loads_bench import OPEN, LoadsBench, with_loads
from tests.node.kit.played_follower import joined, turn
from tests.node.kit.staged_chunks import rows_of

ROWS = [(b"a", b"1"), (b"b", b"2")]
Use = Callable[[LoadsBench], Awaitable[None]]


async def pages(bench: LoadsBench, *partition_ids: int, **how: Any) -> list[ColumnsAnswer]:
    """Read to the end, as a client does: each page goes on where the last one ended."""
    answers = [await bench.read_columns(*partition_ids, **how)]
    while (cursor := answers[-1].next_cursor) is not None:
        left = [p for p in partition_ids if p >= cursor[0]]
        assert left[0] == cursor[0]
        answers.append(await bench.read_columns(*left, after_key=cursor[1], **how))
        assert len(answers) < 1_000
    return answers


def rows_by_partition(answers: list[ColumnsAnswer]) -> list[tuple[int, bytes, bytes]]:
    found = []
    for answer in answers:
        ids = [p for p, count in answer.runs.items() for _ in range(count)]
        rows = rows_of(answer.packed())
        found += [(p, *one) for p, one in zip(ids, rows, strict=True)]
        assert all(answer.runs.values())
    return found


@pytest.mark.parametrize("bytes_max", [1, 60, 1000, 0])
async def test_pages_have_every_row_once_in_order_of_partition_and_key(
    bench: LoadsBench, bytes_max: int
) -> None:
    rng = random.Random(bytes_max)
    written = {
        (p, b"k%d" % rng.randrange(400)): b"v" * rng.randrange(40)
        for p in (0, 1, 3)
        for _ in range(40)
    }
    for (p, key), value in written.items():
        await bench.put(key, value=value, partition_id=p)
    await bench.stage(ROWS)
    answers = await pages(bench, *range(PARTITIONS), bytes_max=bytes_max)
    expected = [(p, key, value) for (p, key), value in sorted(written.items())]
    assert rows_by_partition(answers) == expected
    assert len(answers) == 1 or bytes_max
    for answer in answers[:-1]:
        assert answer.keys
    sizes = [sum(map(len, (*a.keys, *a.values))) for a in answers]
    assert not bytes_max or max(sizes) <= bytes_max + 200  # what a few rows have
    some = await pages(bench, 1, 2, prefix=b"k1", bytes_max=bytes_max)
    assert rows_by_partition(some) == [
        one for one in expected if one[0] == 1 and one[1].startswith(b"k1")
    ]
    assert rows_by_partition(await pages(bench, 0, 3, keys_only=True)) == [
        (p, key, b"") for p, key, _ in expected if p in (0, 3)
    ]


async def test_page_goes_on_after_its_cursor_which_need_not_be_a_key(bench: LoadsBench) -> None:
    await bench.put(b"a", b"b", b"c")
    await bench.put(b"a", partition_id=1)
    for after, expected in (
        (b"a", [b"b", b"c", b"a"]),
        (b"a\x00", [b"b", b"c", b"a"]),
        (b"c", [b"a"]),
        (b"zz", [b"a"]),
    ):
        answer = await bench.read_columns(0, 1, after_key=after)
        assert answer.keys == expected
    assert (await bench.read_columns(0, prefix=b"b", after_key=b"a")).keys == [b"b"]
    assert (await bench.read_columns(0, prefix=b"b", after_key=b"c")).keys == []


async def test_page_carries_versions_and_expiries_if_wanted(bench: LoadsBench) -> None:
    first = await bench.put(b"a", value=b"1")
    second = await bench.put(b"b", value=b"22", ttl_ms=500)
    third = await bench.put(b"c", value=b"")
    answer = await bench.read_columns(want_versions=True)
    assert answer.values == [b"1", b"22", b""]
    versions = [int(one.versions[0]) for one in (first, second, third)]
    assert answer.versions == versions
    assert answer.expires_at_ms == [0, bench.clock.ms + 500, 0]
    bare = await bench.read_columns()
    assert (bare.values, bare.versions, bare.expires_at_ms) == (answer.values, [], [])


async def test_expired_rows_are_not_served_and_are_removed(bench: LoadsBench) -> None:
    await bench.put(b"a", b"c", ttl_ms=50)
    await bench.put(b"b", ttl_ms=51)
    await bench.put(b"d")
    bench.clock.ms += 50
    answer = await bench.read_columns(want_versions=True)
    assert answer.keys == [b"b", b"d"]
    assert len(answer.versions) == len(answer.values) == 2
    assert set(bench.partition().records) == {b"b", b"d"}


def test_tombstones_are_left_out_and_a_partition_of_them_has_no_run(tmp_path: Path) -> None:
    rows = [row(0, (1, 2), (1,)), row(1, (1, 2), (1,))]

    async def use(bench: LoadsBench) -> None:
        await bench.put(b"a", b"b", b"c")
        await bench.put(b"a", partition_id=1)
        await bench.put(b"b", delete=True)
        await bench.put(b"a", partition_id=1, delete=True)
        assert bench.partition(1).records[b"a"].tombstone
        answer = await bench.read_columns(0, 1)
        assert (answer.keys, answer.runs) == ([b"a", b"c"], {0: 2})
        small = await pages(bench, 0, 1, bytes_max=1)
        assert rows_by_partition(small) == [(0, b"a", b"v"), (0, b"c", b"v")]

    with_loads(tmp_path, use, table=table_of(*rows))


async def test_partitions_that_are_not_served_are_listed_and_the_others_read(
    bench: LoadsBench,
) -> None:
    for p in range(4):
        await bench.put(b"k%d" % p, partition_id=p)
    bench.lose_partition_0()
    bench.state.stopped[2] = bench.state.any_stopped = True
    answer = await bench.read_columns(0, 1, 2, 3)
    assert answer.keys == [b"k1", b"k3"]
    assert {p: type(e) for p, e in answer.refusals.items()} == {
        0: PartitionOfflineError,
        2: PartitionOfflineError,
    }
    newer = await bench.read_columns(0, table_version=9)
    assert isinstance(newer.refusals[0], TableBehindError)


@pytest.mark.parametrize("lose", [LoadsBench.lose_lease, LoadsBench.lose_partition_0])
async def test_page_under_which_the_lease_or_partition_is_lost_is_refused(
    bench: LoadsBench, lose: Callable[[LoadsBench], None]
) -> None:
    await bench.put(b"a", b"b")
    bench.store.after_read = lambda: lose(bench)
    with pytest.raises(LeaseExpiredError):
        await bench.read_columns()
    assert bench.store.after_read is None


async def test_page_without_a_lease_is_refused_before_the_store_is_read(bench: LoadsBench) -> None:
    bench.lose_lease()
    bench.store.after_read = lambda: pytest.fail("it was read")
    with pytest.raises(LeaseExpiredError):
        await bench.read_columns()


@pytest.mark.bench(table=table_of(row(0, (1, 2)), loads=[OPEN]))
async def test_page_that_meets_a_write_not_yet_complete_waits_for_it(bench: LoadsBench) -> None:
    two = await joined(bench, 0)
    await turn()
    write = asyncio.ensure_future(bench.put(b"k", value=b"new"))
    await turn()
    reading = asyncio.ensure_future(bench.read_columns())
    await turn()
    assert bench.partition().values == {b"k": b"new"}
    assert not reading.done()
    await two.acknowledge()
    await write
    assert (await reading).values == [b"new"]


@pytest.mark.bench(limits=replace(Limits(), reading_bytes=1000))
async def test_pages_read_at_once_are_bounded_by_their_bytes(bench: LoadsBench) -> None:
    await bench.put(b"k", ttl_ms=10)
    bench.clock.ms += 10
    bench.channel.held = True
    reading = asyncio.ensure_future(bench.read_columns(bytes_max=600))
    await settle(reading)  # waits for the removal of what has expired
    with pytest.raises(ResourceExhaustedError):
        await bench.read_columns(bytes_max=600)
    assert (await bench.read_columns(1, bytes_max=400)).keys == []
    bench.channel.release()
    await reading
    assert (await bench.read_columns(bytes_max=5000)).keys == []  # one page is always read


async def test_page_larger_than_the_servers_bound_is_cut_to_it(
    bench: LoadsBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(column_reader, "PAGE_BYTES", 200)
    await bench.put(*(b"%03d" % n for n in range(300)))
    for bytes_max in (0, 10**6):
        answers = await pages(bench, 0, bytes_max=bytes_max)
        assert len(answers) > 3
        assert len(rows_by_partition(answers)) == 300


async def test_record_header_is_no_part_of_a_page(bench: LoadsBench) -> None:
    """Rows of mixed kinds: with and without an expiry, in one page and in pages of one."""
    for n in range(12):
        await bench.put(b"%02d" % n, value=b"v%d" % n, ttl_ms=1000 * (n % 3))
    expected = [(0, b"%02d" % n, b"v%d" % n) for n in range(12)]
    for bytes_max in (0, 1, 40):
        assert rows_by_partition(await pages(bench, 0, bytes_max=bytes_max)) == expected
    assert records.HEADER_BYTES == 9


# --- what a page may cost ----------------------------------------------------------------------


async def test_page_that_meets_many_expired_rows_removes_some_of_them_and_goes_on_next_time(
    bench: LoadsBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(column_reader, "_SCAN_ROWS", 10)
    monkeypatch.setattr(column_reader, "_DEAD_ROWS_MAX", 20, raising=False)
    removed: list[int] = []
    await bench.put(*(b"%03d" % n for n in range(100)), ttl_ms=10)
    await bench.put(b"live")
    bench.clock.ms += 10
    remove = bench.engine.expiry.remove_expired

    async def remove_expired(keys: list[bytes], view: Any) -> None:
        removed.append(len(keys))
        await remove(keys, view)

    monkeypatch.setattr(bench.engine.expiry, "remove_expired", remove_expired)
    assert rows_by_partition(await pages(bench, 0)) == [(0, b"live", b"v")]
    assert sum(removed) == 100
    assert max(removed) <= 30
    assert set(bench.partition().records) == {b"live"}


@pytest.mark.parametrize("keys_only", [False, True])
async def test_others_run_while_a_page_reads_large_values(
    bench: LoadsBench, monkeypatch: pytest.MonkeyPatch, keys_only: bool
) -> None:
    monkeypatch.setattr(column_reader, "_SCAN_BYTES", 1_000)
    await bench.put(*(b"%03d" % n for n in range(100)), value=bytes(500))
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    counting = asyncio.create_task(count())
    await asyncio.sleep(0)
    answer = await bench.read_columns(keys_only=keys_only)
    counting.cancel()
    assert len(answer.keys) == 100
    assert turns >= 20
