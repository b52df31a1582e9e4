"""A connection that is given up takes along what has not arrived: no write comes after its end."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

import koinon
from koinon.core import resp
from koinon.core.batching import Kind, PendingOperation
from koinon.core.routing import Router, Routing
from koinon.driver.resp.connection import Connection
from koinon.driver.resp.pool import Pool
from koinon_proto.contract.errors import UnknownFateError
from koinon_proto.security.transport import PLAIN
from tests.client.kit.fake_cluster import FakeCluster
from tests.client.kit.helpers import ONLY_RESP, keys_of
from tests.client.kit.tables import update

VALUE = bytes(200_000)  # more than the server's kernel takes unread, and less than the client's


class Unread:
    """A server that lets a client in, and reads what it sends only once it is told to."""

    def __init__(self) -> None:
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen()
        self.address = self._listener.getsockname()
        self._may_read = threading.Event()
        self._received = 0
        self._was_reset = False
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        peer, _ = self._listener.accept()
        with peer:
            peer.recv(4_096)
            peer.sendall(b"$2\r\nn1\r\n")
            self._may_read.wait()
            try:
                while data := peer.recv(1 << 16):
                    self._received += len(data)
            except ConnectionResetError:
                self._was_reset = True

    def read(self) -> tuple[int, bool]:
        """Return how many bytes have come, and whether a reset has ended them."""
        self._may_read.set()
        self._thread.join(60)
        return self._received, self._was_reset

    def close(self) -> None:
        self._may_read.set()
        self._listener.close()


@pytest.fixture
def server() -> Iterator[Unread]:
    made = Unread()
    yield made
    made.close()


def routing() -> Routing:
    router = Router()
    router.on_update(update())
    assert router.routing is not None
    return router.routing


def put(timeout_s: float) -> PendingOperation:
    deadline = time.monotonic() + timeout_s
    return PendingOperation(
        Kind.PUT, b"key", 0, deadline=deadline, timeout_ms=round(timeout_s * 1000), value=VALUE
    )


def by_a_thread(server: Unread) -> None:
    pool = Pool(
        "n1",
        (socket.AF_INET, server.address),
        resp.hello("one"),
        lambda: None,
        PLAIN,
        sockets_max=1,
    )
    single = put(0.5)
    assert pool.send(single, routing()) is None
    assert isinstance(single.error, UnknownFateError)


def by_the_loop(server: Unread) -> None:
    class Operations:
        now = staticmethod(time.monotonic)
        routing = staticmethod(routing)

        def watch_answers(self) -> None: ...

        def send_again(self, singles: Any) -> None: ...

        def settle_failed(self, failed: Any) -> None: ...

        def on_leaving(self) -> None: ...

        def on_lost(self, connection: Any) -> None: ...

    async def run() -> None:
        operations = cast(Any, Operations())
        connection: Connection[PendingOperation]
        connection = Connection("n1", resp.hello("one"), operations, operations)
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: connection, *server.address)
        await connection.opened
        single = put(60.0)
        connection.add(single)
        async with asyncio.timeout(60):
            while not single.sent:  # noqa: ASYNC110 (of a test)
                await asyncio.sleep(0)
        connection.lose("given up")
        async with asyncio.timeout(60):
            await connection.lost.wait()

    asyncio.run(run())


@pytest.mark.parametrize("give_up", [by_a_thread, by_the_loop])
def test_write_that_has_not_arrived_when_its_connection_is_given_up_never_does(
    server: Unread, give_up: Callable[[Unread], None]
) -> None:
    give_up(server)
    received, was_reset = server.read()
    assert was_reset
    assert received < len(VALUE)


async def test_write_that_has_had_its_time_arrives_no_more_once_all_that_was_sent_beside_it_has(
    server: Unread,
) -> None:
    """The connection of the event loop's is shared: it ends by the last deadline of what waits."""

    class Owner:
        now = staticmethod(time.monotonic)
        routing = staticmethod(routing)

        def __init__(self) -> None:
            self.failed: list[Any] = []

        def watch_answers(self) -> None: ...

        def send_again(self, singles: Any) -> None: ...

        def settle_failed(self, failed: Any) -> None:
            self.failed += failed

        def on_leaving(self) -> None: ...

        def on_lost(self, connection: Any) -> None: ...

    owner = Owner()

    connection: Connection[PendingOperation]
    connection = Connection("n1", resp.hello("one"), cast(Any, owner), cast(Any, owner))
    await asyncio.get_running_loop().create_connection(lambda: connection, *server.address)
    await connection.opened
    first, second = put(0.2), put(0.6)
    connection.add(first)
    connection.add(second)
    async with asyncio.timeout(60):
        while not second.sent:  # noqa: ASYNC110 (of a test)
            await asyncio.sleep(0)
        assert connection.waits_for(first)
        connection.retire()
        assert not connection.alive, "nothing more is sent there"
        first.expire()
        await connection.lost.wait()
    assert time.monotonic() >= second.deadline - 0.01
    assert [single for single, _ in owner.failed] == [second]
    received, was_reset = server.read()
    assert was_reset
    assert received < len(VALUE)


@ONLY_RESP
async def test_write_after_one_that_had_no_answer_goes_over_another_connection(
    cluster: FakeCluster,
) -> None:
    node = cluster.nodes[0]
    key = keys_of(cluster, node)[0]
    async with await koinon.aio.connect(cluster.seeds, timeout_ms=60_000) as client:
        await client.put(key, b"before")
        node.before = gate = cluster.gate()
        with pytest.raises(UnknownFateError):
            await client.put(key, b"late", timeout_ms=200)
        node.before = None
        await client.put(key, b"after")  # a node answers in order what one connection brings
        gate.open()
    assert cluster.applied[:2] == [(key, b"before"), (key, b"after")]
