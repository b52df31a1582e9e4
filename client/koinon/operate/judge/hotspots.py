"""Hotspots: rates by partition and node, their unevenness, and the keys that cause them.

Pure: judges counters and samples that the caller has requested.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt

Columns = npt.NDArray[np.float64]
"""Four rows (reads, writes, read bytes, written bytes), with a column for each partition, or one
for all.
"""

READS, WRITES, READ_BYTES, WRITTEN_BYTES = range(4)
MEASURES = 4

HOT_TIMES_MEAN = 3.0
"""A partition with this many times the mean is worth a remark."""
KEY_SHARE = 0.3
"""A key with this share of its partition's rows counts as the cause of its heat."""
FEW_ROWS = 1_000
"""If fewer rows than this were counted, figures of partitions are mostly chance."""
HOT_ROWS = 50
"""A partition with fewer rows than this may be hot by chance."""
KEY_TAKEN = 5
"""A key with fewer samples than this may be there by chance."""


class RankBy(IntEnum):
    """The measure by which partitions are ranked; numbers are those of the wire."""

    ALL = 0
    READS = 1
    WRITES = 2
    BYTES = 3


_RANKED: dict[RankBy, tuple[int, ...]] = {
    RankBy.ALL: (READS, WRITES),
    RankBy.READS: (READS,),
    RankBy.WRITES: (WRITES,),
    RankBy.BYTES: (READ_BYTES, WRITTEN_BYTES),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class FollowerLag:
    """The records that a primary has sent to a follower and the follower has not acknowledged."""

    node_number: int
    records: int
    bytes: int
    oldest_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeCounters:
    """The counters of one node process, over ``elapsed_s``."""

    elapsed_s: float
    counts: Columns
    followers: tuple[FollowerLag, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Rates per second: ``partitions`` by partition, summed over nodes; ``nodes`` by node, summed
    over partitions.
    """

    partitions: Columns
    nodes: Mapping[int, Columns] = field(default_factory=dict)
    rows: int = 0  # counted rows of all partitions

    def by_chance(self) -> float:
        """Return the approximate coefficient of variation of rows that are spread at random."""
        return float(np.sqrt(self.partitions.shape[1] / self.rows)) if self.rows else 0.0

    def heat(self, by: RankBy) -> Columns:
        """Return the measure by which each partition is ranked."""
        return heat_of(self.partitions, by)

    @property
    def total(self) -> Columns:
        """The sum over partitions, by measure."""
        whole: Columns = self.partitions.sum(axis=1)
        return whole


def heat_of(columns: Columns, by: RankBy) -> Columns:
    """Return the ranked measure: rows, rows of one kind, or bytes."""
    chosen: Columns = columns[list(_RANKED[by])].sum(axis=0)
    return chosen


def rates(
    before: Mapping[int, NodeCounters],
    after: Mapping[int, NodeCounters],
    *,
    partitions: int,
    seconds: float,
) -> Rates:
    """Return the rates between two readings of the counters, ``seconds`` apart. A node whose
    process began in between counts from its start; one that did not answer the first time is left
    out.
    """
    whole = np.zeros((MEASURES, partitions))
    nodes: dict[int, Columns] = {}
    rows = 0.0
    for number, now in after.items():
        then = before.get(number)
        if then is not None and then.elapsed_s < now.elapsed_s:
            counted, elapsed_s = now.counts - then.counts, now.elapsed_s - then.elapsed_s
        elif now.elapsed_s <= seconds + 1:
            counted, elapsed_s = now.counts, now.elapsed_s
        else:
            continue
        rate = counted / max(elapsed_s, 1e-3)
        whole += rate
        nodes[number] = rate.sum(axis=1)
        rows += float(counted[READS].sum() + counted[WRITES].sum())
    return Rates(partitions=whole, nodes=nodes, rows=int(rows))


def behind(counters: Mapping[int, NodeCounters]) -> dict[int, FollowerLag]:
    """Return the lag of followers behind their primaries, by node: the sum of records, the greatest
    age.
    """
    found: dict[int, FollowerLag] = {}
    for node in counters.values():
        for lag in node.followers:
            other = found.get(lag.node_number)
            found[lag.node_number] = FollowerLag(
                node_number=lag.node_number,
                records=lag.records + (other.records if other else 0),
                bytes=lag.bytes + (other.bytes if other else 0),
                oldest_s=max(lag.oldest_s, other.oldest_s if other else 0.0),
            )
    return found


# --- unevenness ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Skew:
    """The unevenness of partitions' heat; both numbers are 0 if there is no heat."""

    max_over_mean: float
    coefficient_of_variation: float


def skew_of(heat: Columns) -> Skew:
    mean = float(heat.mean()) if len(heat) else 0.0
    if mean <= 0:
        return Skew(max_over_mean=0.0, coefficient_of_variation=0.0)
    return Skew(
        max_over_mean=float(heat.max()) / mean, coefficient_of_variation=float(heat.std()) / mean
    )


# --- keys ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledRows:
    """The part of the traffic that was sampled for keys. Any count may be too small by
    ``missed_max``.
    """

    rows: int = 0
    taken: int = 0
    missed_max: int = 0

    def __add__(self, other: SampledRows) -> SampledRows:
        return SampledRows(
            rows=self.rows + other.rows,
            taken=self.taken + other.taken,
            missed_max=max(self.missed_max, other.missed_max),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledKey:
    """A key of a partition, its estimated rates, and the number of rows behind the estimate."""

    partition_id: int
    key: bytes
    reads_per_second: float
    writes_per_second: float
    taken: float


@dataclass(frozen=True, kw_only=True)
class KeySample:
    """The most frequent keys, and the numbers of rows behind them."""

    keys: Sequence[SampledKey] = ()
    read: SampledRows = field(default_factory=SampledRows)
    written: SampledRows = field(default_factory=SampledRows)


@dataclass(frozen=True, kw_only=True, slots=True)
class HotKey:
    """A key, and its share of the partition's rows of the ranked kind."""

    key: bytes
    reads_per_second: float
    writes_per_second: float
    share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class HotPartition:
    """A partition, and its share of the total heat."""

    partition_id: int
    per_second: Columns
    share: float
    times_mean: float
    rows: int  # approximate number of counted rows
    keys: tuple[HotKey, ...]


def hottest(
    found: Rates,
    by: RankBy,
    partitions_max: int,
    *,
    sample: KeySample | None = None,
    keys_max: int = 0,
) -> list[HotPartition]:
    """Return the partitions with the most heat, the hottest first, without those that have none."""
    heat = found.heat(by)
    total, mean = float(heat.sum()), float(heat.mean()) if len(heat) else 0.0
    order = np.argsort(-heat, kind="stable")[:partitions_max]
    rows = found.heat(RankBy.ALL)
    keys: dict[int, list[SampledKey]] = {}
    for key in sample.keys if sample is not None else ():
        keys.setdefault(key.partition_id, []).append(key)
    return [
        HotPartition(
            partition_id=p,
            per_second=found.partitions[:, p],
            share=float(heat[p]) / total,
            times_mean=float(heat[p]) / mean,
            rows=round(found.rows * float(rows[p]) / max(float(rows.sum()), 1e-9)),
            keys=_hot_keys(keys.get(p, ()), found.partitions[:, p], by, keys_max),
        )
        for p in order.tolist()
        if heat[p] > 0
    ]


def _hot_keys(
    keys: Sequence[SampledKey], per_second: Columns, by: RankBy, keys_max: int
) -> tuple[HotKey, ...]:
    """Return the hottest keys of a partition. Keys are ranked by rows even if partitions are ranked
    by bytes.
    """
    rows_by = RankBy.ALL if by is RankBy.BYTES else by
    whole = float(heat_of(per_second, rows_by))

    def rate(key: SampledKey) -> float:
        columns = np.array([key.reads_per_second, key.writes_per_second, 0.0, 0.0])
        return float(heat_of(columns, rows_by))

    known = [key for key in keys if rate(key) > 0 and key.taken >= KEY_TAKEN]
    ranked = sorted(known, key=lambda key: (-rate(key), key.key))[:keys_max]
    return tuple(
        HotKey(
            key=key.key,
            reads_per_second=key.reads_per_second,
            writes_per_second=key.writes_per_second,
            share=min(1.0, rate(key) / whole) if whole else 0.0,
        )
        for key in ranked
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class HotGroup:
    """Keys with the same routing bytes, and their share of the sampled rows of their partition."""

    routing_bytes: bytes
    share: float


def group_of(
    partition_id: int, keys: Sequence[SampledKey], routing_bytes: Callable[[bytes], bytes]
) -> HotGroup | None:
    """Return the group of several keys with the most sampled rows of the partition, if its share is
    large enough to make a single key the cause.
    """
    rows: dict[bytes, float] = {}
    members: dict[bytes, int] = {}
    for key in keys:
        if key.partition_id == partition_id:
            group = routing_bytes(key.key)
            rows[group] = rows.get(group, 0.0) + key.reads_per_second + key.writes_per_second
            members[group] = members.get(group, 0) + 1
    whole = sum(rows.values())
    if not whole:
        return None
    most = max(rows, key=rows.__getitem__)
    share = rows[most] / whole
    return (
        HotGroup(routing_bytes=most, share=share)
        if share >= KEY_SHARE and members[most] > 1
        else None
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Blamed:
    """A hot partition, and the key that causes its heat; None: no single key does."""

    partition: HotPartition
    key: HotKey | None


def blame(hot: Sequence[HotPartition], rows: int) -> list[Blamed]:
    """Return the partitions that are far hotter than the mean, each with the cause. If few rows
    were counted, return none: the heat may be chance.
    """
    if rows < FEW_ROWS:
        return []
    return [
        Blamed(
            partition=partition,
            key=partition.keys[0]
            if partition.keys and partition.keys[0].share >= KEY_SHARE
            else None,
        )
        for partition in hot
        if partition.times_mean >= HOT_TIMES_MEAN and partition.rows >= HOT_ROWS
    ]
