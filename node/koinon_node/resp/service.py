"""Carries out what commands ask for: reads and writes of the partitions that this node leads.

A read is answered on the spot where the engine can (``read_now``). What several
connections write in one turn of the event loop goes to the engine as one batch: fifty clients with
a write each cost little more than one with fifty.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from koinon_node.core import records
from koinon_node.core.atomic_batch import Step
from koinon_node.core.records import U32Array
from koinon_node.core.updates import Result
from koinon_node.ports import TakesFollowers
from koinon_node.resp.commands.table import Encoded, Read, Write, Written
from koinon_node.resp.served_keyspace import ServedKeyspace
from koinon_node.serving.batches import (
    AtomicBatch,
    ReadAnswer,
    ScanAnswer,
    ScanPage,
    WriteAnswer,
    WriteBatch,
)
from koinon_node.serving.engine import Engine
from koinon_node.serving.graceful_drain import GracefulDrain
from koinon_node.serving.row_metrics import RowCounts
from koinon_node.state import NodeState
from koinon_proto.contract.errors import InternalError, KoinonError, UnknownFateError
from koinon_proto.contract.keyspaces import KeyspaceId
from koinon_proto.contract.table import Table

log = logging.getLogger(__name__)

_BATCH_ROWS = 4_096
RUN_BYTES = 4 * 1024 * 1024
"""Of a batch, by ``weigh``; one write alone may have more."""
Answer = bytes | KoinonError
"""The answer to a command: its reply, or the error to be told in its dialect."""


class _Queued(NamedTuple):
    """The writes of a connection, all of one durability."""

    served: ServedKeyspace
    writes: Sequence[Write]
    done: Callable[[list[Answer]], None]


class RedisService:
    """Carries out what commands ask for, joined over connections. For the event loop only."""

    def __init__(
        self,
        engine: Engine,
        state: NodeState,
        counts: RowCounts,
        drain: GracefulDrain,
        followers: TakesFollowers,
    ) -> None:
        self.drain = drain
        self.followers = followers
        self._engine = engine
        self._state = state
        self._counts = counts
        self._queue: list[_Queued] = []
        self.connected: Callable[[], int] = lambda: 0  # how many connections there are
        self._served: dict[int, ServedKeyspace] = {}  # of this table's or a recent one's
        self._tasks: set[asyncio.Task[None]] = set()  # asyncio itself holds tasks weakly

    @property
    def node_id(self) -> str:
        return self._state.node_id

    def table(self) -> Table:
        """Return the table that is served from.

        Raises:
            ClusterNotReadyError: there is none yet.
        """
        return self._state.table()

    def served(self, keyspace_id: KeyspaceId) -> ServedKeyspace:
        """Return the keyspace with this id, which need not be known here (any more)."""
        found = self._served.get(keyspace_id)
        if found is None:
            found = ServedKeyspace(self._state, keyspace_id)
            known = self.table().keyspaces
            if known.by_id(keyspace_id) is not None:  # a client may name any id
                kept = {i: one for i, one in self._served.items() if known.by_id(i) is not None}
                self._served = {**kept, keyspace_id: found}
        return found

    def now_ms(self) -> int:
        """Return the Unix time by which records expire here."""
        return self._engine.now_ms()

    async def scan(self, page: ScanPage) -> ScanAnswer:
        """Return a page of records. It is not ``counted``: a command counts what it shows of it.

        Raises:
            KoinonError: nothing can be read; the first refusal of a partition, if one is refused.
        """
        answer = await self.page(page)
        for error in answer.refusals.values():
            raise error
        return answer

    async def page(self, page: ScanPage) -> ScanAnswer:
        """Return a page of records, with the partitions that are refused.

        Raises:
            KoinonError: nothing can be read.
        """
        answer = await self._engine.scan(page)
        self._counts.scanned(answer)
        return answer

    async def rows(
        self,
        keys: Sequence[bytes],
        partition_ids: U32Array,
        table_version: int,
        *,
        want_versions: bool,
    ) -> ReadAnswer:
        """Return the rows, with the partitions that are refused.

        Raises:
            KoinonError: nothing can be read.
        """
        reading = self._engine.read(keys, partition_ids, table_version, want_versions=want_versions)
        return await self._counts.of_read(partition_ids, reading)

    # --- reads -----------------------------------------------------------------------------

    def read_now(self, served: ServedKeyspace, keys: Sequence[bytes]) -> list[Encoded] | None:
        """Return the records of the keys, or None where one has to be waited for (or is refused):
        ``read`` does.
        """
        try:
            partitioner = served.partitioner()
        except KoinonError:
            return None
        if len(keys) == 1:
            partition_ids = [partitioner.partition_of(keys[0])]
        else:
            partition_ids = partitioner.partitions_of(keys).tolist()
        found = self._engine.read_now(keys, partition_ids)
        if found is not None:
            self._counts.read_rows(found)
        return found

    async def read(self, served: ServedKeyspace, reads: Sequence[Read]) -> list[Answer]:
        """Return what each read comes to; all wait for the slowest."""
        keys = [key for read in reads for key in read.keys]
        version = max(read.table_version for read in reads)
        try:
            partitioner = served.partitioner(version)
        except KoinonError as error:
            self._counts.read_failed(len(keys), error)
            return [error] * len(reads)
        partition_ids = partitioner.partitions_of(keys)
        try:
            answer = await self.rows(keys, partition_ids, version, want_versions=True)
        except KoinonError as error:
            return [error] * len(reads)
        found = _found(answer, partition_ids.tolist())
        return [_read_answer(read, [next(found) for _ in read.keys]) for read in reads]

    # --- writes ----------------------------------------------------------------------------

    def weigh(self, served: ServedKeyspace, write: Write) -> int:
        """Note, and return, what the write counts as in a batch: the bytes that it brings, and
        those of the records that its updates look at.
        """
        write.weight = sum(row.size for row in write.rows)
        updated = [row.key for row in write.rows if row.update is not None]
        if updated:
            with contextlib.suppress(KoinonError):  # it is refused as soon as it is carried out
                partition_of = served.partitioner().partition_of
                ids = [partition_of(key) for key in updated]
                write.weight += sum(self._engine.lengths_now(updated, ids))
        return write.weight

    def write(
        self,
        served: ServedKeyspace,
        writes: Sequence[Write],
        done: Callable[[list[Answer]], None],
    ) -> None:
        """Write; ``done`` is called with what each comes to. All have the same durability."""
        if not self._queue:
            asyncio.get_running_loop().call_soon(self._flush)
        self._queue.append(_Queued(served, writes, done))

    def _flush(self) -> None:
        queue, self._queue = self._queue, []
        for batch in _batches(queue):
            task = asyncio.create_task(self._carry_out(batch))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _carry_out(self, batch: list[_Queued]) -> None:
        """Write what several connections have to write in one keyspace, and tell each."""
        writes = [write for queued in batch for write in queued.writes]
        try:
            answers = await self._write(batch[0].served, writes)
        except KoinonError as error:
            answers = [error] * len(writes)
        except asyncio.CancelledError:
            answers = [UnknownFateError(reason="the node is stopping")] * len(writes)
        except Exception as error:
            log.exception("a batch of commands failed rows=%d", len(writes))
            answers = [InternalError(reason=str(error))] * len(writes)
        start = 0
        for queued in batch:
            end = start + len(queued.writes)
            queued.done(answers[start:end])
            start = end

    async def _write(self, served: ServedKeyspace, writes: list[Write]) -> list[Answer]:
        table_version = max(write.table_version for write in writes)
        partitioner = served.partitioner(table_version)
        if len(writes) == 1 and len(writes[0].rows) == 1 and writes[0].rows[0].is_put:
            key = writes[0].rows[0].key
            return [await self._put(writes[0], partitioner.partition_of(key))]
        rows = [row for write in writes for row in write.rows]
        keys = [row.key for row in rows]
        batch = WriteBatch(
            table_version=table_version,
            keys=keys,
            values=[row.value for row in rows],
            partition_ids=partitioner.partitions_of(keys),
            deletes=frozenset(at for at, row in enumerate(rows) if row.is_delete),
            ttl_ms=[row.ttl_ms for row in rows] if any(row.ttl_ms for row in rows) else None,
            conditions={at: v for at, row in enumerate(rows) if (v := row.if_version) is not None},
            updates={at: u for at, row in enumerate(rows) if (u := row.update) is not None},
            durability=writes[0].durability,
        )
        answer = await self._counts.of_write(batch, self._engine.write(batch))
        results = _written(answer, batch.partition_ids.tolist())
        return [_write_answer(write, [next(results) for _ in write.rows]) for write in writes]

    async def commit(
        self, served: ServedKeyspace, keys: Sequence[bytes], steps: Sequence[Step]
    ) -> Sequence[Result]:
        """Carry out an atomic batch; a step that its record does not allow has its error as its
        result, and the others take place.

        Raises:
            CheckFailedError: a check does not hold; nothing was written.
            KoinonError: nothing was written, or it is of unknown fate.
        """
        batch = AtomicBatch(
            table_version=0,
            partition_id=served.partitioner().partition_of(keys[0]),
            keys=keys,
            steps=steps,
            goes_on=True,
        )
        try:
            answer = await self._engine.commit(batch)
        except BaseException as error:
            self._counts.batch_failed(batch, error)
            raise
        self._counts.batch_committed(batch, answer)
        return answer.results

    async def _put(self, write: Write, partition_id: int) -> bytes:
        row = write.rows[0]
        try:
            version = await self._engine.put(
                row.key,
                row.value,
                partition_id,
                ttl_ms=row.ttl_ms,
                table_version=write.table_version,
                durability=write.durability,
            )
        except BaseException as error:
            self._counts.put_failed(error)
            raise
        self._counts.put(len(row.value))
        return write.reply((Written(version),))

    async def close(self) -> None:
        """End what is under way; its fate is unknown."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _batches(queue: list[_Queued]) -> Iterator[list[_Queued]]:
    """Cut what was queued in one turn into batches of one keyspace, one durability and of bounded
    size.
    """
    alike: dict[tuple[int, int], list[_Queued]] = {}
    for entry in queue:
        kind = entry.served.keyspace_id, entry.writes[0].durability
        alike.setdefault(kind, []).append(entry)
    for entries in alike.values():
        batch: list[_Queued] = []
        rows = size = 0
        for entry in entries:
            added = sum(len(write.rows) for write in entry.writes)
            more = sum(write.weight for write in entry.writes)
            if batch and (rows + added > _BATCH_ROWS or size + more > RUN_BYTES):
                yield batch
                batch, rows, size = [], 0, 0
            batch.append(entry)
            rows, size = rows + added, size + more
        yield batch


def _found(answer: ReadAnswer, partition_ids: list[int]) -> Iterator[Encoded | KoinonError]:
    """Yield the record of each row, encoded; None where there is none; why it was refused."""
    missing = set(answer.missing)
    for row, partition_id in enumerate(partition_ids):
        if (refusal := answer.refusals.get(partition_id)) is not None:
            yield refusal
        elif row in missing:
            yield None
        else:
            yield records.encode_record(
                answer.versions[row], answer.values[row], answer.expires_at_ms[row]
            )


def _read_answer(read: Read, found: list[Encoded | KoinonError]) -> Answer:
    for record in found:
        if isinstance(record, KoinonError):
            return record
    return read.reply([record for record in found if not isinstance(record, KoinonError)])


def _written(answer: WriteAnswer, partition_ids: list[int]) -> Iterator[Written | KoinonError]:
    for row, partition_id in enumerate(partition_ids):
        error = answer.refusals.get(partition_id) or answer.row_errors.get(row)
        yield error or Written(int(answer.versions[row]), answer.results.get(row))


def _write_answer(write: Write, results: list[Written | KoinonError]) -> Answer:
    for result in results:
        if isinstance(result, KoinonError):
            if any(isinstance(other, Written) and other.version for other in results):
                return UnknownFateError(reason=f"a part of its rows was written, others: {result}")
            return result
    return write.reply([result for result in results if isinstance(result, Written)])
