"""Authenticates callers, by the connection's certificate or token and the access state.

What a caller has shown ends: certificates and tokens have an end, and both may be revoked before.
So a caller is found for a moment (``Authenticator.who``), and what stays open longer than one call
keeps it as a ``StandingCaller``, which finds it anew when anything of that changes. Each door of a
server asks that one, at every command or every ``LOOK_EVERY_S``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

from koinon_proto.contract.access import ROOT, Access, Permissions
from koinon_proto.contract.errors import KoinonError, UnauthenticatedError
from koinon_proto.contract.table import Table
from koinon_proto.security.authorization import ANYBODY, Caller
from koinon_proto.security.bundle import principal_in
from koinon_proto.security.names import Kind, Principal
from koinon_proto.security.trust import Trust, not_valid

_BEARER = "Bearer "
_PLAIN = [b"insecure"]
"""The name that gRPC gives the security of a connection without TLS; older versions give it none.
"""
_KNOWN_MAX = 4_096
PATIENCE_S = 5.0
"""In which a client opens another connection, and ends what is under way on the one before."""
LOOK_EVERY_S = 0.2
"""Seconds between two checks whether callers of open connections and streams are still let in."""
Version = tuple[int, int]
"""Of the access state, and of the trusted authorities."""
_certificates: Callable[[bytes], Principal | None] = lru_cache(_KNOWN_MAX)(principal_in)


class Authenticator:
    """The callers of one server. ``access`` returns the access state as it is now, ``table`` the
    table, by which refusals and the audit log name keyspaces; ``now`` the unix time in seconds.
    """

    def __init__(
        self,
        access: Callable[[], Access],
        *,
        takes_tls: bool,
        trust: Trust | None = None,
        table: Callable[[], Table | None] = lambda: None,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._access = access
        self._table = table
        self._takes_tls = takes_tls
        self._trust = trust or Trust()
        self.now = now
        self.unidentified = {"grpc": 0, "redis": 0, "frames": 0}
        """Calls, commands and streams of frames, let in from callers that have shown nothing."""

    def keyspace_name(self, keyspace_id: int) -> str:
        """Return the keyspace's name; '' if it is unknown or forgotten."""
        table = self._table()
        return table.keyspaces.name_of(keyspace_id) if table is not None else ""

    @property
    def version(self) -> Version:
        """Changes whenever the permissions of callers may have changed."""
        return self._access().version, self._trust.version

    def caller(self, context: Any, *, stays: bool = False) -> Caller:
        """Return the caller of a gRPC call. ``stays``: for a stream, which ends at once when its
        caller's authority is no longer trusted.

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

    def named(self, user: str) -> Caller:
        """Return the user of this name, whom a node has authenticated; never ``root``.

        Raises:
            UnauthenticatedError: there is none, or it is let in no longer.
        """
        access = self._access()
        if user == ROOT or (fault := access.fault_of(user)):
            raise UnauthenticatedError(
                reason="no commands of root are passed on" if user == ROOT else fault
            )
        return self._made(Principal(Kind.USER, user), access.permissions_of(user), math.inf)

    def is_trusted(self, certificate: bytes, chain: bytes = b"") -> bool:
        """Return whether a presently trusted authority has issued the certificate."""
        return self._trust.valid_until_s(certificate, chain) > 0

    def who(
        self,
        certificate: bytes | None,
        token: Callable[[], str],
        chain: bytes = b"",
        *,
        stays: bool = False,
        by_token: bool = False,
    ) -> Caller:
        """Return the caller that presents this certificate (PEM or DER; None if it presents none).
        Where the certificate names no user, or with ``by_token``, the token names the user.
        ``chain`` (PEM) has the certificates between this one and its authority. After a change of
        authorities, the earlier ones are accepted for ``PATIENCE_S``, unless it ``stays``.

        Raises:
            UnauthenticatedError: it says nothing, or is taken no longer.
        """
        access, principal, until_s = self._access(), Principal(Kind.CLIENT), math.inf
        if certificate is not None:
            principal, until_s = self._shown_by(access, certificate, chain, stays=stays)
        if by_token or principal.kind is Kind.CLIENT:
            return self._by_token(access, token(), until_s)
        if principal.kind is not Kind.USER:
            return self._made(principal, Permissions.NONE, until_s)
        if fault := access.fault_of(principal.name, principal.issued_at_s):
            raise UnauthenticatedError(reason=fault)
        permissions = access.permissions_of(principal.name, principal.issued_at_s)
        return self._made(principal, permissions, until_s)

    def _shown_by(
        self, access: Access, certificate: bytes, chain: bytes, *, stays: bool
    ) -> tuple[Principal, float]:
        """Return the principal that the certificate names, and the unix time until which it is
        accepted.
        """
        known, now_s = _certificates(certificate), self.now()
        if known is None:
            raise UnauthenticatedError(reason="the certificate names nobody of a Koinon cluster")
        if access.is_revoked(known.serial):
            raise UnauthenticatedError(reason=f"the certificate of {known} was revoked")
        until_s = self._trust.valid_until_s(certificate, chain)
        if not until_s:
            patience_s = 0.0 if stays else PATIENCE_S - self._trust.unchanged_s
            if patience_s <= 0:
                raise UnauthenticatedError(
                    reason=f"the authority of the certificate of {known} is trusted no more"
                )
            until_s = now_s + patience_s
        until_s = min(until_s, known.valid_until_s)
        if until_s <= now_s:
            raise not_valid(known, now_s, "the server's clock", until_s)
        return known, until_s

    def _made(self, principal: Principal, permissions: Permissions, until_s: float) -> Caller:
        return Caller(principal, permissions, self.keyspace_name, until_s)

    def _by_token(self, access: Access, text: str, until_s: float) -> Caller:
        """Return the token's user as caller; a caller without permissions if there is no token."""
        if not text:
            return self._made(Principal(Kind.CLIENT), Permissions.NONE, until_s)
        token = access.token_of(text, self.now())
        if token is None:
            raise UnauthenticatedError(
                reason="the token is not known, was revoked, or is over: take another one "
                "(`koinon admin tokens create` makes one)"
            )
        until_s = min(until_s, token.expires_s or until_s)
        return self._made(
            Principal(Kind.USER, token.user), access.permissions_of(token.user), until_s
        )


class StandingCaller:
    """The caller of a connection or stream that stays open. ``find`` authenticates it anew, and
    raises UnauthenticatedError if it is no longer accepted. Without a ``gate`` it need not
    authenticate.
    """

    def __init__(
        self, gate: Authenticator | None = None, find: Callable[[], Caller] = lambda: ANYBODY
    ) -> None:
        self._gate = gate
        self._find = find
        self._caller = ANYBODY  # as it was found at this version, until that time:
        self._version: Version | None = None
        self._until_s = 0.0
        self.fault: KoinonError | None = None  # why it is let in no longer

    def is_stale(self, version: Version, now_s: float) -> bool:
        """Return whether the caller has to be authenticated anew. ``version`` and ``now_s`` are the
        gate's: a caller that checks many fetches them once.
        """
        return self._gate is not None and (version != self._version or now_s >= self._until_s)

    def current(self) -> Caller:
        """Return the caller with its present permissions.

        Raises:
            UnauthenticatedError: it is let in no longer.
        """
        gate = self._gate
        if gate is None:
            return ANYBODY
        if self.is_stale(version := gate.version, gate.now()):
            self._version, self._until_s, self.fault = version, math.inf, None
            try:
                self._caller = self._find()
                self._until_s = self._caller.valid_until_s
            except KoinonError as error:
                self.fault = error
        if self.fault is not None:
            raise self.fault.with_traceback(None)
        return self._caller

    def forget(self) -> None:
        """Have the caller authenticated anew: it has shown another certificate or token."""
        self._version = None


def _token(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    for name, value in metadata:
        if name == "authorization" and isinstance(value, str) and value.startswith(_BEARER):
            return value.removeprefix(_BEARER).strip()
    return ""


_NO_ACCESS = Access()


def open_gate() -> Authenticator:
    """Return the gate of a server without TLS."""
    return Authenticator(lambda: _NO_ACCESS, takes_tls=False)
