"""Partitions that move under load while what takes part in it is killed, frozen or cut short."""

from __future__ import annotations

import time

import pytest

from koinon.local import LocalCluster, Setup
from koinon.operate.admin import Admin
from koinon.operate.plans import PlanKind, PlanRequest
from koinon_proto.contract.table import NodeStatus
from tests.checkers.load import RecordedLoad
from tests.conftest import ClusterFactory
from tests.integration.copies import held_by, is_settled, judge, number_of, table_of

REBALANCE = PlanRequest(kind=PlanKind.REBALANCE)
TIMEOUT_S = 90.0
FEW_PARTITIONS = ["--partitions", "64"]


def wait_moved(cluster: LocalCluster, admin: Admin) -> None:
    """Wait until no move is left and every replica is in sync."""
    deadline = time.monotonic() + TIMEOUT_S
    while (left := admin.moves().moves) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left, f"{len(left)} moves left: {left[:3]}"
    cluster.wait_for(is_settled, timeout_s=TIMEOUT_S, what="every replica in sync")


def joined(cluster: LocalCluster) -> str:
    """Start one more node, and wait until the cluster knows it."""
    name = cluster.add_node()
    cluster.wait_for(
        lambda s: s.table is not None and name in s.table.by_id and s.ready,
        timeout_s=TIMEOUT_S,
        what="the new node has joined",
    )
    return name


def execute(admin: Admin, request: PlanRequest) -> int:
    plan = admin.plan(request)
    admin.execute(request, plan.plan_id)
    return len(plan.moves)


@pytest.mark.parametrize(
    ("factor", "victim"),
    [
        (3, "leader"),
        # A node that dies in a move: test_crash_at_every_step has a short one.
        pytest.param(3, "source", marks=pytest.mark.long),
        pytest.param(3, "target", marks=pytest.mark.long),
        *(
            pytest.param(1, victim, marks=pytest.mark.long)
            for victim in ("source", "target", "leader")
        ),
    ],
)
def test_rebalance_goes_on_when_a_participant_is_killed(
    make_cluster: ClusterFactory, factor: int, victim: str
) -> None:
    flags = [*FEW_PARTITIONS, "--replication-factor", str(factor)]
    coordinators = 3 if victim == "leader" else 1
    cluster = make_cluster(nodes=3, coordinators=coordinators, setup=Setup(coordinator_flags=flags))
    cluster.start()
    cluster.wait_ready()
    with (
        Admin(cluster.coordinators, timeout_ms=30_000) as admin,
        RecordedLoad(cluster.client) as load,
    ):
        load.wait_for_progress()
        new = joined(cluster)
        moves = execute(admin, REBALANCE)
        assert moves > 10
        cluster.wait_for(
            lambda s: held_by(table_of(s), new) > 2, timeout_s=TIMEOUT_S, what="moves under way"
        )
        name = {"source": "n1", "target": new, "leader": cluster.leader() or "c1"}[victim]
        cluster.kill(name)
        if factor == 3:
            load.wait_for_progress()
        cluster.restart(name)
        wait_moved(cluster, admin)
        load.wait_for_progress()
        assert held_by(table_of(cluster.status()), new) == 64 * factor // 4
    judge(cluster, load)


def test_cancelled_rebalance_leaves_everything_where_it_was(make_cluster: ClusterFactory) -> None:
    cluster = make_cluster(nodes=3, coordinators=1, setup=Setup(coordinator_flags=FEW_PARTITIONS))
    cluster.start()
    before = cluster.wait_ready().table
    assert before is not None
    with (
        Admin(cluster.coordinators, timeout_ms=30_000) as admin,
        RecordedLoad(cluster.client) as load,
    ):
        load.wait_for_progress(300)
        new = joined(cluster)
        admin.set_moves(bytes_per_second=2_000)
        execute(admin, REBALANCE)
        cluster.wait_for(
            lambda s: held_by(table_of(s), new) > 0, timeout_s=TIMEOUT_S, what="moves under way"
        )
        admin.cancel_moves()
        wait_moved(cluster, admin)
        load.wait_for_progress()
    after = cluster.status().table
    assert after is not None
    done = [row for row in after.rows if number_of(after, new) in row.replicas]
    assert len(done) < 48
    for old, row in zip(before.rows, after.rows, strict=True):
        assert row in done or row.replicas == old.replicas
    judge(cluster, load)


def test_drained_node_is_removed_and_factor_changes_under_load(
    make_cluster: ClusterFactory,
) -> None:
    cluster = make_cluster(nodes=4, coordinators=1, setup=Setup(coordinator_flags=FEW_PARTITIONS))
    cluster.start()
    cluster.wait_ready()
    with (
        Admin(cluster.coordinators, timeout_ms=30_000) as admin,
        RecordedLoad(cluster.client) as load,
    ):
        load.wait_for_progress()
        execute(admin, PlanRequest(kind=PlanKind.DRAIN, node_id="n4"))
        wait_moved(cluster, admin)
        assert held_by(table_of(cluster.status()), "n4") == 0
        admin.set_node_status("n4", NodeStatus.LEFT)
        cluster.terminate("n4")
        for factor in (1, 2, 3):
            execute(admin, PlanRequest(kind=PlanKind.REPLICATION_FACTOR, replication_factor=factor))
            wait_moved(cluster, admin)
            table = cluster.status().table
            assert table is not None
            assert {len(row.replicas) for row in table.rows} == {factor}
            load.wait_for_progress()
    judge(cluster, load)
