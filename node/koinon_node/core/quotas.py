"""Limits the clients of a keyspace to its rows and bytes per second.

A limit applies to the whole cluster. Each node takes a share in proportion to the partitions that
it leads by its table. One node at a time leads a partition, so the shares never add up to more than
the limit, and nodes need not communicate about it.

A share is a token bucket (``pacing``). A request is admitted whenever the balance is above zero,
and may take it below zero: the size of a read is known only afterwards, and a request larger than
the bucket must be admitted at some time. The debt is waited out. So within T seconds, requests
beyond ``share * T`` are admitted only up to the sum of:

* ``BURST_S`` of unused share: one per cent of ten seconds. With less, a client whose next request
is
  late by the pause of a garbage collection could not use its limit;
* the last request that was admitted.

A request with rows of many partitions is split: each partition is admitted or refused as a whole,
like in a node's other refusals. The first partition of the split rotates, so that no partition is
always the last.

Pure: time is an argument.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from koinon_node.core.formats.records import U32Array, U64Array
from koinon_node.core.pacing import TokenBucket
from koinon_proto.contract.errors import QuotaExceededError
from koinon_proto.contract.keyspaces import Keyspace, Keyspaces

BURST_S = 0.1
RETRY_MS_MAX = 3_600_000

I64Array = npt.NDArray[np.int64]


class Share(NamedTuple):
    """A keyspace with a limit, and the share of its partitions that this node leads, from 0 to
    1.
    """

    keyspace: Keyspace
    part: float


def shares_of(keyspaces: Keyspaces, epochs: U64Array) -> tuple[Share, ...]:
    """Return the shares of the keyspaces with a limit, by ``base``. ``epochs[p]`` is 0 where this
    node does not lead partition p.
    """
    return tuple(
        Share(keyspace, np.count_nonzero(led) / keyspace.partition_count)
        for keyspace in keyspaces
        if keyspace.max_rows_per_s or keyspace.max_bytes_per_s
        for led in (epochs[keyspace.base : keyspace.partition_ids.stop],)
    )


class _Limit:
    """One limit on this node. ``rate`` is its share per second; 0: no limit."""

    def __init__(self, unit: str) -> None:
        self.unit = unit
        self.of_cluster = 0
        self.rate = 0.0
        self._bucket = TokenBucket(BURST_S, full=True)

    def set(self, of_cluster: int, part: float) -> None:
        """Change the limit or the share. Debts stay while there is a limit."""
        if not of_cluster:
            self._bucket = TokenBucket(BURST_S, full=True)
        self.of_cluster = of_cluster
        self.rate = of_cluster * part

    def balance(self, now: float) -> float:
        """Return how much may be admitted; infinite without a limit."""
        return self._bucket.balance(self.rate, now) if self.rate else math.inf

    def spend(self, amount: int) -> None:
        if self.rate:
            self._bucket.spend(amount)

    def wait_ms(self, now: float) -> int:
        """Return the time until the balance is above zero, in ms, rounded up; 0: it is above."""
        balance = self.balance(now)
        if balance > 0:
            return 0
        return min(RETRY_MS_MAX, int(-balance / self.rate * 1000) + 1)


class Quota:
    """The limits of one keyspace on this node. Admitted requests are counted at once, whatever
    their outcome.
    """

    def __init__(self, share: Share) -> None:
        self.name = share.keyspace.name
        self.partition_ids = share.keyspace.partition_ids
        self._rows, self._bytes = _Limit("rows"), _Limit("bytes")
        self._first = 0  # the partition with which the next split begins
        self.refused_rows = 0
        self.set(share)

    def set(self, share: Share) -> None:
        """Apply the limits of the newest table, and this share of them."""
        self._rows.set(share.keyspace.max_rows_per_s, share.part)
        self._bytes.set(share.keyspace.max_bytes_per_s, share.part)

    def refusal(self, now: float, rows: int = 1, size: int = 0) -> QuotaExceededError | None:
        """Admit and count a request, or return its refusal. ``size``: the bytes known beforehand;
        the caller counts further bytes by ``spend``.
        """
        if self._rows.balance(now) > 0 and self._bytes.balance(now) > 0:
            self.spend(rows, size)
            return None
        return self._refused(now, rows)

    def fits(self, now: float, rows: int) -> bool:
        """Return whether so many rows can be admitted, whatever their size. The caller counts them
        by ``spend``.
        """
        left = self._rows.balance(now)
        return (rows <= left or (rows == 1 and left > 0)) and self._bytes.balance(now) > 0

    def room(self, now: float) -> tuple[int, int]:
        """Return how many rows and bytes a page may have, at least one of each. The caller counts
        the page by ``spend``.

        Raises:
            QuotaExceededError: no page can be admitted now.
        """
        rows, size = self._rows.balance(now), self._bytes.balance(now)
        if rows <= 0 or size <= 0:
            raise self._refused(now, 1)
        return _whole(rows), _whole(size)

    def spend(self, rows: int, size: int) -> None:
        """Count rows and bytes of admitted requests."""
        self._rows.spend(rows)
        self._bytes.spend(size)

    def cut(
        self,
        now: float,
        partition_ids: U32Array,
        sizes: I64Array,
        counts_of: I64Array | None = None,
    ) -> dict[int, QuotaExceededError]:
        """Admit and count rows, partition by partition; return the errors of refused partitions.
        Columns over rows: ``sizes`` are the bytes known beforehand; ``counts_of`` is how many rows
        each counts for, None: one.
        """
        rows = len(partition_ids) if counts_of is None else int(counts_of.sum())
        size = int(sizes.sum())
        rows_left, bytes_left = self._rows.balance(now), self._bytes.balance(now)
        if rows <= rows_left and size <= bytes_left and bytes_left > 0:
            self.spend(rows, size)
            return {}
        ids, places = np.unique(partition_ids, return_inverse=True)
        counts = np.bincount(places, counts_of, len(ids))
        bulks = np.bincount(places, sizes, len(ids))
        order = np.roll(np.arange(len(ids)), -int(np.searchsorted(ids, self._first)))
        ids, counts, bulks = ids[order], counts[order], bulks[order]
        fits = (np.cumsum(counts) - counts < rows_left) & (np.cumsum(bulks) - bulks < bytes_left)
        taken = int(counts[fits].sum())
        self.spend(taken, int(bulks[fits].sum()))
        if taken == rows:
            return {}
        refused = ids[~fits].tolist()
        self._first = refused[0]
        return dict.fromkeys(refused, self._refused(now, rows - taken))

    def _refused(self, now: float, rows: int) -> QuotaExceededError:
        """Build the error of refused rows, and count them."""
        self.refused_rows += rows
        limit = max(self._rows, self._bytes, key=lambda limit: limit.wait_ms(now))
        return QuotaExceededError(
            keyspace=self.name,
            unit=limit.unit,
            limit=limit.of_cluster,
            retry_after_ms=limit.wait_ms(now),
        )


def _whole(balance: float) -> int:
    return max(1, int(min(balance, 1 << 40)))


class Quotas:
    """The quotas on this node of all keyspaces with a limit."""

    def __init__(self) -> None:
        self._shares: tuple[Share, ...] = ()
        self._bases: list[int] = []
        self._by_base: list[Quota] = []
        self._by_id: dict[int, Quota] = {}
        self._former: dict[str, int] = {}  # by keyspace: rows refused by removed quotas

    def of(self, shares: tuple[Share, ...], partition_id: int) -> Quota | None:
        """Return the quota for rows of this partition by the present shares, or None if its
        keyspace has no limit.
        """
        if shares is not self._shares:
            self.take(shares)
        at = bisect_right(self._bases, partition_id) - 1
        if at < 0:
            return None
        quota = self._by_base[at]
        return quota if partition_id in quota.partition_ids else None

    def refused_rows(self) -> dict[str, int]:
        """Return the number of rows refused since the start, by keyspace."""
        total = dict(self._former)
        for quota in self._by_base:
            total[quota.name] = total.get(quota.name, 0) + quota.refused_rows
        return total

    def take(self, shares: tuple[Share, ...]) -> None:
        """Apply these shares. Quotas without a share are removed, with their debts."""
        by_id: dict[int, Quota] = {}
        for share in shares:
            quota = self._by_id.pop(share.keyspace.keyspace_id, None)
            if quota is None:
                quota = Quota(share)
            else:
                quota.set(share)
            by_id[share.keyspace.keyspace_id] = quota
        for gone in self._by_id.values():
            self._former[gone.name] = self._former.get(gone.name, 0) + gone.refused_rows
        self._shares, self._by_id, self._by_base = shares, by_id, list(by_id.values())
        self._bases = [quota.partition_ids.start for quota in self._by_base]
