"""Users, roles, tokens and revoked certificates in the replicated state. Pure.

``fault`` returns the reason why a command is not allowed. The leader calls it before it proposes,
and ``apply`` calls it again on every member. ``changed`` applies a command without a fault. The
rules:

* a role that users have is not dropped; a user is dropped with its tokens;
* a user names only existing roles, a token only an existing user;
* a new grant of a role names only a usable keyspace. Existing grants stay when their keyspace is
  dropped: no other keyspace ever gets its id, so they allow nothing any more;
* ``root`` is not a user of the state;
* a command without an effect changes nothing, not even the version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from koinon_coordinator.core.cluster.commands import (
    AccessCommand,
    AddToken,
    DropRole,
    DropToken,
    DropUser,
    PutRole,
    PutUser,
    Reason,
    RestoreCertificate,
    RevokeCertificate,
)
from koinon_proto.contract.access import (
    CLUSTER_ACTIONS,
    DESCRIPTION_CHARS_MAX,
    GRANTS_ALL_MAX,
    GRANTS_MAX,
    HASH_BYTES,
    REVOKED_MAX,
    ROLES_MAX,
    ROOT,
    STATE_BYTES_MAX,
    TIME_S_MAX,
    TOKENS_MAX,
    USER_ROLES_MAX,
    USERS_MAX,
    AccessState,
    Grant,
    Role,
    grants_counted,
    is_serial,
    is_token_id,
)
from koinon_proto.contract.addresses import is_name
from koinon_proto.contract.keyspaces import Keyspaces
from koinon_proto.contract.table import MAX_KEY_BYTES

NAMED_MAX = 10  # names that a text lists one by one


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """The reason why a command is refused: the field, the text, its limit and its value (0: none
    applies).
    """

    field: str
    text: str
    limit: int = 0
    actual: int = 0
    reason: Reason = Reason.BAD_ACCESS


def fault(state: AccessState, command: AccessCommand, keyspaces: Keyspaces) -> Fault | None:
    """Return the reason why this command is not allowed, or None. ``keyspaces``: the existing
    ones.
    """
    expected = command.expected_version
    if expected is not None and expected != state.version:
        return Fault(
            field="expected_access_version",
            text=Reason.ACCESS_CHANGED.value,
            limit=expected,
            actual=state.version,
            reason=Reason.ACCESS_CHANGED,
        )
    wrong = _FAULTS[type(command)](state, command)
    if wrong is None and isinstance(command, PutRole):
        wrong = _keyspace_fault(state, command.role, keyspaces)
    return wrong or _bytes_fault(state, _CHANGES[type(command)](state, command))


def changed(state: AccessState, command: AccessCommand) -> AccessState:
    """Return the state after a command without a ``fault``; the same object if nothing changes."""
    after = _CHANGES[type(command)](state, command)
    return state if after == state else replace(after, version=state.version + 1)


def _bytes_fault(before: AccessState, after: AccessState) -> Fault | None:
    size = after.bytes
    if size <= STATE_BYTES_MAX or size <= before.bytes:
        return None
    text = "users, roles and tokens are too much together: make prefixes shorter, or fewer grants"
    return Fault(field="access", text=text, limit=STATE_BYTES_MAX, actual=size)


# --- faults --------------------------------------------------------------------------------------


def _put_role_fault(state: AccessState, command: PutRole) -> Fault | None:
    role = command.role
    if not is_name(role.name):
        return _bad_name("name", role.name)
    roles = {known.name: known for known in state.roles}
    if role.name not in roles and len(roles) >= ROLES_MAX:
        return Fault(field="roles", text="too many", limit=ROLES_MAX, actual=len(roles) + 1)
    for grant in role.grants:
        wrong = _grant_fault(grant)
        if wrong is not None:
            return wrong
    roles[role.name] = role
    return _count_fault(roles) or _users_fault(state, roles, role.name)


def _keyspace_fault(state: AccessState, role: Role, keyspaces: Keyspaces) -> Fault | None:
    """Return the fault of a new grant of the role that names an unusable keyspace."""
    before = next((known for known in state.roles if known.name == role.name), None)
    standing = set(before.grants) if before is not None else set()
    usable = {keyspace.keyspace_id for keyspace in keyspaces}
    for grant in role.grants:
        keyspace_id = grant.keyspace_id
        if keyspace_id is not None and keyspace_id not in usable and grant not in standing:
            return Fault(
                field="keyspace_id",
                text=f"there is no keyspace with id {keyspace_id}",
                actual=keyspace_id,
                reason=Reason.KEYSPACE_UNKNOWN,
            )
    return None


def _grant_fault(grant: Grant) -> Fault | None:
    if not grant.actions:
        return Fault(field="actions", text="a grant must name at least one")
    if len(set(grant.actions)) != len(grant.actions):
        return Fault(field="actions", text="a grant names one twice")
    of_cluster = sorted(CLUSTER_ACTIONS.intersection(grant.actions))
    if grant.prefix and of_cluster:
        name = of_cluster[0].name.lower()
        return Fault(field="prefix", text=f"must be empty: {name} concerns no keys")
    if grant.keyspace_id is not None and of_cluster:
        name = of_cluster[0].name.lower()
        return Fault(field="keyspace_id", text=f"must be absent: {name} concerns no keyspace")
    if len(grant.prefix) > MAX_KEY_BYTES:
        return Fault(
            field="prefix",
            text="longer than any key",
            limit=MAX_KEY_BYTES,
            actual=len(grant.prefix),
        )
    return None


def _count_fault(roles: Mapping[str, Role]) -> Fault | None:
    grants = sum(len(role.grants) for role in roles.values())
    if grants > GRANTS_ALL_MAX:
        text = "too many in all roles together"
        return Fault(field="grants", text=text, limit=GRANTS_ALL_MAX, actual=grants)
    return None


def _users_fault(state: AccessState, roles: Mapping[str, Role], name: str) -> Fault | None:
    """Return the fault of a user that would have too many grants with the role ``name`` of
    ``roles``.
    """
    if (count := grants_counted(roles[name].grants)) > GRANTS_MAX:
        return Fault(field="grants", text="too many", limit=GRANTS_MAX, actual=count)
    for user in state.users:
        if name in user.roles:
            wrong = _grants_of_user_fault(user.name, user.roles, roles)
            if wrong is not None:
                return wrong
    return None


def _grants_of_user_fault(
    name: str, role_names: Iterable[str], roles: Mapping[str, Role]
) -> Fault | None:
    grants = grants_counted(grant for role in role_names for grant in roles[role].grants)
    if grants <= GRANTS_MAX:
        return None
    text = f"too many in all roles of user {name} together"
    return Fault(field="grants", text=text, limit=GRANTS_MAX, actual=grants)


def _drop_role_fault(state: AccessState, command: DropRole) -> Fault | None:
    if all(role.name != command.name for role in state.roles):
        return _unknown("role", command.name, (role.name for role in state.roles))
    having = [user.name for user in state.users if command.name in user.roles]
    if having:
        text = f"{command.name} belongs to {_listed(having)}: take it from them first"
        return Fault(field="role", text=text)
    return None


def _put_user_fault(state: AccessState, command: PutUser) -> Fault | None:
    user = command.user
    if not is_name(user.name):
        return _bad_name("name", user.name)
    if user.name == ROOT:
        text = "root may do everything by its certificate: it is not created, changed or blocked"
        return Fault(field="name", text=text)
    users = {known.name for known in state.users}
    if user.name not in users and len(users) >= USERS_MAX:
        return Fault(field="users", text="too many", limit=USERS_MAX, actual=len(users) + 1)
    if len(user.roles) > USER_ROLES_MAX:
        count = len(user.roles)
        return Fault(field="roles", text="too many", limit=USER_ROLES_MAX, actual=count)
    if len(set(user.roles)) != len(user.roles):
        return Fault(field="roles", text="one is named twice")
    roles = {role.name: role for role in state.roles}
    for name in user.roles:
        if name not in roles:
            return _unknown("role", name, roles)
    if not 0 <= user.certificates_from_s <= TIME_S_MAX:
        return Fault(field="certificates_from_s", text="is no time", limit=TIME_S_MAX)
    return _grants_of_user_fault(user.name, user.roles, roles)


def _drop_user_fault(state: AccessState, command: DropUser) -> Fault | None:
    return _user_fault(state, command.name)


def _user_fault(state: AccessState, name: str) -> Fault | None:
    if any(user.name == name for user in state.users):
        return None
    return _unknown("user", name, (user.name for user in state.users))


def _add_token_fault(state: AccessState, command: AddToken) -> Fault | None:
    token = command.token
    if not is_token_id(token.id):
        return Fault(field="id", text="must be 10 of a-z and 2-7")
    if len(token.sha256) != HASH_BYTES:
        return Fault(field="sha256", text="is no SHA-256", limit=HASH_BYTES)
    if token.user == ROOT:
        return Fault(field="user", text="root has no tokens: it shows its certificate")
    if wrong := _user_fault(state, token.user):
        return wrong
    for name, time_s in (("created_s", token.created_s), ("expires_s", token.expires_s)):
        if not 0 <= time_s <= TIME_S_MAX:
            return Fault(field=name, text="is no time", limit=TIME_S_MAX)
    if len(token.description) > DESCRIPTION_CHARS_MAX or not token.description.isprintable():
        text = "must be printable and not too long"
        return Fault(
            field="description",
            text=text,
            limit=DESCRIPTION_CHARS_MAX,
            actual=len(token.description),
        )
    known = next((known for known in state.tokens if known.id == token.id), None)
    if known is not None and known != token:
        return Fault(field="id", text=f"{token.id} is another token already: make a new one")
    if known is None and len(state.tokens) >= TOKENS_MAX:
        text = "too many: drop those that have expired"
        return Fault(field="tokens", text=text, limit=TOKENS_MAX, actual=TOKENS_MAX + 1)
    return None


def _drop_token_fault(state: AccessState, command: DropToken) -> Fault | None:
    if any(token.id == command.token_id for token in state.tokens):
        return None
    return Fault(field="token", text=f"there is no token {command.token_id!r}")


def _revoke_fault(state: AccessState, command: RevokeCertificate) -> Fault | None:
    if not is_serial(command.serial):
        return _bad_serial(command.serial)
    revoked = state.revoked_serials
    if command.serial not in revoked and len(revoked) >= REVOKED_MAX:
        text = "too many: take back those of certificates that have run out"
        return Fault(field="serial", text=text, limit=REVOKED_MAX, actual=REVOKED_MAX + 1)
    return None


def _restore_fault(_state: AccessState, command: RestoreCertificate) -> Fault | None:
    return None if is_serial(command.serial) else _bad_serial(command.serial)


def _bad_name(field: str, name: str) -> Fault:
    text = f"{name!r} must be letters, digits, '.', '_' or '-', up to 128 of them"
    return Fault(field=field, text=text)


def _bad_serial(serial: str) -> Fault:
    text = f"{serial!r} is no serial number: hexadecimal, without zeros at its beginning"
    return Fault(field="serial", text=text)


def _unknown(what: str, name: str, known: Iterable[str]) -> Fault:
    names = list(known)
    there = f"there are {_listed(names)}" if names else f"there is no {what} yet"
    return Fault(field=what, text=f"there is no {what} {name!r}; {there}")


def _listed(names: list[str]) -> str:
    more = len(names) - NAMED_MAX
    text = ", ".join(names[:NAMED_MAX])
    return f"{text} and {more} more" if more > 0 else text


_FAULTS: dict[type[Any], Callable[[AccessState, Any], Fault | None]] = {
    PutRole: _put_role_fault,
    DropRole: _drop_role_fault,
    PutUser: _put_user_fault,
    DropUser: _drop_user_fault,
    AddToken: _add_token_fault,
    DropToken: _drop_token_fault,
    RevokeCertificate: _revoke_fault,
    RestoreCertificate: _restore_fault,
}

# --- changes -------------------------------------------------------------------------------------


def _put_role(state: AccessState, command: PutRole) -> AccessState:
    roles = {role.name: role for role in state.roles} | {command.role.name: command.role}
    return replace(state, roles=tuple(roles[name] for name in sorted(roles)))


def _drop_role(state: AccessState, command: DropRole) -> AccessState:
    return replace(state, roles=tuple(r for r in state.roles if r.name != command.name))


def _put_user(state: AccessState, command: PutUser) -> AccessState:
    users = {user.name: user for user in state.users} | {command.user.name: command.user}
    return replace(state, users=tuple(users[name] for name in sorted(users)))


def _drop_user(state: AccessState, command: DropUser) -> AccessState:
    return replace(
        state,
        users=tuple(user for user in state.users if user.name != command.name),
        tokens=tuple(token for token in state.tokens if token.user != command.name),
    )


def _add_token(state: AccessState, command: AddToken) -> AccessState:
    tokens = {token.id: token for token in state.tokens} | {command.token.id: command.token}
    return replace(state, tokens=tuple(tokens[token_id] for token_id in sorted(tokens)))


def _drop_token(state: AccessState, command: DropToken) -> AccessState:
    return replace(state, tokens=tuple(t for t in state.tokens if t.id != command.token_id))


def _revoke(state: AccessState, command: RevokeCertificate) -> AccessState:
    return replace(state, revoked_serials=tuple(sorted({*state.revoked_serials, command.serial})))


def _restore(state: AccessState, command: RestoreCertificate) -> AccessState:
    return replace(
        state, revoked_serials=tuple(s for s in state.revoked_serials if s != command.serial)
    )


_CHANGES: dict[type[Any], Callable[[AccessState, Any], AccessState]] = {
    PutRole: _put_role,
    DropRole: _drop_role,
    PutUser: _put_user,
    DropUser: _drop_user,
    AddToken: _add_token,
    DropToken: _drop_token,
    RevokeCertificate: _revoke,
    RestoreCertificate: _restore,
}
