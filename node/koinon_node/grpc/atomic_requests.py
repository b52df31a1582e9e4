"""Checks an atomic batch's message and converts it, and converts the reply."""

from __future__ import annotations

from typing import Any

from koinon_node.core.writes.atomic_batch import Check, Step
from koinon_node.core.writes.cursor_updates import CommitCursor
from koinon_node.core.writes.updates import Increment, Put, Remove
from koinon_node.partition.batches import AtomicAnswer, AtomicBatch, Durability
from koinon_node.partition.engine import Engine
from koinon_node.partition.request_limits import check_key, check_value, ttl_of
from koinon_node.partition.row_metrics import RowCounts
from koinon_node.state import partitioner_of
from koinon_proto.contract.access import Action
from koinon_proto.contract.errors import InvalidArgumentError, WrongPartitionError
from koinon_proto.contract.keyspaces import Keyspace
from koinon_proto.contract.table import MAX_ATOMIC_BYTES, MAX_ATOMIC_OPERATIONS
from koinon_proto.one_routing_key import check_together
from koinon_proto.security.authorization import Caller
from koinon_proto.v1 import kv_pb2


def durability_of(number: int) -> Durability:
    """Return the level with this number on the wire.

    Raises:
        InvalidArgumentError: there is no such level.
    """
    try:
        return Durability(number)
    except ValueError:
        raise InvalidArgumentError(
            field="durability", reason="no such level", limit=max(Durability), actual=number
        ) from None


def batch_of(
    request: kv_pb2.CommitBatchRequest,
    keyspace: Keyspace,
    cursor: tuple[bytes, CommitCursor] | None = None,
) -> AtomicBatch:
    """Check a request and convert it. With a cursor the keys need not have the same routing bytes,
    and there may be none.

    Raises:
        InvalidArgumentError: a field breaks a limit, or the keys have different routing bytes.
        WrongPartitionError: a key lies in another partition than the request says.
    """
    durability = durability_of(request.durability)
    operations = request.operations
    if not (cursor is None) <= len(operations) <= MAX_ATOMIC_OPERATIONS:
        raise InvalidArgumentError(
            field="operations",
            reason="a batch has 1 to 1,000 operations",
            limit=MAX_ATOMIC_OPERATIONS,
            actual=len(operations),
        )
    for operation in operations:
        check_key(operation.key)
    keys = [operation.key for operation in operations]
    steps = [_step_of(keyspace, row, operation) for row, operation in enumerate(operations)]
    size = sum(map(len, keys)) + sum(map(_value_bytes, operations))
    if size > MAX_ATOMIC_BYTES:
        raise InvalidArgumentError(
            field="operations", reason="too many bytes", limit=MAX_ATOMIC_BYTES, actual=size
        )
    known = partitioner_of(keyspace)
    if cursor is None:
        check_together(known, keys[0], keys)
    for key in keys if cursor is not None else keys[:1]:
        if (partition_id := known.partition_of(key)) != request.partition_id:
            raise WrongPartitionError(
                partition_id=request.partition_id, expected_partition_id=partition_id
            )
    return AtomicBatch(
        table_version=request.table_version,
        partition_id=request.partition_id,
        keys=keys,
        steps=steps,
        durability=durability,
        cursor=cursor,
    )


async def commit(engine: Engine, counts: RowCounts, batch: AtomicBatch) -> AtomicAnswer:
    """Commit a batch, and count its rows."""
    try:
        answer = await engine.writes.commit(batch)
    except BaseException as error:
        counts.batch_failed(batch, error)
        raise
    counts.batch_committed(batch, answer)
    return answer


def check_access(batch: AtomicBatch, keyspace: Keyspace, caller: Caller) -> None:
    """Raise PermissionDeniedError unless the caller may do each operation. A check needs the right
    to read its key; an increment, which returns the new value, the rights to read and to write.
    """
    rows = list(zip(batch.keys, batch.steps, strict=True))
    read = [key for key, step in rows if isinstance(step, Check | Increment)]
    written = [key for key, step in rows if not isinstance(step, Check)]
    caller.check_keys(Action.READ, keyspace.keyspace_id, read)
    caller.check_keys(Action.WRITE, keyspace.keyspace_id, written)


def reply_of(answer: AtomicAnswer) -> kv_pb2.CommitBatchResponse:
    """Convert an answer to its message."""
    reply = kv_pb2.CommitBatchResponse(version=answer.version)
    for result in answer.results:
        message = reply.results.add()
        if isinstance(result, bool):
            message.found = result
        elif isinstance(result, int):
            message.number = result
    return reply


def _value_bytes(operation: Any) -> int:
    return len(operation.put.value) if operation.HasField("put") else 0


def _step_of(keyspace: Keyspace, row: int, operation: kv_pb2.Operation) -> Step:
    kind, field = operation.WhichOneof("kind"), f"operations[{row}]"
    if kind == "check":
        return Check(operation.check.version)
    if kind == "put":
        check_value(len(operation.put.value), keyspace, f"{field}.value")
        ttl_ms = ttl_of(keyspace, operation.put.ttl_ms, f"{field}.ttl_ms")
        return Put(operation.put.value, ttl_ms)
    if kind == "delete":
        return Remove()
    if kind == "increment":
        ttl_ms = ttl_of(keyspace, operation.increment.ttl_ms, f"{field}.ttl_ms")
        return Increment(operation.increment.by, ttl_ms)
    raise InvalidArgumentError(field=field, reason="unknown kind of operation")
