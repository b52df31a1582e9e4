"""Processes on hosts of their own that are cut off, frozen and killed, three replicas each.

The hosts are network namespaces: what is cut is cut for real. Needs root and iproute2, and is
skipped without them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from koinon.operate.admin import Admin
from koinon.operate.cluster_status import ClusterStatus
from koinon_node.state import partitioner_of
from koinon_proto.contract.errors import UnavailableError, UnknownFateError
from tests.checkers.linearizability import check
from tests.checkers.load import RecordedLoad
from tests.integration.copies import (
    assert_copies_are_identical,
    is_fenced,
    is_settled,
    number_of,
    table_of,
)
from tests.integration.hosts import HERE, HostCluster, available
from tests.kit.waiting import wait_until
from tests.nemesis import means
from tests.nemesis.links import Links

pytestmark = pytest.mark.skipif(
    not available(), reason="network namespaces need root and iproute2: not tested here"
)
one_way = pytest.mark.skipif(
    bool(means.missing(means.FILTER)), reason="one direction of a link is cut by nft: not here"
)
CUT_S = 4.0  # longer than a session: what is cut off is fenced


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostCluster]:
    with HostCluster(tmp_path_factory.mktemp("hosts")) as cluster:
        yield cluster


@pytest.fixture
def hosts(running: HostCluster) -> HostCluster:
    """One for all tests here, each of which leaves it whole; each node leads what it is to."""
    running.wait_for(is_settled, "every replica is in sync")
    with Admin(running.coordinators) as admin:
        wait_until(lambda: not admin.restore_primaries(), "primaries return")
    return running


def leaderless(status: ClusterStatus, name: str) -> bool:
    """Tell whether the node leads nothing, and everything is led."""
    table = table_of(status)
    number = number_of(table, name)
    return status.ready and all(row.primary != number for row in table.rows)


@contextmanager
def judged_load(cluster: HostCluster, prefix: bytes) -> Iterator[RecordedLoad]:
    """Write and read inside the block. Afterwards all is well again: nothing acknowledged is lost,
    nothing stale was read, copies are alike.
    """
    with RecordedLoad(cluster.client, prefix=prefix) as load:
        load.wait_for_progress()
        yield load
        load.wait_for_progress()
    status = cluster.wait_for(is_settled, "every replica is in sync again", timeout_s=120)
    with cluster.client() as client:
        assert load.lost(client) == []
    assert [str(v) for v in check(load.history)] == []
    assert_copies_are_identical(status)


def test_node_without_network_is_replaced_and_catches_up(hosts: HostCluster) -> None:
    with judged_load(hosts, b"without/") as load:
        hosts.hosts.isolate("n1")
        hosts.wait_for(
            lambda s: is_fenced(table_of(s), "n1") and leaderless(s, "n1"), "the others lead"
        )
        load.wait_for_progress()
        hosts.hosts.rejoin("n1")
        hosts.wait_for(is_settled, "n1 has caught up", timeout_s=120)


def test_node_that_reaches_only_its_peers_stops_serving(hosts: HostCluster) -> None:
    with judged_load(hosts, b"peers/") as load:
        for coordinator in hosts.coordinator_names:
            hosts.hosts.cut("n2", coordinator)
        hosts.wait_for(
            lambda s: is_fenced(table_of(s), "n2") and leaderless(s, "n2"), "the others lead"
        )
        load.wait_for_progress()
        for coordinator in hosts.coordinator_names:
            hosts.hosts.mend("n2", coordinator)


def test_two_nodes_that_do_not_reach_one_another_both_go_on(hosts: HostCluster) -> None:
    with judged_load(hosts, b"two/") as load:
        hosts.hosts.cut("n1", "n3")
        time.sleep(CUT_S)  # longer than a replica's time-out
        load.wait_for_progress(300)
        hosts.hosts.mend("n1", "n3")


@one_way
def test_primary_whose_packets_do_not_reach_a_follower_goes_on_without_it(
    hosts: HostCluster,
) -> None:
    links = Links(hosts.hosts)
    with judged_load(hosts, b"one way/") as load:
        links.block(["n1"], ["n2"])

        def goes_on_without_it(status: ClusterStatus) -> bool:
            table = table_of(status)
            n1, n2 = number_of(table, "n1"), number_of(table, "n2")
            led = [row for row in table.rows if row.primary == n1]
            return bool(led) and not any(n2 in row.in_sync for row in led)

        status = hosts.wait_for(goes_on_without_it, "n1 leads without n2's copies")
        assert not any(is_fenced(table_of(status), name) for name in hosts.node_names)
        load.wait_for_progress()
        links.unblock(["n1"], ["n2"])


@one_way
def test_client_whose_packets_do_not_reach_a_node_is_told_so_and_uses_the_others(
    hosts: HostCluster,
) -> None:
    """The node is well, and leads on: the others cannot know."""
    links = Links(hosts.hosts)
    table = table_of(hosts.status())
    n1 = number_of(table, "n1")
    partition_of = partitioner_of(table.keyspaces.default).partition_of
    keys = [b"link/%d" % number for number in range(100)]
    there = [key for key in keys if table.rows[partition_of(key)].primary == n1]
    elsewhere = [key for key in keys if key not in there]
    with hosts.client(timeout_ms=30_000) as client:
        client.put_many([(key, b"1") for key in keys])
        links.block([HERE], ["n1"])
        with pytest.raises((UnknownFateError, UnavailableError)):
            client.put(there[0], b"2", timeout_ms=1_500)
        client.put_many([(key, b"2") for key in elsewhere])
        assert table_of(hosts.status()).rows[partition_of(there[0])].primary == n1
        links.unblock([HERE], ["n1"])
        client.put_many([(key, b"3") for key in keys])
        assert client.get_many(keys) == [b"3"] * len(keys)


def test_node_that_reaches_only_the_coordinators_hands_over_what_it_leads(
    hosts: HostCluster,
) -> None:
    """Its sessions go on, so it is not fenced: it has to give up its partitions itself."""
    with judged_load(hosts, b"only/") as load:
        for other in ("n2", "n3"):
            hosts.hosts.cut("n1", other)
        status = hosts.wait_for(lambda s: leaderless(s, "n1"), "the others lead", timeout_s=120)
        assert not is_fenced(table_of(status), "n1")
        load.wait_for_progress()
        for other in ("n2", "n3"):
            hosts.hosts.mend("n1", other)


def test_isolated_leader_of_coordinators_is_replaced(hosts: HostCluster) -> None:
    with judged_load(hosts, b"leader/") as load:
        leader = hosts.status().leader_id
        hosts.hosts.isolate(leader)
        hosts.wait_for(lambda s: s.leader_id not in ("", leader) and s.ready, "another one leads")
        load.wait_for_progress()
        hosts.hosts.rejoin(leader)


def test_frozen_node_wakes_up_as_a_follower(hosts: HostCluster) -> None:
    with judged_load(hosts, b"frozen/") as load:
        hosts.pause("n3")
        hosts.wait_for(
            lambda s: is_fenced(table_of(s), "n3") and leaderless(s, "n3"), "the others lead"
        )
        load.wait_for_progress()
        hosts.resume("n3")
