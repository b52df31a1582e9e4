"""The connections of this process's server, by the names that gRPC gives peers."""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import socket
import struct
from collections.abc import Collection, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

_KEEPALIVE_IDLE_S, _KEEPALIVE_INTERVAL_S, _KEEPALIVE_PROBES = 60, 10, 3

_TCP_INFO_BYTES = 136
_TCP_COUNTS_AT = 120  # of tcpi_bytes_acked and tcpi_bytes_received (linux/tcp.h)
_TCP_COUNTS = struct.Struct("=QQ")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Endpoint = tuple[Address, int]
"""The address and port of a peer."""


@lru_cache(maxsize=16_384)
def host_of(peer: str) -> str:
    """Return the host of a peer: ``ipv4:10.0.0.7:5123`` is of ``10.0.0.7``, one of IPv6 of its /64.
    What is not understood is a host of its own.
    """
    found = endpoint_of(peer)
    if found is None:
        return peer
    address = found[0]
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    return str(ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))


def peer_name(address: Any) -> str:
    """Return a peer's address as gRPC names it."""
    if not isinstance(address, tuple):
        return "unknown"
    host, port = address[:2]
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"


def probe_when_idle(sock: socket.socket) -> None:
    """Turn on TCP keepalive, to notice peers that are gone without a sign."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in (
        (socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_S),
        (socket.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL_S),
        (socket.TCP_KEEPCNT, _KEEPALIVE_PROBES),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, seconds)


class Received(NamedTuple):
    """The kernel's counts of a connection, in bytes."""

    bytes: int = 0
    sent_bytes: int = 0  # that the peer has acknowledged


def received_by_port(ports: Collection[int]) -> dict[Endpoint, Received]:
    """Return what each connection to these ports of this process has received; nothing without
    ``/proc``.
    """
    counted = {}
    for sock, peer in _connected():
        if sock.getsockname()[1] in ports:
            counts = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
            if len(counts) == _TCP_INFO_BYTES:
                acknowledged, received = _TCP_COUNTS.unpack_from(counts, _TCP_COUNTS_AT)
                counted[peer] = Received(received, acknowledged)
    return counted


def close_connection(peer: str) -> bool:
    """Close the connection with the peer, whatever is under way on it: grpc.aio has no way to end a
    call whose answer is not taken. Returns False where there is none, or no ``/proc``.
    """
    wanted = endpoint_of(peer)
    for sock, found in _connected():
        if found == wanted:
            sock.shutdown(socket.SHUT_RDWR)
            return True
    return False


def peeked(peers: Collection[Endpoint], most: int) -> dict[Endpoint, bytes]:
    """Return the bytes that wait in the kernel on these connections, at most so many of each."""
    found = {}
    for sock, peer in _connected():
        if peer in peers:
            with contextlib.suppress(OSError):  # nothing waits
                found[peer] = sock.recv(most, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    return found


def reset_connections(peers: Collection[Endpoint]) -> int:
    """Reset this process's connections with these peers, and drop what the kernel has received on
    them: after a ``shutdown`` gRPC would still read that, which may be 6 MB. Return their number.
    """
    libc = ctypes.CDLL(None)
    nowhere = struct.pack("=H14x", socket.AF_UNSPEC)  # connect(2) dissolves the association
    found = 0
    for sock, peer in _connected():
        if peer in peers and libc.connect(sock.fileno(), nowhere, len(nowhere)) == 0:
            found += 1
    return found


def _connected() -> Iterator[tuple[socket.socket, Endpoint]]:
    """Yield the TCP connections of this process and their peers; nothing without ``/proc``."""
    try:
        descriptors = [entry.name for entry in Path("/proc/self/fd").iterdir()]
    except OSError:
        return
    for name in descriptors:
        try:
            if not str(Path(f"/proc/self/fd/{name}").readlink()).startswith("socket:"):
                continue
            copy = os.dup(int(name))
        except OSError:  # closed meanwhile
            continue
        try:
            found = socket.socket(fileno=copy)
        except OSError:  # another thing by now
            os.close(copy)
            continue
        with found:
            try:
                host, port = found.getpeername()[:2]
                peer = _plain(host), port
            except (OSError, ValueError):  # not connected, or not by TCP
                continue
            yield found, peer


def endpoint_of(peer: str) -> Endpoint | None:
    """Return the address and port of a peer that gRPC names ``ipv4:10.0.0.7:5123``; None of what
    is no such name.
    """
    kind, _, rest = peer.partition(":")
    host, _, port = unquote(rest).rpartition(":")
    if kind not in ("ipv4", "ipv6"):
        return None
    try:
        return _plain(host.strip("[]")), int(port)
    except ValueError:
        return None


def _plain(host: str) -> Address:
    """Return the address; of IPv4 where IPv6 only carries it."""
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address
