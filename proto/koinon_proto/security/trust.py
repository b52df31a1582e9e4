"""Checks the certificates of open connections again when the trusted authorities change.

TLS checks a certificate once, at the handshake; connections stand for days. When an authority is
trusted no more, those that were opened by its certificates have to go as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from koinon_proto.security.bundle import BundleFile

_CHAIN_MAX = 8
_KNOWN_MAX = 4_096
_PEM = 1  # of ssl's certificates: their form as text


class Trust:
    """The authorities that a server trusts, as its identity file names them."""

    def __init__(
        self, bundle: BundleFile | None = None, *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._bundle = bundle
        self._now = now
        self._first = self._seen = bundle.version if bundle is not None else 0
        self._changed_at = now()

    @property
    def version(self) -> int:
        """Rises when the file changes. What was opened before may not be trusted any more."""
        if self._bundle is None:
            return 0
        self._bundle.current()
        if (version := self._bundle.version) != self._seen:
            self._seen, self._changed_at = version, self._now()
        return version

    @property
    def unchanged_s(self) -> float:
        """For how long the file has not changed, as far as was looked."""
        return self._now() - self._changed_at

    def holds(self, certificate: bytes, chain: bytes = b"") -> bool:
        """Return whether an authority that is trusted now has issued the certificate (PEM or DER),
        itself or by the certificates of ``chain`` (PEM).
        """
        if self.version == self._first or self._bundle is None:
            return True  # it was checked against these
        return _is_issued(certificate, chain, self._bundle.current().trusted)


def verified_chain(tls: Any) -> bytes:
    """Return the certificates (PEM) by which the peer of an ``SSLObject`` was verified; b"" where
    this Python does not tell.
    """
    inner: Any = getattr(tls, "_sslobj", None)  # public from Python 3.13 on
    try:
        found = inner.get_verified_chain() or ()
        return b"".join(str(one.public_bytes(_PEM)).encode() for one in found)
    except (AttributeError, TypeError, ValueError):
        return b""


@lru_cache(_KNOWN_MAX)
def _is_issued(certificate: bytes, chain: bytes, trusted: bytes) -> bool:
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature

    def issued(one: Any, by: Any) -> bool:
        try:
            one.verify_directly_issued_by(by)
        except (ValueError, TypeError, InvalidSignature):
            return False
        return True

    is_pem = certificate.lstrip().startswith(b"-----")
    load = x509.load_pem_x509_certificate if is_pem else x509.load_der_x509_certificate
    try:
        own = load(certificate)
        roots = x509.load_pem_x509_certificates(trusted)
        between = x509.load_pem_x509_certificates(chain) if chain else []
    except ValueError:
        return False
    reached, fresh = [own], [own]
    for _ in range(_CHAIN_MAX):
        if any(issued(one, root) for one in fresh for root in roots):
            return True
        fresh = [by for by in between if by not in reached and any(issued(o, by) for o in fresh)]
        reached += fresh
    return False
