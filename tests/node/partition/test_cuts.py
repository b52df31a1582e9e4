"""A node's part of a backup's cut: what is held, what the snapshot has, and what makes it none."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace

import pytest

from koinon_node.partition import cuts
from koinon_node.partition.cuts import Cut, CutPoint, Cuts, CutState
from koinon_proto.contract import columns
from koinon_proto.contract.cluster_errors import BackupStoppedError, CutFailedError
from koinon_proto.contract.errors import (
    InvalidArgumentError,
    LeaseExpiredError,
    ResourceExhaustedError,
)
from koinon_proto.contract.table import ActiveLoad
from tests.kit.waiting import until
from tests.node.kit.held_writer import PARTITIONS, Bench, row_of
from tests.node.kit.played_follower import turn
from tests.node.kit.primary import answered, newer, start

NUMBER = 7
ALL = list(range(PARTITIONS))


@pytest.fixture(autouse=True)
def _no_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no cut end by itself but in the tests of that."""
    monkeypatch.setattr(cuts, "HOLD_S_MAX", 3600.0)


def opened(bench: Bench) -> Cut:
    return Cuts(bench.engine.context, bench.commits).open(NUMBER, "root", [0])


async def made(bench: Bench) -> Cut:
    cut = opened(bench)
    await cut.make()
    cut.release()
    return cut


async def rows_of(cut: Cut, partition_id: int = 0) -> dict[bytes, tuple[bytes, int, int]]:
    """Return the rows of a partition by their keys: value, version, expiry."""
    found: dict[bytes, tuple[bytes, int, int]] = {}
    async for page in cut.pages(partition_id):
        part = columns.unpack(page)
        assert part.orders is not None
        for row in range(part.header.rows):
            key = bytes(part.keys[part.key_offsets[row] : part.key_offsets[row + 1]])
            value = bytes(part.values[part.value_offsets[row] : part.value_offsets[row + 1]])
            expiry = int(part.expiries[row]) if part.expiries is not None else 0
            found[key] = value, int(part.orders[row]), expiry
    return found


# --- what is held --------------------------------------------------------------------------------


async def test_cut_that_is_held_keeps_writes_and_reads_of_their_keys_waiting(bench: Bench) -> None:
    await bench.put(b"a", value=b"before")
    cut = opened(bench)
    point = await cut.make()
    assert point == CutPoint(ALL, [*point.sequences], 1)
    put = start(bench.put(b"a", value=b"after"))
    assert not await answered(put)
    read, other = start(bench.get(b"a")), start(bench.get(b"b"))
    assert not await answered(read)
    assert await answered(other)  # nobody writes that
    cut.release()
    await put
    assert (await read).values == [b"after"]
    assert (await rows_of(cut))[b"a"][0] == b"before"


async def test_write_at_durability_primary_is_answered_while_a_cut_is_held(bench: Bench) -> None:
    from koinon_node.partition.batches import Durability

    cut = opened(bench)
    await cut.make()
    assert await answered(start(bench.put(b"a", durability=Durability.PRIMARY)))
    cut.end("")


async def test_write_that_waits_for_the_disk_when_a_cut_begins_completes_after_it(
    bench: Bench,
) -> None:
    bench.channel.held = True
    put = start(bench.put(b"a"))
    await turn()
    cut = opened(bench)
    await cut.make()
    bench.channel.release()
    assert not await answered(put)
    assert await rows_of_nothing(cut)
    cut.release()
    await put
    assert await rows_of(cut) == {}


async def rows_of_nothing(cut: Cut) -> bool:
    """Return whether the cut refuses to be read, as it has not been released."""
    try:
        await rows_of(cut)
    except InvalidArgumentError:
        return True
    return False


@pytest.mark.parametrize("end", ["close", "bound", "failure"])
async def test_cut_that_comes_to_nothing_holds_nothing(
    bench: Bench, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if end == "bound":
        monkeypatch.setattr(cuts, "HOLD_S_MAX", 0.01)
    cut = opened(bench)
    await cut.make()
    put = start(bench.put(b"a"))
    if end == "close":
        cut.end("the test ends it")
    elif end == "failure":
        bench.state.stopped[0] = bench.state.any_stopped = True
        with pytest.raises(CutFailedError):
            cut.release()
        bench.state.stopped[0] = bench.state.any_stopped = False
    await asyncio.wait_for(put, 60.0)
    for use in (cut.make, cut.attend):  # a cut is made once
        with pytest.raises((CutFailedError, BackupStoppedError)):
            await use()
    with pytest.raises(CutFailedError):
        cut.release()
    assert b"a" in await rows_of(await made(bench))


async def test_cut_whose_hold_has_ended_while_the_store_settled_is_not_made(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut, settled = opened(bench), asyncio.Event()

    async def settle(_ids: object) -> None:
        await settled.wait()

    monkeypatch.setattr(bench.writer, "settle", settle)
    monkeypatch.setattr(cuts, "HOLD_S_MAX", 0.01)
    making = start(cut.make())
    await until(lambda: cut.state is CutState.ENDED)
    settled.set()
    with pytest.raises(CutFailedError, match="did not take over its log"):
        await making


# --- what makes it no cut ------------------------------------------------------------------------


async def test_cut_is_refused_without_a_lease_and_while_a_load_is_merged(bench: Bench) -> None:
    cut = opened(bench)
    loads = [ActiveLoad(load_id=5, merging=True)]
    newer(bench, *(row_of(p) for p in ALL), loads=loads)
    with pytest.raises(CutFailedError, match="bulk load 5"):
        await cut.make()
    newer(bench, *(row_of(p) for p in ALL))
    await made(bench)
    bench.lose_lease()
    with pytest.raises(LeaseExpiredError):
        await opened(bench).make()


@pytest.mark.parametrize("loss", ["lease", "partition", "hand-over"])
async def test_cut_is_none_where_another_node_may_have_served_before_its_release(
    bench: Bench, loss: str
) -> None:
    cut = opened(bench)
    await cut.make()
    if loss == "lease":
        bench.lose_lease()
    elif loss == "partition":
        bench.lose_partition_0()
    else:
        bench.state.stopped[0] = bench.state.any_stopped = True
    with pytest.raises(CutFailedError, match="changes hands"):
        cut.release()


async def test_cut_names_only_partitions_that_the_node_serves(bench: Bench) -> None:
    bench.lose_partition_0()
    cut = opened(bench)
    assert (await cut.make()).partition_ids == ALL[1:]
    cut.release()
    with pytest.raises(InvalidArgumentError):
        await rows_of(cut, 0)


# --- what it has ---------------------------------------------------------------------------------


async def test_snapshot_has_the_rows_of_its_moment_without_tombstones(bench: Bench) -> None:
    values = {b"k%04d" % n: os.urandom(n % 900) for n in range(3_000)}
    for key, value in values.items():
        await bench.put(key, value=value)
    await bench.put(b"lives", ttl_ms=1_000)
    await bench.put(b"gone")
    await bench.put(b"gone", delete=True)
    cut = await made(bench)
    await bench.put(*values, value=b"later")
    await bench.put(b"lives", delete=True)
    found = await rows_of(cut)
    assert found.pop(b"lives")[2] == bench.clock.ms + 1_000
    assert {key: value for key, (value, _, _) in found.items()} == values
    assert len({version for _, version, _ in found.values()}) == len(values)
    assert await rows_of(cut, 1) == {}
    cut.end("")


def test_rows_of_any_size_fit_into_messages() -> None:
    mib = 1 << 20
    sizes = [0, 5 * mib, 1, 3 * mib, 3 * mib, *[1] * 10]
    rows = [(b"%d" % n, b"x" * size) for n, size in enumerate(sizes)]
    pieces = list(cuts._pieces(rows))
    assert [row for piece in pieces for row in piece] == rows
    assert all(len(p) == 1 or sum(len(r) for _, r in p) <= 4 * mib for p in pieces)


async def test_node_has_one_cut_at_a_time_of_who_opened_it(bench: Bench) -> None:
    all_cuts = Cuts(bench.engine.context, bench.commits)
    cut = all_cuts.open(NUMBER, "anna", [0])
    with pytest.raises(ResourceExhaustedError):
        all_cuts.open(8, "bert", [0])
    for number, owner in ((8, "anna"), (NUMBER, "bert")):
        with pytest.raises(CutFailedError):
            all_cuts.opened(number, owner)
    assert all_cuts.opened(NUMBER, "anna") is cut
    all_cuts.close(cut)
    with pytest.raises(CutFailedError):
        await cut.make()
    all_cuts.close(all_cuts.open(8, "bert", [0]))


async def test_snapshot_is_given_up_before_the_room_for_deletes_is_taken(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = await made(bench)
    await cut.attend()
    used = bench.store.config.map_size_bytes + 1
    monkeypatch.setattr(type(bench.store), "file_bytes", property(lambda _store: used))
    with pytest.raises(BackupStoppedError, match="map-size-bytes"):
        await cut.attend()
    with pytest.raises(BackupStoppedError):
        await rows_of(cut)
    assert await answered(start(bench.put(b"a")))


async def test_snapshot_is_given_up_before_the_disk_is_full(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = await made(bench)
    disk = SimpleNamespace(f_bavail=1, f_blocks=1_000, f_frsize=4_096)
    monkeypatch.setattr(os, "statvfs", lambda _path: disk)
    await cut.attend()  # the store's file has not grown: the backup takes nothing
    await bench.put(*(b"%d" % n for n in range(100)), value=b"x" * 1_000)
    assert cut.grown_bytes
    with pytest.raises(BackupStoppedError, match="disk has 4096 bytes"):
        await cut.attend()


async def test_cut_that_nobody_makes_is_given_up(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = opened(bench)
    await cut.attend()
    monkeypatch.setattr(cuts, "WAITING_S_MAX", 0.0)
    with pytest.raises(BackupStoppedError, match="longer"):
        await cut.attend()
