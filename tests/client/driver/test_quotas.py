"""Tests of clients under a quota: they wait when refused, and if they want more than the quota,
they get the whole of it (the node's own quotas and the client's rules, in simulated time).
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest

from koinon.core.retry import RetryPolicy
from koinon_node.core.quotas import Quota, Share
from koinon_proto.contract.errors import KoinonError, QuotaExceededError
from koinon_proto.contract.keyspaces import Keyspace, KeyspaceId
from tests.client.conftest import Connect
from tests.client.kit.fake_cluster import FakeCluster
from tests.client.kit.helpers import keys_of

NODES, PARTITIONS = 3, 12
SECONDS = 10.0


def node(limit: int) -> Quota:
    keyspace = Keyspace(
        keyspace_id=KeyspaceId(1),
        name="k",
        base=0,
        partition_count=PARTITIONS,
        partitioner="murmur2",
        replication_factor=1,
        min_in_sync=1,
        max_value_bytes=1,
        max_rows_per_s=limit,
    )
    return Quota(Share(keyspace, 1 / NODES))


class Clients:
    """Each has one request under way all the time, at the node of its choice; a request that is let
    in only in part goes on with the rest. Rows beyond one lie in as many partitions as there are.
    """

    def __init__(self, count: int, rows: int, limit: int, seed: int) -> None:
        self._random = Random(seed)
        self._policy = RetryPolicy(random=self._random)
        self._rows = rows
        self._nodes = [node(limit) for _ in range(NODES)]
        self._due: list[tuple[float, int, int, int]] = []  # when, who, its attempt, its rows left
        self.let_in = self.refusals = 0
        for who in range(count):
            heapq.heappush(self._due, (self._random.uniform(0, 0.01), who, 0, rows))

    def run(self) -> None:
        while (entry := heapq.heappop(self._due))[0] < SECONDS:
            now, who, attempt, rows = entry
            of = self._nodes[who % NODES]
            refused, error = self._ask(of, now, rows)
            self.let_in += rows - refused
            again_s, attempt_next = self._random.uniform(0.000_5, 0.003), 0
            if error is not None:
                self.refusals += 1
                again = self._policy.decide(error, attempt=attempt, idempotent=False)
                assert again is not None
                again_s += again.delay_s
                attempt_next = attempt + 1 if refused == rows else 0
            heapq.heappush(self._due, (now + again_s, who, attempt_next, refused or self._rows))

    def _ask(self, of: Quota, now: float, rows: int) -> tuple[int, KoinonError | None]:
        if rows == 1:
            error = of.refusal(now)
            return int(error is not None), error
        partition_ids = np.arange(rows, dtype=np.uint32) % PARTITIONS
        refusals = of.cut(now, partition_ids, np.zeros(rows, np.int64))
        refused = int(np.isin(partition_ids, list(refusals)).sum())
        return refused, next(iter(refusals.values()), None)


@pytest.mark.parametrize(
    ("clients", "rows", "limit", "most"),
    [
        (3, 1, 600, 60),  # each waits for its own node's next row
        (60, 1, 3_000, 40),
        (1_000, 1, 1_000, 5),  # a second's worth waits
        (2_000, 1, 300, 3),  # six seconds' worth
        (3, 1_000, 30_000, 60),  # batches larger than what may be kept
        (6, 300, 6_000, 60),
    ],
)
def test_clients_that_want_more_get_the_limit_within_two_percent(
    clients: int, rows: int, limit: int, most: int
) -> None:
    """``most``: refusals of each client a second, of which fewer the more clients there are."""
    run = Clients(clients, rows, limit, seed=clients)
    run.run()
    assert run.let_in == pytest.approx(SECONDS * limit, rel=0.02)
    assert run.refusals < most * SECONDS * clients


# --- single refusals ---------------------------------------------------------------------------

CALLS: dict[str, Callable[[Any, list[bytes]], Any]] = {
    "get": lambda client, keys: client.get(keys[0]),
    "put": lambda client, keys: client.put(keys[0], b"v"),
    "increment": lambda client, keys: client.increment(keys[0]),
    "get_many": lambda client, keys: client.get_many(keys),
    "put_many": lambda client, keys: client.put_many(dict.fromkeys(keys, b"v")).raise_for_errors(),
    "batch": lambda client, keys: client.batch(keys[0]).put(keys[0], b"v").commit(),
}


def over_quota(retry_after_ms: int) -> QuotaExceededError:
    return QuotaExceededError(keyspace="k", unit="rows", limit=9, retry_after_ms=retry_after_ms)


@pytest.mark.parametrize("name", CALLS)
def test_refused_call_waits_as_long_as_it_is_told_and_is_done(
    cluster: FakeCluster, client: Any, name: str
) -> None:
    node = cluster.nodes[0]
    refused: list[int] = []

    def refuse(partition_id: int) -> KoinonError | None:
        refused.append(partition_id)
        return over_quota(30) if refused.count(partition_id) <= 3 else None

    node.refuse = refuse
    began = time.monotonic()
    CALLS[name](client, keys_of(cluster, node, 5))
    assert time.monotonic() - began >= 3 * 0.03
    assert max(map(refused.count, refused)) >= 4


@pytest.mark.parametrize("name", CALLS)
def test_call_that_is_to_wait_for_hours_goes_on_when_the_limit_is_lifted(
    cluster: FakeCluster, connect: Connect, name: str
) -> None:
    client = connect(cluster.seeds, timeout_ms=3 * 3_600_000)
    node = cluster.nodes[0]
    refused: list[int] = []

    def refuse(partition_id: int) -> KoinonError | None:
        refused.append(partition_id)
        return over_quota(3_600_000) if refused.count(partition_id) <= 1 else None

    node.refuse = refuse
    CALLS[name](client, keys_of(cluster, node, 5))
    assert max(map(refused.count, refused)) >= 2


@pytest.mark.parametrize("name", CALLS)
def test_call_whose_deadline_is_before_its_turn_is_told_so_at_once(
    cluster: FakeCluster, client: Any, name: str
) -> None:
    node = cluster.nodes[0]
    asked: list[int] = []

    def refuse(partition_id: int) -> KoinonError:
        asked.append(partition_id)
        return over_quota(3_600_000)

    node.refuse = refuse
    with pytest.raises(QuotaExceededError, match="limit of 9 rows a second") as refused:
        CALLS[name](client, keys_of(cluster, node, 5))
    assert refused.value.retry_after_ms == 3_600_000
    assert max(map(asked.count, asked)) == 1, "it was not asked again"
