"""Operations on a running cluster, by the command line, while clients write."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from koinon.cli.console.command import DONE, INTERRUPTED
from koinon.client import Client
from koinon.local import LocalCluster, Setup
from koinon.operate.admin import Admin
from koinon.operate.cluster_status import ClusterStatus
from koinon.operate.plans import PlanKind, PlanRequest
from koinon_proto.contract.cluster_errors import PlanStaleError
from koinon_proto.contract.table import NodeStatus, OfflineReason, PartitionStatus
from tests.checkers.load import RecordedLoad
from tests.conftest import ClusterFactory
from tests.integration.copies import (
    assert_copies_are_identical,
    is_settled,
    judge,
    number_of,
    table_of,
)
from tests.kit.forked import Forked
from tests.kit.waiting import wait_until

Run = Callable[..., "subprocess.CompletedProcess[str]"]

PARTITIONS = 16
TIMEOUT_S = 90.0
BALLAST = {b"ballast/%d" % n: b"x" * 1_000 for n in range(1_600)}
STANDSTILL = 1  # bytes per second
REBALANCE = PlanRequest(kind=PlanKind.REBALANCE)


def command(cluster: LocalCluster, *arguments: str) -> list[str]:
    line = [sys.executable, "-m", "koinon.cli", "admin", *arguments]
    return [*line, "--coordinators", cluster.coordinators]


@pytest.fixture
def run(forked: Forked) -> Run:
    """Runs ``koinon admin ARGUMENTS`` of a cluster to its end."""

    def admin(cluster: LocalCluster, *arguments: str) -> subprocess.CompletedProcess[str]:
        return forked.koinon("admin", *arguments, KOINON_COORDINATORS=cluster.coordinators)

    return admin


def begin(cluster: LocalCluster, log: Path, *arguments: str) -> subprocess.Popen[str]:
    """Begin a command that goes on; what it says comes into ``log``."""
    with log.open("w") as out:
        return subprocess.Popen(command(cluster, *arguments), stdout=out, stderr=out, text=True)


def started(make_cluster: ClusterFactory, *, nodes: int = 3, coordinators: int = 1) -> LocalCluster:
    """Start a cluster that holds the ballast."""
    flags = ["--partitions", str(PARTITIONS)]
    cluster = make_cluster(
        nodes=nodes, coordinators=coordinators, setup=Setup(coordinator_flags=flags)
    )
    cluster.start()
    cluster.wait_for(is_settled, timeout_s=TIMEOUT_S, what="every replica is in sync")
    with cluster.client() as client:
        client.put_many(BALLAST).raise_for_errors()
    return cluster


def held_by(cluster: LocalCluster, name: str) -> int:
    """Return of how many partitions the node is a replica, and of a move's only if it is over."""
    table = table_of(cluster.status())
    number = number_of(table, name)
    return sum(number in row.replicas and number not in row.adding for row in table.rows)


@pytest.mark.long  # test_moves kills the leader, tests/cli waits for moves without one
def test_rebalance_that_is_waited_for_outlives_the_leader(
    make_cluster: ClusterFactory, tmp_path: Path
) -> None:
    cluster = started(make_cluster, coordinators=3)
    name = cluster.add_node()
    cluster.wait_ready()
    with (
        Admin(cluster.coordinators, timeout_ms=30_000) as admin,
        RecordedLoad(cluster.client) as load,
    ):
        load.wait_for_progress()
        admin.set_moves(bytes_per_second=STANDSTILL)
        log = tmp_path / "rebalance"
        waiting = begin(cluster, log, "rebalance", "--yes", "--wait")
        wait_until(lambda: "under way" in log.read_text(), "the moves are followed")
        leader = cluster.wait_for(lambda s: s.is_leader, timeout_s=TIMEOUT_S, what="one leads")
        cluster.kill(leader.member_id)
        load.wait_for_progress()
        assert waiting.poll() is None
        admin.set_moves(bytes_per_second=0)  # by the one that leads then
        assert waiting.wait(TIMEOUT_S) == DONE, log.read_text()
        assert held_by(cluster, name) == 3 * PARTITIONS // 4
        cluster.restart(leader.member_id)
        load.wait_for_progress()
    judge(cluster, load, BALLAST)


def test_interrupted_wait_leaves_the_moves_to_go_on_at_whatever_throttle_is_set(
    make_cluster: ClusterFactory, run: Run, tmp_path: Path
) -> None:
    cluster = started(make_cluster)
    name = cluster.add_node()
    cluster.wait_ready()
    with Admin(cluster.coordinators) as admin, RecordedLoad(cluster.client) as load:
        load.wait_for_progress()
        stale = admin.plan(REBALANCE).plan_id
        assert run(cluster, "throttle", "1B").returncode == DONE
        log = tmp_path / "rebalance"
        waiting = begin(cluster, log, "rebalance", "--yes", "--wait")
        wait_until(lambda: "under way" in log.read_text(), "the moves are followed")
        with pytest.raises(PlanStaleError):  # they are queued already
            admin.execute(REBALANCE, stale)
        waiting.send_signal(signal.SIGINT)
        assert waiting.wait(TIMEOUT_S) == INTERRUPTED
        assert "koinon admin moves --watch" in log.read_text()

        assert run(cluster, "throttle", "200kB").returncode == DONE
        wait_until(lambda: held_by(cluster, name), "a move is over")
        admin.set_moves(bytes_per_second=STANDSTILL)
        assert admin.moves().moves, "they ended before they could be slowed down"
        load.wait_for_progress()
        assert admin.moves().moves
        assert run(cluster, "throttle", "off").returncode == DONE
        followed = run(cluster, "moves", "--watch")
        assert followed.returncode == DONE, followed.stderr
        wait_until(lambda: not admin.moves().moves, "all moves are over")
        assert held_by(cluster, name) == 3 * PARTITIONS // 4
    judge(cluster, load, BALLAST)


def test_replaced_node_holds_nothing_and_the_new_one_all_that_it_held(
    make_cluster: ClusterFactory, run: Run
) -> None:
    cluster = started(make_cluster)
    name = cluster.add_node()
    cluster.wait_ready()
    with RecordedLoad(cluster.client) as load:
        load.wait_for_progress()
        replaced = run(cluster, "replace", "n1", name, "--yes", "--wait")
        assert replaced.returncode == DONE, replaced.stdout + replaced.stderr
        assert (held_by(cluster, "n1"), held_by(cluster, name)) == (0, PARTITIONS)
        removed = run(cluster, "remove", "n1", "--yes")
        assert removed.returncode == DONE, removed.stderr
        cluster.remove_node("n1")
        load.wait_for_progress()
    judge(cluster, load, BALLAST)


def test_forced_primary_serves_what_its_copy_holds(make_cluster: ClusterFactory, run: Run) -> None:
    """The store that held the newest writes is lost; what is left of the other copy goes on."""
    cluster = started(make_cluster, nodes=2)
    keys = [b"lost/%d" % n for n in range(200)]
    with cluster.client(timeout_ms=20_000) as client:
        write(client, keys, b"old")
        cluster.kill("n2")
        write(client, keys, b"new")  # n1 alone has these
        cluster.kill("n1")
        shutil.rmtree(cluster.member_dir("n1"))
        cluster.restart("n1")
        cluster.restart("n2")
        cluster.wait_for(is_stranded, timeout_s=TIMEOUT_S, what="n1's store is known to be lost")
        forced = run(cluster, "force-primary", "0", "n2", "--yes-i-may-lose-writes")
        assert forced.returncode == DONE, forced.stdout + forced.stderr
        forced = run(cluster, "force-primary", "lost", "--yes-i-may-lose-writes")
        assert forced.returncode == DONE, forced.stdout + forced.stderr
        assert f"n2 leads {PARTITIONS - 1}" in forced.stdout
        status = cluster.wait_for(is_settled, timeout_s=TIMEOUT_S, what="n1 follows again")
        assert client.get_many(keys) == [b"old"] * len(keys)
        assert client.get_many(list(BALLAST)) == list(BALLAST.values())
        write(client, keys, b"newer")
    assert_copies_are_identical(status)


def write(client: Client, keys: list[bytes], value: bytes) -> None:
    client.put_many([(key, value) for key in keys], retry_unknown=True).raise_for_errors()


def is_stranded(status: ClusterStatus) -> bool:
    """Return whether the store is known to be lost, and both nodes are there again."""
    table = table_of(status)
    return (
        status.is_leader
        and all(
            row.status is PartitionStatus.OFFLINE and row.offline_reason is OfflineReason.STORE_LOST
            for row in table.rows
        )
        and all(node.status is NodeStatus.ACTIVE for node in table.nodes.values())
    )
