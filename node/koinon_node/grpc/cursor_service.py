"""The gRPC service of consumer groups' cursors: checks requests, and has the engine carry them out.

Each cursor is changed by an update of a record in its partition (core/writes/cursor_updates.py), on
the way of every write: lease, quota, replicas in sync, durability.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from koinon_node.core.formats import records
from koinon_node.core.formats.records import U32Array
from koinon_node.core.replication.replica_tracker import ReplicaTracker
from koinon_node.core.writes.cursor_updates import (
    BEGINNING,
    MEMBER_BYTES_MAX,
    ClaimCursor,
    CommitCursor,
    CursorPosition,
    GroupCursor,
    ResetCursor,
    cursor_key,
    decode_cursor,
)
from koinon_node.core.writes.updates import Update
from koinon_node.grpc.atomic_requests import batch_of, check_access, commit, reply_of
from koinon_node.grpc.feed_service import check_positions
from koinon_node.grpc.scan_requests import refusals_to_proto
from koinon_node.partition.batches import WriteAnswer, WriteBatch
from koinon_node.partition.change_feeds import Position
from koinon_node.partition.engine import Engine
from koinon_node.partition.request_limits import check_partitions, keyspace_of
from koinon_node.partition.row_metrics import RowCounts
from koinon_node.state import NodeState
from koinon_proto.contract.access import Action
from koinon_proto.contract.errors import InvalidArgumentError, KoinonError, WrongPartitionError
from koinon_proto.contract.keyspaces import Keyspace
from koinon_proto.security.authorization import caller
from koinon_proto.server.rpc import bounded, typed_errors
from koinon_proto.v1 import feed_pb2, groups_pb2, groups_pb2_grpc, kv_pb2

CALLS_MAX = 256


class CursorService(groups_pb2_grpc.CursorsServicer):
    """koinon.v1.Cursors."""

    def __init__(
        self, engine: Engine, state: NodeState, leading: ReplicaTracker, counts: RowCounts
    ) -> None:
        self._engine = engine
        self._state = state
        self._leading = leading
        self._counts = counts

    @typed_errors
    @bounded(CALLS_MAX)
    async def Claim(  # noqa: N802
        self, request: groups_pb2.ClaimCursorsRequest, context: Any
    ) -> groups_pb2.ClaimCursorsResponse:
        wanted = list(request.partition_ids)
        self._check(request, wanted, request.generations)
        _check_member(request.member_id)
        updates = [
            ClaimCursor(p, generation, request.member_id, self._start(p, request.from_now))
            for p, generation in zip(wanted, request.generations, strict=True)
        ]
        answer = await self._update(request, wanted, updates)
        claimed = {wanted[row]: value for row, value in answer.results.items()}
        return groups_pb2.ClaimCursorsResponse(
            cursors=self._cursors(claimed, claimed), refusals=_refusals(wanted, answer)
        )

    @typed_errors
    @bounded(CALLS_MAX)
    async def Commit(  # noqa: N802
        self, request: groups_pb2.CommitCursorsRequest, context: Any
    ) -> groups_pb2.CommitCursorsResponse:
        wanted = [position.partition_id for position in request.positions]
        self._check(request, wanted, request.generations, request.positions)
        updates = [
            CommitCursor(position.partition_id, generation, _position_of(position))
            for position, generation in zip(request.positions, request.generations, strict=True)
        ]
        answer = await self._update(request, wanted, updates)
        return groups_pb2.CommitCursorsResponse(refusals=_refusals(wanted, answer))

    @typed_errors
    @bounded(CALLS_MAX)
    async def CommitBatch(  # noqa: N802
        self, request: groups_pb2.CommitBatchWithCursorRequest, context: Any
    ) -> kv_pb2.CommitBatchResponse:
        self._state.check_in_time(request.take_by_ms)
        keyspace = keyspace_of(self._state, request.batch)
        caller.get().check_prefix(Action.FEED, keyspace.keyspace_id, b"")
        partition_id = request.batch.partition_id
        for position in (request.position, request.after):
            _check_positions((position,), keyspace)
            if position.partition_id != partition_id:
                raise WrongPartitionError(
                    partition_id=position.partition_id, expected_partition_id=partition_id
                )
        moves = CommitCursor(
            partition_id,
            request.generation,
            _position_of(request.position),
            _position_of(request.after),
        )
        batch = batch_of(request.batch, keyspace, (cursor_key(request.group_id), moves))
        check_access(batch, keyspace, caller.get())
        return reply_of(await commit(self._engine, self._counts, batch))

    @typed_errors
    @bounded(CALLS_MAX)
    async def Read(  # noqa: N802
        self, request: groups_pb2.ReadCursorsRequest, context: Any
    ) -> groups_pb2.ReadCursorsResponse:
        keyspace = keyspace_of(self._state, request)
        if not caller.get().may_on_cluster(Action.VIEW):
            caller.get().check_prefix(Action.FEED, keyspace.keyspace_id, b"")
        wanted = _ascending(request.partition_ids, keyspace)
        found, refusals = await self._engine.reads.read_cursors(
            cursor_key(request.group_id), _ids(wanted), request.table_version
        )
        served = [p for p in wanted if p not in refusals]
        return groups_pb2.ReadCursorsResponse(
            cursors=self._cursors(served, found), refusals=refusals_to_proto(refusals)
        )

    @typed_errors
    @bounded(CALLS_MAX)
    async def Reset(  # noqa: N802
        self, request: groups_pb2.ResetCursorsRequest, context: Any
    ) -> groups_pb2.ResetCursorsResponse:
        wanted = [position.partition_id for position in request.positions]
        self._state.check_in_time(request.take_by_ms)
        _check_positions(request.positions, keyspace_of(self._state, request))
        updates = [
            ResetCursor(position.partition_id, request.generation, self._reset_to(position))
            for position in request.positions
        ]
        answer = await self._update(request, wanted, updates)
        return groups_pb2.ResetCursorsResponse(refusals=_refusals(wanted, answer))

    @typed_errors
    @bounded(CALLS_MAX)
    async def Delete(  # noqa: N802
        self, request: groups_pb2.DeleteCursorsRequest, context: Any
    ) -> groups_pb2.DeleteCursorsResponse:
        self._state.check_in_time(request.take_by_ms)
        wanted = _ascending(request.partition_ids, keyspace_of(self._state, request))
        answer = await self._update(request, wanted, ())
        return groups_pb2.DeleteCursorsResponse(refusals=_refusals(wanted, answer))

    # --- the parts of requests -------------------------------------------------------------

    def _check(
        self,
        request: Any,
        wanted: Sequence[int],
        generations: Sequence[int],
        positions: Sequence[feed_pb2.FeedPosition] = (),
    ) -> None:
        """Check a member's request and its caller's right.

        Raises:
            InvalidArgumentError: a field breaks a limit.
            PermissionDeniedError: the caller may not follow all of the keyspace.
        """
        self._state.check_in_time(request.take_by_ms)
        keyspace = keyspace_of(self._state, request)
        caller.get().check_prefix(Action.FEED, keyspace.keyspace_id, b"")
        _ascending(wanted, keyspace)
        _check_positions(positions, keyspace)
        if len(generations) != len(wanted):
            raise InvalidArgumentError(
                field="generations",
                reason="must have one entry a partition",
                limit=len(wanted),
                actual=len(generations),
            )

    def _start(self, partition_id: int, from_now: bool) -> CursorPosition:
        return CursorPosition(self._completed(partition_id)) if from_now else BEGINNING

    def _reset_to(self, position: feed_pb2.FeedPosition) -> CursorPosition:
        """Return the position of a reset; the greatest sequence stands for the end."""
        if position.sequence == records.NO_SEQUENCE:
            return CursorPosition(self._completed(position.partition_id))
        return _position_of(position)

    def _completed(self, partition_id: int) -> int:
        return int(self._leading.completed[partition_id])

    async def _update(
        self, request: Any, partition_ids: Sequence[int], updates: Sequence[Update]
    ) -> WriteAnswer:
        """Carry out an update of the group's cursor in each partition; without updates, delete the
        cursors.
        """
        rows = len(partition_ids)
        return await self._engine.writes.write(
            WriteBatch(
                table_version=request.table_version,
                keys=[cursor_key(request.group_id)] * rows,
                values=[b""] * rows,
                partition_ids=_ids(partition_ids),
                deletes=frozenset() if updates else frozenset(range(rows)),
                updates=dict(enumerate(updates)),
                kind=records.CURSOR,
            )
        )

    def _cursors(
        self, partition_ids: Iterable[int], values: Mapping[int, Any]
    ) -> list[groups_pb2.Cursor]:
        """Convert the cursors of these partitions, some of which may have none."""
        return [_cursor(p, values.get(p), self._completed(p)) for p in partition_ids]


def _cursor(partition_id: int, value: bytes | None, completed: int) -> groups_pb2.Cursor:
    cursor = decode_cursor(value) if value is not None else GroupCursor(0, BEGINNING, 0, "")
    return groups_pb2.Cursor(
        position=feed_pb2.FeedPosition(partition_id=partition_id, **cursor.position._asdict()),
        is_committed=bool(cursor.committed_at_ms),
        generation=cursor.generation,
        member_id=cursor.member,
        committed_at_ms=cursor.committed_at_ms,
        completed_sequence=completed,
    )


def _position_of(position: feed_pb2.FeedPosition) -> CursorPosition:
    return CursorPosition(position.sequence, position.bound, position.after_key)


def _check_positions(positions: Iterable[feed_pb2.FeedPosition], keyspace: Keyspace) -> None:
    """Raise InvalidArgumentError unless these may be positions of a feed."""
    places = [Position(p.partition_id, p.sequence, p.bound, p.after_key) for p in positions]
    check_positions(places, keyspace)


def _ascending(partition_ids: Collection[int], keyspace: Keyspace) -> list[int]:
    """Return the partitions of a request.

    Raises:
        InvalidArgumentError: they do not ascend, or one is not the keyspace's.
    """
    if any(a >= b for a, b in itertools.pairwise(partition_ids)):
        raise InvalidArgumentError(field="partition_ids", reason="partitions must ascend")
    check_partitions(keyspace, partition_ids)
    return list(partition_ids)


def _check_member(member_id: str) -> None:
    if not 0 < len(member_id.encode()) <= MEMBER_BYTES_MAX:
        raise InvalidArgumentError(
            field="member_id",
            reason="must have 1 to 512 bytes",
            limit=MEMBER_BYTES_MAX,
            actual=len(member_id.encode()),
        )


def _ids(partition_ids: Sequence[int]) -> U32Array:
    return np.array(partition_ids, np.uint32)


def _refusals(wanted: Sequence[int], answer: WriteAnswer) -> list[kv_pb2.Refusal]:
    refusals: dict[int, KoinonError] = dict(answer.refusals)
    refusals.update((wanted[row], error) for row, error in answer.row_errors.items())
    return refusals_to_proto(refusals)
