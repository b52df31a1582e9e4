"""Changes of users, roles, tokens and keyspaces: each is applied to the present state, and is in
force when its method returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from koinon_proto.contract import convert
from koinon_proto.contract.access import AccessState, Grant, Role, Token, User
from koinon_proto.contract.errors import ConditionFailedError, InvalidArgumentError
from koinon_proto.contract.keyspaces import Keyspace
from koinon_proto.contract.leader_search import Repeat
from koinon_proto.v1 import admin_pb2, table_pb2

T = TypeVar("T")


class Ask(Protocol):
    """Calls the coordinators' leader; ``repeat`` says whether the call is repeated if no answer
    comes.
    """

    def __call__(self, method: str, message: Any, repeat: Repeat = Repeat.READ) -> Any: ...


_TRIES = 5


@dataclass(frozen=True, slots=True)
class Behind:
    """Live nodes that have not confirmed a change: cut off, or hanging. They may serve by the
    former state for ``serve_ms``; 0: they serve no client until they have the change.
    """

    node_ids: tuple[str, ...] = ()
    serve_ms: int = 0

    def __str__(self) -> str:
        """Return a sentence for operators; '' if every live node has confirmed."""
        if not self.node_ids:
            return ""
        first_s = f" after {self.serve_ms / 1000:.1f} s at the latest" if self.serve_ms else ""
        return f"not confirmed by {', '.join(self.node_ids)}: no client is served there{first_s}"


class AccessAdmin:
    """Reads and changes permissions. Methods raise the errors of ``Admin``'s calls, and
    InvalidArgumentError if a change contradicts the present state. A change is in force when its
    method returns; ``behind`` lists the nodes that have not confirmed it.
    """

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self.behind = Behind()  # of the last change

    def state(self) -> AccessState:
        """Return the whole state, without the hashes of tokens."""
        reply = self._ask("GetAccess", admin_pb2.GetAccessRequest())
        return convert.ACCESS.decode(reply.access)

    def put_role(self, role: Role) -> None:
        """Create the role, or replace the role of this name."""
        self._change(put_role=convert.ROLE.encode(role))

    def drop_role(self, name: str) -> None:
        self._change(drop_role=name)

    def put_user(self, user: User) -> None:
        """Create the user, or replace the user of this name."""
        self._change(put_user=convert.USER.encode(user))

    def drop_user(self, name: str) -> None:
        """Delete the user and its tokens."""
        self._change(drop_user=name)

    def add_token(self, token: Token) -> None:
        """Register a token (``contract.access.make_token`` makes it and its text)."""
        self._change(add_token=convert.TOKEN.encode(token))

    def drop_token(self, token_id: str) -> None:
        self._change(drop_token=token_id)

    def revoke_certificate(self, serial: str) -> None:
        """Refuse the certificate with this serial number (hexadecimal), whoever its holder."""
        self._change(revoke_certificate=serial)

    def restore_certificate(self, serial: str) -> None:
        """Accept a revoked certificate again."""
        self._change(restore_certificate=serial)

    def alter_role(self, name: str, change: Callable[[tuple[Grant, ...]], Sequence[Grant]]) -> Role:
        """Change the grants of a role; return the changed role."""

        def changed(state: AccessState) -> tuple[dict[str, Any], Role]:
            role = next((role for role in state.roles if role.name == name), None)
            if role is None:
                raise InvalidArgumentError(field="role", reason=f"there is no role {name!r}")
            role = replace(role, grants=tuple(change(role.grants)))
            return {"put_role": convert.ROLE.encode(role)}, role

        return self._alter(changed)

    def alter_user(self, name: str, change: Callable[[User], User]) -> User:
        """Change a user; return the changed user."""

        def changed(state: AccessState) -> tuple[dict[str, Any], User]:
            user = next((user for user in state.users if user.name == name), None)
            if user is None:
                raise InvalidArgumentError(field="user", reason=f"there is no user {name!r}")
            user = change(user)
            return {"put_user": convert.USER.encode(user)}, user

        return self._alter(changed)

    def _alter(self, changed: Callable[[AccessState], tuple[dict[str, Any], T]]) -> T:
        """Apply a change to the present state; repeat it if another change came between."""
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
        reply = self._ask("ChangeAccess", request, Repeat.NOTHING)
        self.behind = Behind(tuple(reply.nodes_behind), reply.behind_serve_ms)


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyspaceMade:
    """A keyspace after a change; ``behind``: the nodes that have not confirmed it."""

    keyspace: Keyspace
    behind: Behind


class KeyspaceAdmin:
    """Changes keyspaces; the table lists them. Methods raise the errors of ``Admin``'s calls, and
    UnknownKeyspaceError, KeyspaceChangeError and InvalidArgumentError if nothing was changed. A
    change is in force when its method returns; ``behind`` lists the nodes that have not confirmed
    it.
    """

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    def create(
        self,
        name: str,
        *,
        partition_count: int = 0,
        partitioner: str = "",
        replication_factor: int = 0,
        min_in_sync: int = 0,
        max_value_bytes: int = 0,
        pool: str = "",
        default_ttl_ms: int = 0,
        max_ttl_ms: int = 0,
        max_rows_per_s: int = 0,
        max_bytes_per_s: int = 0,
    ) -> KeyspaceMade:
        """Create a keyspace; if it exists with these settings, return it. 0 or "" stands for the
        default: 64 partitions, the hash of ``default`` without a router, the numbers of
        ``default``, no default and no maximum of the time to live, no limit of rows and bytes a
        second.
        """
        keyspace = table_pb2.Keyspace(
            name=name,
            partition_count=partition_count,
            partitioner=partitioner,
            replication_factor=replication_factor,
            min_in_sync=min_in_sync,
            max_value_bytes=max_value_bytes,
            pool=pool,
            default_ttl_ms=default_ttl_ms,
            max_ttl_ms=max_ttl_ms,
            max_rows_per_s=max_rows_per_s,
            max_bytes_per_s=max_bytes_per_s,
        )
        return self._change("CreateKeyspace", admin_pb2.CreateKeyspaceRequest(keyspace=keyspace))

    def alter(
        self,
        name: str,
        *,
        min_in_sync: int | None = None,
        max_value_bytes: int | None = None,
        pool: str | None = None,
        default_ttl_ms: int | None = None,
        max_ttl_ms: int | None = None,
        max_rows_per_s: int | None = None,
        max_bytes_per_s: int | None = None,
    ) -> KeyspaceMade:
        """Alter the given settings; 0 removes a time to live or a limit a second. (The replication
        factor is changed by a plan.)
        """
        request = admin_pb2.AlterKeyspaceRequest(
            name=name,
            min_in_sync=min_in_sync,
            max_value_bytes=max_value_bytes,
            pool=pool,
            default_ttl_ms=default_ttl_ms,
            max_ttl_ms=max_ttl_ms,
            max_rows_per_s=max_rows_per_s,
            max_bytes_per_s=max_bytes_per_s,
        )
        return self._change("AlterKeyspace", request)

    def drop(self, name: str, keyspace_id: int = 0) -> KeyspaceMade:
        """Drop a keyspace and all of its records. With a ``keyspace_id`` other than 0, only if it
        has this id.
        """
        request = admin_pb2.DropKeyspaceRequest(name=name, keyspace_id=keyspace_id)
        return self._change("DropKeyspace", request)

    def _change(self, method: str, request: Any) -> KeyspaceMade:
        reply = self._ask(method, request, Repeat.CHANGE)
        return KeyspaceMade(
            keyspace=convert.KEYSPACE.decode(reply.keyspace),
            behind=Behind(tuple(reply.nodes_behind), reply.behind_serve_ms),
        )
