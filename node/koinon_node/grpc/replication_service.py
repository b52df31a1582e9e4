"""A primary's service for other nodes: streams of commit groups, pages of records, checksums.

Followers connect to the data port (KOINON.FOLLOW); pages and checksums are requested over gRPC.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from koinon_node.core.writes.write_decisions import Primaries
from koinon_node.ports import FOLLOW, PeerLostError
from koinon_node.replication.follower_streams import Followers
from koinon_node.replication.page_reader import PageReader
from koinon_node.replication.peers import KEEPALIVE_MS
from koinon_node.state import NodeState
from koinon_node.storage.checksums import Checksums
from koinon_node.storage.sizes import SizeEstimates
from koinon_proto.contract.bounds import check
from koinon_proto.contract.errors import (
    InternalError,
    InvalidArgumentError,
    KoinonError,
    PermissionDeniedError,
    UnavailableError,
)
from koinon_proto.contract.table import NodeNumber
from koinon_proto.contract.versions import check_node_protocol
from koinon_proto.security import method_permissions
from koinon_proto.security.authentication import StandingCaller, Version
from koinon_proto.security.authorization import caller
from koinon_proto.server.admission import Places
from koinon_proto.server.framed_stream import FramedStream
from koinon_proto.server.rpc import (
    SERVER_OPTIONS,
    TakesServices,
    bounded,
    typed_errors,
)
from koinon_proto.v1 import replication_pb2, replication_pb2_grpc

log = logging.getLogger(__name__)

SERVICE = "koinon.v1.Replication"
CALLS_MAX = 1_024
STREAMS_MAX = 1_024  # a follower node should have one
_HELLO_S_MAX = 10.0
_HELLO_BYTES_MAX = 16 * 1024
_WAITING_FOR_HELLO_MAX = 256
"""The most streams without a hello; beyond it the oldest is closed. Followers send it at once."""

_PING_POLICY = "grpc.http2.min_ping_interval_without_data_ms"
NODE_SERVER_OPTIONS = (
    *(option for option in SERVER_OPTIONS if option[0] != _PING_POLICY),
    (_PING_POLICY, KEEPALIVE_MS // 2),  # gRPC closes connections that ping more often
)

_Framed = FramedStream[replication_pb2.FollowResponse, replication_pb2.FollowRequest]


def _parsed(data: bytes) -> replication_pb2.FollowRequest:
    message = replication_pb2.FollowRequest.FromString(data)
    check(message)
    return message


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
        self._streams: set[_Framed] = set()
        self._strangers: dict[_Framed, None] = {}  # streams without a hello, the oldest first
        self._framed: dict[_Framed, StandingCaller] = {}
        self._places = Places(
            "followers' streams", places=STREAMS_MAX, host=STREAMS_MAX // 2, connection=8
        )
        self._serving: set[asyncio.Future[None]] = set()  # asyncio keeps only weak references
        self._stopping = False

    def add_to(self, server: TakesServices) -> None:
        """Register the service's calls."""
        replication_pb2_grpc.add_ReplicationServicer_to_server(self, server)

    @property
    def streams(self) -> int:
        """The number of open followers' streams."""
        return len(self._streams)

    def close(self) -> None:
        """Close all streams. Their followers then follow the next table."""
        self._stopping = True
        for stream in [*self._streams, *self._strangers]:
            stream.close(UnavailableError(reason="the node is stopping"))

    def take_follower(self, follower: StandingCaller, peer: str) -> asyncio.Protocol:
        """Return the protocol object that serves a follower on a connection of the data port."""
        stream: _Framed = FramedStream(_parsed, peer, _HELLO_BYTES_MAX)
        self._keep(asyncio.ensure_future(self._serve_framed(stream, follower, peer)))
        return stream

    def look_at_callers(self, version: Version, now_s: float) -> None:
        """Close the streams of followers that have lost the right to follow."""
        for stream, follower in list(self._framed.items()):
            if follower.is_stale(version, now_s):
                try:
                    method_permissions.check(FOLLOW, follower.current())
                except KoinonError as error:
                    stream.close(error)

    async def _serve_framed(self, stream: _Framed, follower: StandingCaller, peer: str) -> None:
        self._framed[stream] = follower
        error: KoinonError | None = None
        try:
            caller.set(follower.current())
            await self._serve(stream, peer)
        except KoinonError as found:
            error = None if isinstance(found, PeerLostError) else found
        except Exception as found:
            log.exception("serving a follower failed")
            error = InternalError(reason=f"{type(found).__name__}: {found}")
        finally:
            del self._framed[stream]
            stream.close(error)

    async def _serve(self, stream: _Framed, peer: str) -> None:
        """Serve one follower. A stream takes a place only from its hello on."""
        first = await self._first_of(stream)
        if first.WhichOneof("kind") != "hello":
            raise InvalidArgumentError(field="hello", reason="must be the first message")
        self._check_hello(first.hello)
        if self._stopping:
            raise UnavailableError(reason="the node is stopping")
        with self._places.place(peer):
            self._streams.add(stream)
            stream.put_back(first)
            try:
                await self._followers.serve(stream)
            finally:
                self._streams.discard(stream)

    async def _first_of(self, stream: _Framed) -> replication_pb2.FollowRequest:
        """Return the stream's first message. Streams that send none do not keep followers out."""
        if len(self._strangers) >= _WAITING_FOR_HELLO_MAX:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.close(UnavailableError(reason="too many streams wait for a hello"))
        self._strangers[stream] = None
        try:
            async with asyncio.timeout(_HELLO_S_MAX):
                return await stream.receive()
        except TimeoutError:
            raise UnavailableError(reason=f"no hello within {_HELLO_S_MAX:.0f} s") from None
        finally:
            self._strangers.pop(stream, None)

    def _keep(self, serving: asyncio.Future[None]) -> None:
        self._serving.add(serving)
        serving.add_done_callback(self._serving.discard)

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
        # Only a primary knows the newest sequence of a partition; a follower's may be out of date.
        led = self._primaries.epochs[partition_ids] > 0
        stale = self._sizes.stale(partition_ids, self._primaries.last_sequences[partition_ids])
        return replication_pb2.PartitionSizesResponse(
            partition_ids=partition_ids, records=records, bytes=sizes, stale=stale | ~led
        )

    def _check_reader(self, request: Any) -> None:
        """Raise PermissionDeniedError if a node requests records of a partition of which the table
        gives it no copy. Streams of such partitions are refused as well.
        """
        table, p = self._state.table(), request.partition_id
        table.cluster.check_id(request.cluster_id)
        principal = caller.get().principal
        if principal is None or p >= len(table.rows):
            return
        if not any(table.nodes[n].node_id == principal.name for n in table.rows[p].replicas):
            raise PermissionDeniedError(
                principal=str(principal),
                action="read",
                what=f"partition {p}, which it does not hold",
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
