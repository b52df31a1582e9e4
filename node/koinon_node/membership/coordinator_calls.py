"""The node's calls to the coordinators: finds their leader, and sends requests to it.

There are two callers: the agent's thread with blocking calls, and a primary's proposals from the
event loop (``LeaderCalls``). Both find the leader in the same way. Only the leader answers; the
other coordinators name it (NotLeader), and after a coordinator that does not answer the next one is
asked.
"""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import grpc
from grpc.experimental import ChannelOptions

from koinon_node.membership.framed_heartbeats import FramedHeartbeats
from koinon_node.ports import RowChange
from koinon_proto.contract.bounds import check_reply
from koinon_proto.contract.errors import (
    InternalError,
    KoinonError,
    NotSentError,
    UnavailableError,
    UnknownFateError,
)
from koinon_proto.contract.leader_search import LeaderSearch, Repeat, Route
from koinon_proto.contract.request_ids import onward
from koinon_proto.security.names import COORDINATOR
from koinon_proto.security.transport import PLAIN, Dialing
from koinon_proto.server.leader_calls import ask_leader, ask_leader_aio
from koinon_proto.server.rpc import CHANNEL_OPTIONS, fate_of
from koinon_proto.v1 import (
    loads_pb2,
    loads_pb2_grpc,
    membership_pb2,
    membership_pb2_grpc,
    raft_pb2,
    table_pb2,
)

_REGISTER_TIMEOUT_S = 5.0
_ALTER_TIMEOUT_S = 2.0
_READY_TIMEOUT_S = 0.5  # of opening a connection
_HAND_TABLE_TIMEOUT_S = 5.0
_PAUSE_MIN_S, _PAUSE_MAX_S = 0.05, 0.1

_OPTIONS = tuple({**dict(CHANNEL_OPTIONS), "grpc.max_reconnect_backoff_ms": 200}.items())
"""Reconnect as often as heartbeats, so that nodes soon find a coordinator that starts with them."""
_BLOCKING_OPTIONS = (*_OPTIONS, (ChannelOptions.SingleThreadedUnaryStream, 1))
"""The calling thread reads a stream itself. Otherwise gRPC uses a second thread, and both wake up
several times a second.
"""

_READY = grpc.ChannelConnectivity.READY
_REFUSED = grpc.ChannelConnectivity.TRANSIENT_FAILURE


class Channels:
    """Opens channels to coordinators. When ``version`` rises, this node's identity has changed and
    callers open new channels.
    """

    def __init__(self, dialing: Dialing = PLAIN) -> None:
        self._dialing = dialing

    @property
    def version(self) -> int:
        return self._dialing.version

    def blocking(self, address: str) -> Any:
        """Open a channel for blocking calls."""
        return self._dialing.channel(address, COORDINATOR, _BLOCKING_OPTIONS)

    def connect(self, address: str, timeout_s: float) -> socket.socket:
        """Open a connection for blocking calls. Raises OSError or ValueError if that fails."""
        return self._dialing.connect_blocking(address, COORDINATOR, timeout_s)

    def on_loop(self, address: str) -> Any:
        """Open a channel for the event loop."""
        return self._dialing.aio_channel(address, COORDINATOR, _OPTIONS)


PLAIN_CHANNELS = Channels()


class Coordinators:
    """Blocking calls to the leader, for one thread. Any thread may call ``close``."""

    def __init__(
        self,
        addresses: Sequence[str],
        now: Callable[[], float],
        channels: Channels = PLAIN_CHANNELS,
    ) -> None:
        self.route = Route(addresses, random.choice(addresses))
        self._opening = channels
        self._version = channels.version
        self._channels: dict[str, tuple[grpc.Channel, Any]] = {}  # address -> (channel, stub)
        self._heartbeats = FramedHeartbeats(channels, self._peer_port, now)

    def register(self, request: membership_pb2.RegisterRequest) -> membership_pb2.RegisterResponse:
        """Register this node. Tries each coordinator once; raises the last error if none has
        answered.
        """
        reply: membership_pb2.RegisterResponse = self._around(
            lambda address: _checked_reply(
                self._stub(address).Register(
                    request, timeout=_REGISTER_TIMEOUT_S, metadata=onward()
                )
            )
        )
        return reply

    def heartbeat(
        self, request: membership_pb2.HeartbeatRequest, timeout_s: float
    ) -> tuple[membership_pb2.HeartbeatResponse, float]:
        """Send a heartbeat; return the reply, and when the acknowledged attempt was sent. Tries
        each coordinator once; raises the last error if the leader has not answered.
        """
        answered: tuple[membership_pb2.HeartbeatResponse, float] = self._around(
            lambda address: self._heartbeats.ask(address, request, timeout_s)
        )
        return answered

    def leave(self, request: membership_pb2.LeaveRequest, timeout_s: float) -> None:
        """Tell the leader that this node stops. Tries each coordinator once; raises the last error
        if none has answered.
        """
        self._around(
            lambda address: _checked_reply(self._stub(address).Leave(request, timeout=timeout_s))
        )

    def _peer_port(self, address: str, timeout_s: float) -> int:
        request = raft_pb2.GetPeerPortRequest()
        reply = _checked_reply(self._stub(address).GetPeerPort(request, timeout=timeout_s))
        return int(reply.peer_port)

    def close(self) -> None:
        self._heartbeats.close()
        self._close_channels()

    def _close_channels(self) -> None:
        for channel, _ in list(self._channels.values()):
            channel.close()

    def _around(self, attempt: Callable[[str], Any]) -> Any:
        """Call the leader, trying each coordinator once. An attempt without an answer may be
        repeated.
        """
        search = LeaderSearch(self.route, Repeat.UNANSWERED, once_around=True)
        return ask_leader(search, lambda: attempt(search.asked))

    def _stub(self, address: str) -> Any:
        if self._version != (version := self._opening.version):
            self._version = version
            self._close_channels()
            self._channels.clear()
        if address not in self._channels:
            channel = self._opening.blocking(address)
            self._channels[address] = channel, membership_pb2_grpc.MembershipStub(channel)
        return self._channels[address][1]


class Member(Protocol):
    """The part of the agent that proposals need."""

    def registration(self) -> tuple[str, int, int, str] | None:
        """Return (cluster id, node epoch, table version, registration id); None while
        unregistered.
        """

    def route(self) -> Route:
        """Return the agent's present knowledge of the coordinators' addresses and leader."""

    async def hand_table(self, update: table_pb2.TableUpdate | None) -> None:
        """Apply the table update; return once it and all earlier ones are applied and the event
        loop's side has them.
        """


class LeaderCalls:
    """A primary's proposals (ports.CoordinatorCalls), from the event loop.

    A request is sent only over an established connection, so that a failed connection means "never
    sent". Only then, or after a typed refusal, is another coordinator asked. Any other failure
    leaves the request's fate unknown.
    """

    def __init__(self, node_id: str, member: Member, channels: Channels = PLAIN_CHANNELS) -> None:
        self._node_id = node_id
        self._member = member
        self._opening = channels
        self._channels: dict[str, tuple[int, Any]] = {}  # address -> (identity's version, channel)
        self._closing: set[asyncio.Task[None]] = set()

    async def alter_partitions(self, changes: Sequence[RowChange]) -> frozenset[int]:
        """See ports.CoordinatorCalls."""
        registration = self._member.registration()
        if registration is None:
            await _pause()
            raise UnavailableError(reason="the node is not registered")
        cluster_id, node_epoch, table_version, registration_id = registration
        request = membership_pb2.AlterPartitionsRequest(
            cluster_id=cluster_id,
            node_id=self._node_id,
            node_epoch=node_epoch,
            table_version=table_version,
            changes=[_change_to_proto(change) for change in changes],
            registration_id=registration_id,
        )
        reply: membership_pb2.AlterPartitionsResponse = await self._ask(
            membership_pb2_grpc.MembershipStub, "AlterPartitions", request
        )
        update = reply.table if reply.HasField("table") else None
        try:
            async with asyncio.timeout(_HAND_TABLE_TIMEOUT_S):
                await self._member.hand_table(update)
        except TimeoutError:
            raise UnknownFateError(reason="the table in the answer is not applied yet") from None
        return frozenset(reply.rejected)

    async def load_manifest(self, cluster_id: str, load_id: int) -> loads_pb2.LoadManifest:
        """See ports.LoadCalls."""
        request = loads_pb2.GetManifestRequest(cluster_id=cluster_id, load_id=load_id)
        manifest: loads_pb2.LoadManifest = await self._ask(
            loads_pb2_grpc.LoadsStub, "GetManifest", request
        )
        return manifest

    async def report_merged(
        self, cluster_id: str, load_id: int, partition_ids: Sequence[int]
    ) -> None:
        """See ports.LoadCalls."""
        request = loads_pb2.ReportMergedRequest(
            cluster_id=cluster_id, load_id=load_id, partition_ids=partition_ids
        )
        await self._ask(loads_pb2_grpc.LoadsStub, "ReportMerged", request)

    async def empty_keyspace(
        self, cluster_id: str, keyspace_id: int, job_id: str, description: str
    ) -> loads_pb2.EmptyKeyspaceResponse:
        """See ports.EmptyingCalls."""
        request = loads_pb2.EmptyKeyspaceRequest(
            cluster_id=cluster_id, keyspace_id=keyspace_id, job_id=job_id, description=description
        )
        reply: loads_pb2.EmptyKeyspaceResponse = await self._ask(
            loads_pb2_grpc.LoadsStub, "EmptyKeyspace", request
        )
        return reply

    async def close(self) -> None:
        for _, channel in self._channels.values():
            await channel.close()

    async def _ask(self, stub_of: Any, method: str, request: Any) -> Any:
        """Call the leader, trying each coordinator once. A failed round ends with a pause, so that
        callers may retry at once.
        """
        search = LeaderSearch(self._member.route(), Repeat.NOTHING, once_around=True)
        metadata = onward()

        async def attempt() -> Any:
            channel = await self._ready_channel(search.asked)
            if channel is None:
                raise NotSentError(reason="no coordinator can be reached")
            call = getattr(stub_of(channel), method)
            return _checked_reply(await call(request, timeout=_ALTER_TIMEOUT_S, metadata=metadata))

        try:
            return await ask_leader_aio(search, attempt, _fate_of)
        except KoinonError as error:
            error.request_id = metadata[0][1]
            if search.found_no_leader:
                await _pause()
            raise

    async def _ready_channel(self, address: str) -> Any:
        """Return a channel with an established connection, or None if there is none in time."""
        version, known = self._opening.version, self._channels.get(address)
        if known is None or known[0] != version:
            if known is not None:
                closing = asyncio.ensure_future(known[1].close(_ALTER_TIMEOUT_S))
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)
            known = self._channels[address] = version, self._opening.on_loop(address)
        channel = known[1]
        try:
            async with asyncio.timeout(_READY_TIMEOUT_S):
                while (state := channel.get_state(try_to_connect=True)) is not _READY:
                    if state is _REFUSED:
                        return None
                    await channel.wait_for_state_change(state)
        except TimeoutError:
            return None
        return channel


def _fate_of(failure: grpc.RpcError) -> KoinonError:
    """Return the refusal if nothing can have been proposed, else UnknownFateError."""
    error = fate_of(failure)
    if isinstance(error, InternalError):
        return UnknownFateError(reason=error.reason)
    if error.maybe_applied and failure.code() is grpc.StatusCode.UNIMPLEMENTED:
        return UnavailableError(reason="the coordinators' leader does not know this call")
    return error


def _checked_reply(reply: Any) -> Any:
    """Check and return a reply. An invalid reply counts as none: the request may have taken
    effect.
    """
    try:
        check_reply(reply)
    except UnavailableError as error:
        raise UnknownFateError(reason=error.reason) from error
    return reply


def _change_to_proto(change: RowChange) -> membership_pb2.PartitionChange:
    return membership_pb2.PartitionChange(
        partition_id=change.partition_id,
        primary_epoch=change.primary_epoch,
        partition_epoch=change.partition_epoch,
        in_sync=change.in_sync,
        hand_over_to=change.hand_over_to,
    )


async def _pause() -> None:
    await asyncio.sleep(random.uniform(_PAUSE_MIN_S, _PAUSE_MAX_S))
