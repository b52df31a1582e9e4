"""A scan of all partitions, a page at a time, through refusals and moves.

Progress is kept per partition: not begun, begun up to a key, or done. A page that was asked for
twice gives the same records from the same key on, and a partition that moves is resumed at its
next owner after the last key seen. So every record that is there throughout the scan is returned
exactly once. A scan is no snapshot: what is written meanwhile may or may not be seen.

Records come partition by partition, each in key order; the partitions come in no promised order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from koinon.core.retry import RetryAfter, RetryPolicy, decide, final_error
from koinon.core.routing import Router, Routing
from koinon.types import Entry
from koinon_proto.contract.errors import InternalError, KoinonError


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
    """One page of one node."""

    address: str
    partition_ids: list[int]
    after_key: bytes
    """Where the first partition is resumed; b'': from its start."""
    revision: int
    table_version: int


class ScanProgress:
    """Which partitions are still to visit, and from which key on."""

    def __init__(
        self, partition_count: int, *, keys_only: bool, policy: RetryPolicy, random: Random
    ) -> None:
        self._todo: dict[int, bytes] = dict.fromkeys(range(partition_count), b"")
        self._set_aside: set[int] = set()
        self._keys_only = keys_only
        self._policy = policy
        self._random = random
        self._attempt = 0
        self.steps = 0
        """How many pages brought the scan forward."""
        self.last_error: KoinonError | None = None
        """Why the last page that was refused was."""

    def next_call(self, routing: Routing) -> ScanCall | None:
        """Return the page to ask for next; None: the scan is done.

        Goes on with a partition that is begun, then in ascending order; refused partitions are
        set aside until the others are done.
        """
        if not self._todo:
            return None
        ready = [p for p in self._todo if p not in self._set_aside]
        if not ready:
            self._set_aside.clear()
            ready = list(self._todo)
        ready.sort()
        first = next((p for p in ready if self._todo[p]), ready[0])
        address = routing.owner_of[first]
        rest = ready[bisect_left(ready, first) + 1 :]
        mine = [p for p in rest if routing.owner_of[p] == address and not self._todo[p]]
        return ScanCall(
            address=address,
            partition_ids=[first, *mine],
            after_key=self._todo[first],
            revision=routing.revision,
            table_version=routing.table.table_version,
        )

    def settle(
        self, call: ScanCall, outcome: ScanReply | KoinonError, router: Router
    ) -> tuple[list[Entry], RetryAfter | None]:
        """Take a page; return its records, and how long to wait where no progress was made.

        Raises:
            KoinonError: the scan cannot go on.
        """
        if isinstance(outcome, KoinonError):
            router.learn((outcome,))
            self._set_aside.update(call.partition_ids)
            return [], self._again(outcome)
        before = len(self._todo), self._todo[call.partition_ids[0]]
        self._advance(call, outcome)
        entries = self._entries(outcome)
        after = len(self._todo), self._todo.get(call.partition_ids[0])
        if entries or after != before:
            self._attempt = 0
            self.steps += 1
        elif not outcome.refused:
            raise InternalError(reason=f"a page of {call.address} does not advance the scan")
        if outcome.refused:
            router.learn(outcome.refused.values())
            self._set_aside.update(outcome.refused)
            again = [self._again(error) for error in outcome.refused.values()]
            if not entries and self._set_aside.issuperset(self._todo):
                return [], max(again, key=lambda a: a.delay_s)
        return entries, None

    def _again(self, error: KoinonError) -> RetryAfter:
        self.last_error = error
        again = decide(
            error,
            attempt=self._attempt,
            idempotent=True,
            policy=self._policy,
            random=self._random,
        )
        if again is None:
            raise final_error(error, write=False, maybe_applied=False)
        self._attempt += 1
        return again

    def _advance(self, call: ScanCall, reply: ScanReply) -> None:
        at, after_key = reply.next if reply.next is not None else (1 << 32, b"")
        for partition_id in call.partition_ids:
            if partition_id >= at:
                break
            if partition_id not in reply.refused:
                self._todo.pop(partition_id, None)
        if at in self._todo and at not in reply.refused:
            self._todo[at] = after_key
        if reply.refused:  # a partition may be refused after some of it was read
            for partition_id, key in zip(reply.partition_ids, reply.keys, strict=True):
                if partition_id in reply.refused and partition_id in self._todo:
                    self._todo[partition_id] = key

    def _entries(self, reply: ScanReply) -> list[Entry]:
        values: Sequence[bytes] = reply.values
        if self._keys_only:
            values = [b""] * len(reply.keys)
        expiries: list[Any] = [at or None for at in reply.expires_at_ms]
        return list(map(Entry, reply.keys, values, reply.versions, expiries))
