"""Every error that Koinon raises, with its facts as fields.

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


def _rebuild(cls: type[KoinonError], values: dict[str, Any]) -> KoinonError:
    return cls(**values)


class KoinonError(Exception):
    """The root of all Koinon errors."""

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

    def _with_id(self, text: str) -> str:
        return f"{text} [request {self.request_id}]" if self.request_id else text


# --- the caller's input -----------------------------------------------------------------------


@dataclass(kw_only=True, eq=False)
class InvalidArgumentError(KoinonError):
    """An argument breaks a limit or a rule. ``limit`` and ``actual`` are 0 where none applies."""

    field: str
    reason: str
    limit: int = 0
    actual: int = 0

    def __str__(self) -> str:
        numbers = f" (limit {self.limit}, got {self.actual})" if self.limit or self.actual else ""
        return f"{self.field}: {self.reason}{numbers}"


@dataclass(kw_only=True, eq=False)
class ConfigurationError(KoinonError):
    """Settings that contradict themselves; ``reason`` names both settings and their values."""

    reason: str

    def __str__(self) -> str:
        return self.reason


@dataclass(kw_only=True, eq=False)
class WrongEventLoopError(KoinonError):
    """An asyncio client was used on another event loop than the one that it was connected on. Its
    connections and timers belong to that one: nothing was sent.
    """

    def __str__(self) -> str:
        return (
            "this client belongs to another event loop: connect one on each loop that uses one "
            "(koinon.aio.connect), or share a blocking client between threads (koinon.connect)"
        )


@dataclass(kw_only=True, eq=False)
class ConditionFailedError(KoinonError):
    """A conditional write found another version than it asked for (0 means: no such record)."""

    expected_version: int
    current_version: int

    def __str__(self) -> str:
        return (
            f"condition failed: expected version {self.expected_version}, "
            f"the record has {self.current_version}"
        )


# --- routing: who serves what ------------------------------------------------------------------


@dataclass(kw_only=True, eq=False)
class NotPrimaryError(KoinonError):
    """The node does not lead this partition; ``primary`` does ('' when it knows of none)."""

    retriable: ClassVar[bool] = True
    stale_table: ClassVar[bool] = True

    partition_id: int
    primary: str
    primary_address: str
    primary_epoch: int
    table_version: int

    def __str__(self) -> str:
        who = f"{self.primary} at {self.primary_address}" if self.primary else "nobody known"
        return (
            f"partition {self.partition_id} is led by {who} "
            f"(epoch {self.primary_epoch}, table version {self.table_version})"
        )


@dataclass(kw_only=True, eq=False)
class TableBehindError(KoinonError):
    """The node's table is older than the sender's; it will catch up within a heartbeat."""

    retriable: ClassVar[bool] = True

    table_version: int
    required_version: int

    def __str__(self) -> str:
        return (
            f"the node's table has version {self.table_version}, "
            f"the request asks for {self.required_version}"
        )


@dataclass(kw_only=True, eq=False)
class WrongPartitionError(KoinonError):
    """A key was sent under a partition that it does not hash to (another partitioner or count)."""

    partition_id: int
    expected_partition_id: int

    def __str__(self) -> str:
        return (
            f"the key belongs to partition {self.expected_partition_id}, "
            f"it was sent as {self.partition_id}: does the client use the cluster's partitioner?"
        )


@dataclass(kw_only=True, eq=False)
class FencedEpochError(KoinonError):
    """The sender speaks for a ``primary_epoch`` that is over: the partition has been led anew."""

    stale_table: ClassVar[bool] = True

    partition_id: int
    primary_epoch: int
    current_primary_epoch: int

    def __str__(self) -> str:
        return (
            f"partition {self.partition_id}: primary epoch {self.primary_epoch} is over "
            f"(now {self.current_primary_epoch})"
        )


@dataclass(kw_only=True, eq=False)
class LeaseExpiredError(KoinonError):
    """The node may not serve: it has not heard from the coordinator within its lease."""

    retriable: ClassVar[bool] = True
    stale_table: ClassVar[bool] = True

    node_id: str

    def __str__(self) -> str:
        return f"node {self.node_id} holds no lease: it cannot reach the coordinator"


@dataclass(kw_only=True, eq=False)
class PartitionOfflineError(KoinonError):
    """No live in-sync replica leads this partition now; ``reason`` says why."""

    retriable: ClassVar[bool] = True
    stale_table: ClassVar[bool] = True

    partition_id: int
    reason: str

    def __str__(self) -> str:
        return f"partition {self.partition_id} is offline: {self.reason}"


@dataclass(kw_only=True, eq=False)
class ClusterNotReadyError(KoinonError):
    """The cluster has no partition table yet: it waits for its minimum of nodes."""

    retriable: ClassVar[bool] = True
    stale_table: ClassVar[bool] = True

    registered_nodes: int
    bootstrap_nodes: int

    def __str__(self) -> str:
        return (
            f"the cluster waits for its first {self.bootstrap_nodes} nodes "
            f"({self.registered_nodes} registered so far)"
        )


@dataclass(kw_only=True, eq=False)
class WrongClusterError(KoinonError):
    """Two parties belong to different clusters; both ids are named."""

    expected_cluster_id: str
    actual_cluster_id: str

    def __str__(self) -> str:
        return (
            f"wrong cluster: this side belongs to {self.expected_cluster_id!r}, "
            f"the other to {self.actual_cluster_id!r}"
        )


@dataclass(kw_only=True, eq=False)
class UnsupportedVersionError(KoinonError):
    """A format or protocol version that this build does not know."""

    what: str
    version: int
    supported: int

    def __str__(self) -> str:
        return f"{self.what} has version {self.version}; this build supports {self.supported}"


# --- membership --------------------------------------------------------------------------------


@dataclass(kw_only=True, eq=False)
class NotLeaderError(KoinonError):
    """This coordinator does not lead; ``leader_address`` is '' when it knows of no leader."""

    retriable: ClassVar[bool] = True
    stale_table: ClassVar[bool] = True

    leader_id: str
    leader_address: str
    term: int

    def __str__(self) -> str:
        who = f"{self.leader_id} at {self.leader_address}" if self.leader_id else "nobody known"
        return f"not the leader; the leader is {who} (term {self.term})"


@dataclass(kw_only=True, eq=False)
class DuplicateNodeError(KoinonError):
    """A live node already uses this id from another address or another data directory."""

    node_id: str
    address: str
    other_address: str

    def __str__(self) -> str:
        return (
            f"node id {self.node_id!r} is in use by a live node at {self.other_address}; "
            f"{self.address} must choose another id, or wait until that node is gone"
        )


@dataclass(kw_only=True, eq=False)
class UnknownNodeError(KoinonError):
    """No node of this id is registered."""

    node_id: str

    def __str__(self) -> str:
        return f"no node {self.node_id!r} is registered"


@dataclass(kw_only=True, eq=False)
class NodeFencedError(KoinonError):
    """The sender's ``node_epoch`` is over: it was fenced or registered anew. Register again."""

    node_id: str
    node_epoch: int
    current_node_epoch: int

    def __str__(self) -> str:
        return (
            f"node {self.node_id!r} epoch {self.node_epoch} is fenced "
            f"(current epoch {self.current_node_epoch})"
        )


@dataclass(kw_only=True, eq=False)
class RegistrationPendingError(KoinonError):
    """An earlier process of this node may still hold a lease; retry in ``retry_after_ms``."""

    retriable: ClassVar[bool] = True

    node_id: str
    retry_after_ms: int

    def __str__(self) -> str:
        return (
            f"node {self.node_id!r} may still hold a lease; "
            f"it can register in {self.retry_after_ms} ms"
        )


@dataclass(kw_only=True, eq=False)
class MembershipChangeError(KoinonError):
    """A change of coordinator members or nodes is refused; ``reason`` says why."""

    reason: str

    def __str__(self) -> str:
        return self.reason


@dataclass(kw_only=True, eq=False)
class PlanStaleError(KoinonError):
    """The cluster has changed since the plan was shown: planning now gives another one."""

    plan_id: str
    current_plan_id: str

    def __str__(self) -> str:
        return (
            f"plan {self.plan_id} does not fit the cluster any more (now it would be "
            f"{self.current_plan_id}): look at the new plan"
        )


# --- bulk loads --------------------------------------------------------------------------------


@dataclass(kw_only=True, eq=False)
class LoadClosedError(KoinonError):
    """The bulk load is not open, or not in the state that the call asks for."""

    load_id: int
    state: str
    reason: str = ""

    def __str__(self) -> str:
        why = f": {self.reason}" if self.reason else ""
        return f"load {self.load_id} is {self.state}{why}"


@dataclass(kw_only=True, eq=False)
class LoadIncompleteError(KoinonError):
    """A partition does not hold all the rows that the load's attempts say they staged."""

    load_id: int
    partition_id: int
    expected_rows: int
    staged_rows: int

    def __str__(self) -> str:
        return (
            f"load {self.load_id}: partition {self.partition_id} holds {self.staged_rows} staged "
            f"rows where {self.expected_rows} were sent"
        )


# --- resources and fates -----------------------------------------------------------------------


@dataclass(kw_only=True, eq=False)
class ResourceExhaustedError(KoinonError):
    """A bounded queue is full; nothing was applied. Back off and retry. ``limit`` is 0 where it is
    not known.
    """

    retriable: ClassVar[bool] = True

    resource: str
    limit: int

    def __str__(self) -> str:
        limit = f" of {self.limit}" if self.limit else ""
        return f"overloaded: {self.resource} is at its limit{limit}"


@dataclass(kw_only=True, eq=False)
class ReplyTooLargeError(KoinonError):
    """The values asked for exceed what one reply may hold: ask for fewer keys at once."""

    limit: int
    actual: int

    def __str__(self) -> str:
        return f"the reply would exceed {self.limit} bytes (at least {self.actual})"


@dataclass(kw_only=True, eq=False)
class StorageFullError(KoinonError):
    """The store has no room for this write: the map or the disk is full. Reads go on."""

    node_id: str
    reason: str

    def __str__(self) -> str:
        return f"node {self.node_id} cannot store more: {self.reason}"


@dataclass(kw_only=True, eq=False)
class NotEnoughReplicasError(KoinonError):
    """Fewer replicas are in sync than ``min_in_sync``; nothing was written."""

    retriable: ClassVar[bool] = True

    partition_id: int
    in_sync: int
    min_in_sync: int

    def __str__(self) -> str:
        return (
            f"partition {self.partition_id} has {self.in_sync} in-sync replicas, "
            f"{self.min_in_sync} are needed"
        )


@dataclass(kw_only=True, eq=False)
class UnavailableError(KoinonError):
    """Nobody could be reached, or nobody would serve, inside the deadline. Nothing was applied."""

    retriable: ClassVar[bool] = True

    reason: str

    def __str__(self) -> str:
        return self._with_id(self.reason)


@dataclass(kw_only=True, eq=False)
class NotSentError(UnavailableError):
    """There was no connection, or nobody to send to: the request never left."""


@dataclass(kw_only=True, eq=False)
class UnknownFateError(KoinonError):
    """A write was sent and its answer never came: it may or may not have been applied."""

    maybe_applied: ClassVar[bool] = True

    reason: str

    def __str__(self) -> str:
        return self._with_id(f"unknown fate, the write may have been applied: {self.reason}")


@dataclass(kw_only=True, eq=False)
class DataDirectoryError(KoinonError):
    """A data directory that cannot be used as it is; ``path`` names the file."""

    path: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


@dataclass(kw_only=True, eq=False)
class InternalError(KoinonError):
    """A defect on the other side; its log has the whole story."""

    reason: str

    def __str__(self) -> str:
        return self._with_id(f"internal error: {self.reason}")
