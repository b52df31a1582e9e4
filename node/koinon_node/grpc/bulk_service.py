"""The gRPC service of bulk loads and column reads: checks messages and converts replies."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from koinon_node.bulk_load.column_reader import ColumnReader, ColumnsAnswer, ColumnsPage
from koinon_node.bulk_load.stager import StageBatch, Stager
from koinon_node.core.formats.records import U32Array
from koinon_node.grpc.scan_requests import pages_of, refusals_to_proto
from koinon_node.partition.request_limits import check_partitions, keyspace_of, table_of
from koinon_node.state import NodeState, partitioner_of
from koinon_proto.contract import columns
from koinon_proto.contract.access import Action
from koinon_proto.contract.columns import Gathered
from koinon_proto.contract.errors import InvalidArgumentError, WrongPartitionError
from koinon_proto.contract.keyspaces import Keyspace
from koinon_proto.contract.table import MAX_BATCH_BYTES, MAX_KEY_BYTES
from koinon_proto.security.authorization import caller
from koinon_proto.server.rpc import bounded, typed_errors
from koinon_proto.v1 import kv_pb2, loads_pb2, loads_pb2_grpc

CALLS_MAX = 256
CHUNK_BYTES_MAX = 8 * 1024 * 1024
CHUNK_ROWS_MAX = 1_000_000


class BulkService(loads_pb2_grpc.BulkServicer):
    """koinon.v1.Bulk."""

    def __init__(self, stager: Stager, reader: ColumnReader, state: NodeState) -> None:
        self._stager = stager
        self._reader = reader
        self._state = state

    def _keyspace_named(self, request: Any) -> Keyspace | None:
        """Return the keyspace of the request's partitions, or None if it names no partition.

        Raises:
            InvalidArgumentError, TableBehindError: no keyspace has all of the partitions.
        """
        table = table_of(self._state, request)
        if not request.partition_ids:
            return None
        found = table.keyspaces.of(request.partition_ids[0])
        if found is None:
            self._stager.check_version(request.table_version)
            raise InvalidArgumentError(
                field="partition_ids",
                reason="no keyspace has such a partition",
                actual=request.partition_ids[0],
            )
        check_partitions(found, request.partition_ids)
        return found

    def _keyspace_of_load(self, request: Any) -> Keyspace:
        """Return the keyspace of the load. A caller without rights learns nothing else about the
        load.

        Raises:
            LoadClosedError, TableBehindError: the load is not open by the newest table.
            PermissionDeniedError: the load is another user's, or the caller has no right to load
                into its keyspace.
        """
        table = table_of(self._state, request)
        load = next((load for load in table.loads if load.load_id == request.load_id), None)
        if load is not None:
            caller.get().check_load(load.load_id, load.owner_digest, load.keyspace_id)
        self._stager.check_load(request.load_id, request.table_version)
        if load is None:  # the load was opened by a table that arrived in between
            return self._keyspace_of_load(request)
        keyspace = table.keyspaces.by_id(load.keyspace_id)
        assert keyspace is not None, "no keyspace is dropped while a load is under way in it"
        return keyspace

    @typed_errors
    @bounded(CALLS_MAX)
    async def Stage(  # noqa: N802 (the generated servicer's name)
        self, request: loads_pb2.StageRequest, context: Any
    ) -> loads_pb2.StageResponse:
        batch = _stage_batch(request)
        if (named := self._keyspace_named(request)) is not None:
            _check_allowed(named, batch.gathered)  # before any error reveals facts about the load
        keyspace = self._keyspace_of_load(request)
        _check_rows(keyspace, batch)
        refusals = await self._stager.stage(batch) if batch.chunks else {}
        return loads_pb2.StageResponse(refusals=refusals_to_proto(refusals))

    @typed_errors
    @bounded(CALLS_MAX)
    async def Prepare(  # noqa: N802
        self, request: loads_pb2.PrepareRequest, context: Any
    ) -> loads_pb2.PrepareResponse:
        named, found = self._keyspace_named(request), caller.get()
        if named is not None and not found.may_on_cluster(Action.OPERATE):
            found.check_some(Action.LOAD, named.keyspace_id)  # as in ``Stage``
        keyspace = self._keyspace_of_load(request)
        ids = _partitions(keyspace, request.partition_ids)
        _check_length("rows", len(request.rows), len(ids))
        prepared = await self._stager.prepare(
            request.load_id,
            frozenset(request.attempts),
            dict(zip(ids.tolist(), request.rows, strict=True)),
            request.table_version,
            find_duplicates=not request.duplicates_allowed,
        )
        return loads_pb2.PrepareResponse(
            refusals=refusals_to_proto(prepared.refusals),
            duplicate_rows=prepared.duplicate_rows,
            duplicate_keys=[key for key in prepared.duplicate_keys if _may_load(keyspace, key)],
        )

    @typed_errors
    @bounded(CALLS_MAX)
    async def ReadColumns(  # noqa: N802
        self, request: loads_pb2.ReadColumnsRequest, context: Any
    ) -> loads_pb2.ReadColumnsResponse:
        keyspace = keyspace_of(self._state, request)
        page = _page(keyspace, request)
        caller.get().check_prefix(Action.SCAN, keyspace.keyspace_id, request.prefix)
        answer = await self._reader.read_columns(page)
        return _columns_reply(answer)


def _check_allowed(keyspace: Keyspace, rows: Gathered) -> None:
    """Raise PermissionDeniedError unless the caller may load all keys. The keys of a chunk ascend
    (the stager refuses others before it writes): its first and its last key mostly decide.
    """
    found, keyspace_id = caller.get(), keyspace.keyspace_id
    if found.may_all(Action.LOAD, keyspace_id):
        return
    keys, bounds = rows.keys, rows.offsets.tolist()
    for first, end in pairwise([0, *np.cumsum(rows.rows).tolist()]):
        if first == end:
            continue
        least = keys[bounds[first] : bounds[first + 1]]
        greatest = keys[bounds[end - 1] : bounds[end]]
        if least <= greatest and found.may_range(Action.LOAD, keyspace_id, least, greatest):
            continue
        named = [keys[a:b] for a, b in pairwise(bounds[first : end + 1])]
        found.check_keys(Action.LOAD, keyspace_id, named)


def _may_load(keyspace: Keyspace, key: bytes) -> bool:
    """Return whether the caller may load this key, and so learn of it."""
    return caller.get().may(Action.LOAD, keyspace.keyspace_id, key)


def _stage_batch(request: loads_pb2.StageRequest) -> StageBatch:
    """Check a request's fields and convert it."""
    ids = np.fromiter(request.partition_ids, np.uint32, len(request.partition_ids))
    chunks = list(request.chunks)
    _check_length("numbers", len(request.numbers), len(ids))
    _check_length("chunks", len(chunks), len(ids))
    if not request.attempt:
        raise InvalidArgumentError(field="attempt", reason="must not be 0")
    if len(set(request.numbers)) != len(request.numbers):
        raise InvalidArgumentError(field="numbers", reason="a number appears twice")
    size = sum(map(len, chunks))
    if size > MAX_BATCH_BYTES:
        raise InvalidArgumentError(
            field="chunks", reason="too many bytes", limit=MAX_BATCH_BYTES, actual=size
        )
    gathered = columns.gather(chunks)
    return StageBatch(
        table_version=request.table_version,
        load_id=request.load_id,
        attempt=request.attempt,
        partition_ids=ids,
        numbers=list(request.numbers),
        chunks=chunks,
        gathered=gathered,
    )


def _check_rows(keyspace: Keyspace, batch: StageBatch) -> None:
    """Check that chunks and rows keep the limits, and that each key lies in its chunk's partition.

    Raises:
        InvalidArgumentError, WrongPartitionError
    """
    ids, rows = batch.partition_ids, batch.gathered
    check_partitions(keyspace, ids)
    for index, (chunk, header) in enumerate(zip(batch.chunks, rows.headers, strict=True)):
        for what, limit, actual in (
            ("bytes", CHUNK_BYTES_MAX, len(chunk)),
            ("rows", CHUNK_ROWS_MAX, header.rows),
        ):
            if actual > limit:
                raise InvalidArgumentError(
                    field=f"chunks[{index}]",
                    reason=f"too many {what}",
                    limit=limit,
                    actual=actual,
                )
    if not len(rows.key_lengths):
        return
    for what, lengths, low, high in (
        ("a key must have 1 to 500 bytes", rows.key_lengths, 1, MAX_KEY_BYTES),
        ("a value is too long", rows.value_lengths, 0, keyspace.max_value_bytes),
    ):
        least, most = int(lengths.argmin()), int(lengths.argmax())
        for row, limit, is_bad in (
            (least, low, lengths[least] < low),
            (most, high, lengths[most] > high),
        ):
            if is_bad:
                raise InvalidArgumentError(
                    field=f"chunks[{_chunk_of(rows, row)}]",
                    reason=what,
                    limit=limit,
                    actual=int(lengths[row]),
                )
    found = partitioner_of(keyspace).partitions_of_buffers(
        np.frombuffer(rows.keys, np.uint8), rows.offsets
    )
    sent = np.repeat(ids, rows.rows)
    others = np.flatnonzero(found != sent)
    if len(others):
        row = others[0]
        raise WrongPartitionError(
            partition_id=int(sent[row]), expected_partition_id=int(found[row])
        )


def _chunk_of(rows: Gathered, row: int) -> int:
    """Return the index of the chunk that has the row."""
    return int(np.searchsorted(np.cumsum(rows.rows), row, side="right"))


def _partitions(keyspace: Keyspace, partition_ids: Sequence[int]) -> U32Array:
    ids = np.fromiter(partition_ids, np.uint32, len(partition_ids))
    check_partitions(keyspace, partition_ids)
    return ids


def _check_length(field: str, actual: int, expected: int) -> None:
    if actual != expected:
        raise InvalidArgumentError(
            field=field, reason="must have one entry a partition", limit=expected, actual=actual
        )


def _page(keyspace: Keyspace, request: loads_pb2.ReadColumnsRequest) -> ColumnsPage:
    wanted, after_key = pages_of(keyspace, request)
    return ColumnsPage(
        table_version=request.table_version,
        partition_ids=wanted,
        prefix=request.prefix,
        after_key=after_key,
        bytes_max=request.bytes_max,
        keys_only=request.keys_only,
        want_versions=request.want_versions,
    )


def _columns_reply(answer: ColumnsAnswer) -> loads_pb2.ReadColumnsResponse:
    reply = loads_pb2.ReadColumnsResponse(
        columns=answer.packed(),
        partition_ids=list(answer.runs),
        row_counts=list(answer.runs.values()),
        versions=answer.versions,
        expires_at_ms=answer.expires_at_ms,
        refusals=refusals_to_proto(answer.refusals),
    )
    if answer.next_cursor is not None:
        partition_id, after_key = answer.next_cursor
        reply.next.CopyFrom(kv_pb2.ScanCursor(partition_id=partition_id, after_key=after_key))
    return reply
