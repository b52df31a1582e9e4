"""Benchmarks of many partitions: failover, return and start of clusters with few and with many."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from typing import Any

import grpc

from bench.failures import count_events, log_sizes
from bench.figures import Aim, Figure
from bench.measuring import cpu_s
from koinon import aio
from koinon.local import LocalCluster
from koinon_proto.contract.table import NodeId, Table
from koinon_proto.partitioner import partitioner_of
from koinon_proto.v1 import table_pb2, table_pb2_grpc

PARTITIONS, PER_KEYSPACE = 1_024, 64
LED_BY_ONE = 16_384  # in ``start``
NODES = 3
PROBES, PROBED_KEYSPACES = 1_024, 16
PROBE_TIMEOUT_MS = 60_000
READY_S = 180.0
QUIET_S = 2.0
SAMPLES = 10
FEW, MANY = "1,024 partitions", "13,824 partitions"
AIMS = tuple(
    Aim(row, MANY, 1.5, (row, FEW), at_most=True)
    for row in ("writes everywhere after", "start of all")
)


def failover(*, keyspaces: tuple[int, ...] = (0, 200), runs: int = 3) -> Iterator[Figure]:
    """Measure failover, return and start with 1,024 partitions, and with 200 more keyspaces.

    A node of three is killed; the figures are seconds until every partition has a primary that
    serves it, and until one key of each of 1,024 partitions accepts a write. Then the node returns.
    Nothing else fails, so each campaign and each lost lease is a mistake.
    """
    for count in keyspaces:
        with LocalCluster(nodes=NODES, coordinators=3) as cluster, asyncio.Runner() as runner:
            figures = _all_figures(cluster, count, runs)
            while (figure := runner.run(_next(figures))) is not None:
                yield figure


async def _next(figures: AsyncGenerator[Figure, None]) -> Figure | None:
    return await anext(figures, None)


def start(*, runs: int = 3) -> Iterator[Figure]:
    """Measure seconds and CPU until a node that leads 16,384 partitions serves them all again."""
    with LocalCluster(nodes=1, coordinators=1) as cluster:
        for seconds, used in asyncio.run(_starts(cluster, runs)):
            yield Figure("start of a node", f"{LED_BY_ONE:,} partitions", seconds, "s")
            yield Figure("its CPU till then", f"{LED_BY_ONE:,} partitions", used, "s")


async def _all_figures(
    cluster: LocalCluster, keyspaces: int, runs: int
) -> AsyncGenerator[Figure, None]:
    with cluster.admin(timeout_ms=30_000) as admin:
        for n in range(keyspaces):
            await asyncio.to_thread(admin.keyspaces.create, f"k{n}", partition_count=PER_KEYSPACE)
    await _watched(cluster, _in_sync)
    begin, table = log_sizes(cluster), _table(cluster)
    column = f"{len(table.used_rows):,} partitions"
    for pushed in await _pushes(cluster):
        yield Figure("push of a change", column, pushed, "ms")
    for _ in range(SAMPLES):
        began = time.monotonic()
        async with await aio.connect(cluster.coordinators):
            yield Figure("table of a new client", column, 1000 * (time.monotonic() - began), "ms")
    async with await aio.connect(cluster.coordinators) as client:
        write_all = await _writes(client, table)
        for index in range(runs):
            victim = cluster.node_names[index % NODES]
            for row, seconds in (await _fail_over(cluster, write_all, victim)).items():
                yield Figure(row, column, seconds, "s")
    for event, count in count_events(cluster, begin).items():
        yield Figure(f"log lines of {event}", column, count)
    await _watched(cluster, _in_sync)
    epochs = _epochs(_table(cluster))
    await asyncio.to_thread(cluster.stop)
    began = time.monotonic()
    await asyncio.to_thread(cluster.start)
    yield Figure("start of all", column, await _watched(cluster, _in_sync, epochs) - began, "s")


async def _writes(client: aio.AsyncClient, table: Table) -> Callable[[], Any]:
    """Return a function that writes one key to each of ``PROBES`` partitions, spread over all."""
    every = list(table.keyspaces)
    chosen = every[:: max(1, len(every) // PROBED_KEYSPACES)]
    targets: list[tuple[Any, bytes]] = []
    for keyspace in chosen:
        opened = await client.keyspace(keyspace.name)
        partition_of = partitioner_of(keyspace).partition_of
        keys: dict[int, bytes] = {}
        number = 0
        while len(keys) < min(PROBES // len(chosen), keyspace.partition_count):
            key = b"probe/%d" % number
            keys.setdefault(partition_of(key), key)
            number += 1
        targets += [(opened, key) for key in keys.values()]

    async def write_all() -> None:
        options: dict[str, Any] = {"retry_unknown": True, "timeout_ms": PROBE_TIMEOUT_MS}
        await asyncio.gather(*(opened.put(key, b"", **options) for opened, key in targets))

    return write_all


async def _fail_over(
    cluster: LocalCluster, write_all: Callable[[], Any], victim: str
) -> dict[str, float]:
    """Kill the node, and start it again; return seconds since the kill, or since the start."""
    number = next(n.number for n in _table(cluster).nodes.values() if n.node_id == victim)
    status = table_pb2.PARTITION_STATUS_ONLINE
    await write_all()
    served = asyncio.create_task(
        _watched(cluster, lambda row: row.primary != number and row.status == status)
    )
    await asyncio.sleep(QUIET_S)
    await asyncio.to_thread(cluster.kill, victim)
    killed_at = time.monotonic()
    await write_all()
    written_at, served_at = time.monotonic(), await served
    await asyncio.sleep(QUIET_S)
    began = time.monotonic()
    cluster.restart(victim)
    return {
        "served everywhere after": served_at - killed_at,
        "writes everywhere after": written_at - killed_at,
        "return of the node": await _watched(cluster, _in_sync) - began,
    }


async def _watched(
    cluster: LocalCluster,
    is_done: Callable[[Any], bool],
    epochs_before: Mapping[NodeId, int] | None = None,
) -> float:
    """Follow the leader's table until every row meets the condition, and every node has registered
    with a later epoch than in ``epochs_before``; return the time by ``time.monotonic``. Only
    changed rows are checked: repeated requests for the whole table would take CPU from the servers.
    """
    undone: set[int] = set()
    epochs: dict[NodeId, int] = {}
    async with asyncio.timeout(READY_S):
        while True:
            name = cluster.leader() or cluster.coordinator_names[0]
            # the leader is about to start, or has ended
            with contextlib.suppress(grpc.aio.AioRpcError):
                async with grpc.aio.insecure_channel(cluster.address(name)) as channel:
                    stub: Any = table_pb2_grpc.TableServiceStub(channel)
                    async for update in stub.WatchTable(table_pb2.GetTableRequest()):
                        for row in update.rows:
                            (undone.discard if is_done(row) else undone.add)(row.partition_id)
                        epochs |= {NodeId(n.node_id): n.node_epoch for n in update.nodes}
                        before = (epochs_before or {}).items()
                        if not undone and all(epochs[node] > epoch for node, epoch in before):
                            return time.monotonic()
            await asyncio.sleep(0.05)


def _in_sync(row: Any) -> bool:
    online: bool = row.status == table_pb2.PARTITION_STATUS_ONLINE
    return online and len(row.in_sync) == len(row.replicas)


async def _pushes(cluster: LocalCluster) -> list[float]:
    """Return the milliseconds from changes of the table until watchers of all members have them."""
    table = _table(cluster)
    request = table_pb2.GetTableRequest(
        cluster_id=table.cluster.cluster_id, known_version=table.table_version
    )
    async with contextlib.AsyncExitStack() as stack:
        watches = []
        for name in cluster.coordinator_names:
            opened = grpc.aio.insecure_channel(cluster.address(name))
            stub: Any = table_pb2_grpc.TableServiceStub(await stack.enter_async_context(opened))
            watches.append(stub.WatchTable(request))
        await asyncio.gather(*(watch.read() for watch in watches))
        pushed = []
        with cluster.admin() as admin:
            for number in range(SAMPLES):
                await asyncio.sleep(0.1)
                began = time.monotonic()
                change = asyncio.to_thread(admin.set_moves, bytes_per_second=(number + 1) << 20)
                await asyncio.gather(change, *(watch.read() for watch in watches))
                pushed.append(1000 * (time.monotonic() - began))
            await asyncio.to_thread(admin.set_moves, bytes_per_second=0)
    return pushed


async def _starts(cluster: LocalCluster, runs: int) -> list[tuple[float, float]]:
    (node,) = cluster.node_names
    with cluster.admin(timeout_ms=30_000) as admin:
        partitions = LED_BY_ONE - PARTITIONS
        await asyncio.to_thread(admin.keyspaces.create, "large", partition_count=partitions)
    await _watched(cluster, _in_sync)
    found = []
    for _ in range(runs):
        epochs = _epochs(_table(cluster))
        await asyncio.to_thread(cluster.terminate, node)
        began = time.monotonic()
        cluster.restart(node)
        seconds = await _watched(cluster, _in_sync, epochs) - began
        found.append((seconds, cpu_s([cluster.pid(node) or 0])))
    return found


def _epochs(table: Table) -> dict[NodeId, int]:
    return {info.node_id: info.node_epoch for info in table.nodes.values()}


def _table(cluster: LocalCluster) -> Table:
    table = cluster.status().table
    assert table is not None
    return table
