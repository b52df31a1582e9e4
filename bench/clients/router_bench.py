"""Prints what routers cost beside ``whole``, and what a scan of one partition gains.

python -m bench.clients.router_bench

Hashing alone: batches of 1,000 keys as lists and as Arrow columns. End to end: batches of 1,000
rows put and got by the client, and chunks built as Spark's tasks build them. The scan: 100 rows by
a prefix, of 1,024 partitions and of the one that the prefix leads to.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import numpy as np
import pyarrow as pa

from koinon.client import Client
from koinon.local import LocalCluster
from koinon.spark.writing.chunking import Batcher
from koinon_proto.partitioner import partitioner

ROUTERS = ("whole", "until:2f", "h3:3", "tag", "first:8")
ROWS = 1_000
CHUNK_ROWS = 200_000
BATCHES = 120
SCANS = 40
VALUE = b"v" * 100


def keys_of(router: str, rows: int, seed: int = 0) -> list[bytes]:
    """Return keys as the router is for: of one length each, so that what is hashed differs only."""
    rng = np.random.default_rng(seed)
    drawn = rng.integers(0, 1 << 24, (rows, 2))
    if router.startswith("h3"):
        digits = drawn[:, 1] % 7 << 42 | drawn[:, 0] // 122 % 7 << 39 | drawn[:, 1] // 7 % 7 << 36
        cells = 0x0830000000000000 | (drawn[:, 0] % 122) << 45 | digits | 0xFFFFFFFFF
        heads = [int(cell).to_bytes(8, "big") for cell in cells]
        return [head + b"/%08d" % n for head, n in zip(heads, drawn[:, 1], strict=True)]
    if router == "tag":
        return [b"{%07d}%08d" % (a % 100_000, b) for a, b in drawn]
    return [b"%08d/%08d" % (a % 100_000, b) for a, b in drawn]


def seconds(work: Callable[[], object], times: int) -> float:
    """Return the median of so many runs."""
    spans = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        spans.append(time.perf_counter() - began)
    return statistics.median(spans)


def hashing() -> None:
    print(f"{'us for 1,000 keys':>20} {'list':>8} {'Arrow':>8}")
    for router in ROUTERS:
        p = partitioner(f"murmur2({router})", 1024)
        keys = keys_of(router, ROWS)
        column = pa.array(keys, pa.binary())
        figures = (
            seconds(partial(p.partitions_of, keys), 300),
            seconds(partial(p.partitions_of_arrow, column), 300),
        )
        print(f"{router:>20} " + " ".join(f"{1e6 * f:8.0f}" for f in figures))


def chunks_of(router: str) -> None:
    """Cut chunks of many rows, as a task of a load does."""
    keys = pa.array(keys_of(router, CHUNK_ROWS), pa.binary())
    values = pa.array([VALUE] * CHUNK_ROWS, pa.binary())
    known = partitioner(f"murmur2({router})", 1024)

    def work() -> None:
        batcher = Batcher(known, memory_bytes=1 << 30, expires_at_ms=0)
        batcher.add(keys, values, None)
        for _ in batcher.chunks():
            pass

    rate = CHUNK_ROWS / min(seconds(work, 1) for _ in range(9))
    print(f"{router:>20} chunks built   {rate:12,.0f} rows/s")


def end_to_end() -> None:
    """Put and get batches with each router in turn, so that all meet the same moments of the
    machine; then scan by a prefix in turn.
    """
    routers = ("whole", "until:2f", "h3:3")
    with ExitStack() as stack:
        clients = {}
        for router in routers:
            cluster = stack.enter_context(LocalCluster(coordinators=1, router=router))
            clients[router] = stack.enter_context(cluster.client())
        puts: dict[str, list[float]] = {router: [] for router in routers}
        gets: dict[str, list[float]] = {router: [] for router in routers}
        for seed in range(BATCHES):
            for router, client in clients.items():
                keys = keys_of(router, ROWS, seed)
                rows = dict.fromkeys(keys, VALUE)
                puts[router].append(seconds(partial(client.put_many, rows), 1))
                gets[router].append(seconds(partial(client.get_many, keys), 1))
        for router in routers:
            _tell(router, puts, gets)
        scans({router: clients[router] for router in routers[:2]})


def _tell(router: str, puts: dict[str, list[float]], gets: dict[str, list[float]]) -> None:
    """Print rows a second, the fastest of all batches; and how they compare with ``whole``: the
    median over pairs that followed on one another.
    """
    figures = []
    for name, spans in (("put", puts), ("get", gets)):
        pairs = zip(spans["whole"], spans[router], strict=True)
        ratio = statistics.median(whole / own for whole, own in pairs)
        figures.append(f"{name} {ROWS / min(spans[router]):12,.0f} rows/s, {ratio:.2f} of whole")
    print(f"{router:>20} {'  '.join(figures)}")


def _scan(client: Client) -> None:
    assert len(list(client.scan(prefix=b"city/"))) == 100


def scans(clients: dict[str, Client]) -> None:
    """Scan 100 rows by a prefix, among 200,000 others."""
    spans: dict[str, list[float]] = {router: [] for router in clients}
    for client in clients.values():
        client.put_many((b"fill%d/%d" % (n % 9_973, n), VALUE) for n in range(200_000))
        client.put_many({b"city/%03d" % n: VALUE for n in range(100)})
    for turn in range(5 + SCANS):
        for router, client in clients.items():
            span = seconds(partial(_scan, client), 1)
            spans[router] += [span] if turn >= 5 else []
    for router, own in spans.items():
        pairs = zip(spans["whole"], own, strict=True)
        times = statistics.median(whole / one for whole, one in pairs)
        print(
            f"{router:>20} scan of 100 rows by a prefix {1e3 * statistics.median(own):8.2f} ms, "
            f"{times:.1f} times as fast as whole"
        )


def main() -> None:
    hashing()
    for router in ROUTERS:
        chunks_of(router)
    end_to_end()


if __name__ == "__main__":
    main()
