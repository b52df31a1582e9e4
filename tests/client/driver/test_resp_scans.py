"""Scans over RESP: which way their pages go, and what is peculiar to that way."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import koinon
from koinon.driver.resp import connection
from koinon.driver.resp import link as resp_link
from koinon.driver.resp import pool as resp_pool
from tests.client.conftest import Connect
from tests.client.kit.fake_cluster import FakeCluster, FakeNode
from tests.client.kit.helpers import LEASE, ONLY_RESP, keys_of, resp_of
from tests.kit.waiting import wait_until

pytestmark = ONLY_RESP
BOUND_S = 60.0
PAGE_LANE = resp_link.PAGE_LANES[0]
ROWS = {b"k%03d" % n: b"v%d" % n for n in range(90)}


@pytest.fixture
def node(cluster: FakeCluster) -> FakeNode:
    return cluster.nodes[0]


@pytest.fixture
def key(cluster: FakeCluster, node: FakeNode) -> bytes:
    """The only key of the node."""
    (key,) = keys_of(cluster, node)
    cluster.write(key, b"there", 0)
    return key


@pytest.fixture
def blocking(cluster: FakeCluster) -> Iterator[koinon.Client]:
    """A blocking client whose threads have sockets of their own to all nodes."""
    with koinon.connect(cluster.seeds, timeout_ms=100_000) as client:
        list(client.scan())
        yield client


def pages(cluster: FakeCluster) -> int:
    """Return how many pages were asked for by RESP."""
    return sum(resp_of(node).pages for node in cluster.nodes)


def scanned(client: Any, **options: Any) -> list[bytes]:
    return sorted(entry.key for entry in client.scan(**options))


async def _collect(client: koinon.AsyncClient, prefix: bytes) -> list[bytes]:
    return [entry.key async for entry in client.scan(prefix=prefix)]


def sockets(client: koinon.Client) -> int:
    assert client._engine.pools is not None
    return sum(len(pool.sockets) for pool in client._engine.pools.by_place.values())


# --- which way ------------------------------------------------------------------------------------


def test_all_pages_go_over_resp_from_the_first_on(cluster: FakeCluster, client: Any) -> None:
    for key, value in ROWS.items():
        cluster.write(key, value, 0)
    for _ in range(2):
        found = sorted(client.scan(page_rows=7))
        assert [(entry.key, entry.value) for entry in found] == sorted(ROWS.items())
        assert pages(cluster) == cluster.count("Scan") >= len(ROWS) // 7
        assert not cluster.count("BatchGet")


def test_transport_grpc_sends_no_page_over_resp(cluster: FakeCluster, connect: Connect) -> None:
    assert scanned(connect(cluster.seeds, transport="grpc")) == []
    assert (pages(cluster), cluster.count("Scan")) == (0, 2)


def test_short_scan_needs_no_hop_to_the_loop(
    cluster: FakeCluster, blocking: koinon.Client, key: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the loop was asked")

    asked = cluster.count("Scan")
    with monkeypatch.context() as patch:
        patch.setattr(blocking, "_run", refuse)
        patch.setattr(blocking, "_wake", refuse)
        assert scanned(blocking, prefix=key, limit=1) == [key]
        assert scanned(blocking, prefix=b"none") == []
    assert cluster.count("Scan") > asked


def test_node_that_does_not_know_the_command_is_an_error(cluster: FakeCluster, client: Any) -> None:
    for one in cluster.nodes:
        resp_of(one).knows.clear()
    with pytest.raises(koinon.UnsupportedVersionError, match=r"KOINON\.SCAN"):
        scanned(client)
    assert cluster.count("Scan") == 0


async def test_page_waits_for_no_other_page_and_more_than_there_are_places_for_go_over_grpc(
    cluster: FakeCluster, node: FakeNode, key: bytes
) -> None:
    client = await koinon.aio.connect(cluster.nodes[1].address, timeout_ms=100_000)
    await _collect(client, key)
    gate = cluster.gate()
    node.before = gate
    held = asyncio.create_task(_collect(client, key))
    await asyncio.to_thread(gate.reached.wait, BOUND_S)
    node.before = None
    assert await _collect(client, key) == [key]
    node.before = gate
    before = pages(cluster)
    many = [
        asyncio.create_task(_collect(client, key)) for _ in range(len(resp_link.PAGE_LANES) + 4)
    ]
    calls = cluster.count("Scan") + len(many)
    while cluster.count("Scan") < calls:  # noqa: ASYNC110 (of a test)
        await asyncio.sleep(0.01)
    assert pages(cluster) - before < len(resp_link.PAGE_LANES)
    gate.open()
    assert await asyncio.wait_for(asyncio.gather(held, *many), BOUND_S) == [[key]] * (len(many) + 1)
    await client.close()


# --- a scan that does not go as it should ---------------------------------------------------------


def test_page_that_is_refused_on_a_thread_goes_on_on_the_loop_and_is_told_once(
    cluster: FakeCluster, node: FakeNode, key: bytes
) -> None:
    told: list[koinon.Observation] = []
    refusals = 0

    def refuse(_partition_id: int) -> Any:
        nonlocal refusals
        refusals += 1
        return LEASE if refusals <= 2 else None

    with koinon.connect(cluster.seeds, timeout_ms=100_000, observer=told.append) as client:
        list(client.scan())
        told.clear()
        node.refuse = refuse
        assert scanned(client, prefix=key, limit=1) == [key]
    assert refusals > 2
    assert [(one.operation, one.outcome, one.rows) for one in told] == [("scan", "ok", 1)]


def test_page_of_a_slow_node_ends_at_its_deadline_and_is_not_taken_for_another(
    cluster: FakeCluster, node: FakeNode, client: Any, key: bytes
) -> None:
    assert scanned(client) == [key]
    node.before = gate = cluster.gate()
    with pytest.raises(koinon.UnavailableError):
        scanned(client, timeout_ms=150)
    node.before = None
    gate.open()
    for _ in range(3):
        assert scanned(client) == [key]
        assert scanned(client, prefix=b"none") == []


@pytest.mark.parametrize("abandoned", [False, True], ids=["waited for", "abandoned"])
async def test_overdue_page_takes_no_connection_but_its_own(
    cluster: FakeCluster,
    node: FakeNode,
    key: bytes,
    monkeypatch: pytest.MonkeyPatch,
    abandoned: bool,
) -> None:
    async def opened(client: koinon.AsyncClient) -> resp_link.RespLink:
        """Return the link to the node, with connections for reads, for writes and for pages."""
        while True:
            await client.put(key, b"there")
            assert await client.get(key) == b"there"
            assert await _collect(client, key) == [key]
            for link in client._engine.singles.resp_links:
                if link.address == node.address and {False, True, PAGE_LANE} <= link._open.keys():
                    return link
            await asyncio.sleep(0.01)

    client = await koinon.aio.connect(cluster.nodes[1].address, timeout_ms=100_000)
    link = await asyncio.wait_for(opened(client), BOUND_S)
    monkeypatch.setattr(connection, "attempt_timeout_s", lambda _left_s, *, write: 0.0)
    before = dict(link._open)
    node.before = gate = cluster.gate()
    held = asyncio.create_task(_collect(client, key))
    await asyncio.to_thread(gate.reached.wait, BOUND_S)
    node.before = None
    if abandoned:
        held.cancel()
    else:
        assert await asyncio.wait_for(held, BOUND_S) == [key], "asked for again"
    await asyncio.wait_for(before.pop(PAGE_LANE).lost.wait(), BOUND_S)
    assert {lane: link._open.get(lane) for lane in before} == before
    assert all(one.alive for one in before.values())
    gate.open()
    assert await client.get(key) == b"there"
    await client.close()


def test_scan_that_is_broken_off_while_a_page_is_fetched_leaves_no_reply_behind(
    cluster: FakeCluster, client: Any
) -> None:
    for row, value in ROWS.items():
        cluster.write(row, value, 0)
    gate = cluster.gate()

    async def hold(method: str, request: Any) -> None:
        if method == "Scan" and request.HasField("cursor"):
            await gate(method, request)

    for one in cluster.nodes:
        one.before = hold

    def begin() -> None:
        if isinstance(client, koinon.Client):
            begun: Any = client.scan(page_rows=3)
            next(begun)
            begun.close()
            return

        async def run() -> None:
            entries = client.wrapped.scan(page_rows=3)
            await anext(entries)
            await entries.aclose()

        client._thread.run(run(), BOUND_S)

    for _ in range(3):
        begin()
    for one in cluster.nodes:
        one.before = None
    gate.open()
    for _ in range(2):
        assert scanned(client, page_rows=20) == sorted(ROWS)


def test_close_ends_a_thread_that_waits_for_a_page(
    cluster: FakeCluster, node: FakeNode, blocking: koinon.Client, key: bytes
) -> None:
    node.before = gate = cluster.gate()
    with ThreadPoolExecutor(1) as pool:
        scanning = pool.submit(scanned, blocking, prefix=key)
        assert gate.reached.wait(BOUND_S)
        blocking.close()
        with pytest.raises(koinon.ClientClosedError):
            scanning.result(BOUND_S)
    gate.open()


async def test_close_ends_a_task_that_waits_for_a_page(
    cluster: FakeCluster, node: FakeNode, key: bytes
) -> None:
    client = await koinon.aio.connect(cluster.seeds, timeout_ms=200_000)
    gate = node.before = cluster.gate()
    scanning = asyncio.create_task(_collect(client, key))
    await asyncio.to_thread(gate.reached.wait, BOUND_S)
    await client.close()
    with pytest.raises(koinon.ClientClosedError):
        await asyncio.wait_for(scanning, BOUND_S)
    gate.open()


async def test_close_ends_a_task_whose_page_waits_for_a_connection(
    cluster: FakeCluster, node: FakeNode, key: bytes
) -> None:
    listener = resp_of(node)
    listener.answer = lambda _answer: b""

    client = await koinon.aio.connect(cluster.seeds, timeout_ms=200_000)
    scanning = asyncio.create_task(_collect(client, key))
    while not listener.connections:  # noqa: ASYNC110 (of a test)
        await asyncio.sleep(0.01)
    await client.close()
    with pytest.raises(koinon.ClientClosedError):
        await asyncio.wait_for(scanning, BOUND_S / 2)


async def test_close_with_a_page_about_to_be_sent_is_no_failure_of_the_loop(
    cluster: FakeCluster, key: bytes
) -> None:
    failures: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, failure: failures.append(failure))
    client = await koinon.aio.connect(cluster.seeds, timeout_ms=200_000)
    assert await _collect(client, b"") == [key]
    scanning = asyncio.create_task(_collect(client, key))
    await asyncio.sleep(0)  # the page is with its connection, which sends it in the next turn
    await client.close()
    with pytest.raises(koinon.ClientClosedError):
        await asyncio.wait_for(scanning, BOUND_S)
    assert not failures


def test_scan_goes_on_on_no_other_loop(cluster: FakeCluster, key: bytes) -> None:
    cluster.write(key + b"/", b"there", 0)
    loop = asyncio.new_event_loop()
    client = loop.run_until_complete(koinon.aio.connect(cluster.seeds, timeout_ms=200_000))
    entries = client.scan(page_rows=1)
    loop.run_until_complete(anext(entries))

    async def go_on() -> None:
        await anext(entries)

    with ThreadPoolExecutor(1) as pool, pytest.raises(koinon.WrongEventLoopError):
        pool.submit(lambda: asyncio.run(go_on())).result(BOUND_S)
    loop.run_until_complete(client.close())
    loop.close()


def test_interrupted_scan_closes_its_socket(
    blocking: koinon.Client, key: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    had = sockets(blocking)
    with monkeypatch.context() as patch:
        patch.setattr(resp_pool.Socket, "_receive", interrupted)
        for _ in range(resp_pool.SOCKETS_MAX + 1):
            with pytest.raises(KeyboardInterrupt):
                scanned(blocking)
    assert sockets(blocking) <= had
    assert scanned(blocking) == [key]


@pytest.mark.parametrize(
    "line", [b"-ERR no\r\n", b":7\r\n", b"$1\r\n\xff\r\n", b"*1\r\n$1\r\nx\r\n"]
)
def test_reply_that_is_no_page_is_told_and_the_next_is_asked_for_anew(
    cluster: FakeCluster, node: FakeNode, client: Any, key: bytes, line: bytes
) -> None:
    assert scanned(client) == [key]
    listener = resp_of(node)
    listener.answer = lambda answer: answer if b"\nn1 " in answer else line
    with pytest.raises(koinon.UnavailableError):
        scanned(client, timeout_ms=300)
    listener.answer = bytes
    wait_until(lambda: scanned(client) == [key], "the scan is served again")
