"""A follower's work on its copy: it repairs its tail, replaces it, purges it (rules 12 to 16)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from koinon_node.core.formats import records
from koinon_node.core.formats.records import NO_SEQUENCE, EpochStart, PartitionEpochs
from koinon_node.core.replication.copies import CopyState
from koinon_node.core.replication.openings import ProgressStage
from koinon_node.storage.environment import DATA_DB, PARTITIONS_DB
from koinon_proto.v1 import replication_pb2 as wire
from tests.kit.waiting import until
from tests.node.kit.scripted_primary import (
    E4,
    E5,
    E6,
    P1,
    P2,
    Both,
    Rig,
    ScriptedPrimary,
    follow,
    live,
    one_row,
    value,
)

# --- rule 12 ---------------------------------------------------------------------------------


@pytest.mark.parametrize("in_sync", [True, False])
@pytest.mark.parametrize("covered", [True, False])
def test_rule_12_tail_is_replaced_without_comparing_and_before_the_pass(
    tmp_path: Path, covered: bool, in_sync: bool
) -> None:
    old, new = ScriptedPrimary(P1), ScriptedPrimary(P2)
    lead = old.lead(0, 4)

    async def test(rig: Rig) -> None:
        rig.on_table(one_row(epoch=4))
        await live(rig, old)
        common = old.write(0, {b"a": b"1", b"b": b"1", b"c": b"1"})
        old.write(0, {b"a": b"tail", b"b": None, b"d": b"tail"})
        await until(lambda: old.acknowledged() == 2, "both are here")
        if not covered:
            rig.journal.reset(0, records.NO_SEQUENCE)
            rig.follower._context.uncovered.add(0)
        # The new lineage: a keeps its older record, b and c were overwritten, d was never there.
        follows = new.lead(0, 6, [(4, 0), (6, common)])
        follows.rows = {b"a": value(common - 2, b"1"), b"b": value(E6 + 1, b"2")}
        follows.rows[b"c"] = value(E6 + 2, b"2")
        follows.streamed = E6 + 2
        order: list[str] = []

        async def note(request: wire.ReadPageRequest) -> None:
            order.append(f"page from {request.after_sequence} after {len(new.keys_requests)}")
            assert rig.history(0) == (EpochStart(4, 0),)
            if in_sync:  # it may be elected now: nothing of the repair shows before all of it
                assert rig.durable(0)[:2] == (common + 3, CopyState.USABLE)
                assert rig.values(0) == {b"a": b"tail", b"c": b"1", b"d": b"tail"}
            else:
                assert rig.durable(0)[:2] == (common, CopyState.DIRTY_TAIL)
                assert b"d" not in rig.values(0)

        new.before_page = note
        rig.on_table(one_row(2, primary=P2, epoch=6, in_sync=in_sync))
        await live(rig, new)
        assert order == [f"page from {common} after 1"]
        assert rig.values(0) == {b"a": b"1", b"b": b"2", b"c": b"2"}
        assert rig.durable(0) == (E6 + 2, CopyState.USABLE, common)  # d left no tombstone
        assert lead.streamed == common + 3
        assert rig.journal.since(0, E6 + 2) == []

    follow(tmp_path, Both(old, new), test)


def test_rule_12_what_was_queued_as_the_primary_is_repaired_too(tmp_path: Path) -> None:
    """It was deposed by a row that overtook its own last group on the way to a slow disk."""
    new = ScriptedPrimary(P2)

    async def test(rig: Rig) -> None:
        kept, tail = E5 + 1, E5 + 2
        history = PartitionEpochs(primary_epoch=5, history=(EpochStart(5, 0),))
        await rig.put(0, {b"a": value(kept, b"1")}, through=kept, epochs=history)
        rig.journal.reset(0, kept)
        context = rig.follower._context
        context.uncovered.discard(0)
        new.lead(0, 6, [(5, 0), (6, kept)]).rows = {b"a": value(kept, b"1")}
        held: list[Any] = []
        send = rig.writer._channel.send
        rig.writer._channel.send = held.append  # type: ignore[assignment]
        ids = np.array([0], np.uint32)
        key = records.prefix_of(0) + b"tail"
        progress = records.encode_progress(np.array([tail], np.uint64), np.zeros(1, np.uint64))
        writes: Any = (
            (DATA_DB, [key], [value(tail, b"unacknowledged")]),
            (PARTITIONS_DB, records.progress_keys(ids), progress),
        )
        write = rig.writer.submit(writes, 1, 100, touched=ids)
        rig.on_table(one_row(1, primary=P2, epoch=6))
        await asyncio.sleep(0.1)
        context.journal.append(ids, np.array([tail], np.uint64), [key])  # as when it is sealed
        context.copies.complete_through[0] = tail  # and committed
        rig.writer._channel.send = send  # type: ignore[method-assign]
        for frame in held:
            send(frame)
        await write
        await live(rig, new)
        assert rig.values(0) == {b"a": b"1"}

    follow(tmp_path, new, test)


def test_rule_12_half_a_repair_is_begun_again_by_a_new_process(tmp_path: Path) -> None:
    primary = ScriptedPrimary()
    primary.lead(0, 6, [(4, 0), (6, E4 + 3)]).rows = {b"a": value(E4 + 1, b"1")}
    tail = {b"a": value(E4 + 4, b"tail"), b"b": value(E4 + 5, b"tail")}

    async def half(rig: Rig) -> None:
        await rig.put(
            0,
            tail,
            through=E4 + 3,
            epochs=PartitionEpochs(primary_epoch=6, history=(EpochStart(4, 0),)),
            state=CopyState.DIRTY_TAIL,
        )

    async def again(rig: Rig) -> None:
        assert rig.copies.states[0] == CopyState.DIRTY_TAIL
        rig.on_table(one_row(epoch=6))
        await live(rig, primary)
        assert rig.values(0) == {b"a": b"1"}
        assert rig.durable(0)[:2] == (E6, CopyState.USABLE)

    follow(tmp_path, primary, half)
    follow(tmp_path, primary, again)


# --- rule 14 ---------------------------------------------------------------------------------


def test_rule_14_snapshot_replaces_ranges_and_is_unusable_until_its_end(tmp_path: Path) -> None:
    primary = ScriptedPrimary()
    lead = primary.lead(0, 5)
    primary.write(0, {b"%03d" % number: b"new" for number in range(0, 100, 2)})
    lead.floor = E5 + 20
    primary.page_rows = 10

    async def test(rig: Rig) -> None:
        own = {b"%03d" % number: value(E4 + 1 + number, b"old") for number in range(100)}
        old = PartitionEpochs(primary_epoch=4, history=(EpochStart(4, 0),))
        await rig.put(0, own, through=E4 + 100, epochs=old)
        gate = asyncio.Event()

        at_pages = []

        async def hold(request: wire.ReadPageRequest) -> None:
            at_pages.append(rig.durable(0)[1])
            if request.after_key >= b"038":
                primary.write(0, {b"000": b"newer"})
                primary.before_page = None
                await gate.wait()

        primary.before_page = hold
        rig.on_table(one_row(in_sync=False))
        await until(lambda: b"037" not in rig.values(0), "some ranges are replaced")
        assert rig.durable(0)[:2] == (0, CopyState.UNUSABLE)
        assert rig.history(0) == ()
        assert rig.values(0)[b"099"] == b"old"
        assert [p.stage for p in rig.follower.progress()] == [ProgressStage.SNAPSHOT]
        assert set(at_pages) == {CopyState.UNUSABLE}  # from before the first page
        gate.set()
        await live(rig, primary)
        assert rig.values(0) == {key: lead.value(key) for key in lead.rows}
        assert rig.values(0)[b"000"] == b"newer"
        assert rig.durable(0) == (lead.streamed, CopyState.USABLE, E5 + 20)

    follow(tmp_path, primary, test)


def test_rule_14_snapshot_is_complete_through_its_first_pages_bound_be_it_0(tmp_path: Path) -> None:
    """A primary's first page may be read before its store has any position of the partition."""
    primary = ScriptedPrimary()
    lead = primary.lead(0, 5)
    primary.write(0, {b"%03d" % number: b"new" for number in range(20)})
    lead.floor = E5 + 1
    primary.page_rows = 10

    async def write_behind(request: wire.ReadPageRequest) -> None:
        if request.after_key:
            primary.write(0, {b"000": b"newer"})
            primary.before_page, lead.floor = None, 0

    def without_position(page: wire.RecordPage) -> None:
        page.bound, primary.spoil = 0, None

    async def test(rig: Rig) -> None:
        await rig.put(0, {b"zzz": value(E4 + 1, b"old")}, through=E4 + 1)
        primary.before_page, primary.spoil = write_behind, without_position
        rig.on_table(one_row(in_sync=False))
        await live(rig, primary)
        assert rig.values(0) == {key: lead.value(key) for key in lead.rows}
        assert rig.values(0)[b"000"] == b"newer"

    follow(tmp_path, primary, test)


def test_rule_14_snapshot_cut_short_is_taken_again_by_a_new_process(tmp_path: Path) -> None:
    primary = ScriptedPrimary()
    lead = primary.lead(0, 5)
    primary.write(0, {b"%03d" % number: b"new" for number in range(20)})
    primary.page_rows = 10

    async def half(rig: Rig) -> None:
        lead.floor = E5 + 1
        await rig.put(0, {b"zzz": value(E4 + 1, b"old")}, through=E4 + 1)

        async def hang(request: wire.ReadPageRequest) -> None:
            if request.after_key:
                await asyncio.Event().wait()

        primary.before_page = hang
        rig.on_table(one_row(in_sync=False))
        await until(lambda: b"005" in rig.values(0), "the first page is here")

    async def again(rig: Rig) -> None:
        assert rig.copies.states[0] == CopyState.UNUSABLE
        lead.floor = 0
        primary.before_page = None
        rig.on_table(one_row(in_sync=False))
        await live(rig, primary)
        opened = [o.needs_snapshot for r in primary.requests for o in r.open.partitions]
        assert opened[-2:] == [True, False]
        assert rig.values(0) == {key: lead.value(key) for key in lead.rows}

    follow(tmp_path, primary, half)
    follow(tmp_path, primary, again)


def test_rule_14_no_snapshot_while_the_row_says_in_sync(tmp_path: Path) -> None:
    primary = ScriptedPrimary()
    lead = primary.lead(0, 5)
    primary.write(0, {b"a": b"new"})
    lead.floor = E5 + 1

    async def test(rig: Rig) -> None:
        old = PartitionEpochs(primary_epoch=4, history=(EpochStart(4, 0),))
        await rig.put(0, {b"z": value(E4 + 1, b"old")}, through=E4 + 1, epochs=old)
        rig.on_table(one_row())
        await until(lambda: primary.count("open") >= 3, "it asks again")
        assert rig.durable(0)[:2] == (E4 + 1, CopyState.USABLE)
        assert not primary.page_requests
        rig.on_table(one_row(2, in_sync=False, partition_epoch=9))
        await live(rig, primary)
        assert rig.values(0) == {b"a": b"new"}

    follow(tmp_path, primary, test)


def test_rule_14_pass_is_void_once_the_primary_has_purged_above_its_start(tmp_path: Path) -> None:
    primary = ScriptedPrimary()
    lead = primary.lead(0, 5)
    primary.page_rows = 2
    primary.write(0, {b"a": b"1", b"b": b"1", b"c": b"1", b"d": b"1"})

    async def test(rig: Rig) -> None:
        old = PartitionEpochs(primary_epoch=5, history=(EpochStart(5, 0),))
        rows = {b"a": value(E5 + 1, b"1"), b"b": value(E5 + 2, b"1"), b"c": value(E5 + 3, b"1")}
        await rig.put(0, rows, through=E5 + 3, epochs=old)
        primary.write(0, {b"a": b"2", b"aa": b"2", b"b": b"2"})

        async def purge(request: wire.ReadPageRequest) -> None:
            if request.after_key and not request.snapshot:
                lead.streamed += 1  # c was deleted, and its tombstone is purged already
                del lead.rows[b"c"]
                lead.floor = lead.streamed
                primary.before_page = None

        primary.before_page = purge
        rig.on_table(one_row(in_sync=False))
        await live(rig, primary)
        assert any(request.snapshot for request in primary.page_requests)
        assert rig.values(0) == {key: lead.value(key) for key in lead.rows}
        assert b"c" not in rig.rows(0)
        assert rig.durable(0)[2] == lead.floor

    follow(tmp_path, primary, test)


def test_rule_13_follower_keeps_what_has_expired_until_its_primary_removes_it(
    tmp_path: Path,
) -> None:
    primary = ScriptedPrimary()
    lead = primary.lead(0, 5)

    async def test(rig: Rig) -> None:
        rig.on_table(one_row())
        await live(rig, primary)
        expired = {b"e": records.encode_record(E5 + 1, b"v", 1)}
        primary.stream_batch(primary.stream, 0, E5, E5 + 1, expired)
        lead.streamed = E5 + 1
        last = primary.write(0, {b"t": None})
        await until(lambda: primary.acknowledged() == 2, "both are here")
        floors = wire.PurgeFloors(partition_ids=[0], sequences=[last])
        primary.stream.respond(wire.FollowResponse(floors=floors))
        await until(lambda: b"t" not in rig.rows(0), "the tombstone is purged")
        await rig.follower._purge.step(1_000)
        assert set(rig.rows(0)) == {b"e"}

    follow(tmp_path, primary, test)


def test_rule_14_tombstones_are_purged_only_up_to_the_announced_floor(tmp_path: Path) -> None:
    primary = ScriptedPrimary()
    primary.lead(0, 5)

    async def test(rig: Rig) -> None:
        rig.on_table(one_row())
        await live(rig, primary)
        primary.write(0, {b"a": b"1", b"b": b"1"})
        floor = primary.write(0, {b"a": None})
        last = primary.write(0, {b"b": None})
        await until(lambda: primary.acknowledged() == 3, "all is here")
        assert not await rig.follower._purge.step(1_000)
        assert set(rig.rows(0)) == {b"a", b"b"}
        floors = wire.PurgeFloors(partition_ids=[0], sequences=[floor])
        primary.stream.respond(wire.FollowResponse(floors=floors))
        await until(lambda: b"a" not in rig.rows(0), "the first is purged")
        await rig.follower._purge.step(1_000)
        assert set(rig.rows(0)) == {b"b"}
        assert rig.durable(0) == (last, CopyState.USABLE, floor)

    follow(tmp_path, primary, test)


# --- rule 16 ---------------------------------------------------------------------------------


def test_rule_16_batch_with_another_checksum_ends_the_stream(tmp_path: Path) -> None:
    primary = ScriptedPrimary()
    lead = primary.lead(0, 5)

    async def test(rig: Rig) -> None:
        rig.on_table(one_row())
        await live(rig, primary)
        bad = {b"a": value(E5 + 1, b"torn")}
        primary.stream_batch(primary.stream, 0, E5, E5 + 1, bad, crc_off=1)
        lead.rows, lead.streamed = {b"a": value(E5 + 1, b"whole")}, E5 + 1
        await until(lambda: primary.positions()[0] == E5 + 1, "it opened again")
        assert len(primary.streams) == 2
        assert rig.values(0) == {b"a": b"whole"}

    follow(tmp_path, primary, test)


@pytest.mark.parametrize("how", ["checksum", "order"])
def test_rule_16_damaged_page_is_asked_for_again(tmp_path: Path, how: str) -> None:
    primary = ScriptedPrimary()
    primary.lead(0, 5)
    primary.write(0, {b"a": b"1", b"b": b"1"})

    async def test(rig: Rig) -> None:
        def spoil(page: wire.RecordPage) -> None:
            primary.spoil = None
            if how == "checksum":
                page.records[0] = page.records[1]
            else:
                keys, rows = list(page.keys)[::-1], list(page.records)[::-1]
                honest = primary._page(primary.leads[0], list(zip(keys, rows, strict=True)))
                del page.keys[:], page.records[:]
                page.MergeFrom(honest)

        primary.spoil = spoil
        rig.on_table(one_row(in_sync=False))
        await live(rig, primary)
        assert len(primary.page_requests) == 2
        assert rig.values(0) == {b"a": b"1", b"b": b"1"}

    follow(tmp_path, primary, test)


# --- epochs without a write ------------------------------------------------------------------


@pytest.mark.parametrize("is_known", [True, False])
def test_rule_12_copy_that_led_without_a_write_is_level_only_if_that_is_known(
    tmp_path: Path, is_known: bool
) -> None:
    kept = E4 + 2
    primary = ScriptedPrimary()
    lead = primary.lead(0, 6, [(4, 0), (6, kept)])
    lead.rows[b"a"] = value(kept, b"1")

    async def test(rig: Rig) -> None:
        led = PartitionEpochs(
            primary_epoch=5,
            history=(EpochStart(4, 0), EpochStart(5, kept)),
            unchanged_from=kept if is_known else NO_SEQUENCE,
        )
        await rig.put(0, {b"a": value(kept, b"1")}, through=E5, epochs=led)
        rig.on_table(one_row(epoch=6))
        await live(rig, primary)
        assert (primary.page_requests == []) == is_known
        copy = rig.store.read_copies([0])[0]
        assert copy.complete_through == E6
        assert copy.epochs.history == ((4, 0), (6, kept))
        assert copy.epochs.unchanged_from == (kept if is_known else NO_SEQUENCE)
        assert rig.values(0) == {b"a": b"1"}

    follow(tmp_path, primary, test)
