"""Each who takes part is killed right after each committed step of a move, and of a failover.

A step is seen in the table as the coordinators publish it; whoever is to die is killed at once, so
that it dies with that step behind it and the next one at most begun. Then nothing is done but to
start the dead one again: what was begun ends by itself, nothing that was acknowledged is lost, what
was read fits one order of the writes, and all replicas are the same.

A cluster is used for all steps of one victim: each round begins from what the last one left. What
is not long tries two of the four steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from koinon.local import LocalCluster, Setup
from koinon.operate.admin import Admin
from koinon.operate.plans import PlanKind, PlanRequest
from koinon_proto.contract.table import (
    NO_NODE,
    NodeNumber,
    NodeStatus,
    PartitionId,
    PartitionRow,
    PartitionStatus,
    Table,
)
from tests.checkers.load import RecordedLoad
from tests.conftest import ClusterFactory
from tests.integration.copies import (
    is_fenced,
    is_settled,
    judge,
    number_of,
    table_of,
)
from tests.integration.watching import wait_for_table

PARTITIONS = 16
TIMEOUT_S = 90.0
BALLAST = {b"ballast/%d" % n: b"x" * 1_000 for n in range(1_600)}
BYTES_PER_SECOND = 1_000_000  # of 1.6 MB: the moves of a round take seconds, not moments

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def start(make_cluster: ClusterFactory) -> Callable[..., LocalCluster]:
    def started(nodes: int, factor: int, victim: str) -> LocalCluster:
        cluster = make_cluster(
            nodes=nodes,
            coordinators=3 if victim == "leader" else 1,
            setup=Setup(
                replication_factor=factor, coordinator_flags=["--partitions", str(PARTITIONS)]
            ),
        )
        cluster.start()
        cluster.wait_ready()
        with cluster.client() as client:
            client.put_many(BALLAST).raise_for_errors()
        return cluster

    return started


def wait_settled(cluster: LocalCluster, admin: Admin) -> Table:
    """Wait until no move is queued or under way, and every replica is in sync."""
    status = cluster.wait_for(
        lambda s: is_settled(s) and not admin.moves().moves,
        timeout_s=TIMEOUT_S,
        what="nothing is under way",
    )
    return table_of(status)


def leader_of(cluster: LocalCluster) -> str:
    return cluster.wait_for(lambda s: s.is_leader, timeout_s=TIMEOUT_S, what="one leads").member_id


def kill(cluster: LocalCluster, name: str) -> None:
    """Kill a member and, if it is a node, wait until the others know."""
    cluster.kill(name)
    if name in cluster.node_names:
        wait_for_table(
            cluster.coordinators, lambda table: is_fenced(table, name), what=f"{name} is fenced"
        )


# --- moves -------------------------------------------------------------------------------------

Step = Callable[[PartitionRow, NodeNumber, NodeNumber], bool]
MOVE_STEPS: dict[str, Step] = {
    "added": lambda row, old, new: new in row.adding and new not in row.in_sync,
    "in sync": lambda row, old, new: new in row.in_sync and old in row.removing,
    "handed over": lambda row, old, new: old in row.removing and row.primary == new,
    "dropped": lambda row, old, new: new in row.replicas and old not in row.replicas,
}
"""Of the row of a partition that moves from a node to another: whether it has just come so far."""


def replace(cluster: LocalCluster, admin: Admin, old: str, new: str) -> None:
    """Let the new node take the place of the old one."""
    admin.set_node_status(new, NodeStatus.ACTIVE)
    request = PlanRequest(kind=PlanKind.REPLACE, node_id=old, with_node_id=new)
    plan = admin.plan(request)
    assert len(plan.moves) == PARTITIONS
    admin.execute(request, plan.plan_id)


def wait_for_step(cluster: LocalCluster, step: str, old: str, new: str) -> None:
    def reached(table: Table) -> bool:
        numbers = number_of(table, old), number_of(table, new)
        return any(MOVE_STEPS[step](row, *numbers) for row in table.rows)

    wait_for_table(cluster.coordinators, reached, what=f"a partition is {step}")


def every_step(*victim: object) -> Any:
    return pytest.param(*victim, None, id="-".join(map(str, victim)), marks=pytest.mark.long)


@pytest.mark.parametrize(
    ("factor", "victim", "steps"),
    [
        pytest.param(1, "target", ("added", "handed over"), id="1-target-two-steps"),
        *(every_step(3, victim) for victim in ("source", "target", "bystander", "leader")),
        *(every_step(1, victim) for victim in ("source", "target", "leader")),
    ],
)
def test_move_ends_by_itself_whoever_dies_after_whichever_step(
    start: Callable[..., LocalCluster], factor: int, victim: str, steps: tuple[str, ...] | None
) -> None:
    """With 3 replicas the bystander is a replica that stays, and leads some of the partitions."""
    cluster = start(nodes=factor, factor=factor, victim=victim)
    old, new = "n1", cluster.add_node()
    cluster.wait_ready()
    with (
        Admin(cluster.coordinators, timeout_ms=20_000) as admin,
        RecordedLoad(cluster.client) as load,
    ):
        load.wait_for_progress()
        admin.set_moves(bytes_per_second=BYTES_PER_SECOND)
        for step in steps or MOVE_STEPS:
            names = {"source": old, "target": new, "bystander": "n2", "leader": leader_of(cluster)}
            replace(cluster, admin, old, new)
            wait_for_step(cluster, step, old, new)
            kill(cluster, names[victim])
            if factor == 3:
                load.wait_for_progress()  # without it
            cluster.restart(names[victim])
            cluster.wait_ready()
            table = wait_settled(cluster, admin)
            held = [r for r in table.rows if number_of(table, new) in r.replicas]
            assert len(held) == PARTITIONS
            load.wait_for_progress()
            old, new = new, old
    judge(cluster, load, BALLAST)


# --- failovers ---------------------------------------------------------------------------------


FailoverStep = Callable[[Table, dict[PartitionId, int], str], bool]


def elected(table: Table, was: dict[PartitionId, int], name: str) -> bool:
    """The node is fenced, and others are to lead what it led."""
    return is_fenced(table, name) and all(
        table.rows[p].primary != NO_NODE and table.rows[p].primary_epoch > was[p] for p in was
    )


def taken_over(table: Table, was: dict[PartitionId, int], name: str) -> bool:
    """The others have begun to serve what it led."""
    return elected(table, was, name) and all(
        table.rows[p].status is PartitionStatus.ONLINE for p in was
    )


def returned(table: Table, was: dict[PartitionId, int], name: str) -> bool:
    """The node is registered anew: so far or, if that was too quick to be seen, further."""
    return not is_fenced(table, name)


def followed(table: Table, was: dict[PartitionId, int], name: str) -> bool:
    """The node is in sync again, of one partition at least."""
    return not is_fenced(table, name) and any(
        number_of(table, name) in table.rows[p].in_sync for p in was
    )


FAILOVER_STEPS = (elected, taken_over, returned, followed)


@pytest.mark.parametrize(
    ("victim", "steps"),
    [
        pytest.param("new primary", (elected, returned), id="new primary-two-steps"),
        *(every_step(victim) for victim in ("new primary", "deposed", "leader")),
    ],
)
def test_failover_ends_by_itself_whoever_dies_after_whichever_step(
    start: Callable[..., LocalCluster], victim: str, steps: tuple[FailoverStep, ...] | None
) -> None:
    """The deposed primary is frozen instead of killed, and wakes up at the steps that are taken
    without it: it is killed at those that it takes itself.
    """
    cluster = start(nodes=3, factor=3, victim=victim)
    with (
        Admin(cluster.coordinators, timeout_ms=20_000) as admin,
        RecordedLoad(cluster.client) as load,
    ):
        load.wait_for_progress()
        for step in steps or FAILOVER_STEPS:
            table = wait_settled(cluster, admin)
            old = next(n.node_id for n in table.nodes.values() if n.number == table.rows[0].primary)
            was = {r.partition_id: r.primary_epoch for r in table.rows if _leads(table, r, old)}
            run_failover_step(cluster, step, old, was, victim)
            cluster.wait_ready()
            wait_settled(cluster, admin)
            load.wait_for_progress()
            admin.restore_primaries()
    judge(cluster, load, BALLAST)


def run_failover_step(
    cluster: LocalCluster,
    step: FailoverStep,
    old: str,
    was: dict[PartitionId, int],
    victim: str,
) -> None:
    """Depose the node, and kill the victim (or wake the deposed one) right after the step."""
    leader = leader_of(cluster)
    coming_back = step in (returned, followed)
    wakes = victim == "deposed" and not coming_back
    (cluster.pause if wakes else cluster.kill)(old)
    if coming_back:
        wait_for_table(
            cluster.coordinators, lambda t: taken_over(t, was, old), what=f"{old} is replaced"
        )
        cluster.restart(old)
    table = wait_for_table(
        cluster.coordinators,
        lambda t: step(t, was, old),
        what=step.__doc__ or "",
    )
    if wakes:
        cluster.resume(old)
        return
    successor = table.nodes[table.rows[min(was)].primary].node_id
    dies = {"new primary": successor, "deposed": old, "leader": leader}[victim]
    kill(cluster, dies)
    for name in {dies, old}:
        if cluster.pid(name) is None:
            cluster.restart(name)


def _leads(table: Table, row: PartitionRow, name: str) -> bool:
    return row.primary == number_of(table, name)
