"""The operators' service. It converts messages; other modules make all decisions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from koinon_coordinator.coordinator import Coordinator
from koinon_coordinator.core.cluster.commands import (
    AccessCommand,
    AddToken,
    DropRole,
    DropToken,
    DropUser,
    Move,
    PutRole,
    PutUser,
    RestoreCertificate,
    RevokeCertificate,
)
from koinon_coordinator.core.decide.copy_progress import Progress, Stage
from koinon_coordinator.core.decide.keyspace_requests import Alteration
from koinon_coordinator.core.decide.load_plans import PlanBy
from koinon_coordinator.core.decide.plan_requests import PlanKind, PlanWish
from koinon_coordinator.core.decide.registrations import check_requested_address
from koinon_coordinator.core.planning.planner import Plan, Refusal, RefusalCode
from koinon_coordinator.leader.admin_requests import AdminRequests, MoveView
from koinon_coordinator.leader.keyspace_changes import KeyspaceMade
from koinon_coordinator.wire.updates import UpdateCache
from koinon_proto.contract import convert
from koinon_proto.contract.addresses import check_name
from koinon_proto.contract.codec import Value, codec
from koinon_proto.contract.errors import InvalidArgumentError
from koinon_proto.contract.keyspaces import DEFAULT
from koinon_proto.process.clock import boottime
from koinon_proto.security.authorization import concerns
from koinon_proto.server.rpc import bounded, typed_errors
from koinon_proto.v1 import admin_pb2, admin_pb2_grpc, membership_pb2, table_pb2

CALLS_MAX = 1_024  # of clients and operators; nodes are always let in
ADMIN_TIMEOUT_S = 30.0

_KINDS = {
    admin_pb2.PLAN_KIND_REBALANCE: PlanKind.REBALANCE,
    admin_pb2.PLAN_KIND_DRAIN: PlanKind.DRAIN,
    admin_pb2.PLAN_KIND_REPLACE: PlanKind.REPLACE,
    admin_pb2.PLAN_KIND_REPLICATION_FACTOR: PlanKind.REPLICATION_FACTOR,
}
_MEASURES = {
    admin_pb2.PLAN_BY_COUNT: PlanBy.COUNT,
    admin_pb2.PLAN_BY_LOAD: PlanBy.LOAD,
    admin_pb2.PLAN_BY_BYTES: PlanBy.BYTES,
}
_STAGES = {int(stage): stage for stage in Stage}
PROGRESS = codec(
    Progress,
    membership_pb2.ReplicaProgress,
    values={"stage": Value(int, lambda stage: _STAGES.get(stage, Stage.WAITING))},
)
_PLANNED_MOVE = codec(
    Move, admin_pb2.PlannedMove, given=["plan_id", "plan_moves", "running", "cancelled"]
)
_MOVE = codec(
    Move,
    admin_pb2.MoveStatus,
    given=["partition_id", "origin", "target", "reason"],
    filled=["move", "progress_nodes", "progress", "waits_for"],
)
_REFUSAL = codec(
    Refusal,
    admin_pb2.PlanRefusal,
    values={"code": Value(lambda code: code.value, RefusalCode)},
)
_ALTERATION = codec(Alteration, admin_pb2.AlterKeyspaceRequest, unused=["cluster_id", "name"])
_PLAN = codec(Plan, admin_pb2.Plan, values={"refusals": _REFUSAL}, filled=["table_version"])


class AdminService(admin_pb2_grpc.AdminServicer):
    """Operators' requests. Any member answers ``GetStatus``, only the leader the others."""

    def __init__(self, coordinator: Coordinator, updates: UpdateCache) -> None:
        self._coordinator = coordinator
        self._updates = updates

    @typed_errors
    @bounded(CALLS_MAX)
    async def GetStatus(  # noqa: N802
        self, request: admin_pb2.GetStatusRequest, _context: Any
    ) -> admin_pb2.ClusterStatus:
        coordinator = self._coordinator
        self._check_cluster(request)
        known = request.known_version if request.cluster_id else 0
        raft = coordinator.raft_status()
        table = coordinator.table()
        is_leader = coordinator.leads
        timing = coordinator.timing
        free, size = coordinator.disk_room()
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
            table=self._updates.update(table, known) if table is not None else None,
            lease_ms=timing.lease_ms,
            session_timeout_ms=timing.session_timeout_ms,
            elections=admin_pb2.RecentElections(
                leader_changes=raft.elections.leader_changes,
                terms=raft.elections.terms,
                watched_ms=round(1000 * raft.elections.watched_s),
                quiet_ms=round(1000 * raft.elections.quiet_s),
            ),
            tls_mode=str(coordinator.config.listening.mode),
            open_addresses=coordinator.open_addresses,
            advertised_address=coordinator.config.advertise,
            disk_free_bytes=free,
            disk_bytes=size,
            room_waits=self._room_waits() if is_leader else [],
        )

    @typed_errors
    @bounded(CALLS_MAX)
    async def AddCoordinator(  # noqa: N802
        self, request: admin_pb2.AddCoordinatorRequest, context: Any
    ) -> admin_pb2.AddCoordinatorResponse:
        self._check_cluster(request)
        check_name("member_id", request.member_id)
        check_requested_address("address", request.address)
        await self._coordinator.add_member(request.member_id, request.address, _timeout_s(context))
        return admin_pb2.AddCoordinatorResponse()

    @typed_errors
    @bounded(CALLS_MAX)
    async def RemoveCoordinator(  # noqa: N802
        self, request: admin_pb2.RemoveCoordinatorRequest, _context: Any
    ) -> admin_pb2.RemoveCoordinatorResponse:
        self._check_cluster(request)
        await self._coordinator.remove_member(request.member_id)
        return admin_pb2.RemoveCoordinatorResponse()

    @typed_errors
    @bounded(CALLS_MAX)
    async def TransferLeadership(  # noqa: N802
        self, request: admin_pb2.TransferLeadershipRequest, context: Any
    ) -> admin_pb2.TransferLeadershipResponse:
        self._check_cluster(request)
        leader_id = await self._coordinator.transfer_leadership(
            request.member_id or None, _timeout_s(context)
        )
        return admin_pb2.TransferLeadershipResponse(leader_id=leader_id)

    # --- moves --------------------------------------------------------------------------------

    @typed_errors
    @bounded(CALLS_MAX)
    async def PlanMoves(  # noqa: N802
        self, request: admin_pb2.PlanRequest, _context: Any
    ) -> admin_pb2.Plan:
        planned = await self._coordinator.led(self._operations(request).plan(_wish(request)))
        return _PLAN.encode(planned.plan, table_version=self._version())

    @typed_errors
    @bounded(CALLS_MAX)
    async def ExecutePlan(  # noqa: N802
        self, request: admin_pb2.ExecutePlanRequest, _context: Any
    ) -> admin_pb2.ExecutePlanResponse:
        operations = self._operations(request)
        wish = _wish(request.plan)
        await self._coordinator.led(operations.execute(wish, request.plan_id))
        return admin_pb2.ExecutePlanResponse()

    @typed_errors
    @bounded(CALLS_MAX)
    async def GetMoves(  # noqa: N802
        self, request: admin_pb2.GetMovesRequest, _context: Any
    ) -> admin_pb2.MovesStatus:
        settings, moves = self._operations(request).moves()
        return admin_pb2.MovesStatus(
            settings=convert.settings_to_proto(settings),
            moves=map(_move_to_proto, moves),
        )

    @typed_errors
    @bounded(CALLS_MAX)
    async def CancelMoves(  # noqa: N802
        self, request: admin_pb2.CancelMovesRequest, _context: Any
    ) -> admin_pb2.CancelMovesResponse:
        dropped, turned = await self._coordinator.led(
            self._operations(request).cancel(request.partition_ids)
        )
        return admin_pb2.CancelMovesResponse(dropped=dropped, turned_back=turned)

    @typed_errors
    @bounded(CALLS_MAX)
    async def SetMoves(  # noqa: N802
        self, request: admin_pb2.SetMovesRequest, _context: Any
    ) -> table_pb2.MoveSettings:
        given = {
            field: getattr(request, field)
            for field in ("paused", "bytes_per_second", "moves_per_node")
            if request.HasField(cast(Any, field))
        }
        return convert.settings_to_proto(
            await self._coordinator.led(self._operations(request).set_moves(**given))
        )

    # --- nodes and primaries ------------------------------------------------------------------

    @typed_errors
    @bounded(CALLS_MAX)
    async def SetNodeStatus(  # noqa: N802
        self, request: admin_pb2.SetNodeStatusRequest, _context: Any
    ) -> admin_pb2.SetNodeStatusResponse:
        await self._coordinator.led(
            self._operations(request).set_node_status(request.node_id, request.status)
        )
        return admin_pb2.SetNodeStatusResponse()

    @typed_errors
    @bounded(CALLS_MAX)
    async def RestorePrimaries(  # noqa: N802
        self, request: admin_pb2.RestorePrimariesRequest, _context: Any
    ) -> admin_pb2.RestorePrimariesResponse:
        wanted = await self._coordinator.led(self._operations(request).restore_primaries())
        return admin_pb2.RestorePrimariesResponse(wanted=wanted)

    @typed_errors
    @bounded(CALLS_MAX)
    async def ForcePrimaries(  # noqa: N802
        self, request: admin_pb2.ForcePrimariesRequest, _context: Any
    ) -> admin_pb2.ForcePrimariesResponse:
        wanted = [(one.partition_id, one.node_id) for one in request.primaries]
        forced = await self._coordinator.led(self._operations(request).force_primaries(wanted))
        return admin_pb2.ForcePrimariesResponse(
            primaries=[
                admin_pb2.ForcedPrimary(partition_id=partition_id, refused=outcome)
                if isinstance(outcome, str)
                else admin_pb2.ForcedPrimary(partition_id=partition_id, primary_epoch=outcome)
                for (partition_id, _), outcome in zip(wanted, forced, strict=True)
            ]
        )

    # --- keyspaces ----------------------------------------------------------------------------

    @typed_errors
    @bounded(CALLS_MAX)
    async def CreateKeyspace(  # noqa: N802
        self, request: admin_pb2.CreateKeyspaceRequest, context: Any
    ) -> admin_pb2.KeyspaceResponse:
        self._check_cluster(request)
        concerns(request.keyspace.name)
        wanted = convert.KEYSPACE.decode(request.keyspace)
        creating = self._coordinator.serving.keyspaces.create(wanted, _timeout_s(context) / 2)
        return _keyspace_response(await self._coordinator.led(creating))

    @typed_errors
    @bounded(CALLS_MAX)
    async def AlterKeyspace(  # noqa: N802
        self, request: admin_pb2.AlterKeyspaceRequest, context: Any
    ) -> admin_pb2.KeyspaceResponse:
        self._check_cluster(request)
        concerns(request.name)
        change = _ALTERATION.decode(request)
        altering = self._coordinator.serving.keyspaces.alter(
            request.name, change, _timeout_s(context) / 2
        )
        return _keyspace_response(await self._coordinator.led(altering))

    @typed_errors
    @bounded(CALLS_MAX)
    async def DropKeyspace(  # noqa: N802
        self, request: admin_pb2.DropKeyspaceRequest, context: Any
    ) -> admin_pb2.KeyspaceResponse:
        self._check_cluster(request)
        concerns(request.name)
        dropping = self._coordinator.serving.keyspaces.drop(
            request.name, request.keyspace_id, _timeout_s(context) / 2
        )
        return _keyspace_response(await self._coordinator.led(dropping))

    # --- access -------------------------------------------------------------------------------

    @typed_errors
    @bounded(CALLS_MAX)
    async def GetAccess(  # noqa: N802
        self, request: admin_pb2.GetAccessRequest, _context: Any
    ) -> admin_pb2.GetAccessResponse:
        self._check_cluster(request)
        state = self._coordinator.serving.access.state()
        tokens = tuple(replace(token, sha256=b"") for token in state.tokens)
        return admin_pb2.GetAccessResponse(
            access=convert.ACCESS.encode(replace(state, tokens=tokens))
        )

    @typed_errors
    @bounded(CALLS_MAX)
    async def ChangeAccess(  # noqa: N802
        self, request: admin_pb2.ChangeAccessRequest, context: Any
    ) -> admin_pb2.ChangeAccessResponse:
        self._check_cluster(request)
        access = self._coordinator.serving.access
        change = access.change(_access_change(request), _timeout_s(context) / 2)
        made = await self._coordinator.led(change)
        return admin_pb2.ChangeAccessResponse(
            access_version=made.version,
            nodes_behind=made.behind,
            behind_serve_ms=math.ceil(made.serves_s * 1000),
        )

    # --- helpers ------------------------------------------------------------------------------

    def _check_cluster(self, request: Any) -> None:
        """Refuse requests meant for another cluster: addresses are reused. A caller that does not
        know the cluster yet names none.

        Raises:
            WrongClusterError
        """
        config = self._coordinator.state.config
        if config is not None:
            config.check_id(request.cluster_id)

    def _operations(self, request: Any) -> AdminRequests:
        """Return the leader's part that handles operators' requests.

        Raises:
            WrongClusterError: the request is meant for another cluster.
            NotLeaderError: this coordinator does not lead; the error names the leader.
        """
        self._check_cluster(request)
        return self._coordinator.serving.operations

    def _version(self) -> int:
        table = self._coordinator.table()
        return table.table_version if table is not None else 0

    def _room_waits(self) -> list[admin_pb2.RoomWait]:
        """Return the nodes for whose room moves wait, with the bytes that these moves need."""
        found: dict[int, admin_pb2.RoomWait] = {}
        for shortage in self._coordinator.leadership.operations.short_of_room():
            wait = found.setdefault(
                shortage.node,
                admin_pb2.RoomWait(
                    node_number=shortage.node, has_bytes=shortage.has_bytes, limit=shortage.limit
                ),
            )
            wait.moves += 1
            wait.needs_bytes += shortage.needs_bytes
        return list(found.values())

    def _sessions(self) -> list[admin_pb2.NodeSession]:
        leadership = self._coordinator.leadership
        table = self._coordinator.table()
        now = boottime()
        sessions = leadership.members.sessions
        found = []
        for number in table.nodes if table is not None else ():
            heard_at = sessions.heard_at(number)
            since = leadership.term.began_at if heard_at is None else heard_at
            found.append(
                admin_pb2.NodeSession(
                    node_number=number,
                    live=sessions.is_live(number, now),
                    heard_ms_ago=max(0, round((now - since) * 1000)),
                    stats=leadership.members.stats.get(number),
                )
            )
        return found


# --- messages ----------------------------------------------------------------------------------


def _wish(request: admin_pb2.PlanRequest) -> PlanWish:
    kind = _KINDS.get(request.kind)
    if kind is None:
        raise InvalidArgumentError(field="kind", reason=f"{request.kind} is no kind of plan")
    if request.by not in _MEASURES:
        raise InvalidArgumentError(field="by", reason=f"{request.by} is no measure of a plan")
    if kind is PlanKind.REPLICATION_FACTOR:
        concerns(request.keyspace or DEFAULT)
    return PlanWish(
        kind=kind,
        node_id=request.node_id,
        with_node_id=request.with_node_id,
        replication_factor=request.replication_factor,
        keyspace=request.keyspace,
        by=_MEASURES[request.by],
        target_percent=request.target_percent,
        leaders_only=request.leaders_only,
    )


_CHANGES: dict[str, Callable[[Any, int | None], AccessCommand]] = {
    "put_role": lambda m, v: PutRole(role=convert.ROLE.decode(m), expected_version=v),
    "drop_role": lambda name, v: DropRole(name=name, expected_version=v),
    "put_user": lambda m, v: PutUser(user=convert.USER.decode(m), expected_version=v),
    "drop_user": lambda name, v: DropUser(name=name, expected_version=v),
    "add_token": lambda m, v: AddToken(token=convert.TOKEN.decode(m), expected_version=v),
    "drop_token": lambda token_id, v: DropToken(token_id=token_id, expected_version=v),
    "revoke_certificate": lambda s, v: RevokeCertificate(serial=s, expected_version=v),
    "restore_certificate": lambda s, v: RestoreCertificate(serial=s, expected_version=v),
}


def _access_change(request: admin_pb2.ChangeAccessRequest) -> AccessCommand:
    kind = request.WhichOneof("change")
    if kind is None:
        raise InvalidArgumentError(field="change", reason="none that this build knows is named")
    expected = None
    if request.HasField("expected_access_version"):
        expected = request.expected_access_version
    try:
        return _CHANGES[kind](getattr(request, kind), expected)
    except ValueError as error:  # of an action or effect without a name here
        raise InvalidArgumentError(field=kind, reason=str(error)) from error


def _keyspace_response(made: KeyspaceMade) -> admin_pb2.KeyspaceResponse:
    return admin_pb2.KeyspaceResponse(
        keyspace=convert.KEYSPACE.encode(made.keyspace),
        nodes_behind=made.in_force.behind,
        behind_serve_ms=math.ceil(made.in_force.serves_s * 1000),
    )


def _move_to_proto(view: MoveView) -> admin_pb2.MoveStatus:
    return _MOVE.encode(
        view.move,
        move=_PLANNED_MOVE.encode(view.move),
        progress_nodes=list(view.progress),
        progress=map(PROGRESS.encode, view.progress.values()),
        waits_for=view.waits_for,
    )


def _timeout_s(context: Any) -> float:
    remaining = context.time_remaining()
    return min(ADMIN_TIMEOUT_S, remaining) if remaining is not None else ADMIN_TIMEOUT_S
