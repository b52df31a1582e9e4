"""Predicts the effect of a load on a cluster: one pass over the rows for their sizes, one for
repeated keys.

Sizes are of keys and values as they would be stored, without a node's overhead per record. Rows
that could not be stored (a null, empty or over-long key, a null or over-long value) are counted
separately and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from koinon.ingest.settings import Settings
from koinon_proto.contract.keyspaces import Keyspace
from koinon_proto.contract.table import Table
from koinon_proto.partitioner import Partitioner, partitioner_of

if TYPE_CHECKING:
    from koinon.spark.encoding.faults import Limits
    from koinon.spark.options import WriteOptions
    from koinon.spark.writing.lifetimes import Lifetimes
    from koinon.spark.writing.planning import RowPlan

HEAVIEST_MAX = 5
SIZED = "key binary, partition_id int, bytes long, bad boolean"
I64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Skew:
    """The spread of a number over the partitions. ``variation`` is the coefficient of variation,
    the standard deviation over the mean; 0 without data.
    """

    mean: float
    most: int
    least: int
    heaviest_partition: int
    variation: float

    @property
    def most_to_mean(self) -> float:
        return self.most / self.mean if self.mean else 0.0


def skew_of(counts: I64Array, base: int = 0) -> Skew:
    """Return the skew of ``counts``, one per partition from partition ``base`` on."""
    mean = float(counts.mean())
    return Skew(
        mean=mean,
        most=int(counts.max()),
        least=int(counts.min()),
        heaviest_partition=base + int(counts.argmax()),
        variation=float(counts.std()) / mean if mean else 0.0,
    )


@dataclass(frozen=True, kw_only=True)
class NodeShare:
    """The share of one node: ``bytes`` of all copies that it holds, ``rows`` and ``primary_bytes``
    of the partitions that it leads.
    """

    node_id: str
    partitions: int
    rows: int
    primary_bytes: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class HeavyKey:
    """A key with many rows or many bytes."""

    key: bytes
    rows: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Survey:
    """The result. ``rows`` and ``bytes`` have one number per partition of the keyspace, from
    partition ``base`` on; ``bad_rows`` could not be stored; ``duplicate_rows`` counts rows beyond
    the first of their key.
    """

    rows: I64Array
    bytes: I64Array
    bad_rows: int
    duplicate_rows: int
    repeated: Sequence[HeavyKey]
    heaviest: Sequence[HeavyKey]
    base: int = 0

    @property
    def rows_total(self) -> int:
        """All rows that were read."""
        return int(self.rows.sum()) + self.bad_rows

    @property
    def skew(self) -> Skew:
        return skew_of(self.rows, self.base)


def per_node(survey: Survey, table: Table) -> list[NodeShare]:
    """Return the share that each node of the table would receive, by node id."""
    shares = []
    ours = table.rows[survey.base : survey.base + len(survey.rows)]  # of the keyspace
    for number, node in sorted(table.nodes.items(), key=lambda item: item[1].node_id):
        led = [at for at, row in enumerate(ours) if row.primary == number]
        held = [at for at, row in enumerate(ours) if number in row.replicas]
        shares.append(
            NodeShare(
                node_id=str(node.node_id),
                partitions=len(led),
                rows=int(survey.rows[led].sum()),
                primary_bytes=int(survey.bytes[led].sum()),
                bytes=int(survey.bytes[held].sum()),
            )
        )
    return [share for share in shares if share.partitions or share.bytes]


def take(frame: Any, settings: Settings, table: Table) -> Survey:
    """Read the rows of a DataFrame as a load would, and return their sizes and repeated keys.

    Raises:
        ConfigurationError: an option names a missing column, or one of a wrong type.
        UnknownKeyspaceError: the table has no keyspace of the settings' name.
    """
    from pyspark.sql import functions as f

    keyspace = table.keyspaces.named(settings.keyspace)
    base, count = keyspace.base, keyspace.partition_count
    sized = frame.mapInArrow(_sizing(settings, frame.schema, keyspace), SIZED).persist()
    try:
        good = sized.filter(~sized.bad)
        rows, sizes = np.zeros(count, np.int64), np.zeros(count, np.int64)
        totals = good.groupBy("partition_id").agg(f.count("*"), f.sum("bytes"))
        for partition_id, number, size in totals.collect():
            rows[partition_id - base], sizes[partition_id - base] = number, size
        keys = good.groupBy("key").agg(f.count("*").alias("rows"), f.sum("bytes").alias("bytes"))
        repeated = keys.filter(keys.rows > 1)
        beyond = repeated.agg(f.sum(repeated.rows - 1)).first()[0] or 0
        return Survey(
            rows=rows,
            bytes=sizes,
            bad_rows=sized.filter(sized.bad).count(),
            duplicate_rows=int(beyond),
            repeated=_heavy(repeated.orderBy(f.desc("rows"), "key")) if beyond else (),
            heaviest=_heavy(keys.orderBy(f.desc("bytes"), "key")),
            base=base,
        )
    finally:
        sized.unpersist()


def _sizing(
    settings: Settings, schema: Any, keyspace: Keyspace
) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Return a function for ``mapInArrow`` that turns batches of rows into batches with the columns
    of ``SIZED``.
    """
    from koinon.spark.writing.rows import lifetimes_of, limits_of

    plan, options = settings.plan(schema), settings.write_options()
    limits, lifetimes = limits_of(plan, options, keyspace), lifetimes_of(options, keyspace)

    def sized(batches: Iterator[Any]) -> Iterator[Any]:
        known = partitioner_of(keyspace)
        for batch in batches:
            yield _sized(batch, plan, options, limits, lifetimes, known)

    return sized


def _sized(
    batch: Any,
    plan: RowPlan,
    options: WriteOptions,
    limits: Limits,
    lifetimes: Lifetimes,
    known: Partitioner,
) -> Any:
    import pyarrow as pa

    from koinon.spark.encoding import arrays
    from koinon.spark.writing.rows import encode_rows, faults_of

    keys, values = encode_rows(batch, plan, options)
    bad = np.zeros(len(batch), np.bool_)
    for fault in faults_of(batch, plan, keys, values, limits, lifetimes):
        bad[fault.rows] = True
    partition_ids = known.partitions_of_arrow(keys.fill_null(b"") if keys.null_count else keys)
    sizes = arrays.lengths_of(keys).astype(np.int64) + arrays.lengths_of(values)
    made = (keys, partition_ids.astype(np.int32), sizes, bad)
    return pa.RecordBatch.from_arrays(
        [pa.array(column) for column in made], names=["key", "partition_id", "bytes", "bad"]
    )


def _heavy(frame: Any) -> list[HeavyKey]:
    return [
        HeavyKey(key=bytes(row["key"]), rows=row["rows"], bytes=row["bytes"])
        for row in frame.limit(HEAVIEST_MAX).collect()
    ]
