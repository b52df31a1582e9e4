"""Reads of many rows over RESP: which way they go, and what is peculiar to that way."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import koinon
from koinon.driver.resp import link as resp_link
from tests.client.conftest import Connect
from tests.client.kit.fake_cluster import FakeCluster
from tests.client.kit.helpers import LEASE, ONLY_RESP, resp_of

pytestmark = ONLY_RESP
BOUND_S = 60.0
ROWS = {b"k%03d" % n: b"v%d" % n for n in range(90)}
KEYS = [*ROWS, b"none"]


@pytest.fixture
def filled(cluster: FakeCluster) -> FakeCluster:
    for key, value in ROWS.items():
        cluster.write(key, value, 0)
    return cluster


def batches(cluster: FakeCluster) -> int:
    """Return how many batches of reads were asked for by RESP."""
    return sum(resp_of(node).batches for node in cluster.nodes)


def test_all_reads_of_many_rows_go_over_resp_from_the_first_on(
    filled: FakeCluster, client: Any
) -> None:
    for _ in range(2):
        assert client.get_many(KEYS) == [*ROWS.values(), None]
        entries = client.get_entries(KEYS)
        assert [entry.value for entry in entries[:-1]] == [*ROWS.values()]
        assert entries[-1] is None
    assert batches(filled) == filled.count("BatchGet") == 4 * len(filled.nodes)


def test_transport_grpc_sends_no_rows_over_resp(filled: FakeCluster, connect: Connect) -> None:
    assert connect(filled.seeds, transport="grpc").get_many(KEYS) == [*ROWS.values(), None]
    assert (batches(filled), filled.count("BatchGet")) == (0, len(filled.nodes))


def test_node_that_does_not_know_the_command_is_an_error(filled: FakeCluster, client: Any) -> None:
    for one in filled.nodes:
        resp_of(one).knows.clear()
    with pytest.raises(koinon.UnsupportedVersionError, match=r"KOINON\.GETMANY"):
        client.get_many(KEYS)
    assert filled.count("BatchGet") == 0


def test_rows_that_are_refused_are_asked_for_again(filled: FakeCluster, client: Any) -> None:
    refusals = 0

    def refuse(_partition_id: int) -> Any:
        nonlocal refusals
        refusals += 1
        return LEASE if refusals <= 20 else None

    filled.nodes[0].refuse = refuse
    assert client.get_many(KEYS) == [*ROWS.values(), None]
    assert refusals > 20


def test_rows_of_a_connection_that_is_lost_are_asked_for_again(
    filled: FakeCluster, client: Any
) -> None:
    assert client.get_many(KEYS) == [*ROWS.values(), None]
    lost = False

    async def lose(method: str, _request: Any) -> None:
        nonlocal lost
        if method == "BatchGet" and not lost:
            lost = True
            resp_of(filled.nodes[0]).reset()

    filled.nodes[0].before = lose
    assert client.get_many(KEYS) == [*ROWS.values(), None]
    assert lost


def test_rows_of_a_slow_node_end_at_their_deadline_and_are_not_taken_for_others(
    filled: FakeCluster, client: Any
) -> None:
    assert client.get_many(KEYS) == [*ROWS.values(), None]
    node = filled.nodes[0]
    node.before = gate = filled.gate()
    with pytest.raises(koinon.UnavailableError):
        client.get_many(KEYS, timeout_ms=150)
    node.before = None
    gate.open()
    for first in range(3):
        some = KEYS[first::3]
        assert client.get_many(some) == [ROWS.get(key) for key in some]


async def test_more_reads_than_there_are_connections_share_them(filled: FakeCluster) -> None:
    many = 5 * len(resp_link.ROW_LANES)

    client = await koinon.aio.connect(filled.seeds, timeout_ms=100_000)
    node = filled.nodes[0]
    node.before = gate = filled.gate()
    reads = [asyncio.create_task(client.get_many(KEYS)) for _ in range(many)]
    await asyncio.to_thread(gate.reached.wait, BOUND_S)
    gate.open()
    found = await asyncio.wait_for(asyncio.gather(*reads), BOUND_S)
    assert found == [[*ROWS.values(), None]] * many
    assert batches(filled) == filled.count("BatchGet") == many * len(filled.nodes)
    assert resp_of(node).connections <= 2 + len(resp_link.ROW_LANES)
    await client.close()
