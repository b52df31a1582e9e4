"""A scan of all partitions, or of the one partition of a prefix: page by page, through refusals and
moves.

Progress is kept per partition: not begun, begun up to a key, or done. A page that is requested
twice returns the records after the same key, and a partition that moves is resumed at its next
owner after the last key seen. So every record that exists throughout the scan is returned exactly
once. A scan is no snapshot: a write during the scan may or may not be seen.

Records come partition by partition, each in ascending or descending key order; the order of the
partitions is not defined.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from koinon.core import limits
from koinon.core.retry import RetryAfter, RetryPolicy, final_error
from koinon.core.routing import Router, Routing
from koinon.types import BytesLike, Entry
from koinon_proto.contract.errors import InternalError, KoinonError
from koinon_proto.partitioner import Partitioner


@dataclass(frozen=True, kw_only=True, slots=True)
class ScanQuery:
    """The caller's arguments of a scan."""

    prefix: BytesLike = b""
    start: BytesLike = b""
    limit: int | None = None
    """The limit on the records of the scan; None: no limit."""
    reverse: bool = False
    page_rows: int = 1_000
    keys_only: bool = False

    def checked(self) -> Self:
        """Return the same query with keys as ``bytes``.

        Raises:
            InvalidArgumentError, TypeError: an argument is out of bounds, or of another type.
        """
        prefix = limits.check_key_part("prefix", self.prefix)
        start = limits.check_key_part("start", self.start)
        limits.check_page_rows(self.page_rows)
        if self.limit is not None:
            limits.check_positive("limit", self.limit)
        return replace(self, prefix=prefix, start=start, reverse=bool(self.reverse))


@dataclass(frozen=True, kw_only=True, slots=True)
class ScanReply:
    """``ScanResponse`` with its errors as classes; ``next`` is (partition, after_key) or None."""

    keys: Sequence[bytes]
    values: Sequence[bytes]
    partition_ids: Sequence[int]
    versions: Sequence[int]
    expires_at_ms: Sequence[int]
    next: tuple[int, bytes] | None
    refused: dict[int, KoinonError]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScanCall:
    """One request for a page at one node."""

    address: str
    partition_ids: list[int]
    after_key: bytes
    """The key after which the first partition is resumed; b'': from its start."""
    revision: int
    table_version: int


class PartitionProgress:
    """The partitions that are still to be read, each with the key after which it continues."""

    def __init__(self, partition_ids: Iterable[int]) -> None:
        self._todo: dict[int, bytes] = dict.fromkeys(sorted(partition_ids), b"")
        self._set_aside: set[int] = set()  # refused partitions, left until the others are done

    @property
    def done(self) -> bool:
        return not self._todo

    @property
    def only_refused_left(self) -> bool:
        return self._set_aside.issuperset(self._todo)

    def next_call(self, routing: Routing) -> tuple[str, list[int], bytes]:
        """Return the next request: the address, its partitions, ascending, and the key after which
        the first one continues. A partition that is begun comes first. Refused partitions are left
        until the others are done.
        """
        ready = sorted(self._todo.keys() - self._set_aside)
        if not ready:
            self._set_aside.clear()
            ready = sorted(self._todo)
        first = next((p for p in ready if self._todo[p]), ready[0])
        owner = routing.owner_of[first]
        rest = ready[bisect_right(ready, first) :]
        mine = [p for p in rest if routing.owner_of[p] == owner and not self._todo[p]]
        return owner, [first, *mine], self._todo[first]

    def refuse(self, partition_ids: Iterable[int]) -> None:
        """Set these partitions aside: they were not read, or not to their end."""
        self._set_aside.update(partition_ids)

    def apply_page(
        self,
        asked: Sequence[int],
        next_at: tuple[int, bytes] | None,
        refused: Collection[int],
        last_keys: Iterable[tuple[int, bytes]],
    ) -> bool:
        """Apply the reply for the requested partitions; return whether one of them advanced.

        Args:
            next_at: the partition and the key after which the page ends; None: it ends in no
                partition.
            last_keys: the partitions of the page with their last keys, ascending; a partition may
                be refused after a part of it was read.
        """
        before = len(self._todo), self._todo[asked[0]]
        at, after_key = next_at if next_at is not None else (1 << 32, b"")
        for partition_id in asked:
            if partition_id >= at:
                break
            if partition_id not in refused:
                self._todo.pop(partition_id, None)
        if at in self._todo and at not in refused:
            self._todo[at] = after_key
        if refused:
            for partition_id, key in last_keys:
                if partition_id in refused and partition_id in self._todo:
                    self._todo[partition_id] = key
        self.refuse(refused)
        return (len(self._todo), self._todo.get(asked[0])) != before


def partitions_with(prefix: bytes, known: Partitioner) -> Sequence[int]:
    """Return the partitions of a keyspace that may have keys with this prefix: one partition if the
    prefix includes all routing bytes of its keys, else all.
    """
    partition_id = known.partition_of_prefix(prefix)
    return known.partition_ids if partition_id is None else (partition_id,)


class ScanProgress:
    """A scan's pages, their refusals and retries."""

    def __init__(
        self,
        partition_ids: Iterable[int],
        policy: RetryPolicy,
        *,
        keys_only: bool,
    ) -> None:
        self._partitions = PartitionProgress(partition_ids)
        self._keys_only = keys_only
        self._policy = policy
        self._attempt = 0  # failed attempts since the last page that advanced
        self.steps = 0
        """The number of pages that advanced the scan."""
        self.last_error: KoinonError | None = None
        """The error of the last refused page."""

    @property
    def done(self) -> bool:
        return self._partitions.done

    def next_call(self, routing: Routing) -> ScanCall | None:
        """Return the next page to request; None: the scan is done."""
        if self._partitions.done:
            return None
        address, partition_ids, after_key = self._partitions.next_call(routing)
        return ScanCall(
            address=address,
            partition_ids=partition_ids,
            after_key=after_key,
            revision=routing.revision,
            table_version=routing.table.table_version,
        )

    def settle(
        self, call: ScanCall, outcome: ScanReply | KoinonError, router: Router
    ) -> tuple[list[Entry], RetryAfter | None]:
        """Apply a page; return its records, and the delay of the retry if it made no progress.

        Raises:
            KoinonError: the scan cannot continue.
        """
        if isinstance(outcome, KoinonError):
            router.learn((outcome,))
            self._partitions.refuse(call.partition_ids)
            return [], self._again(outcome)
        advanced = self._partitions.apply_page(
            call.partition_ids,
            outcome.next,
            outcome.refused,
            zip(outcome.partition_ids, outcome.keys, strict=True),
        )
        entries = self._entries(outcome)
        if entries or advanced:
            self._attempt = 0
            self.steps += 1
        elif not outcome.refused:
            raise InternalError(reason=f"a page of {call.address} does not advance the scan")
        if outcome.refused:
            router.learn(outcome.refused.values())
            again = [self._again(error) for error in outcome.refused.values()]
            if not entries and self._partitions.only_refused_left:
                return [], max(again, key=lambda a: a.delay_s)
        return entries, None

    def _again(self, error: KoinonError) -> RetryAfter:
        self.last_error = error
        again = self._policy.decide(error, attempt=self._attempt, idempotent=True)
        if again is None:
            raise final_error(error, write=False, maybe_applied=False)
        self._attempt += 1
        return again

    def _entries(self, reply: ScanReply) -> list[Entry]:
        values: Sequence[bytes] = reply.values
        if self._keys_only:
            values = [b""] * len(reply.keys)
        expiries: list[Any] = [at or None for at in reply.expires_at_ms]
        return list(map(Entry, reply.keys, values, reply.versions, expiries))
