"""Operations over many rows: routes the rows, records the outcome of each, and retries some.

A driver takes calls from ``route``, sends each, and hands the outcome to ``settle``, which stores
the results and returns the rows to route again, if any. Rows settle one call at a time, so a slow
or dead node delays no other node's rows. Everything is columns; a row costs no object of its own
unless it fails.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from koinon.core import limits
from koinon.core.retry import AT_ONCE, RetryAfter, RetryPolicy, final_error
from koinon.core.routing import Router, Routing
from koinon.core.row_chunks import Chunk
from koinon.types import Durability, Entry
from koinon_proto.contract.errors import (
    KoinonError,
    PermissionDeniedError,
    QuotaExceededError,
    ReplyTooLargeError,
    UnknownFateError,
)

if TYPE_CHECKING:
    from koinon.core.routing import PartitionIds, Rows

    Failed = list[tuple[Rows, KoinonError]]
    """Rows, each group with the error of its last attempt."""
Item = TypeVar("Item")
Reply = TypeVar("Reply")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadReply:
    """``BatchGetResponse`` with its errors as classes. ``refused`` is by partition."""

    values: Sequence[bytes]
    missing: Sequence[int]
    versions: Sequence[int]
    expires_at_ms: Sequence[int]
    refused: dict[int, KoinonError]


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteReply:
    """``BatchWriteResponse`` with its errors as classes."""

    versions: Sequence[int]
    absent: Sequence[int]
    present: Sequence[int]
    refused: dict[int, KoinonError]
    row_errors: dict[int, KoinonError]


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateReply:
    """``BatchUpdateResponse`` with its errors as classes."""

    results: Sequence[Any]
    """The results, one for each key, in the form that callers get: an int, a bool or bytes."""
    refused: dict[int, KoinonError]
    row_errors: dict[int, KoinonError]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Call:
    """One request to one node: some rows of an operation, as columns."""

    address: str
    """The owner's address; '' if the rows' partitions have no owner: nothing is sent, and the rows
    count as refused.
    """
    rows: Rows
    """Row numbers within the operation."""
    keys: Sequence[bytes]
    values: Sequence[bytes] | None
    partition_ids: PartitionIds
    attempt: int
    revision: int
    table_version: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Leftover:
    """Rows of a settled call that need another route."""

    rows: Rows
    again: RetryAfter
    attempt: int
    revision: int
    """The revision of the routing under which they were refused."""
    error: KoinonError
    """The last error; the rows fail with it if there is no further attempt."""


class RowsOperation(ABC, Generic[Reply]):
    """The common part of operations on many rows: routing, refusals, retries."""

    idempotent: bool
    write: bool

    def __init__(
        self,
        keys: Sequence[bytes],
        partition_ids: PartitionIds,
        policy: RetryPolicy,
        keyspace_id: int = 0,
    ) -> None:
        self.keys = keys
        self.partition_ids = partition_ids
        self.keyspace_id = keyspace_id
        self.rows_max = len(keys)  # rows of a call; fewer after a reply that was too large
        self._policy = policy

    def route(self, routing: Routing, rows: Rows | None = None, attempt: int = 0) -> list[Call]:
        """Return the calls that carry ``rows`` (None: all) to their owners; rows keep their
        order.
        """
        ids = self.partition_ids if rows is None else self.partition_ids[rows]
        calls: list[Call] = []
        for address, inside in routing.group(ids):
            if rows is not None:
                inside = rows if inside is None else rows[inside]
            calls += self._calls(routing, address, inside, attempt)
        return calls

    def _calls(
        self, routing: Routing, address: str, rows: Rows | None, attempt: int
    ) -> Iterable[Call]:
        import numpy as np

        if rows is None and len(self.keys) <= self.rows_max:
            parts: list[tuple[Rows, Sequence[bytes], Sequence[bytes] | None]]
            parts = [(np.arange(len(self.keys)), self.keys, self._values(None))]
        else:
            every = np.arange(len(self.keys)) if rows is None else rows
            chunks = (every[a : a + self.rows_max] for a in range(0, len(every), self.rows_max))
            parts = [(c, pick(self.keys, c), self._values(c)) for c in chunks]
        for chosen, keys, values in parts:
            yield Call(
                address=address,
                rows=chosen,
                keys=keys,
                values=values,
                partition_ids=self.partition_ids[chosen],
                attempt=attempt,
                revision=routing.revision,
                table_version=routing.table.table_version,
            )

    def _values(self, rows: Rows | None) -> Sequence[bytes] | None:
        return None

    def settle(self, call: Call, outcome: Reply | KoinonError, router: Router) -> Leftover | None:
        """Store the outcome of ``call``; return the rows to retry."""
        if not isinstance(outcome, KoinonError):
            failed = self._store(call, outcome)
        elif not self.write and len(call.rows) > 1 and isinstance(outcome, ReplyTooLargeError):
            self.rows_max = max(1, len(call.rows) // 2)
            return self._leftover(call, call.rows, AT_ONCE, outcome)
        else:
            failed = [(call.rows, outcome)]
            # the size that the error names is of the request's rows
            if isinstance(outcome, PermissionDeniedError):
                outcome.rows = tuple(call.rows[list(outcome.rows)].tolist())
        if not failed:
            return None
        router.learn(error for _, error in failed)
        return self._settle_failed(call, failed)

    def _settle_failed(self, call: Call, failed: Failed) -> Leftover | None:
        """Fail the rows whose error is final; return the others."""
        import numpy as np

        retried: list[Rows] = []
        delay_s, refresh, not_before_s, last = 0.0, False, 0.0, None
        for rows, error in failed:
            if isinstance(error, UnknownFateError):
                self._note_unknown(rows)
            again = self._policy.decide(error, attempt=call.attempt, idempotent=self.idempotent)
            if again is None:
                self.fail(rows, error)
            elif len(rows):
                retried.append(rows)
                delay_s, refresh = max(delay_s, again.delay_s), refresh or again.refresh
                not_before_s = max(not_before_s, again.not_before_s)
                last = error
        if last is None:
            return None
        rows = np.sort(np.concatenate(retried))
        return self._leftover(call, rows, RetryAfter(delay_s, refresh, not_before_s), last)

    @staticmethod
    def _leftover(call: Call, rows: Rows, again: RetryAfter, error: KoinonError) -> Leftover:
        # A quota admits some rows of a large call at a time; while it does, no back-off.
        goes_on = isinstance(error, QuotaExceededError) and len(rows) < len(call.rows)
        return Leftover(
            rows=rows,
            again=again,
            attempt=0 if goes_on else call.attempt + 1,
            revision=call.revision,
            error=error,
        )

    @abstractmethod
    def _store(self, call: Call, reply: Reply) -> Failed:
        """Store a reply's rows; return the failed ones."""

    def _note_unknown(self, rows: Rows) -> None:
        """Record that the attempt at these rows may have been applied."""
        del rows

    @abstractmethod
    def fail(self, rows: Rows, error: KoinonError, timed_out_ms: int | None = None) -> None:
        """End these rows with this error; they are not retried."""


class ReadRows(RowsOperation[ReadReply]):
    """The rows of ``get_many`` and ``get_entries``. The first final error fails the whole read."""

    idempotent = True
    write = False

    def __init__(
        self,
        keys: Sequence[bytes],
        partition_ids: PartitionIds,
        policy: RetryPolicy,
        keyspace_id: int = 0,
        *,
        want_entries: bool = False,
    ) -> None:
        super().__init__(keys, partition_ids, policy, keyspace_id)
        self.want_entries = want_entries
        self.error: KoinonError | None = None
        self.results: list[Any] = []
        """bytes | None (or Entry | None) for each key, in the order of the keys, once all rows are
        settled.
        """

    def _store(self, call: Call, reply: ReadReply) -> Failed:
        found: list[Any]
        if self.want_entries:
            expiries = [at or None for at in reply.expires_at_ms]
            found = list(map(Entry, call.keys, reply.values, reply.versions, expiries))
        else:
            found = list(reply.values)
        for row in reply.missing:
            found[row] = None
        if len(call.rows) == len(self.keys):  # all rows in one call, in order
            self.results = found
        else:
            self.results = self.results or [None] * len(self.keys)
            for row, value in zip(call.rows.tolist(), found, strict=True):
                self.results[row] = value
        return _rows_of(call, reply.refused)

    def fail(self, rows: Rows, error: KoinonError, timed_out_ms: int | None = None) -> None:
        if self.error is None:
            self.error = final_error(
                error, write=False, maybe_applied=False, timed_out_ms=timed_out_ms
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteOptions:
    """The options that all rows of one ``*_many`` write share.

    Raises:
        InvalidArgumentError, TypeError: the time to live or the durability is invalid.
    """

    ttl_ms: int | None = None
    """The time to live of rows without one of their own; None: the keyspace's default."""
    if_absent: bool = False
    retry_unknown: bool = False
    """True if an attempt of unknown fate is repeated."""
    durability: Durability = "all_in_sync"

    def __post_init__(self) -> None:
        limits.check_ttl(self.ttl_ms)
        limits.check_durability(self.durability)


class WriteRows(RowsOperation[WriteReply]):
    """The puts or the deletes of one chunk; failures are recorded by row. With ``if_absent`` a put
    leaves an existing record alone. Such a chunk may be repeated like any other: the second attempt
    finds the records that the first wrote, and counts them as present.
    """

    write = True

    def __init__(
        self,
        chunk: Chunk,
        partition_ids: PartitionIds,
        policy: RetryPolicy,
        keyspace_id: int = 0,
        options: WriteOptions = WriteOptions(),
    ) -> None:
        super().__init__(chunk.keys, partition_ids, policy, keyspace_id)
        self.values = chunk.values  # None: deletes
        self.options = options
        self.idempotent = options.retry_unknown
        self._ttls = chunk.ttls
        self.absent = 0  # deletes that found no record
        self.present: list[int] = []
        """Rows whose key already had a record, from this operation or another one."""
        self.failures: dict[int, KoinonError] = {}  # by row
        self._maybe_applied: set[int] = set()  # rows with an attempt that had no reply

    @property
    def deletes(self) -> bool:
        return self.values is None

    def ttl_column(self, call: Call) -> Sequence[int]:
        """Return the times to live of a call's rows for a request: none, one for all rows, or one
        for each row; 0 stands for the default.
        """
        ttl_ms = self.options.ttl_ms
        if self._ttls is None:
            return () if ttl_ms is None else (ttl_ms,)
        return [one or ttl_ms or 0 for one in pick(self._ttls, call.rows)]

    def _values(self, rows: Rows | None) -> Sequence[bytes] | None:
        if self.values is None or rows is None:
            return self.values
        return pick(self.values, rows)

    def _store(self, call: Call, reply: WriteReply) -> Failed:
        self.absent += len(reply.absent)
        if reply.present:
            sent = call.rows.tolist()
            self.present += [sent[row] for row in reply.present if row < len(sent)]
        failed = _rows_of(call, reply.refused)
        failed += [(call.rows[row : row + 1], error) for row, error in reply.row_errors.items()]
        return failed

    def _note_unknown(self, rows: Rows) -> None:
        self._maybe_applied.update(rows.tolist())

    def fail(self, rows: Rows, error: KoinonError, timed_out_ms: int | None = None) -> None:
        settled = {
            maybe: final_error(error, write=True, maybe_applied=maybe, timed_out_ms=timed_out_ms)
            for maybe in (False, True)
        }
        for row in rows.tolist():
            self.failures[row] = settled[row in self._maybe_applied]


def _rows_of(call: Call, refused: dict[int, KoinonError]) -> Failed:
    return [(call.rows[call.partition_ids == p], error) for p, error in refused.items()]


def pick(column: Sequence[Item], rows: Rows) -> Sequence[Item]:
    """Return the column's entries at ``rows``, picked in C."""
    if len(rows) == 1:
        return [column[int(rows[0])]]
    return itemgetter(*rows.tolist())(column) if len(rows) else []


def attempt_timeout_s(left_s: float, *, write: bool, least_s: float = 1.0) -> float:
    """Return the timeout of one attempt, in seconds, out of the time that is left.

    A read without a reply can be sent to another node, so an attempt takes half of the time that is
    left; a write cannot, and takes all of it.
    """
    return left_s if write else min(left_s, max(least_s, left_s / 2))
