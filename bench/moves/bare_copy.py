"""The least cost of moving partitions: scan LMDB, send over loopback gRPC, append to LMDB.

There are two processes, as with two nodes. One sends pages of 1 MiB of columns on one stream. The
other puts them in key order with ``append``, and commits every 16 MiB with one fsync, as a node
does. Both keep freed memory as nodes do.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import lmdb

from koinon_node.store_config import KEPT_BYTES
from koinon_proto.process.memory import keep_freed
from koinon_proto.server.rpc import COMMON_OPTIONS
from koinon_proto.v1 import replication_pb2

PAGE_BYTES = 1024 * 1024
COMMIT_BYTES = 16 * 1024 * 1024
METHOD = "/bench.BareCopy/Pages"
MAP_BYTES = 16 * 1024**3


def make_source(directory: Path, rows: int, value_bytes: int) -> int:
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


def copy_rate(scratch: Path, rows: int, value_bytes: int) -> float:
    """Return bytes (of keys and values) per second of one copy of ``rows`` rows."""
    source, target = scratch / "source", scratch / "target"
    source.mkdir(parents=True)
    keep_freed(KEPT_BYTES)
    target.mkdir()
    size = make_source(source, rows, value_bytes)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=_serve, args=(source, theirs), daemon=True)
    server.start()
    address = ours.recv()
    try:
        began = time.monotonic()
        _receive(address, target)
        return size / (time.monotonic() - began)
    finally:
        ours.send("stop")
        server.join(timeout=10)


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
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(name, {method: handler}),)
    )
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
        call: Any = channel.unary_stream(
            METHOD, response_deserializer=replication_pb2.RecordPage.FromString
        )
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
