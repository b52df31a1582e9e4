"""Servers a long way off: what is slow to connect to is reached all the same."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator

import pytest

import koinon
from koinon.driver.rpc.attended_channel import Connection
from koinon.driver.rpc.node_link import Link
from koinon.operate.admin import Admin
from tests.client.kit.fake_cluster import FakeCluster, Proxy
from tests.client.kit.helpers import ALL
from tests.kit.waiting import succeeds

HOLD_S = 0.3


@pytest.fixture
def far(cluster: FakeCluster) -> Iterator[str]:
    """The address of the node that leads and owns everything, a long way off."""
    proxy = Proxy(cluster.thread, cluster.nodes[-1].address, hold_s=HOLD_S)
    yield proxy.address
    proxy.close()


def test_connection_that_is_slow_to_stand_is_reached(far: str) -> None:
    async def run() -> bool:
        connection = Connection(far, lambda: None)
        try:
            return await connection.reach()
        finally:
            await connection.close()

    assert asyncio.run(run())


def test_coordinator_that_is_slow_to_connect_to_answers_an_operator(far: str) -> None:
    with Admin(far, timeout_ms=20_000) as admin:
        assert admin.status().is_leader


def test_client_serves_over_slow_links(cluster: FakeCluster, far: str) -> None:
    cluster.readdress(cluster.nodes[-1], far)
    cluster.move(ALL, cluster.nodes[-1].number)
    with koinon.connect(far, timeout_ms=20_000) as client:
        assert client.put(b"k", b"v") > 0
        assert client.get_many([b"k"]) == [b"v"]
        assert [entry.key for entry in client.scan()] == [b"k"]


def test_status_is_told_soon_though_the_first_coordinators_never_answer(
    cluster: FakeCluster,
) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("127.0.0.1", 0)) as two,
    ):
        silent = [f"127.0.0.1:{listener.getsockname()[1]}" for listener in (one, two)]

        def is_told() -> bool:
            try:
                return client.cluster_status(timeout_ms=900).is_leader
            except koinon.UnavailableError:
                return False

        with koinon.connect(",".join([*silent, cluster.seeds]), timeout_ms=20_000) as client:
            assert succeeds(is_told)


def test_link_to_who_never_answers_says_soon_that_it_does_not_stand() -> None:
    async def run() -> float:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            link = Link(f"127.0.0.1:{listener.getsockname()[1]}")
            began = time.monotonic()
            assert not await link.connect_soon()
            lasted_s = time.monotonic() - began
            await link.close()
            return lasted_s

    assert succeeds(lambda: asyncio.run(run()) < 0.8)
