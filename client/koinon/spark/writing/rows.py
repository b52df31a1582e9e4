"""The rows of a record batch as a write stores them: keys and values, and their limits."""

from __future__ import annotations

from typing import Any

from koinon.spark.encoding.faults import Fault, Limits, find_faults
from koinon.spark.encoding.keys import encode_keys
from koinon.spark.encoding.values import ENCODERS, encode_column
from koinon.spark.options import WriteOptions
from koinon.spark.writing.planning import RowPlan


def encode_rows(batch: Any, plan: RowPlan, options: WriteOptions) -> tuple[Any, Any]:
    """Return the keys and the values, ``binary`` arrays with a null where the column has one."""
    keys = encode_keys([batch.column(at) for at in plan.key_columns], options.key_encoding)
    if plan.value_column >= 0:
        return keys, encode_column(batch.column(plan.value_column), plan.value_name)
    return keys, ENCODERS[options.value_encoding](batch)


def faults_of(batch: Any, plan: RowPlan, keys: Any, values: Any, limits: Limits) -> list[Fault]:
    """Return the faults of a record batch whose keys and values are these."""
    return find_faults(keys, values, limits, batch if plan.value_column < 0 else None)


def limits_of(plan: RowPlan, options: WriteOptions, max_value_bytes: int) -> Limits:
    """Return the limits of the rows of a write to a keyspace with this bound of values."""
    return Limits(
        key_name=plan.key_name,
        value_name=plan.value_name,
        max_value_bytes=max_value_bytes,
        prefix=options.prefix,
    )
