"""Encodes the rows of a record batch for a write: keys, values, and their limits."""

from __future__ import annotations

import time
from typing import Any

import pyarrow.compute as pc

from koinon.spark.encoding import arrays
from koinon.spark.encoding.faults import Fault, Limits, find_faults
from koinon.spark.encoding.keys import encode_keys
from koinon.spark.encoding.values import ENCODERS, encode_column
from koinon.spark.options import WriteOptions
from koinon.spark.writing.lifetimes import Lifetimes, deletes_of
from koinon.spark.writing.planning import RowPlan
from koinon_proto.contract import arrow
from koinon_proto.contract.keyspaces import Keyspace
from koinon_proto.contract.table import MAX_TTL_MS


def encode_rows(batch: Any, plan: RowPlan, options: WriteOptions) -> tuple[Any, Any]:
    """Encode the keys and the values as ``binary`` arrays, null where the column is null. Values of
    rows that delete their keys are empty.
    """
    keys = encode_keys([batch.column(at) for at in plan.key_columns], options.key_encoding)
    if plan.value_column >= 0:
        values = encode_column(batch.column(plan.value_column), plan.value_name)
    else:
        values = ENCODERS[options.value_encoding](batch.select(plan.stored))
    if (deleted := deletes_of(batch, plan)) is not None:
        values = pc.if_else(arrow.truths(deleted), arrays.EMPTY, values)
    return keys, values


def faults_of(
    batch: Any, plan: RowPlan, keys: Any, values: Any, limits: Limits, lifetimes: Lifetimes
) -> list[Fault]:
    """Return the faults of a record batch with these keys and values."""
    malformed = None
    if plan.malformed_column >= 0:
        malformed = arrow.truths_of(batch.column(plan.malformed_column).is_valid())
    return find_faults(
        keys,
        values,
        limits,
        batch.select(plan.stored) if plan.value_column < 0 else None,
        malformed=malformed,
        deleted=deletes_of(batch, plan),
        others=lifetimes.faults_of(batch, plan),
    )


def limits_of(plan: RowPlan, options: WriteOptions, keyspace: Keyspace) -> Limits:
    """Return the limits of the rows of a write to this keyspace."""
    return Limits(
        key_name=plan.key_name,
        value_name=plan.value_name,
        max_value_bytes=keyspace.max_value_bytes,
        prefix=options.prefix,
    )


def lifetimes_of(options: WriteOptions, keyspace: Keyspace) -> Lifetimes:
    """Return the expiry rules for the rows of a task that begins now, in this keyspace."""
    now_ms = time.time_ns() // 1_000_000
    return Lifetimes(
        now_ms=now_ms,
        unnamed_ms=now_ms + options.ttl_ms if options.ttl_ms else 0,
        max_ttl_ms=keyspace.max_ttl_ms or MAX_TTL_MS,
    )
