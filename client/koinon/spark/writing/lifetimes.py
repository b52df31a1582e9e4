"""Expiries of rows with a time of their own, and rows that delete their keys, as columns of
numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from koinon.spark.encoding import arrays
from koinon.spark.encoding.arrays import BoolArray, I64Array, U64Array
from koinon.spark.encoding.faults import Found
from koinon.spark.writing.planning import RowPlan
from koinon_proto.contract import arrow
from koinon_proto.contract.columns import DELETED


@dataclass(frozen=True, kw_only=True)
class Lifetimes:
    """The rules for the expiries of a task's rows: times to live begin at ``now_ms`` and are
    limited by ``max_ttl_ms``. Rows without a time expire at ``unnamed_ms``; 0: the keyspace's
    default.
    """

    now_ms: int
    unnamed_ms: int
    max_ttl_ms: int

    def expiries_of(self, batch: Any, plan: RowPlan) -> U64Array | None:
        """Return the expiry of each row, or DELETED; None if no row has either."""
        deleted = deletes_of(batch, plan)
        if plan.ttl_column < 0 and deleted is None:
            return None
        expiries = np.full(len(batch), self.unnamed_ms, np.uint64)
        if plan.ttl_column >= 0:
            times, named = self._times(batch.column(plan.ttl_column))
            expiries[named] = np.maximum(times, 1)[named]  # 0 would mean never
        if deleted is not None:
            expiries[deleted] = DELETED
        return expiries

    def faults_of(self, batch: Any, plan: RowPlan) -> Iterator[Found]:
        """Yield the rows whose time to live is not positive, or too long."""
        if plan.ttl_column < 0:
            return
        column, name = batch.column(plan.ttl_column), plan.names[plan.ttl_column]
        times, named = self._times(column)
        if (deleted := deletes_of(batch, plan)) is not None:
            named &= ~deleted
        if pa.types.is_integer(column.type):
            yield named & (times <= self.now_ms), name, "time to live that is not above 0 ms"
        late = named & (times > self.now_ms + self.max_ttl_ms)
        yield late, name, f"time to live of more than {self.max_ttl_ms} ms"

    def _times(self, column: Any) -> tuple[I64Array, BoolArray]:
        """Return the expiry of each row that names a time, and a mask of these rows. Invalid times
        become out of range.
        """
        named = arrow.truths_of(column.is_valid())
        if pa.types.is_integer(column.type):
            ttls: I64Array = arrays.numbers_of(column, np.int64)
            return self.now_ms + np.clip(ttls, 0, self.max_ttl_ms + 1), named
        in_ms = column.cast(pa.timestamp("ms", column.type.tz), safe=False).view(pa.int64())
        return arrays.numbers_of(in_ms, np.int64), named


def deletes_of(batch: Any, plan: RowPlan) -> BoolArray | None:
    """Return a mask of the rows that delete their keys; None if there is no such column."""
    if plan.delete_column < 0:
        return None
    column = batch.column(plan.delete_column)
    truths = arrow.truths_of(column)
    return truths & arrow.truths_of(column.is_valid()) if column.null_count else truths
