"""The node's gRPC services: check a message's form and limits, call the engine, convert the reply.

Nothing else is decided here. Handlers take and return messages; ``typed_errors`` turns the engine's
errors into statuses.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from koinon_node.core.formats.records import U32Array
from koinon_node.core.writes.updates import (
    Assign,
    Expire,
    Increment,
    Presence,
    RecordIf,
    Update,
    expires_after,
)
from koinon_node.grpc.atomic_requests import (
    batch_of,
    check_access,
    commit,
    durability_of,
    reply_of,
)
from koinon_node.grpc.read_requests import rows_of, rows_reply
from koinon_node.grpc.scan_requests import page_of, page_reply, refusals_to_proto
from koinon_node.partition.batches import ReadAnswer, WriteAnswer, WriteBatch
from koinon_node.partition.engine import Engine
from koinon_node.partition.graceful_drain import GracefulDrain
from koinon_node.partition.request_limits import (
    check_batch_bytes,
    check_key,
    check_length,
    check_rows,
    check_ttl,
    check_value,
    keyspace_of,
    never_fault,
    table_of,
    ttl_fault,
    ttl_of,
)
from koinon_node.partition.row_metrics import RowCounts
from koinon_node.state import NodeState, partitioner_of
from koinon_proto.contract import convert
from koinon_proto.contract.access import Action
from koinon_proto.contract.errors import (
    InvalidArgumentError,
    KoinonError,
)
from koinon_proto.contract.keyspaces import Keyspace
from koinon_proto.contract.table import (
    Table,
)
from koinon_proto.security.authorization import caller
from koinon_proto.server.rpc import bounded, typed_errors, typed_stream
from koinon_proto.v1 import kv_pb2, kv_pb2_grpc, table_pb2, table_pb2_grpc

CALLS_MAX = 1_024


class KeyValueService(kv_pb2_grpc.KeyValueServicer):
    """koinon.v1.KeyValue."""

    def __init__(
        self,
        engine: Engine,
        state: NodeState,
        counts: RowCounts | None = None,
        graceful_drain: GracefulDrain | None = None,
    ) -> None:
        self._engine = engine
        self._state = state
        self._counts = counts or RowCounts()
        self._graceful_drain = graceful_drain or GracefulDrain()

    def _keyspace(self, request: Any) -> Keyspace:
        return keyspace_of(self._state, request)

    def _named(self, request: Any) -> Keyspace:
        """Return the keyspace that a plain operation names."""
        return table_of(self._state, request).keyspaces.named(request.keyspace)

    @typed_errors
    @bounded(CALLS_MAX)
    async def Get(self, request: kv_pb2.GetRequest, context: Any) -> kv_pb2.GetResponse:  # noqa: N802
        keyspace = self._named(request)
        check_key(request.key)
        caller.get().check_keys(Action.READ, keyspace.keyspace_id, (request.key,))
        answer = await self._read(
            [request.key],
            _partition_of(keyspace, request.key),
            request.table_version,
            want_versions=True,
        )
        _raise_any(answer.refusals)
        return kv_pb2.GetResponse(
            found=not answer.missing,
            value=answer.values[0],
            version=answer.versions[0],
            expires_at_ms=answer.expires_at_ms[0],
        )

    @typed_errors
    @bounded(CALLS_MAX)
    async def Put(self, request: kv_pb2.PutRequest, context: Any) -> kv_pb2.PutResponse:  # noqa: N802
        keyspace = self._named(request)
        check_key(request.key)
        caller.get().check_keys(Action.WRITE, keyspace.keyspace_id, (request.key,))
        check_value(len(request.value), keyspace)
        ttl_ms = ttl_of(keyspace, request.ttl_ms)
        answer = await self._write(
            keyspace,
            WriteBatch(
                table_version=request.table_version,
                keys=[request.key],
                values=[request.value],
                partition_ids=_partition_of(keyspace, request.key),
                ttl_ms=[ttl_ms] if ttl_ms else None,
                conditions={0: request.if_version} if request.HasField("if_version") else {},
                durability=durability_of(request.durability),
            ),
        )
        _raise_any(answer.refusals, answer.row_errors)
        return kv_pb2.PutResponse(version=int(answer.versions[0]))

    @typed_errors
    @bounded(CALLS_MAX)
    async def Delete(self, request: kv_pb2.DeleteRequest, context: Any) -> kv_pb2.DeleteResponse:  # noqa: N802
        keyspace = self._named(request)
        check_key(request.key)
        caller.get().check_keys(Action.WRITE, keyspace.keyspace_id, (request.key,))
        answer = await self._write(
            keyspace,
            WriteBatch(
                table_version=request.table_version,
                keys=[request.key],
                values=[b""],
                partition_ids=_partition_of(keyspace, request.key),
                deletes=frozenset((0,)),
                conditions={0: request.if_version} if request.HasField("if_version") else {},
                durability=durability_of(request.durability),
            ),
        )
        _raise_any(answer.refusals, answer.row_errors)
        return kv_pb2.DeleteResponse(found=not answer.absent)

    @typed_errors
    @bounded(CALLS_MAX)
    async def BatchGet(  # noqa: N802
        self, request: kv_pb2.BatchGetRequest, context: Any
    ) -> kv_pb2.BatchGetResponse:
        keys, partition_ids = rows_of(request, self._keyspace(request), caller.get())
        answer = await self._read(
            keys, partition_ids, request.table_version, want_versions=request.want_versions
        )
        return rows_reply(answer, keys_only=request.keys_only)

    @typed_errors
    @bounded(CALLS_MAX)
    async def BatchWrite(  # noqa: N802
        self, request: kv_pb2.BatchWriteRequest, context: Any
    ) -> kv_pb2.BatchWriteResponse:
        self._state.check_in_time(request.take_by_ms)
        keyspace = self._keyspace(request)
        batch = _write_batch(keyspace, request)
        caller.get().check_rows(Action.WRITE, keyspace.keyspace_id, batch.keys)
        answer = await self._write(keyspace, batch)
        return _write_reply(answer, request.want_versions)

    @typed_errors
    @bounded(CALLS_MAX)
    async def BatchUpdate(  # noqa: N802
        self, request: kv_pb2.BatchUpdateRequest, context: Any
    ) -> kv_pb2.BatchUpdateResponse:
        self._state.check_in_time(request.take_by_ms)
        keyspace = self._keyspace(request)
        batch = _update_batch(keyspace, request)
        caller.get().check_rows(Action.WRITE, keyspace.keyspace_id, batch.keys)
        answering = [r for r, update in batch.updates.items() if not isinstance(update, Expire)]
        caller.get().check_rows(Action.READ, keyspace.keyspace_id, batch.keys, answering)
        answer = await self._write(keyspace, batch)
        return _update_reply(answer)

    @typed_errors
    @bounded(CALLS_MAX)
    async def CommitBatch(  # noqa: N802
        self, request: kv_pb2.CommitBatchRequest, context: Any
    ) -> kv_pb2.CommitBatchResponse:
        self._state.check_in_time(request.take_by_ms)
        keyspace = self._keyspace(request)
        batch = batch_of(request, keyspace)
        check_access(batch, keyspace, caller.get())
        return reply_of(await commit(self._engine, self._counts, batch))

    @typed_errors
    @bounded(CALLS_MAX)
    async def Scan(self, request: kv_pb2.ScanRequest, context: Any) -> kv_pb2.ScanResponse:  # noqa: N802
        keyspace = self._keyspace(request)
        answer = await self._engine.scans.scan(page_of(request, keyspace, caller.get()))
        self._counts.scanned(answer)
        return page_reply(answer, want_versions=request.want_versions)

    async def _read(
        self,
        keys: Sequence[bytes],
        partition_ids: U32Array,
        table_version: int,
        *,
        want_versions: bool,
    ) -> ReadAnswer:
        """Read rows; count the rows and the refusals."""
        reading = self._engine.reads.read(
            keys, partition_ids, table_version, want_versions=want_versions
        )
        return await self._counts.of_read(partition_ids, reading)

    async def _write(self, keyspace: Keyspace, batch: WriteBatch) -> WriteAnswer:
        """Write a batch; count the rows and the refusals. Errors show only facts that the caller
        may read.
        """
        answer = await self._counts.of_write(batch, self._engine.writes.write(batch))
        for row, error in answer.row_errors.items():
            told = caller.get().told(error, keyspace.keyspace_id, batch.keys[row])
            answer.row_errors[row] = told
        return answer

    @typed_stream
    async def Attend(self, request: kv_pb2.AttendRequest, context: Any) -> None:  # noqa: N802
        await self._graceful_drain.serve(context, self._state.clock_ms())


class NodeTableService(table_pb2_grpc.TableServiceServicer):
    """koinon.v1.TableService, from the node's own table."""

    def __init__(self, state: NodeState) -> None:
        self._state = state

    @typed_errors
    @bounded(CALLS_MAX)
    async def GetTable(  # noqa: N802
        self, request: table_pb2.GetTableRequest, context: Any
    ) -> table_pb2.TableUpdate:
        table = self._state.table()
        table.cluster.check_id(request.cluster_id)
        known_version = request.known_version if request.cluster_id else 0
        return _update_since(_ByIdentity(table), known_version)


class _ByIdentity:
    """A table as a cache key that compares by identity."""

    def __init__(self, table: Table) -> None:
        self.table = table

    def __hash__(self) -> int:
        return id(self.table)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByIdentity) and other.table is self.table


@lru_cache(maxsize=16)
def _update_since(table: _ByIdentity, known_version: int) -> table_pb2.TableUpdate:
    return convert.update_to_proto(table.table.since(known_version))


# --- checks ------------------------------------------------------------------------------------


def _partition_of(keyspace: Keyspace, key: bytes) -> U32Array:
    return np.array([partitioner_of(keyspace).partition_of(key)], np.uint32)


def _write_batch(keyspace: Keyspace, request: kv_pb2.BatchWriteRequest) -> WriteBatch:
    """Check a whole request, before any row is written, and convert it."""
    keys, values = list(request.keys), list(request.values)
    rows = len(keys)
    partition_ids = check_rows(keyspace, keys, request.partition_ids)
    check_length("values", len(values), rows)
    if rows:
        lengths = list(map(len, values))
        longest = max(lengths)
        check_value(longest, keyspace, f"values[{lengths.index(longest)}]")
        check_batch_bytes(sum(lengths) + sum(map(len, keys)))
    deletes = frozenset(request.deletes)
    conditions = {c.row: c.if_version for c in request.conditions}
    if len(conditions) != len(request.conditions):
        raise InvalidArgumentError(field="conditions", reason="two conditions for one row")
    for field, named in (("deletes", deletes), ("conditions", conditions.keys())):
        if named and max(named) >= rows:
            raise InvalidArgumentError(
                field=field, reason="names a row beyond the last", limit=rows, actual=max(named)
            )
    ttl_ms = _ttl_column(keyspace, request.ttl_ms, rows)
    return WriteBatch(
        table_version=request.table_version,
        keys=keys,
        values=values,
        partition_ids=partition_ids,
        deletes=deletes,
        ttl_ms=ttl_ms,
        refused=_refused(_ttl_faults(keyspace, ttl_ms, deletes), rows),
        conditions=conditions,
        list_present=request.list_present,
        durability=durability_of(request.durability),
    )


def _update_batch(keyspace: Keyspace, request: kv_pb2.BatchUpdateRequest) -> WriteBatch:
    """Check a whole request, before any row is written, and convert it."""
    keys = list(request.keys)
    rows = len(keys)
    partition_ids = check_rows(keyspace, keys, request.partition_ids)
    check_length("updates", len(request.updates), rows)
    updates = {row: _update_of(keyspace, row, u) for row, u in enumerate(request.updates)}
    refused = _refused(_expiry_faults(keyspace, request.updates), rows)
    check_batch_bytes(sum(map(len, keys)) + sum(u.size for u in updates.values()))
    return WriteBatch(
        table_version=request.table_version,
        keys=keys,
        values=[b""] * rows,
        partition_ids=partition_ids,
        updates=updates,
        refused=refused,
        durability=durability_of(request.durability),
    )


def _update_of(keyspace: Keyspace, row: int, message: kv_pb2.Update) -> Update:
    kind = message.WhichOneof("kind")
    if kind is None:
        raise InvalidArgumentError(field=f"updates[{row}]", reason="unknown kind of update")
    ttl_ms = getattr(message, kind).ttl_ms
    check_ttl(ttl_ms, f"updates[{row}].ttl_ms")
    if kind == "touch":
        return Expire(expires_after(ttl_ms))
    ttl_ms = ttl_ms or keyspace.unnamed_ttl_ms
    if kind == "increment":
        return Increment(message.increment.by, ttl_ms)
    value = message.get_or_put.value
    check_value(len(value), keyspace, f"updates[{row}].value")
    return Assign(value, expires_after(ttl_ms), RecordIf(Presence.ABSENT))


def _ttl_column(keyspace: Keyspace, ttl_ms: Sequence[int], rows: int) -> list[int] | None:
    if len(ttl_ms) not in (0, 1, rows):
        raise InvalidArgumentError(
            field="ttl_ms",
            reason="must have no entry, one, or one a key",
            limit=rows,
            actual=len(ttl_ms),
        )
    check_ttl(max(ttl_ms, default=0))
    unnamed = keyspace.unnamed_ttl_ms
    if not any(ttl_ms):
        return [unnamed] * rows if unnamed else None
    if len(ttl_ms) == 1:
        return list(ttl_ms) * rows
    return [one or unnamed for one in ttl_ms]


def _ttl_faults(
    keyspace: Keyspace, ttl_ms: Sequence[int] | None, deletes: Collection[int]
) -> dict[int, KoinonError]:
    if not ttl_ms or ttl_fault(keyspace, max(ttl_ms)) is None:
        return {}
    return {
        row: fault
        for row, one in enumerate(ttl_ms)
        if row not in deletes and (fault := ttl_fault(keyspace, one)) is not None
    }


def _expiry_faults(keyspace: Keyspace, messages: Sequence[kv_pb2.Update]) -> dict[int, KoinonError]:
    faults: dict[int, KoinonError] = {}
    for row, message in enumerate(messages if keyspace.max_ttl_ms else ()):
        kind = message.WhichOneof("kind")
        ttl_ms = getattr(message, kind).ttl_ms
        is_for_ever = kind == "touch" and not ttl_ms
        fault = never_fault(keyspace) if is_for_ever else ttl_fault(keyspace, ttl_ms)
        if fault is not None:
            faults[row] = fault
    return faults


def _refused(faults: dict[int, KoinonError], rows: int) -> dict[int, KoinonError]:
    """Return the errors of refused rows; raise the first if all rows are refused."""
    if faults and len(faults) == rows:
        raise faults[0]
    return faults


# --- replies -----------------------------------------------------------------------------------


def _raise_any(*errors: Mapping[int, KoinonError]) -> None:
    for mapping in errors:
        for error in mapping.values():
            raise error


def _write_reply(answer: WriteAnswer, want_versions: bool) -> kv_pb2.BatchWriteResponse:
    return kv_pb2.BatchWriteResponse(
        versions=answer.versions.tolist() if want_versions else (),
        absent=answer.absent,
        present=answer.present,
        refusals=refusals_to_proto(answer.refusals),
        row_errors=_row_errors(answer),
    )


def _update_reply(answer: WriteAnswer) -> kv_pb2.BatchUpdateResponse:
    reply = kv_pb2.BatchUpdateResponse(
        refusals=refusals_to_proto(answer.refusals), row_errors=_row_errors(answer)
    )
    for row, version in enumerate(answer.versions.tolist()):
        message = reply.results.add(version=version)
        result = answer.results.get(row)
        if isinstance(result, bool):
            message.found = result
        elif isinstance(result, int):
            message.number = result
        elif isinstance(result, tuple) and result[1] is not None:
            message.found, message.value = True, result[1]
    return reply


def _row_errors(answer: WriteAnswer) -> list[kv_pb2.RowError]:
    return [
        kv_pb2.RowError(row=row, error=convert.error_to_proto(error))
        for row, error in answer.row_errors.items()
    ]
