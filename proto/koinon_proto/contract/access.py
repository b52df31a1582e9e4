"""The rights of callers: users, roles, tokens, revoked certificates; and how they are asked for.

``AccessState`` is what the coordinators replicate and nodes are sent. ``Access`` is made of one
such state and answers; it never changes, so that a process swaps it whole. The rules:

* A user may do what the roles that it has give it, united; nothing by default.
* A grant allows or denies actions on the keys that begin with its prefix: in one keyspace, or, if
  it names none, in every one, those included that are created later. Of the grants that hold for a
  key the one with the longest prefix decides; among those of equal length a denial.
* A keyspace is named by its id. So a grant ends with its keyspace: another one that is created by
  the same name has another id.
* A scan of a prefix (and what overwrites one) needs all keys that can begin with it: the key that
  is the prefix itself is allowed, and nothing below it is denied.
* Actions on the cluster have no prefix and no keyspace.
* ``ROOT`` may do everything, whatever the state says, so that nobody can lock all operators out.
  The state cannot name it.

Prefixes are nested or disjoint, so for each action the rules cut all keys into disjoint intervals,
allowed and refused ones in turn. ``KeyPermissions`` holds their bounds, sorted, of one keyspace: a
key costs one search among them, however many grants there are, and an action that is allowed on all
keys a boolean. ``Permissions`` has one such table for each keyspace that its grants name, and one
for all others.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from itertools import pairwise
from typing import ClassVar

from koinon_proto.contract.keyspaces import KeyspaceId

ROOT = "root"
ROLES_MAX = 1_000
USERS_MAX = 1_000
TOKENS_MAX = 10_000
REVOKED_MAX = 10_000
GRANTS_MAX = 10_000
"""In all roles of one user together, as ``grants_counted`` counts them."""
GRANTS_ALL_MAX = 50_000
STATE_BYTES_MAX = 4 << 20
"""Of ``AccessState.bytes``: each node is sent the state whole, in one message."""
USER_ROLES_MAX = 100
DESCRIPTION_CHARS_MAX = 200
TIME_S_MAX = (1 << 40) - 1
HASH_BYTES = 32
_TOKEN_MARK = "koinon"
_TOKEN_ID = re.compile(r"[a-z2-7]{10}")
_TOKEN = re.compile(r"koinon_([a-z2-7]{10})_([A-Za-z0-9]{43})")
_ID_CHARACTERS = "abcdefghijklmnopqrstuvwxyz234567"
_SECRET_CHARACTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
_SECRET_CHARS = 43  # of 62 characters: 256 bits
_SERIAL = re.compile(r"[1-9a-f][0-9a-f]{0,39}")
_HEADS_MIN = 1_024
_APART_MAX = 8


class Effect(IntEnum):
    """The effects of grants; numbers are those of the wire."""

    ALLOW = 1
    DENY = 2


class Action(IntEnum):
    """Actions that may be allowed; numbers are those of the wire."""

    READ = 1
    WRITE = 2
    SCAN = 3
    LOAD = 4
    FEED = 5
    VIEW = 6
    OPERATE = 7
    ACCESS = 8
    BACKUP = 9


CLUSTER_ACTIONS = frozenset({Action.VIEW, Action.OPERATE, Action.ACCESS})
"""Those that concern no keys: seeing the cluster, operating it, managing access to it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grant:
    """Allows or denies actions on the keys that begin with ``prefix``, in one keyspace;
    ``keyspace_id`` None: in every one.
    """

    effect: Effect
    actions: tuple[Action, ...]
    prefix: bytes = b""
    keyspace_id: KeyspaceId | None = None


def grants_counted(grants: Iterable[Grant]) -> int:
    """Return the number of grants, as the limit for one user counts them: a grant that names no
    keyspace counts once more for each keyspace that other grants name, since it is part of that
    keyspace's table too.
    """
    held = list(grants)
    everywhere = sum(grant.keyspace_id is None for grant in held)
    keyspaces = {grant.keyspace_id for grant in held} - {None}
    return len(held) + everywhere * len(keyspaces)


@dataclass(frozen=True, kw_only=True, slots=True)
class Role:
    name: str
    grants: tuple[Grant, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class User:
    """A user with roles. Certificates issued before ``certificates_from_s`` (unix time) are
    refused; 0: none.
    """

    name: str
    roles: tuple[str, ...] = ()
    blocked: bool = False
    certificates_from_s: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Token:
    """A token of a user. Only the SHA-256 of its secret is stored; times are unix seconds,
    ``expires_s`` 0: never.
    """

    id: str
    user: str
    sha256: bytes = field(repr=False)
    created_s: int
    expires_s: int = 0
    description: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class AccessState:
    """The whole state of access. ``version`` rises with each change; 0: there was no change yet.
    All fields are sorted by name.
    """

    version: int = 0
    roles: tuple[Role, ...] = ()
    users: tuple[User, ...] = ()
    tokens: tuple[Token, ...] = ()
    revoked_serials: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        """An upper bound, close to the exact value, of the state's bytes in a message."""
        grants = (grant for role in self.roles for grant in role.grants)
        return (
            sum(
                len(grant.prefix) + len(grant.actions) + (16 if grant.keyspace_id is None else 24)
                for grant in grants
            )
            + sum(len(role.name) + 8 for role in self.roles)
            + sum(len(name) + 8 for user in self.users for name in (user.name, *user.roles))
            + sum(len(token.user) + 4 * len(token.description) + 80 for token in self.tokens)
            + sum(len(serial) + 4 for serial in self.revoked_serials)
        )


NO_ACCESS_STATE = AccessState()

# --- tokens and serial numbers ------------------------------------------------------------------


def make_token(
    user: str, *, created_s: int, expires_s: int = 0, description: str = ""
) -> tuple[Token, str]:
    """Return a new token, and its text with the secret, which only its holder ever learns."""
    token_id = "".join(secrets.choice(_ID_CHARACTERS) for _ in range(10))
    secret = "".join(secrets.choice(_SECRET_CHARACTERS) for _ in range(_SECRET_CHARS))
    token = Token(
        id=token_id,
        user=user,
        sha256=secret_hash(secret),
        created_s=created_s,
        expires_s=expires_s,
        description=description,
    )
    return token, f"{_TOKEN_MARK}_{token_id}_{secret}"


def parse_token(text: str) -> tuple[str, str] | None:
    """Return a token's id and secret; None if the text is no token."""
    match = _TOKEN.fullmatch(text)
    return (match[1], match[2]) if match is not None else None


def secret_hash(secret: str) -> bytes:
    """Return the stored hash of a secret. Secrets are random, so a fast hash protects them."""
    return hashlib.sha256(secret.encode()).digest()


def is_token_id(text: str) -> bool:
    return _TOKEN_ID.fullmatch(text) is not None


def serial_text(serial: int) -> str:
    """Return a certificate's serial number in the form in which the state stores it."""
    return f"{serial:x}"


def is_serial(text: str) -> bool:
    """Return whether this is a serial number as ``serial_text`` writes it: 20 bytes at most."""
    return _SERIAL.fullmatch(text) is not None


# --- permissions ---------------------------------------------------------------------------------


class _Reach:
    """The keys on which one action is allowed.

    ``bounds`` are where intervals begin, ascending, the first at ``b""``; ``allowed`` says of each
    whether it is allowed. No two neighbours are alike.
    """

    __slots__ = (
        *("_allowed", "_allows_in", "_apart", "_bounds", "_head_bytes", "_heads", "_heads_max"),
        *("_interval_of", "everywhere", "some"),
    )

    def __init__(self, decisions: Mapping[bytes, bool]) -> None:
        """``decisions``: whether the grants with this prefix allow."""
        bounds, allowed = _intervals(decisions)
        self._bounds, self._allowed = bounds, allowed
        self.some = any(allowed)
        self.everywhere = allowed == [True]
        # No prefix is longer than this, so a key is decided as its head is. Heads that were found
        # allowed are remembered: keys come in groups that begin alike.
        self._head_bytes = max(map(len, decisions), default=0)
        self._heads: set[bytes] = set()
        self._heads_max = max(_HEADS_MIN, 2 * len(decisions))
        self._interval_of = partial(bisect_right, bounds)  # counted from 1
        self._allows_in = [False, *allowed].__getitem__
        self._apart = 0  # groups in a row that were not within one interval

    def allows(self, key: bytes) -> bool:
        return self._allowed[bisect_right(self._bounds, key) - 1]

    def allows_prefix(self, prefix: bytes) -> bool:
        at = bisect_right(self._bounds, prefix) - 1
        if not self._allowed[at]:
            return False
        end = prefix_end(prefix)
        if at + 1 == len(self._bounds):
            return True
        return end is not None and self._bounds[at + 1] >= end

    def allows_range(self, first: bytes, last: bytes) -> bool:
        at = bisect_right(self._bounds, first)
        return self._allowed[at - 1] and at == bisect_right(self._bounds, last)

    def first_refused(self, keys: Collection[bytes]) -> bytes | None:
        if self.everywhere:
            return None
        # The least and the greatest may say it of all. Where they seldom do, they are seldom asked.
        asks = self._apart < _APART_MAX or self._apart % _APART_MAX == 0
        if asks and keys and self.allows_range(min(keys), max(keys)):
            self._apart = 0
            return None
        self._apart += 1
        n = self._head_bytes
        heads = {key[:n] for key in keys}
        if self._heads.issuperset(heads):
            return None
        heads -= self._heads
        if not all(map(self._allows_in, map(self._interval_of, heads))):
            return next(key for key in keys if not self.allows(key))
        if len(self._heads) + len(heads) > self._heads_max:
            self._heads.clear()
        self._heads |= heads
        return None


def prefix_end(prefix: bytes) -> bytes | None:
    """Return the least key above all keys that begin with the prefix; None if there is none."""
    stem = prefix.rstrip(b"\xff")
    return stem[:-1] + bytes([stem[-1] + 1]) if stem else None


def _intervals(decisions: Mapping[bytes, bool]) -> tuple[list[bytes], list[bool]]:
    """Return where the intervals begin that prefixes cut all keys into, and what holds in each.

    Prefixes are taken in their order, so one comes before all that it contains. Those that contain
    the present one are on a stack; where one ends, the one below it holds again.
    """
    cuts: list[tuple[bytes, bool]] = [(b"", False)]
    inside: list[tuple[bytes, bytes | None, bool]] = []

    def leave() -> None:
        _, end, _ = inside.pop()
        if end is not None:
            cuts.append((end, inside[-1][2] if inside else False))

    for prefix in sorted(decisions):
        while inside and not prefix.startswith(inside[-1][0]):
            leave()
        allows = decisions[prefix]
        cuts.append((prefix, allows))
        inside.append((prefix, prefix_end(prefix), allows))
    while inside:
        leave()
    held = sorted(dict(cuts).items())  # of cuts at one place the last one holds
    merged = held[:1] + [second for first, second in pairwise(held) if second[1] != first[1]]
    return [bound for bound, _ in merged], [allows for _, allows in merged]


class KeyPermissions:
    """The actions that one caller may carry out on the keys of one keyspace."""

    __slots__ = ("_reaches",)

    def __init__(self, grants: Iterable[Grant]) -> None:
        """``grants``: the grants that apply in the keyspace."""
        decisions: dict[Action, dict[bytes, bool]] = {action: {} for action in Action}
        for grant in grants:
            allows = grant.effect is Effect.ALLOW
            for action in grant.actions:
                of_action = decisions[action]
                of_action[grant.prefix] = allows and of_action.get(grant.prefix, True)
        made: list[tuple[dict[bytes, bool], _Reach]] = []  # most grants name several actions
        self._reaches: list[_Reach] = [_NOWHERE] * (max(Action) + 1)
        for action, of_action in decisions.items():
            if not of_action:
                continue
            reach = next((reach for same, reach in made if same == of_action), None)
            if reach is None:
                reach = _Reach(of_action)
                made.append((of_action, reach))
            self._reaches[action] = reach

    def allows_some(self, action: Action) -> bool:
        """Return whether there is any key on which the action is allowed."""
        return self._reaches[action].some

    def allows_all(self, action: Action) -> bool:
        """Return whether the action is allowed on every key."""
        return self._reaches[action].everywhere

    def allows(self, action: Action, key: bytes) -> bool:
        """Return whether the action is allowed on the key."""
        return self._reaches[action].allows(key)

    def allows_prefix(self, action: Action, prefix: bytes) -> bool:
        """Return whether the action is allowed on every key that can begin with the prefix."""
        return self._reaches[action].allows_prefix(prefix)

    def allows_range(self, action: Action, first: bytes, last: bytes) -> bool:
        """Return whether the action is allowed on every key from ``first`` to ``last``."""
        return self._reaches[action].allows_range(first, last)

    def first_refused(self, action: Action, keys: Collection[bytes]) -> bytes | None:
        """Return the first of the keys on which the action is not allowed; None if all are
        allowed.
        """
        return self._reaches[action].first_refused(keys)


_NOWHERE = _Reach({})


class Permissions:
    """The actions that one caller may carry out. Immutable, apart from a cache."""

    ALL: ClassVar[Permissions]
    NONE: ClassVar[Permissions]
    __slots__ = ("_elsewhere", "_everywhere", "_of_keyspace", "_own", "_some")

    def __init__(self, grants: Iterable[Grant]) -> None:
        self._everywhere: list[Grant] = []  # those that name no keyspace
        self._own: dict[int, list[Grant]] = {}  # the others, by the keyspace's id
        for grant in grants:
            if grant.keyspace_id is None:
                self._everywhere.append(grant)
            else:
                self._own.setdefault(grant.keyspace_id, []).append(grant)
        self._elsewhere = KeyPermissions(self._everywhere)  # in keyspaces that no grant names
        self._of_keyspace: dict[int, KeyPermissions] = {}  # made when they are asked for
        self._some: frozenset[Action] | None = None  # likewise

    def in_keyspace(self, keyspace_id: int) -> KeyPermissions:
        """Return the caller's permissions in the keyspace with this id."""
        made = self._of_keyspace.get(keyspace_id)
        if made is None:
            own = self._own.get(keyspace_id)
            if own is None:
                return self._elsewhere
            made = self._of_keyspace[keyspace_id] = KeyPermissions([*self._everywhere, *own])
        return made

    def allows_some(self, action: Action) -> bool:
        """Return whether there is any key in any keyspace on which the action is allowed; of the
        cluster's actions, whether it is allowed.
        """
        if self._some is None:
            held = [self._elsewhere, *map(self.in_keyspace, self._own)]
            self._some = frozenset(a for a in Action if any(one.allows_some(a) for one in held))
        return action in self._some

    def allows_on_cluster(self, action: Action) -> bool:
        """Return whether the action, which concerns no keys, is allowed."""
        return self._elsewhere.allows_all(action)


Permissions.NONE = Permissions(())
Permissions.ALL = Permissions([Grant(effect=Effect.ALLOW, actions=tuple(Action))])


class Access:
    """Answers which caller may do what, by one access state. Immutable, apart from caches."""

    def __init__(self, state: AccessState = NO_ACCESS_STATE, before: Access | None = None) -> None:
        """``before``: the preceding object, whose unchanged parts are reused."""
        self.state = state
        self.version = state.version
        self._users = {user.name: user for user in state.users}
        self._roles = {role.name: role for role in state.roles}
        self._tokens = {token.id: token for token in state.tokens}
        self._revoked = frozenset(state.revoked_serials)
        # By the names of roles: users with the same ones share what is made of them.
        self._permissions: dict[tuple[str, ...], Permissions] = {}
        if before is not None:
            same = {n for n, role in self._roles.items() if before._roles.get(n) == role}
            self._permissions = {
                names: made for names, made in before._permissions.items() if same.issuperset(names)
            }

    def fault_of(self, user: str, issued_at_s: int = 0) -> str:
        """Return why this user is refused; ``""`` if it is not. ``issued_at_s``: of the user's
        certificate, 0 with a token.
        """
        if user == ROOT:
            return ""
        known = self._users.get(user)
        if known is None:
            return f"there is no user {user!r}"
        if known.blocked:
            return f"user {user} is blocked"
        if issued_at_s and issued_at_s < known.certificates_from_s:
            return f"user {user} has newer certificates: this one is no longer taken"
        return ""

    def permissions_of(self, user: str, issued_at_s: int = 0) -> Permissions:
        """Return the user's permissions: none if the user is refused. ``issued_at_s``: of the
        user's certificate, 0 with a token.
        """
        if user == ROOT:
            return Permissions.ALL
        if self.fault_of(user, issued_at_s):
            return Permissions.NONE
        names = self._users[user].roles
        permissions = self._permissions.get(names)
        if permissions is None:
            roles = [self._roles[name] for name in names if name in self._roles]
            permissions = Permissions(grant for role in roles for grant in role.grants)
            self._permissions[names] = permissions
        return permissions

    def token_of(self, text: str, now_s: float) -> Token | None:
        """Return the token of the text; None if it is malformed, unknown or expired."""
        parsed = parse_token(text)
        if parsed is None:
            return None
        token_id, secret = parsed
        token = self._tokens.get(token_id)
        shown = secret_hash(secret)
        if token is None or not hmac.compare_digest(shown, token.sha256):
            return None
        if token.expires_s and token.expires_s <= now_s:
            return None
        if token.user == ROOT or self.fault_of(token.user):
            return None
        return token

    def is_revoked(self, serial: int) -> bool:
        """Return whether the certificate with this serial number is revoked, whoever holds it."""
        return bool(self._revoked) and serial_text(serial) in self._revoked
