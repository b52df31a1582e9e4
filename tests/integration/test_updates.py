"""Increments through kill -9 of primaries: each counts once, or says that its fate is unknown."""

from __future__ import annotations

import threading
from collections import Counter

import pytest

from koinon.local import LocalCluster
from koinon_proto.contract.errors import KoinonError
from tests.integration.copies import is_settled
from tests.kit.clusters import running_cluster
from tests.kit.threads import Beside
from tests.kit.waiting import wait_until

COUNTERS = [b"counter %d" % number for number in range(6)]
THREADS = 6


class Counting(Beside):
    """Clients that count up the same counters side by side, and remember what they were told."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.sums: dict[bytes, list[int]] = {key: [] for key in COUNTERS}
        self.unknown: Counter[bytes] = Counter()
        self.failed: list[KoinonError] = []
        self._client = cluster.client(timeout_ms=30_000)
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._count) for _ in range(THREADS)]

    def _close(self) -> None:
        self._client.close()

    @property
    def counted(self) -> int:
        return sum(map(len, self.sums.values()))

    def wait_for_progress(self, increments: int = 200) -> None:
        target = self.counted + increments
        wait_until(lambda: self.counted >= target, "clients count on", timeout_s=60)

    def _count(self) -> None:
        while not self._stop.is_set():
            for key in COUNTERS:
                try:
                    self.sums[key].append(self._client.increment(key))
                except KoinonError as error:
                    if error.maybe_applied:
                        self.unknown[key] += 1
                    else:
                        self.failed.append(error)


@pytest.mark.parametrize("kills", [1, pytest.param(3, marks=pytest.mark.long)])
def test_increments_through_kills_of_primaries_each_count_once(kills: int) -> None:
    with running_cluster(nodes=3, coordinators=1) as cluster:
        cluster.wait_for(is_settled, timeout_s=60, what="all are in sync")
        with Counting(cluster) as counting:
            for name in ("n1", "n2", "n3")[:kills]:
                counting.wait_for_progress()
                cluster.kill(name)
                counting.wait_for_progress()
                cluster.restart(name)
                cluster.wait_ready()
                cluster.wait_for(is_settled, timeout_s=120, what="all are in sync")
        with cluster.client() as client:
            for key in COUNTERS:
                sums, unknown = counting.sums[key], counting.unknown[key]
                assert len(set(sums)) == len(sums), "no two callers were told the same sum"
                total = int(client.get(key) or b"0")
                assert len(sums) <= total <= len(sums) + unknown
                assert max(sums) <= total
        assert not counting.failed
