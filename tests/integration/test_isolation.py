"""Processes on hosts of their own that are cut off, frozen and killed, three replicas each.

The hosts are network namespaces: what is cut is cut for real. Needs root and iproute2, and is
skipped without them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from koinon.operate.admin import ClusterStatus
from koinon_proto.contract.table import NodeNumber, NodeStatus
from tests.checkers.linearizability import check
from tests.checkers.load import RecordedLoad
from tests.integration.copies import assert_copies_are_identical
from tests.integration.hosts import HostCluster, available

pytestmark = pytest.mark.skipif(
    not available(), reason="network namespaces need root and iproute2: not tested here"
)
CUT_S = 4.0  # longer than a session: what is cut off is fenced


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[HostCluster]:
    with HostCluster(tmp_path) as cluster:
        cluster.wait_ready()
        yield cluster


def number_of(status: ClusterStatus, name: str) -> NodeNumber:
    assert status.table is not None
    return next(n.number for n in status.table.nodes.values() if n.node_id == name)


def is_fenced(status: ClusterStatus, name: str) -> bool:
    assert status.table is not None
    return status.table.nodes[number_of(status, name)].status is NodeStatus.FENCED


def all_in_sync(status: ClusterStatus) -> bool:
    return (
        status.ready
        and status.table is not None
        and all(set(row.in_sync) == set(row.replicas) for row in status.table.rows)
    )


def leaderless(status: ClusterStatus, name: str) -> bool:
    """Whether the node leads nothing, and everything is led."""
    assert status.table is not None
    number = number_of(status, name)
    return status.ready and all(row.primary != number for row in status.table.rows)


def judge(cluster: HostCluster, load: RecordedLoad) -> None:
    """All is well again: nothing acknowledged is lost, nothing stale was read, copies are alike."""
    cluster.wait_for(all_in_sync, "every replica is in sync again", timeout_s=60)
    with cluster.client() as client:
        assert load.lost(client) == []
    assert [str(v) for v in check(load.history)] == []
    assert_copies_are_identical(cluster.status())


def test_node_without_network_is_replaced_and_catches_up(hosts: HostCluster) -> None:
    with RecordedLoad(hosts.client) as load:
        load.wait_for_progress()
        hosts.hosts.isolate("n1")
        hosts.wait_for(lambda s: is_fenced(s, "n1") and leaderless(s, "n1"), "the others lead")
        load.wait_for_progress()
        hosts.hosts.rejoin("n1")
        hosts.wait_for(all_in_sync, "n1 has caught up", timeout_s=60)
        load.wait_for_progress()
    judge(hosts, load)


def test_node_that_reaches_only_its_peers_stops_serving(hosts: HostCluster) -> None:
    with RecordedLoad(hosts.client) as load:
        load.wait_for_progress()
        for coordinator in hosts.coordinator_names:
            hosts.hosts.cut("n2", coordinator)
        hosts.wait_for(lambda s: is_fenced(s, "n2") and leaderless(s, "n2"), "the others lead")
        load.wait_for_progress()
        for coordinator in hosts.coordinator_names:
            hosts.hosts.mend("n2", coordinator)
        load.wait_for_progress()
    judge(hosts, load)


def test_two_nodes_that_do_not_reach_one_another_both_go_on(hosts: HostCluster) -> None:
    with RecordedLoad(hosts.client) as load:
        load.wait_for_progress()
        hosts.hosts.cut("n1", "n3")
        time.sleep(CUT_S)  # longer than a replica's time-out
        load.wait_for_progress(300)
        hosts.hosts.mend("n1", "n3")
        load.wait_for_progress()
    judge(hosts, load)


def test_node_that_reaches_only_the_coordinators_hands_over_what_it_leads(
    hosts: HostCluster,
) -> None:
    """Its sessions go on, so that nobody fences it: it has to give up its partitions itself."""
    with RecordedLoad(hosts.client) as load:
        load.wait_for_progress()
        for other in ("n2", "n3"):
            hosts.hosts.cut("n1", other)
        status = hosts.wait_for(lambda s: leaderless(s, "n1"), "the others lead", timeout_s=60)
        assert not is_fenced(status, "n1")
        load.wait_for_progress()
        for other in ("n2", "n3"):
            hosts.hosts.mend("n1", other)
        load.wait_for_progress()
    judge(hosts, load)


def test_isolated_leader_of_coordinators_is_replaced(hosts: HostCluster) -> None:
    with RecordedLoad(hosts.client) as load:
        load.wait_for_progress()
        leader = hosts.status().leader_id
        hosts.hosts.isolate(leader)
        hosts.wait_for(lambda s: s.leader_id not in ("", leader) and s.ready, "another one leads")
        load.wait_for_progress()
        hosts.hosts.rejoin(leader)
        load.wait_for_progress()
    judge(hosts, load)


def test_frozen_node_wakes_up_as_a_follower(hosts: HostCluster) -> None:
    with RecordedLoad(hosts.client) as load:
        load.wait_for_progress()
        hosts.pause("n3")
        hosts.wait_for(lambda s: is_fenced(s, "n3") and leaderless(s, "n3"), "the others lead")
        load.wait_for_progress()
        hosts.resume("n3")
        load.wait_for_progress()
    judge(hosts, load)
