"""A port of sockets whose process has no descriptor left."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import socket
from pathlib import Path

import pytest

from koinon_proto.security import sockets
from koinon_proto.security.transport import Listening


class Greeting(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        transport.write(b"hello")


def highest_descriptor() -> int:
    return max(int(one.name) for one in Path("/proc/self/fd").iterdir())


def test_connection_without_a_descriptor_is_refused_at_once_and_later_ones_are_taken(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def run() -> None:
        server, port = await sockets.serve_at_chosen("127.0.0.1:0", Greeting, Listening())
        loop = asyncio.get_running_loop()
        clients = [socket.socket() for _ in range(8)]
        for client in clients:
            client.setblocking(False)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        used = highest_descriptor() + 1
        filling = [os.open(os.devnull, os.O_RDONLY)]
        while filling[-1] < used:
            filling.append(os.open(os.devnull, os.O_RDONLY))
        resource.setrlimit(resource.RLIMIT_NOFILE, (filling[-1] + 1, hard))
        try:
            for client in clients:
                await loop.sock_connect(client, ("127.0.0.1", port))
            for client in clients:
                received = b""
                with contextlib.suppress(ConnectionError):
                    received = await asyncio.wait_for(loop.sock_recv(client, 10), 10.0)
                assert not received
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for descriptor in filling:
                os.close(descriptor)
        with socket.socket() as late:
            late.setblocking(False)
            await loop.sock_connect(late, ("127.0.0.1", port))
            assert await asyncio.wait_for(loop.sock_recv(late, 10), 10.0) == b"hello"
        for client in clients:
            client.close()
        server.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    lines = [r for r in caplog.records if "File descriptor limit reached" in r.message]
    assert 1 <= len(lines) < 10
