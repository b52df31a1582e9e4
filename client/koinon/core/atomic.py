"""An atomic batch: its operations, checked as they are added, and the outcome of its commit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from koinon.core import limits
from koinon.core.operations import Call, RowsOperation
from koinon.core.retry import RetryPolicy, final_error
from koinon.types import BatchResult, BytesLike, Durability
from koinon_proto.contract.errors import InvalidArgumentError, KoinonError
from koinon_proto.contract.table import MAX_ATOMIC_BYTES, MAX_ATOMIC_OPERATIONS
from koinon_proto.one_routing_key import check_together
from koinon_proto.partitioner import Partitioner

if TYPE_CHECKING:
    from koinon.core.operations import Failed
    from koinon.core.routing import PartitionIds, Rows

OperationName = Literal["check", "put", "delete", "increment"]


class Operation(NamedTuple):
    """One operation of a batch; fields that its kind does not use are empty."""

    name: OperationName
    key: bytes
    value: bytes = b""
    ttl_ms: int = 0
    version: int = 0
    by: int = 0


class Operations:
    """The operations of one batch on keys with the same routing bytes as ``routing_key``."""

    def __init__(self, routing_key: BytesLike, known: Partitioner, max_value_bytes: int) -> None:
        self.routing_key = limits.check_key(routing_key)
        self._partitioner = known
        self._max_value_bytes = max_value_bytes
        self._size = 0
        self.operations: list[Operation] = []

    def check(self, key: BytesLike, version: object) -> None:
        limits.check_version(version)
        if not isinstance(version, int):
            raise TypeError(f"version must be an int, not {type(version).__name__}")
        self._add(Operation("check", self._key(key), version=version))

    def put(self, key: BytesLike, value: BytesLike, ttl_ms: int | None) -> None:
        limits.check_ttl(ttl_ms)
        checked = limits.check_value(value, self._max_value_bytes)
        self._add(Operation("put", self._key(key), checked, ttl_ms or 0))

    def delete(self, key: BytesLike) -> None:
        self._add(Operation("delete", self._key(key)))

    def increment(self, key: BytesLike, by: int, ttl_ms: int | None) -> None:
        limits.check_increment(by)
        limits.check_ttl(ttl_ms)
        self._add(Operation("increment", self._key(key), ttl_ms=ttl_ms or 0, by=by))

    def _key(self, key: BytesLike) -> bytes:
        checked = limits.check_key(key)
        check_together(self._partitioner, self.routing_key, (checked,))
        return checked

    def _add(self, operation: Operation) -> None:
        size = self._size + len(operation.key) + len(operation.value)
        if size > MAX_ATOMIC_BYTES:
            raise InvalidArgumentError(
                field="batch", reason="too many bytes", limit=MAX_ATOMIC_BYTES, actual=size
            )
        if len(self.operations) >= MAX_ATOMIC_OPERATIONS:
            raise InvalidArgumentError(
                field="batch",
                reason="too many operations",
                limit=MAX_ATOMIC_OPERATIONS,
                actual=len(self.operations) + 1,
            )
        self._size = size
        self.operations.append(operation)


class PartitionOperations(Operations):
    """The operations of one batch on keys of one partition, which need not have the same routing
    bytes: the batch also moves a cursor of the partition.
    """

    def __init__(self, partition_id: int, known: Partitioner, max_value_bytes: int) -> None:
        super().__init__(b"\0", known, max_value_bytes)
        self.partition_id = partition_id

    def _key(self, key: BytesLike) -> bytes:
        checked = limits.check_key(key)
        if (own := self._partitioner.partition_of(checked)) != self.partition_id:
            raise InvalidArgumentError(
                field="key",
                reason=f"{checked!r} lies in partition {own}, the changes in {self.partition_id}: "
                "a batch that moves a cursor writes in the partition of the changes only",
            )
        return checked


@dataclass(frozen=True, kw_only=True, slots=True)
class CommitReply:
    """``CommitBatchResponse``, with the results in the form that the caller gets."""

    version: int
    results: Sequence[int | bool | None]


class CommitOperation(RowsOperation[CommitReply]):
    """The commit of a batch: one row, whose key is the routing key. It is retried only if nothing
    of it was applied; an attempt of unknown fate ends it.
    """

    write = True
    idempotent = False

    def __init__(
        self,
        batch: Operations,
        partition_ids: PartitionIds,
        policy: RetryPolicy,
        keyspace_id: int = 0,
        *,
        durability: Durability,
    ) -> None:
        super().__init__([batch.routing_key], partition_ids, policy, keyspace_id)
        self.operations = batch.operations
        self.durability = durability
        self.result: BatchResult | None = None
        self.error: KoinonError | None = None

    def _store(self, call: Call, reply: CommitReply) -> Failed:
        self.result = BatchResult(version=reply.version, results=list(reply.results))
        return []

    def fail(self, rows: Rows, error: KoinonError, timed_out_ms: int | None = None) -> None:
        self.error = final_error(error, write=True, maybe_applied=False, timed_out_ms=timed_out_ms)
