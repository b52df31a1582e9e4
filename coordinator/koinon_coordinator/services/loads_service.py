"""The service of bulk loads. It converts messages; other modules make all decisions."""

from __future__ import annotations

from typing import Any, cast

from koinon_coordinator.coordinator import Coordinator
from koinon_coordinator.core.cluster.commands import CommitLoad
from koinon_coordinator.core.cluster.load_rules import Load
from koinon_coordinator.core.decide.load_requests import LoadWish
from koinon_coordinator.leader.loading import LoadView
from koinon_coordinator.services.admin_service import CALLS_MAX
from koinon_coordinator.wire.updates import UpdateCache
from koinon_proto.contract.access import Action
from koinon_proto.contract.bulk_loads import LOAD_TIMEOUT_MS_MIN, LoadMode, owner_digest
from koinon_proto.contract.codec import codec
from koinon_proto.contract.keyspaces import KeyspaceId, Keyspaces
from koinon_proto.security.authorization import caller, concerns
from koinon_proto.server.rpc import bounded, typed_errors
from koinon_proto.v1 import loads_pb2, loads_pb2_grpc

_WISH = codec(
    LoadWish,
    loads_pb2.OpenLoadRequest,
    given=["owner"],
    filled=["cluster_id", "only_check"],
)
_COMMIT = codec(CommitLoad, loads_pb2.CommitLoadRequest, filled=["cluster_id"])
_INFO = codec(
    Load,
    loads_pb2.LoadInfo,
    given=[
        *("attempts", "attempts_digest", "committed_at", "unmerged", "rows", "bytes"),
        "keyspace_id",
    ],
    filled=["partitions_merged", "rows", "bytes", "idle_ms", "keyspace"],
)


class LoadsService(loads_pb2_grpc.LoadsServicer):
    """Requests about loads. The leader answers; nodes are always admitted."""

    def __init__(self, coordinator: Coordinator, _updates: UpdateCache) -> None:
        self._coordinator = coordinator

    @typed_errors
    @bounded(CALLS_MAX)
    async def OpenLoad(  # noqa: N802 (the generated servicer's name)
        self, request: loads_pb2.OpenLoadRequest, _context: Any
    ) -> loads_pb2.OpenLoadResponse:
        wish = _WISH.decode(request, owner=caller.get().user)
        if wish.mode == LoadMode.OVERWRITE:
            caller.get().check_prefix(Action.LOAD, wish.keyspace_id, request.prefix)
        else:  # rows are checked key by key, where they are staged
            caller.get().check_some(Action.LOAD, wish.keyspace_id)
        if request.only_check:
            await self._coordinator.led(
                self._coordinator.serving.loading.check(wish, request.cluster_id)
            )
            return loads_pb2.OpenLoadResponse()
        outcome = await self._coordinator.led(
            self._coordinator.serving.loading.open(wish, request.cluster_id, _may_use)
        )
        table = self._coordinator.table()
        assert table is not None  # there is a cluster: it has opened a load
        return loads_pb2.OpenLoadResponse(
            load_id=outcome.load_id,
            state=cast(Any, int(outcome.state)),
            table_version=table.table_version,
            cluster_id=table.cluster.cluster_id,
        )

    @typed_errors
    @bounded(CALLS_MAX)
    async def TouchLoad(  # noqa: N802
        self, request: loads_pb2.TouchLoadRequest, _context: Any
    ) -> loads_pb2.TouchLoadResponse:
        touched = self._coordinator.serving.loading.touch(
            request.load_id,
            request.cluster_id,
            _may_use,
            attempt=request.attempt,
            rows=request.rows,
            size_bytes=request.bytes,
        )
        state = await self._coordinator.led(touched)
        return loads_pb2.TouchLoadResponse(state=cast(Any, int(state)))

    @typed_errors
    @bounded(CALLS_MAX)
    async def CommitLoad(  # noqa: N802
        self, request: loads_pb2.CommitLoadRequest, _context: Any
    ) -> loads_pb2.CommitLoadResponse:
        committed = self._coordinator.serving.loading.commit(
            _COMMIT.decode(request), request.cluster_id, _may_use
        )
        state = await self._coordinator.led(committed)
        return loads_pb2.CommitLoadResponse(state=cast(Any, int(state)))

    @typed_errors
    @bounded(CALLS_MAX)
    async def AbortLoad(  # noqa: N802
        self, request: loads_pb2.AbortLoadRequest, _context: Any
    ) -> loads_pb2.AbortLoadResponse:
        aborted = self._coordinator.serving.loading.abort(
            request.load_id, request.reason, request.cluster_id, _may_use
        )
        state = await self._coordinator.led(aborted)
        return loads_pb2.AbortLoadResponse(state=cast(Any, int(state)))

    @typed_errors
    @bounded(CALLS_MAX)
    async def GetLoads(  # noqa: N802
        self, request: loads_pb2.GetLoadsRequest, _context: Any
    ) -> loads_pb2.GetLoadsResponse:
        viewed = self._coordinator.serving.loading.views(request.load_id, request.cluster_id)
        views = await self._coordinator.led(viewed)
        table = self._coordinator.table()
        keyspaces = table.keyspaces if table is not None else None
        return loads_pb2.GetLoadsResponse(loads=[_info(view, keyspaces) for view in views])

    @typed_errors
    @bounded(CALLS_MAX)
    async def EmptyKeyspace(  # noqa: N802
        self, request: loads_pb2.EmptyKeyspaceRequest, _context: Any
    ) -> loads_pb2.EmptyKeyspaceResponse:
        wish = LoadWish(
            job_id=request.job_id,
            mode=LoadMode.OVERWRITE,
            description=request.description,
            timeout_ms=LOAD_TIMEOUT_MS_MIN,
            keyspace_id=KeyspaceId(request.keyspace_id),
        )
        concerns(wish.keyspace_id)
        outcome = await self._coordinator.led(
            self._coordinator.serving.loading.empty(wish, request.cluster_id)
        )
        table = self._coordinator.table()
        assert table is not None  # there is a cluster: it has opened a load
        return loads_pb2.EmptyKeyspaceResponse(
            load_id=outcome.load_id,
            state=cast(Any, int(outcome.state)),
            table_version=table.table_version,
        )

    @typed_errors
    async def GetManifest(  # noqa: N802
        self, request: loads_pb2.GetManifestRequest, _context: Any
    ) -> loads_pb2.LoadManifest:
        manifest = self._coordinator.serving.loading.manifest(request.load_id, request.cluster_id)
        load = await self._coordinator.led(manifest)
        return loads_pb2.LoadManifest(
            load_id=load.load_id,
            mode=cast(Any, int(load.mode)),
            prefix=load.prefix,
            attempts=load.attempts,
            partition_ids=load.unmerged,
            keyspace_id=load.keyspace_id,
        )

    @typed_errors
    async def ReportMerged(  # noqa: N802
        self, request: loads_pb2.ReportMergedRequest, _context: Any
    ) -> loads_pb2.ReportMergedResponse:
        principal = caller.get().principal
        merged = self._coordinator.serving.loading.merged(
            request.load_id,
            request.partition_ids,
            request.cluster_id,
            reporter=principal.name if principal is not None else "",
        )
        state = await self._coordinator.led(merged)
        return loads_pb2.ReportMergedResponse(state=cast(Any, int(state)))


def _may_use(load: Load) -> None:
    """Raise PermissionDeniedError unless the load is the caller's or has no owner, and the caller
    may load into its keyspace; or the caller operates the cluster.
    """
    digest = owner_digest(load.load_id, load.owner)
    caller.get().check_load(load.load_id, digest, load.keyspace_id)


def _info(view: LoadView, keyspaces: Keyspaces | None) -> loads_pb2.LoadInfo:
    keyspace = keyspaces.by_id(view.load.keyspace_id) if keyspaces is not None else None
    return _INFO.encode(
        view.load,
        keyspace=keyspace.name if keyspace is not None else "",
        partitions_merged=view.load.partitions_merged,
        rows=view.rows,
        bytes=view.bytes,
        idle_ms=view.idle_ms,
    )
