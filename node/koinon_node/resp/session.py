"""The session of a RESP connection: its identity, permissions, transaction and watched keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from koinon_node.resp.served_keyspace import ServedKeyspace
from koinon_node.resp.service import RedisService
from koinon_node.resp.transaction_queue import Transaction, held_by_watches
from koinon_proto.contract.access import Permissions
from koinon_proto.contract.errors import KoinonError, UnauthenticatedError
from koinon_proto.contract.keyspaces import DEFAULT, KeyspaceId
from koinon_proto.security.audit import NO_AUDIT, Audit
from koinon_proto.security.authentication import Authenticator
from koinon_proto.security.authorization import ANYBODY, Caller
from koinon_proto.security.names import Kind, Principal

if TYPE_CHECKING:
    from koinon_node.resp.commands.table import Spec

_NOBODY = Caller(Principal(Kind.CLIENT), Permissions.NONE)


class Session:
    """The session of one connection.

    Its commands are in the keyspace of its port (``port_keyspace``, by name), or in the one that
    one of our own clients names. ``tell`` sends a message that answers no command. ``certificate``
    (DER) is what a client has shown by TLS, if anything, ``chain`` (PEM) how it was verified.
    Without a ``gate`` no client has to say who it is.
    """

    def __init__(
        self,
        service: RedisService,
        number: int,
        peer: str,
        tell: Callable[[bytes], None],
        gate: Authenticator | None = None,
        certificate: bytes = b"",
        chain: bytes = b"",
        audit: Audit = NO_AUDIT,
        port_keyspace: str = DEFAULT,
    ) -> None:
        self.service = service
        self._port_keyspace = port_keyspace
        self._served: ServedKeyspace | None = None  # once a command has asked for it
        self.number = number  # CLIENT ID
        self.peer = peer
        self.tell = tell
        self.name = b""  # as the client calls itself
        self.library: dict[bytes, bytes] = {}  # lib-name and lib-ver, as it says
        self.resp3 = False
        self.closing = False  # after the reply that is made now
        self.transaction: Transaction | None = None  # since MULTI
        self.watched: dict[bytes, int] = {}  # by key, the version that WATCH found; 0: no record
        self.gate = gate  # None: everybody may do everything
        self._audit = audit
        self._shown = certificate, chain
        self._certificate = certificate
        self._token = ""
        self._caller = ANYBODY  # by the gate's stamp:
        self._stamp: object = None
        self._fault: KoinonError | None = None  # why it is _NOBODY, if it has shown something
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
        """The caller, as the access state knows it now."""
        gate = self.gate
        if gate is None:
            return ANYBODY
        if (stamp := gate.stamp) != self._stamp:
            self._stamp = stamp
            self._fault = None
            try:
                self._check_shown(gate)
                self._caller = gate.who(
                    self._certificate or None, lambda: self._token, self._shown[1]
                )
            except KoinonError as error:
                self._caller, self._fault = _NOBODY, error
        return self._caller

    def caller_that_stays(self) -> Caller:
        """Return the caller of a connection that is not opened anew after a change of authorities.

        Raises:
            UnauthenticatedError: its certificate is taken no longer.
        """
        if self.gate is None:
            return ANYBODY
        certificate, chain = self._shown
        return self.gate.who(certificate or None, lambda: self._token, chain, stays=True)

    def look(self) -> None:
        """Find out anew who this is: a client that attends is told to go if it has to."""
        if self.gate is not None and self._shown[0]:
            self._stamp = None
            _ = self.caller

    def _check_shown(self, gate: Authenticator) -> None:
        """Have a client whose certificate's authority is trusted no more open another connection:
        by a message, if it attends. Raise UnauthenticatedError if it has had time to.
        """
        certificate, chain = self._shown
        if not certificate or gate.is_trusted(certificate, chain):
            return
        if self._on_leaving is not None:
            self._on_leaving()
            self._on_leaving = None
        gate.who(certificate, lambda: self._token, chain)

    def authenticate(self, token: str, user: str = "") -> None:
        """Take a token for who this is; ``user``, if given, must be its owner.

        Raises:
            UnauthenticatedError: no user has this token; what was known before holds on.
        """
        gate = self.gate
        if gate is None:
            raise UnauthenticatedError(reason="this connection is not by TLS: send no tokens on it")
        found = gate.who(None, lambda: token)
        if not found.principal or user not in ("", "default", found.principal.name):
            raise UnauthenticatedError(reason="the token is of another user")
        self._token, self._certificate, self._stamp = token, b"", None

    def note(
        self,
        spec: Spec,
        outcome: str,
        request_id: str = "",
        count: int = 1,
        error: KoinonError | None = None,
    ) -> None:
        """Tell the audit log how a command ended, or so many alike, if it wants to know."""
        audit, method = self._audit, f"redis:{spec.name}"
        if audit.is_on and audit.wants(method, outcome, count):
            keyspace = self._keyspace_name() if spec.is_about_keys else ""
            audit.note(self.caller.name, self.peer, method, outcome, request_id, error, keyspace)

    def _keyspace_name(self) -> str:
        """Return the name of the keyspace that commands are in."""
        if self._served is None:
            return self._port_keyspace
        return self._served.name or f"id:{self._served.keyspace_id}"

    def forget(self) -> None:
        """Be again the caller that the certificate names, if there is one: drop the token."""
        self._token, self._certificate, self._stamp = "", self._shown[0], None

    @property
    def is_known(self) -> bool:
        """True once the client is known, or where no client has to say who it is."""
        principal = self.caller.principal
        return principal is None or principal.kind is not Kind.CLIENT

    def check_known(self) -> None:
        """Raise UnauthenticatedError unless it is known who this is."""
        if not self.is_known:
            raise self._fault or UnauthenticatedError(
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
