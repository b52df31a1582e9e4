"""Why no address can be connected to. gRPC says that in words alone, so this looks itself."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Sequence
from typing import NamedTuple

from koinon_proto.contract.errors import NobodyListensError, NotSentError, UnknownHostError

_PROBE_S_MAX = 1.0


class Finding(NamedTuple):
    """What a look at one address has shown."""

    address: str
    said: str
    refused: bool = False
    unknown: bool = False
    """The host has no address."""


async def look(address: str) -> Finding:
    """Try to connect to the address: to each of its host's, until one takes the connection."""
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    failures: list[OSError] = []
    try:
        async with asyncio.timeout(_PROBE_S_MAX):
            found = await loop.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
            for family, kind, protocol, _, peer in found:
                with socket.socket(family, kind, protocol) as probe:
                    probe.setblocking(False)
                    try:
                        await loop.sock_connect(probe, peer)
                    except OSError as error:
                        failures.append(error)
                    else:
                        return Finding(address, "no gRPC server answers")
    except socket.gaierror as error:
        if error.errno == socket.EAI_AGAIN:  # the server of names does not answer, for now
            return Finding(address, f"no answer about the host ({error.strerror})")
        return Finding(address, f"unknown host ({error.strerror})", unknown=True)
    except UnicodeError:  # of a label that is empty, or longer than one may be
        return Finding(address, "unknown host (not a name that a host may have)", unknown=True)
    except TimeoutError:
        return Finding(address, "no answer")
    if all(isinstance(error, ConnectionRefusedError) for error in failures):
        return Finding(address, "connection refused", refused=True)
    others = [error for error in failures if not isinstance(error, ConnectionRefusedError)]
    return Finding(address, os.strerror(others[0].errno or 0).lower())


async def why_unreachable(addresses: Sequence[str]) -> NotSentError:
    """Return what keeps a client from every one of the addresses: ``NobodyListensError`` or
    ``UnknownHostError`` where waiting would not help, else a ``NotSentError`` in words.
    """
    findings = await asyncio.gather(*[look(address) for address in dict.fromkeys(addresses)])
    reason = "; ".join(f"{finding.address}: {finding.said}" for finding in findings)
    if all(finding.unknown for finding in findings):
        return UnknownHostError(reason=reason)
    if all(finding.unknown or finding.refused for finding in findings):
        return NobodyListensError(reason=reason)
    return NotSentError(reason=reason)
