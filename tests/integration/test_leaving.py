"""Nodes that are stopped by SIGTERM under load hand over first: no caller hears of it."""

from __future__ import annotations

from functools import partial

import pytest

from koinon.local import Setup
from koinon.options import Transport
from tests.checkers.load import RecordedLoad
from tests.conftest import ClusterFactory
from tests.integration.copies import is_settled, judge, led_by, table_of

TIMEOUT_S = 60.0


@pytest.mark.parametrize("transport", ["auto", pytest.param("grpc", marks=pytest.mark.long)])
@pytest.mark.parametrize("partitions", [64, pytest.param(1024, marks=pytest.mark.long)])
def test_nodes_stopped_in_turn_under_load_fail_no_operation(
    make_cluster: ClusterFactory, partitions: int, transport: Transport
) -> None:
    flags = ["--partitions", str(partitions), "--replication-factor", "3"]
    cluster = make_cluster(nodes=3, coordinators=1, setup=Setup(coordinator_flags=flags))
    cluster.start()
    cluster.wait_for(is_settled, timeout_s=TIMEOUT_S, what="every replica in sync")
    with RecordedLoad(partial(cluster.client, transport=transport)) as load:
        for name in cluster.node_names:
            load.wait_for_progress()
            cluster.terminate(name)
            assert (
                led_by(table_of(cluster.status()), name) == 0
            )  # by its own doing: the session lasts longer
            load.wait_for_progress()
            cluster.restart(name)
            cluster.wait_for(is_settled, timeout_s=TIMEOUT_S, what="every replica in sync")
    assert [str(error) for error in load.errors] == []
    judge(cluster, load)


def test_node_that_holds_the_only_copies_just_stops(make_cluster: ClusterFactory) -> None:
    flags = ["--partitions", "64", "--replication-factor", "1"]
    cluster = make_cluster(nodes=2, coordinators=1, setup=Setup(coordinator_flags=flags))
    cluster.start()
    cluster.wait_ready()
    rows = {b"%d" % n: b"v" for n in range(100)}
    with cluster.client(timeout_ms=30_000) as client:
        client.put_many(rows).raise_for_errors()
        cluster.terminate("n1")
        cluster.restart("n1")
        assert client.get_many(rows) == list(rows.values())
