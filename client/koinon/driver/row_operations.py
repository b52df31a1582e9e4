"""Operations over many rows of one call: divided by owner, sent concurrently, retried until
settled.

``koinon.core.operations`` decides on the rows' owners and the meaning of replies. All methods run
on the engine's loop unless their docstrings say otherwise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from koinon.core import limits
from koinon.core.atomic import CommitOperation, Operations
from koinon.core.cursor_rows import CommitWithCursor, CursorRows
from koinon.core.operations import Call, ReadRows, RowsOperation, WriteRows
from koinon.core.row_chunks import Chunk, delete_chunks, put_chunks
from koinon.core.target import Target
from koinon.driver import request_ids
from koinon.driver.cluster_access import ClusterAccess
from koinon.driver.node_requests import (
    COMMIT,
    COMMIT_WITH_CURSOR,
    CURSORS,
    READ,
    WRITE,
    NodeRequests,
    RespLinkOf,
    outcome_as,
)
from koinon.driver.rpc.group_messages import (
    commit_with_cursor_request,
    cursor_reply,
    cursor_request,
)
from koinon.driver.rpc.kv_messages import (
    commit_reply,
    commit_request,
    read_reply,
    read_request,
    write_reply,
    write_request,
)
from koinon.types import BatchResult, BytesLike, Durability, Row
from koinon_proto.contract.table import MAX_BATCH_ROWS


class RowOperations:
    """Reads, writes and atomic batches of many rows of one client. It keeps no state."""

    def __init__(self, access: ClusterAccess, resp_link: RespLinkOf) -> None:
        self._access = access
        self.requests = NodeRequests(access, resp_link)

    async def run(self, operation: RowsOperation[Any], timeout_ms: int) -> None:
        """Carry out an operation until every row is settled. Errors are stored in the operation,
        not raised.
        """
        deadline = self._access.now() + timeout_ms / 1000
        calls = operation.route(self._access.routing())
        await self._run_calls(operation, calls, deadline, timeout_ms)

    async def _run_calls(
        self, operation: RowsOperation[Any], calls: list[Call], deadline: float, timeout_ms: int
    ) -> None:
        while True:
            if len(calls) != 1:
                await all_of([self._run_calls(operation, [c], deadline, timeout_ms) for c in calls])
                return
            outcome = await self._attempt(operation, calls[0], deadline)
            leftover = operation.settle(calls[0], outcome, self._access.router)
            self._access.wake_on_news(calls[0].revision)
            if leftover is None:
                return
            again, revision = leftover.again, leftover.revision
            partition_ids = operation.partition_ids[leftover.rows]
            if not await self._access.wait_for_news(again, revision, deadline, partition_ids):
                operation.fail(leftover.rows, leftover.error, timed_out_ms=timeout_ms)
                return
            changed = self._access.routing().changed_since(partition_ids, revision)
            attempt = 0 if changed else leftover.attempt
            calls = operation.route(self._access.routing(), leftover.rows, attempt)

    async def _attempt(self, operation: RowsOperation[Any], call: Call, deadline: float) -> Any:
        """Send one call; return the reply or the error."""
        if not call.address:
            return self._access.routing().offline(int(call.partition_ids[0]))
        cluster_id = self._access.cluster_id
        request: Any
        as_reply: Callable[[Any], Any]
        if isinstance(operation, WriteRows):
            method, as_reply = WRITE, write_reply
            request = write_request(operation, call, cluster_id)
        elif isinstance(operation, CursorRows):
            method, as_reply = CURSORS[operation.work.action], cursor_reply
            request = cursor_request(operation, call, cluster_id)
        elif isinstance(operation, CommitWithCursor):
            request = commit_with_cursor_request(operation, call, cluster_id)
            method, as_reply = COMMIT_WITH_CURSOR, partial(commit_reply, request.batch)
        elif isinstance(operation, CommitOperation):
            request = commit_request(operation, call, cluster_id)
            method, as_reply = COMMIT, partial(commit_reply, request)
        else:
            assert isinstance(operation, ReadRows)
            method, as_reply = READ, read_reply
            request = read_request(operation, call, cluster_id)
        outcome = await self.requests.send(method, call.address, request, deadline)
        return outcome_as(as_reply, outcome)

    def chunk_rows(self) -> int:
        """Return the number of rows in a ``*_many`` chunk that fill a batch for every node."""
        owners = max(1, len(self._access.routing().addresses) - 1)
        return min(MAX_BATCH_ROWS, self._access.options.batch_rows * owners)

    async def read(
        self,
        target: Target,
        keys: Sequence[BytesLike],
        *,
        want_entries: bool,
        timeout_ms: int | None,
    ) -> list[Any]:
        """Return the values (or entries) of the keys, in their order."""
        target.settings(self._access.routing())
        timeout_ms = self._access.timeout_ms(timeout_ms)
        keys = limits.check_keys(keys)
        rows = self.chunk_rows()
        parts = (
            [keys] if len(keys) <= rows else [keys[a : a + rows] for a in range(0, len(keys), rows)]
        )
        window = asyncio.Semaphore(self._access.options.batches_in_flight)

        async def read_part(part: Sequence[bytes]) -> list[Any]:
            async with window:
                operation = ReadRows(
                    part,
                    target.partitioner.partitions_of(part),
                    self._access.policy,
                    target.keyspace_id,
                    want_entries=want_entries,
                )
                if part:
                    await self.run(operation, timeout_ms)
                if operation.error is not None:
                    raise operation.error
                return operation.results

        name = "get_entries" if want_entries else "get_many"
        with self._access.observing.operation(name, len(keys)), request_ids.operation():
            if len(parts) == 1:
                return await read_part(parts[0])
            return [
                value
                for values in await all_of([read_part(part) for part in parts])
                for value in values
            ]

    def make_batch(self, target: Target, routing_key: BytesLike) -> Operations:
        """Return an empty atomic batch. From any thread."""
        limit = target.settings(self._access.routing()).max_value_bytes
        return Operations(routing_key, target.partitioner, limit)

    async def commit(
        self, target: Target, batch: Operations, *, durability: Durability, timeout_ms: int | None
    ) -> BatchResult:
        """Commit an atomic batch."""
        rows = len(batch.operations)
        with self._access.observing.operation("batch", rows), request_ids.operation():
            timeout_ms = self._access.timeout_ms(timeout_ms)
            limits.check_durability(durability)
            operation = CommitOperation(
                batch,
                target.partitioner.partitions_of([batch.routing_key]),
                self._access.policy,
                target.keyspace_id,
                durability=durability,
            )
            await self.run(operation, timeout_ms)
            if operation.error is not None:
                raise operation.error
        assert operation.result is not None, "it has ended"
        return operation.result

    def put_chunks(
        self,
        target: Target,
        items: Mapping[bytes, BytesLike] | Iterable[Row],
    ) -> Iterator[Chunk]:
        """Divide the input of ``put_many`` into chunks. From any thread."""
        return put_chunks(
            items,
            rows_max=self.chunk_rows(),
            bytes_max=self._access.options.batch_bytes,
            max_value_bytes=target.settings(self._access.routing()).max_value_bytes,
        )

    def delete_chunks(self, keys: Iterable[BytesLike]) -> Iterator[Chunk]:
        """Divide the input of ``delete_many`` into chunks. From any thread."""
        return delete_chunks(keys, rows_max=self.chunk_rows())


async def all_of(work: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Run all coroutines; if one raises, cancel the others and raise its exception itself (no
    group).
    """
    tasks = [asyncio.ensure_future(w) for w in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
