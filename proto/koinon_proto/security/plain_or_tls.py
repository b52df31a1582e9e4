"""A port that takes plain connections and TLS ones, in front of a gRPC server that takes either at
a port of its own.

gRPC cannot tell them apart on one port. The first byte does: a TLS handshake begins with 0x16,
HTTP/2 with a letter. Connections are carried on by copying, on a thread of its own: this is for the
time in which a cluster turns TLS on, and costs it some speed.

The server sees connections from this machine. So that it still tells hosts from one another (each
has its own bounds), each is given an address of the loopback's own 2^24 by its number.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import socket
import threading
from typing import Any

_PIECE_BYTES = 256 * 1024
_FIRST_BYTE_S_MAX = 20.0
_TLS_HANDSHAKE = 0x16
BACKLOG = 1_024
_CARRIED_MAX = 8_192


def is_tls(beginning: bytes) -> bool:
    """Return whether this is the first byte of a TLS connection."""
    return beginning[:1] == bytes([_TLS_HANDSHAKE])


class PlainOrTls:
    """Listens from construction to ``close``."""

    def __init__(self, address: str, *, plain_port: int, tls_port: int) -> None:
        """Bind ``host:port``.

        Raises:
            RuntimeError: it cannot be bound.
        """
        self._ports = {False: plain_port, True: tls_port}
        self._listener = _bound(address)
        self.port: int = self._listener.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._serving: asyncio.Task[None] | None = None
        self._carried: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name="plain-or-tls", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all connections, and free the port."""
        with contextlib.suppress(RuntimeError):  # closed already
            self._loop.call_soon_threadsafe(self._cancel)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._serving = self._loop.create_task(self._serve())
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._serving)
        self._loop.close()

    def _cancel(self) -> None:
        if self._serving is not None:
            self._serving.cancel()

    async def _serve(self) -> None:
        try:
            while True:
                try:
                    sock, peer = await self._loop.sock_accept(self._listener)
                except OSError:  # no descriptors left, or the peer has gone already
                    await asyncio.sleep(0.01)
                    continue
                if len(self._carried) >= _CARRIED_MAX:
                    sock.close()
                    continue
                task = self._loop.create_task(self._carry(sock, peer[0]))
                self._carried.add(task)
                task.add_done_callback(self._carried.discard)
        finally:
            self._listener.close()
            for task in self._carried:
                task.cancel()
            await asyncio.gather(*self._carried, return_exceptions=True)

    async def _carry(self, sock: socket.socket, host: str) -> None:
        with sock, contextlib.suppress(OSError, TimeoutError):
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            async with asyncio.timeout(_FIRST_BYTE_S_MAX):
                first = await first_byte(sock)
            if not first:
                return
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as inner:
                inner.setblocking(False)
                inner.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                inner.bind((_stand_in(host), 0))
                await self._loop.sock_connect(inner, ("127.0.0.1", self._ports[is_tls(first)]))
                await self._both_ways(sock, inner)

    async def _both_ways(self, one: socket.socket, other: socket.socket) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._copy(one, other))
                group.create_task(self._copy(other, one))
        except* OSError:
            pass  # one end is gone, and so is the connection

    async def _copy(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while piece := await self._loop.sock_recv(source, _PIECE_BYTES):
                await self._loop.sock_sendall(target, piece)
        finally:
            # The end of one way is told on; after a failure, of both.
            with contextlib.suppress(OSError):
                target.shutdown(socket.SHUT_WR)


async def first_byte(sock: socket.socket) -> bytes:
    """Wait for a connection's first byte and return it, or nothing at its end. It stays unread."""
    loop = asyncio.get_running_loop()
    readable = loop.create_future()
    loop.add_reader(sock.fileno(), _done, readable)
    try:
        await readable
    finally:
        loop.remove_reader(sock.fileno())
    return sock.recv(1, socket.MSG_PEEK)


def _done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _stand_in(host: str) -> str:
    """Return the loopback address that stands for a host."""
    if host.startswith("127."):
        return host
    digest = hashlib.sha256(host.encode()).digest()
    return f"127.{digest[0]}.{digest[1]}.{1 + digest[2] % 254}"


def bound(
    family: int, kind: int, protocol: int, place: Any, *, takes_both: bool = False
) -> socket.socket:
    """Return a socket that listens at a place which ``getaddrinfo`` named, and does not block.
    ``takes_both``: one of IPv6 takes connections of IPv4 too.

    Raises:
        OSError: it cannot be bound.
    """
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not takes_both)
        listener.bind(place)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def _bound(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return bound(family, kind, protocol, place)
    except OSError as error:
        raise RuntimeError(error.strerror or str(error)) from None
