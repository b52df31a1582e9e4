"""Computes until when the certificate of an open connection is valid.

TLS checks a certificate once, at the handshake; connections stand for days. When a certificate
ends, or its authority ends or is trusted no more, the connections that it opened have to go too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from koinon_proto.contract.errors import CertificateNotValidError
from koinon_proto.security.bundle import BundleFile
from koinon_proto.security.names import Principal

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
        self._seen = bundle.version if bundle is not None else 0
        self._changed_at = now()

    @property
    def version(self) -> int:
        """Rises when the file changes. Connections opened before may not be trusted any more."""
        if self._bundle is None:
            return 0
        self._bundle.current()
        if (version := self._bundle.version) != self._seen:
            self._seen, self._changed_at = version, self._now()
        return version

    @property
    def unchanged_s(self) -> float:
        """The seconds for which the file has not changed, by the checks so far."""
        return self._now() - self._changed_at

    def valid_until_s(self, certificate: bytes, chain: bytes = b"") -> float:
        """Return the unix time until which an authority that is trusted now vouches for the
        certificate (PEM or DER), itself or by the certificates of ``chain`` (PEM): the first end
        among them. 0.0: none vouches for it.
        """
        if self._bundle is None:
            return math.inf
        return _path_end_s(certificate, chain, self._bundle.current().trusted)


def not_valid(
    holder: Principal, now_s: float, clock: str, until_s: float = math.inf
) -> CertificateNotValidError:
    """Return the error for a certificate that has expired, or is not valid yet, at ``now_s`` by
    this ``clock``. ``until_s``: when its authority ends, if that is sooner.
    """
    until_s, says = min(until_s, holder.valid_until_s), f"{clock} says {_utc(now_s)}"
    named = str(holder) if holder.name else f"a {holder.kind}"
    if now_s < holder.issued_at_s:
        begin = _utc(holder.issued_at_s)
        reason = f"the certificate of {named} is not valid before {begin}, and {says}: is it right?"
    else:
        whose = "certificate" if until_s == holder.valid_until_s else "certificate's authority"
        reason = (
            f"the {whose} of {named} has expired: it was valid until {_utc(until_s)}, and {says} "
            "(`koinon certs renew` makes a new certificate)"
        )
    return CertificateNotValidError(
        reason=reason,
        holder=named,
        valid_from_s=holder.issued_at_s,
        valid_until_s=int(until_s),
        clock_s=int(now_s),
    )


def _utc(unix_s: float) -> str:
    return f"{datetime.fromtimestamp(unix_s, UTC):%Y-%m-%dT%H:%M:%SZ}"


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
def _path_end_s(certificate: bytes, chain: bytes, trusted: bytes) -> float:
    """Return the end of the certificate's path to an authority; of several paths the last end."""
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature

    def issued(one: Any, by: Any) -> bool:
        try:
            one.verify_directly_issued_by(by)
        except (ValueError, TypeError, InvalidSignature):
            return False
        return True

    def end_s(one: Any) -> float:
        return float(one.not_valid_after_utc.timestamp())

    is_pem = certificate.lstrip().startswith(b"-----")
    load = x509.load_pem_x509_certificate if is_pem else x509.load_der_x509_certificate
    try:
        own = load(certificate)
        roots = x509.load_pem_x509_certificates(trusted)
        between = x509.load_pem_x509_certificates(chain) if chain else []
    except ValueError:
        return 0.0
    ends_s, fresh, found_s = {own: end_s(own)}, [own], 0.0  # of paths as far as each certificate
    for _ in range(_CHAIN_MAX):
        for one in fresh:
            ends = (min(ends_s[one], end_s(root)) for root in roots if issued(one, root))
            found_s = max(found_s, *ends, 0.0)
        above: dict[Any, float] = {}
        for by in between:
            ends = (min(ends_s[one], end_s(by)) for one in fresh if issued(one, by))
            if by not in ends_s and (path_s := max(ends, default=0.0)):
                above[by] = path_s
        ends_s |= above
        fresh = list(above)
    return found_s
