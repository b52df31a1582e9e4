"""An old copy of a node's directory that is put back never wins over later acknowledged writes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from koinon.local import LocalCluster, Setup
from koinon.operate.admin import Admin
from koinon.operate.cluster_status import ClusterStatus
from koinon.operate.judge.health import notes, problems
from koinon_proto.contract.errors import KoinonError
from koinon_proto.contract.table import NodeId, NodeStatus, OfflineReason, PartitionStatus
from tests.conftest import ClusterFactory
from tests.integration.copies import is_settled, number_of, table_of

TIMEOUT_S = 60.0
KEYS = [b"k%d" % n for n in range(400)]
ROWS_OF_ANOTHER = 60_000
"""Of a keyspace that is dropped: so many that a copy of half of them is not erased in a moment."""
LOGS = ["on", "off"]  # a write-ahead log in front of the store
COPIED = [
    *((False, "on"), (True, "off")),
    *(pytest.param(*case, marks=pytest.mark.long) for case in ((True, "on"), (False, "off"))),
]
"""Pairs: the node was stopped when its directory was copied; the node has a log."""


def started(make_cluster: ClusterFactory, copies: int, log: str, nodes: int = 2) -> LocalCluster:
    flags = ["--partitions", "16", "--replication-factor", str(copies)]
    cluster = make_cluster(
        nodes=nodes,
        coordinators=1,
        setup=Setup(coordinator_flags=flags, node_flags=["--write-ahead-log", log]),
    )
    cluster.start()
    cluster.wait_for(is_settled, timeout_s=TIMEOUT_S, what="every replica in sync")
    return cluster


def write(cluster: LocalCluster, value: bytes) -> None:
    with cluster.client(timeout_ms=30_000) as client:
        client.put_many(dict.fromkeys(KEYS, value)).raise_for_errors()


def copy_directory(cluster: LocalCluster, tmp_path: Path, *, stopped: bool) -> Path:
    """Copy the directory of n1 aside, while its process runs or between two of them."""
    kept = tmp_path / "kept"
    if stopped:
        cluster.terminate("n1")
    shutil.copytree(cluster.member_dir("n1"), kept)
    if stopped:
        cluster.restart("n1")
        cluster.wait_for(is_settled, timeout_s=TIMEOUT_S, what="every replica in sync")
    return kept


def put_in_place(cluster: LocalCluster, directory: Path, away: Path) -> None:
    """Kill n1, and start it on a copy of ``directory``; its own is moved ``away``."""
    cluster.kill("n1")
    cluster.member_dir("n1").rename(away)
    shutil.copytree(directory, cluster.member_dir("n1"))
    cluster.restart("n1")


def old_store(status: ClusterStatus) -> str:
    session = status.session_of(number_of(table_of(status), "n1"))
    return "" if session is None else session.old_store


@pytest.mark.parametrize(("stopped", "log"), COPIED)
def test_old_copy_beside_others_catches_up_and_is_named(
    make_cluster: ClusterFactory, tmp_path: Path, stopped: bool, log: str
) -> None:
    cluster = started(make_cluster, 2, log)
    write(cluster, b"old")
    kept = copy_directory(cluster, tmp_path, stopped=stopped)
    write(cluster, b"new")
    put_in_place(cluster, kept, tmp_path / "away")
    with cluster.client(timeout_ms=30_000) as client:
        assert set(client.get_many(KEYS)) == {b"new"}
    status = cluster.wait_for(
        lambda status: is_settled(status) and bool(old_store(status)),
        timeout_s=TIMEOUT_S,
        what="n1 in sync again, and named",
    )
    assert ("epoch" if stopped else "copied while it was open") in old_store(status)
    assert any("node n1 was started on a store that may lack" in note for note in notes(status))
    cluster.kill("n2")  # what it alone had is lost: only n1 leads now
    with cluster.client(timeout_ms=30_000) as client:
        assert set(client.get_many(KEYS)) == {b"new"}
    node_log = cluster.log_path("n1").read_text()
    assert ("data directory is an old copy" if stopped else "copy untrusted") in node_log
    leader_log = cluster.log_path("c1").read_text()
    assert ("store is an old copy" if stopped else "store is not the one known") in leader_log


@pytest.mark.parametrize(("stopped", "log"), COPIED)
def test_old_copy_of_the_only_one_serves_nothing_and_the_newer_one_is_taken_back(
    make_cluster: ClusterFactory, tmp_path: Path, stopped: bool, log: str
) -> None:
    cluster = started(make_cluster, 1, log)
    write(cluster, b"old")
    kept = copy_directory(cluster, tmp_path, stopped=stopped)
    write(cluster, b"new")
    away = tmp_path / "away"
    put_in_place(cluster, kept, away)

    def are_lost(status: ClusterStatus) -> bool:
        rows = table_of(status).used_rows
        lost = [row for row in rows if row.offline_reason is OfflineReason.STORE_LOST]
        return len(lost) == 8 and bool(old_store(status))

    status = cluster.wait_for(are_lost, timeout_s=TIMEOUT_S, what="partitions offline")
    assert any(one.startswith("8 partitions lost every in-sync copy") for one in problems(status))
    rows = table_of(status).used_rows
    assert all(row.status is PartitionStatus.ONLINE for row in rows if not row.offline_reason)
    with cluster.client(timeout_ms=300) as client:
        for key in KEYS[:20]:
            try:
                assert client.get(key) == b"new"
            except KoinonError:
                continue
    cluster.kill("n1")
    shutil.rmtree(cluster.member_dir("n1"))
    away.rename(cluster.member_dir("n1"))
    cluster.restart("n1")
    cluster.wait_for(is_settled, timeout_s=TIMEOUT_S, what="every partition served")
    with cluster.client(timeout_ms=30_000) as client:
        assert set(client.get_many(KEYS)) == {b"new"}


@pytest.mark.parametrize("log", LOGS)
def test_old_copy_shows_nothing_of_a_dropped_keyspace_in_one_that_has_its_partitions(
    make_cluster: ClusterFactory, tmp_path: Path, log: str
) -> None:
    cluster = started(make_cluster, 2, log)
    rows = {b"k%06d" % n: b"of another" for n in range(ROWS_OF_ANOTHER)}
    with Admin(cluster.coordinators, timeout_ms=30_000) as admin:
        gone = admin.keyspaces.create("gone", partition_count=4, replication_factor=1).keyspace
        with cluster.client(timeout_ms=30_000) as client:
            client.keyspace("gone").put_many(rows).raise_for_errors()
        kept = copy_directory(cluster, tmp_path, stopped=False)
        admin.keyspaces.drop("gone")

        def is_forgotten(status: ClusterStatus) -> bool:
            return not table_of(status).keyspaces.dropping

        cluster.wait_for(is_forgotten, timeout_s=TIMEOUT_S, what="the keyspace is forgotten")
        put_in_place(cluster, kept, tmp_path / "away")
        cluster.wait_for(is_on_an_old_copy, timeout_s=TIMEOUT_S, what="n1 is back")
        anew = admin.keyspaces.create("anew", partition_count=4, replication_factor=1).keyspace
    assert anew.partition_ids == gone.partition_ids
    status = cluster.wait_for(is_settled, timeout_s=TIMEOUT_S, what="every partition served")
    table = table_of(status)
    assert any(table.rows[p].primary == number_of(table, "n1") for p in anew.partition_ids)
    with cluster.client(timeout_ms=30_000) as client:
        keyspace = client.keyspace("anew")
        assert not [entry.key for entry in keyspace.scan()]
        keyspace.put_many(dict.fromkeys(KEYS, b"new")).raise_for_errors()
        assert {entry.key for entry in keyspace.scan()} == set(KEYS)


def is_on_an_old_copy(status: ClusterStatus) -> bool:
    """Tell whether n1 has registered again, with another store."""
    node = table_of(status).by_id[NodeId("n1")]
    return node.node_epoch > 1 and node.status is NodeStatus.ACTIVE
