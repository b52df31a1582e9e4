"""The cost of metrics: two clusters, one that is scraped, and one that counts no traffic.

    python -m bench.node.metrics_bench [--rounds 24] [--seconds 1] [--in-flight 8]

Each cluster is a coordinator and a node with 1,024 partitions, as processes of their own. Rounds of
batches of 1,000 rows (16 B keys, 100 B values) go to the two clusters in turn; their order
alternates. The first has metrics endpoints. During its rounds node and coordinator are scraped
every second, for the first time half a second after the round began. The second has no endpoint,
and does not even count traffic by partition, which nodes always do (``uncounted/``).

The bench prints rows/s, and rows per second of CPU of the node's processes. The second figure says
more if the machine does other work too. A ratio is the median over pairs of neighbouring rounds.
Then it prints what one scrape of the node takes, also in CPU. At last it sends single gets, one at
a time, while the node is scraped ten times a second and while it is not, to show how long a scrape
makes a request wait.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from bench.node.node_bench import ROWS, batches, rate
from koinon.local import LocalCluster
from koinon_proto.server.rpc import CHANNEL_OPTIONS
from koinon_proto.v1 import kv_pb2, kv_pb2_grpc

BATCHES = 200
GETS = 3_000
SCRAPES = 100
READY_TIMEOUT_S = 120.0
PATIENT = ["--lease-ms", "20000", "--session-timeout-ms", "30000", "--check-quorum-ms", "5000"]
UNCOUNTED = Path(__file__).with_name("uncounted")
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Round:
    """The figures of a round: rows per second, and rows per second of the node's CPU."""

    rows_per_s: float
    rows_per_cpu_s: float


class Bench:
    """One of the two clusters, with a client."""

    def __init__(self, cluster: LocalCluster, channel: grpc.aio.Channel) -> None:
        self.cluster = cluster
        self.stub: Any = kv_pb2_grpc.KeyValueStub(channel)

    def urls(self) -> list[str]:
        """Return the addresses of the processes' metrics, if there are any."""
        found = (self.cluster.metrics_address(name) for name in self.cluster.names)
        return [f"http://{address}/metrics" for address in found if address]

    def cpu_s(self) -> float:
        """Return the CPU seconds that the node and its writer have used."""
        pid = self.cluster.pid("n1")
        assert pid is not None
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii").split()
        return sum(map(_cpu_s, [str(pid), *children]))

    async def round(self, kind: str, requests: list[Any], in_flight: int, seconds: float) -> Round:
        """Run one round."""
        call = self.stub.BatchWrite if kind == "put" else self.stub.BatchGet
        async with scraped(self.urls(), 1.0):
            before = self.cpu_s()
            rows_per_s, _, _ = await rate(call, requests, in_flight, seconds)
            used_s = self.cpu_s() - before
        return Round(rows_per_s, rows_per_s * seconds / max(used_s, 1 / TICKS))


def _cpu_s(pid: str) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def scrape(url: str) -> tuple[int, float]:
    """Return (bytes, seconds) of one scrape, asked for as Prometheus does."""
    began = time.perf_counter()
    request = urllib.request.Request(url, headers={"Accept-Encoding": "gzip"})
    with urllib.request.urlopen(request) as reply:
        size = len(reply.read())
    return size, time.perf_counter() - began


@contextlib.asynccontextmanager
async def scraped(urls: list[str], every_s: float) -> AsyncIterator[None]:
    """Scrape during the block, for the first time half an interval after its beginning."""

    async def again_and_again() -> None:
        await asyncio.sleep(every_s / 2)
        while True:
            for url in urls:
                await asyncio.to_thread(scrape, url)
            await asyncio.sleep(every_s)

    task = asyncio.create_task(again_and_again())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def compare(benches: dict[str, Bench], options: argparse.Namespace) -> None:
    """Print rows/s and rows a CPU second, with metrics and without."""
    writes = batches(BATCHES, seed=1)
    reads = [
        kv_pb2.BatchGetRequest(keys=batch.keys, partition_ids=batch.partition_ids)
        for batch in writes
    ]
    for bench in benches.values():
        for batch in writes:
            await bench.stub.BatchWrite(batch)
    for kind, requests in (("put", writes), ("get", reads)):
        rounds: dict[str, list[Round]] = {"off": [], "on": []}
        for number in range(options.rounds):
            for name in ("off", "on") if number % 2 else ("on", "off"):
                bench = benches[name]
                one = await bench.round(kind, requests, options.in_flight, options.seconds)
                rounds[name].append(one)
        for what, of in (
            ("rows/s", lambda r: r.rows_per_s),
            ("rows/CPU s", lambda r: r.rows_per_cpu_s),
        ):
            _print_ratio(kind, what, rounds, of)


def _print_ratio(
    kind: str, what: str, rounds: dict[str, list[Round]], of: Callable[[Round], float]
) -> None:
    off, on = (list(map(of, rounds[name])) for name in ("off", "on"))
    ratios = sorted(b / a for a, b in zip(off, on, strict=True))
    low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
    print(
        f"{kind} {what:<11} off {statistics.median(off):>10,.0f}   "
        f"on {statistics.median(on):>10,.0f}   on/off {statistics.median(ratios):.3f}   "
        f"(half of the pairs: {low:.3f} to {high:.3f})",
        flush=True,
    )


def one_scrape(bench: Bench) -> None:
    """Print what a scrape of the node takes."""
    idle_s = _used(bench, lambda: time.sleep(0.05))
    url = bench.urls()[-1]
    found: list[tuple[int, float]] = []

    def again() -> None:
        found.append(scrape(url))
        time.sleep(max(0.0, 0.05 - found[-1][1]))

    busy_s = _used(bench, again)
    print(
        f"a scrape of the node: {found[-1][0]:,} B gzipped, "
        f"{statistics.median(seconds for _, seconds in found) * 1e3:.1f} ms (median), "
        f"{(busy_s - idle_s) / SCRAPES * 1e3:.1f} ms of CPU"
    )


def _used(bench: Bench, work: Callable[[], None]) -> float:
    before = bench.cpu_s()
    for _ in range(SCRAPES):
        work()
    return bench.cpu_s() - before


async def waits(bench: Bench) -> None:
    """Print how long single gets take, with and without scrapes."""
    request = kv_pb2.GetRequest(key=b"nobody")
    for name, urls in (("not scraped", []), ("scraped 10/s", bench.urls()[-1:])):
        taken = []
        async with scraped(urls, 0.1):
            for _ in range(GETS):
                began = time.perf_counter()
                await bench.stub.Get(request)
                taken.append((time.perf_counter() - began) * 1e3)
        taken.sort()
        print(
            f"get of one row, {name:<12}   median {taken[GETS // 2]:.2f} ms   "
            f"99 % {taken[GETS * 99 // 100]:.2f} ms   worst {taken[-1]:.2f} ms"
        )


@contextlib.contextmanager
def _path(folder: Path | None) -> Iterator[None]:
    """Make processes that start in the block look for modules in the folder first."""
    before = os.environ.get("PYTHONPATH")
    if folder is not None:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), before]))
    try:
        yield
    finally:
        if folder is not None:
            os.environ.pop("PYTHONPATH")
            if before is not None:
                os.environ["PYTHONPATH"] = before


@contextlib.contextmanager
def clusters() -> Iterator[dict[str, LocalCluster]]:
    """Run both."""
    with contextlib.ExitStack() as running:
        made = {}
        for name in ("off", "on"):
            made[name] = one = LocalCluster(
                nodes=1, coordinators=1, metrics=name == "on", coordinator_flags=PATIENT
            )
            running.callback(one.close)
            with _path(UNCOUNTED if name == "off" else None):
                one.start()
            one.wait_ready(READY_TIMEOUT_S)
        yield made


async def run(made: dict[str, LocalCluster], options: argparse.Namespace) -> None:
    """Print all figures."""
    async with contextlib.AsyncExitStack() as opened:
        benches = {}
        for name, cluster in made.items():
            channel = grpc.aio.insecure_channel(cluster.address("n1"), options=CHANNEL_OPTIONS)
            benches[name] = Bench(cluster, await opened.enter_async_context(channel))
        await compare(benches, options)
        await asyncio.to_thread(one_scrape, benches["on"])
        await waits(benches["on"])


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=24, help="of each kind and cluster")
    parser.add_argument("--seconds", type=float, default=1.0, help="that a round takes")
    parser.add_argument("--in-flight", type=int, default=8)
    options = parser.parse_args()
    print(f"batches of {ROWS:,} rows, {options.rounds} pairs of rounds")
    with clusters() as made:
        asyncio.run(run(made, options))


if __name__ == "__main__":
    main()
