"""Bulk loads from the side of their jobs: opened, kept alive, committed or aborted.

``LoadsClient`` talks to the coordinators' leader; rows are staged on the nodes elsewhere. It
blocks, needs no event loop, and may be used by any number of threads. Every call may be made twice
without harm (``v1/loads.proto``), so a call whose answer was lost is repeated, at the next leader
if necessary, until its time is over.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from koinon.core.closing import Closing
from koinon.driver.request_ids import operation
from koinon.operate.coordinators import ATTEMPT_TIMEOUT_S, RETRY_PAUSE_S, Coordinators
from koinon.operate.json_form import HIDDEN
from koinon.operate.views import view
from koinon_proto.contract.bulk_loads import LoadMode, LoadState, StreamBatch
from koinon_proto.contract.errors import PermissionDeniedError
from koinon_proto.contract.keyspaces import DEFAULT_ID
from koinon_proto.contract.leader_search import Pace, Repeat, Route
from koinon_proto.v1 import loads_pb2, loads_pb2_grpc

__all__ = ["LoadMode", "LoadState", "LoadView", "LoadsClient", "OpenedLoad", "StreamBatch"]

TIMEOUT_S = 30.0
PACE = Pace(attempt_s=ATTEMPT_TIMEOUT_S, attempt_s_max=10.0, pause_s=RETRY_PAUSE_S, pause_s_max=0.5)


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenedLoad:
    """A load that a job may stage rows under. ``load_id`` 0: the stream's batch has been applied
    before, and there is nothing to do. ``state`` differs from OPEN if the same job had opened it
    before. Requests to nodes must carry ``table_version`` or a newer one.
    """

    load_id: int
    state: LoadState
    table_version: int
    cluster_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadView:
    """A load as the coordinators know it; also the answer for programs.

    Attributes:
        keyspace: its name; None: the keyspace was dropped.
        rows, bytes: staged so far by all attempts, or committed.
        partitions: the number to be merged; 0 while the load is open.
        idle_ms: since a task last touched it; None unless it is open.
        reason: why it was aborted, or None.
    """

    load_id: int
    job_id: str
    state: LoadState
    mode: LoadMode | None
    prefix: bytes
    keyspace: str | None = None
    stream_batch: StreamBatch | None
    description: str
    rows: int
    bytes: int
    partitions: int
    partitions_merged: int
    idle_ms: int | None
    timeout_ms: int
    reason: str | None
    owner: str = field(default="", metadata=HIDDEN)


class LoadsClient(Closing):
    """Opens, commits, aborts and lists bulk loads at the coordinators.

    Every method raises, beside the errors that it names:

    UnavailableError: no member answered as the leader in time.
    ChangeFateError: the request was sent, and no answer came in time; repeat it.
    WrongClusterError: the coordinators belong to another cluster than ``cluster_id``.
    """

    def __init__(
        self,
        coordinators: str | Coordinators,
        *,
        timeout_s: float = TIMEOUT_S,
        cluster_id: str = "",
    ) -> None:
        """``coordinators``: ``HOST:PORT,HOST:PORT,…``. ``timeout_s``: for each call, with all its
        retries. ``cluster_id``: the expected cluster ('': not checked).

        Raises:
            ConfigurationError: no address is given, or one is not host:port.
        """
        self.timeout_s = timeout_s
        if isinstance(coordinators, str):
            coordinators = Coordinators(coordinators, cluster_id)
        self._coordinators = coordinators
        self._route = Route()  # the leader as calls have found it; any thread may replace it

    def close(self) -> None:
        self._coordinators.close()

    # --- life of a load ---------------------------------------------------------------------------

    def open_load(
        self,
        *,
        job_id: str,
        mode: LoadMode,
        prefix: bytes = b"",
        keyspace_id: int = DEFAULT_ID,
        stream_batch: StreamBatch | None = None,
        description: str = "",
        timeout_ms: int = 0,
    ) -> OpenedLoad:
        """Open a load, or return the one that this ``job_id`` (1..128 characters) opened before,
        whatever its state. ``timeout_ms``: how long it may stay untouched; 0: 30 minutes.

        Raises:
            InvalidArgumentError: an argument is invalid, or the job's load has another mode, prefix
                or keyspace.
            ClusterNotReadyError: there is no partition table yet.
            ResourceExhaustedError: too many loads are open or being merged.
            UnknownKeyspaceError: the keyspace has been dropped.
        """
        request = loads_pb2.OpenLoadRequest(
            job_id=job_id,
            mode=cast(Any, int(mode)),
            prefix=prefix,
            keyspace_id=keyspace_id,
            description=description,
            timeout_ms=timeout_ms,
        )
        if stream_batch is not None:
            request.stream_batch.query_id = stream_batch.query_id
            request.stream_batch.batch_id = stream_batch.batch_id
        reply = self._call("OpenLoad", request)
        return view(OpenedLoad, reply, state=_state(reply.state))

    def check(self, *, mode: LoadMode, prefix: bytes = b"", keyspace_id: int = DEFAULT_ID) -> None:
        """Raise the error that ``open_load`` would raise for a new load; open nothing."""
        request = loads_pb2.OpenLoadRequest(
            job_id=f"check:{uuid.uuid4()}",
            mode=cast(Any, int(mode)),
            prefix=prefix,
            keyspace_id=keyspace_id,
            only_check=True,
        )
        self._call("OpenLoad", request)

    def touch(
        self, load_id: int, *, attempt: int = 0, rows: int = 0, size_bytes: int = 0
    ) -> LoadState:
        """Report that an attempt (0: the job itself) is at work, and how much it has staged so far.

        Raises:
            LoadClosedError: the load is no longer open, or was never opened.
        """
        request = loads_pb2.TouchLoadRequest(
            load_id=load_id,
            attempt=attempt,
            rows=rows,
            bytes=size_bytes,
        )
        return _state(self._call("TouchLoad", request).state)

    def commit(
        self,
        load_id: int,
        *,
        attempts: Sequence[int],
        partition_ids: Sequence[int],
        rows: int = 0,
        size_bytes: int = 0,
    ) -> LoadState:
        """Commit the load. ``attempts`` are in the order of their tasks; ``partition_ids`` are
        those with staged rows, ascending; ``rows`` and ``size_bytes`` are for people. Return
        MERGING, or DONE if all rows are readable already.

        Raises:
            LoadClosedError: it was aborted, or committed with other attempts.
            PartitionOfflineError: a partition to be merged was offline until the time was over;
                nothing was committed.
            ResourceExhaustedError: too much is being merged at once; nothing was committed.
            InvalidArgumentError: attempts or partitions break a rule; nothing was committed.
        """
        request = loads_pb2.CommitLoadRequest(
            load_id=load_id,
            attempts=attempts,
            partition_ids=partition_ids,
            rows=rows,
            bytes=size_bytes,
        )
        return _state(self._call("CommitLoad", request).state)

    def abort(self, load_id: int, *, reason: str = "") -> LoadState:
        """Abort an open load: no row becomes readable. Return ABORTED.

        Raises:
            LoadClosedError: it is committed, or was never opened.
        """
        request = loads_pb2.AbortLoadRequest(load_id=load_id, reason=reason)
        return _state(self._call("AbortLoad", request).state)

    # --- listing ----------------------------------------------------------------------------------

    def loads(self) -> tuple[LoadView, ...]:
        """Return the loads that are open or merging, and the last that ended, by ``load_id``."""
        return self._views(0)

    def get(self, load_id: int) -> LoadView | None:
        """Return a load; None if there never was one, or if it ended too long ago."""
        return next(iter(self._views(load_id)), None)

    def _views(self, load_id: int) -> tuple[LoadView, ...]:
        request = loads_pb2.GetLoadsRequest(load_id=load_id)
        return views_from_proto(self._call("GetLoads", request, Repeat.READ))

    # --- calling the leader -----------------------------------------------------------------------

    @operation()
    def _call(self, method: str, request: Any, repeat: Repeat = Repeat.CHANGE) -> Any:
        """Call the leader until it gives a final answer, or the time is over."""
        try:
            return self._coordinators.ask_leader(
                loads_pb2_grpc.LoadsStub,
                method,
                request,
                timeout_s=self.timeout_s,
                repeat=repeat,
                pace=PACE,
                route=self._route,
            )
        except PermissionDeniedError as error:
            actions = error.action.split(" or ")
            if len(actions) == 1 or "load" not in actions:
                raise
            # Several permissions allow this, each by itself; this one is specific to loads.
            raise replace(error, action="load") from None


def views_from_proto(reply: loads_pb2.GetLoadsResponse) -> tuple[LoadView, ...]:
    """Return the loads of a reply."""
    return tuple(_view(load) for load in reply.loads)


def _view(load: loads_pb2.LoadInfo) -> LoadView:
    batch, state = load.stream_batch, _state(load.state)
    return view(
        LoadView,
        load,
        state=state,
        keyspace=load.keyspace or None,
        reason=load.reason or None,
        idle_ms=load.idle_ms if state is LoadState.OPEN else None,
        mode=LoadMode(load.mode) if int(load.mode) in LoadMode.__members__.values() else None,
        stream_batch=StreamBatch(batch.query_id, batch.batch_id)
        if load.HasField("stream_batch")
        else None,
    )


def _state(number: int) -> LoadState:
    known = number in LoadState.__members__.values()
    return LoadState(number) if known else LoadState.UNKNOWN
