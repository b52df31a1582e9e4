"""The coordinator's gRPC services: messages in, messages out; every decision is made elsewhere."""

from __future__ import annotations

from typing import Any, cast

from koinon_proto import convert
from koinon_proto.clock import boottime
from koinon_proto.errors import (
    ClusterNotReadyError,
    NotLeaderError,
    UnsupportedVersionError,
    WrongClusterError,
)
from koinon_proto.rpc import bounded, typed_errors
from koinon_proto.table import Table
from koinon_proto.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    membership_pb2,
    membership_pb2_grpc,
    table_pb2,
    table_pb2_grpc,
)

from .convert import hosted_from_proto, hosted_to_proto
from .coordinator import Coordinator
from .core.decisions import Registration, check_name, check_requested_address

PROTOCOL_VERSION = 1
CACHED_UPDATES_MAX = 64
ADMIN_TIMEOUT_S = 30.0

SERVICES = tuple(
    file.DESCRIPTOR.services_by_name[name].full_name
    for file, name in (
        (membership_pb2, "Membership"),
        (table_pb2, "TableService"),
        (admin_pb2, "Admin"),
    )
)


class UpdateCache:
    """The wire form of the table's updates, made once for each version and base: thousands of
    callers ask for the same few.
    """

    def __init__(self) -> None:
        self._table: Table | None = None
        self._updates: dict[int, table_pb2.TableUpdate] = {}

    def update(self, table: Table, known_version: int) -> table_pb2.TableUpdate:
        """Return what changed since ``known_version`` (0: everything). Not to be modified."""
        if table is not self._table:
            self._table = table
            self._updates.clear()
        base = min(known_version, table.table_version + 1)  # from there on all are equally empty
        update = self._updates.get(base)
        if update is None:
            if len(self._updates) >= CACHED_UPDATES_MAX:
                self._updates.pop(next(iter(self._updates)))
            update = self._updates[base] = convert.update_to_proto(table.since(base))
        return update


class MembershipService(membership_pb2_grpc.MembershipServicer):
    """Nodes join and stay: the leader's side."""

    def __init__(self, coordinator: Coordinator, updates: UpdateCache) -> None:
        self._coordinator = coordinator
        self._updates = updates

    @typed_errors
    async def Register(  # noqa: N802 (the generated servicer's name)
        self, request: membership_pb2.RegisterRequest, _context: Any
    ) -> membership_pb2.RegisterResponse:
        if request.protocol_version != PROTOCOL_VERSION:
            raise UnsupportedVersionError(
                what="membership protocol",
                version=request.protocol_version,
                supported=PROTOCOL_VERSION,
            )
        leadership = self._coordinator.leadership
        registration = Registration(
            node_id=request.node_id,
            address=request.address,
            rack=request.rack,
            store_id=request.store_id,
            last_node_epoch=request.last_node_epoch,
            registration_id=request.registration_id,
        )
        try:
            registered = await leadership.register(registration, request.cluster_id)
        except NotLeaderError:
            raise self._coordinator.not_leader() from None
        timing = leadership.timing
        table = self._coordinator.table()
        return membership_pb2.RegisterResponse(
            cluster_id=table.cluster.cluster_id if table is not None else "",
            node_epoch=registered.node_epoch,
            term=leadership.term,
            heartbeat_interval_ms=timing.heartbeat_interval_ms,
            lease_ms=timing.lease_ms,
            table=self._newer(0),
        )

    @typed_errors
    async def Heartbeat(  # noqa: N802
        self, request: membership_pb2.HeartbeatRequest, _context: Any
    ) -> membership_pb2.HeartbeatResponse:
        received_at = boottime()
        leadership = self._coordinator.leadership
        try:
            answer = await leadership.heartbeat(
                cluster_id=request.cluster_id,
                node_id=request.node_id,
                node_epoch=request.node_epoch,
                hosted=[hosted_from_proto(h) for h in request.hosted],
                received_at=received_at,
                stats=request.stats if request.HasField("stats") else None,
            )
        except NotLeaderError:
            raise self._coordinator.not_leader() from None
        return membership_pb2.HeartbeatResponse(
            term=leadership.term,
            lease_ms=leadership.timing.lease_ms,
            table=self._newer(request.table_version),
            commands=[hosted_to_proto(command) for command in answer.commands],
        )

    def _newer(self, known_version: int) -> table_pb2.TableUpdate | None:
        """The update for a node; None where it has everything, or there is no table yet."""
        table = self._coordinator.table()
        if table is None or not table.bootstrapped or known_version >= table.table_version:
            return None
        return self._updates.update(table, known_version)


CALLS_MAX = 1_024  # of clients and operators; nodes are always let in


class TableService(table_pb2_grpc.TableServiceServicer):
    """The table as applied here: any member answers, behind the leader or not."""

    def __init__(self, coordinator: Coordinator, updates: UpdateCache) -> None:
        self._coordinator = coordinator
        self._updates = updates

    @typed_errors
    @bounded(CALLS_MAX)
    async def GetTable(  # noqa: N802
        self, request: table_pb2.GetTableRequest, _context: Any
    ) -> table_pb2.TableUpdate:
        table = self._coordinator.table()
        if table is not None and request.cluster_id not in ("", table.cluster.cluster_id):
            raise WrongClusterError(
                expected_cluster_id=table.cluster.cluster_id,
                actual_cluster_id=request.cluster_id,
            )
        if table is None or not table.bootstrapped:
            raise ClusterNotReadyError(
                registered_nodes=0 if table is None else len(table.nodes),
                bootstrap_nodes=self._coordinator.bootstrap_nodes(),
            )
        return self._updates.update(table, request.known_version if request.cluster_id else 0)


class AdminService(admin_pb2_grpc.AdminServicer):
    """What operators ask. ``GetStatus`` is answered by any member, the rest by the leader."""

    def __init__(self, coordinator: Coordinator, updates: UpdateCache) -> None:
        self._coordinator = coordinator
        self._updates = updates

    @typed_errors
    @bounded(CALLS_MAX)
    async def GetStatus(  # noqa: N802
        self, _request: admin_pb2.GetStatusRequest, _context: Any
    ) -> admin_pb2.ClusterStatus:
        coordinator = self._coordinator
        raft = coordinator.raft_status()
        table = coordinator.table()
        is_leader = coordinator.leads
        timing = coordinator.timing
        return admin_pb2.ClusterStatus(
            member_id=raft.member_id,
            is_leader=is_leader,
            leader_id=raft.leader_id or "",
            leader_address=raft.leader_address or "",
            term=raft.term,
            commit_index=raft.commit_index,
            applied_index=raft.applied_index,
            coordinators=[
                admin_pb2.CoordinatorStatus(
                    member_id=member_id,
                    address=member.address,
                    voter=member.is_voter,
                    leader=member_id == raft.leader_id,
                    active=bool(member.is_active),
                    match_index=member.match_index or 0,
                )
                for member_id, member in sorted(raft.members.items())
            ],
            sessions=self._sessions() if is_leader else [],
            table=self._updates.update(table, 0) if table is not None else None,
            lease_ms=timing.lease_ms,
            session_timeout_ms=timing.session_timeout_ms,
        )

    @typed_errors
    @bounded(CALLS_MAX)
    async def AddCoordinator(  # noqa: N802
        self, request: admin_pb2.AddCoordinatorRequest, context: Any
    ) -> admin_pb2.AddCoordinatorResponse:
        check_name("member_id", request.member_id)
        check_requested_address("address", request.address)
        await self._coordinator.add_member(request.member_id, request.address, _timeout_s(context))
        return admin_pb2.AddCoordinatorResponse()

    @typed_errors
    @bounded(CALLS_MAX)
    async def RemoveCoordinator(  # noqa: N802
        self, request: admin_pb2.RemoveCoordinatorRequest, _context: Any
    ) -> admin_pb2.RemoveCoordinatorResponse:
        await self._coordinator.remove_member(request.member_id)
        return admin_pb2.RemoveCoordinatorResponse()

    @typed_errors
    @bounded(CALLS_MAX)
    async def TransferLeadership(  # noqa: N802
        self, request: admin_pb2.TransferLeadershipRequest, context: Any
    ) -> admin_pb2.TransferLeadershipResponse:
        leader_id = await self._coordinator.transfer_leadership(
            request.member_id or None, _timeout_s(context)
        )
        return admin_pb2.TransferLeadershipResponse(leader_id=leader_id)

    def _sessions(self) -> list[admin_pb2.NodeSession]:
        leadership = self._coordinator.leadership
        table = self._coordinator.table()
        now = boottime()
        sessions = leadership.sessions
        found = []
        for number in table.nodes if table is not None else ():
            heard_at = sessions.heard_at(number)
            since = leadership.began_at if heard_at is None else heard_at
            found.append(
                admin_pb2.NodeSession(
                    node_number=number,
                    live=sessions.is_live(number, now),
                    heard_ms_ago=max(0, round((now - since) * 1000)),
                    stats=leadership.stats.get(number),
                )
            )
        return found


def add_services(coordinator: Coordinator, server: Any) -> None:
    """Mount all services of ``coordinator`` on a ``grpc.aio`` server."""
    updates = UpdateCache()
    for add, service in (
        (membership_pb2_grpc.add_MembershipServicer_to_server, MembershipService),
        (table_pb2_grpc.add_TableServiceServicer_to_server, TableService),
        (admin_pb2_grpc.add_AdminServicer_to_server, AdminService),
    ):
        cast(Any, add)(cast(Any, service)(coordinator, updates), server)


def _timeout_s(context: Any) -> float:
    remaining = context.time_remaining()
    return min(ADMIN_TIMEOUT_S, remaining) if remaining is not None else ADMIN_TIMEOUT_S
