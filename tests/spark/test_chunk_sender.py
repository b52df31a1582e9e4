"""Chunks reach their partitions' primaries, few messages at a time, under numbers that stay."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from koinon.spark.cluster import Cluster
from koinon.spark.writing.chunk_sender import IN_FLIGHT_PER_OWNER, MESSAGE_BYTES, ChunkSender, Pace
from koinon.spark.writing.chunking import Chunk
from koinon_proto.contract.bulk_loads import LoadMode
from koinon_proto.contract.errors import KoinonError, LeaseExpiredError, StorageFullError
from tests.kit.waiting import wait_until
from tests.spark.fake_loads import LoadsCluster


@pytest.fixture
def cluster(fake: LoadsCluster) -> Iterator[Cluster]:
    with Cluster(fake.seeds, timeout_s=60) as view:
        yield view


def stager(fake: LoadsCluster, cluster: Cluster, **given: Any) -> ChunkSender:
    load = fake.open("job", LoadMode.APPEND, b"", None)
    assert load is not None
    fake.checks_chunks = False
    return ChunkSender(
        cluster,
        load_id=load.load_id,
        attempt=7,
        table_version=fake.table.table_version,
        **given,
    )


def chunk(partition_id: int, size: int = 100) -> Chunk:
    return Chunk(partition_id=partition_id, rows=1, data=bytes(size))


def test_stager_small_chunks_go_together_to_each_owner(
    fake: LoadsCluster, cluster: Cluster
) -> None:
    to = stager(fake, cluster)
    for partition_id in (*range(16), *range(16)):
        to.add(chunk(partition_id))
    to.finish()
    to.close()
    places = sorted((number, p) for p, _, number in fake.only_load().chunks)
    assert places == [(n, n % 16) for n in range(32)]
    assert fake.count("Stage") == 2
    assert (to.rows, to.bytes) == (32, 3_200)


def test_stager_refused_partitions_are_sent_again_alone_under_their_numbers(
    fake: LoadsCluster, cluster: Cluster
) -> None:
    seen: list[tuple[int, int]] = []
    refused = {3}

    async def look(method: str, request: Any) -> None:
        if method == "Stage":
            seen.extend(zip(request.partition_ids, request.numbers, strict=True))

    def refuse(partition_id: int) -> KoinonError | None:
        if partition_id in refused:
            refused.remove(partition_id)
            return LeaseExpiredError(node_id="n")
        return None

    for node in fake.nodes:
        node.before, node.refuse = look, refuse
    to = stager(fake, cluster)
    for partition_id in range(8):
        to.add(chunk(partition_id))
    to.finish()
    to.close()
    assert Counter(seen) == {(p, p): 2 if p == 3 else 1 for p in range(8)}


def test_stager_keeps_few_messages_under_way_at_a_node(
    fake: LoadsCluster, cluster: Cluster
) -> None:
    gate = fake.gate()
    node = fake.nodes[0]

    async def hold(method: str, request: Any) -> None:
        if method == "Stage":
            await gate(method, request)

    node.before = hold
    to = stager(fake, cluster)
    mine = [p for p in range(16) if fake.table.rows[p].primary == node.number]

    def add_many() -> None:
        for _ in range(IN_FLIGHT_PER_OWNER + 3):
            to.add(chunk(mine[0], MESSAGE_BYTES))

    adding = threading.Thread(target=add_many)
    adding.start()
    wait_until(lambda: node.calls.get("Stage", 0) == IN_FLIGHT_PER_OWNER)
    assert adding.is_alive()
    gate.open()
    adding.join(60)
    to.finish()
    to.close()
    assert node.calls["Stage"] == IN_FLIGHT_PER_OWNER + 3


def test_stager_final_error_ends_add_and_finish(fake: LoadsCluster, cluster: Cluster) -> None:
    for node in fake.nodes:
        node.refuse = lambda _p: StorageFullError(node_id="n1", reason="full")
    to = stager(fake, cluster)
    to.add(chunk(0, MESSAGE_BYTES))
    with pytest.raises(StorageFullError):
        to.finish()
    with pytest.raises(StorageFullError):
        to.add(chunk(1))
    to.close()


def test_stager_failed_elsewhere_stops_waiting_for_a_partition_nobody_serves(
    fake: LoadsCluster, cluster: Cluster
) -> None:
    fake.move([0], 0)
    to = stager(fake, cluster)
    to.add(chunk(0, MESSAGE_BYTES))
    to.fail(StorageFullError(node_id="n1", reason="elsewhere"))
    with pytest.raises(StorageFullError, match="elsewhere"):
        to.finish()
    to.close()


def test_pace_lets_a_second_go_at_once_and_then_holds_the_rate() -> None:
    clock = [100.0]
    pace = Pace(1_000, now=lambda: clock[0])
    assert pace.delay_s(1_000) == 0
    assert pace.delay_s(500) == pytest.approx(0.5)
    clock[0] += 0.5
    assert pace.delay_s(250) == pytest.approx(0.25)
    clock[0] += 10
    assert pace.delay_s(1_000) == 0
    assert Pace(0).delay_s(1 << 40) == 0
