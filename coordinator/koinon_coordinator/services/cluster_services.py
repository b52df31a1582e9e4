"""The services for nodes and clients. They convert messages; other modules make all decisions.
``admin_service.py`` has the operators' service, ``loads_service.py`` that of bulk loads,
``groups_service.py`` that of consumer groups.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from koinon_coordinator.coordinator import Coordinator
from koinon_coordinator.core.cluster.commands import (
    HostedPartition,
    PartitionChange,
    StoreStanding,
)
from koinon_coordinator.core.decide.registrations import Registration, Sender
from koinon_coordinator.leader.membership import NodeReport
from koinon_coordinator.services.admin_service import CALLS_MAX, PROGRESS, AdminService
from koinon_coordinator.services.groups_service import GroupsService
from koinon_coordinator.services.loads_service import LoadsService
from koinon_coordinator.wire.updates import AccessCache, UpdateCache
from koinon_proto.contract.bounds import check
from koinon_proto.contract.codec import codec
from koinon_proto.contract.errors import (
    ClusterNotReadyError,
    InvalidArgumentError,
    KoinonError,
    UnavailableError,
)
from koinon_proto.contract.table import Table
from koinon_proto.contract.versions import check_node_protocol
from koinon_proto.process.clock import boottime
from koinon_proto.server import admission
from koinon_proto.server.admission import Places
from koinon_proto.server.framed_stream import FramedStream
from koinon_proto.server.requests import CANCELLED, INTERNAL, Request, method_of
from koinon_proto.server.rpc import bounded, outcome_of, typed_errors, typed_stream
from koinon_proto.v1 import (
    access_pb2,
    admin_pb2,
    admin_pb2_grpc,
    groups_pb2,
    groups_pb2_grpc,
    loads_pb2,
    loads_pb2_grpc,
    membership_pb2,
    membership_pb2_grpc,
    raft_pb2,
    raft_pb2_grpc,
    table_pb2,
    table_pb2_grpc,
)

WATCHES_MAX = 1_024
_ANSWER_S_MAX = 5.0  # in which an answer leaves

SERVICES = tuple(
    file.DESCRIPTOR.services_by_name[name].full_name
    for file, name in (
        (membership_pb2, "Membership"),
        (table_pb2, "TableService"),
        (admin_pb2, "Admin"),
        (loads_pb2, "Loads"),
        (groups_pb2, "Groups"),
        (raft_pb2, "Raft"),
    )
)
_HOST_COMMAND = codec(HostedPartition, membership_pb2.HostCommand)
_CHANGE = codec(PartitionChange, membership_pb2.PartitionChange)
_REGISTRATION = codec(
    Registration,
    membership_pb2.RegisterRequest,
    filled=["protocol_version", "cluster_id"],
)


_OPEN_ADDRESSES_MAX, _OPEN_CHARS_MAX, _MODE_CHARS_MAX, _SCARCE_MAX = 8, 300, 16, 8


def _bound_exposure(stats: membership_pb2.NodeStats) -> None:
    """Keep, of a node's report about its ports and resources, no more than operators can be
    shown.
    """
    shown = [one[:_OPEN_CHARS_MAX] for one in stats.open_addresses[:_OPEN_ADDRESSES_MAX]]
    if shown:
        stats.open_addresses[:] = shown
    if stats.tls_mode:
        stats.tls_mode = stats.tls_mode[:_MODE_CHARS_MAX]
    if stats.old_store:
        stats.old_store = stats.old_store[:_OPEN_CHARS_MAX]
    if len(stats.scarce) > _SCARCE_MAX:  # else even an empty message would count as set
        del stats.scarce[_SCARCE_MAX:]
    for scarce in stats.scarce:
        scarce.name = scarce.name[:_OPEN_CHARS_MAX]


FramedHeartbeats = FramedStream[membership_pb2.HeartbeatResponse, membership_pb2.HeartbeatRequest]


def heartbeat_in(data: bytes) -> membership_pb2.HeartbeatRequest:
    """Return the heartbeat of a frame.

    Raises:
        InvalidArgumentError: a number in it is beyond its bound.
    """
    request = membership_pb2.HeartbeatRequest.FromString(data)
    check(request)
    return request


@dataclass(frozen=True, slots=True)
class Peer:
    """The caller of a request in a frame, as ``Request`` asks the context of a call."""

    name: str

    def peer(self) -> str:
        return self.name

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()


class MembershipService(membership_pb2_grpc.MembershipServicer):
    """Registrations, heartbeats and reports of nodes, for the leader."""

    def __init__(
        self,
        coordinator: Coordinator,
        updates: UpdateCache,
        trust_host: Callable[[str], None] = lambda peer: None,
    ) -> None:
        self._coordinator = coordinator
        self._updates = updates
        self._trust_host = trust_host  # see admission.Lane
        self._access = AccessCache()

    @typed_errors
    async def Register(  # noqa: N802 (the generated servicer's name)
        self, request: membership_pb2.RegisterRequest, _context: Any
    ) -> membership_pb2.RegisterResponse:
        check_node_protocol(request.protocol_version, "membership protocol")
        leadership = self._coordinator.serving
        registration = _REGISTRATION.decode(request)
        registering = leadership.members.register(registration, request.cluster_id)
        registered = await self._coordinator.led(registering)
        timing = leadership.timing
        table = self._coordinator.table()
        return membership_pb2.RegisterResponse(
            cluster_id=table.cluster.cluster_id if table is not None else "",
            node_epoch=registered.node_epoch,
            term=leadership.term.number,
            heartbeat_interval_ms=timing.heartbeat_interval_ms,
            lease_ms=timing.lease_ms,
            table=self._newer(0),
            access=self._newer_access(0),
            known_node_epoch=registered.known_epoch
            if registered.store is StoreStanding.OLD and not registered.reclaimed
            else 0,
        )

    @typed_errors
    async def GetPeerPort(  # noqa: N802
        self, request: raft_pb2.GetPeerPortRequest, _context: Any
    ) -> raft_pb2.GetPeerPortResponse:
        _ = self._coordinator.serving
        return peer_port_of(self._coordinator)

    async def serve_heartbeats(self, stream: FramedHeartbeats, peer: str) -> None:
        """Answer the heartbeats of one node, one after the other, until the stream ends.

        Raises:
            KoinonError: that the stream ends with, as a call would.
        """
        node_id = None
        while True:
            request = await stream.receive()
            if node_id not in (None, request.node_id):
                raise InvalidArgumentError(field="node_id", reason="a stream has one sender")
            node_id = request.node_id
            reply = await self._answered(request, Peer(peer))
            self._trust_host(peer)
            stream.send(reply)
            if stream.is_backed_up:
                async with asyncio.timeout(_ANSWER_S_MAX):
                    await stream.drained()

    async def _answered(
        self, request: membership_pb2.HeartbeatRequest, peer: Peer
    ) -> membership_pb2.HeartbeatResponse:
        """Answer a heartbeat, with a call's counters and timing."""
        handled = Request(method_of(MembershipService, "Heartbeat"), request, peer)
        try:
            reply = await self._heartbeat(request)
        except KoinonError as error:
            handled.failed(outcome_of(error), error)
            raise
        except asyncio.CancelledError as error:
            handled.failed(CANCELLED, error)
            raise
        except Exception as error:
            handled.failed(INTERNAL, error)
            raise
        handled.answered(reply)
        return reply

    async def _heartbeat(
        self, request: membership_pb2.HeartbeatRequest
    ) -> membership_pb2.HeartbeatResponse:
        received_at = boottime()
        leadership = self._coordinator.serving
        _bound_exposure(request.stats)
        report = NodeReport(
            stats=request.stats,
            hosted=list(map(_HOST_COMMAND.decode, request.hosted)),
            progress=list(map(PROGRESS.decode, request.progress)),
            sizes=request.sizes if request.HasField("sizes") else None,
            load=request.load if request.HasField("load") else None,
            access_version=request.access_version,
            table_version=request.table_version,
            erased=request.erased_keyspaces,
        )
        heartbeat = leadership.members.heartbeat(_sender(request), report, received_at)
        commands = await self._coordinator.led(heartbeat)
        return membership_pb2.HeartbeatResponse(
            term=leadership.term.number,
            lease_ms=leadership.timing.lease_ms,
            table=self._newer(request.table_version),
            commands=map(_HOST_COMMAND.encode, commands),
            access=self._newer_access(request.access_version),
            call_number=request.call_number,
            wall_ms=round(time.time() * 1000),
        )

    @typed_errors
    async def AlterPartitions(  # noqa: N802
        self, request: membership_pb2.AlterPartitionsRequest, _context: Any
    ) -> membership_pb2.AlterPartitionsResponse:
        rejected = await self._coordinator.led(
            self._coordinator.serving.members.alter_partitions(
                _sender(request), list(map(_CHANGE.decode, request.changes))
            )
        )
        admission.trust()
        return membership_pb2.AlterPartitionsResponse(
            rejected=rejected, table=self._newer(request.table_version)
        )

    @typed_errors
    async def Leave(  # noqa: N802
        self, request: membership_pb2.LeaveRequest, _context: Any
    ) -> membership_pb2.LeaveResponse:
        await self._coordinator.led(self._coordinator.serving.members.leave(_sender(request)))
        return membership_pb2.LeaveResponse()

    def _newer(self, known_version: int) -> table_pb2.TableUpdate | None:
        """Return the table update for a node; None if it has the newest table, or there is no table
        yet.
        """
        table = self._coordinator.table()
        if table is None or not table.bootstrapped or known_version >= table.table_version:
            return None
        return self._updates.update(table, known_version)

    def _newer_access(self, known_version: int) -> access_pb2.AccessState | None:
        """Return the access state, with hashes of secrets; None if the node has it."""
        return self._access.newer(self._coordinator.access.state, known_version)


def _sender(request: Any) -> Sender:
    return Sender(
        cluster_id=request.cluster_id,
        node_id=request.node_id,
        node_epoch=request.node_epoch,
        registration_id=request.registration_id,
    )


class RaftService(raft_pb2_grpc.RaftServicer):
    """Tells other coordinators the address of this coordinator's Raft member."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    @typed_errors
    async def GetPeerPort(  # noqa: N802 (the generated servicer's name)
        self, request: raft_pb2.GetPeerPortRequest, _context: Any
    ) -> raft_pb2.GetPeerPortResponse:
        return peer_port_of(self._coordinator)


def peer_port_of(coordinator: Coordinator) -> raft_pb2.GetPeerPortResponse:
    """Return the number of the coordinator's peer port.

    Raises:
        UnavailableError: it is not open: the coordinator stops.
    """
    if not coordinator.peer_port:
        raise UnavailableError(reason="the coordinator is stopping")
    return raft_pb2.GetPeerPortResponse(peer_port=coordinator.peer_port)


class TableService(table_pb2_grpc.TableServiceServicer):
    """The table as applied here: any member answers, even if it is behind the leader."""

    def __init__(self, coordinator: Coordinator, updates: UpdateCache) -> None:
        self._coordinator = coordinator
        self._updates = updates
        self._watches = Places(
            "watches of the table",
            places=WATCHES_MAX,
            host=WATCHES_MAX // 2,
            connection=4,
            reserved=WATCHES_MAX // 4,
        )

    @typed_errors
    @bounded(CALLS_MAX)
    async def GetTable(  # noqa: N802 (the generated servicer's name)
        self, request: table_pb2.GetTableRequest, _context: Any
    ) -> table_pb2.TableUpdate:
        known = request.known_version if request.cluster_id else 0
        return self._updates.update(self._table(request.cluster_id), known)

    @typed_stream
    async def WatchTable(  # noqa: N802
        self, request: table_pb2.GetTableRequest, context: Any
    ) -> None:
        """Send each watcher the changes since its version. A slow reader skips versions, and does
        not delay others. Ends when this coordinator stops.
        """
        with self._watches.place(context.peer()):
            await self._watch(request, context)

    async def _watch(self, request: table_pb2.GetTableRequest, context: Any) -> None:
        cluster_id = request.cluster_id
        known = request.known_version if cluster_id else 0
        is_first = True
        with self._coordinator.watching() as changed:
            while not self._coordinator.stopping:
                await changed.wait()
                changed.clear()
                table = self._table(cluster_id)
                if is_first or table.table_version > known:
                    is_first, cluster_id = False, table.cluster.cluster_id
                    update = self._updates.update(table, known)
                    known = max(known, table.table_version)
                    await context.write(update)

    def _table(self, cluster_id: str) -> Table:
        """Return the table for a caller that knows this cluster (``""``: none).

        Raises:
            WrongClusterError, ClusterNotReadyError.
        """
        table = self._coordinator.table()
        if table is not None:
            table.cluster.check_id(cluster_id)
        if table is None or not table.bootstrapped:
            raise ClusterNotReadyError(
                registered_nodes=0 if table is None else len(table.nodes),
                bootstrap_nodes=0 if table is None else table.cluster.bootstrap_nodes,
            )
        return table


def add_services(
    coordinator: Coordinator,
    server: Any,
    trust_host: Callable[[str], None] = lambda peer: None,
) -> MembershipService:
    """Add all services of ``coordinator`` to a ``grpc.aio`` server; return the service whose
    heartbeats arrive at the peer port.
    """
    updates = UpdateCache(coordinator.row_forms)
    members = MembershipService(coordinator, updates, trust_host)
    membership_pb2_grpc.add_MembershipServicer_to_server(members, server)
    raft_pb2_grpc.add_RaftServicer_to_server(RaftService(coordinator), server)
    table_pb2_grpc.add_TableServiceServicer_to_server(TableService(coordinator, updates), server)
    admin_pb2_grpc.add_AdminServicer_to_server(AdminService(coordinator, updates), server)
    loads_pb2_grpc.add_LoadsServicer_to_server(LoadsService(coordinator, updates), server)
    groups_pb2_grpc.add_GroupsServicer_to_server(GroupsService(coordinator), server)
    return members
