"""A cluster's status as coordinators tell it: coordinators, nodes, and the table."""

from __future__ import annotations

from dataclasses import dataclass

from koinon.operate.views import view
from koinon_proto.contract import convert
from koinon_proto.contract.errors import ClusterNotReadyError
from koinon_proto.contract.table import PartitionStatus, Table, apply_update
from koinon_proto.v1 import admin_pb2


@dataclass(frozen=True, kw_only=True)
class CoordinatorView:
    """One coordinator as the answering member sees it; ``active`` is known by the leader only."""

    member_id: str
    address: str
    voter: bool
    leader: bool
    active: bool
    match_index: int


@dataclass(frozen=True, kw_only=True)
class ScarceResource:
    """A resource of a node's process or machine that is nearly used up."""

    name: str
    used: int
    limit: int


@dataclass(frozen=True, kw_only=True)
class SessionView:
    """The leader's soft state about one node, with what the node last said of itself."""

    node_number: int
    live: bool
    heard_ms_ago: int
    records: int
    used_bytes: int
    map_bytes: int
    disk_free_bytes: int
    disk_bytes: int
    commit_out_ms: int  # for how long the disk has not answered the oldest commit
    commit_ms: int  # what a commit usually takes; 0: not known
    reads_per_second: float
    writes_per_second: float
    tls_mode: str = ""  # off, prefer, require; "": not known yet
    open_addresses: tuple[str, ...] = ()  # where others than its machine come in without TLS
    clock_ahead_ms: int = 0  # of the leader's clock, by so much at least; below 0: it is behind
    old_store: str = ""  # why what the node was started on may lack writes; "": it may not
    scarce: tuple[ScarceResource, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RoomWaitView:
    """Moves that do not go on because a node has no room: what they need, and what it has."""

    node_number: int
    moves: int
    needs_bytes: int
    has_bytes: int
    limit: str


@dataclass(frozen=True, kw_only=True)
class ElectionsView:
    """The elections of the last ``watched_ms`` (ten minutes at most) as one coordinator saw them:
    changes of the leader, by how much the term has risen, and since when there was neither.
    """

    leader_changes: int = 0
    terms: int = 0
    watched_ms: int = 0
    quiet_ms: int = 0


@dataclass(frozen=True, kw_only=True)
class ClusterStatus:
    """A cluster's status as one coordinator tells it; ``sessions`` is empty if it does not lead.
    ``table`` is None until the cluster exists, and has no rows until it is bootstrapped.
    """

    member_id: str
    is_leader: bool
    leader_id: str
    leader_address: str
    term: int
    commit_index: int
    applied_index: int
    coordinators: tuple[CoordinatorView, ...]
    sessions: tuple[SessionView, ...]
    table: Table | None
    lease_ms: int
    session_timeout_ms: int
    elections: ElectionsView = ElectionsView()
    plain: bool = False  # it came by a connection without TLS
    tls_mode: str = ""  # of the member that answers, as sessions have it of nodes
    open_addresses: tuple[str, ...] = ()
    advertised_address: str = ""  # with which the member that answers was started
    disk_free_bytes: int = 0  # of the member that answers, as sessions have it of nodes
    disk_bytes: int = 0  # 0: not known
    room_waits: tuple[RoomWaitView, ...] = ()

    @property
    def moved_coordinator(self) -> str:
        """The advice for a member that answers at another address than its group looks for it; ''
        where there is no need.
        """
        known = next((c.address for c in self.coordinators if c.member_id == self.member_id), "")
        if "" in (known, self.advertised_address) or known == self.advertised_address:
            return ""
        return (
            f"coordinator {self.member_id} was started with the address {self.advertised_address}, "
            f"and its group looks for it at {known}: start the coordinators with the addresses "
            "that they had; where that is impossible, 'koinon recover-coordinators' makes a group "
            "at new ones"
        )

    @property
    def ready(self) -> bool:
        """True if every partition is served."""
        table = self.table
        return (
            table is not None
            and table.bootstrapped
            and all(row.status is PartitionStatus.ONLINE for row in table.used_rows)
        )

    def session_of(self, node_number: int) -> SessionView | None:
        return next((s for s in self.sessions if s.node_number == node_number), None)


def status_from_proto(message: admin_pb2.ClusterStatus, *, plain: bool = False) -> ClusterStatus:
    """Return the view of a status reply; ``plain``: it came without TLS."""
    table = None
    if message.HasField("table") and message.table.cluster.cluster_id:
        table = apply_update(None, convert.update_from_proto(message.table))
    return view(
        ClusterStatus,
        message,
        coordinators=tuple(view(CoordinatorView, c) for c in message.coordinators),
        sessions=tuple(
            view(
                SessionView,
                s.stats,
                node_number=s.node_number,
                live=s.live,
                heard_ms_ago=s.heard_ms_ago,
                scarce=tuple(view(ScarceResource, one) for one in s.stats.scarce),
            )
            for s in message.sessions
        ),
        table=table,
        elections=view(ElectionsView, message.elections),
        room_waits=tuple(view(RoomWaitView, wait) for wait in message.room_waits),
        plain=plain,
    )


def table_of(status: ClusterStatus) -> Table:
    """Return the table of a cluster whose partitions are placed.

    Raises:
        ClusterNotReadyError: too few nodes have registered yet.
    """
    table = status.table
    if table is None or not table.bootstrapped:
        raise ClusterNotReadyError(
            registered_nodes=0 if table is None else len(table.nodes),
            bootstrap_nodes=0 if table is None else table.cluster.bootstrap_nodes,
        )
    return table


def count_by_primary(table: Table) -> dict[int, int]:
    """Return of how many partitions each node is the primary, by node number."""
    counts: dict[int, int] = dict.fromkeys(table.nodes, 0)
    for row in table.used_rows:
        counts[row.primary] = counts.get(row.primary, 0) + 1
    return counts
