"""The gRPC service of backups: a caller opens, makes, releases and reads this node's cut."""

from __future__ import annotations

import time
from typing import Any

from koinon_node.partition.cuts import Cut, Cuts
from koinon_node.partition.request_limits import known_keyspace, table_of
from koinon_node.state import NodeState
from koinon_proto.contract.access import Action
from koinon_proto.contract.errors import InvalidArgumentError
from koinon_proto.contract.keyspaces import KEYSPACES_MAX
from koinon_proto.security.authorization import caller
from koinon_proto.server.rpc import bounded, typed_errors, typed_stream
from koinon_proto.v1 import backup_pb2, backup_pb2_grpc

CALLS_MAX = 64  # at once, of each method
_EVENT_EVERY_S = 1.0  # seconds between two CutEvents


class BackupService(backup_pb2_grpc.BackupServicer):
    """koinon.v1.Backup."""

    def __init__(self, cuts: Cuts, state: NodeState) -> None:
        self._cuts = cuts
        self._state = state

    @typed_stream
    @bounded(CALLS_MAX)
    async def OpenCut(  # noqa: N802 (the generated servicer's name)
        self, request: backup_pb2.OpenCutRequest, context: Any
    ) -> None:
        """Open a cut, and keep it open until the stream ends."""
        table = table_of(self._state, request)
        if not request.cut:
            raise InvalidArgumentError(field="cut", reason="must not be 0")
        if not 0 < len(request.keyspace_ids) <= KEYSPACES_MAX + 1:
            raise InvalidArgumentError(
                field="keyspace_ids",
                reason="too many, or none",
                limit=KEYSPACES_MAX + 1,
                actual=len(request.keyspace_ids),
            )
        for keyspace_id in request.keyspace_ids:
            caller.get().check_prefix(Action.BACKUP, keyspace_id, b"")
            known_keyspace(table, keyspace_id, request.table_version)
        cut = self._cuts.open(request.cut, caller.get().name, request.keyspace_ids)
        try:
            await self._attend(cut, context)
        finally:
            self._cuts.close(cut)

    async def _attend(self, cut: Cut, context: Any) -> None:
        due = float("-inf")
        while True:
            await cut.attend()
            if (now := time.monotonic()) >= due:
                due = now + _EVENT_EVERY_S
                await context.write(backup_pb2.CutEvent(grown_bytes=cut.grown_bytes))

    @typed_errors
    @bounded(CALLS_MAX)
    async def MakeCut(  # noqa: N802
        self, request: backup_pb2.CutRequest, context: Any
    ) -> backup_pb2.MadeCut:
        point = await self._cut(request).make()
        return backup_pb2.MadeCut(**point._asdict())

    @typed_errors
    @bounded(CALLS_MAX)
    async def ReleaseCut(  # noqa: N802
        self, request: backup_pb2.CutRequest, context: Any
    ) -> backup_pb2.ReleaseCutResponse:
        held_s = self._cut(request).release()
        return backup_pb2.ReleaseCutResponse(held_ms=int(held_s * 1000))

    @typed_stream
    @bounded(CALLS_MAX)
    async def ReadCut(  # noqa: N802
        self, request: backup_pb2.ReadCutRequest, context: Any
    ) -> None:
        async for page in self._cut(request).pages(request.partition_id):
            await context.write(backup_pb2.CutPage(columns=page))

    def _cut(self, request: Any) -> Cut:
        table_of(self._state, request)
        return self._cuts.opened(request.cut, caller.get().name)
