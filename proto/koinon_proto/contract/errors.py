"""The errors of Koinon that programs meet, with their facts as fields.

Those that only servers, operators and bulk loads meet are in ``cluster_errors``.

One root, :class:`KoinonError`. A class says three things about itself, and callers decide by
them, never by text:

``retriable``      the same operation may succeed later; nothing of it was applied.
``stale_table``    the sender's partition table (or its idea of the leader) should be refreshed.
``maybe_applied``  the fate of a write is unknown: it may or may not have been applied.

Errors with a wire form (see ``v1/errors.proto``) have the same field names there;
``convert.error_to_proto`` and ``convert.error_from_proto`` map them by class name. All are
picklable, so that they cross process pools and Spark workers whole.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar

__all__ = [
    "CheckFailedError",
    "ClientClosedError",
    "ClusterNotReadyError",
    "ConditionFailedError",
    "ConfigurationError",
    "ForkedError",
    "InternalError",
    "InvalidArgumentError",
    "KoinonError",
    "LeaseExpiredError",
    "NobodyListensError",
    "NotANumberError",
    "NotEnoughReplicasError",
    "NotPrimaryError",
    "NumberOverflowError",
    "PartitionOfflineError",
    "PartitionerMismatchError",
    "PermissionDeniedError",
    "QuotaExceededError",
    "ReplyTooLargeError",
    "ResourceExhaustedError",
    "StorageFullError",
    "TableBehindError",
    "UnauthenticatedError",
    "UnavailableError",
    "UnknownFateError",
    "UnknownHostError",
    "UnknownKeyspaceError",
    "UnsupportedVersionError",
    "WrongClusterError",
    "WrongEventLoopError",
    "WrongPartitionError",
]
"""``koinon`` has them all."""


def _rebuild(cls: type[KoinonError], values: dict[str, Any]) -> KoinonError:
    return cls(**values)


class KoinonError(Exception):
    """The root of all Koinon errors."""

    template: ClassVar[str] = "{e.reason}"
    """The message, with the error as ``e``: the one place that words it."""
    retriable: ClassVar[bool] = False
    stale_table: ClassVar[bool] = False
    maybe_applied: ClassVar[bool] = False

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
    """Return who leads, in the words of a message."""
    return f"{name} at {address}" if name else "nobody known"


# --- the caller's input -----------------------------------------------------------------------


@dataclass(kw_only=True, eq=False)
class InvalidArgumentError(KoinonError):
    """An argument breaks a limit or a rule. ``limit`` and ``actual`` are 0 where none applies."""

    template: ClassVar[str] = "{e.field}: {e.reason}{e.numbers}"

    field: str
    reason: str
    limit: int = 0
    actual: int = 0

    @property
    def numbers(self) -> str:
        return f" (limit {self.limit}, got {self.actual})" if self.limit or self.actual else ""


@dataclass(kw_only=True, eq=False)
class ConfigurationError(KoinonError):
    """Settings that contradict themselves; ``reason`` names both settings and their values."""

    reason: str


@dataclass(kw_only=True, eq=False)
class WrongEventLoopError(KoinonError):
    """An asyncio client was used on another event loop than the one that it was connected on. Its
    connections and timers belong to that one: nothing was sent.
    """

    template: ClassVar[str] = (
        "this client belongs to another event loop: connect one on each loop that uses one "
        "(koinon.aio.connect), or share a blocking client between threads (koinon.connect)"
    )


@dataclass(kw_only=True, eq=False)
class ClientClosedError(KoinonError):
    """The client was closed, by its program. Nothing was applied, and nothing will be."""

    template: ClassVar[str] = "the client is closed{e.request}"


@dataclass(kw_only=True, eq=False)
class ForkedError(KoinonError):
    """An operator's call in a forked process whose parent had used gRPC, which does not survive a
    fork. Clients (``koinon.connect``) do.
    """

    template: ClassVar[str] = (
        "gRPC was used before this process was forked, and cannot be used here: make this call in "
        "the parent, or start the process by spawn (multiprocessing.get_context('spawn'))"
    )


@dataclass(kw_only=True, eq=False)
class UnauthenticatedError(KoinonError):
    """The caller has not shown who it is: no certificate that this cluster trusts, or a token that
    it does not know. Nothing was applied.
    """

    template: ClassVar[str] = "not authenticated: {e.reason}{e.request}"

    reason: str


@dataclass(kw_only=True, eq=False)
class PermissionDeniedError(KoinonError):
    """The caller is known, and may not do this. Nothing was applied. ``what`` names the key or the
    prefix that it may not touch, in Python's form of bytes; "" where the call as a whole is
    refused. ``rows`` are those that are refused of a request with many keys, a thousand at most.
    """

    template: ClassVar[str] = "{e.principal} may not {e.action}{e.named}{e.remedy}{e.request}"

    principal: str
    action: str
    what: str = ""
    rows: tuple[int, ...] = ()

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


_GRANTABLE = {"read", "write", "scan", "load", "feed", "view", "operate", "access"}


@dataclass(kw_only=True, eq=False)
class ConditionFailedError(KoinonError):
    """A conditional write found another version than it asked for (0 means: no such record)."""

    template: ClassVar[str] = (
        "condition failed: expected version {e.expected_version}, "
        "the record has {e.current_version}"
    )

    expected_version: int
    current_version: int


@dataclass(kw_only=True, eq=False)
class CheckFailedError(ConditionFailedError):
    """A check of an atomic batch found another version of this key than it asked for (0 means: no
    such record). Nothing of the batch was written: read the key again, and make a new batch.
    """

    template: ClassVar[str] = (
        "check of key {e.key!r} failed: expected version {e.expected_version}, "
        "the record has {e.current_version}; nothing of the batch was written"
    )

    key: bytes


@dataclass(kw_only=True, eq=False)
class NotANumberError(KoinonError):
    """An increment found a value that it cannot add to; nothing was written."""

    template: ClassVar[str] = "the record's value is not {e.expected}"

    expected: str


@dataclass(kw_only=True, eq=False)
class NumberOverflowError(KoinonError):
    """The sum of an increment is out of range; nothing was written."""

    template: ClassVar[str] = "the sum would not fit into {e.expected}"

    expected: str


# --- routing: who serves what ------------------------------------------------------------------


@dataclass(kw_only=True, eq=False)
class NotPrimaryError(KoinonError):
    """The node does not lead this partition; ``primary`` does ('' when it knows of none)."""

    template: ClassVar[str] = (
        "partition {e.partition_id} is led by {e.leader} "
        "(epoch {e.primary_epoch}, table version {e.table_version})"
    )
    retriable: ClassVar[bool] = True
    stale_table: ClassVar[bool] = True

    partition_id: int
    primary: str
    primary_address: str
    primary_epoch: int
    table_version: int

    @property
    def leader(self) -> str:
        return known_at(self.primary, self.primary_address)


@dataclass(kw_only=True, eq=False)
class TableBehindError(KoinonError):
    """The node's table is older than the sender's; it will catch up within a heartbeat."""

    template: ClassVar[str] = (
        "the node's table has version {e.table_version}, the request asks for {e.required_version}"
    )
    retriable: ClassVar[bool] = True

    table_version: int
    required_version: int


@dataclass(kw_only=True, eq=False)
class WrongPartitionError(KoinonError):
    """A key was sent under a partition that it does not hash to (another partitioner or count)."""

    template: ClassVar[str] = (
        "the key belongs to partition {e.expected_partition_id}, "
        "it was sent as {e.partition_id}: does the client use the cluster's partitioner?"
    )

    partition_id: int
    expected_partition_id: int


@dataclass(kw_only=True, eq=False)
class LeaseExpiredError(KoinonError):
    """The node may not serve: it has not heard from the coordinator within its lease."""

    template: ClassVar[str] = "node {e.node_id} holds no lease: it cannot reach the coordinator"
    retriable: ClassVar[bool] = True
    stale_table: ClassVar[bool] = True

    node_id: str


@dataclass(kw_only=True, eq=False)
class PartitionOfflineError(KoinonError):
    """No live in-sync replica leads this partition now; ``reason`` says why."""

    template: ClassVar[str] = "partition {e.partition_id} is offline: {e.reason}"
    retriable: ClassVar[bool] = True
    stale_table: ClassVar[bool] = True

    partition_id: int
    reason: str


@dataclass(kw_only=True, eq=False)
class ClusterNotReadyError(KoinonError):
    """The cluster has no partition table yet: it waits for its minimum of nodes."""

    template: ClassVar[str] = (
        "the cluster waits for its first {e.bootstrap_nodes} nodes "
        "({e.registered_nodes} registered so far)"
    )
    retriable: ClassVar[bool] = True
    stale_table: ClassVar[bool] = True

    registered_nodes: int
    bootstrap_nodes: int


@dataclass(kw_only=True, eq=False)
class WrongClusterError(KoinonError):
    """Two parties belong to different clusters; both ids are named."""

    template: ClassVar[str] = (
        "wrong cluster: this side belongs to {e.expected_cluster_id!r}, "
        "the other to {e.actual_cluster_id!r}"
    )

    expected_cluster_id: str
    actual_cluster_id: str


@dataclass(kw_only=True, eq=False)
class PartitionerMismatchError(KoinonError):
    """This process knows the cluster's partitioner by its name, and it answers otherwise here: keys
    would be looked for, and written, where they do not belong. Nothing was written. Fingerprints
    are hexadecimal.
    """

    template: ClassVar[str] = (
        "the cluster's partitioner is {e.cluster_partitioner} (fingerprint "
        "{e.cluster_fingerprint}); here it is {e.own_partitioner} (fingerprint "
        "{e.own_fingerprint}), which places keys otherwise: install the version of the router that "
        "the cluster was made with"
    )

    cluster_partitioner: str
    cluster_fingerprint: str
    own_partitioner: str
    own_fingerprint: str


@dataclass(kw_only=True, eq=False)
class UnknownKeyspaceError(KoinonError):
    """There is no such keyspace: it was dropped, or never was. Nothing was applied. One of the same
    name may have been created since: open it anew to use it. ``keyspace``: "" where a server knows
    only that the one that was meant is gone.
    """

    template: ClassVar[str] = (
        "{e.named} has been dropped, or was never created{e.request}; `koinon admin keyspaces` "
        "lists those that there are"
    )

    keyspace: str = ""

    @property
    def named(self) -> str:
        return f"keyspace {self.keyspace!r}" if self.keyspace else "the keyspace that was meant"


@dataclass(kw_only=True, eq=False)
class UnsupportedVersionError(KoinonError):
    """A format or protocol version that this build does not know."""

    template: ClassVar[str] = "{e.what} has version {e.version}; this build supports {e.supported}"

    what: str
    version: int
    supported: int


# --- resources and fates -----------------------------------------------------------------------


@dataclass(kw_only=True, eq=False)
class ResourceExhaustedError(KoinonError):
    """A bounded queue is full; nothing was applied. Back off and retry. ``limit`` is 0 where it is
    not known.
    """

    template: ClassVar[str] = "overloaded: {e.resource} is at its limit{e.of_limit}"
    retriable: ClassVar[bool] = True

    resource: str
    limit: int

    @property
    def of_limit(self) -> str:
        return f" of {self.limit}" if self.limit else ""


@dataclass(kw_only=True, eq=False)
class QuotaExceededError(KoinonError):
    """The keyspace's clients, all together, have had what they may have a second; nothing was
    applied. ``limit`` is that of the whole cluster, a second, in ``unit``: "rows" or "bytes". What
    comes before ``retry_after_ms`` milliseconds have passed is refused, too.
    """

    template: ClassVar[str] = (
        "keyspace {e.keyspace!r} is at its limit of {e.limit} {e.unit} a second: "
        "come again in {e.retry_after_ms} ms"
    )
    retriable: ClassVar[bool] = True

    keyspace: str
    unit: str
    limit: int
    retry_after_ms: int


@dataclass(kw_only=True, eq=False)
class ReplyTooLargeError(KoinonError):
    """The values asked for exceed what one reply may hold: ask for fewer keys at once."""

    template: ClassVar[str] = "the reply would exceed {e.limit} bytes (at least {e.actual})"

    limit: int
    actual: int


@dataclass(kw_only=True, eq=False)
class StorageFullError(KoinonError):
    """The store has no room for this write: the map or the disk is full. Reads go on."""

    template: ClassVar[str] = "node {e.node_id} cannot store more: {e.reason}"

    node_id: str
    reason: str


@dataclass(kw_only=True, eq=False)
class NotEnoughReplicasError(KoinonError):
    """Fewer replicas are in sync than ``min_in_sync``; nothing was written."""

    template: ClassVar[str] = (
        "partition {e.partition_id} has {e.in_sync} in-sync replicas, {e.min_in_sync} are needed"
    )
    retriable: ClassVar[bool] = True

    partition_id: int
    in_sync: int
    min_in_sync: int


@dataclass(kw_only=True, eq=False)
class UnavailableError(KoinonError):
    """No server could be reached, or none would serve, inside the deadline. Nothing was applied."""

    template: ClassVar[str] = "{e.reason}{e.request}"
    retriable: ClassVar[bool] = True

    reason: str


@dataclass(kw_only=True, eq=False)
class NotSentError(UnavailableError):
    """There was no connection, or no server to send to: the request never left."""


@dataclass(kw_only=True, eq=False)
class NobodyListensError(NotSentError):
    """``connect`` reached no address, because each refuses connections (or is of no known host):
    no server runs there. It may have been stopped for a moment.
    """


@dataclass(kw_only=True, eq=False)
class UnknownHostError(NotSentError):
    """``connect`` reached no address, because none of the hosts' names has one."""


@dataclass(kw_only=True, eq=False)
class UnknownFateError(KoinonError):
    """A write was sent and its answer never came: it may or may not have been applied."""

    template: ClassVar[str] = "unknown fate, the write may have been applied: {e.reason}{e.request}"
    maybe_applied: ClassVar[bool] = True

    reason: str


@dataclass(kw_only=True, eq=False)
class InternalError(KoinonError):
    """A defect on the other side; its log has the whole story."""

    template: ClassVar[str] = "internal error: {e.reason}{e.request}"

    reason: str


for _name in __all__:  # by which programs import it, and tracebacks name it
    globals()[_name].__module__ = "koinon"
