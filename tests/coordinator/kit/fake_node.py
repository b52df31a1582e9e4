"""A node without a store: registers, heartbeats, says that it hosts; finds the leader by itself."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from typing import Any

import grpc

from koinon_proto.contract import convert
from koinon_proto.contract.cluster_errors import (
    NodeFencedError,
    NotLeaderError,
    RegistrationPendingError,
)
from koinon_proto.contract.errors import KoinonError, UnavailableError
from koinon_proto.contract.table import DEFAULT_WEIGHT, Table, apply_update
from koinon_proto.security.transport import PLAIN
from koinon_proto.server.framed_greeting import HEARTBEATS_COMMAND, WELCOME, greet
from koinon_proto.server.framed_stream import FramedStream, PeerLostError
from koinon_proto.server.rpc import CHANNEL_OPTIONS, error_of
from koinon_proto.v1 import (
    access_pb2,
    admin_pb2,
    admin_pb2_grpc,
    membership_pb2,
    membership_pb2_grpc,
    raft_pb2,
    table_pb2,
    table_pb2_grpc,
)

CALL_TIMEOUT_S = 30.0
Heartbeats = FramedStream[membership_pb2.HeartbeatRequest, membership_pb2.HeartbeatResponse]
_NO_ANSWER = (
    *(NotLeaderError, grpc.aio.AioRpcError, TimeoutError, PeerLostError, UnavailableError),
)


class Caller:
    """Stubs for one address; every typed refusal is raised as the error that it is."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        make: Any = membership_pb2_grpc.MembershipStub
        self.membership = make(self.channel)
        make = table_pb2_grpc.TableServiceStub
        self.tables = make(self.channel)
        make = admin_pb2_grpc.AdminStub
        self.admin = make(self.channel)
        self._heartbeats: Heartbeats | None = None

    async def call(self, method: Any, request: Any, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        try:
            return await method(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as failure:
            error = error_of(failure)
            if error is None:
                raise
            raise error from None

    async def heartbeat(
        self, request: membership_pb2.HeartbeatRequest, timeout_s: float = CALL_TIMEOUT_S
    ) -> membership_pb2.HeartbeatResponse:
        """Send it on the stream that stands, or on a new one."""
        try:
            async with asyncio.timeout(timeout_s):
                if self._heartbeats is None:
                    asked = raft_pb2.GetPeerPortRequest()
                    found = await self.call(self.membership.GetPeerPort, asked, timeout_s)
                    address = f"{self.address.rpartition(':')[0]}:{found.peer_port}"
                    stream: Heartbeats = FramedStream(
                        membership_pb2.HeartbeatResponse.FromString, ""
                    )
                    answer = await greet(PLAIN, stream, address, "", HEARTBEATS_COMMAND, timeout_s)
                    if answer != WELCOME:
                        raise UnavailableError(reason=repr(answer))
                    self._heartbeats = stream
                self._heartbeats.send(request)
                return await self._heartbeats.receive()
        except BaseException:
            if self._heartbeats is not None:
                self._heartbeats.close()
                self._heartbeats = None
            raise

    async def status(self) -> admin_pb2.ClusterStatus:
        status: admin_pb2.ClusterStatus = await self.call(
            self.admin.GetStatus, admin_pb2.GetStatusRequest()
        )
        return status

    async def get_table(self, cluster_id: str = "", known: int = 0) -> table_pb2.TableUpdate:
        request = table_pb2.GetTableRequest(cluster_id=cluster_id, known_version=known)
        update: table_pb2.TableUpdate = await self.call(self.tables.GetTable, request)
        return update

    async def close(self) -> None:
        if self._heartbeats is not None:
            self._heartbeats.close()
        await self.channel.close()


class FakeNode:
    """See the module's text. ``epochs`` are all epochs that it was ever given, ``unanswered_s`` is
    for how long its heartbeats have failed.
    """

    def __init__(self, node_id: str, coordinators: list[str], address: str = "") -> None:
        self.node_id = node_id
        self.address = address or f"{node_id}:1"  # of its own; it is never connected to
        self.store_id = f"store-{node_id}"
        self.registration_id = uuid.uuid4().hex  # of the next registration
        self.registered_by = ""  # the registration_id that made the current epoch
        self.weight = DEFAULT_WEIGHT
        self.progress: list[membership_pb2.ReplicaProgress] = []
        self.epochs: list[int] = []
        self.cluster_ids: set[str] = set()
        self.table: Table | None = None
        self.access: access_pb2.AccessState | None = None  # as it was sent last
        self.access_version = 0  # that it says it has
        self.hosted: list[membership_pb2.HostCommand] = []
        self.acknowledged_at = 0.0
        self.unanswered_s = 0.0
        self.worst_gap_s = 0.0
        self.fenced = 0
        self._callers = [Caller(address) for address in coordinators]
        self._at = 0

    @property
    def epoch(self) -> int:
        return self.epochs[-1] if self.epochs else 0

    async def close(self) -> None:
        for caller in self._callers:
            await caller.close()

    def register_request(self, **changes: Any) -> membership_pb2.RegisterRequest:
        values: dict[str, Any] = {
            "protocol_version": 1,
            "cluster_id": next(iter(self.cluster_ids), ""),
            "node_id": self.node_id,
            "address": self.address,
            "store_id": self.store_id,
            "last_node_epoch": self.epoch,
            "registration_id": self.registration_id,
            "weight": self.weight,
        }
        return membership_pb2.RegisterRequest(**{**values, **changes})

    async def register(self) -> None:
        """Ask until the node is registered."""
        while True:
            try:
                caller = self._callers[self._at]
                reply = await caller.call(caller.membership.Register, self.register_request())
            except RegistrationPendingError as pending:
                await asyncio.sleep(pending.retry_after_ms / 1000)
            except (NotLeaderError, grpc.aio.AioRpcError) as error:
                await self._find_leader(error)
            else:
                self.epochs.append(reply.node_epoch)
                self.cluster_ids.add(reply.cluster_id)
                self.registered_by, self.registration_id = self.registration_id, uuid.uuid4().hex
                if reply.HasField("table"):
                    self._take(reply.table)
                self.access = reply.access if reply.HasField("access") else None
                return

    async def heartbeat(self) -> None:
        """One heartbeat that is acknowledged, from whoever leads."""
        request = membership_pb2.HeartbeatRequest(
            cluster_id=next(iter(self.cluster_ids)),
            node_id=self.node_id,
            node_epoch=self.epoch,
            registration_id=self.registered_by,
            table_version=self.table.table_version if self.table is not None else 0,
            hosted=self.hosted,
            stats=membership_pb2.NodeStats(records=7),
            progress=self.progress,
            access_version=self.access_version,
        )
        while True:
            try:
                caller = self._callers[self._at]
                reply = await caller.heartbeat(request, 0.5)
            except _NO_ANSWER as error:
                self.unanswered_s = time.monotonic() - self.acknowledged_at
                await self._find_leader(error)
                continue
            now = time.monotonic()
            self.unanswered_s = 0.0
            if self.acknowledged_at:
                self.worst_gap_s = max(self.worst_gap_s, now - self.acknowledged_at)
            self.acknowledged_at = now
            if reply.HasField("table"):
                self._take(reply.table)
            self.access = reply.access if reply.HasField("access") else None
            self.hosted = list(reply.commands)
            return

    async def run(self, interval_s: float = 0.1) -> None:
        """Live until cancelled; register anew when fenced."""
        await self.register()
        while True:
            with contextlib.suppress(KoinonError):
                try:
                    await self.heartbeat()
                    if self.hosted:
                        await self.heartbeat()  # at once, so that it is known to be hosted
                except NodeFencedError:
                    self.fenced += 1
                    self.hosted = []
                    await self.register()
            await asyncio.sleep(interval_s)

    def _take(self, update: table_pb2.TableUpdate) -> None:
        self.table = apply_update(self.table, convert.update_from_proto(update))

    async def _find_leader(self, error: Exception) -> None:
        named = error.leader_address if isinstance(error, NotLeaderError) else ""
        addresses = [caller.address for caller in self._callers]
        if named in addresses:
            self._at = addresses.index(named)
            return
        self._at = (self._at + 1) % len(self._callers)
        await asyncio.sleep(0.05)
