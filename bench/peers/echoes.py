"""Servers that answer every request with the same 100 bytes, and their callers: a floor for
clients.

``hiredis``: a server of hiredis on an ``asyncio.Protocol``, and a blocking socket; ``grpc.aio``: a
server of grpc.aio, and a blocking channel. Each server is a process of its own.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import hiredis
import uvloop

from bench.measuring import VALUE

METHOD = "/bench.Echo/Get"
KINDS = ("hiredis", "grpc.aio")
REQUEST = b"*2\r\n$3\r\nGET\r\n$16\r\nuser000000000001\r\n"


def rate(kind: str, seconds: float) -> float:
    """Return the answers a second that one caller gets."""
    command = [sys.executable, "-m", "bench.peers.echoes", kind]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        with (_asking_redis if kind == "hiredis" else _asking_grpc)(port) as call:
            for _ in range(200):
                call()
            began, calls = time.perf_counter(), 0
            while (took := time.perf_counter() - began) < seconds:
                call()
                calls += 1
            return calls / took
    finally:
        server.kill()
        server.wait()


@contextmanager
def _asking_redis(port: int) -> Iterator[Callable[[], object]]:
    reader = hiredis.Reader()
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def call() -> None:
            connection.sendall(REQUEST)
            while (value := reader.gets()) is False:
                reader.feed(connection.recv(65_536))
            assert value == VALUE

        yield call


@contextmanager
def _asking_grpc(port: int) -> Iterator[Callable[[], object]]:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        get: Any = channel.unary_unary(METHOD)
        yield lambda: get(b"user000000000001")


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
    if kind == "hiredis":
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


if __name__ == "__main__":
    uvloop.run(_serve(sys.argv[1]))
