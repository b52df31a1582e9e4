"""Streams between two nodes over a data port, and pages over gRPC."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import grpc
import numpy as np
import pytest

from koinon_node.core.formats import records
from koinon_node.core.membership.assignment import ServedPartitions
from koinon_node.core.writes.write_decisions import Primaries
from koinon_node.grpc.replication_service import NODE_SERVER_OPTIONS, ReplicationService
from koinon_node.partition.graceful_drain import GracefulDrain
from koinon_node.partition.row_metrics import RowCounts
from koinon_node.ports import FollowerEnd, PeerLostError, PrimaryEnd
from koinon_node.replication.catch_up import checked_batch
from koinon_node.replication.group_sender import Batches, FollowerStream, GroupRows
from koinon_node.replication.peers import NodePeers
from koinon_node.resp.listener import RedisListener
from koinon_node.resp.service import RedisService
from koinon_node.state import NodeState
from koinon_node.storage.checksums import Checksums
from koinon_node.storage.sizes import SizeEstimates
from koinon_node.storage.store import Store
from koinon_node.store_config import StoreConfig
from koinon_proto.contract.errors import (
    InternalError,
    InvalidArgumentError,
    KoinonError,
    NotPrimaryError,
    ResourceExhaustedError,
    TableBehindError,
    UnavailableError,
    UnsupportedVersionError,
    WrongClusterError,
)
from koinon_proto.contract.keyspaces import DEFAULT
from koinon_proto.contract.table import NodeInfo, NodeNumber
from koinon_proto.security.authentication import open_gate
from koinon_proto.security.transport import Listening
from koinon_proto.v1 import replication_pb2
from tests.kit.addresses import free_address
from tests.kit.waiting import until
from tests.node.kit.groups import lone_writer
from tests.node.membership.test_agent_lease import table_of

Request = replication_pb2.FollowRequest
Response = replication_pb2.FollowResponse


class Primary:
    """A primary that serves followers; a test says how by ``how``."""

    def __init__(self) -> None:
        self.how: Callable[[PrimaryEnd], Awaitable[None]] = echo
        self.ends: list[PrimaryEnd] = []
        self.outcomes: list[BaseException | None] = []
        self.page: replication_pb2.RecordPage | KoinonError = replication_pb2.RecordPage()
        self.hold: asyncio.Event | None = None  # pages come once it is set
        self.reading = False

    async def serve(self, stream: PrimaryEnd) -> None:
        self.ends.append(stream)
        try:
            await self.how(stream)
        except BaseException as error:
            self.outcomes.append(error)
            raise
        self.outcomes.append(None)

    async def read_page(
        self, request: replication_pb2.ReadPageRequest
    ) -> replication_pb2.RecordPage:
        self.reading = True
        if self.hold is not None:
            await self.hold.wait()
        if isinstance(self.page, KoinonError):
            raise self.page
        return self.page

    async def read_keys(
        self, request: replication_pb2.ReadKeysRequest
    ) -> replication_pb2.RecordPage:
        return replication_pb2.RecordPage(keys=request.keys)


async def echo(stream: PrimaryEnd) -> None:
    """Answer every acknowledgement with a batch of its number."""
    assert (await stream.receive()).WhichOneof("kind") == "hello"
    while True:
        stream.send(batch((await stream.receive()).ack.number))


def batch(number: int, size: int = 0) -> Response:
    return Response(batch=replication_pb2.Batch(number=number, records=[bytes(size)]))


def ack(number: int) -> Request:
    return Request(ack=replication_pb2.BatchAck(number=number))


def hello(**changes: Any) -> Request:
    fields = {"protocol_version": 1, "cluster_id": "cluster-a", "node_number": 2, **changes}
    return Request(hello=replication_pb2.FollowHello(**fields))


def node_at(address: str, redis_address: str = "") -> NodeInfo:
    known = table_of(1, [1]).nodes[NodeNumber(1)]
    return replace(known, address=address, redis_address=redis_address)


class Pair:
    """A primary's servers and a follower's way to them."""

    def __init__(self, service: ReplicationService, primary: Primary) -> None:
        self.service = service
        self.primary = primary
        self.server = grpc.aio.server(options=NODE_SERVER_OPTIONS)
        nothing: Any = None
        redis = RedisService(MagicMock(), nothing, RowCounts(), GracefulDrain(), service, nothing)
        self.listener = RedisListener(redis, Listening(), open_gate())
        self.peers = NodePeers()

    async def start(self) -> None:
        self.service.add_to(self.server)
        port = self.server.add_insecure_port("127.0.0.1:0")
        await self.server.start()
        data_port = await self.listener.start("127.0.0.1:0", DEFAULT)
        self.node = node_at(f"127.0.0.1:{port}", f"127.0.0.1:{data_port}")

    async def stop(self) -> None:
        await self.listener.stop(0)
        await self.server.stop(0)

    async def follow(self, first: Request | None = None) -> FollowerEnd:
        stream = await self.peers.follow(self.node)
        stream.send(first or hello())
        return stream


@contextlib.asynccontextmanager
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    state = NodeState("n1")
    state.served = ServedPartitions(table=table_of(1, [1, 2]), node_number=NodeNumber(1))
    primary = Primary()
    with Store(StoreConfig(directory=tmp_path / "n1")) as store:
        played: Any = primary
        checksums = Checksums(store, lone_writer(store, lambda _: None))
        sequences = np.zeros(16, np.uint64)
        primaries = Primaries(sequences, sequences)
        service = ReplicationService(played, played, state, checksums, SizeEstimates(), primaries)
        both = Pair(service, primary)
        await both.start()
        try:
            yield both
        finally:
            service.close()
            await both.peers.close()
            await both.stop()


Use = Callable[[Pair], Awaitable[None]]


def with_pair(tmp_path: Path, use: Use) -> None:
    async def run() -> None:
        async with asyncio.timeout(60), pair(tmp_path) as both:
            await use(both)

    asyncio.run(run())


async def error_on(stream: FollowerEnd) -> KoinonError:
    """Return what ends the stream."""
    while True:
        try:
            await stream.receive()
        except KoinonError as error:
            return error


def test_stream_carries_messages_both_ways_in_order(tmp_path: Path) -> None:
    async def use(both: Pair) -> None:
        stream = await both.follow()
        for number in range(1, 501):
            stream.send(ack(number))
        numbers = [(await stream.receive()).batch.number for _ in range(500)]
        assert numbers == list(range(1, 501))
        await until(lambda: stream.queued_bytes == 0, "all is with the network")

    with_pair(tmp_path, use)


def test_streams_of_followers_count_while_they_last(tmp_path: Path) -> None:
    async def use(both: Pair) -> None:
        stream = await both.follow()
        stream.send(ack(1))
        await stream.receive()
        assert both.service.streams == 1
        stream.close()
        await until(lambda: not both.service.streams, "it counts no more")

    with_pair(tmp_path, use)


def test_stream_closed_by_the_primary_ends_with_its_typed_error_for_ever(tmp_path: Path) -> None:
    error = NotPrimaryError(
        partition_id=3, primary="n2", primary_address="h:1", primary_epoch=4, table_version=5
    )

    async def refuse(stream: PrimaryEnd) -> None:
        await stream.receive()
        stream.close(error)
        with pytest.raises(PeerLostError):
            stream.send(batch(1))
        with pytest.raises(PeerLostError):
            await stream.receive()

    async def use(both: Pair) -> None:
        both.primary.how = refuse
        stream = await both.follow()
        for _ in range(2):
            found = await error_on(stream)
            assert isinstance(found, NotPrimaryError)
            assert (found.partition_id, found.primary_address) == (3, "h:1")
        with pytest.raises(PeerLostError):
            stream.send(ack(1))
        await until(lambda: both.primary.outcomes == [None], "the server's side ends")

    with_pair(tmp_path, use)


@pytest.mark.parametrize(
    ("raised", "seen"),
    [
        (None, PeerLostError),
        (PeerLostError(reason="enough"), PeerLostError),
        (ResourceExhaustedError(resource="bytes", limit=1), ResourceExhaustedError),
        (ZeroDivisionError("oops"), InternalError),
    ],
)
def test_stream_ends_when_who_serves_it_ends(
    tmp_path: Path, raised: Exception | None, seen: type[KoinonError]
) -> None:
    async def end(stream: PrimaryEnd) -> None:
        if raised is not None:
            raise raised

    async def use(both: Pair) -> None:
        both.primary.how = end
        assert type(await error_on(await both.follow())) is seen

    with_pair(tmp_path, use)


def close(stream: Any) -> None:
    stream.close()


def cut(stream: Any) -> None:
    stream._transport.abort()


@pytest.mark.parametrize("end", [close, cut])
def test_stream_closed_or_cut_by_the_follower_is_lost_for_the_primary(
    tmp_path: Path, end: Callable[[Any], None]
) -> None:
    async def use(both: Pair) -> None:
        stream = await both.follow()
        stream.send(ack(1))
        assert (await stream.receive()).batch.number == 1
        end(stream)
        await until(lambda: both.primary.outcomes, "the primary hears of it")
        assert isinstance(both.primary.outcomes[0], PeerLostError)
        assert isinstance(await error_on(stream), PeerLostError)
        with pytest.raises(PeerLostError):
            both.primary.ends[-1].send(batch(2))

    with_pair(tmp_path, use)


def test_receive_given_up_loses_no_message(tmp_path: Path) -> None:
    async def use(both: Pair) -> None:
        stream = await both.follow()
        for number in range(1, 50):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.001):
                    await stream.receive()
                    raise AssertionError("nothing was sent")
            stream.send(ack(number))
            assert (await stream.receive()).batch.number == number

    with_pair(tmp_path, use)


def test_stream_of_a_server_that_stops_or_never_was_is_lost(tmp_path: Path) -> None:
    async def use(both: Pair) -> None:
        stream = await both.follow()
        stream.send(ack(1))
        await stream.receive()
        both.service.close()
        assert isinstance(await error_on(stream), UnavailableError)
        stream = await both.follow()
        assert isinstance(await error_on(stream), UnavailableError)
        await both.stop()
        for node in (both.node, node_at(free_address(), free_address())):
            with pytest.raises(PeerLostError):
                await both.peers.follow(node)
            with pytest.raises(PeerLostError):
                await both.peers.read_page(node, replication_pb2.ReadPageRequest())

    with_pair(tmp_path, use)


def test_stream_that_ends_while_its_first_message_is_written_says_why(tmp_path: Path) -> None:
    async def answer_and_end(stream: PrimaryEnd) -> None:
        stream.send(batch(1))
        await asyncio.sleep(0)  # it is being written
        raise UnavailableError(reason="the node is stopping")

    async def use(both: Pair) -> None:
        both.primary.how = answer_and_end
        for _ in range(20):
            async with asyncio.timeout(10):
                assert isinstance(await error_on(await both.follow()), UnavailableError)

    with_pair(tmp_path, use)


@pytest.mark.parametrize(
    ("first", "refusal"),
    [
        (hello(cluster_id="cluster-b"), WrongClusterError),
        (hello(protocol_version=2), UnsupportedVersionError),
        (ack(1), InvalidArgumentError),
    ],
)
def test_stream_with_a_bad_hello_is_refused(
    tmp_path: Path, first: Request, refusal: type[KoinonError]
) -> None:
    async def use(both: Pair) -> None:
        stream = await both.follow(first)
        assert type(await error_on(stream)) is refusal
        assert both.primary.ends == []

    with_pair(tmp_path, use)


def test_slow_follower_shows_in_queued_bytes_and_gets_everything(tmp_path: Path) -> None:
    sizes: list[int] = []

    async def flood(stream: PrimaryEnd) -> None:
        await stream.receive()
        for number in range(1, 41):
            stream.send(batch(number, size=1024 * 1024))
        sizes.append(stream.queued_bytes)
        assert (await stream.receive()).ack.number == 40
        sizes.append(stream.queued_bytes)

    async def use(both: Pair) -> None:
        both.primary.how = flood
        stream = await both.follow()
        await until(lambda: sizes, "all is queued")
        assert sizes[0] > 30 * 1024 * 1024  # the kernel may have some already
        for number in range(1, 41):
            assert (await stream.receive()).batch.number == number
        stream.send(ack(40))
        await error_on(stream)
        assert sizes[1] == 0

    with_pair(tmp_path, use)


def test_batches_come_whole_however_large_their_records(tmp_path: Path) -> None:
    """Small records are within their message, large ones are sent beside it."""
    sizes = (0, 10, 1_000, 70_000)

    async def flood(stream: PrimaryEnd) -> None:
        await stream.receive()
        end = FollowerStream(stream, NodeNumber(2), 1, 0, bytes_max=1 << 30)
        for number, size in enumerate(sizes, 1):
            end.send_batch(Batches(group_of(number, size)), np.array([False, True]))
        assert (await stream.receive()).ack.number == len(sizes)

    async def use(both: Pair) -> None:
        both.primary.how = flood
        stream = await both.follow()
        for number, size in enumerate(sizes, 1):
            group, found = group_of(number, size), (await stream.receive()).batch
            assert (found.number, list(found.partition_ids)) == (number, [5])
            assert checked_batch(found, number - 1).records == group.records[1::2]
            assert list(found.keys) == group.keys[1::2]
        stream.send(ack(len(sizes)))
        await error_on(stream)

    with_pair(tmp_path, use)


def group_of(number: int, size: int) -> GroupRows:
    """Return a group of 40 rows in partitions 4 and 5."""
    ids = np.array([4, 5] * 20, np.uint32)
    keys = [p.to_bytes(2, "big") + b"%d" % row for row, p in enumerate(ids.tolist())]
    epochs, previous, lasts = np.array([[7, 7], [1, 1], [2, 2]], np.uint64)
    rows = [records.encode_record(2, b"%d" % row * size) for row in range(len(ids))]
    return GroupRows(number, ids[:2], epochs, previous, lasts, keys, rows, ids, {}, 0.0)


def test_pages_come_with_typed_errors_and_only_within_the_cluster(tmp_path: Path) -> None:
    async def use(both: Pair) -> None:
        both.primary.page = replication_pb2.RecordPage(keys=[b"a"], records=[b"r"], bound=7)
        request = replication_pb2.ReadPageRequest(cluster_id="cluster-a")
        assert await both.peers.read_page(both.node, request) == both.primary.page
        both.primary.page = TableBehindError(table_version=1, required_version=2)
        with pytest.raises(TableBehindError):
            await both.peers.read_page(both.node, request)
        keys = await both.peers.read_keys(
            both.node, replication_pb2.ReadKeysRequest(cluster_id="cluster-a", keys=[b"x"])
        )
        assert list(keys.keys) == [b"x"]
        with pytest.raises(WrongClusterError):
            await both.peers.read_page(
                both.node, replication_pb2.ReadPageRequest(cluster_id="cluster-b")
            )

    with_pair(tmp_path, use)


def test_channel_to_an_address_that_left_the_table_is_closed(tmp_path: Path) -> None:
    async def use(both: Pair) -> None:
        held = asyncio.Event()
        both.primary.hold = held
        request = replication_pb2.ReadPageRequest(cluster_id="cluster-a")
        reading = asyncio.ensure_future(both.peers.read_page(both.node, request))
        table = table_of(1, [1, 2])
        nodes = {NodeNumber(1): both.node, NodeNumber(2): table.nodes[NodeNumber(2)]}
        both.peers.on_table(replace(table, nodes=nodes))
        await until(lambda: both.primary.reading, "the call has come")
        both.peers.on_table(table)
        with pytest.raises(PeerLostError):
            await reading
        held.set()

    with_pair(tmp_path, use)


def test_stream_over_a_connection_that_went_silent_is_lost_in_seconds(tmp_path: Path) -> None:
    """As after a cable was pulled: nothing is refused, nothing arrives."""

    async def use(both: Pair) -> None:
        open_way = asyncio.Event()
        open_way.set()
        port = int(both.node.redis_address.rpartition(":")[2])

        async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while data := await reader.read(65536):
                await open_way.wait()
                writer.write(data)

        async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there, back = await asyncio.open_connection("127.0.0.1", port)
            with contextlib.suppress(ConnectionError):
                await asyncio.gather(carry(reader, back), carry(there, writer))

        server = await asyncio.start_server(proxy, "127.0.0.1", 0)
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        both.node = replace(both.node, redis_address=address)
        stream = await both.follow()
        stream.send(ack(1))
        await stream.receive()
        open_way.clear()
        began = asyncio.get_running_loop().time()
        assert isinstance(await error_on(stream), PeerLostError)
        assert asyncio.get_running_loop().time() - began < 40
        open_way.set()
        server.close()

    with_pair(tmp_path, use)
