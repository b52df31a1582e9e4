"""The reasons why no address takes a connection. gRPC gives them in words alone, so this module
connects itself to find them.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Sequence
from typing import NamedTuple

from koinon_proto.contract.errors import NobodyListensError, NotSentError, UnknownHostError
from koinon_proto.security.names import ANY_SERVER
from koinon_proto.security.transport import BUNDLE_VARIABLE, PLAIN, Dialing

_PROBE_S_MAX = 1.0
_TALK_S_MAX = 0.5
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"  # and no settings
_TLS_ALERT = b"\x15"
_NO_GRPC = "no gRPC server answers"
_SPEAKS_TLS = (
    "it takes no plain connection: if this cluster uses TLS, give an identity file "
    f"(tls_bundle, Spark's tlsBundle, or {BUNDLE_VARIABLE})"
)
_SPEAKS_PLAIN = "it does not speak TLS: is this cluster without it?"


class Finding(NamedTuple):
    """The result of a look at one address."""

    address: str
    said: str
    refused: bool = False
    unknown: bool = False
    """The host has no address."""


async def look(address: str, dialing: Dialing = PLAIN) -> Finding:
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
                        return Finding(address, await _talk(probe, dialing))
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


async def _talk(probe: socket.socket, dialing: Dialing) -> str:
    """Say what is wrong with a server that takes connections."""
    loop = asyncio.get_running_loop()
    context = dialing.context("h2")
    if context is None:
        await loop.sock_sendall(probe, _PREFACE)
        try:
            async with asyncio.timeout(_TALK_S_MAX):
                answer = await loop.sock_recv(probe, 1)
        except TimeoutError:
            return _NO_GRPC
        return _SPEAKS_TLS if answer in (b"", _TLS_ALERT) else _NO_GRPC
    try:
        _, writer = await asyncio.open_connection(
            sock=probe.dup(), ssl=context, server_hostname=ANY_SERVER
        )
    except ssl.SSLCertVerificationError as error:
        return f"its certificate is refused: {error.verify_message}"
    except ssl.SSLError as error:
        plain = error.reason == "WRONG_VERSION_NUMBER"
        return _SPEAKS_PLAIN if plain else f"no TLS connection: {error.reason or error}"
    except ConnectionError:
        return "no TLS connection: it was closed"
    writer.close()
    return "it refuses this certificate, or no gRPC server answers"


async def why_unreachable(addresses: Sequence[str], dialing: Dialing = PLAIN) -> NotSentError:
    """Return what keeps a client from every one of the addresses: ``NobodyListensError`` or
    ``UnknownHostError`` where waiting would not help, else a ``NotSentError`` in words.
    """
    findings = await asyncio.gather(
        *[look(address, dialing) for address in dict.fromkeys(addresses)]
    )
    reason = "; ".join(f"{finding.address}: {finding.said}" for finding in findings)
    if all(finding.unknown for finding in findings):
        return UnknownHostError(reason=reason)
    if all(finding.unknown or finding.refused for finding in findings):
        return NobodyListensError(reason=reason)
    return NotSentError(reason=reason)
