"""The expiries of rows that name their own, and the rows that delete their keys: columns as
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
    """The rules for expiries of a task's rows: times to live begin at ``now_ms``, and may not be
    longer than ``max_ttl_ms``. Rows that name none expire at ``unnamed_ms``; 0: as the keyspace
    says.
    """

    now_ms: int
    unnamed_ms: int
    max_ttl_ms: int

    def expiries_of(self, batch: Any, plan: RowPlan) -> U64Array | None:
        """Return the expiry of each row, or DELETED; None: no row says anything."""
        deleted = deletes_of(batch, plan)
        if plan.ttl_column < 0 and deleted is None:
            return None
        expiries = np.full(len(batch), self.unnamed_ms, np.uint64)
        if plan.ttl_column >= 0:
            times, named = self._times(batch.column(plan.ttl_column))
            expiries[named] = np.maximum(times, 1)[named]  # 0 would be never
        if deleted is not None:
            expiries[deleted] = DELETED
        return expiries

    def faults_of(self, batch: Any, plan: RowPlan) -> Iterator[Found]:
        """Yield the rows that would live for no time, or for too long."""
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
        """Return (when each row expires, if it names a time; whether it does). Times that are no
        good are out of range as well.
        """
        named = arrow.truths_of(column.is_valid())
        if pa.types.is_integer(column.type):
            ttls: I64Array = arrays.numbers_of(column, np.int64)
            return self.now_ms + np.clip(ttls, 0, self.max_ttl_ms + 1), named
        in_ms = column.cast(pa.timestamp("ms", column.type.tz), safe=False).view(pa.int64())
        return arrays.numbers_of(in_ms, np.int64), named


def deletes_of(batch: Any, plan: RowPlan) -> BoolArray | None:
    """Return which rows delete their keys; None: no column says so."""
    if plan.delete_column < 0:
        return None
    column = batch.column(plan.delete_column)
    truths = arrow.truths_of(column)
    return truths & arrow.truths_of(column.is_valid()) if column.null_count else truths
