"""Finds out why no address accepts a connection. gRPC gives the reason only as text, so this module
connects itself.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import time
from collections.abc import Sequence
from typing import NamedTuple

from koinon_proto.contract.errors import (
    CertificateNotValidError,
    KoinonError,
    NobodyListensError,
    NotSentError,
    UnknownHostError,
)
from koinon_proto.security.bundle import principal_in
from koinon_proto.security.names import ANY_SERVER
from koinon_proto.security.transport import BUNDLE_VARIABLE, PLAIN, Dialing
from koinon_proto.security.trust import not_valid

_PROBE_S_MAX = 1.0
_TALK_S_MAX = 0.5
# the HTTP/2 preface and an empty SETTINGS frame
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"
_TLS_ALERT = b"\x15"
_NO_GRPC = "no gRPC server answers"
_SPEAKS_TLS = (
    "it takes no plain connection: if this cluster uses TLS, give an identity file "
    f"(tls_bundle, Spark's tlsBundle, or {BUNDLE_VARIABLE})"
)
_SPEAKS_PLAIN = "it does not speak TLS: is this cluster without it?"


class Finding(NamedTuple):
    """The result of an attempt to connect to one address."""

    address: str
    said: str
    refused: bool = False
    unknown: bool = False
    """The host name has no address."""
    fault: CertificateNotValidError | None = None
    """The server's certificate has expired, or is not valid yet."""


async def probe_address(address: str, dialing: Dialing = PLAIN) -> Finding:
    """Try to connect to the address: to each of its host's, until one accepts the connection."""
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
                        said = await _talk(probe, dialing)
                        if not isinstance(said, CertificateNotValidError):
                            return Finding(address, said)
                        return Finding(address, said.reason, fault=said)
    except socket.gaierror as error:
        if error.errno == socket.EAI_AGAIN:  # the name server does not answer at the moment
            return Finding(address, f"the name server does not answer ({error.strerror})")
        return Finding(address, f"unknown host ({error.strerror})", unknown=True)
    except UnicodeError:  # of a label that is empty or too long
        return Finding(address, "unknown host (not a name that a host may have)", unknown=True)
    except TimeoutError:
        return Finding(address, "no answer")
    if all(isinstance(error, ConnectionRefusedError) for error in failures):
        return Finding(address, "connection refused", refused=True)
    others = [error for error in failures if not isinstance(error, ConnectionRefusedError)]
    return Finding(address, os.strerror(others[0].errno or 0).lower())


async def _talk(probe: socket.socket, dialing: Dialing) -> str | CertificateNotValidError:
    """Return the fault of a server that accepts connections."""
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
        fault = await _certificate_fault(probe)
        return fault or f"its certificate is refused: {error.verify_message}"
    except ssl.SSLError as error:
        plain = error.reason == "WRONG_VERSION_NUMBER"
        return _SPEAKS_PLAIN if plain else f"no TLS connection: {error.reason or error}"
    except ConnectionError:
        return "no TLS connection: it was closed"
    writer.close()
    return "it refuses this client's certificate, or no gRPC server answers"


async def _certificate_fault(probe: socket.socket) -> CertificateNotValidError | None:
    """Return the error if the server's certificate is outside its validity; None: it was refused
    for another reason. Opens another connection, which trusts any certificate and sends no data.
    """
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    host, port = probe.getpeername()[:2]
    try:
        _, writer = await asyncio.open_connection(host, port, ssl=context)
    except OSError:
        return None
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    server, now_s = principal_in(shown or b""), time.time()
    if server is None or server.is_valid(now_s):
        return None
    return not_valid(server, now_s, "this machine's clock")


async def why_unreachable(addresses: Sequence[str], dialing: Dialing = PLAIN) -> KoinonError:
    """Return the error that keeps a client from all of the addresses: ``CertificateNotValidError``,
    ``NobodyListensError`` or ``UnknownHostError`` if waiting would not help, else a
    ``NotSentError`` with the reason as text.
    """
    if (own := dialing.certificate_fault()) is not None:
        return own
    findings = await asyncio.gather(
        *[probe_address(address, dialing) for address in dict.fromkeys(addresses)]
    )
    reason = "; ".join(f"{finding.address}: {finding.said}" for finding in findings)
    if all(finding.unknown for finding in findings):
        return UnknownHostError(reason=reason)
    if all(finding.unknown or finding.refused for finding in findings):
        return NobodyListensError(reason=reason)
    if all(finding.fault or finding.unknown or finding.refused for finding in findings):
        fault = next(finding.fault for finding in findings if finding.fault)
        fault.reason = reason
        return fault
    return NotSentError(reason=reason)
