"""The caller of the call that is being handled, and what it may do."""

from __future__ import annotations

from collections.abc import Collection
from contextvars import ContextVar
from dataclasses import dataclass

from koinon_proto.contract.access import Action, Permissions
from koinon_proto.contract.errors import PermissionDeniedError
from koinon_proto.security.names import Principal


@dataclass(frozen=True, slots=True)
class Caller:
    """A caller. ``principal`` None: nobody had to say, on a plain connection."""

    principal: Principal | None
    permissions: Permissions

    @property
    def name(self) -> str:
        """As errors and the audit log name it."""
        return str(self.principal) if self.principal is not None else "anybody"

    def check_keys(self, action: Action, keys: Collection[bytes]) -> None:
        """Raise PermissionDeniedError for the first key on which the action is not allowed."""
        if self.permissions is Permissions.ALL:
            return
        refused = self.permissions.first_refused(action, keys)
        if refused is not None:
            raise self.denied(action, f"key {refused!r}")

    def check_prefix(self, action: Action, prefix: bytes) -> None:
        """Raise PermissionDeniedError unless the action is allowed on all that begins so."""
        if self.permissions is Permissions.ALL:
            return
        if not self.permissions.allows_prefix(action, prefix):
            raise self.denied(action, f"everything under {prefix!r}" if prefix else "every key")

    def denied(self, action: Action, what: str = "") -> PermissionDeniedError:
        """Return the refusal."""
        return PermissionDeniedError(principal=self.name, action=action.name.lower(), what=what)


ANYBODY = Caller(None, Permissions.ALL)
"""On a plain connection, which only a cluster takes that does not require TLS."""

caller: ContextVar[Caller] = ContextVar("koinon_caller", default=ANYBODY)
"""The caller of the call that this task handles. Set by the guard."""
