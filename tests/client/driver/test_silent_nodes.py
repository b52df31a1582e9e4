"""A node that answers nothing, over a connection that does not end: as a host that vanished."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import koinon
from koinon.driver.node_link import Link
from koinon_proto.v1 import kv_pb2
from tests.client.kit.fake_cluster import FakeCluster, FakeNode
from tests.client.kit.helpers import keys_of
from tests.kit.waiting import wait_until

TIMEOUT_MS = 200_000  # far more than the test may take: what ends by it has failed
BOUND_S = 60.0
Client = koinon.aio.AsyncClient


def with_silent_node(
    cluster: FakeCluster, begin: Callable[[Client, bytes], Awaitable[Any]], *, fence: bool = True
) -> Any:
    """Begin something at a node that then answers nothing, have the node fenced (or not), and
    return what came of it.
    """
    silent, successor = cluster.nodes
    key = keys_of(cluster, silent)[0]

    async def run() -> Any:
        async with await koinon.aio.connect(successor.address, timeout_ms=TIMEOUT_MS) as client:
            await client.put(key, b"before")  # the connection stands
            silent.before = gate = cluster.gate()
            begun = asyncio.ensure_future(begin(client, key))
            try:
                assert await asyncio.to_thread(gate.reached.wait, BOUND_S)
                if fence:
                    cluster.fence(silent, successor)
                async with asyncio.timeout(BOUND_S):
                    return await begun
            finally:
                begun.cancel()
                gate.open()

    return asyncio.run(run())


def test_write_to_a_node_that_is_fenced_meanwhile_is_of_unknown_fate_soon(
    cluster: FakeCluster,
) -> None:
    with pytest.raises(koinon.UnknownFateError, match="fenced"):
        with_silent_node(cluster, lambda client, key: client.put(key, b"v"))


def test_write_that_may_be_repeated_goes_to_the_successor_of_a_fenced_node(
    cluster: FakeCluster,
) -> None:
    with_silent_node(cluster, lambda client, key: client.put(key, b"v", retry_unknown=True))
    assert [value for _, value in cluster.applied] == [b"before", b"v"]


def test_rows_sent_to_a_node_that_is_fenced_meanwhile_are_of_unknown_fate_soon(
    cluster: FakeCluster,
) -> None:
    report = with_silent_node(cluster, lambda client, key: client.put_many({key: b"v"}))
    assert len(report.unknown) == 1


@pytest.mark.parametrize("many", [False, True])
def test_read_of_a_node_that_is_fenced_meanwhile_goes_to_its_successor(
    cluster: FakeCluster, many: bool
) -> None:
    async def read(client: Client, key: bytes) -> bytes | None:
        return (await client.get_many([key]))[0] if many else await client.get(key)

    assert with_silent_node(cluster, read) == b"before"


def test_scan_of_a_node_that_is_fenced_meanwhile_goes_to_its_successor(
    cluster: FakeCluster,
) -> None:
    async def scan(client: Client, key: bytes) -> list[bytes]:
        return [entry.key async for entry in client.scan()]

    assert len(with_silent_node(cluster, scan)) == 1


def test_connection_that_is_dropped_while_it_is_asked_for_leave_is_not_had() -> None:
    """The call that waits for the connection goes on, to find another node: it does not end."""

    class Held(FakeNode):
        async def Attend(self, request: Any, context: Any) -> Any:  # noqa: N802
            asked.set()
            await asyncio.sleep(BOUND_S)
            yield kv_pb2.AttendResponse()

    class HeldCluster(FakeCluster):
        node_type = Held

    asked = threading.Event()
    cluster = HeldCluster(nodes=1)

    async def run() -> bool:
        link = Link(cluster.seeds)
        connecting = asyncio.ensure_future(link.connect())
        assert await asyncio.to_thread(asked.wait, BOUND_S)
        link.drop()
        async with asyncio.timeout(BOUND_S):
            had = await connecting
        await link.close()
        return had

    try:
        assert asyncio.run(run()) is False
    finally:
        cluster.close()


def test_write_to_a_node_that_is_slow_and_not_fenced_is_waited_for(cluster: FakeCluster) -> None:
    slow = cluster.nodes[0]
    key = keys_of(cluster, slow)[0]

    async def run() -> None:
        async with await koinon.aio.connect(cluster.seeds, timeout_ms=TIMEOUT_MS) as client:
            await client.put(key, b"before")
            slow.before = gate = cluster.gate()
            asked = cluster.count("GetTable")
            writing = asyncio.create_task(client.put(key, b"v"))
            await asyncio.to_thread(wait_until, lambda: cluster.count("GetTable") >= asked + 3)
            gate.open()
            async with asyncio.timeout(BOUND_S):
                await writing

    asyncio.run(run())
    assert [value for _, value in cluster.applied] == [b"before", b"v"]
