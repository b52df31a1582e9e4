"""A coordinator that does what a test tells it to, over real sockets: one member, one node.

By default it registers whoever comes, gives it every partition, acknowledges heartbeats, pushes the
table to who watches it, and does what a primary proposes. A test changes ``on_register``,
``on_heartbeat``, ``on_watch`` and ``on_alter`` (raise a KoinonError to refuse), or the table.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import grpc

from koinon_proto.contract import convert
from koinon_proto.contract.cluster_errors import LoadClosedError, NodeFencedError
from koinon_proto.contract.errors import ClusterNotReadyError, KoinonError
from koinon_proto.contract.table import (
    ClusterConfig,
    NodeId,
    NodeInfo,
    NodeNumber,
    NodeStatus,
    PartitionId,
    PartitionRow,
    PartitionStatus,
    RedisPort,
    Table,
    TableUpdate,
)
from koinon_proto.v1 import (
    loads_pb2,
    loads_pb2_grpc,
    membership_pb2,
    membership_pb2_grpc,
    raft_pb2,
    table_pb2,
    table_pb2_grpc,
)

from .heartbeat_port import HeartbeatPort

_WATCH_STEP_S = 0.2


@dataclass
class Script:
    """The answers of the coordinator; all fields may be changed while it runs."""

    cluster_id: str = "cluster-a"
    partition_count: int = 16
    partitioner: str = "murmur2"
    partitioner_fingerprint: bytes = b""
    max_value_bytes: int = 1024 * 1024
    heartbeat_interval_ms: int = 50
    lease_ms: int = 10_000  # so that a busy machine ends none
    bootstrapped: bool = True
    on_register: Callable[[membership_pb2.RegisterRequest], None] = lambda request: None
    on_heartbeat: Callable[[membership_pb2.HeartbeatRequest], None] = lambda request: None
    on_watch: Callable[[table_pb2.GetTableRequest], None] = lambda request: None
    on_alter: Callable[[membership_pb2.AlterPartitionsRequest], None] = lambda request: None
    heartbeats_bring_tables: bool = True
    watches_bring_tables: bool = True
    status: PartitionStatus = PartitionStatus.ONLINE  # of new rows
    primaries: dict[int, int] = field(default_factory=dict)  # partition -> node number; default 1


class ScriptedCoordinator(
    membership_pb2_grpc.MembershipServicer,
    table_pb2_grpc.TableServiceServicer,
    loads_pb2_grpc.LoadsServicer,
):
    """Start with ``with``; ``address`` is where it listens."""

    def __init__(self, script: Script | None = None) -> None:
        self.script = script or Script()
        self.registrations: list[membership_pb2.RegisterRequest] = []
        self.heartbeats: list[membership_pb2.HeartbeatRequest] = []
        self.alterations: list[membership_pb2.AlterPartitionsRequest] = []
        self.watches: list[table_pb2.GetTableRequest] = []
        self.watching = 0
        self.acknowledged: dict[int, int] = {}
        self.manifests: dict[int, loads_pb2.LoadManifest] = {}
        self.merged: dict[int, set[int]] = {}  # load -> partitions that were reported
        self.table: Table | None = None
        self.node_epoch = 0
        self.primary_epoch = 0
        self._answered: dict[str, int] = {}
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._port = HeartbeatPort(self._heartbeat)
        self._server = grpc.server(futures.ThreadPoolExecutor(16))
        membership_pb2_grpc.add_MembershipServicer_to_server(self, self._server)
        table_pb2_grpc.add_TableServiceServicer_to_server(self, self._server)
        loads_pb2_grpc.add_LoadsServicer_to_server(self, self._server)
        port = self._server.add_insecure_port("127.0.0.1:0")
        self.address = f"127.0.0.1:{port}"

    def __enter__(self) -> ScriptedCoordinator:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(None).wait(5)
        self._port.close()

    # --- Membership ------------------------------------------------------------------------

    def Register(self, request: Any, context: Any) -> membership_pb2.RegisterResponse:  # noqa: N802
        with self._lock:
            self.registrations.append(request)
            if request.registration_id not in self._answered:
                self.node_epoch += 1
                self.primary_epoch += 1
                self._answered[request.registration_id] = self.node_epoch
                self.acknowledged.clear()
                self._build_table(request)
            self._refuse(context, self.script.on_register, request)
            reply = membership_pb2.RegisterResponse(
                cluster_id=self.script.cluster_id,
                node_epoch=self._answered[request.registration_id],
                term=1,
                heartbeat_interval_ms=self.script.heartbeat_interval_ms,
                lease_ms=self.script.lease_ms,
            )
            if self.table is not None and self.script.bootstrapped:
                reply.table.CopyFrom(convert.update_to_proto(self.table.since(0)))
            return reply

    def GetPeerPort(self, request: Any, context: Any) -> raft_pb2.GetPeerPortResponse:  # noqa: N802
        return raft_pb2.GetPeerPortResponse(peer_port=self._port.number)

    def _heartbeat(
        self, request: membership_pb2.HeartbeatRequest
    ) -> membership_pb2.HeartbeatResponse:
        with self._lock:
            self.heartbeats.append(request)
            self.script.on_heartbeat(request)
            self._check_epoch(request)
            reply = membership_pb2.HeartbeatResponse(term=1, lease_ms=self.script.lease_ms)
            if self.table is None or not self.script.bootstrapped:
                return reply
            for command in request.hosted:
                self.acknowledged[command.partition_id] = command.primary_epoch
            if (
                self.script.heartbeats_bring_tables
                and request.table_version < self.table.table_version
            ):
                update = self.table.since(request.table_version)
                reply.table.CopyFrom(convert.update_to_proto(update))
            for row in self.table.rows:
                if (
                    row.primary == 1
                    and self.acknowledged.get(row.partition_id) != row.primary_epoch
                ):
                    reply.commands.add(
                        partition_id=row.partition_id,
                        primary_epoch=row.primary_epoch,
                        partition_epoch=row.partition_epoch,
                    )
            return reply

    def AlterPartitions(  # noqa: N802
        self, request: Any, context: Any
    ) -> membership_pb2.AlterPartitionsResponse:
        with self._lock:
            self.alterations.append(request)
            self._refuse(context, self.script.on_alter, request)
            self._refuse(context, self._check_epoch, request)
            rejected = [c.partition_id for c in request.changes if not self._alter(c)]
            assert self.table is not None
            reply = membership_pb2.AlterPartitionsResponse(rejected=rejected)
            if request.table_version < self.table.table_version:
                update = self.table.since(request.table_version)
                reply.table.CopyFrom(convert.update_to_proto(update))
            return reply

    def _alter(self, change: membership_pb2.PartitionChange) -> bool:
        assert self.table is not None
        row = self.table.rows[change.partition_id]
        if (row.primary_epoch, row.partition_epoch) != (
            change.primary_epoch,
            change.partition_epoch,
        ):
            return False
        self.change_row(
            row.partition_id,
            in_sync=tuple(NodeNumber(n) for n in change.in_sync),
            primary=NodeNumber(change.hand_over_to) or row.primary,
            primary_epoch=row.primary_epoch + bool(change.hand_over_to),
            partition_epoch=row.partition_epoch + 1,
        )
        return True

    # --- Loads -----------------------------------------------------------------------------

    def GetManifest(self, request: Any, context: Any) -> loads_pb2.LoadManifest:  # noqa: N802
        with self._lock:
            self._refuse(context, self._check_manifest, request)
            return self.manifests[request.load_id]

    def ReportMerged(self, request: Any, context: Any) -> loads_pb2.ReportMergedResponse:  # noqa: N802
        with self._lock:
            self.merged.setdefault(request.load_id, set()).update(request.partition_ids)
            return loads_pb2.ReportMergedResponse(state=loads_pb2.LOAD_STATE_MERGING)

    def _check_manifest(self, request: loads_pb2.GetManifestRequest) -> None:
        if request.load_id not in self.manifests:
            raise LoadClosedError(load_id=request.load_id, state="done")

    # --- TableService ----------------------------------------------------------------------

    def WatchTable(self, request: Any, context: Any) -> Iterator[table_pb2.TableUpdate]:  # noqa: N802
        with self._changed:
            self.watches.append(request)
            self._refuse(context, self.script.on_watch, request)
            self._refuse(context, self._check_bootstrapped, request)
            version = request.known_version
            self.watching += 1
        try:
            while context.is_active():
                with self._changed:
                    self._changed.wait_for(partial(self._newer, version), _WATCH_STEP_S)
                    update = self._update_since(version)
                if update is not None:
                    version = update.table_version
                    yield convert.update_to_proto(update)
        finally:
            with self._lock:
                self.watching -= 1

    def _update_since(self, version: int) -> TableUpdate | None:
        return self.table.since(version) if self.table and self._newer(version) else None

    def _newer(self, version: int) -> bool:
        return (
            self.script.watches_bring_tables
            and self.table is not None
            and self.table.table_version > version
        )

    # --- the script's hands ----------------------------------------------------------------

    def fence(self) -> None:
        """The node's epoch is over."""
        with self._lock:
            self.node_epoch += 1

    def change_table(self, change: Callable[[Table], Table]) -> None:
        """Replace the table by ``change`` of it, at the next version."""
        with self._lock:
            assert self.table is not None
            version = self.table.table_version + 1
            self.table = replace(change(self.table), table_version=version)
            self._changed.notify_all()

    def change_row(self, partition_id: int, **changes: Any) -> None:
        """Change one row, at the next version."""

        def change(table: Table) -> Table:
            rows = list(table.rows)
            version = table.table_version + 1
            rows[partition_id] = replace(rows[partition_id], changed_at=version, **changes)
            return replace(table, rows=tuple(rows))

        self.change_table(change)

    def hosted_all(self) -> bool:
        """Return whether the node has acknowledged every partition that it was given."""
        with self._lock:
            if self.table is None:
                return False
            mine = [row for row in self.table.rows if row.primary == 1]
            return all(self.acknowledged.get(r.partition_id) == r.primary_epoch for r in mine)

    def _check_epoch(self, request: membership_pb2.HeartbeatRequest) -> None:
        if request.node_epoch != self.node_epoch:
            raise NodeFencedError(
                node_id=request.node_id,
                node_epoch=request.node_epoch,
                current_node_epoch=self.node_epoch,
            )

    def _check_bootstrapped(self, request: table_pb2.GetTableRequest) -> None:
        if not self.script.bootstrapped:
            raise ClusterNotReadyError(registered_nodes=1, bootstrap_nodes=2)

    def _refuse(self, context: Any, check: Callable[[Any], None], request: Any) -> None:
        try:
            check(request)
        except KoinonError as error:
            code = grpc.StatusCode.FAILED_PRECONDITION
            details = convert.error_to_status_details(error, code.value[0])
            context.set_trailing_metadata(((convert.STATUS_DETAILS_KEY, details),))
            context.abort(code, str(error))

    def _build_table(self, request: membership_pb2.RegisterRequest) -> None:
        script = self.script
        version = self.table.table_version + 1 if self.table else 1
        nodes = {
            NodeNumber(number): NodeInfo(
                number=NodeNumber(number),
                node_id=NodeId(request.node_id if number == 1 else f"other{number}"),
                address=request.address if number == 1 else f"127.0.0.1:{number}",
                rack="",
                node_epoch=self.node_epoch,
                status=NodeStatus.ACTIVE,
                store_id=request.store_id,
                changed_at=version,
                redis_address=request.redis_address if number == 1 else "",
                redis_ports=tuple(
                    RedisPort(port.keyspace, port.address)
                    for port in (request.redis_ports if number == 1 else ())
                ),
            )
            for number in {1, *script.primaries.values()} - {0}
        }
        rows = tuple(
            PartitionRow(
                partition_id=PartitionId(p),
                replicas=(NodeNumber(script.primaries.get(p, 1)),),
                in_sync=(NodeNumber(script.primaries.get(p, 1)),),
                primary=NodeNumber(script.primaries.get(p, 1)),
                primary_epoch=self.primary_epoch,
                partition_epoch=version,
                status=script.status,
                changed_at=version,
            )
            for p in range(script.partition_count)
        )
        cluster = ClusterConfig(
            cluster_id=script.cluster_id,
            partitioner=script.partitioner,
            partitioner_fingerprint=script.partitioner_fingerprint,
            partition_count=script.partition_count,
            replication_factor=1,
            min_in_sync=1,
            bootstrap_nodes=1,
            max_value_bytes=script.max_value_bytes,
        )
        self.table = Table(cluster=cluster, table_version=version, nodes=nodes, rows=rows)
        self._changed.notify_all()
