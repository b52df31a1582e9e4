"""Operations over many rows of one call: cut by owner, sent side by side, sent again till settled.

Which rows go where, and what a reply means for each, is decided in ``koinon.core.operations``. All
methods run on the engine's loop, unless they say otherwise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from koinon.core import limits
from koinon.core.atomic import CommitOperation, Operations
from koinon.core.exchange import Command, PendingMessage
from koinon.core.operations import (
    Call,
    ReadReply,
    ReadRows,
    RowsOperation,
    WriteRows,
    attempt_timeout_s,
)
from koinon.core.row_chunks import Chunk, delete_chunks, put_chunks
from koinon.core.target import Target
from koinon.driver import request_ids
from koinon.driver.messages import commit_request, read_request, write_request
from koinon.driver.node_link import read_reply
from koinon.driver.resp.messages import reply_of
from koinon.types import BatchResult, BytesLike, Durability, Row
from koinon_proto.contract.errors import KoinonError, NotSentError
from koinon_proto.contract.table import MAX_BATCH_ROWS
from koinon_proto.v1 import kv_pb2

if TYPE_CHECKING:
    from koinon.driver.engine import Engine


class RowOperations:
    """Reads, writes and atomic batches of many rows over one engine. It keeps no state."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def run(self, operation: RowsOperation[Any], timeout_ms: int) -> None:
        """Carry out an operation until every row is settled. Raises nothing of its own."""
        deadline = self._engine.now() + timeout_ms / 1000
        calls = operation.route(self._engine.routing())
        await self._run_calls(operation, calls, deadline, timeout_ms)

    async def _run_calls(
        self, operation: RowsOperation[Any], calls: list[Call], deadline: float, timeout_ms: int
    ) -> None:
        while True:
            if len(calls) != 1:
                await all_of([self._run_calls(operation, [c], deadline, timeout_ms) for c in calls])
                return
            outcome = await self._attempt(operation, calls[0], deadline)
            leftover = operation.settle(calls[0], outcome, self._engine.router)
            self._engine.wake_on_news(calls[0].revision)
            if leftover is None:
                return
            again, revision = leftover.again, leftover.revision
            partition_ids = operation.partition_ids[leftover.rows]
            if not await self._engine.wait_for_news(again, revision, deadline, partition_ids):
                operation.fail(leftover.rows, leftover.error, timed_out_ms=timeout_ms)
                return
            changed = self._engine.routing().changed_since(partition_ids, revision)
            attempt = 0 if changed else leftover.attempt
            calls = operation.route(self._engine.routing(), leftover.rows, attempt)

    async def _attempt(self, operation: RowsOperation[Any], call: Call, deadline: float) -> Any:
        """Send one call; return the reply or the error."""
        if not call.address:
            return self._engine.routing().offline(int(call.partition_ids[0]))
        if isinstance(operation, ReadRows):
            outcome = await self._ask_by_resp(operation, call, deadline)
            if outcome is not None:
                return outcome
        link = self._engine.link(call.address)
        if not link.ready():
            try:
                async with asyncio.timeout_at(deadline):
                    connected = await link.connect_soon()
            except TimeoutError:
                connected = False
            if not connected:
                return link.not_sent()
        left_s = deadline - self._engine.now()
        if left_s <= 0:
            return NotSentError(reason="the deadline passed before the request was sent")
        timeout_s = attempt_timeout_s(left_s, write=operation.write)
        self._engine.watch_answers()
        cluster_id = self._engine.cluster_id
        if isinstance(operation, WriteRows):
            return await link.write(write_request(operation, call, cluster_id), timeout_s)
        if isinstance(operation, CommitOperation):
            return await link.commit(commit_request(operation, call, cluster_id), timeout_s)
        assert isinstance(operation, ReadRows)
        return await link.read(read_request(operation, call, cluster_id), timeout_s)

    async def _ask_by_resp(
        self, operation: ReadRows, call: Call, deadline: float
    ) -> ReadReply | KoinonError | None:
        """Return what the node answers by RESP; None: it was not asked so."""
        engine, left_s = self._engine, deadline - self._engine.now()
        routing = engine.routing()
        link = engine.singles.resp_link(call.address, operation.keyspace_id, routing)
        if link is None or left_s <= 0:
            return None
        message = PendingMessage(
            command=Command.GET_MANY,
            deadline=deadline,
            timeout_ms=round(left_s * 1000),
            value=read_request(operation, call, engine.cluster_id).SerializeToString(),
            request=request_ids.given(),
        )
        await link.ask(message, attempt_timeout_s(left_s, write=False))
        reply = reply_of(message, kv_pb2.BatchGetResponse, call.address)
        return read_reply(reply) if isinstance(reply, kv_pb2.BatchGetResponse) else reply

    def chunk_rows(self) -> int:
        """Return how many rows of a ``*_many`` call make a full batch for every node."""
        owners = max(1, len(self._engine.routing().addresses) - 1)
        return min(MAX_BATCH_ROWS, self._engine.options.batch_rows * owners)

    async def read(
        self,
        target: Target,
        keys: Sequence[BytesLike],
        *,
        want_entries: bool,
        timeout_ms: int | None,
    ) -> list[Any]:
        """Return the values (or entries) of the keys, in their order."""
        target.settings(self._engine.routing())
        timeout_ms = self._engine.timeout_ms(timeout_ms)
        keys = limits.check_keys(keys)
        rows = self.chunk_rows()
        parts = (
            [keys] if len(keys) <= rows else [keys[a : a + rows] for a in range(0, len(keys), rows)]
        )
        window = asyncio.Semaphore(self._engine.options.batches_in_flight)

        async def read_part(part: Sequence[bytes]) -> list[Any]:
            async with window:
                operation = ReadRows(
                    part,
                    target.partitioner.partitions_of(part),
                    want_entries=want_entries,
                    policy=self._engine.policy,
                    random=self._engine.random,
                    keyspace_id=target.keyspace_id,
                )
                if part:
                    await self.run(operation, timeout_ms)
                if operation.error is not None:
                    raise operation.error
                return operation.results

        name = "get_entries" if want_entries else "get_many"
        with self._engine.observing.operation(name, len(keys)), request_ids.operation():
            if len(parts) == 1:
                return await read_part(parts[0])
            return [
                value
                for values in await all_of([read_part(part) for part in parts])
                for value in values
            ]

    def make_batch(self, target: Target, routing_key: BytesLike) -> Operations:
        """Return an atomic batch without operations. From any thread."""
        limit = target.settings(self._engine.routing()).max_value_bytes
        return Operations(routing_key, target.partitioner, limit)

    async def commit(
        self, target: Target, batch: Operations, *, durability: Durability, timeout_ms: int | None
    ) -> BatchResult:
        """Commit an atomic batch."""
        rows = len(batch.operations)
        with self._engine.observing.operation("batch", rows), request_ids.operation():
            timeout_ms = self._engine.timeout_ms(timeout_ms)
            limits.check_durability(durability)
            operation = CommitOperation(
                batch,
                target.partitioner.partitions_of([batch.routing_key]),
                durability=durability,
                policy=self._engine.policy,
                random=self._engine.random,
                keyspace_id=target.keyspace_id,
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
        """Cut the input of ``put_many``. From any thread."""
        return put_chunks(
            items,
            rows_max=self.chunk_rows(),
            bytes_max=self._engine.options.batch_bytes,
            max_value_bytes=target.settings(self._engine.routing()).max_value_bytes,
        )

    def delete_chunks(self, keys: Iterable[BytesLike]) -> Iterator[Chunk]:
        """Cut the input of ``delete_many``. From any thread."""
        return delete_chunks(keys, rows_max=self.chunk_rows())


async def all_of(work: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Run all; if one raises, cancel the others and raise it plain."""
    tasks = [asyncio.ensure_future(w) for w in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
