"""Benchmarks of hashing keys in every form, and of the cost and gain of routers."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from bench.figures import Figure
from bench.measuring import PARTITIONS, VALUE, seconds_of
from koinon.client import Client
from koinon.local import LocalCluster, Setup
from koinon_proto.partitioner import PARTITIONERS, partitioner

LENGTHS = {"16 bytes": (16, 16), "41 bytes": (41, 41), "8-64 bytes": (8, 64)}
ROUTERS = ("whole", "until:2f", "h3:3", "tag", "first:8")
ROWS = 1_000
CHUNK_ROWS = 200_000


def measure(*, keys: int = 1_000_000) -> Iterator[Figure]:
    """Measure keys hashed a second on one core: Arrow column, list, single keys, a load."""
    mixed = random.Random(1)
    for name in PARTITIONERS:
        p = partitioner(name, PARTITIONS)
        rows = keys if name == "murmur2" else keys // 10
        for title, (least, most) in LENGTHS.items():
            column = [os.urandom(mixed.randint(least, most)) for _ in range(rows)]
            few, array = column[:20_000], pa.array(column, pa.binary())
            works: dict[str, tuple[Callable[[], object], int]] = {
                "Arrow": (partial(p.partitions_of_arrow, array), rows),
                "list": (partial(p.partitions_of, column), rows),
                "one by one": (partial(_one_by_one, p, few), len(few)),
            }
            for form, (work, count) in works.items():
                rate = count / min(seconds_of(work, 5))
                yield Figure(f"{name}, {title}", form, rate / 1e6, "million/s")
    for router in ROUTERS:
        p = partitioner(f"murmur2({router})", PARTITIONS)
        drawn = keys_of(router, ROWS)
        column = pa.array(drawn, pa.binary())
        for form, call in (
            ("list", partial(p.partitions_of, drawn)),
            ("Arrow", partial(p.partitions_of_arrow, column)),
        ):
            spans = sorted(seconds_of(call, 300))
            yield Figure(f"router {router}, 1,000 keys", form, 1e6 * spans[150], "us")
        yield Figure(f"router {router}, chunks", "Arrow", _chunk_rate(router), "rows/s")


def _one_by_one(p: Any, keys: list[bytes]) -> None:
    for key in keys:
        p.partition_of(key)


def keys_of(router: str, rows: int, seed: int = 0) -> list[bytes]:
    """Return keys that fit the router, all of one length, so that only the hashed part differs."""
    drawn = np.random.default_rng(seed).integers(0, 1 << 24, (rows, 2))
    if router.startswith("h3"):
        digits = drawn[:, 1] % 7 << 42 | drawn[:, 0] // 122 % 7 << 39 | drawn[:, 1] // 7 % 7 << 36
        cells = 0x0830000000000000 | (drawn[:, 0] % 122) << 45 | digits | 0xFFFFFFFFF
        heads = [int(cell).to_bytes(8, "big") for cell in cells]
        return [head + b"/%08d" % n for head, n in zip(heads, drawn[:, 1], strict=True)]
    if router == "tag":
        return [b"{%07d}%08d" % (a % 100_000, b) for a, b in drawn]
    return [b"%08d/%08d" % (a % 100_000, b) for a, b in drawn]


def _chunk_rate(router: str) -> float:
    """Return the rows a second at which a load's task cuts chunks."""
    from koinon.spark.writing.chunking import Batcher

    keys = pa.array(keys_of(router, CHUNK_ROWS), pa.binary())
    values = pa.array([VALUE] * CHUNK_ROWS, pa.binary())
    known = partitioner(f"murmur2({router})", PARTITIONS)

    def work() -> None:
        batcher = Batcher(known, memory_bytes=1 << 30, expires_at_ms=0)
        batcher.add(keys, values, None)
        for _ in batcher.chunks():
            pass

    return CHUNK_ROWS / min(seconds_of(work, 9))


def routers(*, batches: int = 120, scans: int = 40) -> Iterator[Figure]:
    """Measure batches of 1,000 rows and a scan by prefix on clusters with different routers."""
    names = ("whole", "until:2f", "h3:3")
    with ExitStack() as stack:
        clients: dict[str, Client] = {}
        for router in names:
            cluster = stack.enter_context(LocalCluster(coordinators=1, setup=Setup(router=router)))
            clients[router] = stack.enter_context(cluster.client())
        for seed in range(batches):
            for router, client in clients.items():
                keys = keys_of(router, ROWS, seed)
                put = partial(client.put_many, dict.fromkeys(keys, VALUE))
                yield Figure("put", router, ROWS / seconds_of(put)[0], "rows/s")
                get = partial(client.get_many, keys)
                yield Figure("get", router, ROWS / seconds_of(get)[0], "rows/s")
        for router in names[:2]:
            client = clients[router]
            client.put_many((b"fill%d/%d" % (n % 9_973, n), VALUE) for n in range(CHUNK_ROWS))
            client.put_many({b"city/%03d" % n: VALUE for n in range(100)})
        for _ in range(scans):
            for router in names[:2]:
                span = seconds_of(partial(_scan, clients[router]))[0]
                yield Figure("scan of 100 rows by a prefix", router, 1e3 * span, "ms")


def _scan(client: Client) -> None:
    assert len(list(client.scan(prefix=b"city/"))) == 100
