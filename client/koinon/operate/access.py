"""Users, roles and tokens, as operators change them: each change is made to what is there now."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from koinon_proto.contract import convert
from koinon_proto.contract.access import AccessState, Grant, Role, Token, User
from koinon_proto.contract.errors import ConditionFailedError, InvalidArgumentError
from koinon_proto.contract.leader_search import Repeat
from koinon_proto.v1 import admin_pb2

if TYPE_CHECKING:
    from koinon.operate.admin import Admin

_TRIES = 5


@dataclass(frozen=True, slots=True)
class Behind:
    """Live nodes that have not said that they go by a change: cut off, hanging, or of a build that
    knows no users. For ``serve_ms`` they may serve by what was before; 0: they serve no client
    until they go by the change.
    """

    node_ids: tuple[str, ...] = ()
    serve_ms: int = 0

    def __str__(self) -> str:
        """Return what operators are told; '' if every live node goes by the change."""
        if not self.node_ids:
            return ""
        after_s = f", in {self.serve_ms / 1000:.1f} s at the latest" if self.serve_ms else ""
        return f"not confirmed by {', '.join(self.node_ids)}: until then it serves nobody{after_s}"


class AccessAdmin:
    """Reads and changes who may do what. Methods raise what the calls of ``Admin`` raise, and
    InvalidArgumentError where a change contradicts what is there. A change is in force when its
    method returns; ``behind`` names what has not said so.
    """

    def __init__(self, admin: Admin) -> None:
        self._admin = admin
        self.behind = Behind()  # at the last change

    def state(self) -> AccessState:
        """Return all of it. Hashes of tokens are left out."""
        reply = self._admin.ask("GetAccess", admin_pb2.GetAccessRequest())
        return convert.ACCESS.decode(reply.access)

    def put_role(self, role: Role) -> None:
        """Make the role, or put it in the place of the one of this name."""
        self._change(put_role=convert.ROLE.encode(role))

    def drop_role(self, name: str) -> None:
        self._change(drop_role=name)

    def put_user(self, user: User) -> None:
        """Make the user, or put it in the place of the one of this name."""
        self._change(put_user=convert.USER.encode(user))

    def drop_user(self, name: str) -> None:
        """Drop the user and its tokens."""
        self._change(drop_user=name)

    def add_token(self, token: Token) -> None:
        """Let a token in (contract.access.make_token makes one, and its text)."""
        self._change(add_token=convert.TOKEN.encode(token))

    def drop_token(self, token_id: str) -> None:
        self._change(drop_token=token_id)

    def revoke_certificate(self, serial: str) -> None:
        """Refuse the certificate with this serial number (hexadecimal), of whatever holder."""
        self._change(revoke_certificate=serial)

    def restore_certificate(self, serial: str) -> None:
        """Take that back."""
        self._change(restore_certificate=serial)

    def alter_role(self, name: str, change: Callable[[tuple[Grant, ...]], Sequence[Grant]]) -> Role:
        """Change the grants of a role; return it as it is then."""

        def changed(state: AccessState) -> tuple[dict[str, Any], Role]:
            role = next((role for role in state.roles if role.name == name), None)
            if role is None:
                raise InvalidArgumentError(field="role", reason=f"there is no role {name!r}")
            role = replace(role, grants=tuple(change(role.grants)))
            return {"put_role": convert.ROLE.encode(role)}, role

        altered: Role = self._alter(changed)
        return altered

    def alter_user(self, name: str, change: Callable[[User], User]) -> User:
        """Change a user; return it as it is then."""

        def changed(state: AccessState) -> tuple[dict[str, Any], User]:
            user = next((user for user in state.users if user.name == name), None)
            if user is None:
                raise InvalidArgumentError(field="user", reason=f"there is no user {name!r}")
            user = change(user)
            return {"put_user": convert.USER.encode(user)}, user

        altered: User = self._alter(changed)
        return altered

    def _alter(self, changed: Callable[[AccessState], tuple[dict[str, Any], Any]]) -> Any:
        """Change what is there, and again if somebody else has changed it meanwhile."""
        for left in range(_TRIES, 0, -1):
            state = self.state()
            change, result = changed(state)
            try:
                self._change(expected_access_version=state.version, **change)
            except ConditionFailedError:
                if left == 1:
                    raise
            else:
                break
        return result

    def _change(self, **change: Any) -> None:
        request = admin_pb2.ChangeAccessRequest(**change)
        reply = self._admin.ask("ChangeAccess", request, Repeat.NOTHING)
        self.behind = Behind(tuple(reply.nodes_behind), reply.behind_serve_ms)
