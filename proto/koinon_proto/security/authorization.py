"""The caller of the call that is being handled, and its permissions."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from itertools import islice

from koinon_proto.contract.access import Action, Permissions
from koinon_proto.contract.bulk_loads import owner_digest
from koinon_proto.contract.errors import (
    ConditionFailedError,
    KoinonError,
    PermissionDeniedError,
)
from koinon_proto.contract.keyspaces import DEFAULT_ID
from koinon_proto.security.names import Kind, Principal

_ROWS_NAMED_MAX = 1_000
"""Of those that are refused of one request. The error goes in a header, which has 8 kB."""


class Concern:
    """The keyspace that one call is about, for the audit log: by its id or, where an operator has
    named it, by that name; None: not known (yet), or none.
    """

    __slots__ = ("keyspace",)

    def __init__(self) -> None:
        self.keyspace: int | str | None = None


concern: ContextVar[Concern | None] = ContextVar("koinon_concern", default=None)
"""Of the call that this task handles. Set by the guard, if there is an audit log."""


def concerns(keyspace: int | str) -> None:
    """Note the keyspace of the call. Checks of keys do so themselves."""
    if (noted := concern.get()) is not None:
        noted.keyspace = keyspace


def _no_name(_: int) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class Caller:
    """A caller. ``principal`` None: it need not say, on a plain connection. ``keyspace_name``
    returns how refusals name a keyspace, by its id; '': it is not known. ``valid_until_s``: the
    unix time at which it has to be found anew, since what it has shown ends then.

    Its methods are the only ones that ask ``permissions`` (a test sees to that). Each that is about
    keys takes the id of the keyspace that they lie in, so no check can leave it out.
    """

    principal: Principal | None
    permissions: Permissions
    keyspace_name: Callable[[int], str] = field(default=_no_name, compare=False, repr=False)
    valid_until_s: float = math.inf

    @property
    def name(self) -> str:
        """The caller's name, as errors and the audit log show it."""
        return str(self.principal) if self.principal is not None else "anybody"

    def may_some(self, *actions: Action) -> bool:
        """Return whether there is any key, in any keyspace, on which one of the actions is allowed;
        of the cluster's actions, whether one is allowed.
        """
        return any(map(self.permissions.allows_some, actions))

    def may_on_cluster(self, action: Action) -> bool:
        """Return whether the action, which concerns no keys, is allowed."""
        return self.permissions.allows_on_cluster(action)

    def may(self, action: Action, keyspace_id: int, key: bytes) -> bool:
        """Return whether the action is allowed on the key of this keyspace."""
        return self.permissions.in_keyspace(keyspace_id).allows(action, key)

    def may_all(self, action: Action, keyspace_id: int) -> bool:
        """Return whether the action is allowed on every key of the keyspace."""
        return self.permissions.in_keyspace(keyspace_id).allows_all(action)

    def may_range(self, action: Action, keyspace_id: int, first: bytes, last: bytes) -> bool:
        """Return whether the action is allowed on every key from ``first`` to ``last``."""
        return self.permissions.in_keyspace(keyspace_id).allows_range(action, first, last)

    def check_some(self, action: Action, keyspace_id: int) -> None:
        """Raise PermissionDeniedError unless the action is allowed on some key of the keyspace."""
        concerns(keyspace_id)
        if not self.permissions.in_keyspace(keyspace_id).allows_some(action):
            raise self.denied(action, self._in("any key", keyspace_id))

    def check_keys(self, action: Action, keyspace_id: int, keys: Collection[bytes]) -> None:
        """Raise PermissionDeniedError for the first key on which the action is not allowed."""
        concerns(keyspace_id)
        if self.permissions is Permissions.ALL:
            return
        refused = self.permissions.in_keyspace(keyspace_id).first_refused(action, keys)
        if refused is not None:
            raise self.denied(action, self._in(f"key {refused!r}", keyspace_id))

    def check_rows(
        self,
        action: Action,
        keyspace_id: int,
        keys: Sequence[bytes],
        rows: Sequence[int] | None = None,
    ) -> None:
        """Check the keys of a request's rows, as ``check_keys`` does; the error names the refused
        rows. ``rows``: the rows that need the action; None: all.
        """
        asked = keys if rows is None else [keys[row] for row in rows]
        try:
            self.check_keys(action, keyspace_id, asked)
        except PermissionDeniedError as error:
            held = self.permissions.in_keyspace(keyspace_id)
            if held.allows_some(action) or len(asked) < len(keys):
                needing = range(len(keys)) if rows is None else rows
                refused = (row for row in needing if not held.allows(action, keys[row]))
                error.rows = tuple(islice(refused, _ROWS_NAMED_MAX))
            raise

    def told(self, error: KoinonError, keyspace_id: int, key: bytes) -> KoinonError:
        """Return a write's error in the form that this caller may see: only a caller that may read
        the key learns the version of an existing record.
        """
        if isinstance(error, ConditionFailedError) and not self.may(Action.READ, keyspace_id, key):
            return replace(error, current_version=0, version_hidden=True)
        return error

    def check_prefix(self, action: Action, keyspace_id: int, prefix: bytes) -> None:
        """Raise PermissionDeniedError unless the action is allowed on all keys with the prefix."""
        concerns(keyspace_id)
        if self.permissions is Permissions.ALL:
            return
        if not self.permissions.in_keyspace(keyspace_id).allows_prefix(action, prefix):
            what = f"everything under {prefix!r}" if prefix else "every key"
            raise self.denied(action, self._in(what, keyspace_id))

    @property
    def user(self) -> str:
        """The calling user; "" if callers need not authenticate."""
        principal = self.principal
        return principal.name if principal is not None and principal.kind is Kind.USER else ""

    @property
    def is_node(self) -> bool:
        """True if a node calls."""
        return self.principal is not None and self.principal.kind is Kind.NODE

    def check_load(self, load_id: int, digest: bytes, keyspace_id: int) -> None:
        """Raise PermissionDeniedError unless the caller may do all that operators may, or the bulk
        load whose ``owner_digest`` this is, is its own or has no owner, and it may load into some
        of the keyspace that the load is for.
        """
        concerns(keyspace_id)
        if self.principal is None or self.may_on_cluster(Action.OPERATE):
            return
        self.check_some(Action.LOAD, keyspace_id)
        if digest and digest != owner_digest(load_id, self.user):
            raise PermissionDeniedError(
                principal=self.name,
                action="use",
                what=f"load {load_id}, which another user has opened",
            )

    def denied(self, action: Action, what: str = "") -> PermissionDeniedError:
        """Return the refusal."""
        return PermissionDeniedError(principal=self.name, action=action.name.lower(), what=what)

    def _in(self, what: str, keyspace_id: int) -> str:
        """Return the keyspace's part of an error's text."""
        if keyspace_id == DEFAULT_ID:
            return what
        name = self.keyspace_name(keyspace_id)
        which = f"keyspace {name!r}" if name else f"the keyspace with id {keyspace_id}"
        return f"{what} of {which}"


ANYBODY = Caller(None, Permissions.ALL)
"""On a plain connection, which only a cluster takes that does not require TLS."""

caller: ContextVar[Caller] = ContextVar("koinon_caller", default=ANYBODY)
"""The caller of the call that this task handles. Set by the guard."""
