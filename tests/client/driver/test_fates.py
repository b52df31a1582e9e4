"""Both clients over real gRPC: cut connections, dead and silent nodes, deadlines, coalescing."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

import koinon
from koinon_proto.contract.errors import InternalError
from tests.client.conftest import Connect
from tests.client.kit.fake_cluster import PARTITIONS, FakeCluster, Proxies, Proxy
from tests.client.kit.helpers import ALL, LEASE, ONLY_GRPC, ThreeTimesMore, engine_of, keys_of
from tests.kit.waiting import wait_until

# --- fates --------------------------------------------------------------------------------------


@pytest.fixture
def proxied(cluster: FakeCluster) -> Iterator[Proxies]:
    """Clients reach node 1 only through proxies."""
    node = cluster.nodes[0]
    proxies = [Proxy(cluster.thread, node.address)]
    node.address = proxies[0].address
    if node.resp is not None:
        proxies.append(Proxy(cluster.thread, node.resp.address))
        node.resp.address = proxies[1].address
    cluster.table = cluster.served_table = cluster._first_table(PARTITIONS)
    together = Proxies(*proxies)
    yield together
    together.close()


@contextmanager
def cut_under(cluster: FakeCluster, proxied: Proxies, work: Callable[[], Any]) -> Iterator[Any]:
    """Give the future of work whose connections are cut while the first node holds its answer."""
    cluster.nodes[0].after = gate = cluster.gate()
    working = ThreadPoolExecutor(1).submit(work)
    assert gate.reached.wait(60)
    cluster.nodes[0].after = None
    proxied.cut()
    yield working
    gate.open()


@pytest.mark.parametrize(
    ("opted_in", "options"), [(False, {}), (True, {"if_version": 0})], ids=["plain", "conditional"]
)
def test_connection_cut_after_the_write_arrived_is_an_unknown_fate(
    cluster: FakeCluster,
    proxied: Proxies,
    connect: Connect,
    opted_in: bool,
    options: dict[str, int],
) -> None:
    client = connect(cluster.nodes[1].address, timeout_ms=20_000, retry_unknown=opted_in)
    key = keys_of(cluster, cluster.nodes[0])[0]
    with (
        cut_under(cluster, proxied, lambda: client.put(key, b"v", **options)) as writing,
        pytest.raises(koinon.UnknownFateError),
    ):
        writing.result(60)
    assert len(cluster.applied) == 1, "not sent a second time"
    assert client.get(key) == b"v", "the client goes on"


@ONLY_GRPC
@pytest.mark.parametrize("options", [{}, {"if_version": 0}])
def test_limit_of_grpc_itself_leaves_a_write_of_unknown_fate(
    cluster: FakeCluster, client: Any, options: dict[str, int]
) -> None:
    """The write was applied: only its reply was too large."""
    cluster.exhausted_replies = {"BatchWrite"}
    with pytest.raises(koinon.UnknownFateError, match="resource_exhausted: too large"):
        client.put(b"k", b"v", **options)
    assert len(cluster.applied) == 1, "not sent a second time"
    assert len(client.put_many({b"k": b"v"}).unknown) == 1


@ONLY_GRPC
def test_limit_of_grpc_itself_refuses_a_read_which_is_tried_again(
    cluster: FakeCluster, client: Any
) -> None:
    client.put(b"k", b"v")
    cluster.exhausted_replies = {"BatchGet"}
    engine = engine_of(client)
    patient, engine.policy = engine.policy, ThreeTimesMore()
    with pytest.raises(koinon.ResourceExhaustedError, match="too large") as caught:
        client.get(b"k", timeout_ms=1_000)
    assert "limit of" not in str(caught.value)
    assert cluster.count("BatchGet") == 4
    engine.policy = patient
    threading.Timer(0.1, cluster.exhausted_replies.clear).start()
    assert client.get_many([b"k"]) == [b"v"]


@pytest.mark.parametrize("at_connect", [True, False])
def test_connection_cut_opted_in_write_is_repeated(
    cluster: FakeCluster, proxied: Proxies, connect: Connect, at_connect: bool
) -> None:
    client = connect(cluster.nodes[1].address, timeout_ms=20_000, retry_unknown=at_connect)
    option = {} if at_connect else {"retry_unknown": True}
    keys = keys_of(cluster, cluster.nodes[0], 5)
    works: list[Callable[[], Any]] = [
        lambda: client.put(keys[0], b"v", **option),
        lambda: client.put_many([(key, b"w") for key in keys], **option).raise_for_errors(),
    ]
    for work in works:
        with cut_under(cluster, proxied, work) as writing:
            writing.result(60)
    assert client.get_many(keys) == [b"w"] * 5


def test_connection_cut_read_is_repeated(
    cluster: FakeCluster, proxied: Proxies, connect: Connect
) -> None:
    client = connect(cluster.nodes[1].address, timeout_ms=20_000)
    key = keys_of(cluster, cluster.nodes[0])[0]
    client.put(key, b"v")
    for work in (lambda: client.get(key), lambda: client.get_many([key])[0]):
        with cut_under(cluster, proxied, work) as reading:
            assert reading.result(60) == b"v"


def test_connection_cut_put_many_marks_only_that_nodes_rows_unknown(
    cluster: FakeCluster, proxied: Proxies, connect: Connect
) -> None:
    client = connect(cluster.nodes[1].address, timeout_ms=20_000)
    rows = {b"key%d" % i: b"v" for i in range(100)}
    mine = [k for k in rows if k in set(keys_of(cluster, cluster.nodes[0], 100))]
    with cut_under(cluster, proxied, lambda: client.put_many(rows)) as writing:
        result = writing.result(60)
    assert [failure.key for failure in result.unknown] == mine
    assert result.applied == 100 - len(mine)
    assert not result.refused
    with pytest.raises(koinon.UnknownFateError):
        result.raise_for_errors()


async def test_node_killed_with_writes_in_flight_is_an_unknown_fate_for_all_of_the_batch(
    cluster: FakeCluster,
) -> None:
    keys = keys_of(cluster, cluster.nodes[0], 10)
    cluster.nodes[0].after = gate = cluster.gate()

    async with await koinon.aio.connect(cluster.nodes[1].address, timeout_ms=20_000) as client:
        writing = [asyncio.create_task(client.put(key, b"v")) for key in keys]
        await asyncio.to_thread(gate.reached.wait, 60)
        await asyncio.to_thread(cluster.kill, cluster.nodes[0])
        found = await asyncio.gather(*writing, return_exceptions=True)
    assert [type(error) for error in found] == [koinon.UnknownFateError] * 10


def kill(cluster: FakeCluster, client: Any, key: bytes) -> None:
    """Kill the first node, which leads the key; return when the client has no connection to it: a
    write could still meet one.
    """
    client.get(key)
    cluster.kill(cluster.nodes[0])
    with pytest.raises(koinon.UnavailableError):
        client.get(key, timeout_ms=300)


def test_never_sent_write_is_retried_until_the_node_is_back(
    cluster: FakeCluster, client: Any
) -> None:
    key = keys_of(cluster, cluster.nodes[0])[0]
    kill(cluster, client, key)
    threading.Timer(0.4, lambda: cluster.revive(cluster.nodes[0])).start()
    assert client.put(key, b"v") > 0
    assert len(cluster.applied) == 1


def test_never_sent_at_the_deadline_is_unavailable_and_names_the_node(
    cluster: FakeCluster, client: Any
) -> None:
    key = keys_of(cluster, cluster.nodes[0])[0]
    kill(cluster, client, key)
    calls: list[Callable[[], Any]] = [
        lambda: client.put(key, b"v", timeout_ms=300),
        lambda: client.put(key, b"v", if_version=0, timeout_ms=300),
        lambda: client.get_many([key], timeout_ms=300),
        lambda: client.put_many([(key, b"v")], timeout_ms=300).raise_for_errors(),
    ]
    for call in calls:
        with pytest.raises(koinon.UnavailableError, match=cluster.nodes[0].address):
            call()


def test_unreachable_node_whose_partitions_moved_is_left(cluster: FakeCluster, client: Any) -> None:
    key = keys_of(cluster, cluster.nodes[0])[0]
    kill(cluster, client, key)
    threading.Timer(0.3, lambda: cluster.move(ALL, 2)).start()
    assert client.put(key, b"v") > 0
    assert client.put_many({key: b"w"}).ok


def test_defect_of_the_node_is_unknown_to_a_write_and_internal_to_a_read(
    cluster: FakeCluster, client: Any
) -> None:
    async def fail(_method: str, _request: object) -> None:
        raise RuntimeError("planted")

    cluster.nodes[0].after = cluster.nodes[1].after = fail
    with pytest.raises(koinon.UnknownFateError):
        client.put(b"k", b"v", retry_unknown=True)
    with pytest.raises(InternalError):
        client.get(b"k")
    assert len(cluster.applied) == 1
    assert len(client.put_many({b"k": b"v"}).unknown) == 1


def test_reply_beyond_the_message_bound_is_asked_for_in_parts(
    cluster: FakeCluster, client: Any
) -> None:
    keys = keys_of(cluster, cluster.nodes[0], 24)
    for key in keys:
        cluster.store[key] = (key + b"x" * (1 << 20), 1, 0)
    assert [
        value[: len(key)] for key, value in zip(keys, client.get_many(keys), strict=True)
    ] == keys


def test_coalesced_replies_beyond_the_message_bound_are_asked_for_in_parts(
    cluster: FakeCluster,
) -> None:
    keys = keys_of(cluster, cluster.nodes[0], 24)
    for key in keys:
        cluster.store[key] = (key + b"x" * (1 << 20), 1, 0)

    async def run() -> list[bytes | None]:
        async with await koinon.aio.connect(cluster.seeds, timeout_ms=20_000) as client:
            return await asyncio.gather(*[client.get(key) for key in keys])

    found = asyncio.run(run())
    assert all(
        value is not None and value.startswith(k) for k, value in zip(keys, found, strict=True)
    )


# --- deadlines ----------------------------------------------------------------------------------


def test_silent_node_write_is_unknown_read_unavailable_at_the_deadline(
    cluster: FakeCluster, client: Any
) -> None:
    for _ in range(2):
        client.put(b"k", b"v")  # connections stand: what follows is sent at once
    cluster.nodes[0].before = cluster.nodes[1].before = gate = cluster.gate()
    began = time.monotonic()
    with pytest.raises(koinon.UnknownFateError):
        client.put(b"k", b"v", timeout_ms=1_000)  # time enough to be sent, on a busy machine too
    with pytest.raises(koinon.UnavailableError):
        client.get(b"k", timeout_ms=150)
    with pytest.raises(koinon.UnavailableError):
        client.get_many([b"k"], timeout_ms=150)
    assert len(client.put_many({b"k": b"v"}, timeout_ms=1_000).unknown) == 1
    with pytest.raises(koinon.UnavailableError):
        list(client.scan(timeout_ms=150))
    assert time.monotonic() - began < 30
    gate.open()


@ONLY_GRPC
def test_deadline_travels_with_the_call(cluster: FakeCluster, client: Any) -> None:
    cluster.nodes[0].deadlines_s.clear()
    cluster.nodes[1].deadlines_s.clear()
    client.put(b"k", b"v", timeout_ms=60_000)
    client.put_many({b"k": b"v"}, timeout_ms=60_000)
    seen = cluster.nodes[0].deadlines_s + cluster.nodes[1].deadlines_s
    assert len(seen) == 2
    assert all(25.0 < left <= 60.5 for left in seen)


@ONLY_GRPC
async def test_queued_behind_a_silent_batch_was_not_sent(cluster: FakeCluster) -> None:
    keys = keys_of(cluster, cluster.nodes[0], 2)
    async with await koinon.aio.connect(cluster.seeds, timeout_ms=20_000) as client:
        await client.get(keys[0])  # the connection stands: the first write goes at once
        cluster.nodes[0].before = gate = cluster.gate()
        first = asyncio.create_task(client.put(keys[0], b"v", timeout_ms=60_000))
        await asyncio.to_thread(gate.reached.wait, 60)
        with pytest.raises(koinon.UnavailableError, match="queued"):
            await client.put(keys[1], b"v", timeout_ms=100)
        gate.open()
        await first
    assert [key for key, _ in cluster.applied] == [keys[0]]


# --- coalescing, bounds, cancellation -----------------------------------------------------------


async def test_concurrent_singles_ride_together(cluster: FakeCluster) -> None:
    async with await koinon.aio.connect(cluster.seeds, timeout_ms=20_000) as client:
        await client.get(b"k")
        cluster.reset_counts()
        await asyncio.gather(*[client.put(b"key%d" % i, b"v") for i in range(500)])
        await asyncio.gather(*[client.get(b"key%d" % i) for i in range(500)])
    assert cluster.count("BatchWrite") <= 4
    assert cluster.count("BatchGet") <= 4
    assert len(cluster.applied) == 500


@ONLY_GRPC
def test_concurrent_threads_ride_together(cluster: FakeCluster) -> None:
    gate = cluster.gate()
    keys = keys_of(cluster, cluster.nodes[0], 17)
    with koinon.connect(cluster.seeds, timeout_ms=20_000) as client, ThreadPoolExecutor(17) as pool:
        client.get(keys[0])
        cluster.reset_counts()
        cluster.nodes[0].before = gate
        first = pool.submit(client.get, keys[0])
        assert gate.reached.wait(60)
        others = [pool.submit(client.put, key, b"v") for key in keys[1:]]
        wait_until(lambda: len(client._engine.singles._live) == 17)
        gate.open()
        assert first.result(60) is None
        assert all(other.result(60) for other in others)
    assert cluster.count("BatchWrite") <= 3
    assert len(cluster.applied) == 16


async def test_too_many_pending_is_resource_exhausted_at_once(cluster: FakeCluster) -> None:
    gate = cluster.gate()

    async def hold_reads(method: str, request: object) -> None:
        if method == "BatchGet":
            await gate(method, request)

    for node in cluster.nodes:
        node.before = hold_reads

    async with await koinon.aio.connect(cluster.seeds, timeout_ms=60_000, max_pending=10) as client:
        pending = [asyncio.create_task(client.get(b"key%d" % i)) for i in range(10)]
        await asyncio.sleep(0)
        began = time.monotonic()
        with pytest.raises(koinon.ResourceExhaustedError, match="10"):
            await client.get(b"one more")
        assert time.monotonic() - began < 30
        gate.open()
        await asyncio.gather(*pending)
        assert await client.get(b"one more") is None


@ONLY_GRPC
async def test_cancelled_write_leaves_its_batch_to_the_others(cluster: FakeCluster) -> None:
    keys = keys_of(cluster, cluster.nodes[0], 3)
    cluster.nodes[0].before = gate = cluster.gate()

    async with await koinon.aio.connect(cluster.nodes[1].address, timeout_ms=20_000) as client:
        sent = [asyncio.create_task(client.put(key, b"v")) for key in keys[:2]]
        await asyncio.to_thread(gate.reached.wait, 60)
        queued = asyncio.create_task(client.put(keys[2], b"v"))
        await asyncio.sleep(0)
        sent[0].cancel()
        queued.cancel()
        gate.open()
        assert await sent[1] > 0
        for task in (sent[0], queued):
            with pytest.raises(asyncio.CancelledError):
                await task
        assert not client._engine.singles._live
    assert [key for key, _ in cluster.applied] == keys[:2], "the queued one was never sent"


async def test_cancelled_put_many_ends_and_the_client_goes_on(cluster: FakeCluster) -> None:
    gate = cluster.gate()
    for node in cluster.nodes:
        node.after = gate

    async with await koinon.aio.connect(cluster.seeds, timeout_ms=20_000) as client:
        load = asyncio.create_task(client.put_many({b"k%d" % i: b"v" for i in range(100)}))
        await asyncio.to_thread(gate.reached.wait, 60)
        load.cancel()
        with pytest.raises(asyncio.CancelledError):
            await load
        for node in cluster.nodes:
            node.after = None
        assert await client.put(b"k", b"v") > 0
        gate.open()


def test_put_many_of_a_generator_is_read_no_faster_than_it_is_written(
    cluster: FakeCluster, connect: Connect
) -> None:
    client = connect(cluster.seeds, timeout_ms=20_000, batch_rows=500, batches_in_flight=4)
    alive = most = 0

    class Row(tuple[bytes, bytes]):
        """Counts how many rows of the input are alive."""

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    def source() -> Iterator[tuple[bytes, bytes]]:
        nonlocal alive, most
        for i in range(100_000):
            alive += 1
            most = max(most, alive)
            yield Row((b"key%d" % i, b"v"))

    result = client.put_many(source())
    gc.collect()
    assert (result.applied, result.ok, len(cluster.store)) == (100_000, True, 100_000)
    assert most <= 2 * 6 * 1_000


def test_put_many_repeated_keys_the_last_wins(cluster: FakeCluster, connect: Connect) -> None:
    client = connect(cluster.seeds, timeout_ms=20_000, batch_rows=20)
    flaky = iter([LEASE, None, None] * 100_000)
    cluster.nodes[0].refuse = lambda _p: next(flaky)
    rows = [(b"key%d" % (i % 30), b"v%d" % i) for i in range(600)]
    result = client.put_many(iter(rows), timeout_ms=20_000)
    assert result.applied == 600
    assert client.get_many([b"key%d" % i for i in range(30)]) == [
        b"v%d" % (570 + i) for i in range(30)
    ]


def test_put_many_bad_row_of_a_generator_is_raised_after_earlier_ones_settled(
    cluster: FakeCluster, connect: Connect
) -> None:
    client = connect(cluster.seeds, timeout_ms=20_000, batch_rows=100)

    def source() -> Iterator[tuple[bytes, bytes]]:
        yield from ((b"key%d" % i, b"v") for i in range(500))
        yield b"", b"v"

    with pytest.raises(koinon.InvalidArgumentError, match="row 500"):
        client.put_many(source())
    assert client.put(b"k", b"v") > 0


def test_put_many_when_the_client_is_closed_meanwhile_ends_and_tells_the_fate(
    cluster: FakeCluster,
) -> None:
    """It neither hangs nor says that nothing was applied, whenever the close comes."""
    for rows_before_close in (0, 3_000, 30_000):
        closing = koinon.connect(cluster.seeds)

        def items(client: Any, close_at: int) -> Iterator[tuple[bytes, bytes]]:
            for row in range(60_000):
                if row == close_at:
                    client.close()
                yield b"closing:%d" % row, b"v"

        with pytest.raises(koinon.KoinonError) as caught:
            closing.put_many(items(closing, rows_before_close))
        written = any(key.startswith(b"closing:") for key in cluster.store)
        assert caught.value.maybe_applied or not written
        for key in [key for key in cluster.store if key.startswith(b"closing:")]:
            del cluster.store[key]
