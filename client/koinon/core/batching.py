"""Joins concurrent single operations on one node into requests.

A ``NodeQueue`` holds the single reads, writes or updates bound for one node. While fewer than
``singles_in_flight`` batches are in flight, the next is sent at once; otherwise operations queue up
and form it. There is no timer: an operation alone in its queue never waits. The driver limits the
operations under way in total (``max_pending``).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from enum import Enum
from typing import Any

from koinon.core.exchange import Exchange
from koinon.core.operations import ReadReply, UpdateReply, WriteReply
from koinon.core.retry import (
    AT_ONCE,
    RetryAfter,
    RetryPolicy,
    final_error,
)
from koinon.core.routing import Router
from koinon.types import Durability, Entry
from koinon_proto.contract.errors import (
    KoinonError,
    NotSentError,
    PermissionDeniedError,
    QuotaExceededError,
    ReplyTooLargeError,
    UnknownFateError,
)

_APART_S = 0.01  # retries due within the same hundredth of a second are sent together


class Kind(Enum):
    """The kind of a single operation."""

    GET = "get"
    GET_ENTRY = "get_entry"
    EXISTS = "exists"
    PUT = "put"
    DELETE = "delete"
    INCREMENT = "increment"
    TOUCH = "touch"
    GET_OR_PUT = "get_or_put"


_READS = frozenset((Kind.GET, Kind.GET_ENTRY, Kind.EXISTS))
_UPDATES = frozenset((Kind.INCREMENT, Kind.TOUCH, Kind.GET_OR_PUT))


# members as globals: attribute access on an Enum is slow
_GET_ENTRY, _PUT = Kind.GET_ENTRY, Kind.PUT


@dataclass(slots=True, eq=False)
class PendingOperation(Exchange):
    """One operation on one key, from its call to its end."""

    kind: Kind
    key: bytes
    partition_id: int
    _: KW_ONLY
    keyspace_id: int = 0
    ttl_ms: int | None = None
    by: int = 0  # the summand of an increment
    if_version: int | None = None
    retry_unknown: bool = False
    durability: Durability = "all_in_sync"
    attempt: int = 0  # refusals since its first attempt, or since its partition last changed
    maybe_applied: bool = False  # an attempt of this write had no reply
    # the error of its last attempt, for which it waits to be retried
    last_error: KoinonError | None = None
    expired: bool = False  # its deadline passed before it ended
    # the group in which it waits for a retry; only this group may resume it
    waits_in: Deferred | None = None
    on_done: Callable[[PendingOperation], None] | None = None
    """Called once, at the end, unless the operation was abandoned before."""
    waiter: Any = None  # the driver's own, like ``due``, its place among the deadlines
    due: Any = None

    @property
    def write(self) -> bool:
        return self.kind not in _READS

    @property
    def update(self) -> bool:
        """True if its effect depends on the existing record."""
        return self.kind in _UPDATES

    @property
    def idempotent(self) -> bool:
        """True if an attempt of unknown fate may be repeated."""
        if not self.write:
            return True
        return self.retry_unknown and self.if_version is None and not self.update

    def resume(self, deferred: Deferred) -> bool:
        """End the wait for a retry; return False if the operation no longer waits in this group: it
        has ended, or was resumed before and is in a later attempt.
        """
        if self.done or self.waits_in is not deferred:
            return False
        self.waits_in = None
        return True

    def succeed(self, result: Any) -> None:
        if not self.done:
            self.result = result
            self._end()

    def fail(self, error: KoinonError, timed_out_ms: int | None = None) -> None:
        if self.done:
            return
        self.error = final_error(
            error,
            write=self.write,
            maybe_applied=self.maybe_applied,
            timed_out_ms=timed_out_ms,
        )
        if self.request is not None:
            self.request.name(self.error)
        self._end()

    def expire(self) -> None:
        self.expired = not self.done
        if self.sent:
            self.maybe_applied = self.write
            error: KoinonError = UnknownFateError(reason=f"no answer within {self.timeout_ms} ms")
            self.fail(error)
            return
        queued = NotSentError(reason="still queued behind earlier operations to its node")
        self.fail(self.last_error or queued, timed_out_ms=self.timeout_ms)

    def abandon(self) -> None:
        """Note that the caller is gone. A batch that holds the operation continues without it."""
        self.done = True

    def _end(self) -> None:
        self.done = True
        if self.on_done is not None:
            self.on_done(self)


class NodeQueue:
    """The queued single reads for one node in one keyspace, or the single writes or updates of one
    durability: each batch holds only one of these.
    """

    def __init__(
        self,
        address: str,
        *,
        write: bool,
        rows_max: int,
        bytes_max: int,
        update: bool = False,
        durability: Durability = "all_in_sync",
    ) -> None:
        self.address = address
        self.write = write  # updates are writes, too
        self.update = update
        self.durability = durability
        self.in_flight = 0  # number of batches in flight; the driver counts it
        # rows of the next batch; below the option's value after a large reply
        self.rows_max = rows_max
        self.flush_due = False  # the driver has scheduled a flush
        self._queue: deque[PendingOperation] = deque()
        self._options = (rows_max, bytes_max)

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, single: PendingOperation) -> None:
        self._queue.append(single)

    def next_batch(self) -> list[PendingOperation]:
        """Remove and return the next batch; its operations count as sent. It may be empty."""
        batch: list[PendingOperation] = []
        queue, bytes_left = self._queue, self._options[1]
        while queue and len(batch) < self.rows_max:
            single = queue[0]
            bytes_left -= len(single.key) + len(single.value)
            if bytes_left < 0 and batch:
                break
            queue.popleft()
            if single.begin_attempt():
                batch.append(single)
        return batch

    def drain(self) -> list[PendingOperation]:
        """Remove and return all queued operations, for another node: this one cannot be reached."""
        waiting = [single for single in self._queue if not single.done]
        self._queue.clear()
        return waiting

    def on_reply_size(self, batch_rows: int, too_large: bool) -> None:
        """Adapt the rows of a batch to values so large that a reply exceeded the message limit."""
        if too_large:
            self.rows_max = max(1, batch_rows // 2)
        elif self.rows_max < self._options[0]:
            self.rows_max = min(self._options[0], self.rows_max + max(1, self.rows_max // 8))


Failed = list[tuple[PendingOperation, KoinonError]]
"""Operations, each with the error of its last attempt."""


@dataclass(frozen=True, slots=True, eq=False)
class Deferred:
    """Operations that wait for a newer table, for ``again.delay_s`` at most. Each operation knows
    its latest group, so resuming an older group does nothing.
    """

    singles: list[PendingOperation]
    again: RetryAfter
    revision: int  # of the routing under which they were refused

    def __post_init__(self) -> None:
        for single in self.singles:
            single.waits_in = self


def settle_singles(
    batch: Sequence[PendingOperation],
    outcome: ReadReply | WriteReply | UpdateReply | KoinonError,
    *,
    revision: int,
    router: Router,
    policy: RetryPolicy,
) -> list[Deferred]:
    """End the operations of a batch according to its outcome; return the operations to retry,
    grouped by the time of the retry.
    """
    refused: dict[int, KoinonError] = {}
    by_row: dict[int, KoinonError] = {}
    whole: KoinonError | None = None
    if isinstance(outcome, KoinonError):
        whole = outcome
        router.learn((whole,))
    else:
        refused = outcome.refused
        if refused:
            router.learn(refused.values())
        if isinstance(outcome, ReadReply):
            results: Sequence[Any] = _read_results(batch, outcome)
        else:
            by_row = outcome.row_errors
            if isinstance(outcome, UpdateReply):
                results = outcome.results
            else:
                results = _write_results(batch, outcome)
    failed: Failed = []
    if isinstance(whole, PermissionDeniedError) and whole.rows:
        by_row, whole = _denied_alone(batch, whole), None
    for row, single in enumerate(batch):
        error = whole or (refused.get(single.partition_id) if refused else None)
        if by_row and error is None:
            error = by_row.get(row)
        if error is not None:
            failed.append((single, error))
        else:
            single.succeed(results[row])
    return _retry_all(failed, len(batch), revision, policy)


def _denied_alone(
    batch: Sequence[PendingOperation], error: PermissionDeniedError
) -> dict[int, KoinonError]:
    """Return each operation's own error, by row. A request is refused whole if its caller may not
    access one of the keys, and operations share a request only by chance.
    """
    denied = set(error.rows)
    return {
        row: replace(error, what=f"key {single.key!r}", rows=()) if row in denied else _AlongError()
        for row, single in enumerate(batch)
    }


class _AlongError(NotSentError):
    """The error of an operation that was refused because of other keys in its request. It is
    retried at once.
    """

    def __init__(self) -> None:
        super().__init__(reason="refused because of another operation's keys in the same request")


def settle_failed(
    failed: Failed, *, revision: int, router: Router, policy: RetryPolicy
) -> list[Deferred]:
    """Fail or defer operations that were sent one by one, under the routing ``revision``, and not
    served; return the deferred ones, grouped by the time of their retry.
    """
    router.learn(error for _, error in failed)
    return _retry_all(failed, 1, revision, policy)


def _retry_all(
    failed: Failed, batch_rows: int, revision: int, policy: RetryPolicy
) -> list[Deferred]:
    """Fail or defer each operation. Deferred operations wait together, for the longest of their
    delays. Operations over a quota wait apart: if they came back together, there would be room for
    a few of them only, and none would use the quota afterwards.
    """
    again: list[PendingOperation] = []
    apart: dict[tuple[int, float], list[PendingOperation]] = {}
    longest = AT_ONCE
    for single, error in failed:
        retry = _retry(single, error, batch_rows, policy)
        if retry is None:
            continue
        if isinstance(error, QuotaExceededError):
            due = math.ceil(retry.delay_s / _APART_S), retry.not_before_s
            apart.setdefault(due, []).append(single)
            continue
        again.append(single)
        longest = RetryAfter(max(longest.delay_s, retry.delay_s), longest.refresh or retry.refresh)
    deferred = [Deferred(again, longest, revision)] if again else []
    for (steps, not_before_s), singles in apart.items():
        own = RetryAfter(steps * _APART_S, refresh=False, not_before_s=not_before_s)
        deferred.append(Deferred(singles, own, revision))
    return deferred


def _retry(
    single: PendingOperation,
    error: KoinonError,
    batch_rows: int,
    policy: RetryPolicy,
) -> RetryAfter | None:
    """Record the error. Return the conditions of the next attempt; if there is none, fail the
    operation and return None.
    """
    if single.done:
        return None
    single.sent = False
    single.last_error = error
    if isinstance(error, UnknownFateError):
        single.maybe_applied = single.write
    if isinstance(error, _AlongError):
        return AT_ONCE
    if not single.write and batch_rows > 1 and isinstance(error, ReplyTooLargeError):
        return AT_ONCE
    again = policy.decide(error, attempt=single.attempt, idempotent=single.idempotent)
    single.attempt += 1
    if again is None:
        single.fail(error)
    return again


def _read_results(batch: Sequence[PendingOperation], reply: ReadReply) -> Sequence[Any]:
    results: list[Any] = list(reply.values)
    if reply.versions:
        for row, single in enumerate(batch):
            if single.kind is _GET_ENTRY:
                results[row] = Entry(
                    single.key,
                    results[row],
                    reply.versions[row],
                    reply.expires_at_ms[row] or None,
                )
    for row in reply.missing:
        results[row] = None
    for row, single in enumerate(batch):
        if single.kind is Kind.EXISTS:
            results[row] = results[row] is not None
    return results


def _write_results(batch: Sequence[PendingOperation], reply: WriteReply) -> Sequence[Any]:
    if all(single.kind is _PUT for single in batch):
        return reply.versions
    absent = set(reply.absent)
    return [
        reply.versions[row] if single.kind is _PUT else row not in absent
        for row, single in enumerate(batch)
    ]
