"""Both clients while partitions change hands, and the durability that writes ask for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

import koinon
from koinon.core.retry import RetryPolicy
from koinon_proto.contract.errors import NotEnoughReplicasError, PartitionOfflineError
from koinon_proto.v1 import kv_pb2
from tests.client.kit.fake_cluster import FakeCluster
from tests.client.kit.helpers import ALL, ONLY_GRPC, ThreeTimesMore, engine_of, keys_of

PRIMARY, IN_SYNC = kv_pb2.DURABILITY_PRIMARY, kv_pb2.DURABILITY_ALL_IN_SYNC


# --- durability ---------------------------------------------------------------------------------


def test_durability_travels_with_every_kind_of_write(cluster: FakeCluster, client: Any) -> None:
    rows = {b"key%d" % i: b"v" for i in range(10)}
    client.put(b"k", b"v")
    client.put_many(rows).raise_for_errors()
    client.delete(b"k")
    client.delete_many(list(rows)).raise_for_errors()
    assert cluster.durabilities == {IN_SYNC: 22}
    cluster.durabilities.clear()
    client.put(b"k", b"v", durability="primary")
    client.put_many(rows, durability="primary").raise_for_errors()
    client.delete(b"k", durability="primary")
    client.delete_many(list(rows), durability="primary").raise_for_errors()
    assert cluster.durabilities == {PRIMARY: 22}


@pytest.mark.parametrize(
    ("durability", "kind"),
    [("none", koinon.InvalidArgumentError), ("", koinon.InvalidArgumentError), (1, TypeError)],
)
def test_durability_that_is_none_is_refused_at_the_call(
    cluster: FakeCluster, client: Any, durability: Any, kind: type[Exception]
) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: client.put(b"k", b"v", durability=durability),
        lambda: client.delete(b"k", durability=durability),
        lambda: client.put_many({b"k": b"v"}, durability=durability),
        lambda: client.delete_many([b"k"], durability=durability),
    ]
    for call in calls:
        with pytest.raises(kind, match="durability"):
            call()
    assert cluster.count("BatchWrite") == 0


async def test_writes_of_different_durability_do_not_share_a_batch(cluster: FakeCluster) -> None:
    keys = keys_of(cluster, cluster.nodes[0], 20)
    async with await koinon.aio.connect(cluster.seeds, timeout_ms=20_000) as client:
        writes = [client.put(key, b"v") for key in keys[:10]]
        writes += [client.put(key, b"v", durability="primary") for key in keys[10:]]
        await asyncio.gather(*writes)
    assert cluster.durabilities == {IN_SYNC: 10, PRIMARY: 10}
    assert cluster.count("BatchWrite") == 2


# --- partitions that change hands ---------------------------------------------------------------


def test_old_table_costs_one_round_trip_more(cluster: FakeCluster, client: Any) -> None:
    keys = keys_of(cluster, cluster.nodes[0], 5)
    client.get_many(keys)
    cluster.reset_counts()
    cluster.move(ALL, 2, tell=False)
    works: list[Callable[[], Any]] = [
        lambda: client.put(keys[0], b"v"),
        lambda: client.put_many([(key, b"w") for key in keys[1:]]).raise_for_errors(),
    ]
    for work in works:
        work()
    assert cluster.nodes[0].calls["BatchWrite"] == 2
    assert cluster.nodes[1].calls["BatchWrite"] == 2


class Noting(RetryPolicy):
    """Notes the pauses that it gives."""

    def backoff_s(self, attempt: int, *, changing_hands: bool = False) -> float:
        PAUSES_S.append(super().backoff_s(attempt, changing_hands=changing_hands))
        return PAUSES_S[-1]


PAUSES_S: list[float] = []


def test_partition_served_again_is_written_to_soon(cluster: FakeCluster, client: Any) -> None:
    key = keys_of(cluster, cluster.nodes[0])[0]
    client.put(key, b"v")
    refused = 0

    def refuse(partition_id: int) -> Any:
        nonlocal refused
        refused += 1
        if refused <= 15:
            return PartitionOfflineError(partition_id=partition_id, reason="being taken over")
        return None

    cluster.nodes[0].refuse = refuse
    PAUSES_S.clear()
    engine_of(client).policy = Noting()
    client.put(key, b"w")
    assert len(PAUSES_S) == 15
    assert max(PAUSES_S) < 0.3, "the back-off of a failover is short"


def test_too_few_replicas_is_tried_again_until_the_deadline(
    cluster: FakeCluster, client: Any
) -> None:
    key = keys_of(cluster, cluster.nodes[0])[0]
    lacking = threading.Event()
    lacking.set()

    def refuse(partition_id: int) -> Any:
        if lacking.is_set():
            return NotEnoughReplicasError(partition_id=partition_id, in_sync=1, min_in_sync=2)
        return None

    cluster.nodes[0].refuse = refuse
    engine = engine_of(client)
    patient, engine.policy = engine.policy, ThreeTimesMore()
    with pytest.raises(koinon.UnavailableError, match="1 in-sync"):
        client.put(key, b"v", timeout_ms=1_000)
    assert cluster.count("BatchWrite") == 4
    result = client.put_many({key: b"v"}, timeout_ms=1_000)
    assert [failure.key for failure in result.refused] == [key]
    assert cluster.count("BatchWrite") == 8
    engine.policy = patient
    threading.Timer(0.1, lacking.clear).start()
    assert client.put(key, b"v") > 0


def test_dead_node_does_not_hold_up_the_others(cluster: FakeCluster, client: Any) -> None:
    dead, live = (keys_of(cluster, node, 20) for node in cluster.nodes)
    client.put_many([(key, b"v") for key in dead + live])
    cluster.kill(cluster.nodes[0])
    waiting = threading.Thread(
        target=lambda: client.put_many([(key, b"w") for key in dead], timeout_ms=200_000)
    )
    waiting.start()
    for key in live:
        client.put(key, b"w")
    assert waiting.is_alive()
    cluster.move(ALL, 2)
    waiting.join()
    assert client.get_many(dead) == [b"w"] * 20


@ONLY_GRPC
async def test_writes_queued_behind_a_hanging_node_follow_the_partition(
    cluster: FakeCluster,
) -> None:
    keys = keys_of(cluster, cluster.nodes[0], 10)
    cluster.nodes[0].before = gate = cluster.gate()

    async with await koinon.aio.connect(cluster.nodes[1].address, timeout_ms=20_000) as client:
        stuck = asyncio.create_task(client.put(keys[0], b"v"))
        await asyncio.to_thread(gate.reached.wait, 60)
        queued = [asyncio.create_task(client.put(key, b"w")) for key in keys[1:]]
        cluster.move(ALL, 2)
        await asyncio.wait_for(asyncio.gather(*queued), 60)
        assert not stuck.done()
        gate.open()
        await asyncio.wait_for(stuck, 60)
    assert len(cluster.applied) == 10
