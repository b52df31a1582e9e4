"""The shipped alerts on a real cluster: things break, Prometheus sees it, and their repair."""

from __future__ import annotations

from pathlib import Path

from koinon.client import Client
from koinon.local import LocalCluster, Ports, Setup
from koinon_proto.partitioner import partitioner
from tests.conftest import ClusterFactory
from tests.kit.waiting import wait_until
from tests.observe.prometheus import Prometheus, prometheus
from tests.observe.shipped import dashboard_queries, needs

PARTITIONS = 16
HOT = 5
HOT_ROWS = 6_000
EVEN_ROWS = 5 * HOT_ROWS  # what makes the hot partition's share less than 5 times the mean again


# What a machine that is busy with other tests may bring about by itself.
NOISE = {"KoinonLeaseLosses", "KoinonReplicationLag", "KoinonTargetDown"}
EMPTY_AT_REST = {
    "Alerts",
    "Rows that were not done",
    "Rows refused by limits",  # no keyspace here has any
    "Requests refused or failed",
    "Time left",  # missing while moves are queued
}


@needs("prometheus")
def test_alerts_fire_when_things_break_and_resolve_when_they_are_repaired(
    make_cluster: ClusterFactory, tmp_path: Path
) -> None:
    flags = ["--partitions", str(PARTITIONS)]
    cluster = make_cluster(
        coordinators=1, nodes=3, setup=Setup(coordinator_flags=flags), ports=Ports(metrics=True)
    )
    cluster.start()
    cluster.wait_ready()
    targets = {
        "koinon-coordinator": [cluster.metrics_address(name) for name in cluster.coordinator_names],
        "koinon-node": [cluster.metrics_address(name) for name in cluster.node_names],
    }
    with prometheus(tmp_path, targets) as watcher, cluster.client() as client:
        watcher.wait_true(f"count(koinon:partition_writes:rate5m) == {PARTITIONS}")
        watcher.wait_until(gone=["KoinonNoLeader", "KoinonUnderReplicated"])
        skewed_and_even_again(client, watcher)
        every_panel_shows_something(watcher)
        copies_lost_one_by_one(cluster, watcher)
        leaderless(cluster, watcher)
        assert not watcher.broken_rules()


def skewed_and_even_again(client: Client, watcher: Prometheus) -> None:
    hashing = partitioner("murmur2", PARTITIONS)
    keys = [b"key:%d" % number for number in range(PARTITIONS * 200)]
    hot = [key for key in keys if hashing.partition_of(key) == HOT][:100]
    wait_until(lambda: set(watcher.firing()) <= NOISE, "nothing else fires")
    for _ in range(HOT_ROWS // len(hot)):
        client.put_many((key, b"v") for key in hot).raise_for_errors()
    watcher.wait_until(fire=["KoinonPartitionSkew"])
    notes = watcher.firing()["KoinonPartitionSkew"]["annotations"]
    assert notes["summary"].startswith(f"Partition {HOT} takes 1"), notes
    assert "docs/runbook.md#koinonpartitionskew" in notes["description"]
    for _ in range(EVEN_ROWS // len(keys) + 1):
        client.put_many((key, b"v") for key in keys).raise_for_errors()
    client.get_many(keys)
    watcher.wait_until(gone=["KoinonPartitionSkew"])
    wait_until(
        lambda: set(watcher.firing()) <= NOISE | {"KoinonTrafficUneven"}, "nothing else fires"
    )


def every_panel_shows_something(watcher: Prometheus) -> None:
    """Wait for every panel: some show rates, which need two scrapes, and scrapes may be late."""
    wait_until(
        lambda: (
            {title for title, expr in dashboard_queries() if not watcher.query(expr)}
            <= EMPTY_AT_REST
        ),
        f"every panel but {EMPTY_AT_REST} shows something",
    )


def copies_lost_one_by_one(cluster: LocalCluster, watcher: Prometheus) -> None:
    """Three copies: one node less, they are fewer; two less, read-only; three less, offline."""
    broken = ["KoinonUnderReplicated", "KoinonNodeDown", "KoinonTargetDown"]
    worse = ["KoinonBelowMinInSync"]
    worst = ["KoinonPartitionsOffline"]
    cluster.kill("n1")
    watcher.wait_until(fire=broken, gone=worse + worst)
    cluster.kill("n2")
    watcher.wait_until(fire=broken + worse, gone=worst)
    cluster.kill("n3")
    watcher.wait_until(fire=broken + worse + worst)
    for name in ("n1", "n2", "n3"):
        cluster.restart(name)
    cluster.wait_ready()
    watcher.wait_until(gone=[*broken, *worse, *worst, "KoinonPartitionsStarting"])


def leaderless(cluster: LocalCluster, watcher: Prometheus) -> None:
    cluster.kill("c1")
    watcher.wait_until(fire=["KoinonNoLeader", "KoinonNodeNotServing"])
    cluster.restart("c1")
    cluster.wait_ready()
    watcher.wait_until(gone=["KoinonNoLeader", "KoinonNodeNotServing"])
