"""Change feeds of real processes, under load, while these are killed, moved and handed over: the
copy that a consumer keeps is what the cluster holds.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import koinon
from koinon.client import Client
from koinon.core.feeds import FeedPositions, PartitionPosition
from koinon.driver.change_feed import ChangeFeed, FeedQuery
from koinon.local import LocalCluster, Setup
from koinon.operate.admin import Admin
from koinon.operate.plans import PlanKind, PlanRequest
from koinon_node.grpc.feed_service import FEEDS_MAX
from koinon_proto.contract.errors import (
    ClientClosedError,
    InvalidArgumentError,
    ResourceExhaustedError,
    WrongClusterError,
)
from koinon_proto.partitioner import partitioner
from tests.checkers.feed import FeedCopy
from tests.checkers.load import RecordedLoad
from tests.conftest import ClusterFactory
from tests.integration.copies import is_settled, judge
from tests.integration.test_moves import REBALANCE, execute, joined, wait_moved
from tests.kit.clusters import running_cluster
from tests.kit.waiting import wait_until

PARTITIONS = ["--partitions", "24"]
TIMEOUT_S = 90.0


def started(make_cluster: ClusterFactory, factor: int, **how: int) -> LocalCluster:
    flags = [*PARTITIONS, "--replication-factor", str(factor)]
    cluster = make_cluster(
        coordinators=1, **{"nodes": 3, **how}, setup=Setup(coordinator_flags=flags)
    )
    cluster.start()
    cluster.wait_ready()
    return cluster


@pytest.mark.parametrize("kills", [1, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize("factor", [3, 1])
def test_copy_is_whole_after_nodes_were_killed(
    make_cluster: ClusterFactory, factor: int, kills: int
) -> None:
    cluster = started(make_cluster, factor)
    with FeedCopy(cluster.client, restart_after=100) as copy, cluster.client() as client:
        with RecordedLoad(cluster.client) as load:
            for name in cluster.node_names[:kills]:
                load.wait_for_progress()
                cluster.kill(name)
                if factor > 1:
                    load.wait_for_progress()
                cluster.restart(name)
                cluster.wait_for(is_settled, timeout_s=TIMEOUT_S, what="all in sync")
            load.wait_for_progress()
        copy.judge(client)
        assert copy.restarts
        assert factor == 1 or not copy.snapshots, "a failover takes nothing back"
    judge(cluster, load)


@pytest.mark.long  # the simulation has feeds amid moves; above, copies change hands by kills
def test_copy_is_whole_after_moves_and_hand_overs(make_cluster: ClusterFactory) -> None:
    cluster = started(make_cluster, 2)
    with (
        Admin(cluster.coordinators, timeout_ms=30_000) as admin,
        FeedCopy(cluster.client) as copy,
        cluster.client() as client,
    ):
        with RecordedLoad(cluster.client) as load:
            load.wait_for_progress()
            joined(cluster)
            assert execute(admin, REBALANCE)
            wait_moved(cluster, admin)
            load.wait_for_progress()
            cluster.terminate("n1")  # hands over first
            load.wait_for_progress()
            cluster.restart("n1")
            cluster.wait_for(is_settled, timeout_s=TIMEOUT_S, what="all in sync")
            assert execute(admin, PlanRequest(kind=PlanKind.DRAIN, node_id="n2"))
            wait_moved(cluster, admin)
            load.wait_for_progress()
        copy.judge(client)
        assert not copy.snapshots
    judge(cluster, load)


def test_consumer_of_the_docs_keeps_its_copy_equal(cluster: LocalCluster) -> None:
    page = (Path(__file__).parents[2] / "docs" / "feed.md").read_text()
    (code,) = re.findall(r"```python\n(def follow\(.*?)```", page, re.DOTALL)
    given: dict[str, Any] = {"koinon": koinon}
    exec(code, given)
    copy: dict[bytes, bytes] = {b"vanished": b"while nobody looked"}

    def run(client: Client) -> None:
        with suppress(ClientClosedError):
            given["follow"](client, copy, None)

    with cluster.client() as client:
        client.put_many({b"docs/%d" % n: b"before" for n in range(100)})
        reader = cluster.client()
        thread = threading.Thread(target=run, args=(reader,))
        thread.start()
        for n in range(0, 200, 2):
            client.put(b"docs/%d" % n, b"after")
            client.delete(b"docs/%d" % (n // 3))
        expected = {entry.key: entry.value for entry in client.scan()}
        wait_until(lambda: copy == expected, "the copy is what there is")
        reader.close()
        thread.join()


def test_atomic_batches_are_seen_whole_and_in_one_batch() -> None:
    keys = [b"feed/a", b"feed/b", b"feed/c"]
    with (
        running_cluster(nodes=1, coordinators=1, setup=Setup(router="until:2f")) as cluster,
        cluster.client() as client,
    ):
        feed = client.changes(prefix=b"feed/", since="now")
        while not next(feed).caught_up:
            pass
        for n in range(50):
            batch = client.batch(b"feed/")
            for key in keys:
                batch.put(key, b"%d" % n)
            batch.commit()
        newest = b""
        while newest != b"49":
            by_version: dict[int, list[bytes]] = {}
            for change in next(feed):
                by_version.setdefault(change.version, []).append(change.key)
                newest = change.value or b""
            assert all(sorted(written) == keys for written in by_version.values())


def test_positions_of_elsewhere_are_refused(cluster: LocalCluster) -> None:
    with cluster.client() as client:
        positions = next(client.changes(since="now")).positions
        text = str(positions)
        other = type(positions)("another", positions.keyspace_id, positions.partitions)
        with pytest.raises(WrongClusterError):
            next(client.changes(since=other))
        with pytest.raises(InvalidArgumentError, match="another keyspace"):
            next(client.changes(since=type(positions)(positions.cluster_id, 99, {})))
        with pytest.raises(InvalidArgumentError, match="not the text of feed positions"):
            next(client.changes(since=text[:-20]))


async def test_feed_takes_partitions_on_and_leaves_them_while_it_runs(
    cluster: LocalCluster,
) -> None:
    place = partitioner("murmur2", 1024).partition_of
    first, second = b"partial/1", b"partial/2"
    async with koinon.aio.connect(cluster.coordinators) as client:
        engine = client._engine
        feed = ChangeFeed(engine, engine.target, FeedQuery(is_partial=True), None)

        async def told() -> list[tuple[bytes, bytes | None]]:
            while not (batch := await feed.next()):
                pass
            return [(change.key, change.value) for change in batch]

        await client.put_many({first: b"1", second: b"1"})
        feed.add({place(first): PartitionPosition()})
        assert await told() == [(first, b"1")]
        feed.add({place(second): PartitionPosition()})
        assert await told() == [(second, b"1")]
        before = feed.positions[place(first)]
        await client.put(first, b"2")
        await asyncio.sleep(0.1)  # it may be read, and waits to be taken
        feed.remove([place(first)])
        await client.put_many({first: b"3", second: b"2"})
        assert await told() == [(second, b"2")]
        assert place(first) not in feed.positions
        feed.add({place(first): before})
        assert (await told())[-1] == (first, b"3")
        feed.close()


async def test_feed_that_lasts_says_that_a_node_has_no_place_and_goes_on(
    cluster: LocalCluster,
) -> None:
    async def told(feed: ChangeFeed) -> Any:
        while not (batch := await feed.next()):
            pass
        return batch

    key = b"places/1"
    p = partitioner("murmur2", 1024).partition_of(key)
    async with koinon.aio.connect(cluster.coordinators) as client:
        await client.put(key, b"1")
        engine = client._engine
        query, start = FeedQuery(is_partial=True), {p: PartitionPosition()}
        others = [ChangeFeed(engine, engine.target, query, None) for _ in range(FEEDS_MAX // 2)]
        for other in others:
            other.add(start)
            await told(other)
        feed = ChangeFeed(engine, engine.target, query, 1_000)
        feed.add(start)
        for _ in range(2):
            with pytest.raises(ResourceExhaustedError, match="change feeds"):
                await told(feed)
        for other in others:
            other.close()
        assert key in (await told(feed)).keys
        feed.close()


def test_watch_prints_changes_and_goes_on_where_it_stopped(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    state, key = tmp_path / "state", b"watch/a"
    line = [sys.executable, "-m", "koinon.cli", "watch", "--prefix", "watch/", "--json"]
    line += ["--state", str(state), "--coordinators", cluster.coordinators]

    def reached() -> int:
        """Return how far the state file says that the key's partition was printed."""
        place = FeedPositions.parse(state.read_text()).partitions.get(partition_id)
        return -1 if place is None else place.sequence

    def watched() -> tuple[object, object]:
        """Return the next change, once the state file says that it was printed."""
        with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            if not state.exists():  # the first one begins now
                wait_until(state.exists, "it follows")
                client.put(key, b"1")
            answer = json.loads(process.stdout.readline())
            wait_until(lambda: reached() >= answer["version"], "it is noted")
            process.send_signal(signal.SIGINT)
            assert process.wait(TIMEOUT_S) == 0
        return answer["change"], answer["key"]

    with cluster.client() as client:
        partition_id = partitioner("murmur2", 1024).partition_of(key)
        assert watched() == ("put", "watch/a")
        client.delete(key)
        client.put(b"other", b"x")
        assert watched() == ("delete", "watch/a")
