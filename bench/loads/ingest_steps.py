"""The cost of a writing task's steps, one after the other, without a cluster.

Each measurement does what the one before it does, and one step more. The rows are dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from koinon.ingest.settings import Settings
from koinon.spark.writing.planning import RowPlan
from koinon_proto.partitioner import partitioner

PARTITIONS = 1024
MEMORY_BYTES = 64 * 1024 * 1024

Batches = Iterator[Any]


def measure(frame: Any, rows: int, settings: Settings) -> dict[str, float]:
    """Return rows per second, by step, of a DataFrame that is written with these settings."""
    plan = settings.plan(frame.schema)

    def dropped(batches: Batches) -> Batches:
        for batch in batches:
            yield _nothing(batch)

    def encoded(batches: Batches) -> Batches:
        for batch in batches:
            _encode(batch, plan, settings)
            yield _nothing(batch)

    def packed(batches: Batches) -> Batches:
        from koinon.spark.writing.chunking import Batcher

        known = partitioner("murmur2", PARTITIONS)
        batcher = Batcher(known, memory_bytes=MEMORY_BYTES, expires_at_ms=0)
        for batch in batches:
            batcher.add(*_encode(batch, plan, settings), None)
            if batcher.full:
                for _chunk in batcher.chunks():
                    pass
            yield _nothing(batch)
        for _chunk in batcher.chunks():
            pass

    steps: dict[str, Callable[[Batches], Batches] | None] = {
        "read": None,
        "to Python": dropped,
        "encode": encoded,
        "hash, sort, pack": packed,
    }
    return {name: rows / _seconds(frame, step) for name, step in steps.items()}


def _seconds(frame: Any, step: Callable[[Batches], Batches] | None) -> float:
    if step is not None:
        frame = frame.mapInArrow(step, "nothing int")
    began = time.monotonic()
    frame.write.format("noop").mode("overwrite").save()
    return time.monotonic() - began


def _encode(batch: Any, plan: RowPlan, settings: Settings) -> tuple[Any, Any]:
    from koinon.spark.encoding.keys import encode_keys
    from koinon.spark.encoding.values import ENCODERS, encode_column

    keys = encode_keys([batch.column(at) for at in plan.key_columns], settings.key_encoding)
    if plan.value_column >= 0:
        return keys, encode_column(batch.column(plan.value_column), plan.value_name)
    return keys, ENCODERS[settings.encoding or ""](batch)


def _nothing(batch: Any) -> Any:
    import pyarrow as pa

    return pa.RecordBatch.from_arrays([pa.array([], pa.int32())], names=["nothing"])
