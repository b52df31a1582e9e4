"""Answers about a cluster: plain data, which ``--json`` prints and any console can show.

The fields' names are the keys of the JSON. They never change; new ones may be added.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from koinon.operate.cluster_status import ClusterStatus, ElectionsView, count_by_primary
from koinon.operate.json_form import HIDDEN, IF_KNOWN
from koinon.operate.judge.health import is_short, notes, problems, replicas_by_node, summary
from koinon.operate.loads_client import LoadView
from koinon.operate.replicas import Checksum, PartitionSize
from koinon.operate.views import view
from koinon.operate.wording import by_name, node_name
from koinon_proto.contract.keyspaces import Keyspace
from koinon_proto.contract.table import (
    NodeNumber,
    NodeStatus,
    OfflineReason,
    PartitionRow,
    PartitionStatus,
    Table,
)
from koinon_proto.partitioner import partitioner_of

# --- the cluster ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PartitionCounts:
    """The numbers of partitions by state."""

    online: int
    assigned: int
    offline: int
    under_replicated: int
    moving: int


def partition_counts(table: Table | None) -> PartitionCounts:
    rows = table.used_rows if table else ()
    counts = Counter(row.status for row in rows)
    return PartitionCounts(
        online=counts[PartitionStatus.ONLINE],
        assigned=counts[PartitionStatus.ASSIGNED],
        offline=counts[PartitionStatus.OFFLINE],
        under_replicated=sum(map(is_short, rows)),
        moving=sum(bool(row.adding or row.removing) for row in rows),
    )


@dataclass(frozen=True, kw_only=True)
class CoordinatorAnswer:
    """One coordinator; ``active`` is None if the answering one does not lead."""

    id: str
    address: str
    voter: bool
    leader: bool
    active: bool | None
    match_index: int


def coordinators_of(status: ClusterStatus) -> list[CoordinatorAnswer]:
    return [
        view(
            CoordinatorAnswer,
            member,
            id=member.member_id,
            leader=member.leader or member.member_id == status.leader_id,
            active=member.active if status.is_leader else None,
        )
        for member in status.coordinators
    ]


@dataclass(frozen=True, kw_only=True)
class NodeStats:
    """The last figures that a live node has reported. ``records`` counts the records of all its
    copies; deleted ones count until they are purged.
    """

    heard_ms_ago: int
    records: int
    used_bytes: int
    map_bytes: int
    disk_free_bytes: int
    disk_bytes: int
    commit_out_ms: int
    commit_ms: int
    reads_per_second: float
    writes_per_second: float


@dataclass(frozen=True, kw_only=True)
class NodeAnswer:
    """One node: its data and its traffic. ``stats`` is None if it has not reported."""

    id: str
    number: int
    address: str
    rack: str
    status: NodeStatus
    node_epoch: int
    primaries: int
    replicas: int
    weight: int
    stats: NodeStats | None


def nodes_of(status: ClusterStatus) -> list[NodeAnswer]:
    table = status.table
    if table is None:
        return []
    primaries, replicas = count_by_primary(table), replicas_by_node(table)
    return [
        view(
            NodeAnswer,
            node,
            id=node.node_id,
            primaries=primaries[node.number],
            replicas=replicas[node.number],
            stats=_stats_of(status, node.number),
        )
        for node in by_name(table.nodes.values())
    ]


def _stats_of(status: ClusterStatus, number: int) -> NodeStats | None:
    session = status.session_of(number)
    if session is None or not session.live:
        return None
    reads, writes = round(session.reads_per_second, 1), round(session.writes_per_second, 1)
    return view(NodeStats, session, reads_per_second=reads, writes_per_second=writes)


@dataclass(frozen=True, kw_only=True)
class StatusAnswer:
    """A cluster's status, and the judgement of it."""

    ok: bool
    summary: str
    problems: list[str]
    notes: list[str]
    cluster_id: str | None
    table_version: int
    partitioner: str | None
    partition_count: int
    replication_factor: int
    min_in_sync: int
    partitions: PartitionCounts
    answered_by: str
    leader_id: str | None
    leader_address: str | None
    term: int
    commit_index: int
    applied_index: int
    elections: ElectionsView
    coordinators: list[CoordinatorAnswer]
    nodes: list[NodeAnswer]
    keyspaces: list[str] = field(metadata=HIDDEN)


def status_answer(status: ClusterStatus, loads: Iterable[LoadView] = ()) -> StatusAnswer:
    table, found = status.table, problems(status)
    config = table.cluster if table else None
    return view(
        StatusAnswer,
        status,
        ok=not found,
        summary=summary(status, found),
        problems=found,
        notes=notes(status, loads),
        cluster_id=config.cluster_id if config else None,
        table_version=table.table_version if table else 0,
        partitioner=config.partitioner if config else None,
        partition_count=config.partition_count if config else 0,
        replication_factor=config.replication_factor if config else 0,
        min_in_sync=config.min_in_sync if config else 0,
        partitions=partition_counts(table),
        answered_by=status.member_id,
        leader_id=status.leader_id or None,
        leader_address=status.leader_address or None,
        coordinators=coordinators_of(status),
        nodes=nodes_of(status),
        keyspaces=[keyspace.name for keyspace in table.keyspaces] if table else [],
    )


@dataclass(frozen=True, kw_only=True)
class BriefAnswer:
    """The judgement in one line."""

    ok: bool
    summary: str


# --- partitions and keyspaces --------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PartitionAnswer:
    """A row of the table, with the nodes' ids."""

    partition_id: int
    status: PartitionStatus
    offline_reason: OfflineReason | None
    primary: str | None
    primary_epoch: int
    partition_epoch: int
    replicas: list[str | None]
    in_sync: list[str | None]
    adding: list[str | None]
    removing: list[str | None]
    wanted_primary: str | None


def partition_fields(row: PartitionRow, table: Table) -> dict[str, Any]:
    """Return the fields of a PartitionAnswer that the row itself does not have."""

    def name(number: int) -> str | None:
        return node_name(table, number) if number in table.nodes else None

    lists = ("replicas", "in_sync", "adding", "removing")
    return {
        "offline_reason": row.offline_reason or None,
        "primary": name(row.primary),
        "wanted_primary": name(row.wanted_primary),
        **{each: [name(number) for number in getattr(row, each)] for each in lists},
    }


def partition_answer(row: PartitionRow, table: Table) -> PartitionAnswer:
    return view(PartitionAnswer, row, **partition_fields(row, table))


@dataclass(frozen=True, kw_only=True)
class KeyAnswer(PartitionAnswer):
    """The place of a key: its hashed bytes, and its partition."""

    key: bytes
    routing_bytes: bytes
    hash: str  # md5 has more than 64 bits
    address: str | None = field(metadata=HIDDEN)


def key_answers(table: Table, keyspace: str, keys: Iterable[bytes]) -> list[KeyAnswer]:
    """Return the places of keys in the keyspace of this name ("": default), in their order.

    Raises:
        UnknownKeyspaceError: there is no such keyspace.
    """
    known = partitioner_of(table.keyspaces.named(keyspace))
    found = []
    for key in keys:
        routing_bytes = known.routing_bytes(key)
        row = table.rows[known.partition_of_routing(routing_bytes)]
        node = table.nodes.get(row.primary)
        found.append(
            view(
                KeyAnswer,
                row,
                key=key,
                routing_bytes=routing_bytes,
                hash=str(known.hash_of(routing_bytes)),
                address=node.address if node else None,
                **partition_fields(row, table),
            )
        )
    return found


@dataclass(frozen=True, kw_only=True)
class CopyAnswer:
    """One replica of a partition: its node, and how complete it is."""

    node: str | None
    address: str | None
    role: str
    state: str
    complete_through: int | None
    change: str = field(metadata=HIDDEN)


@dataclass(frozen=True, kw_only=True)
class OnePartitionAnswer(PartitionAnswer):
    """A partition with its size (None: it has no primary) and its copies."""

    records: int | None
    bytes: int | None
    guessed: bool | None
    copies: list[CopyAnswer]


def serves(number: NodeNumber, table: Table) -> bool:
    node = table.nodes.get(number)
    return node is not None and node.status in (NodeStatus.ACTIVE, NodeStatus.DRAINING)


def one_partition(
    row: PartitionRow, table: Table, size: PartitionSize | None, copies: Mapping[int, Checksum]
) -> OnePartitionAnswer:
    """Build the answer for a partition; ``copies``: the nodes' reports on their copies."""
    return view(
        OnePartitionAnswer,
        row,
        records=size and size.records,
        bytes=size and size.bytes,
        guessed=size and size.guessed,
        copies=[_copy_of(row, number, table, copies.get(number)) for number in row.replicas],
        **partition_fields(row, table),
    )


def _copy_of(
    row: PartitionRow, number: NodeNumber, table: Table, copy: Checksum | None
) -> CopyAnswer:
    node = table.nodes.get(number)
    state = "catching_up"
    if not serves(number, table):
        state = "down"
    elif number in row.in_sync:
        state = "in_sync"
    elif number in row.adding:
        state = "being_added"
    leads = "is to lead" if number == row.wanted_primary else ""
    return CopyAnswer(
        node=node.node_id if node else None,
        address=node.address if node else None,
        role="primary" if number == row.primary else "backup",
        state=state,
        complete_through=copy.complete_through if copy and copy.usable else None,
        change="being removed" if number in row.removing else leads,
    )


@dataclass(frozen=True, kw_only=True)
class KeyspaceAnswer:
    """The settings of a keyspace; ``online`` counts its online partitions, if the table is
    known.
    """

    name: str
    id: int
    base: int
    partition_count: int
    partitioner: str
    replication_factor: int
    min_in_sync: int
    max_value_bytes: int
    pool: str
    default_ttl_ms: int
    max_ttl_ms: int
    max_rows_per_s: int
    max_bytes_per_s: int
    dropping: bool
    online: int | None = field(metadata=IF_KNOWN)


def keyspace_answer(keyspace: Keyspace, table: Table | None = None) -> KeyspaceAnswer:
    rows = [table.rows[p] for p in keyspace.partition_ids] if table else []
    online = sum(row.status is PartitionStatus.ONLINE for row in rows)
    return view(
        KeyspaceAnswer,
        keyspace,
        id=keyspace.keyspace_id,
        dropping=keyspace.is_dropping,
        online=online if table else None,
    )


@dataclass(frozen=True, kw_only=True)
class KeyspaceChanged:
    """One keyspace after a change, with the nodes that have not confirmed it."""

    keyspace: KeyspaceAnswer
    nodes_behind: list[str] | None = field(default=None, metadata=IF_KNOWN)
