"""Prints how many keys per second one core hashes, in every form of keys.

python -m bench.clients.partitioner_bench
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from functools import partial

import pyarrow as pa

from koinon_proto.partitioner import PARTITIONERS, Partitioner, partitioner

ROWS = 1_000_000


def million_a_second(work: Callable[[], object], rows: int) -> float:
    """Return the best of five, in million keys/s."""
    spans = []
    for _ in range(5):
        began = time.perf_counter()
        work()
        spans.append(time.perf_counter() - began)
    return rows / min(spans) / 1e6


def one_by_one(p: Partitioner, keys: list[bytes]) -> None:
    for key in keys:
        p.partition_of(key)


def main() -> None:
    mixed = random.Random(1)
    columns = {
        "16 bytes": [os.urandom(16) for _ in range(ROWS)],
        "41 bytes": [os.urandom(41) for _ in range(ROWS)],
        "8-64 bytes": [os.urandom(mixed.randint(8, 64)) for _ in range(ROWS)],
    }
    print(f"{'million keys/s':>20} {'Arrow':>8} {'list':>8} {'1 by 1':>8}")
    for name in sorted(PARTITIONERS, reverse=True):
        p = partitioner(name, 1024)
        rows = ROWS if name == "murmur2" else ROWS // 10
        for title, column in columns.items():
            keys, few = column[:rows], column[:20_000]
            array = pa.array(keys, pa.binary())
            figures = (
                million_a_second(partial(p.partitions_of_arrow, array), rows),
                million_a_second(partial(p.partitions_of, keys), rows),
                million_a_second(partial(one_by_one, p, few), len(few)),
            )
            print(f"{name + ' ' + title:>20} " + " ".join(f"{f:8.2f}" for f in figures))


if __name__ == "__main__":
    main()
