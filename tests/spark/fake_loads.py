"""Bulk loads in a fake cluster, in memory: staged chunks are kept, and merged when a load is
committed. The rules of ``v1/loads.proto`` are held where the writers' correctness rests on them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import numpy as np

from koinon_proto.contract import columns
from koinon_proto.contract.bulk_loads import LoadMode, LoadState, StreamBatch
from koinon_proto.contract.cluster_errors import LoadClosedError, LoadIncompleteError
from koinon_proto.contract.errors import InvalidArgumentError, KoinonError, TableBehindError
from koinon_proto.server import rpc
from koinon_proto.v1 import loads_pb2, loads_pb2_grpc
from tests.client.kit.fake_cluster import FakeCluster, FakeNode, _to_proto

Place = tuple[int, int, int]
"""Of a staged chunk: partition, attempt, number."""


@dataclass
class FakeLoad:
    """One load and what is staged for it."""

    load_id: int
    job_id: str
    mode: LoadMode
    prefix: bytes
    batch: StreamBatch | None
    state: LoadState = LoadState.OPEN
    chunks: dict[Place, bytes] = field(default_factory=dict)
    attempts: list[int] = field(default_factory=list)
    unmerged: list[int] = field(default_factory=list)
    partitions: int = 0
    touches: int = 0
    reason: str = ""


class LoadsNode(FakeNode, loads_pb2_grpc.BulkServicer, loads_pb2_grpc.LoadsServicer):
    """A node that is the coordinator as well."""

    services = (
        *FakeNode.services,
        loads_pb2_grpc.add_BulkServicer_to_server,
        loads_pb2_grpc.add_LoadsServicer_to_server,
    )
    cluster: LoadsCluster

    async def _leave(self, method: str, request: Any, context: Any) -> None:
        if self.cluster.lost_answers.get(method, 0):
            self.cluster.lost_answers[method] -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection is cut")
        await super()._leave(method, request, context)

    # --- Bulk -----------------------------------------------------------------------------------

    @rpc.typed_errors
    async def Stage(self, request: loads_pb2.StageRequest, context: Any) -> Any:  # noqa: N802
        await self._enter("Stage", request, len(request.chunks), context)
        load = self.cluster.load(request.load_id, LoadState.OPEN)
        if request.table_version > self.cluster.table.table_version:
            raise TableBehindError(
                table_version=self.cluster.table.table_version,
                required_version=request.table_version,
            )
        refused = self._refusals(request.partition_ids)
        for partition_id, number, chunk in zip(
            request.partition_ids, request.numbers, request.chunks, strict=True
        ):
            if partition_id not in refused:
                if self.cluster.checks_chunks:
                    self.cluster.check_chunk(partition_id, chunk)
                if self.cluster.keeps_chunks:
                    load.chunks[partition_id, request.attempt, number] = chunk
        self.cluster.staged_bytes.append(sum(map(len, request.chunks)))
        await self._leave("Stage", request, context)
        return loads_pb2.StageResponse(refusals=_to_proto(refused))

    @rpc.typed_errors
    async def Prepare(self, request: loads_pb2.PrepareRequest, context: Any) -> Any:  # noqa: N802
        await self._enter("Prepare", request, len(request.partition_ids), context)
        load = self.cluster.load(request.load_id, LoadState.OPEN)
        refused = self._refusals(request.partition_ids)
        reply = loads_pb2.PrepareResponse()
        for partition_id, rows in zip(request.partition_ids, request.rows, strict=True):
            if partition_id in refused:
                continue
            keys = Counter(
                key
                for key, _, _ in self.cluster.staged_rows(
                    load, partition_id, list(request.attempts)
                )
            )
            if keys.total() != rows:
                refused[partition_id] = LoadIncompleteError(
                    load_id=load.load_id,
                    partition_id=partition_id,
                    expected_rows=rows,
                    staged_rows=keys.total(),
                )
            if not request.duplicates_allowed:
                twice = [key for key, count in keys.items() if count > 1]
                reply.duplicate_rows += sum(keys[key] - 1 for key in twice)
                reply.duplicate_keys.extend(twice[:3])
        reply.refusals.extend(_to_proto(refused))
        await self._leave("Prepare", request, context)
        return reply

    @rpc.typed_errors
    async def ReadColumns(  # noqa: N802
        self, request: loads_pb2.ReadColumnsRequest, context: Any
    ) -> Any:
        await self._enter("ReadColumns", request, 0, context)
        refused = self._refusals(request.partition_ids)
        part = self.cluster.partitioner.partition_of
        wanted = set(request.partition_ids) - set(refused)
        after = (request.cursor.partition_id, request.cursor.after_key)
        found = sorted(
            (part(key), key, record)
            for key, record in self.cluster.store.items()
            if part(key) in wanted and key.startswith(request.prefix)
        )
        if request.HasField("cursor"):
            found = [f for f in found if f[:2] > after]
        page = found[: self.page_rows_max]
        reply = loads_pb2.ReadColumnsResponse(refusals=_to_proto(refused))
        values = [b"" if request.keys_only else record[0] for _, _, record in page]
        reply.columns = _packed([key for _, key, _ in page], values)
        runs = Counter(partition_id for partition_id, _, _ in page)
        reply.partition_ids.extend(runs.keys())
        reply.row_counts.extend(runs.values())
        if request.want_versions:
            reply.versions.extend(record[1] for _, _, record in page)
            reply.expires_at_ms.extend(record[2] for _, _, record in page)
        if len(found) > len(page):
            reply.next.partition_id, reply.next.after_key = page[-1][:2]
        await self._leave("ReadColumns", request, context)
        return reply

    # --- Loads ----------------------------------------------------------------------------------

    @rpc.typed_errors
    async def OpenLoad(self, request: loads_pb2.OpenLoadRequest, context: Any) -> Any:  # noqa: N802
        await self._enter("OpenLoad", request, 0, context)
        batch = None
        if request.HasField("stream_batch"):
            batch = StreamBatch(request.stream_batch.query_id, request.stream_batch.batch_id)
        load = self.cluster.open(request.job_id, LoadMode(request.mode), request.prefix, batch)
        return loads_pb2.OpenLoadResponse(
            load_id=load.load_id if load else 0,
            state=int(load.state if load else LoadState.DONE),  # type: ignore[arg-type]
            table_version=self.cluster.table.table_version,
            cluster_id=self.cluster.table.cluster.cluster_id,
        )

    @rpc.typed_errors
    async def TouchLoad(  # noqa: N802
        self, request: loads_pb2.TouchLoadRequest, context: Any
    ) -> Any:
        await self._enter("TouchLoad", request, 0, context)
        self.cluster.load(request.load_id, LoadState.OPEN).touches += 1
        return loads_pb2.TouchLoadResponse(state=int(LoadState.OPEN))  # type: ignore[arg-type]

    @rpc.typed_errors
    async def CommitLoad(  # noqa: N802
        self, request: loads_pb2.CommitLoadRequest, context: Any
    ) -> Any:
        await self._enter("CommitLoad", request, len(request.attempts), context)
        state = self.cluster.commit(
            request.load_id, list(request.attempts), list(request.partition_ids)
        )
        self.cluster.after_commit()
        await self._leave("CommitLoad", request, context)
        return loads_pb2.CommitLoadResponse(state=int(state))  # type: ignore[arg-type]

    @rpc.typed_errors
    async def AbortLoad(  # noqa: N802
        self, request: loads_pb2.AbortLoadRequest, context: Any
    ) -> Any:
        await self._enter("AbortLoad", request, 0, context)
        load = self.cluster.loads.get(request.load_id)
        if load is None or load.state in (LoadState.MERGING, LoadState.DONE):
            raise self.cluster.closed(request.load_id)
        load.state, load.reason = LoadState.ABORTED, request.reason
        load.chunks.clear()
        return loads_pb2.AbortLoadResponse(state=int(load.state))  # type: ignore[arg-type]

    @rpc.typed_errors
    async def GetLoads(self, request: loads_pb2.GetLoadsRequest, context: Any) -> Any:  # noqa: N802
        await self._enter("GetLoads", request, 0, context)
        reply = loads_pb2.GetLoadsResponse()
        for load in self.cluster.loads.values():
            if request.load_id in (0, load.load_id):
                self.cluster.merge_step(load)
                reply.loads.add(
                    load_id=load.load_id,
                    job_id=load.job_id,
                    state=int(load.state),
                    mode=int(load.mode),
                    partitions=load.partitions,
                    partitions_merged=load.partitions - len(load.unmerged),
                    reason=load.reason,
                )
        return reply


class LoadsCluster(FakeCluster):
    """A fake cluster with loads. A partition is merged with each look at a merging load."""

    node_type = LoadsNode

    def __init__(self, nodes: int = 2, partitions: int = 16) -> None:
        self.loads: dict[int, FakeLoad] = {}
        self.applied_batches: dict[str, int] = {}
        self.staged_bytes: list[int] = []
        self.checks_chunks = True
        self.keeps_chunks = True
        self.merge_stuck = False
        self.after_commit: Callable[[], object] = lambda: None
        self.lost_answers: dict[str, int] = {}
        """How many calls of a method take effect and end without an answer."""
        super().__init__(nodes, partitions)

    def limit_values(self, max_value_bytes: int) -> None:
        config = replace(self.table.cluster, max_value_bytes=max_value_bytes)
        self.table = self.served_table = replace(self.table, cluster=config)

    def open(
        self, job_id: str, mode: LoadMode, prefix: bytes, batch: StreamBatch | None
    ) -> FakeLoad | None:
        """Return the job's load, or that of its micro-batch, or a new one; None: applied before."""
        for load in self.loads.values():
            is_active = load.state in (LoadState.OPEN, LoadState.MERGING)
            if load.job_id == job_id or (batch and load.batch == batch and is_active):
                return load
        if batch and batch.batch_id <= self.applied_batches.get(batch.query_id, -1):
            return None
        version = self.table.table_version + 1
        self.table = self.served_table = replace(self.table, table_version=version)
        load = FakeLoad(version, job_id, mode, prefix, batch)
        self.loads[load.load_id] = load
        return load

    def only_load(self) -> FakeLoad:
        (load,) = self.loads.values()
        return load

    def load(self, load_id: int, state: LoadState) -> FakeLoad:
        load = self.loads.get(load_id)
        if load is None or load.state is not state:
            raise self.closed(load_id)
        return load

    def closed(self, load_id: int) -> LoadClosedError:
        load = self.loads.get(load_id)
        state, reason = (load.state.name.lower(), load.reason) if load else ("unknown", "")
        return LoadClosedError(load_id=load_id, state=state, reason=reason)

    def check_chunk(self, partition_id: int, chunk: bytes) -> None:
        """Raise unless the chunk keeps to the contract."""
        rows = columns.unpack(chunk)
        keys = [
            bytes(rows.keys[a:b])
            for a, b in zip(rows.key_offsets[:-1], rows.key_offsets[1:], strict=True)
        ]
        if keys != sorted(keys) or not keys:
            raise InvalidArgumentError(field="chunks", reason="rows are not in key order")
        if set(self.partitioner.partitions_of(keys).tolist()) != {partition_id}:
            raise InvalidArgumentError(field="chunks", reason="rows of another partition")

    def staged_rows(
        self, load: FakeLoad, partition_id: int, attempts: list[int]
    ) -> list[tuple[bytes, bytes, int]]:
        """Return key, value and expiry (DELETED: none) of what these attempts staged, the row to
        stay last.
        """
        found = []
        for (p, attempt, number), chunk in load.chunks.items():
            if p != partition_id or attempt not in attempts:
                continue
            rows = columns.unpack(chunk)
            for row in range(rows.header.rows):
                key = rows.keys[rows.key_offsets[row] : rows.key_offsets[row + 1]]
                value = rows.values[rows.value_offsets[row] : rows.value_offsets[row + 1]]
                order = int(rows.orders[row]) if rows.orders is not None else 0
                rank = (order, attempts.index(attempt), number, row)
                expiries = rows.expiries
                expiry = rows.header.expires_at_ms if expiries is None else int(expiries[row])
                found.append((rank, bytes(key), bytes(value), expiry))
        return [row[1:] for row in sorted(found, key=lambda row: row[0])]

    def commit(self, load_id: int, attempts: list[int], partition_ids: list[int]) -> LoadState:
        load = self.loads.get(load_id)
        if load is None or load.state is LoadState.ABORTED:
            raise self.closed(load_id)
        if load.state is not LoadState.OPEN:
            if load.attempts != attempts:
                raise self.closed(load_id)
            return load.state
        if load.batch:
            if load.batch.batch_id <= self.applied_batches.get(load.batch.query_id, -1):
                raise self.closed(load_id)
            self.applied_batches[load.batch.query_id] = load.batch.batch_id
        overwrites = load.mode is LoadMode.OVERWRITE
        load.attempts = attempts
        load.unmerged = list(range(len(self.table.rows))) if overwrites else partition_ids
        load.partitions = len(load.unmerged)
        load.state = LoadState.MERGING if load.unmerged else LoadState.DONE
        return load.state

    def merge_step(self, load: FakeLoad) -> None:
        """Merge some partitions of a committed load."""
        for partition_id in load.unmerged[:8] if not self.merge_stuck else []:
            load.unmerged.remove(partition_id)
            rows = self.staged_rows(load, partition_id, load.attempts)
            if load.mode is LoadMode.OVERWRITE:
                for key in list(self.store):
                    if (
                        key.startswith(load.prefix)
                        and self.partitioner.partition_of(key) == partition_id
                    ):
                        del self.store[key]
            for key, value, expires_at_ms in rows:
                if expires_at_ms == columns.DELETED:
                    self.store.pop(key, None)
                else:
                    self.write(key, value, expires_at_ms)
        if load.state is LoadState.MERGING and not load.unmerged:
            load.state = LoadState.DONE
            load.chunks.clear()

    def values(self) -> dict[bytes, bytes]:
        """Return what is readable."""
        return {key: record[0] for key, record in self.store.items()}


def refuse_once(error: KoinonError) -> Callable[[int], KoinonError | None]:
    """Return a rule for ``FakeNode.refuse``: every partition is refused the first time."""
    seen: set[int] = set()

    def refuse(partition_id: int) -> KoinonError | None:
        if partition_id in seen:
            return None
        seen.add(partition_id)
        return error

    return refuse


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def _packed(keys: list[bytes], values: list[bytes]) -> bytes:
    return columns.pack(
        np.array(list(map(len, keys)), np.uint32),
        b"".join(keys),
        np.array(list(map(len, values)), np.uint32),
        b"".join(values),
    )
