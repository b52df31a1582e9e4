"""py-lmdb alone, in this process, without a server: the base for the cluster's figures."""

from __future__ import annotations

import random
import time
from pathlib import Path

import lmdb

PARTITIONS = 1024
ROWS = 1_000
GROUP_ROWS = 8_000
GROUPS = 12
VALUE_BYTES = 100


def bare_rates(directory: Path) -> tuple[float, float]:
    """Return (durable put, get) rows/s: sorted groups of 8,000 rows with one fsync each, and
    reads of 1,000 sorted keys; 16-byte keys, 100-byte values.
    """
    rng = random.Random(7)
    env = lmdb.open(str(directory), map_size=4 << 30, max_dbs=1, meminit=False)
    groups = [
        sorted((n % PARTITIONS).to_bytes(2, "big") + b"user%012d" % n for n in numbers)
        for numbers in (rng.sample(range(10**9), GROUP_ROWS) for _ in range(GROUPS))
    ]
    record = bytes(9 + VALUE_BYTES)
    started = time.perf_counter()
    for group in groups:
        with env.begin(write=True) as txn:
            txn.cursor().putmulti([(key, record) for key in group])
    put_s = time.perf_counter() - started
    started = time.perf_counter()
    for group in groups:
        for at in range(0, GROUP_ROWS, ROWS):
            with env.begin() as txn:
                txn.cursor().getmulti(group[at : at + ROWS])
    get_s = time.perf_counter() - started
    env.close()
    rows = GROUPS * GROUP_ROWS
    return rows / put_s, rows / get_s
