"""A follower on a real store, against a primary that answers by a script."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from koinon_node.core.formats.records import EpochStart, PartitionEpochs
from koinon_node.core.membership.lease import NO_LEASE
from koinon_node.core.replication import replica_sync
from koinon_node.core.replication.copies import CopyState
from koinon_node.core.replication.openings import ProgressStage
from koinon_proto.contract.convert import error_to_proto
from koinon_proto.contract.errors import TableBehindError
from koinon_proto.contract.table import MoveSettings, first_sequence
from koinon_proto.v1 import replication_pb2 as wire
from tests.kit.waiting import until
from tests.node.kit.scripted_primary import (
    E5,
    E6,
    ME,
    P1,
    P2,
    PARTITIONS,
    Both,
    Rig,
    ScriptedPrimary,
    a_row,
    a_table,
    all_rows,
    follow,
    live,
    one_row,
    value,
)

# --- the stream ------------------------------------------------------------------------------


def test_stream_batches_are_applied_and_acknowledged_when_durable(tmp_path: Path) -> None:
    primary = ScriptedPrimary()
    primary.lead(0, 5)

    async def test(rig: Rig) -> None:
        rig.on_table(one_row())
        await live(rig, primary)
        for number in range(20):
            last = primary.write(0, {b"k%d" % number: b"v", b"same": b"%d" % number})
        await until(lambda: primary.acknowledged() == 20, "all is acknowledged")
        assert rig.values(0)[b"same"] == b"19"
        assert len(rig.values(0)) == 21
        assert rig.durable(0) == (last, CopyState.USABLE, 0)
        assert rig.history(0) == (EpochStart(5, 0),)
        assert primary.count("ack") < 20  # those that are durable together are told together

    follow(tmp_path, primary, test)


def test_failover_of_level_copies_is_one_message_each_way_and_one_position(tmp_path: Path) -> None:
    old, new = ScriptedPrimary(P1), ScriptedPrimary(P2)
    for p in range(PARTITIONS):
        old.lead(p, 5)

    async def test(rig: Rig) -> None:
        rig.on_table(all_rows())
        await until(lambda: len(old.positions()) == PARTITIONS, "all follow")
        ends = {p: old.write(p, {b"k": b"v"}) for p in range(PARTITIONS)}
        await until(lambda: old.acknowledged() == PARTITIONS, "all is acknowledged")
        for p in range(PARTITIONS):
            lead = new.lead(p, 6, [(5, 0), (6, ends[p])])
            lead.rows = dict(old.leads[p].rows)
        rig.on_table(all_rows(2, primary=P2, epoch=6))
        await until(lambda: len(new.positions()) == PARTITIONS, "all follow the new primary")
        assert new.count("open") == new.count("positions") == 1
        assert not new.page_requests
        assert not new.keys_requests
        assert new.positions() == dict.fromkeys(range(PARTITIONS), E6)
        assert rig.history(0) == (EpochStart(5, 0), EpochStart(6, ends[0]))

    follow(tmp_path, Both(old, new), test)


def test_stream_lost_opens_again_and_pulls_only_what_is_missing(tmp_path: Path) -> None:
    primary = ScriptedPrimary()
    primary.lead(0, 5)

    async def test(rig: Rig) -> None:
        rig.on_table(one_row())
        await live(rig, primary)
        last = primary.write(0, {b"a": b"1", b"b": b"1"})
        await until(lambda: primary.acknowledged() == 1, "acknowledged")
        primary.stream.lose()
        primary.silent = True
        primary.write(0, {b"b": b"2", b"c": b"2"})
        primary.silent = False
        await until(lambda: primary.positions()[0] == last + 2, "caught up")
        assert [r.after_sequence for r in primary.page_requests] == [last]
        assert rig.values(0) == {b"a": b"1", b"b": b"2", b"c": b"2"}

    follow(tmp_path, primary, test)


def test_copies_are_described_only_once_the_primary_is_reached(tmp_path: Path) -> None:
    primary = ScriptedPrimary()
    primary.lead(0, 5)
    primary.is_reached = False

    async def test(rig: Rig) -> None:
        rig.on_table(one_row())
        await until(lambda: primary.count("hello") == 1, "it is dialled")
        primary.stream.lose()
        await until(lambda: primary.count("hello") == 2, "it is dialled again")
        assert not primary.count("open")
        primary.stream.reached.set()
        await live(rig, primary)
        assert primary.count("open") == 1

    follow(tmp_path, primary, test)


def test_stream_lost_in_the_moment_in_which_it_is_given_up_is_not_opened_again(
    tmp_path: Path,
) -> None:
    old, new = ScriptedPrimary(P1), ScriptedPrimary(P2)
    old.lead(0, 5)
    new.lead(0, 6, [(5, 0), (6, E5)])

    def streams() -> int:
        running = [task.get_coro() for task in asyncio.all_tasks()]
        return sum(getattr(coro, "__qualname__", "") == "Link._run" for coro in running)

    async def test(rig: Rig) -> None:
        rig.on_table(one_row())
        await live(rig, old)
        old.stream.lose()
        rig.on_table(one_row(2, primary=P2, epoch=6))
        await live(rig, new)
        await until(lambda: streams() == 1, "the one to the new primary is left")

    follow(tmp_path, Both(old, new), test)


def test_node_that_stops_tells_its_primaries_and_acknowledges_as_long_as_they_wait(
    tmp_path: Path,
) -> None:
    primary = ScriptedPrimary()
    for p in range(PARTITIONS):
        primary.lead(p, 5)

    async def test(rig: Rig) -> None:
        rig.on_table(all_rows())
        await until(lambda: len(primary.positions()) == PARTITIONS, "all follow")
        rig.follower.leave()
        rig.on_table(all_rows(2, partition_epoch=9))

        await until(lambda: any(r.close.leaves for r in primary.requests), "it is told")
        primary.write(0, {b"a": b"1"})
        await until(lambda: primary.acknowledged() == 1, "acknowledged")
        assert primary.count("open") == 1  # nothing new is followed
        primary.stream.lose()
        again = len(primary.requests)
        told = lambda: any(r.close.leaves for r in primary.requests[again:])  # noqa: E731
        await until(told, "the next stream is told as well")

    follow(tmp_path, primary, test)


# --- rule 2 ----------------------------------------------------------------------------------


def test_rule_2_nobody_is_followed_under_a_registration_that_is_not_confirmed(
    tmp_path: Path,
) -> None:
    """Its epoch counts as unused: if the disk were set back to before it, nothing would tell that
    this node said of writes that it holds them.
    """
    primary = ScriptedPrimary()
    primary.lead(0, 5)

    async def test(rig: Rig) -> None:
        lease, rig.state.lease = rig.state.lease, NO_LEASE
        rig.on_table(one_row())
        await asyncio.sleep(0.1)
        assert not primary.requests
        rig.state.lease = lease
        rig.on_table(one_row())
        await live(rig, primary)
        rig.state.lease = replace(lease, until_s=0.0)  # one that is over was given all the same
        rig.on_table(one_row(2, partition_epoch=9))
        primary.write(0, {b"k": b"v"})
        await until(lambda: primary.acknowledged() == 1, "it goes on")

    follow(tmp_path, primary, test)


# --- rule 4 ----------------------------------------------------------------------------------


def test_rule_4_lower_epoch_than_one_seen_is_not_followed(tmp_path: Path) -> None:
    primary = ScriptedPrimary()
    primary.lead(0, 5)
    primary.lead(1, 5)

    async def test(rig: Rig) -> None:
        await rig.put(0, {}, through=E6, epochs=PartitionEpochs(primary_epoch=6))
        rig.on_table(all_rows())
        await live(rig, primary, 1)
        opened = [o.partition_id for r in primary.requests for o in r.open.partitions]
        assert 1 in opened
        assert 0 not in opened

    follow(tmp_path, primary, test)


def test_rule_4_epoch_that_is_followed_is_kept_by_the_store(tmp_path: Path) -> None:
    first, second = ScriptedPrimary(P1), ScriptedPrimary(P2)
    first.lead(0, 6)
    second.lead(0, 5)

    async def seen(rig: Rig) -> None:
        rig.on_table(one_row(epoch=6))
        await live(rig, first)
        assert rig.store.read_copies([0])[0].epochs.primary_epoch == 6

    async def a_table_from_before(rig: Rig) -> None:
        second.lead(1, 5)
        rows = [a_row(p, P2, 5) for p in range(PARTITIONS)]
        rig.on_table(a_table(2, rows))
        await live(rig, second, 1)
        opened = [o.partition_id for r in second.requests for o in r.open.partitions]
        assert 0 not in opened

    follow(tmp_path, first, seen)
    follow(tmp_path, second, a_table_from_before)


def test_rule_4_batches_of_a_deposed_primary_are_not_applied(tmp_path: Path) -> None:
    old, new = ScriptedPrimary(P1), ScriptedPrimary(P2)
    old.lead(0, 5)
    old.lead(1, 5)

    async def test(rig: Rig) -> None:
        rig.on_table(all_rows())
        await live(rig, old)
        # The agent has published a newer table; the loop has not been told yet.
        rows = [a_row(0, P2, 6), *(a_row(p) for p in range(1, PARTITIONS))]
        rig.publish(a_table(2, rows))
        old.write(0, {b"k": b"deposed"})
        await until(lambda: old.acknowledged() == 1, "the batch was seen")
        closed = [p for r in old.requests for p in r.close.partition_ids]
        assert closed == [0]
        assert rig.values(0) == {}
        assert rig.durable(0)[0] == E5

    follow(tmp_path, Both(old, new), test)


def test_rule_4_position_is_told_only_after_the_tail_was_repaired(tmp_path: Path) -> None:
    old, new = ScriptedPrimary(P1), ScriptedPrimary(P2)
    old.lead(0, 5)

    async def test(rig: Rig) -> None:
        rig.on_table(one_row())
        await live(rig, old)
        kept = old.write(0, {b"kept": b"1", b"over": b"1"})
        old.write(0, {b"tail": b"2", b"over": b"2"})
        await until(lambda: old.acknowledged() == 2, "both are here")
        new.lead(0, 6, [(5, 0), (6, kept)]).rows = {
            b"kept": value(kept - 1, b"1"),
            b"over": value(kept, b"1"),
        }
        rig.on_table(one_row(2, primary=P2, epoch=6))
        await live(rig, new)
        assert rig.values(0) == {b"kept": b"1", b"over": b"1"}
        assert rig.history(0) == (EpochStart(5, 0), EpochStart(6, kept))
        assert sorted(new.keys_requests[0].keys) == [b"over", b"tail"]  # by the journal

    follow(tmp_path, Both(old, new), test)


# --- rule 11 ---------------------------------------------------------------------------------


def test_rule_11_pass_cut_short_leaves_complete_through_where_it_was(tmp_path: Path) -> None:
    primary = ScriptedPrimary()
    lead = primary.lead(0, 5)
    primary.page_rows = 10
    for number in range(100):
        primary.write(0, {b"%03d" % number: b"v"})

    async def test(rig: Rig) -> None:
        gate = asyncio.Event()

        async def hold(request: wire.ReadPageRequest) -> None:
            if request.after_key >= b"049":
                await gate.wait()

        primary.before_page = hold
        rig.on_table(one_row(in_sync=False))
        await until(lambda: len(rig.values(0)) == 50, "half of the pass is here")
        assert rig.durable(0)[:2] == (0, CopyState.DIRTY_TAIL)
        assert primary.positions() == {}
        gate.set()
        await live(rig, primary)
        assert rig.durable(0)[:2] == (lead.streamed, CopyState.USABLE)

    follow(tmp_path, primary, test)


@pytest.mark.parametrize("by", ["row", "primary"])
def test_rule_11_copy_that_may_be_elected_shows_nothing_of_a_pass_before_all_of_it(
    tmp_path: Path, by: str
) -> None:
    """As the row says, or the primary, which may know of a newer one."""
    primary = ScriptedPrimary()
    lead = primary.lead(0, 5)
    primary.page_rows, primary.requires = 10, by == "primary"
    primary.write(0, {b"%03d" % number: b"v" for number in range(100)})

    async def test(rig: Rig) -> None:
        gate, pages = asyncio.Event(), []

        async def hold(request: wire.ReadPageRequest) -> None:
            pages.append(request.after_key)
            if request.after_key >= b"049":
                await gate.wait()

        primary.before_page = hold
        rig.on_table(one_row(in_sync=by == "row"))
        await until(lambda: b"049" in pages, "half of the pass is here")
        assert rig.durable(0)[:2] == (0, CopyState.USABLE)
        assert rig.values(0) == {}
        primary.write(0, {b"%03d" % number: b"w" for number in range(20)})
        gate.set()
        await live(rig, primary)
        assert rig.durable(0)[:2] == (lead.streamed, CopyState.USABLE)
        assert list(rig.values(0).values()) == [b"w"] * 20 + [b"v"] * 80

    follow(tmp_path, primary, test)


@pytest.mark.parametrize("newer", [False, True])
def test_rule_11_copy_that_may_be_elected_stores_a_pass_whose_stream_was_dropped_if_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, newer: bool
) -> None:
    """A pass that brought something newer than its bound is of several moments."""
    monkeypatch.setattr(replica_sync, "BUFFER_BYTES_MAX", 2_000)
    primary = ScriptedPrimary()
    lead = primary.lead(0, 5)
    primary.page_rows = 10
    primary.write(0, {b"%03d" % number: b"v" for number in range(30)})
    through = lead.streamed

    async def test(rig: Rig) -> None:
        stored = []

        async def at_next_opening(request: wire.ReadPageRequest) -> None:
            if not request.after_key:
                stored.append(rig.durable(0)[:2])

        async def write(request: wire.ReadPageRequest) -> None:
            if request.after_key == b"019":
                primary.before_page = at_next_opening
                key = b"025" if newer else b"000"  # read by the page to come, or before
                primary.write(0, {key: b"x" * 3_000})
                (link,) = rig.follower._context.links.values()
                await until(lambda: link.following.partitions[0].overflowed, "too much is kept")

        primary.before_page = write
        rig.on_table(one_row())
        await live(rig, primary)
        assert stored[:1] == [(0 if newer else through, CopyState.USABLE)]
        assert rig.durable(0)[:2] == (lead.streamed, CopyState.USABLE)
        assert len(rig.values(0)) == 30

    follow(tmp_path, primary, test)


def test_rule_11_batch_after_a_gap_is_refused(tmp_path: Path) -> None:
    primary = ScriptedPrimary()
    lead = primary.lead(0, 5)

    async def test(rig: Rig) -> None:
        rig.on_table(one_row())
        await live(rig, primary)
        first = primary.write(0, {b"a": b"1"})
        await until(lambda: primary.acknowledged() == 1, "acknowledged")
        primary.refuse_openings = True
        lead.rows[b"b"] = value(first + 1, b"2")  # this one was never streamed
        lead.streamed = first + 1
        primary.write(0, {b"c": b"3"})
        await until(lambda: primary.count("close") == 1, "the gap was seen")
        assert rig.durable(0)[0] == first
        assert rig.values(0) == {b"a": b"1"}
        primary.refuse_openings = False
        await until(lambda: primary.positions()[0] == first + 2, "caught up")
        assert rig.values(0) == {b"a": b"1", b"b": b"2", b"c": b"3"}

    follow(tmp_path, primary, test)


def test_rule_11_batch_is_acknowledged_only_with_all_before_it(tmp_path: Path) -> None:
    primary = ScriptedPrimary()
    for p in range(PARTITIONS):
        primary.lead(p, 5)

    async def test(rig: Rig) -> None:
        rig.on_table(all_rows())
        await until(lambda: len(primary.positions()) == PARTITIONS, "all follow")
        os.kill(rig.writer.process_id, signal.SIGSTOP)
        try:
            primary.write(0, {b"k": b"v"})
            # Of an epoch that is over: there is nothing to store.
            primary.stream_batch(primary.stream, 1, E5, E5 + 1, {b"k": b"v"}, epoch=4)
            reason = error_to_proto(TableBehindError(table_version=1, required_version=2))
            closed = wire.ClosedPartitions(partition_ids=[2], reason=reason)
            primary.stream.respond(wire.FollowResponse(closed=closed))
            await until(lambda: primary.count("open") == 2, "what came after both was seen")
            assert primary.acknowledged() == 0
        finally:
            os.kill(rig.writer.process_id, signal.SIGCONT)
        await until(lambda: primary.acknowledged() == 2, "both are acknowledged")

    follow(tmp_path, primary, test)


def test_rule_11_batches_during_a_pass_wait_for_its_end(tmp_path: Path) -> None:
    primary = ScriptedPrimary()
    lead = primary.lead(0, 5)
    primary.page_rows = 10
    primary.write(0, {b"%03d" % number: b"old" for number in range(30)})

    async def test(rig: Rig) -> None:
        async def write_beside(request: wire.ReadPageRequest) -> None:
            if request.after_key == b"009":
                primary.write(0, {b"000": b"new", b"015": b"new", b"029": None, b"x": b"new"})
                primary.write(0, {b"000": b"newer"})

        primary.before_page = write_beside
        rig.on_table(one_row(in_sync=False))
        await live(rig, primary)
        assert primary.positions()[0] == lead.streamed
        assert rig.durable(0)[:2] == (lead.streamed, CopyState.USABLE)
        expected = {key: lead.value(key) for key in lead.rows if key != b"029"}
        assert rig.values(0) == expected
        assert rig.values(0)[b"000"] == b"newer"
        assert primary.acknowledged() == 2

    follow(tmp_path, primary, test)


def test_rule_11_position_waits_for_the_stream_to_reach_what_was_pulled(tmp_path: Path) -> None:
    primary = ScriptedPrimary()
    lead = primary.lead(0, 5)
    primary.write(0, {b"a": b"1"})

    async def test(rig: Rig) -> None:
        opened = lead.streamed

        async def write_unheard(request: wire.ReadPageRequest) -> None:
            primary.before_page = None
            primary.silent = True
            primary.write(0, {b"a": b"2"})

        primary.before_page = write_unheard
        rig.on_table(one_row(in_sync=False))
        await until(lambda: rig.values(0) == {b"a": b"2"}, "the pass brought the newer record")
        await asyncio.sleep(0)
        assert rig.durable(0)[:2] == (0, CopyState.DIRTY_TAIL)
        assert primary.positions() == {}
        rows = {b"a": lead.rows[b"a"]}
        primary.stream_batch(primary.stream, 0, opened, lead.streamed, rows)
        await live(rig, primary)
        assert primary.positions()[0] == opened + 1

    follow(tmp_path, primary, test)


def test_pass_whose_batches_are_too_many_is_finished_and_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_sync, "BUFFER_PARTITION_BYTES_MAX", 1_000)
    primary = ScriptedPrimary()
    lead = primary.lead(0, 5)
    primary.write(0, {b"%03d" % number: b"old" for number in range(30)})
    primary.page_rows = 10

    async def test(rig: Rig) -> None:
        async def write_much(request: wire.ReadPageRequest) -> None:
            if not request.after_key:
                return
            primary.before_page = None
            for number in range(20):
                primary.write(0, {b"%03d" % number: b"new" * 30})

        primary.before_page = write_much
        rig.on_table(one_row(in_sync=False))
        await live(rig, primary)
        assert primary.positions()[0] == lead.streamed
        assert rig.values(0) == {key: lead.value(key) for key in lead.rows}
        assert primary.count("open") == 2
        assert primary.page_requests[-1].after_sequence > first_sequence(5)
        assert not primary.keys_requests  # the tail that the pass left is of the same primary

    follow(tmp_path, primary, test)


# --- moves -----------------------------------------------------------------------------------


def test_paused_moves_begin_nothing_and_go_on_later(tmp_path: Path) -> None:
    primary = ScriptedPrimary()
    primary.lead(0, 5)
    primary.lead(1, 5)

    async def test(rig: Rig) -> None:
        rows = [
            a_row(0, in_sync=False, adding=(ME,)),
            a_row(1),
            *(a_row(p, replicas=(P1, P2)) for p in range(2, PARTITIONS)),
        ]
        rig.on_table(a_table(1, rows, moves=MoveSettings(paused=True)))
        await live(rig, primary, 1)
        assert 0 not in primary.positions()
        assert [p.stage for p in rig.follower.progress()] == [ProgressStage.WAITING]
        rig.on_table(a_table(2, rows))
        await live(rig, primary, 0)
        assert [p.stage for p in rig.follower.progress()] == [ProgressStage.LIVE]

    follow(tmp_path, primary, test)


def test_full_store_gives_up_and_goes_on_without_a_gap(tmp_path: Path) -> None:
    primary = ScriptedPrimary()
    primary.lead(0, 5)

    async def test(rig: Rig) -> None:
        rig.on_table(one_row())
        await live(rig, primary)
        primary.write(0, {b"a": b"1"})
        await until(lambda: primary.acknowledged() == 1, "acknowledged")
        primary.write(0, {b"big": bytes(900_000)})
        await until(lambda: primary.count("close") == 1, "there is no room")
        assert rig.durable(0)[0] == E5 + 1
        primary.write(0, {b"big": b"small"})
        await until(lambda: primary.positions()[0] == E5 + 3, "it goes on")
        assert rig.values(0) == {b"a": b"1", b"big": b"small"}

    follow(tmp_path, primary, test, map_size_bytes=1024 * 1024)
