"""The session of a RESP connection: its caller, keyspace, transaction and watched keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from koinon_node.resp.served_keyspace import ServedKeyspace
from koinon_node.resp.service import RedisService
from koinon_node.resp.transaction_queue import Transaction, held_by_watches
from koinon_proto.contract.access import Permissions
from koinon_proto.contract.errors import PermissionDeniedError, UnauthenticatedError
from koinon_proto.contract.keyspaces import DEFAULT, KeyspaceId
from koinon_proto.security.audit import NO_AUDIT, Audit
from koinon_proto.security.authentication import Authenticator, StandingCaller
from koinon_proto.security.authorization import ANYBODY, Caller
from koinon_proto.security.names import Kind, Principal

_NOBODY = Caller(Principal(Kind.CLIENT), Permissions.NONE)


@dataclass(frozen=True, kw_only=True)
class Peer:
    """The other end of an accepted connection."""

    number: int  # CLIENT ID
    address: str
    port_keyspace: str = DEFAULT  # the name of the keyspace that the port serves
    gate: Authenticator | None = None  # None: no client has to authenticate
    certificate: bytes = b""  # DER; the client's TLS certificate, if it has one
    chain: bytes = b""  # PEM; the chain by which the certificate was verified


class Session:
    """The session of one connection.

    Its commands use the keyspace of its port, or the keyspace that a Koinon client names. ``tell``
    sends a push message.
    """

    def __init__(
        self,
        service: RedisService,
        peer: Peer,
        tell: Callable[[bytes], None],
        audit: Audit = NO_AUDIT,
    ) -> None:
        self.service = service
        self._port_keyspace = peer.port_keyspace
        self._served: ServedKeyspace | None = None  # set by the first command that needs it
        self.number = peer.number
        self.peer = peer.address
        self.tell = tell
        self.name = b""  # by CLIENT SETNAME
        self.library: dict[bytes, bytes] = {}  # lib-name and lib-ver, by CLIENT SETINFO
        self.resp3 = False
        self.closing = False  # close the connection after the present reply
        self.is_acting = False  # executes a command that another node passed on: never pass it on
        self.transaction: Transaction | None = None  # set from MULTI to EXEC
        self.watched: dict[bytes, int] = {}  # by key: the version that WATCH read; 0: no record
        self.gate = peer.gate  # None: everybody may do everything
        self.audit = audit
        self._shown = peer.certificate, peer.chain
        self._token = ""  # the token that identifies the client; '': its certificate does
        self.standing = StandingCaller(peer.gate, self._authenticate_again)
        self._end_attendance: Callable[[], None] | None = None
        self._on_leaving: Callable[[], None] | None = None

    @property
    def served(self) -> ServedKeyspace:
        """The keyspace of the commands: at first the keyspace that has the port's name, and the
                same keyspace from then on.

                Raises:
        ClusterNotReadyError: this node has no table yet.
                    UnknownKeyspaceError: there is no keyspace of this name.
        """
        if self._served is None:
            named = self.service.table().keyspaces.named(self._port_keyspace)
            self._served = self.service.served(named.keyspace_id)
        return self._served

    @property
    def is_bound(self) -> bool:
        """True once the keyspace of the commands is determined."""
        return self._served is not None

    def enter(self, keyspace_id: KeyspaceId) -> None:
        """Use this keyspace for the following commands."""
        self._served = self.service.served(keyspace_id)
        self.forget_transaction()  # its keys belong to the former keyspace

    @property
    def held_bytes(self) -> int:
        """The bytes of queued commands and watched keys."""
        queued = self.transaction.held_bytes if self.transaction is not None else 0
        return queued + held_by_watches(self.watched) if self.watched else queued

    def forget_transaction(self) -> None:
        """Drop the queued commands and the watched keys."""
        self.transaction, self.watched = None, {}

    def spoil_transaction(self) -> None:
        """Note that a command was refused: a transaction that is being queued will fail at EXEC."""
        if self.transaction is not None:
            self.transaction.is_spoilt = True

    @property
    def caller(self) -> Caller:
        """The caller with its present rights; nobody, once it may not connect any more."""
        try:
            return self.standing.current()
        except UnauthenticatedError:
            return _NOBODY

    def acting_for(self, user: str) -> Session:
        """Return a session in the same keyspace for the user whose command another node passed on.

        Raises:
            PermissionDeniedError: this connection's caller is no node.
        """
        gate, served = self.gate, self.served
        if gate is not None and not self.caller.is_node:
            raise PermissionDeniedError(
                principal=self.caller.name, action="pass", what="commands on for others"
            )
        peer = Peer(number=self.number, address=self.peer, gate=gate)
        acting = Session(self.service, peer, self.tell, self.audit)
        acting._served, acting.is_acting = served, True
        if gate is not None:
            acting.standing = StandingCaller(gate, lambda: gate.named(user))
        return acting

    def caller_that_stays(self) -> StandingCaller:
        """Return the caller of a stream, whose rights end at once when authorities change."""
        return StandingCaller(self.gate, lambda: self._authenticated(stays=True))

    def _authenticate_again(self) -> Caller:
        """Authenticate the client again. If its certificate's authority is no longer trusted, send
        it the message that makes it reconnect, provided that it attends.
        """
        certificate, chain = self._shown
        is_asked_to_go = self.gate and certificate and not self.gate.is_trusted(certificate, chain)
        if is_asked_to_go and self._on_leaving is not None:
            self._on_leaving()
            self._on_leaving = None
        return self._authenticated()

    def _authenticated(self, token: str = "", *, stays: bool = False) -> Caller:
        """Return the caller by the connection's certificate and its token, or by this token.

        Raises:
            UnauthenticatedError: neither of them is valid any more, or the token is not.
        """
        if self.gate is None:
            return ANYBODY
        (certificate, chain), shown = self._shown, token or self._token
        return self.gate.who(
            certificate or None, lambda: shown, chain, stays=stays, by_token=bool(shown)
        )

    def authenticate(self, token: str, user: str = "") -> None:
        """Authenticate the client by a token. ``user``, if given, must be the token's owner.

        Raises:
            UnauthenticatedError: no user has this token. The caller from before stays.
        """
        if self.gate is None:
            raise UnauthenticatedError(reason="this connection is not by TLS: send no tokens on it")
        found = self._authenticated(token)
        if not found.principal or user not in ("", "default", found.principal.name):
            raise UnauthenticatedError(reason="the token is of another user")
        self._token = token
        self.standing.forget()

    @property
    def keyspace_name(self) -> str:
        """The name of the commands' keyspace; its id, if it has been dropped."""
        if self._served is None:
            return self._port_keyspace
        return self._served.name or f"id:{self._served.keyspace_id}"

    def forget(self) -> None:
        """Drop the token, so that the certificate, if any, names the caller again."""
        self._token = ""
        self.standing.forget()

    @property
    def is_known(self) -> bool:
        """True if the client has authenticated, or need not."""
        principal = self.caller.principal
        return principal is None or principal.kind is not Kind.CLIENT

    def check_known(self) -> None:
        """Raise UnauthenticatedError unless the client has authenticated, or need not."""
        principal = self.standing.current().principal
        if principal is not None and principal.kind is Kind.CLIENT:
            raise UnauthenticatedError(
                reason="Authentication required: a user's certificate, or AUTH with a token"
            )

    def attend(self, on_leaving: Callable[[], None]) -> None:
        """Call ``on_leaving`` when the node is about to stop; the node then waits for the end of
        this connection.

        Raises:
            ResourceExhaustedError: too many clients attend.
        """
        if self._end_attendance is None:
            self._end_attendance = self.service.drain.attend(self.peer, on_leaving)
            self._on_leaving = on_leaving

    def end(self) -> None:
        """End the attendance: the connection has ended."""
        if self._end_attendance is not None:
            self._end_attendance()
