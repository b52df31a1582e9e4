"""Finds out who calls, from what the connection has shown and what the access state says of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

from koinon_proto.contract.access import Access, Permissions
from koinon_proto.contract.errors import UnauthenticatedError
from koinon_proto.contract.table import Table
from koinon_proto.security.authorization import ANYBODY, Caller
from koinon_proto.security.bundle import principal_in
from koinon_proto.security.names import Kind, Principal
from koinon_proto.security.trust import Trust

_BEARER = "Bearer "
_PLAIN = [b"insecure"]
"""The name that gRPC gives the security of a connection without TLS; older versions give it none.
"""
_KNOWN_MAX = 4_096
PATIENCE_S = 5.0
"""In which a client opens another connection, and ends what is under way on the one before."""
_LOOK_AGAIN_S = 10
_certificates: Callable[[bytes], Principal | None] = lru_cache(_KNOWN_MAX)(principal_in)


class Authenticator:
    """The callers of one server. ``access`` returns the access state as it is now, ``table`` the
    table, by which refusals and the audit log name keyspaces.
    """

    def __init__(
        self,
        access: Callable[[], Access],
        *,
        takes_tls: bool,
        trust: Trust | None = None,
        table: Callable[[], Table | None] = lambda: None,
    ) -> None:
        self._access = access
        self._table = table
        self._takes_tls = takes_tls
        self._trust = trust or Trust()
        self.unidentified = {"grpc": 0, "redis": 0, "frames": 0}
        """Calls, commands and streams of frames, let in from callers that have shown nothing."""

    def keyspace_name(self, keyspace_id: int) -> str:
        """Return the keyspace's name; '' where it is not known, or not any more."""
        table = self._table()
        return table.keyspaces.name_of(keyspace_id) if table is not None else ""

    @property
    def version(self) -> tuple[int, int]:
        """Changes when callers may have other permissions than before, or none."""
        return self._access().version, self._trust.version

    @property
    def stamp(self) -> tuple[int, int, int]:
        """Changes when what was found out of a caller should be found out anew: with the access
        state or the trusted authorities, and now and then, since tokens end.
        """
        return *self.version, int(time.monotonic()) // _LOOK_AGAIN_S

    def caller(self, context: Any, *, stays: bool = False) -> Caller:
        """Return who makes a call of gRPC. ``stays``: a stream, which ends at once when the
        authority of its caller is trusted no more.

        Raises:
            UnauthenticatedError: its certificate says nothing, or is taken no longer.
        """
        if not self._takes_tls:
            return ANYBODY
        shown: dict[str, Any] = context.auth_context()
        certificates = shown.get("x509_pem_cert")
        if certificates is None:
            if shown.get("transport_security_type", _PLAIN) != _PLAIN:
                raise UnauthenticatedError(reason="no certificate was shown")
            return ANYBODY
        chain = shown.get("x509_pem_cert_chain") or (b"",)
        return self.who(
            certificates[0],
            lambda: _token(context.invocation_metadata()),
            chain[0],
            stays=stays,
        )

    def is_trusted(self, certificate: bytes, chain: bytes = b"") -> bool:
        """Return whether a connection could still be opened by the certificate."""
        return self._trust.holds(certificate, chain)

    def who(
        self,
        certificate: bytes | None,
        token: Callable[[], str],
        chain: bytes = b"",
        *,
        stays: bool = False,
    ) -> Caller:
        """Return who shows this certificate (PEM or DER; None: none) and, where it names no user,
        this token. ``chain`` (PEM) is what is between the certificate and its authority. After a
        change of authorities, those of before are taken for ``PATIENCE_S``, unless it ``stays``.

        Raises:
            UnauthenticatedError: it says nothing, or is taken no longer.
        """
        access, principal = self._access(), Principal(Kind.CLIENT)
        if certificate is not None:
            known = _certificates(certificate)
            if known is None:
                raise UnauthenticatedError(
                    reason="the certificate names nobody of a Koinon cluster"
                )
            if access.is_revoked(known.serial):
                raise UnauthenticatedError(reason=f"the certificate of {known} was revoked")
            if not self._trust.holds(certificate, chain) and self._is_over(stays):
                raise UnauthenticatedError(
                    reason=f"the authority of the certificate of {known} is trusted no more"
                )
            principal = known
        if principal.kind is Kind.CLIENT:
            return self._by_token(access, principal, token())
        if principal.kind is not Kind.USER:
            return self._made(principal, Permissions.NONE)
        if fault := access.fault_of(principal.name, principal.issued_at_s):
            raise UnauthenticatedError(reason=fault)
        return self._made(principal, access.permissions_of(principal.name, principal.issued_at_s))

    def _made(self, principal: Principal, permissions: Permissions) -> Caller:
        return Caller(principal, permissions, self.keyspace_name)

    def _is_over(self, stays: bool) -> bool:
        """Return whether a client had time to open another connection."""
        return stays or self._trust.unchanged_s >= PATIENCE_S

    def _by_token(self, access: Access, principal: Principal, token: str) -> Caller:
        """Return whose token this is; a caller without permissions where there is none."""
        if not token:
            return self._made(principal, Permissions.NONE)
        user = access.user_of_token(token, time.time())
        if user is None:
            raise UnauthenticatedError(
                reason="the token is not known, was revoked, or is over: take another one "
                "(`koinon admin tokens create` makes one)"
            )
        return self._made(Principal(Kind.USER, user), access.permissions_of(user))


def _token(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    for name, value in metadata:
        if name == "authorization" and isinstance(value, str) and value.startswith(_BEARER):
            return value.removeprefix(_BEARER).strip()
    return ""


_NO_ACCESS = Access()


def open_gate() -> Authenticator:
    """Return the gate of a server without TLS."""
    return Authenticator(lambda: _NO_ACCESS, takes_tls=False)
