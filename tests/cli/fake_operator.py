"""A coordinator and nodes in this process that answer an operator's calls, over real gRPC.

The coordinator follows the comments of admin.proto: the same cluster gives the same plan and id, a
plan of another id is stale, moves are queued and go on when ``step`` is called. Nodes answer for
sizes and checksums of their copies, which tests set.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import grpc

from koinon_coordinator.core.cluster.access_rules import changed
from koinon_coordinator.core.decide.access_requests import check_change
from koinon_coordinator.services.admin_service import _access_change
from koinon_proto.contract import convert
from koinon_proto.contract.access import AccessState
from koinon_proto.contract.cluster_errors import (
    LoadClosedError,
    MembershipChangeError,
    NotLeaderError,
    PlanStaleError,
    UnknownNodeError,
)
from koinon_proto.contract.table import (
    MoveSettings,
    NodeId,
    NodeInfo,
    NodeNumber,
    NodeStatus,
    OfflineReason,
    PartitionStatus,
    Table,
    first_sequence,
)
from koinon_proto.server import rpc
from koinon_proto.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    loads_pb2,
    loads_pb2_grpc,
    membership_pb2,
    replication_pb2,
    replication_pb2_grpc,
)
from tests.client.kit.fake_cluster import LoopThread
from tests.kit.tables import config_of, node_of, row_of, table_with

PARTITIONS = 8
Progress = membership_pb2.ReplicaProgress


class FakeCopies(replication_pb2_grpc.ReplicationServicer):
    """One node's answers on its copies: (complete_through, records, digest) by partition."""

    def __init__(self, partitions: int) -> None:
        through = first_sequence(1)
        self.copies = {p: (through + p, 10 + p, 1000 + p) for p in range(partitions)}
        self.not_usable: set[int] = set()
        self.stale: set[int] = set()  # partitions that have changed since they were counted
        self.on_checksums: Callable[[], None] = lambda: None

    @rpc.typed_errors
    async def Checksums(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.on_checksums()
        reply = replication_pb2.ChecksumsResponse()
        for p in request.partition_ids:
            through, records, digest = self.copies.get(p, (0, 0, 0))
            reply.copies.add(
                partition_id=p,
                usable=p in self.copies and p not in self.not_usable,
                complete_through=through,
                records=records,
                bytes=records * 100,
                digest=digest,
            )
        return reply

    @rpc.typed_errors
    async def PartitionSizes(self, request: Any, context: Any) -> Any:  # noqa: N802
        held = sorted(self.copies)
        records = [self.copies[p][1] for p in held]
        return replication_pb2.PartitionSizesResponse(
            partition_ids=held,
            records=records,
            bytes=[1_000_000 * n for n in records],
            stale=[p in self.stale for p in held],
        )


class FakeLoads(loads_pb2_grpc.LoadsServicer):
    """The bulk loads of the coordinator. Each time that they are asked for, ``steps`` has its next
    say.
    """

    def __init__(self) -> None:
        self.loads: list[loads_pb2.LoadInfo] = []
        self.steps: list[Callable[[], None]] = []
        self.aborted: list[tuple[int, str]] = []

    @rpc.typed_errors
    async def GetLoads(self, request: Any, context: Any) -> Any:  # noqa: N802
        if self.steps:
            self.steps.pop(0)()
        return loads_pb2.GetLoadsResponse(loads=self.loads)

    @rpc.typed_errors
    async def AbortLoad(self, request: Any, context: Any) -> Any:  # noqa: N802
        (load,) = [load for load in self.loads if load.load_id == request.load_id]
        if load.state not in (loads_pb2.LOAD_STATE_OPEN, loads_pb2.LOAD_STATE_ABORTED):
            raise LoadClosedError(
                load_id=request.load_id, state="merging", reason="it is committed"
            )
        self.aborted.append((request.load_id, request.reason))
        return loads_pb2.AbortLoadResponse(state=loads_pb2.LOAD_STATE_ABORTED)


class FakeOperator(admin_pb2_grpc.AdminServicer):
    """The coordinator. ``planned`` is what any plan comes to; ``calls`` what was asked of it."""

    def __init__(self, nodes: int = 3, partitions: int = PARTITIONS) -> None:
        self.thread = LoopThread()
        self.copies = {n: FakeCopies(partitions) for n in range(1, nodes + 1)}
        self._servers = [
            self._serve((replication_pb2_grpc.add_ReplicationServicer_to_server, c))
            for c in self.copies.values()
        ]
        self.loads = FakeLoads()
        own = self._serve(
            (admin_pb2_grpc.add_AdminServicer_to_server, self),
            (loads_pb2_grpc.add_LoadsServicer_to_server, self.loads),
        )
        self._servers.append(own)
        self.address = own[1]
        addresses = [address for _, address in self._servers[:-1]]
        self.table = _table(addresses, partitions)
        self.reason = "because"
        self.planned: list[tuple[int, Sequence[int], Sequence[int]]] = []
        self.forced_meanwhile: set[int] = set()
        self.advertised = ""  # where the others find it
        self.refusals: list[admin_pb2.PlanRefusal] = []
        self.node_loads: dict[int, tuple[float, float]] = {}  # before and after a plan by load
        self.generation = 1
        self.stale_after_plan = 0
        self.moves: list[admin_pb2.MoveStatus] = []
        self.settings = MoveSettings()
        self.requests: list[Any] = []
        self.silent: set[str] = set()  # requests (by their types' names) that get no answer
        self.not_leading = 0
        self.leaderless = False  # what the status says
        self.steps_a_poll = 0
        self.drops_queued_at_poll = False
        self.access = AccessState()
        self.nodes_behind: list[str] = []  # as changes of access answer
        self.access_changed_meanwhile = 0  # before so many changes are made

    def _serve(self, *services: tuple[Any, Any]) -> tuple[Any, str]:
        async def start() -> tuple[Any, str]:
            server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
            for add, servicer in services:
                cast(Any, add)(servicer, server)
            port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            return server, f"127.0.0.1:{port}"

        return self.thread.run(start())

    def close(self) -> None:
        for server, _ in self._servers:
            self.thread.run(server.stop(None))
        self.thread.stop()

    def stop_node(self, number: int) -> None:
        """Stop the node's server; the table does not know yet."""
        self.thread.run(self._servers[number - 1][0].stop(None))

    def change_row(self, partition_id: int, **fields: Any) -> None:
        rows = list(self.table.rows)
        rows[partition_id] = replace(rows[partition_id], **fields)
        self.table = replace(
            self.table, table_version=self.table.table_version + 1, rows=tuple(rows)
        )

    def change_node(self, number: int, **fields: Any) -> None:
        nodes = dict(self.table.nodes)
        nodes[NodeNumber(number)] = replace(nodes[NodeNumber(number)], **fields)
        self.table = replace(self.table, table_version=self.table.table_version + 1, nodes=nodes)

    def step(self) -> None:
        """Finish a running move, else begin a queued one."""
        running = [move for move in self.moves if move.running]
        if running:
            self.moves.remove(running[0])
            if not running[0].cancelled:
                made = running[0].move
                self.change_row(made.partition_id, replicas=tuple(map(NodeNumber, made.target)))
        elif self.moves:
            move = self.moves[0]
            move.running = True
            for number in set(move.move.target) - set(move.move.origin):
                move.progress_nodes.append(number)
                move.progress.add(
                    partition_id=move.move.partition_id,
                    stage=Progress.STAGE_SNAPSHOT,
                    bytes=4_000_000,
                    bytes_total=10_000_000,
                )

    # --- the service ----------------------------------------------------------------------------

    @property
    def plan_id(self) -> str:
        return f"plan{self.generation}"

    def _node(self, node_id: str) -> NodeInfo:
        if NodeId(node_id) not in self.table.by_id:
            raise UnknownNodeError(node_id=node_id)
        return self.table.by_id[NodeId(node_id)]

    async def _enter(self, request: Any) -> None:
        if self.not_leading:
            self.not_leading -= 1
            raise NotLeaderError(leader_id="", leader_address="", term=1)
        self.requests.append(request)
        if type(request).__name__ in self.silent:
            await asyncio.Event().wait()

    @rpc.typed_errors
    async def GetStatus(self, request: Any, context: Any) -> Any:  # noqa: N802
        table = replace(self.table, moves=self.settings)
        status = admin_pb2.ClusterStatus(
            member_id="c1",
            is_leader=not self.leaderless,
            leader_id="" if self.leaderless else "c1",
            leader_address="" if self.leaderless else self.advertised or self.address,
            term=1,
            table=convert.update_to_proto(table.since(0)),
        )
        status.coordinators.add(
            member_id="c1",
            address=self.advertised or self.address,
            voter=True,
            leader=not self.leaderless,
            active=True,
        )
        for number, copies in self.copies.items():
            session = status.sessions.add(node_number=number, live=True)
            session.stats.records = 100 * len(copies.copies)
            session.stats.used_bytes, session.stats.map_bytes = 8_000_000, 80_000_000
        return status

    @rpc.typed_errors
    async def PlanMoves(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._enter(request)
        if request.node_id:
            self._node(request.node_id)
        plan = admin_pb2.Plan(plan_id=self.plan_id, table_version=self.table.table_version)
        for p, origin, target in self.planned:
            plan.moves.add(partition_id=p, origin=origin, target=target, reason=self.reason)
        for number in self.table.nodes:
            before = sum(number in row.replicas for row in self.table.rows)
            had, has = self.node_loads.get(number, (0.0, 0.0)) if request.by else (0.0, 0.0)
            part = 1.0 if had or has else 0.0
            plan.before.add(
                node_number=number, replicas=before, primaries=2, load=had, capacity=part
            )
            gains = sum((number in t) - (number in o) for _, o, t in self.planned)
            plan.after.add(
                node_number=number, replicas=before + gains, primaries=2, load=has, capacity=part
            )
        plan.refusals.extend(self.refusals)
        if self.stale_after_plan:
            self.stale_after_plan -= 1
            self.generation += 1
        return plan

    @rpc.typed_errors
    async def ExecutePlan(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._enter(request)
        if request.plan_id != self.plan_id:
            raise PlanStaleError(plan_id=request.plan_id, current_plan_id=self.plan_id)
        for p, origin, target in self.planned:
            move = admin_pb2.PlannedMove(
                partition_id=p, origin=origin, target=target, reason=self.reason
            )
            self.moves.append(
                admin_pb2.MoveStatus(move=move, plan_id=self.plan_id, plan_moves=len(self.planned))
            )
        return admin_pb2.ExecutePlanResponse()

    @rpc.typed_errors
    async def GetMoves(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._enter(request)
        status = admin_pb2.MovesStatus(
            settings=convert.settings_to_proto(self.settings), moves=self.moves
        )
        for _ in range(self.steps_a_poll):
            self.step()
        if self.drops_queued_at_poll:
            self.moves = [move for move in self.moves if move.running]
        return status

    @rpc.typed_errors
    async def CancelMoves(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._enter(request)
        chosen = [
            move
            for move in self.moves
            if not request.partition_ids or move.move.partition_id in request.partition_ids
        ]
        for move in chosen:
            if move.running:
                move.cancelled = True
            else:
                self.moves.remove(move)
        turned_back = sum(move.running for move in chosen)
        return admin_pb2.CancelMovesResponse(
            dropped=len(chosen) - turned_back, turned_back=turned_back
        )

    @rpc.typed_errors
    async def SetMoves(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._enter(request)
        for name in ("paused", "bytes_per_second", "moves_per_node"):
            if request.HasField(name):
                self.settings = replace(self.settings, **{name: getattr(request, name)})
        return convert.settings_to_proto(self.settings)

    @rpc.typed_errors
    async def SetNodeStatus(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._enter(request)
        node = self._node(request.node_id)
        if request.status == NodeStatus.LEFT and any(
            node.number in row.replicas for row in self.table.rows
        ):
            raise MembershipChangeError(reason=f"{request.node_id} is still a replica: drain it")
        self.change_node(node.number, status=NodeStatus(request.status))
        return admin_pb2.SetNodeStatusResponse()

    @rpc.typed_errors
    async def GetAccess(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._enter(request)
        tokens = tuple(replace(token, sha256=b"") for token in self.access.tokens)
        return admin_pb2.GetAccessResponse(
            access=convert.ACCESS.encode(replace(self.access, tokens=tokens))
        )

    @rpc.typed_errors
    async def ChangeAccess(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._enter(request)
        if self.access_changed_meanwhile:
            self.access_changed_meanwhile -= 1
            self.access = replace(self.access, version=self.access.version + 1)
        command = _access_change(request)
        check_change(self.access, command, self.table.keyspaces)
        self.access = changed(self.access, command)
        return admin_pb2.ChangeAccessResponse(
            access_version=self.access.version, nodes_behind=self.nodes_behind
        )

    @rpc.typed_errors
    async def RestorePrimaries(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._enter(request)
        return admin_pb2.RestorePrimariesResponse(wanted=3)

    @rpc.typed_errors
    async def ForcePrimaries(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._enter(request)
        reply = admin_pb2.ForcePrimariesResponse()
        for one in request.primaries:
            self._node(one.node_id)
            epoch = self.table.rows[one.partition_id].primary_epoch + 1
            if one.partition_id in self.forced_meanwhile:
                reply.primaries.add(partition_id=one.partition_id, refused="it is led")
            else:
                reply.primaries.add(partition_id=one.partition_id, primary_epoch=epoch)
        return reply


def _table(addresses: Sequence[str], partitions: int) -> Table:
    count = len(addresses)
    rows = (
        row_of(p, *((p + i) % count + 1 for i in range(min(3, count)))) for p in range(partitions)
    )
    config = config_of(
        partitions, cluster_id="fake", replication_factor=3, min_in_sync=2, bootstrap_nodes=3
    )
    nodes = (node_of(n, address=address) for n, address in enumerate(addresses, 1))
    return table_with(rows, nodes, config=config)


LOST: dict[str, Any] = {
    "status": PartitionStatus.OFFLINE,
    "offline_reason": OfflineReason.STORE_LOST,
    "primary": NodeNumber(0),
    "in_sync": (),
}
"""A row whose in-sync copies are all gone."""
