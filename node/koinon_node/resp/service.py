"""Executes the reads and writes of RESP commands on the partitions that this node leads.

A read is answered at once where the engine can (``read_now``). The writes of several connections in
one turn of the event loop go to the engine as one batch: fifty clients with one write each cost
little more than one client with fifty writes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from time import monotonic
from typing import Any, NamedTuple, Protocol

import numpy as np

from koinon_node.bulk_load.emptier import Emptier
from koinon_node.core.formats import records
from koinon_node.core.formats.records import U32Array
from koinon_node.core.writes.atomic_batch import Step
from koinon_node.core.writes.updates import Result
from koinon_node.partition.batches import (
    AtomicBatch,
    LonePut,
    ReadAnswer,
    ScanAnswer,
    ScanPage,
    WriteAnswer,
    WriteBatch,
)
from koinon_node.partition.engine import Engine
from koinon_node.partition.graceful_drain import GracefulDrain
from koinon_node.partition.row_metrics import RowCounts
from koinon_node.ports import TakesFollowers
from koinon_node.resp.hand_over_waits import HandOverWaits
from koinon_node.resp.outcomes import Arguments, Encoded, Read, Write, Written
from koinon_node.resp.scripts.script_cache import Scripts
from koinon_node.resp.served_keyspace import ServedKeyspace
from koinon_node.resp.slow_log import SlowLog
from koinon_node.storage.sizes import SizeEstimates
from koinon_proto.contract.errors import InternalError, KoinonError, UnknownFateError
from koinon_proto.contract.keyspaces import KeyspaceId
from koinon_proto.contract.table import Table

log = logging.getLogger(__name__)

_BATCH_ROWS = 4_096
RUN_BYTES = 4 * 1024 * 1024
"""The most bytes of a batch, by ``weigh``; a single write may exceed it."""
Answer = bytes | KoinonError
"""The answer to a command: its reply, or an error that is formatted for the command's client."""
Done = Callable[[list[Answer]], None]


class _Queued(NamedTuple):
    """A connection's queued writes, all of one durability."""

    served: ServedKeyspace
    writes: Sequence[Write]
    done: Done


@dataclass
class Listened:
    """Counts of connections: open now, accepted since the start, and rejected."""

    connected: int = 0
    received: int = 0
    rejected: int = 0


class PassesOn(Protocol):
    """Sends commands to the nodes that serve their keys (``passing``)."""

    def concerns(self, spec: Any, answer: Answer) -> bool:
        """Return whether the command had no effect because another node serves its key."""

    async def answers(
        self, session: Any, commands: Sequence[tuple[Any, Arguments]]
    ) -> list[Answer]:
        """Pass the commands on; return their answers in the same order."""

    async def transaction(self, session: Any, key: bytes, queued: Sequence[Arguments]) -> bytes:
        """Pass a transaction on; return the reply of EXEC. Raises KoinonError."""

    def close(self) -> None:
        """Close all connections to other nodes."""


class RedisService:
    """Executes commands, joined over connections. Belongs to the event loop."""

    def __init__(
        self,
        engine: Engine,
        emptier: Emptier,
        counts: RowCounts,
        drain: GracefulDrain,
        followers: TakesFollowers,
        sizes: SizeEstimates,
    ) -> None:
        self.drain = drain
        self.followers = followers
        self.emptier = emptier
        self._engine = engine
        self._state = state = engine.context.state
        self.counts = counts
        self.slow_log = SlowLog()
        self._sizes = sizes
        self._began = monotonic()
        self._waits = HandOverWaits(state)
        self.scripts = Scripts()
        self._queue: list[_Queued] = []
        self.listening = Listened()  # the listener shares its own object here
        self.passing: PassesOn | None = None  # set once, before the first connection
        self._served: dict[int, ServedKeyspace] = {}  # by id; of the present or a recent table
        self._tasks: set[asyncio.Task[None]] = set()  # asyncio keeps only weak references
        self._puts: set[Done] = set()  # the callbacks of single puts under way

    @property
    def node_id(self) -> str:
        return self._state.node_id

    def table(self) -> Table:
        """Return the newest table.

        Raises:
            ClusterNotReadyError: this node has no table yet.
        """
        return self._state.table()

    def served(self, keyspace_id: KeyspaceId) -> ServedKeyspace:
        """Return the keyspace with this id, which this node need not know."""
        found = self._served.get(keyspace_id)
        if found is None:
            found = ServedKeyspace(self._state, keyspace_id)
            known = self.table().keyspaces
            if known.by_id(keyspace_id) is not None:  # a client may name any id
                kept = {i: one for i, one in self._served.items() if known.by_id(i) is not None}
                self._served = {**kept, keyspace_id: found}
        return found

    def now_ms(self) -> int:
        """Return the Unix time by which records expire on this node."""
        return self._engine.context.clock.now_ms()

    def clock_ms(self) -> int:
        """Return the time in ms with which ``take_by_ms`` is compared."""
        return self._state.clock_ms()

    def check_in_time(self, take_by_ms: int) -> None:
        """Raise DeadlinePassedError if ``clock_ms`` is past ``take_by_ms``; 0: no deadline."""
        self._state.check_in_time(take_by_ms)

    def uptime_s(self) -> int:
        """Return the seconds since this node began to serve Redis clients."""
        return int(monotonic() - self._began)

    def records_in(self, partition_ids: Sequence[int]) -> int:
        """Return the estimated number of records in these partitions."""
        return int(self._sizes.of_many(np.array(partition_ids, np.uint32))[0].sum())

    async def scan(self, page: ScanPage) -> ScanAnswer:
        """Return a page of records. The page is not ``counted``: the command counts the keys that
        it returns.

        Raises:
            KoinonError: no partition can be read, or the first refusal of a partition.
        """
        return await self._waits.result(page.partition_ids[0], lambda: self._whole(page))

    async def _whole(self, page: ScanPage) -> ScanAnswer:
        answer = await self.page(page)
        for error in answer.refusals.values():
            raise error
        return answer

    async def page(self, page: ScanPage) -> ScanAnswer:
        """Return a page of records, with the errors of refused partitions.

        Raises:
            KoinonError: nothing can be read.
        """
        answer = await self._engine.scans.scan(page)
        self.counts.scanned(answer)
        return answer

    async def rows(
        self,
        keys: Sequence[bytes],
        partition_ids: U32Array,
        table_version: int,
        *,
        want_versions: bool,
    ) -> ReadAnswer:
        """Return the rows, with the errors of refused partitions.

        Raises:
            KoinonError: nothing can be read.
        """
        reading = self._engine.reads.read(
            keys, partition_ids, table_version, want_versions=want_versions
        )
        return await self.counts.of_read(partition_ids, reading)

    # --- reads -----------------------------------------------------------------------------

    def read_now(self, served: ServedKeyspace, keys: Sequence[bytes]) -> list[Encoded] | None:
        """Return the records of the keys, or None if a key is refused or has to wait; then the
        caller uses ``read``.
        """
        try:
            partitioner = served.partitioner()
        except KoinonError:
            return None
        if len(keys) == 1:
            partition_ids = [partitioner.partition_of(keys[0])]
        else:
            partition_ids = partitioner.partitions_of(keys).tolist()
        found = self._engine.reads.read_now(keys, partition_ids)
        if found is not None:
            self.counts.read_rows(found)
        return found

    async def read(self, served: ServedKeyspace, reads: Sequence[Read]) -> list[Answer]:
        """Return the reply or error of each read. All wait for the slowest, and for partitions that
        change their primary.
        """
        answers = await self._read(served, reads)
        return await self._waits.answered(served, reads, answers, self._read)

    async def _read(self, served: ServedKeyspace, reads: Sequence[Read]) -> list[Answer]:
        keys = [key for read in reads for key in read.keys]
        version = max(read.table_version for read in reads)
        try:
            partitioner = served.partitioner(version)
        except KoinonError as error:
            self.counts.read_failed(len(keys), error)
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
        """Set and return the weight of the write in a batch: the bytes of the command, and of the
        records that its updates read.
        """
        if _is_single_put((write,)):
            write.weight = len(write.rows[0].value)
            return write.weight
        write.weight = sum(row.size for row in write.rows)
        updated = [row.key for row in write.rows if row.update is not None]
        if updated:
            with contextlib.suppress(KoinonError):  # the execution will raise it again
                partition_of = served.partitioner().partition_of
                ids = [partition_of(key) for key in updated]
                write.weight += sum(self._engine.writes.lengths_now(updated, ids))
        return write.weight

    def write(
        self,
        served: ServedKeyspace,
        writes: Sequence[Write],
        done: Done,
    ) -> None:
        """Queue the writes, all of one durability. ``done`` gets the reply or error of each."""
        if not self._queue:
            asyncio.get_running_loop().call_soon(self._flush)
        self._queue.append(_Queued(served, writes, done))

    def _flush(self) -> None:
        queue, self._queue = self._queue, []
        if len(queue) == 1 and _is_single_put(queue[0].writes):
            self._put(queue[0])
            return
        for batch in _batches(queue):
            self._start_task(self._write_batch(batch))

    def _put(self, queued: _Queued) -> None:
        """Put one row of one connection without a task."""
        served, (write,), done = queued
        (row,) = write.rows

        def ended(result: int | KoinonError) -> None:
            if done not in self._puts:  # ``close`` has answered it
                return
            self._puts.discard(done)
            if isinstance(result, KoinonError):
                self.counts.put_failed(result)
                if self._waits.holds(served, write, result):
                    self._start_task(self._answer_held(queued, [result]))
                else:
                    done([result])
                return
            self.counts.put(len(row.value))
            done([write.reply((Written(result),))])

        self._puts.add(done)
        try:
            put = LonePut(
                row.key,
                row.value,
                served.partitioner(write.table_version).partition_of(row.key),
                row.ttl_ms,
                write.table_version,
                write.durability,
            )
            self._engine.writes.begin_put(put, ended)
        except KoinonError as error:
            ended(error)
        except Exception as error:
            log.exception("a put failed")
            ended(InternalError(reason=str(error)))

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _write_batch(self, batch: list[_Queued]) -> None:
        """Write the rows of several connections in one keyspace, and answer each connection."""
        writes = [write for queued in batch for write in queued.writes]
        answers = iter(await self._write_or_errors(batch[0].served, writes))
        for queued in batch:
            own = list(islice(answers, len(queued.writes)))
            pairs = zip(queued.writes, own, strict=True)
            if any(self._waits.holds(queued.served, *pair) for pair in pairs):
                self._start_task(self._answer_held(queued, own))
            else:
                queued.done(own)

    async def _answer_held(self, queued: _Queued, answers: list[Answer]) -> None:
        """Answer a connection once the partitions of its held writes have settled."""
        with contextlib.suppress(asyncio.CancelledError):  # the node stops: no write took effect
            answers = await self._waits.answered(
                queued.served, queued.writes, answers, self._write_or_errors
            )
        queued.done(answers)

    async def _write_or_errors(
        self, served: ServedKeyspace, writes: Sequence[Write]
    ) -> list[Answer]:
        try:
            return await self._write(served, writes)
        except KoinonError as error:
            return [error] * len(writes)
        except asyncio.CancelledError:
            return [_stopping()] * len(writes)
        except Exception as error:
            log.exception("a batch of commands failed rows=%d", len(writes))
            return [InternalError(reason=str(error))] * len(writes)

    async def _write(self, served: ServedKeyspace, writes: Sequence[Write]) -> list[Answer]:
        table_version = max(write.table_version for write in writes)
        partitioner = served.partitioner(table_version)
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
        answer = await self.counts.of_write(batch, self._engine.writes.write(batch))
        results = _written(answer, batch.partition_ids.tolist())
        return [_write_answer(write, [next(results) for _ in write.rows]) for write in writes]

    async def commit(
        self, served: ServedKeyspace, keys: Sequence[bytes], steps: Sequence[Step]
    ) -> Sequence[Result]:
        """Execute an atomic batch. A step that fails on its record has its error as its result, and
        the other steps take effect.

        Raises:
            CheckFailedError: a check does not hold; nothing was written.
            UnknownFateError: the batch may have been written.
            KoinonError: nothing was written.
        """
        partition_id = served.partitioner().partition_of(keys[0])
        batch = AtomicBatch(
            table_version=0, partition_id=partition_id, keys=keys, steps=steps, goes_on=True
        )
        return await self._waits.result(partition_id, lambda: self._commit(batch))

    async def _commit(self, batch: AtomicBatch) -> Sequence[Result]:
        try:
            answer = await self._engine.writes.commit(batch)
        except BaseException as error:
            self.counts.batch_failed(batch, error)
            raise
        self.counts.batch_committed(batch, answer)
        return answer.results

    async def close(self) -> None:
        """End the writes under way with UnknownFateError."""
        self._waits.close()
        if self.passing is not None:
            self.passing.close()
        puts, self._puts = self._puts, set()
        for done in puts:
            done([_stopping()])
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _is_single_put(writes: Sequence[Write]) -> bool:
    return len(writes) == 1 and len(rows := writes[0].rows) == 1 and rows[0].is_put


def _stopping() -> UnknownFateError:
    return UnknownFateError(reason="the node is stopping")


def _batches(queue: list[_Queued]) -> Iterator[list[_Queued]]:
    """Split the writes queued in one turn into batches of one keyspace, one durability and bounded
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
    """Yield for each row its encoded record, None if there is none, or its error."""
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
                return UnknownFateError(reason=f"some rows were written, others failed: {result}")
            return result
    return write.reply([result for result in results if isinstance(result, Written)])
