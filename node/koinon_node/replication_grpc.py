"""Between nodes, over gRPC: a follower's way to primaries, and the service that a primary offers.

Streams hold the contract of ports.Stream over grpc.aio's calls. What is sent is serialised at once
and written by one task a stream, so that order is kept and the network's own flow control shows in
``queued_bytes``; what may queue up is the caller's to bound. (Measured: a batch of 1,000 rows takes
330 us to build and 35 to serialise, so that nothing is gained by sharing bytes between followers.)

A hung or unreachable peer is noticed by those who wait for it long before a connection is given up:
a primary by missing acknowledgements, a follower by a table that names another primary. Keep-alive
is there for connections that are cut in silence: until one is given up, a follower would wait on it
after the network has healed, for as long as TCP's back-off takes.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

import grpc
from google.protobuf.message import Message

from koinon_node.core.write_decisions import Primaries
from koinon_node.ports import FollowerEnd, PeerLostError
from koinon_node.primary.follower_streams import Followers
from koinon_node.primary.page_reader import PageReader
from koinon_node.state import NodeState
from koinon_node.storage.checksums import Checksums
from koinon_node.storage.sizes import SizeEstimates
from koinon_proto.contract.bounds import check, check_reply
from koinon_proto.contract.errors import (
    InternalError,
    InvalidArgumentError,
    KoinonError,
    PermissionDeniedError,
    UnavailableError,
)
from koinon_proto.contract.table import NodeInfo, NodeNumber, Table
from koinon_proto.contract.versions import check_node_protocol
from koinon_proto.security.authorization import caller
from koinon_proto.security.names import node_name
from koinon_proto.security.transport import PLAIN, Dialing
from koinon_proto.server.admission import Places
from koinon_proto.server.rpc import (
    CHANNEL_OPTIONS,
    SERVER_OPTIONS,
    TakesServices,
    bounded,
    error_of,
    status_text,
    typed_errors,
    typed_stream,
)
from koinon_proto.v1 import replication_pb2, replication_pb2_grpc

log = logging.getLogger(__name__)

Out = TypeVar("Out", bound=Message)
In = TypeVar("In")

SERVICE = "koinon.v1.Replication"
CALLS_MAX = 1_024
STREAMS_MAX = 1_024  # one a follower node is what there should be
_HELLO_TIMEOUT_S = 10.0
_PAGE_TIMEOUT_S = 10.0
_RETIRED_CHANNEL_S = 30.0  # what is under way may end by itself; streams are opened anew

_KEEPALIVE_MS = 2_000
PEER_OPTIONS = (
    *(option for option in CHANNEL_OPTIONS if not option[0].startswith("grpc.keepalive")),
    ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", _KEEPALIVE_MS),
    ("grpc.http2.ping_timeout_ms", _KEEPALIVE_MS),  # 60 s otherwise, whatever the one above says
    ("grpc.http2.max_pings_without_data", 0),  # or they end after two on a stream that is silent
)
_PING_POLICY = "grpc.http2.min_ping_interval_without_data_ms"
NODE_SERVER_OPTIONS = (
    *(option for option in SERVER_OPTIONS if option[0] != _PING_POLICY),
    (_PING_POLICY, _KEEPALIVE_MS // 2),  # what comes more often is taken for an attack
)


class _Reading(Generic[In]):
    """Reads messages one by one. A cancelled ``next`` loses none: the read goes on for the next
    caller (cancelling a call's own read would cancel the call).
    """

    def __init__(self, read: Callable[[], Coroutine[Any, Any, In]]) -> None:
        self._read = read
        self._task: asyncio.Task[In] | None = None

    async def next(self) -> In:
        if self._task is None:
            self._task = asyncio.ensure_future(self._read())
            self._task.add_done_callback(_retrieved)
        message = await asyncio.shield(self._task)
        self._task = None
        return message

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()


class _Outgoing:
    """Serialised messages on their way to the network, in order, written by ``pump``."""

    def __init__(self) -> None:
        self._messages: deque[bytes] = deque()
        self._arrived = asyncio.Event()
        self.size = 0

    def put(self, message: bytes) -> None:
        self._messages.append(message)
        self.size += len(message)
        self._arrived.set()

    async def pump(self, write: Callable[[bytes], Coroutine[Any, Any, None]]) -> None:
        """Write what is put, until cancelled or until a write fails."""
        while True:
            while self._messages:
                message = self._messages[0]
                await write(message)
                self._messages.popleft()
                self.size -= len(message)
            self._arrived.clear()
            await self._arrived.wait()


class _End(Generic[Out, In]):
    """The common part of both ends of a stream."""

    def __init__(self, read: Callable[[], Coroutine[Any, Any, In]]) -> None:
        self._outgoing = _Outgoing()
        self._reading = _Reading(read)
        self._lost: KoinonError | None = None  # what ``receive`` raises, for ever
        self._sending_lost: PeerLostError | None = None

    @property
    def queued_bytes(self) -> int:
        return self._outgoing.size

    def send(self, message: Out) -> None:
        if self._sending_lost is not None or self._lost is not None:
            raise self._sending_lost or _lost(str(self._lost))
        self._outgoing.put(message.SerializeToString())

    async def receive(self) -> In:
        if self._lost is not None:
            raise self._lost
        try:
            return await self._reading.next()
        except KoinonError as error:
            self._lost = self._lost or error
            raise self._lost from None
        except asyncio.CancelledError:
            if self._lost is not None:  # the read was given up, not the caller
                raise self._lost from None
            raise


class _FollowerStream(_End[replication_pb2.FollowRequest, replication_pb2.FollowResponse]):
    """The caller's end."""

    def __init__(self, call: Any, address: str) -> None:
        super().__init__(self._read)
        self._call = call
        self._address = address
        self._pump = asyncio.ensure_future(self._outgoing.pump(call.write))
        self._pump.add_done_callback(self._pumped)

    async def _read(self) -> replication_pb2.FollowResponse:
        try:
            message: Any = await self._call.read()
        except grpc.RpcError as error:
            raise _error_of(error, self._address) from None
        except asyncio.CancelledError:
            raise _lost(f"the stream to {self._address} was closed") from None
        if message is grpc.aio.EOF:  # any other status than OK has been raised
            raise _lost(f"{self._address} ended the stream")
        read: replication_pb2.FollowResponse = message
        check_reply(read)
        return read

    def _pumped(self, pump: asyncio.Future[None]) -> None:
        """The writes have ended: so has the call, and ``receive`` will say why."""
        _retrieved(pump)
        self._sending_lost = _lost(f"the stream to {self._address} has ended")

    def close(self, error: KoinonError | None = None) -> None:
        self._lost = self._lost or _lost("closed here")
        self._pump.cancel()
        self._call.cancel()


class GrpcPeers:
    """ports.Peers: one channel per address, closed when no node of the table has it any more."""

    def __init__(self, dialing: Dialing = PLAIN) -> None:
        self._dialing = dialing
        self._channels: dict[str, tuple[int, grpc.aio.Channel]] = {}  # with the identity's version
        self._closing: set[asyncio.Task[None]] = set()

    def follow(self, node: NodeInfo) -> FollowerEnd:
        """See ports.Peers."""
        call: Any = self._channel(node).stream_stream(
            f"/{SERVICE}/Follow",
            request_serializer=None,  # ends serialise what they send
            response_deserializer=replication_pb2.FollowResponse.FromString,
        )()
        return _FollowerStream(call, node.address)

    async def read_page(
        self, node: NodeInfo, request: replication_pb2.ReadPageRequest
    ) -> replication_pb2.RecordPage:
        """See ports.Peers."""
        return await self._page(node, lambda stub: stub.ReadPage(request, timeout=_PAGE_TIMEOUT_S))

    async def read_keys(
        self, node: NodeInfo, request: replication_pb2.ReadKeysRequest
    ) -> replication_pb2.RecordPage:
        """See ports.Peers."""
        return await self._page(node, lambda stub: stub.ReadKeys(request, timeout=_PAGE_TIMEOUT_S))

    def on_table(self, table: Table) -> None:
        """Close the channels to nodes that have left the table."""
        known = {node.address for node in table.nodes.values()}
        for address in [a for a in self._channels if a not in known]:
            self._close_later(self._channels.pop(address)[1], 0.0)

    async def close(self) -> None:
        for _, channel in self._channels.values():
            await channel.close()
        self._channels.clear()

    async def _page(self, node: NodeInfo, ask: Callable[[Any], Any]) -> replication_pb2.RecordPage:
        channel = self._channel(node)
        try:
            page: replication_pb2.RecordPage = await ask(
                replication_pb2_grpc.ReplicationStub(channel)
            )
            return page
        except grpc.RpcError as error:
            raise _error_of(error, node.address) from None

    def _channel(self, node: NodeInfo) -> grpc.aio.Channel:
        """Return the channel to the node; a new one once this node's identity has changed, so that
        what connects again does so by the new one.
        """
        version, address = self._dialing.version, node.address
        known = self._channels.get(address)
        if known is None or known[0] != version:
            name = node_name(node.node_id)
            channel = self._dialing.aio_channel(address, name, PEER_OPTIONS)
            self._channels[address] = version, channel
            if known is not None:
                self._close_later(known[1], _RETIRED_CHANNEL_S)
            return channel
        return known[1]

    def _close_later(self, channel: grpc.aio.Channel, grace_s: float) -> None:
        closing = asyncio.ensure_future(channel.close(grace_s))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)


# --- the primary's side ------------------------------------------------------------------------


class _PrimaryStream(_End[replication_pb2.FollowResponse, replication_pb2.FollowRequest]):
    """The handler's end. ``run`` is the handler; who serves has a task of its own, because a lost
    connection cancels the handler, and is to be told by PeerLostError.
    """

    def __init__(self, context: Any) -> None:
        super().__init__(self._read)
        self._context = context
        self._first: replication_pb2.FollowRequest | None = None
        self._ended = asyncio.Event()
        self._why: KoinonError | None = None

    async def hello(self, check: Callable[[replication_pb2.FollowHello], None]) -> None:
        """Wait for the first message and check it; ``receive`` gives it out again."""
        try:
            async with asyncio.timeout(_HELLO_TIMEOUT_S):
                first = await super().receive()
        except TimeoutError:
            raise UnavailableError(reason="no hello came in time") from None
        if first.WhichOneof("kind") != "hello":
            raise InvalidArgumentError(field="hello", reason="must be the first message")
        check(first.hello)
        self._first = first

    async def receive(self) -> replication_pb2.FollowRequest:
        if self._first is not None and self._lost is None:
            first, self._first = self._first, None
            return first
        return await super().receive()

    async def run(self, serving: asyncio.Future[None]) -> None:
        """Carry messages until either side ends the stream; raise why, if it was said."""
        pump = asyncio.ensure_future(self._outgoing.pump(self._context.write))
        pump.add_done_callback(self._pumped)
        serving.add_done_callback(self._served)
        try:
            await self._ended.wait()
        finally:
            pump.cancel()
            self._lose("the follower's stream was lost")
        if self._why is not None:
            raise self._why

    def close(self, error: KoinonError | None = None) -> None:
        if not self._ended.is_set():
            self._why = error
        self._lose("closed here")

    async def _read(self) -> replication_pb2.FollowRequest:
        try:
            message: Any = await self._context.read()
        except (grpc.RpcError, grpc.aio.BaseError, asyncio.CancelledError):
            raise _lost("the follower's stream was lost") from None
        if message is grpc.aio.EOF:
            raise _lost("the follower ended the stream")
        read: replication_pb2.FollowRequest = message
        check(read)
        return read

    def _lose(self, reason: str) -> None:
        self._lost = self._lost or _lost(reason)
        self._ended.set()
        self._reading.cancel()

    def _pumped(self, pump: asyncio.Future[None]) -> None:
        _retrieved(pump)
        self._lose("the follower's stream was lost")

    def _served(self, serving: asyncio.Future[None]) -> None:
        """An expected error becomes the stream's status; a lost peer cannot be told."""
        error = None if serving.cancelled() else serving.exception()
        if error is None or isinstance(error, PeerLostError):
            self.close()
        elif isinstance(error, KoinonError):
            self.close(error)
        else:
            log.error("serving a follower failed", exc_info=error)
            self.close(InternalError(reason=f"{type(error).__name__}: {error}"))


class ReplicationService:
    """koinon.v1.Replication."""

    def __init__(
        self,
        followers: Followers,
        pages: PageReader,
        state: NodeState,
        checksums: Checksums,
        sizes: SizeEstimates,
        primaries: Primaries,
    ) -> None:
        self._followers = followers
        self._pages = pages
        self._state = state
        self._checksums = checksums
        self._sizes = sizes
        self._primaries = primaries
        self._streams: set[_PrimaryStream] = set()
        self._places = Places(
            "followers' streams", places=STREAMS_MAX, host=STREAMS_MAX // 2, connection=8
        )
        self._serving: set[asyncio.Future[None]] = set()  # the loop holds tasks only weakly
        self._stopping = False

    def add_to(self, server: TakesServices) -> None:
        """Register the service, as the generated code would but for Follow's answers: the streams'
        ends serialise them.
        """
        pb2 = replication_pb2
        handlers: dict[str, Any] = {
            "Follow": grpc.stream_stream_rpc_method_handler(
                self.Follow, request_deserializer=pb2.FollowRequest.FromString
            )
        }
        for handler, request, response in (
            (self.ReadPage, pb2.ReadPageRequest, pb2.RecordPage),
            (self.ReadKeys, pb2.ReadKeysRequest, pb2.RecordPage),
            (self.Checksums, pb2.ChecksumsRequest, pb2.ChecksumsResponse),
            (self.PartitionSizes, pb2.PartitionSizesRequest, pb2.PartitionSizesResponse),
        ):
            handlers[handler.__name__] = grpc.unary_unary_rpc_method_handler(
                handler, request.FromString, response.SerializeToString
            )
        server.add_registered_method_handlers(SERVICE, handlers)

    def close(self) -> None:
        """End all streams; their followers go where the next table says."""
        self._stopping = True
        for stream in list(self._streams):
            stream.close(UnavailableError(reason="the node is stopping"))

    @typed_stream
    async def Follow(self, _: Any, context: Any) -> None:  # noqa: N802
        """Counted from its hello, so that streams which never send one take no place."""
        stream = _PrimaryStream(context)
        try:
            await stream.hello(self._check_hello)
        except PeerLostError:
            return
        if self._stopping:
            raise UnavailableError(reason="the node is stopping")
        with self._places.place(context.peer()):
            self._streams.add(stream)
            serving = asyncio.ensure_future(self._followers.serve(stream))
            self._serving.add(serving)
            serving.add_done_callback(self._serving.discard)
            try:
                await stream.run(serving)
            finally:
                self._streams.discard(stream)

    @typed_errors
    @bounded(CALLS_MAX)
    async def ReadPage(  # noqa: N802
        self, request: replication_pb2.ReadPageRequest, context: Any
    ) -> replication_pb2.RecordPage:
        self._check_reader(request)
        return await self._pages.read_page(request)

    @typed_errors
    @bounded(CALLS_MAX)
    async def ReadKeys(  # noqa: N802
        self, request: replication_pb2.ReadKeysRequest, context: Any
    ) -> replication_pb2.RecordPage:
        self._check_reader(request)
        return await self._pages.read_keys(request)

    @typed_errors
    @bounded(CALLS_MAX)
    async def Checksums(  # noqa: N802
        self, request: replication_pb2.ChecksumsRequest, context: Any
    ) -> replication_pb2.ChecksumsResponse:
        table = self._state.table()
        table.cluster.check_id(request.cluster_id)
        wanted = list(dict.fromkeys(request.partition_ids))
        table.check_partitions(wanted)
        if request.positions_only:
            return replication_pb2.ChecksumsResponse(copies=await self._checksums.positions(wanted))
        return replication_pb2.ChecksumsResponse(copies=await self._checksums.of(wanted))

    @typed_errors
    @bounded(CALLS_MAX)
    async def PartitionSizes(  # noqa: N802
        self, request: replication_pb2.PartitionSizesRequest, context: Any
    ) -> replication_pb2.PartitionSizesResponse:
        self._state.table().cluster.check_id(request.cluster_id)
        partition_ids, records, sizes = self._sizes.columns()
        # Of a copy that this node does not lead the position here may be an old one.
        led = self._primaries.epochs[partition_ids] > 0
        stale = self._sizes.stale(partition_ids, self._primaries.last_sequences[partition_ids])
        return replication_pb2.PartitionSizesResponse(
            partition_ids=partition_ids, records=records, bytes=sizes, stale=stale | ~led
        )

    def _check_reader(self, request: Any) -> None:
        """Raise PermissionDeniedError where a node asks for records of a partition of which it is
        to have no copy. A stream is not opened to it either.
        """
        table, p = self._state.table(), request.partition_id
        table.cluster.check_id(request.cluster_id)
        principal = caller.get().principal
        if principal is None or p >= len(table.rows):
            return
        if not any(table.nodes[n].node_id == principal.name for n in table.rows[p].replicas):
            raise PermissionDeniedError(
                principal=str(principal), action="read", what=f"partition {p}: it has no copy of it"
            )

    def _check_hello(self, hello: replication_pb2.FollowHello) -> None:
        check_node_protocol(hello.protocol_version, "replication protocol")
        table = self._state.table()
        table.cluster.check_id(hello.cluster_id)
        if (principal := caller.get().principal) is not None:
            node = table.nodes.get(NodeNumber(hello.node_number))
            if node is None or node.node_id != principal.name:
                raise PermissionDeniedError(
                    principal=str(principal), action="follow", what=f"as node {hello.node_number}"
                )


# --- errors ------------------------------------------------------------------------------------


def _lost(reason: str) -> PeerLostError:
    return PeerLostError(reason=reason)


def _error_of(error: Any, address: str) -> KoinonError:
    """Return what the other side said, or that it is lost."""
    return error_of(error) or _lost(f"{address}: {status_text(error)}")


def _retrieved(task: asyncio.Future[Any]) -> None:
    if not task.cancelled():
        task.exception()
