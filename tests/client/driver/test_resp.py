"""Both clients over RESP: which way operations go, and what is peculiar to that way."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

import koinon
from koinon.core import node_clock
from koinon.driver.resp import link as resp_link
from koinon.driver.resp import pool as resp_pool
from koinon.driver.resp.connection import IN_FLIGHT_MAX
from koinon_proto.contract.errors import DeadlinePassedError
from tests.client.conftest import SOON_S, Connect
from tests.client.kit.fake_cluster import FakeCluster, FakeNode
from tests.client.kit.fake_resp import LEAVING, FakeResp, error_reply
from tests.client.kit.helpers import ONLY_RESP, keys_of, resp_of
from tests.kit.waiting import wait_until

pytestmark = ONLY_RESP
BOUND_S = 60.0


@pytest.fixture
def node(cluster: FakeCluster) -> FakeNode:
    return cluster.nodes[0]


@pytest.fixture
def listener(node: FakeNode) -> FakeResp:
    return resp_of(node)


@pytest.fixture
def key(cluster: FakeCluster, node: FakeNode) -> bytes:
    return keys_of(cluster, node)[0]


@pytest.fixture
def blocking(cluster: FakeCluster, key: bytes) -> Iterator[koinon.Client]:
    """A blocking client whose threads have sockets of their own to the node."""
    with koinon.connect(cluster.nodes[1].address, timeout_ms=20_000) as client:
        client.put(key, b"first")
        client.put(key, b"before")
        yield client


# --- which way ------------------------------------------------------------------------------------


def test_single_operations_go_over_resp_from_the_first_on(
    listener: FakeResp, client: Any, key: bytes
) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: client.put(key, b"v"),
        lambda: client.get(key),
        lambda: client.get_entry(key),
        lambda: client.delete(key),
    ]
    for count, call in enumerate(calls, 1):
        call()
        assert listener.commands == count


def test_keyspace_on_a_node_whose_build_refuses_to_hear_of_one_is_used_over_grpc(
    cluster: FakeCluster, blocking: koinon.Client, key: bytes
) -> None:
    """Such a node would carry a command out in ``default``."""
    cluster.create_keyspace("other", 4)
    listeners = [resp_of(node) for node in cluster.nodes]
    with koinon.connect(cluster.seeds, timeout_ms=20_000) as client:
        other = client.keyspace("other")
        before = sum(listener.commands for listener in listeners)
        for n in range(20):
            other.put(b"k%d" % n, b"v")
            assert other.get(b"k%d" % n) == b"v"
        assert sum(listener.commands for listener in listeners) == before
        assert cluster.count("BatchWrite") >= 20
        wait_until(lambda: all(listener.refused for listener in listeners))
    blocking.put(key, b"after")  # which goes over RESP as ever
    assert sum(listener.commands for listener in listeners) == before + 1


def test_transport_grpc_sends_nothing_over_resp(
    cluster: FakeCluster, listener: FakeResp, connect: Connect, key: bytes
) -> None:
    client = connect(cluster.seeds, transport="grpc")
    client.put(key, b"v")
    assert client.get(key) == b"v"
    assert listener.connections == 0
    with pytest.raises(koinon.ConfigurationError, match="transport 'tcp'"):
        connect(cluster.seeds, transport="tcp")


def test_thread_sends_all_on_one_socket_of_its_own(
    listener: FakeResp, blocking: koinon.Client, key: bytes
) -> None:
    had, commands = listener.connections, listener.commands
    assert had == 2, "the loop's for writes, and the thread's"
    for _ in range(50):
        assert blocking.get(key) == b"before"
    assert listener.connections == had
    assert listener.commands == commands + 50


def test_node_that_refuses_resp_is_asked_over_grpc(
    cluster: FakeCluster, listener: FakeResp, client: Any, key: bytes
) -> None:
    listener.cluster_id = "another"
    client.put(key, b"v")
    assert client.get(key) == b"v"
    assert listener.commands == 0


def test_node_without_its_resp_port_is_asked_over_grpc_and_then_over_resp_again(
    cluster: FakeCluster, listener: FakeResp, client: Any, key: bytes
) -> None:
    port = int(listener.address.rpartition(":")[2])
    cluster.thread.run(listener.stop())
    for _ in range(3):
        client.put(key, b"v")
    assert listener.commands == 0
    cluster.thread.run(listener.start(port))
    wait_until(lambda: client.get(key) == b"v" and listener.commands > 0)


def test_more_threads_than_sockets_are_all_served(
    cluster: FakeCluster, node: FakeNode, blocking: koinon.Client, key: bytes
) -> None:
    threads = resp_pool.SOCKETS_MAX + 8
    node.before = gate = cluster.gate()
    with ThreadPoolExecutor(threads) as pool:
        reading = [pool.submit(blocking.get, key) for _ in range(threads)]
        assert blocking._engine.pools is not None
        pools = blocking._engine.pools
        wait_until(lambda: pools.in_use + len(blocking._engine.singles._live) == threads)
        assert pools.in_use == resp_pool.SOCKETS_MAX
        gate.open()
        assert [one.result(BOUND_S) for one in reading] == [b"before"] * threads


# --- a node that leaves, or is gone ---------------------------------------------------------------


def test_node_that_leaves_under_load_fails_nothing_and_keeps_no_connection(
    cluster: FakeCluster, listener: FakeResp, client: Any, key: bytes
) -> None:
    stop = threading.Event()
    done = 0

    def work() -> None:
        nonlocal done
        while not stop.is_set():
            client.put(key, b"v")
            assert client.get(key) == b"v"
            done += 1

    with ThreadPoolExecutor(4) as pool:
        working = [pool.submit(work) for _ in range(4)]
        try:
            wait_until(lambda: done > 50 and listener.connections >= 2, timeout_s=BOUND_S)
            cluster.thread.run(listener.leave())
            before = done
            wait_until(lambda: done > before + 50, timeout_s=BOUND_S)
        finally:
            stop.set()
        for one in working:
            one.result(BOUND_S)


def test_idle_sockets_are_closed_when_the_node_leaves(
    cluster: FakeCluster, listener: FakeResp, blocking: koinon.Client, key: bytes
) -> None:
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(blocking.get, [key] * 30))
    cluster.thread.run(listener.leave())
    assert blocking.get(key) == b"before"


def test_operations_on_sockets_count_as_under_way_only_while_they_are(
    cluster: FakeCluster, node: FakeNode, listener: FakeResp, key: bytes
) -> None:
    gate = cluster.gate()
    with (
        koinon.connect(cluster.seeds, timeout_ms=20_000, max_pending=2) as client,
        ThreadPoolExecutor(2) as pool,
    ):
        client.put(key, b"v")
        client.get(key)
        node.before = gate
        reading = [pool.submit(client.get, key) for _ in range(2)]
        pools = client._engine.pools
        assert pools is not None
        wait_until(lambda: pools.in_use == 2)
        with pytest.raises(koinon.ResourceExhaustedError):
            client.get(key)
        node.before = None
        gate.open()
        assert [one.result(BOUND_S) for one in reading] == [b"v"] * 2
        cluster.thread.run(listener.leave())
        assert client.get(key) == b"v"


def test_socket_on_which_a_push_came_with_the_reply_is_not_used_again(
    cluster: FakeCluster, listener: FakeResp, blocking: koinon.Client, key: bytes
) -> None:
    for place in (lambda answer: LEAVING + answer, lambda answer: answer + LEAVING):
        wait_until(lambda: blocking.get(key) and listener_sockets(blocking) == 1)
        listener.answer = place
        assert blocking.get(key) == b"before"
        assert listener_sockets(blocking) == 0
        listener.answer = bytes
        assert blocking.get(key) == b"before"


def test_connection_is_replaced_once_the_nodes_clock_is_not_known_well_enough(
    listener: FakeResp,
    blocking: koinon.Client,
    client: Any,
    key: bytes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client.put(key, b"before")
    monkeypatch.setattr(node_clock, "AGE_S_MAX", -1.0)
    for writer in (blocking, client):
        had = listener.connections
        for _ in range(3):
            writer.put(key, b"again")
        assert listener.connections > had


def test_write_that_is_refused_as_late_and_is_not_goes_again_on_a_new_connection(
    listener: FakeResp, blocking: koinon.Client, client: Any, key: bytes
) -> None:
    """The client's machine was suspended: for the node its deadlines are over."""
    for writer in (blocking, client):
        writer.put(key, b"before")
        had = listener.connections
        refusals = iter([error_reply(DeadlinePassedError(late_ms=60_000), None)])
        listener.answer = partial(next, refusals)
        writer.put(key, b"after")
        writer.put(key, b"later")
        assert listener.connections > had
        assert writer.get(key) == b"later"
        listener.answer = bytes


def listener_sockets(client: koinon.Client) -> int:
    pools = client._engine.pools
    assert pools is not None
    return sum(len(pool.sockets) for pool in pools.by_place.values())


def test_write_on_a_socket_that_was_cut_while_idle_is_sent_once(
    cluster: FakeCluster, listener: FakeResp, blocking: koinon.Client, key: bytes
) -> None:
    applied = len(cluster.applied)
    cluster.thread.loop.call_soon_threadsafe(listener.reset)
    wait_until(lambda: listener_sockets(blocking) == 0)
    for _ in range(3):
        blocking.put(key, b"v")
    assert len(cluster.applied) == applied + 3


def test_socket_that_was_cut_is_looked_at_before_anything_is_sent_on_it(
    cluster: FakeCluster, listener: FakeResp, blocking: koinon.Client, key: bytes
) -> None:
    """The loop has heard nothing: its own connections stand."""
    applied = len(cluster.applied)
    assert blocking._engine.pools is not None
    (pool,) = blocking._engine.pools.by_place.values()
    (idle,) = pool.sockets
    cluster.thread.loop.call_soon_threadsafe(listener.cut_newest)
    wait_until(idle.readable)
    blocking.put(key, b"v")
    assert len(cluster.applied) == applied + 1


def test_thread_that_waits_for_a_node_that_is_fenced_goes_on(
    cluster: FakeCluster, node: FakeNode, blocking: koinon.Client, key: bytes
) -> None:
    successor = cluster.nodes[1]
    node.before = gate = cluster.gate()
    with ThreadPoolExecutor(3) as pool:
        reading = pool.submit(blocking.get, key, timeout_ms=200_000)
        writing = pool.submit(blocking.put, key, b"w", timeout_ms=200_000)
        repeated = pool.submit(blocking.put, key, b"r", timeout_ms=200_000, retry_unknown=True)
        assert blocking._engine.pools is not None
        pools = blocking._engine.pools
        wait_until(lambda: pools.in_use == 3 and gate.reached.is_set())
        cluster.fence(node, successor)
        with pytest.raises(koinon.UnknownFateError, match="fenced"):
            writing.result(BOUND_S)
        assert reading.result(BOUND_S) in (b"before", b"r")
        assert repeated.result(BOUND_S) > 0
        gate.open()


def test_thread_that_waits_for_a_slow_node_is_answered(
    cluster: FakeCluster, node: FakeNode, blocking: koinon.Client, key: bytes
) -> None:
    node.before = gate = cluster.gate()
    asked = cluster.count("GetTable")
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(blocking.put, key, b"w", timeout_ms=200_000)
        wait_until(lambda: cluster.count("GetTable") >= asked + 3)
        gate.open()
        assert writing.result(BOUND_S) > 0


def test_close_ends_a_thread_that_waits_on_its_socket(
    cluster: FakeCluster, node: FakeNode, blocking: koinon.Client, key: bytes
) -> None:
    node.before = gate = cluster.gate()
    with ThreadPoolExecutor(2) as pool:
        writing, reading = pool.submit(blocking.put, key, b"w"), pool.submit(blocking.get, key)
        assert blocking._engine.pools is not None
        pools = blocking._engine.pools
        wait_until(lambda: pools.in_use == 2 and gate.reached.is_set())
        blocking.close()
        with pytest.raises(koinon.UnknownFateError, match="closed"):
            writing.result(BOUND_S)
        with pytest.raises(koinon.ClientClosedError, match="closed"):
            reading.result(BOUND_S)
    gate.open()


# --- replies that are late, or no replies ---------------------------------------------------------


def test_reply_after_the_deadline_is_not_taken_for_another(
    cluster: FakeCluster, node: FakeNode, client: Any
) -> None:
    slow, other = keys_of(cluster, node, 2)
    for _ in range(2):
        client.put(slow, b"slow")
        client.put(other, b"other")
    node.before = gate = cluster.gate()
    with pytest.raises(koinon.UnavailableError):
        client.get(slow, timeout_ms=150)
    with pytest.raises(koinon.UnknownFateError):
        client.put(slow, b"slower", timeout_ms=1_000)
    node.before = None
    gate.open()
    for _ in range(3):
        assert client.get(other) == b"other"


def test_interrupted_thread_leaves_no_reply_behind(
    cluster: FakeCluster,
    node: FakeNode,
    blocking: koinon.Client,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mine, other = keys_of(cluster, node, 2)
    blocking.put(other, b"other")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(resp_pool.Socket, "_receive", interrupted)
        for _ in range(resp_pool.SOCKETS_MAX + 1):
            with pytest.raises(KeyboardInterrupt):
                blocking.get(mine)
    assert listener_sockets(blocking) == 0
    assert blocking.get(other) == b"other"
    assert listener_sockets(blocking) == 1


@pytest.mark.parametrize("line", [b"-ERR no\r\n", b":7\r\n", b"?\r\n", b"*1\r\n$1\r\nx\r\n"])
def test_reply_that_makes_no_sense_leaves_a_write_of_unknown_fate(
    cluster: FakeCluster, listener: FakeResp, client: Any, key: bytes, line: bytes
) -> None:
    for _ in range(2):
        client.put(key, b"v")
    listener.answer = lambda _answer: line
    with pytest.raises(koinon.UnknownFateError):
        client.put(key, b"w")
    listener.answer = bytes
    assert client.put(key, b"x") > 0
    assert client.get(key) == b"x"


# --- the asyncio client's order -------------------------------------------------------------------


async def test_cancelled_operation_keeps_its_place_in_the_order(
    cluster: FakeCluster, node: FakeNode
) -> None:
    keys = keys_of(cluster, node, 3)
    async with await koinon.aio.connect(cluster.seeds, timeout_ms=20_000) as client:
        for key in keys:
            await client.put(key, key)
        await client.get(keys[0])
        node.before = gate = cluster.gate()
        first, second = (asyncio.create_task(client.get(key)) for key in keys[:2])
        await asyncio.to_thread(gate.reached.wait, 60)
        third = asyncio.create_task(client.get(keys[2], timeout_ms=100))
        with pytest.raises(koinon.UnavailableError):
            await third
        first.cancel()
        node.before = None
        gate.open()
        assert await second == keys[1]
        assert await client.get(keys[2]) == keys[2]
        with pytest.raises(asyncio.CancelledError):
            await first


async def test_operations_in_flight_are_bounded_and_the_rest_goes_elsewhere(
    cluster: FakeCluster, node: FakeNode, listener: FakeResp
) -> None:
    keys = keys_of(cluster, node, IN_FLIGHT_MAX + 200)
    async with await koinon.aio.connect(cluster.seeds, timeout_ms=200_000) as client:
        await client.put(keys[0], b"v")
        node.before = gate = cluster.gate()
        sent = listener.commands
        writing = [asyncio.create_task(client.put(key, b"w")) for key in keys]
        await asyncio.to_thread(gate.reached.wait, 60)
        await asyncio.to_thread(wait_until, lambda: listener.commands > sent)
        cluster.fence(node, cluster.nodes[1])
        results = await asyncio.gather(*writing, return_exceptions=True)
        unknown = [r for r in results if isinstance(r, koinon.UnknownFateError)]
        assert len(unknown) == IN_FLIGHT_MAX
        assert sum(isinstance(r, int) for r in results) == 200
        gate.open()


async def test_operations_that_were_not_sent_when_the_connection_was_cut_are_sent_again(
    cluster: FakeCluster, node: FakeNode, listener: FakeResp
) -> None:
    keys = keys_of(cluster, node, IN_FLIGHT_MAX + 200)
    async with await koinon.aio.connect(cluster.seeds, timeout_ms=20_000) as client:
        await client.put(keys[0], b"v")
        node.before = gate = cluster.gate()
        writing = [asyncio.create_task(client.put(key, b"w")) for key in keys]
        await asyncio.to_thread(gate.reached.wait, 60)
        node.before = None
        cluster.thread.loop.call_soon_threadsafe(listener.reset)
        results = await asyncio.gather(*writing, return_exceptions=True)
        unknown = [r for r in results if isinstance(r, koinon.UnknownFateError)]
        assert len(unknown) == IN_FLIGHT_MAX
        assert sum(isinstance(r, int) for r in results) == 200
        gate.open()


async def test_writes_are_not_held_up_by_reads(
    cluster: FakeCluster, node: FakeNode, key: bytes
) -> None:
    async with await koinon.aio.connect(cluster.seeds, timeout_ms=20_000) as client:
        await client.put(key, b"v")
        gate = cluster.gate()

        async def hold_reads(method: str, request: object) -> None:
            if method == "BatchGet":
                await gate(method, request)

        node.before = hold_reads
        reading = asyncio.create_task(client.get(key))
        await asyncio.to_thread(gate.reached.wait, 60)
        await client.put(key, b"w")
        gate.open()
        assert await reading in (b"v", b"w")


async def test_read_that_has_had_half_its_time_is_asked_again(
    cluster: FakeCluster, node: FakeNode, key: bytes
) -> None:
    async with await koinon.aio.connect(cluster.seeds, timeout_ms=6_000) as client:
        await client.put(key, b"v")
        await client.get(key)
        node.before = gate = cluster.gate()
        reading = asyncio.create_task(client.get(key))
        await asyncio.to_thread(gate.reached.wait, 60)
        node.before = None
        assert await reading == b"v"
        gate.open()


def test_waiting_for_a_connection_is_short(
    cluster: FakeCluster,
    listener: FakeResp,
    client: Any,
    key: bytes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A listener that takes connections and says nothing holds operations up once, not for long."""
    monkeypatch.setattr(resp_link, "_SOON_S", SOON_S)
    listener.answer = lambda _answer: b""
    began = time.monotonic()
    client.put(key, b"v", timeout_ms=15_000)
    assert time.monotonic() - began < 10 * SOON_S + 8
