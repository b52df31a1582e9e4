"""Converts operations into messages of ``v1/kv.proto``, and replies into the core's values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from koinon.core.atomic import CommitOperation, CommitReply, Operation
from koinon.core.batching import Kind, PendingOperation
from koinon.core.operations import (
    Call,
    ReadReply,
    ReadRows,
    UpdateReply,
    WriteReply,
    WriteRows,
)
from koinon.core.routing import Routing
from koinon.core.scanning import ScanReply
from koinon.types import Durability
from koinon_proto.contract import convert
from koinon_proto.contract.errors import KoinonError
from koinon_proto.v1 import kv_pb2

_DURABILITIES: dict[Durability, Any] = {
    "all_in_sync": kv_pb2.DURABILITY_ALL_IN_SYNC,
    "primary": kv_pb2.DURABILITY_PRIMARY,
}


def single_reads(batch: Sequence[PendingOperation], routing: Routing) -> kv_pb2.BatchGetRequest:
    """Build the request of these reads, which are in one keyspace."""
    return kv_pb2.BatchGetRequest(
        cluster_id=routing.table.cluster.cluster_id,
        table_version=routing.table.table_version,
        keys=[single.key for single in batch],
        partition_ids=[single.partition_id for single in batch],
        keyspace_id=batch[0].keyspace_id,
        want_versions=any(single.kind is Kind.GET_ENTRY for single in batch),
        keys_only=all(single.kind is Kind.EXISTS for single in batch),
    )


def single_updates(
    batch: Sequence[PendingOperation], routing: Routing
) -> kv_pb2.BatchUpdateRequest:
    """Build the request of these updates, of one durability and in one keyspace."""
    return kv_pb2.BatchUpdateRequest(
        cluster_id=routing.table.cluster.cluster_id,
        table_version=routing.table.table_version,
        keys=[single.key for single in batch],
        partition_ids=[single.partition_id for single in batch],
        keyspace_id=batch[0].keyspace_id,
        updates=[_update_of(single) for single in batch],
        durability=_DURABILITIES[batch[0].durability],
    )


def _update_of(single: PendingOperation) -> kv_pb2.Update:
    ttl_ms = single.ttl_ms or 0
    if single.kind is Kind.INCREMENT:
        return kv_pb2.Update(increment=kv_pb2.Increment(by=single.by, ttl_ms=ttl_ms))
    if single.kind is Kind.TOUCH:
        return kv_pb2.Update(touch=kv_pb2.Touch(ttl_ms=ttl_ms))
    return kv_pb2.Update(get_or_put=kv_pb2.GetOrPut(value=single.value, ttl_ms=ttl_ms))


def single_writes(batch: Sequence[PendingOperation], routing: Routing) -> kv_pb2.BatchWriteRequest:
    """Build the request of these puts and deletes, of one durability and in one keyspace."""
    ttls = [single.ttl_ms or 0 for single in batch]
    return kv_pb2.BatchWriteRequest(
        cluster_id=routing.table.cluster.cluster_id,
        table_version=routing.table.table_version,
        keys=[single.key for single in batch],
        values=[single.value for single in batch],
        partition_ids=[single.partition_id for single in batch],
        keyspace_id=batch[0].keyspace_id,
        deletes=[row for row, single in enumerate(batch) if single.kind is Kind.DELETE],
        ttl_ms=ttls if any(ttls) else (),
        conditions=[
            kv_pb2.Condition(row=row, if_version=single.if_version)
            for row, single in enumerate(batch)
            if single.if_version is not None
        ],
        want_versions=True,
        durability=_DURABILITIES[batch[0].durability],
    )


def commit_request(
    operation: CommitOperation, call: Call, cluster_id: str
) -> kv_pb2.CommitBatchRequest:
    """Build the request of an atomic batch."""
    return kv_pb2.CommitBatchRequest(
        cluster_id=cluster_id,
        table_version=call.table_version,
        partition_id=int(call.partition_ids[0]),
        keyspace_id=operation.keyspace_id,
        operations=list(map(_operation_of, operation.operations)),
        durability=_DURABILITIES[operation.durability],
    )


def _operation_of(operation: Operation) -> kv_pb2.Operation:
    key, ttl_ms = operation.key, operation.ttl_ms
    if operation.name == "check":
        check = kv_pb2.CheckVersion(version=operation.version)
        return kv_pb2.Operation(key=key, check=check)
    if operation.name == "put":
        put = kv_pb2.PutValue(value=operation.value, ttl_ms=ttl_ms)
        return kv_pb2.Operation(key=key, put=put)
    if operation.name == "delete":
        return kv_pb2.Operation(key=key, delete=kv_pb2.DeleteRecord())
    increment = kv_pb2.Increment(by=operation.by, ttl_ms=ttl_ms)
    return kv_pb2.Operation(key=key, increment=increment)


def read_request(operation: ReadRows, call: Call, cluster_id: str) -> kv_pb2.BatchGetRequest:
    """Build the request of one call of a read of many rows."""
    return kv_pb2.BatchGetRequest(
        cluster_id=cluster_id,
        table_version=call.table_version,
        keys=call.keys,
        partition_ids=call.partition_ids.tolist(),
        keyspace_id=operation.keyspace_id,
        want_versions=operation.want_entries,
    )


def write_request(operation: WriteRows, call: Call, cluster_id: str) -> kv_pb2.BatchWriteRequest:
    """Build the request of one call of a write of many rows."""
    rows = len(call.keys)
    return kv_pb2.BatchWriteRequest(
        cluster_id=cluster_id,
        table_version=call.table_version,
        keys=call.keys,
        values=[b""] * rows if call.values is None else call.values,
        partition_ids=call.partition_ids.tolist(),
        keyspace_id=operation.keyspace_id,
        deletes=range(rows) if call.values is None else (),
        ttl_ms=operation.ttl_column(call),
        conditions=map(_if_absent, range(rows)) if operation.options.if_absent else (),
        list_present=operation.options.if_absent,
        durability=_DURABILITIES[operation.options.durability],
    )


def _if_absent(row: int) -> kv_pb2.Condition:
    return kv_pb2.Condition(row=row, if_version=0)


# --- replies ------------------------------------------------------------------------------------


def read_reply(reply: kv_pb2.BatchGetResponse) -> ReadReply:
    """Convert the reply to a read."""
    return ReadReply(
        values=reply.values,
        missing=reply.missing,
        versions=reply.versions,
        expires_at_ms=reply.expires_at_ms,
        refused=refused(reply),
    )


def write_reply(reply: kv_pb2.BatchWriteResponse) -> WriteReply:
    """Convert the reply to a write."""
    return WriteReply(
        versions=reply.versions,
        absent=reply.absent,
        present=reply.present,
        refused=refused(reply),
        row_errors=_row_errors(reply),
    )


def update_reply(
    request: kv_pb2.BatchUpdateRequest, reply: kv_pb2.BatchUpdateResponse
) -> UpdateReply:
    """Convert the reply to updates."""
    return UpdateReply(
        results=list(map(_update_result, request.updates, reply.results)),
        refused=refused(reply),
        row_errors=_row_errors(reply),
    )


def commit_reply(
    request: kv_pb2.CommitBatchRequest, reply: kv_pb2.CommitBatchResponse
) -> CommitReply:
    """Convert the reply to an atomic batch, with one result for each of its operations."""
    results = list(map(_operation_result, request.operations, reply.results))
    return CommitReply(version=reply.version, results=results)


def scan_reply(reply: kv_pb2.ScanResponse) -> ScanReply:
    """Convert a page of a scan."""
    cursor = (reply.next.partition_id, reply.next.after_key) if reply.HasField("next") else None
    return ScanReply(
        keys=reply.keys,
        values=reply.values,
        partition_ids=reply.partition_ids,
        versions=reply.versions,
        expires_at_ms=reply.expires_at_ms,
        next=cursor,
        refused=refused(reply),
    )


def refused(reply: Any) -> dict[int, KoinonError]:
    """Return the errors of the partitions that a reply refuses."""
    refusals: Sequence[kv_pb2.Refusal] = reply.refusals
    return {r.partition_id: convert.error_from_proto(r.error) for r in refusals}


def _row_errors(reply: Any) -> dict[int, KoinonError]:
    return {e.row: convert.error_from_proto(e.error) for e in reply.row_errors}


def _operation_result(
    operation: kv_pb2.Operation, result: kv_pb2.OperationResult
) -> int | bool | None:
    kind = operation.WhichOneof("kind")
    if kind == "increment":
        return result.number
    return result.found if kind == "delete" else None


def _update_result(update: kv_pb2.Update, result: kv_pb2.UpdateResult) -> int | bool | bytes:
    """Return an update's result in the form that the caller gets."""
    kind = update.WhichOneof("kind")
    if kind == "increment":
        return result.number
    if kind == "touch":
        return result.found
    return result.value if result.found else update.get_or_put.value
