"""A node that answers nothing, over a connection that does not end: as a host that vanished."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import koinon
from koinon.core.retry import RetryPolicy
from koinon.driver import engine as engine_module
from koinon.driver.rpc.node_link import Link
from koinon_proto.contract.errors import LeaseExpiredError
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


async def test_write_to_a_slow_node_that_is_not_fenced_is_waited_for(
    cluster: FakeCluster,
) -> None:
    slow = cluster.nodes[0]
    key = keys_of(cluster, slow)[0]
    async with await koinon.aio.connect(cluster.seeds, timeout_ms=TIMEOUT_MS) as client:
        await client.put(key, b"before")
        slow.before = gate = cluster.gate()
        asked = cluster.count("GetTable")
        writing = asyncio.create_task(client.put(key, b"v"))
        await asyncio.to_thread(wait_until, lambda: cluster.count("GetTable") >= asked + 3)
        gate.open()
        async with asyncio.timeout(BOUND_S):
            await writing
    assert [value for _, value in cluster.applied] == [b"before", b"v"]


# --- sent once ----------------------------------------------------------------------------------


class Once(RetryPolicy):
    """Whoever waits goes on by news alone."""

    def backoff_s(self, attempt: int, *, changing_hands: bool = False) -> float:
        return TIMEOUT_MS / 1000


def commit(client: Client, key: bytes) -> Any:
    return client.batch(key).put(key, b"v").commit()


WRITES: dict[str, Callable[[Client, bytes], Any]] = {
    "put": lambda client, key: client.put(key, b"v"),
    "put_many": lambda client, key: client.put_many({key: b"v"}),
    "increment": lambda client, key: client.increment(key),
    "atomic batch": commit,
}


@pytest.mark.parametrize("write", WRITES)
async def test_write_that_waits_for_news_is_sent_once_though_the_news_drops_a_node(
    cluster: FakeCluster, write: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same news resumes the look at silent nodes. That drops the connections of the node that
    was fenced, so a read comes back, from which the client learns, and wakes those who wait again.
    """
    monkeypatch.setattr(engine_module, "_SUSPECT_S", TIMEOUT_MS / 1000)
    silent, successor = cluster.nodes
    unanswered, key = keys_of(cluster, silent, 2)
    lease = LeaseExpiredError(node_id="n1")
    async with await koinon.aio.connect(successor.address, timeout_ms=TIMEOUT_MS) as client:
        await client.put(unanswered, b"before")
        engine = client._connected
        engine.policy = Once()
        waiters = engine.discovery._waiters
        gate = cluster.gate()

        async def hold(method: str, request: Any) -> None:
            if method == "BatchGet":
                await gate(method, request)

        silent.before, silent.refuse = hold, lambda _: lease
        reading = asyncio.ensure_future(client.get(unanswered))
        await until(lambda: len(waiters) == 1)  # the look at silent nodes
        writing = asyncio.ensure_future(WRITES[write](client, key))
        await until(lambda: len(waiters) == 2)
        cluster.fence(silent, successor)
        try:

            def is_written() -> bool:
                engine.discovery.refresh_soon()
                return bool(writing.done())

            await until(is_written)
            await asyncio.gather(writing, reading)
        finally:
            gate.open()
    assert [applied for applied, _ in cluster.applied] == [unanswered, key]
    assert sum(node.calls[m] for node in cluster.nodes for m in WRITE_CALLS if m in node.calls) == 3


WRITE_CALLS = ("BatchWrite", "BatchUpdate", "CommitBatch")


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(BOUND_S):
        while not condition():  # noqa: ASYNC110 (of a test)
            await asyncio.sleep(0.005)
