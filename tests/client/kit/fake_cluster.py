"""A cluster in this process, over real gRPC, that misbehaves on demand. For protocol tests only.

Nodes share one dict of records and one table; each also serves the table, as coordinators do, and
speaks RESP if the cluster is to.
Faults are injected per node: ``refuse`` answers for partitions, ``before`` and ``after`` run around
the work of a call and may raise, wait at a gate or cut connections.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

import grpc

from koinon.local.cluster_files import port_of
from koinon_proto.contract import convert
from koinon_proto.contract.errors import (
    CheckFailedError,
    ClusterNotReadyError,
    ConditionFailedError,
    KoinonError,
    NotANumberError,
    NotPrimaryError,
    PartitionOfflineError,
    ReplyTooLargeError,
    WrongClusterError,
)
from koinon_proto.contract.keyspaces import KeyspaceId, KeyspaceList, default_keyspace
from koinon_proto.contract.table import (
    MAX_BATCH_BYTES,
    NO_NODE,
    NodeNumber,
    NodeStatus,
    PartitionStatus,
    Table,
    first_sequence,
)
from koinon_proto.partitioner import Partitioner, partitioner
from koinon_proto.server import rpc
from koinon_proto.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    kv_pb2,
    kv_pb2_grpc,
    table_pb2,
    table_pb2_grpc,
)
from tests.client.kit.fake_resp import FakeResp
from tests.kit.addresses import free_address
from tests.kit.tables import config_of, node_of, row_of, table_with

T = TypeVar("T")


def free_port() -> int:
    return port_of(free_address())


Hook = Callable[[str, Any], Awaitable[None]]
PARTITIONS = 64


class LoopThread:
    """An event loop on a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float = 60.0) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout_s)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(60)
        self.loop.close()


class Gate:
    """Holds calls at a point until it is opened, from any thread."""

    def __init__(self, thread: LoopThread) -> None:
        self._thread = thread
        self._open = asyncio.Event()
        self.reached = threading.Event()

    async def __call__(self, _method: str, _request: Any) -> None:
        self.reached.set()
        await self._open.wait()

    def open(self) -> None:
        self._thread.loop.call_soon_threadsafe(self._open.set)


class FakeNode(
    kv_pb2_grpc.KeyValueServicer, admin_pb2_grpc.AdminServicer, table_pb2_grpc.TableServiceServicer
):
    """One node's servicer: ``calls`` counts them by method, ``rows`` the rows they carried."""

    services: tuple[Any, ...] = (
        kv_pb2_grpc.add_KeyValueServicer_to_server,
        table_pb2_grpc.add_TableServiceServicer_to_server,
        admin_pb2_grpc.add_AdminServicer_to_server,
    )

    def __init__(self, cluster: FakeCluster, number: int) -> None:
        self.cluster = cluster
        self.number = NodeNumber(number)
        self.address = ""
        self.server: grpc.aio.Server | None = None
        self.resp: FakeResp | None = None
        self.calls: dict[str, int] = {}
        self.rows: dict[str, list[int]] = {}
        self.deadlines_s: list[float] = []
        self.refuse: Callable[[int], KoinonError | None] = lambda _p: None
        self.before: Hook | None = None
        self.after: Hook | None = None
        self.page_rows_max = 50

    async def start(self, port: int = 0, resp_port: int = 0) -> None:
        port, resp_port = port or free_port(), resp_port or free_port()  # to listen there again
        if self.cluster.speaks_resp:
            self.resp = self.resp or FakeResp(
                f"n{self.number}",
                self.cluster.partitioner.partition_of,
                self.batch_get,
                self.batch_write,
                self.batch_update,
                self.scan,
            )
            await self.resp.start(resp_port)
        self.server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
        for add in self.services:
            add(self, self.server)
        bound = self.server.add_insecure_port(f"127.0.0.1:{port}")
        self.address = f"127.0.0.1:{bound}"
        await self.server.start()

    @property
    def redis_address(self) -> str:
        return self.resp.address if self.resp is not None else ""

    async def stop(self) -> None:
        """Cut every connection and stop listening."""
        if self.resp is not None:
            await self.resp.stop()
        if self.server is not None:
            await self.server.stop(None)

    async def _enter(self, method: str, request: Any, rows: int, context: Any) -> None:
        self.calls[method] = self.calls.get(method, 0) + 1
        self.rows.setdefault(method, []).append(rows)
        self.deadlines_s.append(context.time_remaining())
        if self.before is not None:
            await self.before(method, request)

    async def _leave(self, method: str, request: Any, context: Any) -> None:
        if self.after is not None:
            await self.after(method, request)
        if method in self.cluster.exhausted_replies:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too large")

    def _refusals(self, partition_ids: Any) -> dict[int, KoinonError]:
        refused: dict[int, KoinonError] = {}
        for partition_id in set(partition_ids):
            error = self.refuse(partition_id) or self.cluster.refusal(self, partition_id)
            if error is not None:
                refused[partition_id] = error
        return refused

    async def Attend(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Give leave to send until the server stops."""
        yield kv_pb2.AttendResponse()
        await asyncio.Event().wait()

    @rpc.typed_errors
    async def BatchGet(self, request: kv_pb2.BatchGetRequest, context: Any) -> Any:  # noqa: N802
        return await self.batch_get(request, context)

    async def batch_get(self, request: kv_pb2.BatchGetRequest, context: Any) -> Any:
        await self._enter("BatchGet", request, len(request.keys), context)
        refused = self._refusals(request.partition_ids)
        reply = kv_pb2.BatchGetResponse(refusals=_to_proto(refused))
        for row, (key, p) in enumerate(zip(request.keys, request.partition_ids, strict=True)):
            value, version, expires = self.cluster.store.get(key, (b"", 0, 0))
            if version == 0 and p not in refused:
                reply.missing.append(row)
            reply.values.append(b"" if p in refused else value)
            if request.want_versions:
                reply.versions.append(version)
                reply.expires_at_ms.append(expires)
        if reply.ByteSize() > MAX_BATCH_BYTES:
            raise ReplyTooLargeError(limit=MAX_BATCH_BYTES, actual=reply.ByteSize())
        await self._leave("BatchGet", request, context)
        return reply

    @rpc.typed_errors
    async def BatchWrite(  # noqa: N802
        self, request: kv_pb2.BatchWriteRequest, context: Any
    ) -> Any:
        return await self.batch_write(request, context)

    async def batch_write(self, request: kv_pb2.BatchWriteRequest, context: Any) -> Any:
        await self._enter("BatchWrite", request, len(request.keys), context)
        told = self.cluster.durabilities
        told[request.durability] = told.get(request.durability, 0) + len(request.keys)
        refused = self._refusals(request.partition_ids)
        reply = kv_pb2.BatchWriteResponse(refusals=_to_proto(refused))
        deletes = set(request.deletes)
        conditions = {c.row: c.if_version for c in request.conditions}
        for row, key in enumerate(request.keys):
            version = 0
            if request.partition_ids[row] not in refused:
                held = self.cluster.store.get(key, (b"", 0, 0))[1]
                if held and conditions.get(row) == 0 and request.list_present:
                    reply.present.append(row)
                    self.cluster.present_listed += 1
                elif row in conditions and conditions[row] != held:
                    error = ConditionFailedError(
                        expected_version=conditions[row], current_version=held
                    )
                    reply.row_errors.add(row=row, error=convert.error_to_proto(error))
                elif row in deletes:
                    if self.cluster.store.pop(key, None) is None:
                        reply.absent.append(row)
                else:
                    ttls = request.ttl_ms
                    ttl = 0 if not ttls else ttls[0] if len(ttls) == 1 else ttls[row]
                    version = self.cluster.write(key, request.values[row], ttl)
            reply.versions.append(version)
        await self._leave("BatchWrite", request, context)
        return reply

    @rpc.typed_errors
    async def BatchUpdate(  # noqa: N802
        self, request: kv_pb2.BatchUpdateRequest, context: Any
    ) -> Any:
        return await self.batch_update(request, context)

    async def batch_update(self, request: kv_pb2.BatchUpdateRequest, context: Any) -> Any:
        await self._enter("BatchUpdate", request, len(request.keys), context)
        refused = self._refusals(request.partition_ids)
        reply = kv_pb2.BatchUpdateResponse(refusals=_to_proto(refused))
        for row, (key, update) in enumerate(zip(request.keys, request.updates, strict=True)):
            result = reply.results.add()
            if request.partition_ids[row] in refused:
                continue
            value, version, expires = self.cluster.store.get(key, (b"", 0, 0))
            kind = update.WhichOneof("kind")
            result.found = kind != "increment" and version > 0
            if kind == "increment":
                if not (value or b"0").lstrip(b"-").isdigit():
                    error = NotANumberError(expected="an integer of 64 bits")
                    reply.row_errors.add(row=row, error=convert.error_to_proto(error))
                    continue
                result.number = int(value or b"0") + update.increment.by
                ttl_ms = expires if version else update.increment.ttl_ms
                result.version = self.cluster.write(key, b"%d" % result.number, ttl_ms)
            elif kind == "touch":
                if version:
                    result.version = self.cluster.write(key, value, update.touch.ttl_ms)
            elif version:
                result.value = value
            else:
                new = update.get_or_put
                result.version = self.cluster.write(key, new.value, new.ttl_ms)
        await self._leave("BatchUpdate", request, context)
        return reply

    @rpc.typed_errors
    async def CommitBatch(  # noqa: N802
        self, request: kv_pb2.CommitBatchRequest, context: Any
    ) -> Any:
        await self._enter("CommitBatch", request, len(request.operations), context)
        for error in self._refusals([request.partition_id]).values():
            raise error
        store = self.cluster.store
        for operation in request.operations:
            found = store.get(operation.key, (b"", 0, 0))[1]
            if operation.HasField("check") and found != operation.check.version:
                raise CheckFailedError(
                    key=operation.key,
                    expected_version=operation.check.version,
                    current_version=found,
                )
        reply = kv_pb2.CommitBatchResponse()
        for operation in request.operations:
            result, key = reply.results.add(), operation.key
            value, version, expires = store.get(key, (b"", 0, 0))
            if operation.HasField("put"):
                put = operation.put
                reply.version = self.cluster.write(key, put.value, put.ttl_ms)
            elif operation.HasField("delete"):
                result.found = store.pop(key, None) is not None
            elif operation.HasField("increment"):
                result.number = int(value or b"0") + operation.increment.by
                ttl_ms = expires if version else operation.increment.ttl_ms
                reply.version = self.cluster.write(key, b"%d" % result.number, ttl_ms)
        await self._leave("CommitBatch", request, context)
        return reply

    @rpc.typed_errors
    async def Scan(self, request: kv_pb2.ScanRequest, context: Any) -> Any:  # noqa: N802
        return await self.scan(request, context)

    async def scan(self, request: kv_pb2.ScanRequest, context: Any) -> Any:
        await self._enter("Scan", request, 0, context)
        refused = self._refusals(request.partition_ids)
        wanted = set(request.partition_ids) - set(refused)
        part = self.cluster.partitioner.partition_of
        found = sorted(
            (part(k), k, v)
            for k, v in self.cluster.store.items()
            if part(k) in wanted and k.startswith(request.prefix)
        )
        if request.reverse:
            found.reverse()
            found.sort(key=lambda f: f[0])
        if start := request.start:
            found = [f for f in found if f[1] == start or _beyond(request, f[1], start)]
        if request.HasField("cursor"):
            at, after = request.cursor.partition_id, request.cursor.after_key
            begun = [f for f in found if f[0] == at]
            if after:
                begun = [f for f in begun if _beyond(request, f[1], after)]
            found = [*begun, *(f for f in found if f[0] > at)]
        limit = min(request.limit or self.page_rows_max, self.page_rows_max)
        page = found[:limit]
        reply = kv_pb2.ScanResponse(refusals=_to_proto(refused))
        reply.keys.extend(k for _, k, _ in page)
        reply.values.extend(b"" if request.keys_only else v[0] for _, _, v in page)
        reply.partition_ids.extend(p for p, _, _ in page)
        reply.versions.extend(v[1] for _, _, v in page)
        reply.expires_at_ms.extend(v[2] for _, _, v in page)
        if len(found) > limit:
            reply.next.partition_id, reply.next.after_key = page[-1][:2]
        await self._leave("Scan", request, context)
        return reply

    @rpc.typed_errors
    async def GetTable(self, request: table_pb2.GetTableRequest, context: Any) -> Any:  # noqa: N802
        await self._enter("GetTable", request, 0, context)
        table = self.cluster.served_table
        if table is None:
            raise ClusterNotReadyError(registered_nodes=1, bootstrap_nodes=3)
        own = table.cluster.cluster_id
        if request.cluster_id and request.cluster_id != own:
            raise WrongClusterError(expected_cluster_id=own, actual_cluster_id=request.cluster_id)
        return convert.update_to_proto(table.since(request.known_version))

    @rpc.typed_errors
    async def GetStatus(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._enter("GetStatus", request, 0, context)
        leader, table = self.cluster.nodes[-1], self.cluster.served_table
        return admin_pb2.ClusterStatus(
            table=convert.update_to_proto(table.since(0)) if table is not None else None,
            member_id=f"c{self.number}",
            is_leader=self is leader,
            leader_id=f"c{leader.number}",
            leader_address=leader.address,
        )


class FakeCluster:
    """Nodes, records and the table. ``moves`` may be made while clients run."""

    node_type: type[FakeNode] = FakeNode

    def __init__(
        self, nodes: int = 2, partitions: int = PARTITIONS, *, speaks_resp: bool = False
    ) -> None:
        self.speaks_resp = speaks_resp
        self.thread = LoopThread()
        self.partitioner: Partitioner = partitioner("murmur2", partitions)
        self.present_listed = 0  # rows
        self.store: dict[bytes, tuple[bytes, int, int]] = {}
        self.applied: list[tuple[bytes, bytes]] = []
        self.durabilities: dict[int, int] = {}
        """Rows by the durability of their batch."""
        self.exhausted_replies: set[str] = set()
        """Methods whose replies gRPC itself finds too large: it answers so, without a type."""
        self._versions = first_sequence(1)
        self.nodes = [self.node_type(self, n + 1) for n in range(nodes)]
        for node in self.nodes:
            self.thread.run(node.start())
        self.table = self._first_table(partitions)
        self.served_table: Table | None = self.table

    def _first_table(self, partitions: int, cluster_id: str = "fake") -> Table:
        rows = (row_of(p, self.nodes[p % len(self.nodes)].number) for p in range(partitions))
        members = (
            node_of(node.number, address=node.address, redis_address=node.redis_address)
            for node in self.nodes
        )
        config = config_of(partitions, cluster_id=cluster_id, partitioner=self.partitioner.name)
        return table_with(rows, members, config=config)

    @property
    def seeds(self) -> str:
        return ",".join(node.address for node in self.nodes)

    def gate(self) -> Gate:
        return Gate(self.thread)

    def refusal(self, node: FakeNode, partition_id: int) -> KoinonError | None:
        row = self.table.rows[partition_id]
        if row.primary == node.number:
            return None
        if row.primary == NO_NODE:
            return PartitionOfflineError(partition_id=partition_id, reason="no live replica")
        owner = self.table.nodes[row.primary]
        return NotPrimaryError(
            partition_id=partition_id,
            primary=owner.node_id,
            primary_address=owner.address,
            primary_epoch=row.primary_epoch,
            table_version=self.table.table_version,
        )

    def write(self, key: bytes, value: bytes, ttl_ms: int) -> int:
        self._versions += 1
        self.store[key] = (value, self._versions, ttl_ms)
        self.applied.append((key, value))
        return self._versions

    def move(self, partition_ids: Any, owner: int, *, tell: bool = True) -> None:
        """Give partitions to a node (0: to none). Without ``tell`` no server hands out the new
        table yet.
        """
        version = self.table.table_version + 1
        rows = list(self.table.rows)
        for p in partition_ids:
            rows[p] = replace(
                rows[p],
                primary=NodeNumber(owner),
                primary_epoch=rows[p].primary_epoch + 1,
                partition_epoch=rows[p].partition_epoch + 1,
                status=PartitionStatus.ONLINE if owner else PartitionStatus.OFFLINE,
                changed_at=version,
            )
        self.table = replace(self.table, table_version=version, rows=tuple(rows))
        if tell:
            self.served_table = self.table

    def create_keyspace(self, name: str, partition_count: int) -> None:
        """Let the table have a keyspace behind all others, whose rows lie in turn on the nodes."""
        version, rows = self.table.table_version + 1, self.table.rows
        keyspace = replace(
            default_keyspace(self.table.cluster),
            keyspace_id=KeyspaceId(len(self.table.keyspace_list.keyspaces) + 1),
            name=name,
            base=len(rows),
            partition_count=partition_count,
        )
        added = (
            row_of(p, self.nodes[p % len(self.nodes)].number, changed_at=version)
            for p in keyspace.partition_ids
        )
        known = (*self.table.keyspace_list.keyspaces, keyspace)
        self.table = self.served_table = replace(
            self.table,
            table_version=version,
            rows=(*rows, *added),
            keyspace_list=KeyspaceList(changed_at=version, keyspaces=known),
        )

    def fence(self, node: FakeNode, successor: FakeNode) -> None:
        """Let the table say that a node is fenced, and that another leads what it led."""
        led = [r.partition_id for r in self.table.rows if r.primary == node.number]
        self.move(led, successor.number, tell=False)
        version = self.table.table_version + 1
        info = self.table.nodes[node.number]
        fenced = replace(info, status=NodeStatus.FENCED, changed_at=version)
        nodes = {**self.table.nodes, node.number: fenced}
        self.table = replace(self.table, table_version=version, nodes=nodes)
        self.served_table = self.table

    def readdress(self, node: FakeNode, address: str, redis_address: str = "") -> None:
        """Let the table name other addresses for a node."""
        version = self.table.table_version + 1
        info = replace(
            self.table.nodes[node.number],
            address=address,
            redis_address=redis_address,
            changed_at=version,
        )
        nodes = {**self.table.nodes, node.number: info}
        self.table = replace(self.table, table_version=version, nodes=nodes)
        self.served_table = self.table

    def count(self, method: str) -> int:
        return sum(node.calls.get(method, 0) for node in self.nodes)

    def reset_counts(self) -> None:
        for node in self.nodes:
            node.calls.clear()
            node.rows.clear()

    def kill(self, node: FakeNode) -> None:
        """Cut every connection of a node and stop listening."""
        self.thread.run(node.stop())

    def revive(self, node: FakeNode) -> None:
        """Listen again where it listened before."""
        resp_port = int(node.redis_address.rpartition(":")[2] or 0)
        self.thread.run(node.start(int(node.address.rpartition(":")[2]), resp_port))

    def close(self) -> None:
        for node in self.nodes:
            self.thread.run(node.stop())
        self.thread.stop()


class Proxy:
    """A TCP relay in front of a node whose connections can be cut without a word. ``hold_s``: for
    so long a connection that was taken is silent, as over a long way.
    """

    def __init__(self, thread: LoopThread, target: str, *, hold_s: float = 0.0) -> None:
        self._thread = thread
        self._hold_s = hold_s
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._writers: set[asyncio.StreamWriter] = set()
        self._server = thread.run(asyncio.start_server(self._relay, "127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(self._hold_s)
        far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
        self._writers |= {writer, far_writer}
        try:
            await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))
        finally:
            self._writers -= {writer, far_writer}

    def cut(self) -> None:
        """Reset every connection."""

        def abort() -> None:
            for writer in self._writers:
                writer.transport.abort()

        self._thread.loop.call_soon_threadsafe(abort)

    def close(self) -> None:
        self.cut()
        self._thread.loop.call_soon_threadsafe(self._server.close)


class Proxies:
    """The proxies in front of a node, cut at once."""

    def __init__(self, *proxies: Proxy) -> None:
        self._proxies = proxies

    def cut(self) -> None:
        for proxy in self._proxies:
            proxy.cut()

    def close(self) -> None:
        for proxy in self._proxies:
            proxy.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
        writer.close()
    except ConnectionError:
        writer.close()


def _to_proto(refused: dict[int, KoinonError]) -> list[kv_pb2.Refusal]:
    return [
        kv_pb2.Refusal(partition_id=p, error=convert.error_to_proto(error))
        for p, error in refused.items()
    ]


def _beyond(request: kv_pb2.ScanRequest, key: bytes, other: bytes) -> bool:
    return key < other if request.reverse else key > other
