"""Warns at a server's start of addresses that strangers can reach."""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections.abc import Mapping

from koinon_proto.security.transport import Listening

log = logging.getLogger(__name__)


def is_loopback(address: str) -> bool:
    """Return whether only programs of this machine reach the address, ``host:port``."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:  # others may resolve it: not known here
        return False
    return all(ipaddress.ip_address(str(place[0])).is_loopback for *_, place in found)


def warn_of_strangers(listening: Listening, addresses: Mapping[str, str]) -> tuple[str, ...]:
    """Warn of each address, by its flag, at which anybody is let in ('' is none), and return it."""
    found = []
    for flag, address in addresses.items() if listening.takes_plain else ():
        if address and not is_loopback(address):
            found.append(address)
            log.warning(
                "NO SECURITY: whoever reaches this address may read, change and delete everything; "
                "docs/security.md says how to turn TLS on flag=%s address=%s tls=%s",
                flag,
                address,
                listening.mode,
            )
    return tuple(found)
