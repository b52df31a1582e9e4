"""Checks a request for many rows, from gRPC or the Redis protocol, and converts the reply."""

from __future__ import annotations

from koinon_node.core.formats.records import U32Array
from koinon_node.grpc.scan_requests import refusals_to_proto
from koinon_node.partition.batches import ReadAnswer
from koinon_node.partition.request_limits import check_batch_bytes, check_rows
from koinon_proto.contract.access import Action
from koinon_proto.contract.keyspaces import Keyspace
from koinon_proto.security.authorization import Caller
from koinon_proto.v1 import kv_pb2


def rows_of(
    request: kv_pb2.BatchGetRequest, keyspace: Keyspace, caller: Caller
) -> tuple[list[bytes], U32Array]:
    """Check a request and the caller's right to read its keys; return the keys and their
    partitions.

    Raises:
        InvalidArgumentError, WrongPartitionError: see ``check_rows``.
        PermissionDeniedError: the caller may not read one of the keys.
    """
    keys = list(request.keys)
    partition_ids = check_rows(keyspace, keys, request.partition_ids)
    check_batch_bytes(sum(map(len, keys)))
    caller.check_rows(Action.READ, keyspace.keyspace_id, keys)
    return keys, partition_ids


def rows_reply(answer: ReadAnswer, *, keys_only: bool) -> kv_pb2.BatchGetResponse:
    """Convert an answer to its message; ``keys_only`` leaves the values empty."""
    return kv_pb2.BatchGetResponse(
        values=[b""] * len(answer.values) if keys_only else answer.values,
        missing=answer.missing,
        versions=answer.versions,
        expires_at_ms=answer.expires_at_ms,
        refusals=refusals_to_proto(answer.refusals),
    )
