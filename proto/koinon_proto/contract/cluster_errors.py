"""Errors within a cluster: of its servers among one another, of operators' changes, of bulk loads.

Programs that read and write never meet them; what those meet, and what the facts of a class mean,
is in ``errors``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from koinon_proto.contract.errors import KoinonError, known_at

# --- servers -----------------------------------------------------------------------------------


@dataclass(kw_only=True, eq=False)
class NotLeaderError(KoinonError):
    """This coordinator does not lead; ``leader_address`` is '' when it knows of no leader."""

    template: ClassVar[str] = "not the leader; the leader is {e.leader} (term {e.term})"
    retriable: ClassVar[bool] = True
    stale_table: ClassVar[bool] = True

    leader_id: str
    leader_address: str
    term: int

    @property
    def leader(self) -> str:
        return known_at(self.leader_id, self.leader_address)


@dataclass(kw_only=True, eq=False)
class FencedEpochError(KoinonError):
    """The sender speaks for a ``primary_epoch`` that is over: the partition has been led anew."""

    template: ClassVar[str] = (
        "partition {e.partition_id}: primary epoch {e.primary_epoch} is over "
        "(now {e.current_primary_epoch})"
    )
    stale_table: ClassVar[bool] = True

    partition_id: int
    primary_epoch: int
    current_primary_epoch: int


@dataclass(kw_only=True, eq=False)
class DuplicateNodeError(KoinonError):
    """A live node already uses this id from another address or another data directory."""

    template: ClassVar[str] = (
        "node id {e.node_id!r} is in use by a live node at {e.other_address}; "
        "{e.address} must choose another id, or wait until that node is gone"
    )

    node_id: str
    address: str
    other_address: str


@dataclass(kw_only=True, eq=False)
class NodeFencedError(KoinonError):
    """The sender's ``node_epoch`` is over: it was fenced or registered anew. Register again."""

    template: ClassVar[str] = (
        "node {e.node_id!r} epoch {e.node_epoch} is fenced (current epoch {e.current_node_epoch})"
    )

    node_id: str
    node_epoch: int
    current_node_epoch: int


@dataclass(kw_only=True, eq=False)
class RegistrationPendingError(KoinonError):
    """An earlier process of this node may still hold a lease; retry in ``retry_after_ms``."""

    template: ClassVar[str] = (
        "node {e.node_id!r} may still hold a lease; it can register in {e.retry_after_ms} ms"
    )
    retriable: ClassVar[bool] = True

    node_id: str
    retry_after_ms: int


@dataclass(kw_only=True, eq=False)
class DataDirectoryError(KoinonError):
    """A data directory that cannot be used as it is; ``path`` names the file."""

    template: ClassVar[str] = "{e.path}: {e.reason}"

    path: str
    reason: str


# --- operators' changes ------------------------------------------------------------------------


@dataclass(kw_only=True, eq=False)
class UnknownNodeError(KoinonError):
    """No node of this id is registered."""

    template: ClassVar[str] = "no node {e.node_id!r} is registered"

    node_id: str


@dataclass(kw_only=True, eq=False)
class MembershipChangeError(KoinonError):
    """A change of coordinator members or nodes is refused; ``reason`` says why."""

    reason: str


@dataclass(kw_only=True, eq=False)
class KeyspaceChangeError(KoinonError):
    """A change of keyspaces that cannot be made now; nothing was changed."""

    reason: str


@dataclass(kw_only=True, eq=False)
class PlanStaleError(KoinonError):
    """The cluster has changed since the plan was shown: planning now gives another one."""

    template: ClassVar[str] = (
        "plan {e.plan_id} does not fit the cluster any more (now it would be "
        "{e.current_plan_id}): look at the new plan"
    )

    plan_id: str
    current_plan_id: str


# --- bulk loads --------------------------------------------------------------------------------


@dataclass(kw_only=True, eq=False)
class LoadClosedError(KoinonError):
    """The bulk load is not open, or not in the state that the call asks for."""

    template: ClassVar[str] = "load {e.load_id} is {e.state}{e.why}"

    load_id: int
    state: str
    reason: str = ""

    @property
    def why(self) -> str:
        return f": {self.reason}" if self.reason else ""


@dataclass(kw_only=True, eq=False)
class LoadIncompleteError(KoinonError):
    """A partition does not hold all the rows that the load's attempts say they staged."""

    template: ClassVar[str] = (
        "load {e.load_id}: partition {e.partition_id} holds {e.staged_rows} staged "
        "rows where {e.expected_rows} were sent"
    )

    load_id: int
    partition_id: int
    expected_rows: int
    staged_rows: int
