"""The connections of this process's server, by the names that gRPC gives peers."""

from __future__ import annotations

import ipaddress
import os
import socket
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote

_KEEPALIVE_IDLE_S, _KEEPALIVE_INTERVAL_S, _KEEPALIVE_PROBES = 60, 10, 3

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@lru_cache(maxsize=16_384)
def host_of(peer: str) -> str:
    """Return the host of a peer: ``ipv4:10.0.0.7:5123`` is of ``10.0.0.7``, one of IPv6 of its /64.
    What is not understood is a host of its own.
    """
    found = _address_and_port(peer)
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


def close_connection(peer: str) -> bool:
    """Close the connection with the peer, whatever is under way on it: grpc.aio has no way to end a
    call whose answer is not taken. Returns False where there is none, or no ``/proc``.
    """
    wanted = _address_and_port(peer)
    try:
        descriptors = [entry.name for entry in Path("/proc/self/fd").iterdir()]
    except OSError:
        return False
    for name in descriptors:
        try:
            with socket.socket(fileno=os.dup(int(name))) as found:
                host, port = found.getpeername()[:2]
                if wanted is not None and (_plain(host), port) == wanted:
                    found.shutdown(socket.SHUT_RDWR)
                    return True
        except (OSError, ValueError):  # no socket, not connected, closed meanwhile, or of a file
            continue
    return False


def _address_and_port(peer: str) -> tuple[Address, int] | None:
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
