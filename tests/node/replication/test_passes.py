"""Expiry, tombstones and the pages of a pass, as the primary gives them (rules 13 and 14)."""

from __future__ import annotations

from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from koinon_node.config import Limits
from koinon_node.core.formats import records
from koinon_node.partition.batches import WriteAnswer
from koinon_proto.contract.errors import NotPrimaryError, TableBehindError, UnavailableError
from koinon_proto.v1 import replication_pb2 as wire
from tests.node.kit.held_writer import EPOCH, ME, Bench, row_of
from tests.node.kit.played_follower import PlayedFollower, joined, turn
from tests.node.kit.primary import START, TWO, answered, proposed, start, tick, with_rows


def test_delete_and_expiry_of_a_replicated_partition_leave_tombstones(tmp_path: Path) -> None:
    async def use(bench: Bench) -> None:
        two = await joined(bench, 0)

        async def done(call: Coroutine[Any, Any, WriteAnswer]) -> None:
            task = start(call)
            await turn()
            await two.acknowledge()
            await task

        await done(bench.put(b"a"))
        await done(bench.put(b"b", ttl_ms=50))
        await done(bench.put(b"a", delete=True))
        bench.clock.ms += 50
        read = start(bench.get(b"b"))
        assert not await answered(read)
        await two.acknowledge()
        assert (await read).missing == [0]
        for key in (b"\0\0\0a", b"\0\0\0b"):
            record = records.decode_record(bench.store.get(key) or b"")
            assert record.tombstone
        assert int(bench.copies.purge_floors[0]) == 0
        assert (await bench.scan()).keys == []
        assert (await bench.get(b"a")).missing == [0]
        assert (await bench.put(b"a", delete=True)).absent == [0]

    with_rows(tmp_path, use, TWO)


def test_tombstone_is_purged_late_and_only_below_what_every_follower_and_pass_has(
    tmp_path: Path,
) -> None:
    async def use(bench: Bench) -> None:
        two, three = PlayedFollower(bench, 2), PlayedFollower(bench, 3)
        await two.join(0)
        write = start(bench.put(b"a"))
        await turn()
        await two.acknowledge()
        await write
        removal = start(bench.put(b"a", delete=True))
        await turn()
        await two.acknowledge()
        await removal
        (answer,) = await three.open(0, complete_through=START, history=[(EPOCH, 0)])
        assert answer.common_point == START
        await bench.engine.sweeper.step(100)
        assert bench.store.get(b"\0\0\0a") is not None  # too young
        bench.clock.ms += 600_000
        await bench.engine.sweeper.step(100)
        assert bench.store.get(b"\0\0\0a") is not None  # a pass needs it
        await three.position(0, sequence=START + 2)
        await two.open(0)  # a required follower has said nothing
        await bench.engine.sweeper.step(100)
        assert bench.store.get(b"\0\0\0a") is not None
        await two.position(0, sequence=START + 2)
        await bench.engine.sweeper.step(100)
        assert bench.store.get(b"\0\0\0a") is None
        assert bench.store.read_copies([0])[0].purge_floor == START + 2
        # Who is below the floor takes a snapshot; one in sync leaves in_sync first.
        (answer,) = await three.open(0, complete_through=START, history=[(EPOCH, 0)])
        assert answer.take_snapshot
        await tick(bench)
        two.take()
        (floors,) = [m.floors for m in two.others if m.WhichOneof("kind") == "floors"]
        assert (list(floors.partition_ids), list(floors.sequences)) == ([0], [START + 2])
        (answer,) = await two.open(0, complete_through=START, history=[(EPOCH, 0)])
        assert answer.refusal.HasField("table_behind")
        await tick(bench)
        assert proposed(bench).in_sync == (ME,)

    with_rows(tmp_path, use, row_of(0, (1, 2, 3), (1, 2)))


def test_rule_14_tombstone_stays_while_a_required_follower_is_away(tmp_path: Path) -> None:
    async def use(bench: Bench) -> None:
        two = await joined(bench, 0)
        for delete in (False, True):
            write = start(bench.put(b"a", delete=delete))
            await turn()
            await two.acknowledge()
            await write
        bench.clock.ms += 600_000
        await two.leave()
        await bench.engine.sweeper.step(100)
        assert bench.store.get(b"\0\0\0a") is not None
        await PlayedFollower(bench).join(0)
        await bench.engine.sweeper.step(100)
        assert bench.store.get(b"\0\0\0a") is None

    with_rows(tmp_path, use, TWO)


def page_request(**changes: Any) -> wire.ReadPageRequest:
    request = wire.ReadPageRequest(cluster_id="c", partition_id=0, primary_epoch=EPOCH)
    for name, value in changes.items():
        setattr(request, name, value)
    return request


@pytest.mark.parametrize("journal", [True, False])
def test_page_of_a_pass_has_what_is_above_its_start_up_to_its_bound(
    tmp_path: Path, journal: bool
) -> None:
    async def use(bench: Bench) -> None:
        await bench.put(b"a", b"b", b"c")
        await bench.put(b"b")
        if not journal:
            bench.journal.reset(0, START + 100)
        page = await bench.replicator.pages.read_page(page_request(after_sequence=START + 2))
        assert list(page.keys) == [b"\0b", b"\0c"]
        assert (page.bound, page.end) == (START + 4, True)
        page = await bench.replicator.pages.read_page(
            page_request(after_sequence=START + 2, after_key=b"\0b")
        )
        assert list(page.keys) == [b"\0c"]

    with_rows(tmp_path, use, row_of(0, (1, 2), (1,)))


def test_page_waits_until_the_own_copy_reaches_where_the_stream_begins(tmp_path: Path) -> None:
    async def use(bench: Bench) -> None:
        bench.channel.held = True
        write = start(bench.put(b"a"))
        await turn()
        page = start(bench.replicator.pages.read_page(page_request(reach=START + 1)))
        assert not await answered(page)
        bench.channel.release()
        assert list((await page).keys) == [b"\0a"]
        await write
        with pytest.raises(UnavailableError):
            await bench.replicator.pages.read_page(page_request(reach=START + 2))
        with pytest.raises(NotPrimaryError):
            await bench.replicator.pages.read_page(page_request(primary_epoch=EPOCH - 1))
        with pytest.raises(TableBehindError):
            await bench.replicator.pages.read_page(page_request(primary_epoch=EPOCH + 1))

    with_rows(tmp_path, use, row_of(0, (1, 2), (1,)))


def test_pages_go_on_where_the_last_one_ended(tmp_path: Path) -> None:
    async def use(bench: Bench) -> None:
        keys = [b"%03d" % n for n in range(50)]
        await bench.put(*keys)
        found: list[bytes] = []
        after, pages = b"", 0
        while True:
            page = await bench.replicator.pages.read_page(
                page_request(after_key=after, snapshot=True)
            )
            found += page.keys
            pages += 1
            if page.end:
                break
            after = page.last_key
        assert (found, pages > 5) == ([b"\0" + key for key in keys], True)
        asked = wire.ReadKeysRequest(
            cluster_id="c",
            partition_id=0,
            primary_epoch=EPOCH,
            keys=[b"\x00001", b"\x00absent", b"\x00002"],
        )
        page = await bench.replicator.pages.read_keys(asked)
        assert [bool(record) for record in page.records] == [True, False, True]

    with_rows(tmp_path, use, row_of(0, (1, 2), (1,)), limits=Limits(page_rows=7))
