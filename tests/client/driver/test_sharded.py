"""Counters and sets in several shards: where they lie, and that nothing of them is lost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

import koinon
from koinon.core.shards import SHARDS_MAX, shards_of
from koinon.local import LocalCluster, Setup
from koinon_proto.contract.errors import InvalidArgumentError, NotANumberError
from koinon_proto.partitioner import partitioner
from tests.kit.clusters import running_cluster

CELL = bytes.fromhex("0832830fffffffff")


@pytest.fixture(scope="module", params=["whole", "until:2f"])
def routed(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    with running_cluster(nodes=1, coordinators=1, setup=Setup(router=request.param)) as cluster:
        yield cluster


@pytest.mark.parametrize(
    ("name", "key", "first"),
    [
        ("murmur2", b"visits", b"visits#000"),
        ("murmur2(until:2f)", b"shop/n", b"shop#000/n"),
        ("murmur2(until:2f)", b"visits", b"visits#000"),
        ("murmur2(until:2f)", b"/n", b"#000/n"),
        ("murmur2(until:2f,2)", b"eu/shop/n", b"eu/shop#000/n"),
        ("murmur2(tag)", b"n{u1}x", b"n{u1#000}x"),
        ("crc16", b"{u1}", b"{u1#000}"),
        ("md5(first:8)", b"12345678n", b"000#12345678n"),
        ("murmur2(first:4)", b"n", b"000#n"),
        ("murmur2(h3:3)", CELL + b"/n", CELL + b"/n"),
    ],
)
def test_shards_are_routed_apart_and_their_keys_do_not_depend_on_their_number(
    name: str, key: bytes, first: bytes
) -> None:
    known = partitioner(name, 64)
    if "h3" in name:
        first = b"000#" + first
    made = shards_of(key, SHARDS_MAX, known)
    assert made[0] == first
    assert len(set(map(known.routing_bytes, made))) == SHARDS_MAX
    assert len({known.partition_of(one) for one in made}) > 50
    for count in (1, 2, 11, 101):
        assert shards_of(key, count, known) == made[:count]


@pytest.mark.parametrize(
    ("name", "key", "count", "words"),
    [
        ("murmur2", b"n", 0, "shards"),
        ("murmur2", b"n", 257, "shards"),
        ("murmur2", b"n" * 497, 2, "too long"),
        ("murmur2(first:1)", b"n", 2, "does not tell"),
    ],
)
def test_what_cannot_be_spread_is_refused(name: str, key: bytes, count: int, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        shards_of(key, count, partitioner(name, 64))


def test_counter_of_many_threads_loses_nothing(routed: LocalCluster) -> None:
    with routed.client() as client:
        visits = client.sharded(b"shop/visits", 8)

        def count() -> None:
            for _ in range(50):
                visits.increment(2)

        threads = [threading.Thread(target=count) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert visits.total() == 400
        values = client.get_many(visits.keys)
        assert sum(value is not None for value in values) > 4, "chance takes all of them"
        assert client.sharded(b"shop/visits", 20).total() == 400
        assert client.sharded(b"shop/other", 3).total() == 0
        client.put(visits.keys[0], b"text")
        with pytest.raises(NotANumberError):
            visits.total()


def test_set_is_the_union_of_its_shards(routed: LocalCluster) -> None:
    users = {b"user/%d" % n for n in range(100)} | {b"\xff\0", b"#003/x"}
    with routed.client() as client:
        online = client.sharded(b"shop/online", 7)
        for user in (*users, b"user/1"):
            online.add(user)
        client.put(online.keys[0], b"", ttl_ms=60_000)  # others' records
        client.put(online.keys[0] + b"1/x", b"")
        client.put(b"shop#000", b"")
        assert online.members() == users
        more = client.sharded(b"shop/online", 9)
        assert more.members() == users
        more.add(b"user/1")
        for user in users - {b"user/2"}:
            more.discard(user)
        more.discard(b"nobody")
        assert online.members() == more.members() == {b"user/2"}
        with pytest.raises(InvalidArgumentError, match="is empty"):
            online.add(b"")


async def test_asyncio_client_has_the_same(routed: LocalCluster) -> None:
    async with koinon.aio.connect(routed.coordinators) as client:
        counter = client.sharded(b"aio/n", 4)
        await asyncio.gather(*(counter.increment() for _ in range(40)))
        await counter.add(b"a")
        await counter.add(b"b", ttl_ms=60_000)
        await counter.discard(b"a")
        found = await counter.total(), await counter.members()
    assert found == (40, {b"b"})
    with routed.client() as client:
        assert client.sharded(b"aio/n", 4).total() == 40
