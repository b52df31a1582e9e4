"""What a connection has said of itself, and what its commands may ask of the node."""

from __future__ import annotations

from collections.abc import Callable

from koinon_node.resp.service import RedisService
from koinon_proto.contract.access import Permissions
from koinon_proto.contract.errors import KoinonError, UnauthenticatedError
from koinon_proto.security.caller import ANYBODY, Caller
from koinon_proto.security.gate import Gate
from koinon_proto.security.names import Kind, Principal

_NOBODY = Caller(Principal(Kind.CLIENT), Permissions.NONE)


class Session:
    """One connection's. ``tell`` sends a message that answers no command. ``certificate`` (DER) is
    what a client has shown by TLS, if anything. Without a ``gate`` nobody has to say who it is.
    """

    def __init__(
        self,
        service: RedisService,
        number: int,
        peer: str,
        tell: Callable[[bytes], None],
        gate: Gate | None = None,
        certificate: bytes = b"",
    ) -> None:
        self.service = service
        self.number = number  # CLIENT ID
        self.peer = peer
        self.tell = tell
        self.name = b""  # as the client calls itself
        self.library: dict[bytes, bytes] = {}  # lib-name and lib-ver, as it says
        self.resp3 = False
        self.closing = False  # after the reply that is made now
        self.gate = gate  # None: everybody may do everything
        self._certificate = certificate
        self._token = ""
        self._caller = ANYBODY  # by the gate's stamp:
        self._stamp: object = None
        self._fault: KoinonError | None = None  # why it is nobody, if it has shown something
        self._end_attendance: Callable[[], None] | None = None

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
                self._caller = gate.who(self._certificate or None, lambda: self._token)
            except KoinonError as error:
                self._caller, self._fault = _NOBODY, error
        return self._caller

    def authenticate(self, token: str, user: str = "") -> None:
        """Take a token for who this is; ``user``, if given, must be its owner.

        Raises:
            UnauthenticatedError: nobody has this token; what was known before holds on.
        """
        gate = self.gate
        if gate is None:
            raise UnauthenticatedError(reason="this connection is not by TLS: send no tokens on it")
        found = gate.who(None, lambda: token)
        if not found.principal or user not in ("", "default", found.principal.name):
            raise UnauthenticatedError(reason="the token is of another user")
        self._token, self._certificate, self._stamp = token, b"", None

    def check_known(self) -> None:
        """Raise UnauthenticatedError unless it is known who this is."""
        principal = self.caller.principal
        if principal is not None and principal.kind is Kind.CLIENT:
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

    def end(self) -> None:
        """The connection is gone."""
        if self._end_attendance is not None:
            self._end_attendance()
