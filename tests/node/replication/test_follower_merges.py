"""Merge steps at a follower: applied where batches are, a gap where they are kept back."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from koinon_node.bulk_load import staged_chunks
from koinon_node.core.formats import record_layout, records
from koinon_node.core.formats.chunk_keys import Mark, chunk_key, encode_mark, mark_key
from koinon_node.core.formats.records import PartitionEpochs
from koinon_node.core.replication import replica_sync
from koinon_node.core.replication.copies import CopyState
from koinon_node.core.replication.replica_sync import Stage
from koinon_node.replication import catch_up
from koinon_node.replication.catch_up import crc_of
from koinon_proto.contract.columns import DELETED
from koinon_proto.v1 import replication_pb2 as wire
from tests.kit.waiting import until
from tests.node.kit.held_writer import EPOCH, table_of
from tests.node.kit.held_writer import row_of as row
from tests.node.kit.loads_bench import MERGING, OPEN, LoadsBench, with_loads
from tests.node.kit.played_follower import joined
from tests.node.kit.scripted_primary import (
    E4,
    E5,
    Rig,
    ScriptedPrimary,
    a_row,
    a_table,
    follow,
    live,
    one_row,
)
from tests.node.kit.staged_chunks import LOAD, Rows, chunk_of, content, step_of

LATER_MS = 2_000_000_000_000
KEY = bytes([records.STAGED]) + chunk_key(LOAD, 1, 0)
MARK = bytes([records.STAGED]) + mark_key(LOAD)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that is held gives nothing up by itself."""
    monkeypatch.setattr(catch_up, "CALL_TIMEOUT_S", 60.0)


def stage(primary: ScriptedPrimary, rows: Rows, *, number: int = 0, partition_id: int = 0) -> int:
    key = bytes([records.STAGED]) + chunk_key(LOAD, 1, number)
    return primary.write(partition_id, {key: chunk_of(rows)})


def merge(
    primary: ScriptedPrimary, rows: Rows, *, until_key: bytes = b"", partition_id: int = 0
) -> int:
    """Merge rows of chunk 0, or all of it."""
    step = step_of((1, 0), rows=len(rows), until=until_key, partition_id=partition_id)
    step.tombstone_at_ms = LATER_MS
    effect = {b"\0" + key: value for key, value in rows}
    effect[MARK] = encode_mark(Mark(not until_key, until_key))
    return primary.merge(partition_id, step, effect)


def users(rig: Rig, partition_id: int = 0) -> dict[bytes, bytes]:
    found = rig.values(partition_id).items()
    return {key[1:]: value for key, value in found if key[0] == records.USER}


@contextlib.contextmanager
def stopped_writer(rig: Rig) -> Iterator[None]:
    """Stop the writer meanwhile: what is queued is committed together later, after the first."""
    os.kill(rig.writer.process_id, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(rig.writer.process_id, signal.SIGCONT)


def stage_of(rig: Rig, partition_id: int = 0) -> Stage:
    stages = [
        followed.stage
        for link in rig.follower._context.links.values()
        for p, followed in link.following.partitions.items()
        if p == partition_id
    ]
    return stages[0] if stages else Stage.WAITING


# --- applied -----------------------------------------------------------------------------------


async def a_primarys_day(bench: LoadsBench) -> list[wire.Batch]:
    """Write, load and replace in partition 0; return what a follower is sent."""
    two = await joined(bench, 0)
    keys = [b"%03d" % n for n in range(60)]

    async def acknowledge() -> None:
        while True:
            await asyncio.sleep(0.001)
            if not two.end.inbox.empty():
                await two.acknowledge()

    acknowledging = asyncio.create_task(acknowledge())
    await bench.put(*keys[:20], b"p1", b"p2", value=b"old", ttl_ms=60_000)
    await bench.put(*keys[:5], delete=True)
    for number in range(3):
        rows = [(key, b"%d of %s" % (number, key)) for key in keys[number :: number + 1]]
        orders = [hash_of(key, number) for key, _ in rows] if number else None
        expires = (bench.clock.ms + 90_000) * (number == 1)
        await bench.stage(rows, number=number, orders=orders, expires_at_ms=expires)
    mixed = [(keys[30], b""), (keys[31], b"mixed"), (keys[32], b"mixed"), (b"never", b"")]
    own = [DELETED, bench.clock.ms + 90_000, 0, DELETED]
    await bench.stage(mixed, number=3, orders=[9] * 4, expiries=own)
    await bench.stage([(b"stray", b"lost")], attempt=2)
    bench.coordinators.commit(1, replace=True)
    bench.loads_are(MERGING)
    async with bench.loading():
        live = 0
        while not bench.coordinators.reports:
            live += 1
            await bench.put(keys[live % 60], b"live%d" % live, value=b"live")
        bench.loads_are()
        await until(lambda: not staged_chunks.staged_loads(bench.store, [0]), "it is swept")
    await bench.put(keys[7], value=b"last")
    acknowledging.cancel()
    two.take()
    return two.batches


def hash_of(key: bytes, number: int) -> int:
    return (int(key) * 7 + number) % 5


def test_copy_of_a_live_follower_ends_as_its_primarys_byte_by_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staged_chunks, "STEP_BYTES", 120)
    (tmp_path / "primary").mkdir()
    (tmp_path / "follower").mkdir()
    left: list[Any] = []

    async def lead(bench: LoadsBench) -> list[wire.Batch]:
        batches = await a_primarys_day(bench)
        left.append(content(bench.store))
        left.append(bench.store.read_copies([0])[0])
        return batches

    table = table_of(row(0, (1, 2)), loads=[OPEN])
    batches = with_loads(tmp_path / "primary", lead, table=table)
    assert sum(len(batch.merges) for batch in batches) > 5
    primary = ScriptedPrimary()
    primary.lead(0, EPOCH)

    async def test(rig: Rig) -> None:
        rig.on_table(a_table(1, [a_row(0, epoch=EPOCH)]))
        await live(rig, primary)
        for batch in batches:
            primary.stream.respond(wire.FollowResponse(batch=batch))
        await until(lambda: primary.acknowledged() == batches[-1].number, "all is acknowledged")
        data, expiry = content(rig.store)
        assert data == left[0][0]
        needed = set(record_layout.expiry_keys_of(list(data), list(data.values())))
        assert needed
        assert needed <= set(expiry)  # others fit no record: they depend on the writer's groups
        assert needed <= set(left[0][1])
        copy = left[1]
        durable = (copy.complete_through, CopyState.USABLE, copy.purge_floor)
        assert rig.durable(0) == durable

    follow(tmp_path / "follower", primary, test)


def test_rows_before_a_step_lose_and_rows_after_it_win_in_one_group_of_the_writer(
    tmp_path: Path,
) -> None:
    primary = ScriptedPrimary()
    primary.lead(0, 5)

    async def test(rig: Rig) -> None:
        rig.on_table(one_row())
        await live(rig, primary)
        with stopped_writer(rig):
            primary.write(0, {b"\0first": b"1"})
            await until(lambda: rig.writer._in_flight, "a group is under way")
            group = rig.writer.pending.open.number
            stage(primary, [(b"a", b"new"), (b"b", b"new"), (b"c", b"new")])
            primary.write(0, {b"\0a": b"before", b"\0b": b"before"})
            merge(primary, [(b"a", b"new"), (b"b", b"new"), (b"c", b"new")])
            last = primary.write(0, {b"\0b": b"after", b"\0d": b"after"})
            await until(lambda: rig.follower.applier.busy[0] == 5, "all is queued")
            assert rig.writer.pending.open.number == group
        await until(lambda: primary.acknowledged() == 5, "all is acknowledged")
        assert users(rig) == {
            b"a": b"new",
            b"b": b"after",
            b"c": b"new",
            b"d": b"after",
            b"first": b"1",
        }
        assert rig.durable(0) == (last, CopyState.USABLE, 0)
        assert rig.rows(0)[KEY].tombstone

    follow(tmp_path, primary, test)


def test_step_that_comes_while_the_position_is_on_its_way_is_applied(tmp_path: Path) -> None:
    primary = ScriptedPrimary()
    primary.lead(0, 5)

    async def test(rig: Rig) -> None:
        with stopped_writer(rig):
            rig.on_table(one_row())
            await until(lambda: stage_of(rig) is Stage.POSITIONING, "its position is on its way")
            stage(primary, [(b"a", b"new")])
            last = merge(primary, [(b"a", b"new")])
            await until(lambda: rig.follower.applier.busy[0] == 3, "all is queued")
        await until(lambda: primary.acknowledged() == 2, "all is acknowledged")
        assert users(rig) == {b"a": b"new"}
        assert rig.durable(0)[0] == last
        assert len(primary.streams) == primary.count("open") == 1

    follow(tmp_path, primary, test)


def test_step_that_leaves_no_tombstones_raises_the_purge_floor(tmp_path: Path) -> None:
    primary = ScriptedPrimary()
    primary.lead(0, 5)

    async def test(rig: Rig) -> None:
        rig.on_table(one_row())
        await live(rig, primary)
        primary.write(0, {b"\0gone": b"old"})
        stage(primary, [(b"a", b"new")])
        step = step_of((1, 0), rows=1, replace=True)
        last = primary.merge(0, step, {})
        await until(lambda: primary.acknowledged() == 3, "all is acknowledged")
        assert users(rig) == {b"a": b"new"}
        assert set(rig.rows(0)) == {b"\0a", MARK}
        assert rig.durable(0) == (last, CopyState.USABLE, last)
        assert int(rig.copies.purge_floors[0]) == last

    follow(tmp_path, primary, test)


def test_steps_of_several_partitions_come_in_one_batch(tmp_path: Path) -> None:
    """One of them is being caught up: to it the step is a gap, to the other it is not."""
    primary = ScriptedPrimary()
    primary.lead(0, 5)
    behind = primary.lead(1, 5)
    stage(primary, [(b"a", b"new")], partition_id=1)
    gate = asyncio.Event()

    async def hold(request: wire.ReadPageRequest) -> None:
        await gate.wait()

    async def test(rig: Rig) -> None:
        primary.before_page = hold
        rows = [a_row(0), a_row(1, in_sync=False), *one_row().rows[2:]]
        rig.on_table(a_table(1, rows))
        await live(rig, primary)
        await until(lambda: stage_of(rig, 1) is Stage.CATCH_UP, "the other is caught up")
        stage(primary, [(b"a", b"new")])
        batch = wire.Batch(number=primary.stream.batches + 1)
        primary.stream.batches += 1
        primary.silent = True
        for p in (0, 1):
            lead = primary.leads[p]
            batch.partition_ids.append(p)
            batch.primary_epochs.append(5)
            batch.previous.append(lead.streamed)
            merge(primary, [(b"a", b"new")], partition_id=p)
            batch.last.append(lead.streamed)
            step = step_of(
                (1, 0), rows=1, partition_id=p, sequence=lead.streamed, tombstone_at_ms=LATER_MS
            )
            batch.merges.append(step.SerializeToString())
        primary.silent = False
        batch.crc32 = wire_crc(batch)
        primary.stream.respond(wire.FollowResponse(batch=batch))
        await until(lambda: users(rig) == {b"a": b"new"}, "it is applied to one")
        await until(lambda: primary.count("close") == 1, "the other is given up")
        gate.set()
        await until(lambda: primary.positions().get(1) == behind.streamed, "it is caught up")
        assert users(rig, 1) == {b"a": b"new"}
        assert primary.count("open") == 2
        assert len(primary.streams) == 1

    follow(tmp_path, primary, test)


def wire_crc(batch: wire.Batch) -> int:
    return crc_of(list(batch.keys), list(batch.records), list(batch.merges))


def test_step_of_a_deposed_primary_is_not_applied(tmp_path: Path) -> None:
    primary = ScriptedPrimary()
    primary.lead(0, 5)

    async def test(rig: Rig) -> None:
        rig.on_table(one_row())
        await live(rig, primary)
        last = stage(primary, [(b"a", b"new")])
        step = step_of((1, 0), rows=1, sequence=last + 1)
        primary.stream_batch(
            primary.stream, 0, last, last + 1, {}, epoch=4, merges=[step.SerializeToString()]
        )
        primary.write(0, {b"\0k": b"v"})
        await until(lambda: primary.acknowledged() == 3, "all is acknowledged")
        assert users(rig) == {b"k": b"v"}

    follow(tmp_path, primary, test)


# --- a gap -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "stage_then", [Stage.REPAIR, Stage.CATCH_UP, Stage.JOINING], ids=lambda stage: stage.name
)
def test_step_for_a_copy_that_keeps_back_is_a_gap_and_is_caught_up_on(
    tmp_path: Path, stage_then: Stage
) -> None:
    primary = ScriptedPrimary()
    lead = primary.lead(0, 5, [(4, 0), (5, E4 + 1)])
    lead.rows = {b"\0kept": records.encode_record(E4 + 1, b"old")}
    lead.streamed = E5
    stage(primary, [(b"a", b"new"), (b"kept", b"new")])
    gate = asyncio.Event()

    async def hold(_: Any) -> None:
        await gate.wait()

    async def write_unheard(_: Any) -> None:
        primary.before_page = None
        primary.silent = True
        primary.write(0, {b"\0unheard": b"v"})
        primary.silent = False

    async def test(rig: Rig) -> None:
        tail = {b"\0kept": records.encode_record(E4 + 1, b"old")}
        if stage_then is Stage.REPAIR:
            tail[b"\0tail"] = records.encode_record(E4 + 2, b"tail")
            primary.before_keys = hold
        else:
            primary.before_page = hold if stage_then is Stage.CATCH_UP else write_unheard
        await rig.put(
            0,
            tail,
            through=max(records.decode_record(r).sequence for r in tail.values()),
            epochs=PartitionEpochs(primary_epoch=4, history=(records.EpochStart(4, 0),)),
        )
        rig.on_table(one_row(in_sync=False))
        await until(lambda: stage_of(rig) is stage_then, "it keeps back what is streamed")
        if stage_then is Stage.JOINING:
            await until(lambda: users(rig).get(b"unheard"), "the pass brought a newer record")
        last = merge(primary, [(b"a", b"new"), (b"kept", b"new")])
        await until(lambda: primary.count("close") == 1, "it is given up")
        gate.set()
        await until(lambda: primary.positions().get(0) == last, "it is caught up on")
        expected = {b"a": b"new", b"kept": b"new"}
        if stage_then is Stage.JOINING:
            expected[b"unheard"] = b"v"
        assert users(rig) == expected
        assert rig.durable(0)[:2] == (last, CopyState.USABLE)
        assert len(primary.streams) == 1
        stage(primary, [(b"b", b"new")])
        merge(primary, [(b"b", b"new")])
        await until(lambda: users(rig).get(b"b"), "the next one is applied")

    follow(tmp_path, primary, test)


def test_step_after_more_was_kept_back_than_there_is_room_for_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pass goes on for what it brings, and the partition is opened again anyway."""
    monkeypatch.setattr(replica_sync, "BUFFER_PARTITION_BYTES_MAX", 1_000)
    primary = ScriptedPrimary()
    primary.lead(0, 5)
    stage(primary, [(b"a", b"new")])

    async def test(rig: Rig) -> None:
        async def write_much(_: Any) -> None:
            primary.before_page = None
            primary.write(0, {b"\0much": bytes(2_000)})
            merge(primary, [(b"a", b"new")])
            for _ in range(100):
                await asyncio.sleep(0)

        primary.before_page = write_much
        rig.on_table(one_row(in_sync=False))
        await live(rig, primary)
        await until(lambda: primary.positions()[0] == primary.leads[0].streamed, "caught up")
        assert users(rig) == {b"a": b"new", b"much": bytes(2_000)}

    follow(tmp_path, primary, test)


def test_step_after_a_gap_in_the_stream_is_not_applied(tmp_path: Path) -> None:
    primary = ScriptedPrimary()
    primary.lead(0, 5)

    async def test(rig: Rig) -> None:
        rig.on_table(one_row())
        await live(rig, primary)
        primary.silent = True
        stage(primary, [(b"a", b"new")])
        primary.silent = False
        last = merge(primary, [(b"a", b"new")])  # the chunk was never heard of
        await until(lambda: primary.positions()[0] == last, "it is caught up on")
        assert primary.count("close") == 1
        assert users(rig) == {b"a": b"new"}

    follow(tmp_path, primary, test)


def test_journal_of_a_follower_answers_nothing_from_before_a_step(tmp_path: Path) -> None:
    primary = ScriptedPrimary()
    primary.lead(0, 5)

    async def test(rig: Rig) -> None:
        rig.on_table(one_row())
        await live(rig, primary)
        before = stage(primary, [(b"a", b"new")])
        await until(lambda: primary.acknowledged() == 1, "it is staged")
        assert rig.journal.since(0, E5) == [b"\0\0" + KEY]
        last = merge(primary, [(b"a", b"new")])
        primary.write(0, {b"\0b": b"1"})
        await until(lambda: primary.acknowledged() == 3, "all is acknowledged")
        assert rig.journal.since(0, E5) is None
        assert rig.journal.since(0, before) is None
        assert rig.journal.since(0, last) == [b"\0\0\0b"]

    follow(tmp_path, primary, test)


# --- damaged -----------------------------------------------------------------------------------


def spoilt(how: str, good: wire.MergeStep) -> tuple[list[bytes], int]:
    """Return (what is sent as the merges, by what the checksum is off)."""
    other = wire.MergeStep()
    other.CopyFrom(good)
    other.partition_id = 3
    return {
        "checksum": ([good.SerializeToString()], 1),
        "garbage": ([b"\xff" * 40], 1),
        "twice": ([good.SerializeToString()] * 2, 0),
        "not named": ([other.SerializeToString()], 0),
    }[how]


@pytest.mark.parametrize("how", ["checksum", "garbage", "twice", "not named"])
def test_batch_with_a_step_that_is_damaged_ends_the_stream(tmp_path: Path, how: str) -> None:
    primary = ScriptedPrimary()
    lead = primary.lead(0, 5)

    async def test(rig: Rig) -> None:
        rig.on_table(one_row())
        await live(rig, primary)
        last = stage(primary, [(b"a", b"new")])
        merges, crc_off = spoilt(how, step_of((1, 0), rows=1, sequence=last + 1))
        primary.stream_batch(primary.stream, 0, last, last + 1, {}, merges=merges, crc_off=crc_off)
        lead.streamed = last + 1
        lead.rows[b"\0a"] = records.encode_record(last + 1, b"whole")
        await until(lambda: primary.positions()[0] == last + 1, "it opened again")
        assert len(primary.streams) == 2
        assert users(rig) == {b"a": b"whole"}

    follow(tmp_path, primary, test)


def test_checksum_is_over_keys_then_records_then_merges() -> None:
    assert crc_of([b"k", b"l"], [b"r"], [b"m", b"n"]) == zlib.crc32(b"klrmn")
    assert crc_of([b"k"], [b"r"]) == crc_of([b"k"], [b"r"], []) == zlib.crc32(b"kr")
