"""A rebalance by load on real processes: the node that clients ask most gets down to the others."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from koinon.local import LocalCluster, Setup
from koinon.operate.admin import Admin
from koinon.operate.judge.hotspots import READS
from koinon.operate.plans import Plan, PlanBy, PlanKind, PlanRequest
from koinon.operate.traffic import TrafficClient
from koinon_proto.contract.table import Table
from koinon_proto.partitioner import partitioner
from tests.conftest import ClusterFactory
from tests.integration.copies import table_of
from tests.integration.test_moves import wait_moved
from tests.kit.waiting import wait_until

BY_LOAD = PlanRequest(kind=PlanKind.REBALANCE, by=PlanBy.LOAD)
PARTITIONS = 48
FLAGS = ["--partitions", str(PARTITIONS), "--replication-factor", "2"]
ROUND = 3_000  # operations of which rows are counted


def keys_of(table: Table) -> list[bytes]:
    """Return a key of each partition."""
    known = partitioner(table.cluster.partitioner, table.cluster.partition_count)
    found: dict[int, bytes] = {}
    number = 0
    while len(found) < PARTITIONS:
        key = b"key%d" % number
        found.setdefault(int(known.partitions_of([key])[0]), key)
        number += 1
    return [found[p] for p in range(PARTITIONS)]


class Traffic:
    """Gets, of which four fifths go to the partitions that one node leads at first. Gets only, so
    that a node's load is in proportion to its rows.
    """

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        table = table_of(cluster.status())
        keys, busiest = keys_of(table), min(table.nodes)
        self.hot = [keys[r.partition_id] for r in table.rows if r.primary == busiest]
        self.cold = [keys[r.partition_id] for r in table.rows if r.primary != busiest]

    def send(self, rng: random.Random, operations: int) -> None:
        with self.cluster.client(timeout_ms=30_000) as client:
            for _ in range(operations):
                key = rng.choice(self.hot if rng.random() < 0.8 else self.cold)
                client.get(key)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Send operations until the end of the block."""
        stop = threading.Event()

        def work(seed: int) -> None:
            rng = random.Random(seed)
            while not stop.is_set():
                self.send(rng, 200)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            for thread in threads:
                thread.join()

    def skew(self) -> float:
        """Return the rows of the busiest node over the mean, of ROUND operations."""
        with TrafficClient() as asking:
            before = self._rows(asking)
            self.send(random.Random(7), ROUND)
            rows = self._rows(asking) - before
        return float(rows.max() / rows.mean())

    def _rows(self, asking: TrafficClient) -> np.ndarray:
        found = asking.counters(table_of(self.cluster.status()), timeout_s=30.0)
        assert not found.silent
        return np.array([n.counts[READS].sum() for _, n in sorted(found.nodes.items())])


@pytest.mark.long
def test_busiest_node_is_relieved_by_changes_of_leaders(make_cluster: ClusterFactory) -> None:
    cluster = make_cluster(nodes=3, coordinators=1, setup=Setup(coordinator_flags=FLAGS))
    cluster.start()
    cluster.wait_ready()
    traffic = Traffic(cluster)
    plans: list[Plan] = []

    def planned(admin: Admin) -> bool:
        plans.append(admin.plan(BY_LOAD))
        return bool(plans[-1].moves)

    assert traffic.skew() >= 1.8
    with Admin(cluster.coordinators, timeout_ms=30_000) as admin:
        with traffic.beside():
            wait_until(lambda: planned(admin), timeout_s=120.0)
            plan = plans[-1]
            assert all(not move.added for move in plan.moves), "leads suffice"
            admin.execute(BY_LOAD, plan.plan_id)
            wait_moved(cluster, admin)
        moved = {move.partition_id for move in plan.moves}
        again = admin.plan(BY_LOAD)
        assert moved.isdisjoint(move.partition_id for move in again.moves), "moved partitions rest"
    assert traffic.skew() <= 1.3
