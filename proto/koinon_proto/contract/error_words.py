"""The root of all errors, and the words that depend on an error's fields.

``errors_gen`` derives the errors of the wire from these classes.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any, ClassVar

_GRANTABLE = {"read", "write", "scan", "load", "feed", "view", "operate", "access", "backup"}


def _rebuild(cls: type[KoinonError], values: dict[str, Any]) -> KoinonError:
    return cls(**values)


class KoinonError(Exception):
    """The root of all Koinon errors. ``retriable`` and ``maybe_applied`` answer "may I call again?"
    for each of them::

        except koinon.KoinonError as error:
            if not error.retriable and not (error.maybe_applied and twice_does_no_harm):
                raise
    """

    template: ClassVar[str] = "{e.reason}"
    """The message, with the error as ``e``: the one place that words it."""
    retriable: ClassVar[bool] = False
    """Nothing of the call was applied, and the same call may succeed later."""
    stale_table: ClassVar[bool] = False
    """The caller's partition table is out of date. Clients fetch a newer one by themselves."""
    maybe_applied: ClassVar[bool] = False
    """The write was sent, and may have been applied, or may still be. Repeat it only if being
    applied twice does no harm: never True where ``retriable`` is.
    """

    request_id: str = ""
    """By which the logs of the servers that were asked know the operation that ended so; '' where
    there is none, as on the servers themselves.
    """

    def __reduce__(self) -> Any:
        if is_dataclass(self):
            values = {f.name: getattr(self, f.name) for f in fields(self)}
            state = {"request_id": self.request_id} if self.request_id else None
            return _rebuild, (type(self), values), state
        return super().__reduce__()

    @property
    def request(self) -> str:
        """The request's id as the end of a message, where servers' logs tell more."""
        return f" [request {self.request_id}]" if self.request_id else ""

    def __str__(self) -> str:
        return self.template.format(e=self)


def known_at(name: str, address: str) -> str:
    """Return the leader's name and address as an error message shows them."""
    return f"{name} at {address}" if name else "nobody known"


class InvalidArgumentWords:
    """Words in the message of an ``InvalidArgumentError``."""

    limit: int
    actual: int

    @property
    def numbers(self) -> str:
        return f" (limit {self.limit}, got {self.actual})" if self.limit or self.actual else ""


class PermissionDeniedWords:
    """Words in the message of a ``PermissionDeniedError``."""

    principal: str
    action: str
    what: str

    @property
    def named(self) -> str:
        return f" {self.what}" if self.what else ""

    @property
    def remedy(self) -> str:
        """The command that lets a user do this, where a role can."""
        action, _, _ = self.action.partition(" or ")
        if not self.principal.startswith("user ") or action not in _GRANTABLE:
            return ""
        return f" (`koinon admin roles grant ROLE --allow {action}` lets the users of a role do so)"


class ConditionFailedWords:
    """Words in the message of a ``ConditionFailedError``."""

    expected_version: int
    current_version: int
    version_hidden: bool

    @property
    def versions(self) -> str:
        """The expected value and the actual one, as text."""
        expected, current = self.expected_version, self.current_version
        wanted = f"expected version {expected}" if expected else "expected no record"
        found = f"the record has version {current}" if current else "there is no record"
        if self.version_hidden:
            found = "it has another (only who may read the key is told which)"
        return f"{wanted}, {found}"


class NotPrimaryWords:
    """Words in the message of a ``NotPrimaryError``."""

    primary: str
    primary_address: str

    @property
    def leader(self) -> str:
        return known_at(self.primary, self.primary_address)


class ClusterNotReadyWords:
    """Words in the message of a ``ClusterNotReadyError``."""

    registered_nodes: int
    bootstrap_nodes: int

    @property
    def state(self) -> str:
        """The awaited condition, in words."""
        if not self.bootstrap_nodes:
            return (
                "no table is known here yet: since this server started, it has heard from no "
                "coordinator that leads. The cluster's data is not concerned"
            )
        return (
            f"the cluster waits for its first {self.bootstrap_nodes} nodes "
            f"({self.registered_nodes} registered so far)"
        )


class UnknownKeyspaceWords:
    """Words in the message of an ``UnknownKeyspaceError``."""

    keyspace: str

    @property
    def named(self) -> str:
        return f"keyspace {self.keyspace!r}" if self.keyspace else "the keyspace that was meant"


class ResourceExhaustedWords:
    """Words in the message of a ``ResourceExhaustedError``."""

    limit: int

    @property
    def of_limit(self) -> str:
        return f" of {self.limit}" if self.limit else ""


class NotLeaderWords:
    """Words in the message of a ``NotLeaderError``."""

    leader_id: str
    leader_address: str

    @property
    def leader(self) -> str:
        return known_at(self.leader_id, self.leader_address)


class LoadClosedWords:
    """Words in the message of a ``LoadClosedError``."""

    reason: str

    @property
    def why(self) -> str:
        return f": {self.reason}" if self.reason else ""
