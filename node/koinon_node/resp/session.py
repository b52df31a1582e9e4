"""The session of a RESP connection: its identity, permissions, transaction and watched keys."""

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
    """The other end of a connection, as it was accepted."""

    number: int  # CLIENT ID
    address: str
    port_keyspace: str = DEFAULT  # the name of the keyspace that the port is for
    gate: Authenticator | None = None  # None: no client has to authenticate
    certificate: bytes = b""  # DER; what the client has shown by TLS, if anything
    chain: bytes = b""  # PEM; how the certificate was verified


class Session:
    """The session of one connection.

    Its commands are in the keyspace of its port, or in the one that one of our own clients names.
    ``tell`` sends a message that answers no command.
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
        self._served: ServedKeyspace | None = None  # once a command has asked for it
        self.number = peer.number
        self.peer = peer.address
        self.tell = tell
        self.name = b""  # as the client calls itself
        self.library: dict[bytes, bytes] = {}  # lib-name and lib-ver, as it says
        self.resp3 = False
        self.closing = False  # after the reply that is made now
        self.is_acting = False  # for a command that another node has passed on: it goes no further
        self.transaction: Transaction | None = None  # since MULTI
        self.watched: dict[bytes, int] = {}  # by key, the version that WATCH found; 0: no record
        self.gate = peer.gate  # None: everybody may do everything
        self.audit = audit
        self._shown = peer.certificate, peer.chain
        self._token = ""  # identifies the client; '': the certificate does
        self.standing = StandingCaller(peer.gate, self._find)
        self._end_attendance: Callable[[], None] | None = None
        self._on_leaving: Callable[[], None] | None = None

    @property
    def served(self) -> ServedKeyspace:
        """The keyspace that commands are in: of the name of the port's when it is asked for first,
        and the same one from then on.

        Raises:
            ClusterNotReadyError: there is no table yet.
            UnknownKeyspaceError: there is no keyspace of this name.
        """
        if self._served is None:
            named = self.service.table().keyspaces.named(self._port_keyspace)
            self._served = self.service.served(named.keyspace_id)
        return self._served

    @property
    def is_bound(self) -> bool:
        """True once it is known which keyspace the commands are in."""
        return self._served is not None

    def enter(self, keyspace_id: KeyspaceId) -> None:
        """Have the commands that follow be in this keyspace."""
        self._served = self.service.served(keyspace_id)
        self.forget_transaction()  # its keys are of the keyspace before

    @property
    def held_bytes(self) -> int:
        """The bytes of what is queued and watched."""
        queued = self.transaction.held_bytes if self.transaction is not None else 0
        return queued + held_by_watches(self.watched) if self.watched else queued

    def forget_transaction(self) -> None:
        """End what MULTI and WATCH have begun."""
        self.transaction, self.watched = None, {}

    def spoil_transaction(self) -> None:
        """A command was refused: if it was to be queued, EXEC carries out nothing."""
        if self.transaction is not None:
            self.transaction.is_spoilt = True

    @property
    def caller(self) -> Caller:
        """The caller, as the access state knows it now; nobody, once it is let in no longer."""
        try:
            return self.standing.current()
        except UnauthenticatedError:
            return _NOBODY

    def acting_for(self, user: str) -> Session:
        """Return a session in the same keyspace whose caller is this user, of whom another node has
        passed a command on.

        Raises:
            PermissionDeniedError: it is no node that asks.
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
        """Return the caller of a stream, which ends at once when authorities change."""
        return StandingCaller(self.gate, lambda: self._who(stays=True))

    def _find(self) -> Caller:
        """Find out who this is; by the way have a client whose certificate's authority is trusted
        no more open another connection, by a message, if it attends.
        """
        certificate, chain = self._shown
        is_asked_to_go = self.gate and certificate and not self.gate.is_trusted(certificate, chain)
        if is_asked_to_go and self._on_leaving is not None:
            self._on_leaving()
            self._on_leaving = None
        return self._who()

    def _who(self, token: str = "", *, stays: bool = False) -> Caller:
        """Return who shows what this connection has, or this token beside the certificate.

        Raises:
            UnauthenticatedError: it is let in no longer, or not by this token.
        """
        if self.gate is None:
            return ANYBODY
        (certificate, chain), shown = self._shown, token or self._token
        return self.gate.who(
            certificate or None, lambda: shown, chain, stays=stays, by_token=bool(shown)
        )

    def authenticate(self, token: str, user: str = "") -> None:
        """Take a token for who this is; ``user``, if given, must be its owner.

        Raises:
            UnauthenticatedError: no user has this token; what was known before holds on.
        """
        if self.gate is None:
            raise UnauthenticatedError(reason="this connection is not by TLS: send no tokens on it")
        found = self._who(token)
        if not found.principal or user not in ("", "default", found.principal.name):
            raise UnauthenticatedError(reason="the token is of another user")
        self._token = token
        self.standing.forget()

    @property
    def keyspace_name(self) -> str:
        """The name of the keyspace that commands are in; its id, if it has been dropped."""
        if self._served is None:
            return self._port_keyspace
        return self._served.name or f"id:{self._served.keyspace_id}"

    def forget(self) -> None:
        """Be again the caller that the certificate names, if there is one: drop the token."""
        self._token = ""
        self.standing.forget()

    @property
    def is_known(self) -> bool:
        """True once the client is known, or where no client has to say who it is."""
        principal = self.caller.principal
        return principal is None or principal.kind is not Kind.CLIENT

    def check_known(self) -> None:
        """Raise UnauthenticatedError unless it is known who this is."""
        principal = self.standing.current().principal
        if principal is not None and principal.kind is Kind.CLIENT:
            raise UnauthenticatedError(
                reason="Authentication required: a user's certificate, or AUTH with a token"
            )

    def attend(self, on_leaving: Callable[[], None]) -> None:
        """Have ``on_leaving`` called when the node is about to stop; the node then waits for the
        end of this connection.

        Raises:
            ResourceExhaustedError: too many attend.
        """
        if self._end_attendance is None:
            self._end_attendance = self.service.drain.attend(self.peer, on_leaving)
            self._on_leaving = on_leaving

    def end(self) -> None:
        """The connection is gone."""
        if self._end_attendance is not None:
            self._end_attendance()
