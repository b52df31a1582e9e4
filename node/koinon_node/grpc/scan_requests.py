"""Checks a scan's request, from gRPC or the Redis protocol, and converts the reply."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from koinon_node.partition.batches import ScanAnswer, ScanPage
from koinon_node.partition.request_limits import check_partitions
from koinon_proto.contract import convert
from koinon_proto.contract.access import Action
from koinon_proto.contract.errors import InvalidArgumentError, KoinonError
from koinon_proto.contract.keyspaces import Keyspace
from koinon_proto.contract.table import MAX_KEY_BYTES
from koinon_proto.security.authorization import Caller
from koinon_proto.v1 import kv_pb2


def page_of(request: kv_pb2.ScanRequest, keyspace: Keyspace, caller: Caller) -> ScanPage:
    """Check a request and the caller's right to scan its prefix; convert it.

    Raises:
        InvalidArgumentError: a field breaks a limit, the partitions do not ascend, or a partition
            is not the keyspace's.
        PermissionDeniedError: the caller may not scan keys with this prefix.
    """
    wanted, after_key = pages_of(keyspace, request)
    if len(request.start) > MAX_KEY_BYTES:
        raise InvalidArgumentError(
            field="start",
            reason="longer than a key",
            limit=MAX_KEY_BYTES,
            actual=len(request.start),
        )
    caller.check_prefix(Action.SCAN, keyspace.keyspace_id, request.prefix)
    return ScanPage(
        table_version=request.table_version,
        partition_ids=wanted,
        prefix=request.prefix,
        after_key=after_key,
        limit=request.limit,
        keys_only=request.keys_only,
        start=request.start,
        reverse=request.reverse,
    )


def pages_of(keyspace: Keyspace, request: Any) -> tuple[list[int], bytes]:
    """Return the partitions that a page has still to visit, and the key after which it continues in
    the first of them. The request has partition_ids, a prefix and a cursor.

    Raises:
        InvalidArgumentError: a field breaks a limit, the partitions do not ascend, or a partition
            is not the keyspace's.
    """
    wanted = list(request.partition_ids)
    longest = max(len(request.prefix), len(request.cursor.after_key))
    if longest > MAX_KEY_BYTES:
        raise InvalidArgumentError(
            field="prefix", reason="longer than a key", limit=MAX_KEY_BYTES, actual=longest
        )
    if any(a >= b for a, b in itertools.pairwise(wanted)):
        raise InvalidArgumentError(field="partition_ids", reason="must ascend")
    check_partitions(keyspace, wanted)
    if not request.HasField("cursor"):
        return wanted, b""
    wanted = [p for p in wanted if p >= request.cursor.partition_id]
    in_first = bool(wanted) and wanted[0] == request.cursor.partition_id
    return wanted, request.cursor.after_key if in_first else b""


def page_reply(answer: ScanAnswer, *, want_versions: bool) -> kv_pb2.ScanResponse:
    """Convert a page to its message."""
    reply = kv_pb2.ScanResponse(
        keys=answer.keys,
        values=answer.values,
        partition_ids=answer.partition_ids,
        refusals=refusals_to_proto(answer.refusals),
        in_range=True,
    )
    if want_versions:
        reply.versions.extend(answer.versions)
        reply.expires_at_ms.extend(answer.expires_at_ms)
    if answer.next_cursor is not None:
        partition_id, after_key = answer.next_cursor
        reply.next.CopyFrom(kv_pb2.ScanCursor(partition_id=partition_id, after_key=after_key))
    return reply


def refusals_to_proto(refusals: Mapping[int, KoinonError]) -> list[kv_pb2.Refusal]:
    """Convert the refusals of partitions to messages."""
    return [
        kv_pb2.Refusal(partition_id=partition_id, error=convert.error_to_proto(error))
        for partition_id, error in refusals.items()
    ]
