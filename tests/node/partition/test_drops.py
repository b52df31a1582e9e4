"""Rule 15: copies that this node is not to keep any more."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from koinon_node.core.formats import record_layout, records
from koinon_node.core.formats.records import EpochStart, PartitionEpochs
from koinon_node.core.membership.lease import NO_LEASE
from koinon_node.core.replication.copies import CopyState
from koinon_node.replication.applier import Change, one
from koinon_node.storage.environment import EXPIRY_DB
from koinon_node.storage.writer import columns
from koinon_proto.contract.keyspaces import KeyspaceList
from koinon_proto.contract.table import NodeNumber, Table, first_sequence
from koinon_proto.v1 import replication_pb2 as wire
from tests.kit.waiting import until
from tests.node.kit.scripted_primary import (
    ME,
    P1,
    P2,
    PARTITIONS,
    WAIT_S,
    Rig,
    ScriptedPrimary,
    a_row,
    a_table,
    follow,
    in_keyspace,
)

E4 = first_sequence(4)
EPOCHS = PartitionEpochs(primary_epoch=4, history=(EpochStart(4, 0),))


def without_me(version: int = 1) -> Table:
    return a_table(version, [a_row(p, replicas=(P1, P2)) for p in range(PARTITIONS)])


def with_me(version: int = 2) -> Table:
    rows = [a_row(p, replicas=(P1, P2)) for p in range(1, PARTITIONS)]
    return a_table(version, [a_row(0, in_sync=False, partition_epoch=9), *rows])


async def held(rig: Rig, rows: int) -> None:
    own = {b"%06d" % number: records.encode_record(E4 + 1 + number, b"v") for number in range(rows)}
    await rig.put(0, own, through=E4 + rows, epochs=EPOCHS)


@contextlib.asynccontextmanager
async def dropping(rig: Rig) -> AsyncIterator[None]:
    task = asyncio.create_task(rig.drops.run())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def test_rule_15_copy_left_out_is_deleted_with_all_that_was_known_of_it(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        await held(rig, 2_500)
        other = {b"k": records.encode_record(E4 + 1, b"v")}
        await rig.put(1, other, through=E4 + 1, epochs=EPOCHS)
        rows = [a_row(p, replicas=(P1, P2)) for p in range(PARTITIONS)]
        rows[1] = a_row(1)
        rig.on_table(a_table(1, rows))
        async with dropping(rig):
            await until(lambda: 0 not in rig.copies.epochs, "it is deleted")
        assert rig.rows(0) == {}
        assert rig.durable(0) == (0, CopyState.USABLE, 0)
        assert rig.history(0) == ()
        assert rig.store.dropping() == []
        assert rig.copies.states[0] == CopyState.USABLE
        assert set(rig.rows(1)) == {b"k"}

    follow(tmp_path, ScriptedPrimary(), test)


def test_expiry_entries_of_deleted_copy_go_when_they_are_due(tmp_path: Path) -> None:
    def entries(rig: Rig, before_ms: int = 1 << 50) -> int:
        return len(rig.store.expired_entries(b"", before_ms, 1_000)[0])

    async def test(rig: Rig) -> None:
        due, later = 1_000_000, (1 << 45)
        rows = {
            b"%06d" % number: records.encode_record(
                E4 + 1 + number, b"v", expires_at_ms=due if number < 6 else later
            )
            for number in range(10)
        }
        for partition_id in (0, 1):
            await rig.put(partition_id, rows, through=E4 + 10, epochs=EPOCHS)
            keys = [records.prefix_of(partition_id) + key for key in rows]
            found = record_layout.expiry_keys_of(keys, list(rows.values()))
            await rig.writer.submit(((EXPIRY_DB, *columns(found, b"")),), len(found), 0)
        table = a_table(1, [a_row(p, replicas=(P1, P2)) for p in range(PARTITIONS)])
        rig.on_table(replace(table, rows=(table.rows[0], a_row(1), *table.rows[2:])))
        purge = rig.follower._purge
        await purge.step(1_000)
        await rig.writer.barrier()
        assert entries(rig) == 20  # the copy is there still
        async with dropping(rig):
            await until(lambda: 0 not in rig.copies.epochs, "it is deleted")
        rig.follower.applier.busy[0] += 1  # something of it is on the way to the disk
        await purge.step(1_000)
        await rig.writer.barrier()
        assert entries(rig) == 20
        rig.follower.applier.busy[0] -= 1
        rig.on_table(a_table(2, [a_row(p) for p in range(PARTITIONS)]))
        await purge.step(1_000)
        await rig.writer.barrier()
        assert entries(rig) == 20  # a copy may be made anew
        rig.on_table(replace(table, table_version=3))
        await purge.step(1_000)
        await rig.writer.barrier()
        assert (entries(rig, due), entries(rig)) == (6, 14)

    follow(tmp_path, ScriptedPrimary(), test)


def test_rule_15_metadata_goes_durably_before_the_first_row(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        await held(rig, 10)
        rig.on_table(without_me())
        seen = []

        def look() -> None:
            seen.append((rig.durable(0), rig.history(0), rig.store.dropping()))

        rig.before_scan(look)
        async with dropping(rig):
            await until(lambda: 0 not in rig.copies.epochs, "it is deleted")
        assert seen[0] == ((0, CopyState.UNUSABLE, 0), (), [0])

    follow(tmp_path, ScriptedPrimary(), test)


def test_rule_15_row_that_names_this_node_again_ends_the_drop_and_gets_a_snapshot(
    tmp_path: Path,
) -> None:
    primary = ScriptedPrimary()
    lead = primary.lead(0, 5, [(4, 0), (5, E4 + 2_500)])
    lead.rows = {b"000001": records.encode_record(E4 + 2, b"v")}

    async def test(rig: Rig) -> None:
        await held(rig, 2_500)
        rig.on_table(without_me())
        steps: list[int] = []

        def look() -> None:
            steps.append(1)
            if len(steps) == 2:
                rig.publish(with_me())  # after the first step; the loop has not been told yet

        rig.before_scan(look)
        async with dropping(rig):
            await until(lambda: len(steps) == 2, "a step was made")
            await rig.follower.applier.idle([0])
            left = len(rig.rows(0))
            assert left >= 500
            assert rig.durable(0)[1] == CopyState.UNUSABLE
            rig.on_table(with_me())
            await until(lambda: primary.positions(), "it was copied anew")
        assert primary.page_requests[0].snapshot
        assert set(rig.rows(0)) == {b"000001"}
        assert rig.store.dropping() == []

    follow(tmp_path, primary, test)


def test_rule_15_drop_ends_at_the_step_before_which_the_row_named_this_node_again(
    tmp_path: Path,
) -> None:
    async def test(rig: Rig) -> None:
        await held(rig, 2_500)
        rig.on_table(without_me())
        steps: list[int] = []

        def look() -> None:
            steps.append(1)
            if len(steps) == 2:
                rig.publish(with_me())

        rig.before_scan(look)
        await rig.drops._drop([0], rig.drops._still_left_out, duty=1.0)
        assert (len(steps), len(rig.rows(0))) == (2, 500)
        assert rig.store.dropping() == [0]

    follow(tmp_path, ScriptedPrimary(), test)


def test_rule_15_drop_that_had_to_wait_looks_at_the_row_before_it_begins(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        await held(rig, 10)
        rig.on_table(without_me())
        os.kill(rig.writer.process_id, signal.SIGSTOP)
        try:
            ids, through = one(0, E4 + 10)
            rig.follower.applier.submit(Change(partition_ids=ids, complete_through=through))
            drop = asyncio.create_task(rig.drops._drop([0], rig.drops._still_left_out, duty=1.0))
            await asyncio.sleep(0)
            rig.publish(with_me())
        finally:
            os.kill(rig.writer.process_id, signal.SIGCONT)
        await drop
        assert (len(rig.rows(0)), rig.durable(0)) == (10, (E4 + 10, CopyState.USABLE, 0))

    follow(tmp_path, ScriptedPrimary(), test)


def test_rule_15_drop_cut_short_goes_on_in_a_new_process(tmp_path: Path) -> None:
    async def half(rig: Rig) -> None:
        await held(rig, 2_500)
        rig.on_table(without_me())
        async with dropping(rig):
            await until(lambda: len(rig.rows(0)) < 2_500, "a step was made")

    async def again(rig: Rig) -> None:
        assert rig.copies.states[0] == CopyState.UNUSABLE
        rig.on_table(without_me())
        async with dropping(rig):
            await until(lambda: not rig.store.dropping(), "it is deleted")
        assert rig.rows(0) == {}

    follow(tmp_path, ScriptedPrimary(), half)
    follow(tmp_path, ScriptedPrimary(), again)


# --- copies of keyspaces that had the partition before -------------------------------------------


def of_the_past(replicas: tuple[NodeNumber, ...] = (P1, ME, P2), **how: Any) -> Table:
    """Partition 1 is of a keyspace that began with epoch 5; a copy of epoch 4 is of one before."""
    rows = [a_row(p) for p in range(PARTITIONS)]
    rows[1] = a_row(1, replicas=replicas, **how)
    return in_keyspace(a_table(1, rows), range(1, 2), first_epoch=5)


@pytest.mark.parametrize("state", list(CopyState))
def test_copy_of_the_past_is_erased_before_it_is_followed(tmp_path: Path, state: CopyState) -> None:
    """Its primary has just begun with nothing, and cannot put this node out of in_sync."""
    primary = ScriptedPrimary()
    primary.lead(1, 5)
    primary.requires = True

    async def test(rig: Rig) -> None:
        own = {b"%04d" % n: records.encode_record(E4 + 1 + n, b"old") for n in range(1_500)}
        await rig.put(1, own, through=E4 + 1_500, epochs=EPOCHS, state=state)
        primary.write(1, {b"k": b"new"})
        rig.on_table(of_the_past(replicas=(P1, ME)))
        async with dropping(rig):
            await until(lambda: 1 in primary.positions(), "the copy has a position")
        assert not primary.keys_requests
        assert not any(r.snapshot for r in primary.page_requests), "nothing was there to replace"
        assert rig.values(1) == {b"k": b"new"}
        assert rig.history(1) == ((5, 0),)

    follow(tmp_path, primary, test)


def test_copy_of_the_past_is_erased_before_it_is_led(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        own = {b"%04d" % n: records.encode_record(E4 + 1 + n, b"old") for n in range(1_500)}
        await rig.put(1, own, through=E4 + 1_500, epochs=EPOCHS, state=CopyState.UNUSABLE)
        rig.state.lease = NO_LEASE  # who holds the lease changes nothing of what is past
        rig.on_table(of_the_past(primary=ME))
        may_be_led = asyncio.create_task(rig.drops.erased_past([0, 1]))
        await asyncio.sleep(0)
        assert not may_be_led.done()
        async with dropping(rig):
            await asyncio.wait_for(may_be_led, WAIT_S)
        assert (rig.rows(1), rig.history(1)) == ({}, ())
        assert rig.durable(1) == (0, CopyState.USABLE, 0)

    follow(tmp_path, ScriptedPrimary(), test)


def test_copy_of_the_past_goes_before_what_is_left_out(tmp_path: Path) -> None:
    """The deletion of a big copy, for which nobody waits, makes way for it."""

    async def test(rig: Rig) -> None:
        await held(rig, 2_500)
        own = {b"k": records.encode_record(E4 + 1, b"old")}
        await rig.put(1, own, through=E4 + 1, epochs=EPOCHS)
        left_out = replace(of_the_past(primary=ME), rows=without_me().rows)
        steps: list[int] = []

        def look() -> None:
            steps.append(1)
            if len(steps) == 1:
                rows = (left_out.rows[0], a_row(1, ME), *left_out.rows[2:])
                asyncio.get_running_loop().call_soon(
                    rig.on_table, replace(left_out, table_version=2, rows=rows)
                )

        rig.before_scan(look)
        rig.on_table(replace(left_out, keyspace_list=KeyspaceList()))
        async with dropping(rig):
            await rig.drops.erased_past([1])
            await until(lambda: 1 not in rig.copies.epochs, "the copy of the past is erased")
            assert 0 in rig.copies.epochs
            await until(lambda: 0 not in rig.copies.epochs, "the other goes as well")

    follow(tmp_path, ScriptedPrimary(), test)


def test_copy_that_begins_has_an_epoch_from_its_first_row_on(tmp_path: Path) -> None:
    """Else what it has pulled could not be told from what an old disk has of the past."""
    primary = ScriptedPrimary()
    primary.lead(1, 5)
    primary.page_rows = 1
    primary.write(1, {b"%d" % n: b"v" for n in range(4)})
    seen: list[tuple[int, list[int]]] = []

    async def test(rig: Rig) -> None:
        table = of_the_past(in_sync=False)

        async def look(request: wire.ReadPageRequest) -> None:
            if request.after_key:
                await until(lambda: rig.rows(1), "a row is stored")
                copy = rig.store.read_copies([1])[1]
                seen.append((copy.epochs.primary_epoch, rig.drops._of_past()))

        primary.before_page = look
        async with dropping(rig):
            rig.on_table(table)
            await until(lambda: 1 in primary.positions(), "the copy has a position")
        assert not any(request.snapshot for request in primary.page_requests)
        assert seen == [(5, [])] * 3
        assert set(rig.rows(1)) == {b"0", b"1", b"2", b"3"}

    follow(tmp_path, primary, test)


def test_copy_of_the_keyspace_that_has_the_partition_is_kept(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        own = {b"k": records.encode_record(first_sequence(5) + 1, b"v")}
        epochs = PartitionEpochs(primary_epoch=5, history=(EpochStart(5, 0),))
        await rig.put(1, own, through=first_sequence(5) + 1, epochs=epochs)
        rig.publish(of_the_past(primary=ME, epoch=6))
        await rig.drops.erased_past([1])
        assert rig.drops._of_past() == []
        assert set(rig.rows(1)) == {b"k"}

    follow(tmp_path, ScriptedPrimary(), test)


@pytest.mark.parametrize("why", ["no lease", "not registered", "older table"])
def test_rule_15_nothing_is_dropped_without_a_current_row(tmp_path: Path, why: str) -> None:
    async def test(rig: Rig) -> None:
        await held(rig, 10)
        table = without_me()
        if why == "no lease":
            rig.state.lease = NO_LEASE
        if why == "older table":
            table = a_table(1, table.rows, node_epoch=7)
        rig.on_table(table, 0 if why == "not registered" else 1)
        assert rig.drops.candidates() == []

    follow(tmp_path, ScriptedPrimary(), test)
