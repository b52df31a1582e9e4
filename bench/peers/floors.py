"""Floors that no client can be faster than: bare echoes over loopback, bare LMDB, a bare sync.

    python -m bench.peers.floors [--seconds 2]

The echoes answer every request with the same 100 bytes from a Python server (a process of its own),
and read nothing: a server of hiredis on an ``asyncio.Protocol`` with a blocking socket as its
client, and one of ``grpc.aio`` with a blocking channel.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import hiredis
import uvloop

from bench.node.bare import bare_rates

VALUE = b"v" * 100
METHOD = "/bench.Echo/Get"
SYNCED_BYTES = 180  # a record of 100 bytes in the log


def measure(seconds: float) -> dict[str, float]:
    """Return operations (LMDB: rows) per second by name."""
    rates: dict[str, float] = {}
    rates["hiredis echo"] = _echo("redis", seconds, _ask_redis)
    rates["grpc.aio echo"] = _echo("grpc", seconds, _ask_grpc)
    with tempfile.TemporaryDirectory(prefix="koinon-bench-") as scratch:
        rates["py-lmdb put, 8,000 rows a sync"], rates["py-lmdb get"] = bare_rates(Path(scratch))
        rates["append and fdatasync"] = _syncs(Path(scratch) / "log", seconds)
    return rates


def _rate(call: Callable[[], object], seconds: float) -> float:
    for _ in range(200):
        call()
    began, calls = time.perf_counter(), 0
    while (took := time.perf_counter() - began) < seconds:
        call()
        calls += 1
    return calls / took


def _syncs(path: Path, seconds: float) -> float:
    record = bytes(SYNCED_BYTES)
    with path.open("wb", buffering=0) as log:

        def call() -> None:
            log.write(record)
            os.fdatasync(log.fileno())

        return _rate(call, seconds)


# --- echoes --------------------------------------------------------------------------------------


def _echo(kind: str, seconds: float, ask: Callable[[int, float], float]) -> float:
    command = [sys.executable, "-m", "bench.peers.floors", "--serve", kind]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        return ask(int(server.stdout.readline()), seconds)
    finally:
        server.kill()
        server.wait()


def _ask_redis(port: int, seconds: float) -> float:
    reader = hiredis.Reader()
    request = b"*2\r\n$3\r\nGET\r\n$16\r\nuser000000000001\r\n"
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def call() -> None:
            connection.sendall(request)
            while (value := reader.gets()) is False:
                reader.feed(connection.recv(65_536))
            assert value == VALUE

        return _rate(call, seconds)


def _ask_grpc(port: int, seconds: float) -> float:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        get: Any = channel.unary_unary(METHOD)
        return _rate(lambda: get(b"user000000000001"), seconds)


class _Redis(asyncio.Protocol):
    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._reader = hiredis.Reader()
        self._answer = b"$%d\r\n%b\r\n" % (len(VALUE), VALUE)

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        while self._reader.gets() is not False:
            self._transport.write(self._answer)


async def _serve(kind: str) -> None:
    """Print the port, and answer until standard input closes."""
    if kind == "redis":
        server = await asyncio.get_running_loop().create_server(_Redis, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
    else:

        async def get(_request: bytes, _context: Any) -> bytes:
            return VALUE

        grpc_server = grpc.aio.server()
        service, method = METHOD.strip("/").split("/")
        handler: Any = grpc.unary_unary_rpc_method_handler(get)
        handlers = grpc.method_handlers_generic_handler(service, {method: handler})
        grpc_server.add_generic_rpc_handlers((handlers,))
        port = grpc_server.add_insecure_port("127.0.0.1:0")
        await grpc_server.start()
    print(port, flush=True)
    await asyncio.to_thread(sys.stdin.read)


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", choices=("redis", "grpc"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        uvloop.run(_serve(options.serve))
        return
    rates = measure(options.seconds)
    if options.json:
        print(json.dumps(rates))
        return
    for name, rate in rates.items():
        print(f"{name:<32} {rate:>12,.0f}/s")


if __name__ == "__main__":
    main()
