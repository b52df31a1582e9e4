"""Converts a member's requests into messages of ``v1/groups.proto``, and replies into the core's
values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from koinon.core.cursor_rows import (
    CommitWithCursor,
    CursorAction,
    CursorReply,
    CursorRows,
    StoredCursor,
)
from koinon.core.feeds import PartitionPosition
from koinon.core.groups import Grant
from koinon.core.operations import Call
from koinon.driver.rpc.kv_messages import commit_request, refused
from koinon_proto.v1 import feed_pb2, groups_pb2

STRATEGIES = {
    "": groups_pb2.GROUP_STRATEGY_UNSPECIFIED,
    "range": groups_pb2.GROUP_STRATEGY_RANGE,
    "round-robin": groups_pb2.GROUP_STRATEGY_ROUND_ROBIN,
    "sticky": groups_pb2.GROUP_STRATEGY_STICKY,
}


def cursor_request(operation: CursorRows, call: Call, cluster_id: str) -> Any:
    """Build the request of one call of an action on cursors."""
    work, wanted = operation.work, call.partition_ids.tolist()
    named: dict[str, Any] = {
        "table_version": call.table_version,
        "cluster_id": cluster_id,
        "keyspace_id": work.keyspace_id,
        "group_id": work.group_id,
    }
    if work.action is CursorAction.READ:
        return groups_pb2.ReadCursorsRequest(**named, partition_ids=wanted)
    named |= {"member_id": work.member_id, "generations": [work.rows[p][0] for p in wanted]}
    if work.action is CursorAction.CLAIM:
        return groups_pb2.ClaimCursorsRequest(**named, partition_ids=wanted, from_now=work.from_now)
    return groups_pb2.CommitCursorsRequest(
        **named, positions=[position_to_proto(p, work.rows[p][1]) for p in wanted]
    )


def cursor_reply(reply: Any) -> CursorReply:
    """Convert the reply to an action on cursors."""
    found = () if isinstance(reply, groups_pb2.CommitCursorsResponse) else reply.cursors
    cursors = {one.position.partition_id: _cursor_of(one) for one in found}
    return CursorReply(cursors=cursors, refused=refused(reply))


def commit_with_cursor_request(
    operation: CommitWithCursor, call: Call, cluster_id: str
) -> groups_pb2.CommitBatchWithCursorRequest:
    """Build the request of an atomic batch that moves a cursor, too."""
    p = operation.partition_id
    return groups_pb2.CommitBatchWithCursorRequest(
        batch=commit_request(operation, call, cluster_id),
        group_id=operation.group_id,
        generation=operation.generation,
        position=position_to_proto(p, operation.position),
        after=position_to_proto(p, operation.after),
    )


def position_to_proto(p: int, place: PartitionPosition) -> feed_pb2.FeedPosition:
    """Convert a position in a partition."""
    return feed_pb2.FeedPosition(partition_id=p, **place._asdict())


def _cursor_of(one: groups_pb2.Cursor) -> StoredCursor:
    place = one.position
    return StoredCursor(
        position=PartitionPosition(place.sequence, place.bound, place.after_key),
        generation=one.generation,
        member_id=one.member_id,
        committed_at_ms=one.committed_at_ms,
        completed_sequence=one.completed_sequence,
    )


def held_to_proto(held: Mapping[int, Iterable[tuple[int, int]]]) -> list[groups_pb2.Held]:
    """Convert what a member holds: by keyspace, (partition, generation) pairs."""
    return [
        groups_pb2.Held(
            keyspace_id=keyspace_id,
            partition_ids=[p for p, _ in pairs],
            generations=[generation for _, generation in pairs],
        )
        for keyspace_id, pairs in held.items()
    ]


def grants_of(granted: Iterable[groups_pb2.Held]) -> dict[int, Grant]:
    """Convert what a member is granted."""
    return {
        p: Grant(one.keyspace_id, generation)
        for one in granted
        for p, generation in zip(one.partition_ids, one.generations, strict=True)
    }
