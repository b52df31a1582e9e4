"""The pace of work on the expiry index, which also makes room where there is none."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from unittest import mock

import pytest

from koinon_node.core.formats import records
from koinon_node.storage import index_sweeper
from koinon_node.storage.index_sweeper import StepResult
from koinon_proto.contract.errors import StorageFullError, UnknownFateError
from koinon_proto.v1 import replication_pb2 as wire
from tests.kit.waiting import until
from tests.node.kit.held_writer import Bench, row_of
from tests.node.kit.played_follower import joined, turn
from tests.node.kit.primary import answered, start, with_rows
from tests.node.kit.scripted_primary import Rig, ScriptedPrimary, a_row, a_table, follow

FULL = StorageFullError(node_id="n1", reason="no room")


GOES_ON, IN_VAIN, ENDS = StepResult(True, True), StepResult(True, False), StepResult(False, False)


def steps_of(answers: list[StepResult | Exception]) -> tuple[list[int], list[float]]:
    """Return how many entries each step looked at, that came to this, and the pauses after them."""
    sizes: list[int] = []
    pauses: list[float] = []

    async def step(rows: int) -> StepResult:
        if len(sizes) == len(answers):
            raise asyncio.CancelledError
        sizes.append(rows)
        answer = answers[len(sizes) - 1]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    async def run() -> None:
        with mock.patch.object(asyncio, "sleep", sleep), pytest.raises(asyncio.CancelledError):
            await index_sweeper.in_steps(step, rows=4, rows_max=16)

    asyncio.run(run())
    return sizes, pauses


def sizes_of(answers: list[StepResult | Exception]) -> list[int]:
    return steps_of(answers)[0]


def test_steps_grow_while_there_is_something_to_do() -> None:
    assert sizes_of([GOES_ON, GOES_ON, GOES_ON, ENDS, GOES_ON]) == [4, 8, 16, 16, 4]


def test_steps_over_what_has_to_stay_are_small_and_passes_ever_rarer() -> None:
    sizes, pauses = steps_of([GOES_ON, IN_VAIN, ENDS, *(IN_VAIN, ENDS) * 7, ENDS, GOES_ON, ENDS])
    assert max(sizes[2:-1]) == 4
    assert pauses[2] == 0.5  # something was done in that pass
    assert pauses[4:18:2] == [1.0, 2.0, 4.0, 8.0, 16.0, 16.0, 16.0]
    assert (pauses[17], pauses[19]) == (0.5, 0.5)  # nothing is due, or something was done


def test_steps_shrink_to_one_entry_where_there_is_no_room() -> None:
    assert sizes_of([FULL, FULL, FULL, GOES_ON, GOES_ON]) == [4, 2, 1, 1, 1]


def test_size_that_found_no_room_is_tried_again_after_many_smaller_ones() -> None:
    sizes = sizes_of([GOES_ON, FULL, *[GOES_ON] * 130])
    assert sizes[:4] == [4, 8, 4, 4]
    assert sizes.index(8, 2) == 2 + 64
    assert sizes.index(16) == 2 + 128


def test_steps_go_on_after_an_error() -> None:
    assert sizes_of([GOES_ON, UnknownFateError(reason="late"), GOES_ON]) == [4, 8, 4]


async def many_steps(
    step: Callable[[int], Awaitable[StepResult]], done: Callable[[], bool]
) -> None:
    """Make steps until it is ``done``."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(index_sweeper, "_PAUSE_S", 0.0)
        patched.setattr(index_sweeper, "_INTERVAL_S", 0.001)
        patched.setattr(index_sweeper, "_PART_ROWS", 50)
        task = asyncio.create_task(index_sweeper.in_steps(step))
        try:
            await until(done, "it is done")
        finally:
            task.cancel()


def test_what_has_expired_goes_though_something_is_always_waiting_to_be_written(
    tmp_path: Path,
) -> None:
    async def use(bench: Bench) -> None:
        two = await joined(bench, 1)
        keys = [b"%03d" % number for number in range(500)]
        await bench.put(*keys, ttl_ms=1)
        waiting = start(bench.put(b"k", partition_id=1))  # its follower does not answer
        await turn()
        assert bench.writer.pending_rows
        bench.clock.ms += 10
        await many_steps(bench.engine.sweeper.step, lambda: bench.store.count() == 1)
        assert not await answered(waiting)
        await two.acknowledge()
        await waiting

    with_rows(tmp_path, use, row_of(0), row_of(1, (1, 2)))


def test_step_that_found_no_room_is_made_again_from_where_it_began(tmp_path: Path) -> None:
    async def use(bench: Bench) -> None:
        await bench.put(*(b"%d" % number for number in range(8)), ttl_ms=1)
        bench.clock.ms += 10
        bench.channel.failing = {0: "no room"}
        with pytest.raises(StorageFullError):
            await bench.engine.sweeper.step(4)
        while await bench.engine.sweeper.step(4):
            pass
        assert bench.store.count() == 0

    with_rows(tmp_path, use, row_of(0))


def test_tombstones_of_a_busy_partition_are_purged_but_for_keys_that_are_being_written(
    tmp_path: Path,
) -> None:
    """Batches come without a pause: there is always one that is not durable yet."""
    primary = ScriptedPrimary()
    primary.lead(0, 5)

    async def test(rig: Rig) -> None:
        rig.on_table(a_table(1, [a_row(0, in_sync=False)]))
        await until(lambda: primary.positions(), "it follows")
        primary.write(0, {b"a": b"1", b"b": b"1", b"c": b"1"})
        last = primary.write(0, {b"a": None, b"b": None})
        await until(lambda: primary.acknowledged() == 2, "all is here")
        floors = wire.PurgeFloors(partition_ids=[0], sequences=[last])
        os.kill(rig.writer.process_id, signal.SIGSTOP)
        try:
            newest = primary.write(0, {b"b": b"2"})
            await until(lambda: bool(rig.follower.applier.busy[0]), "a batch is on its way")
            primary.stream.respond(wire.FollowResponse(floors=floors))
            followed = next(iter(rig.follower._context.links.values())).following.partitions[0]
            await until(lambda: followed.purge_floor == last, "the floor is announced")
            purging = asyncio.create_task(rig.follower._purge.step(1_000))
            await turn()
        finally:
            os.kill(rig.writer.process_id, signal.SIGCONT)
        await purging
        await until(lambda: primary.acknowledged() == 3, "the batch is here")
        assert rig.values(0) == {b"b": b"2", b"c": b"1"}
        assert b"a" not in rig.rows(0)
        assert rig.durable(0)[0] == newest

    follow(tmp_path, primary, test)


def test_full_store_takes_the_deletes_that_its_primary_took(tmp_path: Path) -> None:
    primary = ScriptedPrimary()
    primary.lead(0, 5)

    async def test(rig: Rig) -> None:
        rig.on_table(a_table(1, [a_row(0, in_sync=False)]))
        await until(lambda: primary.positions(), "it follows")
        primary.write(0, {b"%d" % number: bytes(40_000) for number in range(8)})
        await until(lambda: primary.acknowledged() == 1, "it is here")
        rig.writer._used_bytes = 2 * 1024 * 1024  # as after many more
        last = primary.write(0, {b"%d" % number: None for number in range(8)})
        await until(lambda: primary.acknowledged() == 2, "the deletes are taken")
        assert (rig.values(0), rig.durable(0)[0]) == ({}, last)
        assert not primary.count("close")
        rig.writer._used_bytes = 2 * 1024 * 1024
        primary.write(0, {b"k": b"v"})
        await until(lambda: primary.count("close") == 1, "a put is not")

    follow(tmp_path, primary, test, map_size_bytes=1024 * 1024)


def test_put_bytes_counts_no_tombstones() -> None:
    put = records.encode_record(1, b"value")
    assert records.put_bytes([put, b"", records.encode_tombstone(2, 5), put]) == 2 * len(put)
