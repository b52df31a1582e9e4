"""Benchmarks of a node that joins a loaded cluster: the speed of its moves, and the clients'
latencies.
"""

from __future__ import annotations

import multiprocessing
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import lmdb

from bench.figures import Aim, Figure
from bench.measuring import latencies, steady_clients
from koinon.local import LocalCluster
from koinon.operate.admin import Admin
from koinon.operate.plans import Plan, PlanKind, PlanRequest
from koinon_node.store_config import KEPT_BYTES
from koinon_proto.partitioner import partitioner
from koinon_proto.process.memory import keep_freed
from koinon_proto.server.rpc import COMMON_OPTIONS
from koinon_proto.v1 import replication_pb2

REBALANCE = PlanRequest(kind=PlanKind.REBALANCE)
LOAD_BATCH = 20_000  # rows; the cost of a commit depends on the pages that it changes
POLL_S = 1.0  # interval of polls: an answer about hundreds of moves costs CPU
TIMEOUT_S = 900.0
PAGE_BYTES, COMMIT_BYTES = 1 << 20, 16 << 20
MAP_BYTES = 16 << 30
METHOD = "/bench.BareCopy/Pages"
ALONE = "alone"
AIMS = (
    Aim("rebalance", ALONE, 0.5, ("bare copy", ALONE)),
    Aim("get or put p99", "during a move", 2.0, ("get or put p99", "before"), at_most=True),
)


def measure(
    *, megabytes: int = 1024, value_bytes: int = 1000, seconds: float = 15.0
) -> Iterator[Figure]:
    """Measure a rebalance to a fourth node, and a throttled one to a fifth beside clients.

    Three nodes are loaded. The first rebalance is timed without clients; a bare copy of as many
    bytes runs right before and right after it. The second one is throttled to a quarter of its
    rate. Bytes are those of keys and values.
    """
    row_bytes = value_bytes + 16
    rows = megabytes * (1 << 20) // row_bytes
    moved_rows = rows * 3 // 4  # three copies on four nodes
    with LocalCluster(nodes=3, coordinators=1) as cluster:
        _load(cluster, rows, value_bytes)
        sizes = _bytes_by_partition(cluster, rows, row_bytes)
        with Admin(cluster.coordinators, timeout_ms=10_000) as admin:
            _join(cluster)
            yield _bare_copy(moved_rows, value_bytes)
            plan = admin.plan(REBALANCE)
            began = time.monotonic()
            admin.execute(REBALANCE, plan.plan_id)
            _wait_moved(admin)
            rate = _moved(plan, sizes) / (time.monotonic() - began)
            yield Figure("rebalance", ALONE, rate / 1e6, "MB/s")
            yield _bare_copy(moved_rows, value_bytes)
            _join(cluster)
            admin.set_moves(bytes_per_second=int(rate / 4))
            yield Figure("rebalance", "throttle", rate / 4e6, "MB/s")
            yield from _beside_clients(cluster, admin, sizes, seconds)


def _key(number: int) -> bytes:
    return b"move/%011d" % number


def _load(cluster: LocalCluster, rows: int, value_bytes: int) -> None:
    fill = random.Random(7).randbytes(value_bytes)
    with cluster.client(timeout_ms=60_000) as client:
        for start in range(0, rows, LOAD_BATCH):
            numbers = range(start, min(start + LOAD_BATCH, rows))
            batch = {_key(n): b"%08d" % n + fill[8:] for n in numbers}
            client.put_many(batch, retry_unknown=True).raise_for_errors()


def _bytes_by_partition(cluster: LocalCluster, rows: int, row_bytes: int) -> dict[int, int]:
    table = cluster.status().table
    assert table is not None
    known = partitioner(table.cluster.partitioner, table.cluster.partition_count)
    counts: Counter[int] = Counter()
    for start in range(0, rows, 100_000):
        keys = [_key(n) for n in range(start, min(start + 100_000, rows))]
        counts.update(known.partitions_of(keys).tolist())
    return {partition: count * row_bytes for partition, count in counts.items()}


def _join(cluster: LocalCluster) -> None:
    """Start one more node, and wait until it is registered."""
    count = len(cluster.node_names) + 1
    cluster.add_node()
    cluster.wait_for(
        lambda s: s.table is not None and len(s.table.nodes) == count and s.ready,
        timeout_s=30,
        what="the new node has joined",
    )


def _wait_moved(admin: Admin) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while admin.moves().moves:
        assert time.monotonic() < deadline, "the moves do not end"
        time.sleep(POLL_S)


def _moved(plan: Plan, sizes: dict[int, int]) -> int:
    """Return the bytes that the plan copies."""
    return sum(len(move.added) * sizes[move.partition_id] for move in plan.moves)


def _beside_clients(
    cluster: LocalCluster, admin: Admin, sizes: dict[int, int], seconds: float
) -> Iterator[Figure]:
    with steady_clients(cluster.coordinators) as before:
        time.sleep(seconds)
    with steady_clients(cluster.coordinators) as during:
        plan, began = admin.plan(REBALANCE), time.monotonic()
        admin.execute(REBALANCE, plan.plan_id)
        _wait_moved(admin)
        took = time.monotonic() - began
    for column, spans in (("before", before), ("during a move", during)):
        yield from latencies("get or put", column, [*spans["get"], *spans["put"]])
    yield Figure("rebalance", "throttled", _moved(plan, sizes) / took / 1e6, "MB/s")


# --- a bare copy ---------------------------------------------------------------------------------


def _bare_copy(rows: int, value_bytes: int) -> Figure:
    """Scan LMDB, send pages over loopback gRPC, append to LMDB in another process, with one sync
    every 16 MiB, as two nodes do: the least cost of a move.
    """
    with tempfile.TemporaryDirectory(prefix="koinon-bench-") as scratch:
        source, target = Path(scratch) / "source", Path(scratch) / "target"
        source.mkdir()
        target.mkdir()
        keep_freed(KEPT_BYTES)
        size = _make_source(source, rows, value_bytes)
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        server = context.Process(target=_serve, args=(source, theirs), daemon=True)
        server.start()
        address = ours.recv()
        try:
            began = time.monotonic()
            _receive(address, target)
            return Figure("bare copy", ALONE, size / (time.monotonic() - began) / 1e6, "MB/s")
        finally:
            ours.send("stop")
            server.join(timeout=10)


def _make_source(directory: Path, rows: int, value_bytes: int) -> int:
    """Fill an environment with sorted rows; return the bytes of keys and values."""
    size = 0
    with lmdb.open(str(directory), map_size=MAP_BYTES, sync=False) as env:
        for start in range(0, rows, 10_000):
            numbers = range(start, min(start + 10_000, rows))
            items = [(b"%016d" % n, b"%08d" % n + bytes(value_bytes - 8)) for n in numbers]
            size += sum(len(k) + len(v) for k, v in items)
            with env.begin(write=True) as txn, txn.cursor() as cursor:
                cursor.putmulti(items, append=True)
        env.sync(True)
    return size


def _pages(env: lmdb.Environment) -> Iterator[replication_pb2.RecordPage]:
    with env.begin() as txn, txn.cursor() as cursor:
        page, size = replication_pb2.RecordPage(), 0
        for key, value in cursor:
            page.keys.append(key)
            page.records.append(value)
            size += len(key) + len(value)
            if size >= PAGE_BYTES:
                yield page
                page, size = replication_pb2.RecordPage(), 0
        yield page


def _serve(directory: Path, connection: Connection) -> None:
    keep_freed(KEPT_BYTES)
    env = lmdb.open(str(directory), map_size=MAP_BYTES, readonly=True)
    server = grpc.server(ThreadPoolExecutor(2), options=COMMON_OPTIONS)
    handler: Any = grpc.unary_stream_rpc_method_handler(
        lambda _request, _context: _pages(env),
        response_serializer=replication_pb2.RecordPage.SerializeToString,
    )
    name, method = METHOD.strip("/").split("/")
    handlers = grpc.method_handlers_generic_handler(name, {method: handler})
    server.add_generic_rpc_handlers((handlers,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    connection.send(f"127.0.0.1:{port}")
    connection.recv()
    server.stop(None)


def _receive(address: str, directory: Path) -> None:
    with (
        grpc.insecure_channel(address, options=COMMON_OPTIONS) as channel,
        lmdb.open(str(directory), map_size=MAP_BYTES) as env,
    ):
        parse = replication_pb2.RecordPage.FromString
        call: Any = channel.unary_stream(METHOD, response_deserializer=parse)
        waiting: list[tuple[bytes, bytes]] = []
        size = 0
        for page in call(b""):
            waiting += zip(page.keys, page.records, strict=True)
            size += page.ByteSize()
            if size >= COMMIT_BYTES:
                _append(env, waiting)
                waiting, size = [], 0
        _append(env, waiting)


def _append(env: lmdb.Environment, rows: list[tuple[bytes, bytes]]) -> None:
    with env.begin(write=True) as txn, txn.cursor() as cursor:
        cursor.putmulti(rows, append=True)
