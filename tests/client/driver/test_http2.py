"""The channel that does without gRPC's core, against a server that has it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, RequestReceived

import koinon
from koinon.driver import forks
from koinon.driver.rpc import http2
from koinon_proto.contract.errors import PartitionOfflineError
from koinon_proto.server import rpc
from koinon_proto.v1 import kv_pb2, kv_pb2_grpc
from tests.client.kit.fake_cluster import FakeCluster
from tests.kit.waiting import POLL_S, wait_until

LARGE = bytes(200_000)


async def until_ready(channel: http2.Channel) -> None:
    while (state := channel.get_state(try_to_connect=True)) is not http2.State.READY:
        if state is http2.State.TRANSIENT_FAILURE:
            await asyncio.sleep(POLL_S)  # nothing tells when it may be tried again
        else:
            await channel.wait_for_state_change(state)


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    made = FakeCluster(nodes=2)
    yield made
    made.close()


@pytest.fixture
def client(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[koinon.Client]:
    """A client that works as one of a forked process."""
    monkeypatch.setattr(forks, "core_is_lost", lambda: True)
    with koinon.connect(cluster.seeds, timeout_ms=20_000) as connected:
        yield connected


def test_client_without_the_core_does_everything(client: koinon.Client) -> None:
    rows = {b"k%03d" % n: LARGE[: n * 100] for n in range(300)}
    assert client.put_many(rows).ok
    assert client.get_many(list(rows)) == list(rows.values())
    assert {entry.key: entry.value for entry in client.scan(prefix=b"k")} == rows
    assert client.put(b"large", LARGE * 4)
    assert client.get(b"large") == LARGE * 4
    assert client.increment(b"counter", 7) == 7
    assert client.delete(b"k001")
    assert not client.exists(b"k001")
    assert client.cluster_status().is_leader


def test_typed_error_of_a_node_arrives_whole(cluster: FakeCluster, client: koinon.Client) -> None:
    async def refuse(_method: str, _request: Any) -> None:
        raise koinon.InvalidArgumentError(field="größe", reason="zu groß", limit=3, actual=4)

    for node in cluster.nodes:
        node.before = refuse
    with pytest.raises(koinon.InvalidArgumentError, match="größe: zu groß") as caught:
        client.get(b"k")
    assert (caught.value.limit, caught.value.actual) == (3, 4)


def test_client_without_the_core_follows_a_node_that_restarts(
    cluster: FakeCluster, client: koinon.Client
) -> None:
    client.put_many({b"k%d" % n: b"v" for n in range(50)})
    for node in cluster.nodes:
        cluster.kill(node)
        cluster.revive(node)
    assert client.get_many([b"k%d" % n for n in range(50)]) == [b"v"] * 50


def test_call_without_an_answer_ends_at_its_deadline_and_tells_the_server(
    cluster: FakeCluster, client: koinon.Client
) -> None:
    gate = cluster.gate()
    ended = asyncio.Event()

    async def hold(method: str, request: Any) -> None:
        try:
            await gate(method, request)
        except asyncio.CancelledError:
            ended.set()
            raise

    client.put(b"k", b"v")  # the connection stands: what follows is sent at once
    for node in cluster.nodes:
        node.before = hold
    with pytest.raises(koinon.UnknownFateError, match=r"no answer within|deadline_exceeded"):
        client.put(b"k", b"v", timeout_ms=1_000)
    wait_until(ended.is_set, "the call is given up at the server, too")
    client.close()  # with nothing under way any more


async def test_calls_beyond_what_a_server_takes_wait_for_room(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http2, "_CALLS_MAX", 3)
    address = cluster.nodes[0].address

    channel = http2.Channel(address, connect_s_max=10)
    await until_ready(channel)
    stub: Any = kv_pb2_grpc.KeyValueStub(channel)
    calls = [stub.BatchGet(kv_pb2.BatchGetRequest(), timeout=60) for _ in range(20)]
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(one, kv_pb2.BatchGetResponse) for one in outcomes), outcomes
    await channel.close()
    assert channel.get_state() is http2.State.SHUTDOWN
    with pytest.raises(grpc.aio.UsageError):
        await stub.BatchGet(kv_pb2.BatchGetRequest(), timeout=60)


async def test_channel_to_nobody_fails_and_tries_again(cluster: FakeCluster) -> None:
    node = cluster.nodes[0]
    cluster.kill(node)

    async def settled(channel: http2.Channel) -> grpc.ChannelConnectivity:
        while (state := channel.get_state(try_to_connect=True)) is http2.State.CONNECTING:
            await channel.wait_for_state_change(state)
        return state

    channel = http2.Channel(node.address, connect_s_max=10)
    assert await settled(channel) is http2.State.TRANSIENT_FAILURE
    await asyncio.to_thread(cluster.revive, node)
    async with asyncio.timeout(60):
        await until_ready(channel)
    await channel.close()


async def test_error_carries_what_rpc_reads_of_it(cluster: FakeCluster) -> None:
    node = cluster.nodes[0]

    async def refuse(_method: str, _request: Any) -> None:
        raise PartitionOfflineError(partition_id=3, reason="for a test")

    node.before = refuse

    channel = http2.Channel(node.address, connect_s_max=10)
    await until_ready(channel)
    stub: Any = kv_pb2_grpc.KeyValueStub(channel)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Scan(kv_pb2.ScanRequest(), timeout=60)
    assert isinstance(rpc.fate_of(caught.value), PartitionOfflineError)
    await channel.close()


class LeavingServer(asyncio.Protocol):
    """Takes no call after the first of its first connection, says so when the second comes, and
    answers the first only then. Later connections answer every call. Made once a connection.
    """

    connections = 0

    def __init__(self) -> None:
        type(self).connections += 1
        self._leaves = type(self).connections == 1
        self._http = H2Connection(config=H2Configuration(client_side=False))
        self._streams: list[int] = []

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._http.initiate_connection()
        transport.write(self._http.data_to_send())

    def data_received(self, data: bytes) -> None:
        for event in self._http.receive_data(data):
            if isinstance(event, DataReceived):
                self._http.acknowledge_received_data(
                    event.flow_controlled_length or 0, event.stream_id or 0
                )
            if isinstance(event, RequestReceived):
                self._streams.append(event.stream_id or 0)
        self._transport.write(self._http.data_to_send())
        if not self._leaves:
            while self._streams:
                self._answer(self._streams.pop())
        elif len(self._streams) == 2:
            first = self._streams[0]
            self._transport.write(
                bytes((0, 0, 8, 7, 0, 0, 0, 0, 0)) + first.to_bytes(4, "big") + bytes(4)
            )
            self._answer(first)

    def _answer(self, stream: int) -> None:
        status = [(":status", "200"), ("content-type", "application/grpc")]
        self._http.send_headers(stream, status)
        self._http.send_data(stream, bytes(5))  # an empty message
        self._http.send_headers(stream, [("grpc-status", "0")], end_stream=True)
        self._transport.write(self._http.data_to_send())


async def test_goaway_ends_no_call_that_the_server_took_and_the_others_are_sent_again() -> None:
    class Server(LeavingServer):
        pass

    server = await asyncio.get_running_loop().create_server(Server, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    channel = http2.Channel(f"127.0.0.1:{port}", connect_s_max=10)
    await until_ready(channel)
    stub: Any = kv_pb2_grpc.KeyValueStub(channel)

    def call() -> Any:
        return stub.BatchWrite(kv_pb2.BatchWriteRequest(), timeout=60)

    answers: Any = await asyncio.gather(call(), call(), return_exceptions=True)
    taken, refused = answers
    assert isinstance(taken, kv_pb2.BatchWriteResponse), taken
    assert isinstance(refused, grpc.aio.UsageError), "never sent, so it may be sent again"
    await until_ready(channel)
    assert isinstance(await call(), kv_pb2.BatchWriteResponse)
    assert Server.connections == 2
    await channel.close()
    server.close()


def test_client_without_the_core_goes_on_where_servers_close_connections_now_and_then(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forks, "core_is_lost", lambda: True)
    closed = 0
    leave = http2._Connection._leave

    def counted(connection: http2._Connection, last_stream_id: int) -> None:
        nonlocal closed
        closed += 1
        leave(connection, last_stream_id)

    monkeypatch.setattr(http2._Connection, "_leave", counted)
    aging = (*rpc.SERVER_OPTIONS, ("grpc.max_connection_age_ms", 200))
    monkeypatch.setattr(rpc, "SERVER_OPTIONS", aging)
    for node in cluster.nodes:
        cluster.kill(node)
        cluster.revive(node)
    with koinon.connect(cluster.seeds, timeout_ms=20_000) as client:
        number = 0
        while closed < 6:
            number += 1
            assert client.put(b"k%d" % number, b"v")
        assert client.get(b"k%d" % number) == b"v"
