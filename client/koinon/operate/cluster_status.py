"""A cluster's status as reported by a coordinator: coordinators, nodes, and the table."""

from __future__ import annotations

from dataclasses import dataclass

from koinon.operate.views import view
from koinon_proto.contract import convert
from koinon_proto.contract.errors import ClusterNotReadyError
from koinon_proto.contract.table import PartitionStatus, Table, apply_update
from koinon_proto.v1 import admin_pb2


@dataclass(frozen=True, kw_only=True)
class CoordinatorView:
    """One coordinator as the answering member sees it; only the leader knows ``active``."""

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
    """The leader's soft state about one node, with the node's last report about itself."""

    node_number: int
    live: bool
    heard_ms_ago: int
    records: int
    used_bytes: int
    map_bytes: int
    disk_free_bytes: int
    disk_bytes: int
    commit_out_ms: int  # how long the oldest commit has been waiting for the disk
    commit_ms: int  # the usual duration of a commit; 0: unknown
    reads_per_second: float
    writes_per_second: float
    tls_mode: str = ""  # off, prefer, require; "": unknown yet
    open_addresses: tuple[str, ...] = ()  # addresses where other machines may connect without TLS
    # the least difference to the leader's clock; below 0: the node is behind
    clock_ahead_ms: int = 0
    # why the store that the node was started on may lack writes; "": it does not
    old_store: str = ""
    scarce: tuple[ScarceResource, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RoomWaitView:
    """Moves that wait because a node has no room: the bytes that they need and the node has."""

    node_number: int
    moves: int
    needs_bytes: int
    has_bytes: int
    limit: str


@dataclass(frozen=True, kw_only=True)
class ElectionsView:
    """The elections of the last ``watched_ms`` (ten minutes at most) as seen by one coordinator:
    changes of the leader, the growth of the term, and the time since the last of either.
    """

    leader_changes: int = 0
    terms: int = 0
    watched_ms: int = 0
    quiet_ms: int = 0


@dataclass(frozen=True, kw_only=True)
class ClusterStatus:
    """A cluster's status as reported by one coordinator; ``sessions`` is empty if it does not lead.
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
    plain: bool = False  # the reply came without TLS
    tls_mode: str = ""  # of the answering member, like the sessions' field for nodes
    open_addresses: tuple[str, ...] = ()
    advertised_address: str = ""  # the address that the answering member was started with
    disk_free_bytes: int = 0  # of the answering member, like the sessions' field for nodes
    disk_bytes: int = 0  # 0: unknown
    room_waits: tuple[RoomWaitView, ...] = ()

    @property
    def moved_coordinator(self) -> str:
        """Advice for a member whose address differs from the one in its group; '' if there is
        nothing to do.
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
    """Convert a status reply; ``plain``: it came without TLS."""
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
    """Return the table of a cluster that has placed its partitions.

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
    """Return the number of partitions that each node leads, by node number."""
    counts: dict[int, int] = dict.fromkeys(table.nodes, 0)
    for row in table.used_rows:
        counts[row.primary] = counts.get(row.primary, 0) + 1
    return counts
