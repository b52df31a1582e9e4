"""Tests of the fates of operations that are under way when their client is closed."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

import koinon
from koinon.core.batching import Kind
from tests.client.kit.fake_cluster import FakeCluster
from tests.client.kit.helpers import ALL
from tests.kit.waiting import TIMEOUT_S, wait_until


@pytest.fixture
def silent(cluster: FakeCluster) -> Iterator[socket.socket]:
    """A listener that never says a word: where the table has every partition."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(60)
        port = listener.getsockname()[1]
        cluster.readdress(cluster.nodes[1], f"127.0.0.1:{port}")
        cluster.move(ALL, 2)
        yield listener


def test_close_that_was_interrupted_is_completed_by_the_next(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = koinon.connect(cluster.seeds)
    run = client._run

    def interrupted(work: Any) -> None:
        run(work)
        raise KeyboardInterrupt

    with monkeypatch.context() as interrupting:
        interrupting.setattr(client, "_run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            client.close()
    assert client._thread.is_alive()
    client.close()
    assert not client._thread.is_alive()
    client.close()


@pytest.mark.parametrize("method", ["_run", "_stop_loop"])
def test_close_by_a_signal_handler_of_the_thread_that_closes_returns(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    client = koinon.connect(cluster.seeds)
    step = getattr(client, method)
    handled: list[bool] = []

    def interrupted(*args: Any) -> Any:
        if not handled:
            handled.append(True)
            signal.raise_signal(signal.SIGUSR1)
        return step(*args)

    before = signal.signal(signal.SIGUSR1, lambda *_: client.close())
    try:
        monkeypatch.setattr(client, method, interrupted)
        client.close()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not client._thread.is_alive()
    with pytest.raises(koinon.ClientClosedError):
        client.get(b"k")


def test_close_after_one_that_was_interrupted_waits_for_the_loop(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an interrupted join Python's ``Thread.join`` returns at once, though the thread runs
    on (3.11).
    """
    client = koinon.connect(cluster.seeds)
    may_stop, stop = threading.Event(), client._loop.stop

    def stop_later() -> None:
        may_stop.wait(TIMEOUT_S)
        stop()

    with monkeypatch.context() as interrupting:
        interrupting.setattr(client._loop, "stop", stop_later)
        interrupting.setattr(client._thread, "join", lambda: None)
        threading.Timer(0.1, may_stop.set).start()
        client.close()
    assert client._loop.is_closed()


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda c: c.put(b"k", b"v"), koinon.ClientClosedError),
        (lambda c: c.get_many([b"k"]), koinon.ClientClosedError),
        (lambda c: list(c.scan()), koinon.ClientClosedError),
        (lambda c: c.put_many([(b"k", b"v")]), koinon.UnknownFateError),
        (lambda c: c.delete_many([b"k"]), koinon.UnknownFateError),
    ],
)
def test_client_closed_while_a_node_is_connected_to_reports_no_success(
    cluster: FakeCluster,
    silent: socket.socket,
    call: Callable[[koinon.Client], object],
    kind: type[koinon.KoinonError],
) -> None:
    client = koinon.connect(cluster.nodes[0].address, timeout_ms=20_000)
    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(call, client)
        with silent.accept()[0]:
            client.close()
        with pytest.raises(kind, match="closed"):
            calling.result(60)


async def _scanned(client: koinon.AsyncClient) -> list[koinon.Entry]:
    return [entry async for entry in client.scan()]


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda c: c.get(b"k"), koinon.ClientClosedError),
        (lambda c: c.get_many([b"k"]), koinon.ClientClosedError),
        (_scanned, koinon.ClientClosedError),
        (lambda c: c.put_many([(b"k", b"v")]), koinon.UnknownFateError),
    ],
)
async def test_async_client_closed_while_a_node_is_connected_to_cancels_nobody(
    cluster: FakeCluster,
    silent: socket.socket,
    call: Callable[[koinon.AsyncClient], Awaitable[Any]],
    kind: type[koinon.KoinonError],
) -> None:
    client = await koinon.aio.connect(cluster.nodes[0].address, timeout_ms=20_000)
    calling = asyncio.ensure_future(call(client))
    connection, _ = await asyncio.to_thread(silent.accept)
    with connection:
        await client.close()
    with pytest.raises(kind, match="closed"):
        await calling


def test_operation_handed_over_just_before_the_loop_closes_ends(cluster: FakeCluster) -> None:
    client = koinon.connect(cluster.seeds, timeout_ms=20_000)
    single = client._single(Kind.GET, b"k", timeout_ms=None)
    close_loop = client._loop.close
    with ThreadPoolExecutor(1) as pool:
        late: list[Future[object]] = []

        def close() -> None:
            late.append(pool.submit(client._run_single, single))
            wait_until(lambda: client._wake_due and bool(client._submissions))
            close_loop()

        client._loop.close = close  # type: ignore[method-assign]
        client.close()
        with pytest.raises(koinon.ClientClosedError, match="closed"):
            late[0].result(60)


def test_operation_that_relied_on_a_wake_up_which_failed_ends(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = koinon.connect(cluster.seeds, timeout_ms=20_000)
    first, second = (client._single(Kind.GET, b"k", timeout_ms=None) for _ in range(2))
    client.close()
    client._wake_due = True  # the second has it on its way
    with ThreadPoolExecutor(1) as pool:
        relying = pool.submit(client._run_single, first)
        wait_until(lambda: bool(client._submissions))
        client._wake_due = False
        with pytest.raises(koinon.ClientClosedError, match="closed"):
            client._run_single(second)
        with pytest.raises(koinon.ClientClosedError, match="closed"):
            relying.result(60)


def test_thread_interrupted_before_the_loop_was_told_holds_up_no_other(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with koinon.connect(cluster.seeds, timeout_ms=20_000, transport="grpc") as client:
        wake = client._wake

        def interrupted(*_: object) -> None:
            monkeypatch.setattr(client, "_wake", wake)
            raise KeyboardInterrupt

        monkeypatch.setattr(client, "_wake", interrupted)
        with pytest.raises(KeyboardInterrupt):
            client.get(b"k")
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(client.get, b"k").result(60) is None
        wait_until(lambda: not client._engine.singles._live, "nothing is left of it")


def test_scan_that_is_broken_off_says_nothing(
    cluster: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    """The page that was fetched ahead fails when the client is closed, and is never asked for."""

    async def hold(method: str, request: Any) -> None:
        if method == "Scan" and request.HasField("cursor"):
            await gate(method, request)

    gate = cluster.gate()
    rows = {b"k%d" % n: b"v" for n in range(20)}

    def with_threads() -> None:
        client = koinon.connect(cluster.seeds, timeout_ms=20_000)
        entries = client.scan(page_rows=1)
        next(entries)
        assert gate.reached.wait(TIMEOUT_S)
        client.close()

    async def with_tasks() -> None:
        client = await koinon.aio.connect(cluster.seeds, timeout_ms=20_000)
        entries = client.scan(page_rows=1)
        await anext(entries)
        await asyncio.to_thread(gate.reached.wait, TIMEOUT_S)
        await client.close()

    with koinon.connect(cluster.seeds, timeout_ms=20_000) as client:
        client.put_many(rows)
    for node in cluster.nodes:
        node.before = hold
    with_threads()
    gate.reached.clear()
    asyncio.run(with_tasks())
    gc.collect()
    assert "never retrieved" not in caplog.text
    gate.open()


CALLS: dict[str, Callable[[koinon.AsyncClient], Awaitable[object]]] = {
    "get": lambda c: c.get(b"k"),
    "put": lambda c: c.put(b"k", b"v"),
    "delete": lambda c: c.delete(b"k"),
    "get_many": lambda c: c.get_many([b"k"]),
    "put_many": lambda c: c.put_many([(b"k", b"v")]),
    "delete_many": lambda c: c.delete_many([b"k"]),
    "scan": lambda c: anext(c.scan()),
    "table": lambda c: c.table(),
    "cluster_status": lambda c: c.cluster_status(),
    "close": lambda c: c.close(),
}


@pytest.mark.parametrize("name", CALLS)
async def test_client_on_a_second_loop_is_refused_by_name_at_once_and_stays_of_use_on_its_own(
    cluster: FakeCluster, name: str
) -> None:
    async def on_another(client: koinon.AsyncClient) -> object:
        return await asyncio.wait_for(CALLS[name](client), 60)

    async with await koinon.aio.connect(cluster.nodes[0].address) as client:
        with pytest.raises(koinon.WrongEventLoopError, match="another event loop"):
            await asyncio.to_thread(asyncio.run, on_another(client))
        await client.put(b"k", b"v")
        assert await client.get(b"k") == b"v"
    if name != "close":
        with pytest.raises(koinon.ClientClosedError, match="closed"):  # on any loop
            await asyncio.to_thread(asyncio.run, on_another(client))


def test_blocking_client_logs_no_late_news_of_calls_whose_loop_is_closed(
    cluster: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    closed = asyncio.new_event_loop()
    closed.close()

    class PollerCompletionQueue:
        """Does what gRPC's does once calls of a closed loop end."""

        def _handle_events(self) -> None:
            closed.call_soon_threadsafe(print)

    with koinon.connect(cluster.nodes[0].address) as client:
        client._loop.call_soon_threadsafe(PollerCompletionQueue()._handle_events)
        client._loop.call_soon_threadsafe(lambda: 1 // 0)
        wait_until(lambda: "ZeroDivisionError" in caplog.text, "other errors are logged")
    assert "loop is closed" not in caplog.text
