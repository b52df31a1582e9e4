"""Writes far more than a task may buffer, to nodes in this process that keep nothing, and prints
by how many bytes the process grew. Started by ``test_memory``.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from koinon.spark.encoding import arrays
from koinon.spark.writing.tasks import run_task
from tests.spark.fake_loads import LoadsCluster
from tests.spark.helpers import make_job

BATCH_ROWS, VALUE_BYTES = 1_000, 1_000


def batches(count: int) -> Iterator[Any]:
    values = arrays.from_matrix(np.zeros((BATCH_ROWS, VALUE_BYTES), np.uint8))
    for number in range(count):
        ids = np.arange(number * BATCH_ROWS, (number + 1) * BATCH_ROWS).astype(">u8")
        keys = arrays.from_matrix(ids.view(np.uint8).reshape(BATCH_ROWS, 8))
        yield pa.RecordBatch.from_pydict({"key": keys, "value": values})


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(memory_bytes: str, megabytes: str) -> None:
    fake = LoadsCluster(partitions=256)
    fake.keeps_chunks = False
    run_task(make_job(fake), 0, batches(2))  # everything is imported and connected now
    before = peak_bytes()
    report = run_task(make_job(fake, memoryBytes=memory_bytes), 0, batches(int(megabytes)))
    assert report.rows == int(megabytes) * BATCH_ROWS
    print(peak_bytes() - before)
    fake.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
