"""A coordinator's metrics, of itself and of the cluster; docs/metrics.md explains each.

Changing values are read on the event loop. Metrics over all rows of the table, which is immutable,
are computed on the endpoint's thread, once per table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from koinon_coordinator.coordinator import Coordinator
from koinon_coordinator.core.cluster.image import LIVE_STATUSES
from koinon_coordinator.core.decide.copy_progress import ProgressOf
from koinon_coordinator.core.decide.copy_progress import Stage as ReplicaStage
from koinon_coordinator.core.groups.group_members import GroupMembers
from koinon_coordinator.leader.leadership import Leadership
from koinon_proto.contract.bulk_loads import LoadState
from koinon_proto.contract.errors import UnavailableError
from koinon_proto.contract.table import (
    NodeNumber,
    NodeStatus,
    PartitionRow,
    PartitionStatus,
    Table,
)
from koinon_proto.process.clock import boottime
from koinon_proto.process.measures import Family, Kind, distribution, labelled, single
from koinon_proto.server import admission_metrics
from koinon_proto.server.guard import Guard
from koinon_proto.server.metrics_server import Metrics


def coordinator_metrics(
    coordinator: Coordinator, guard: Guard, *, taken: Callable[[], dict[str, int]]
) -> Metrics:
    """Return the metrics of the coordinator and of its server's guard. ``taken`` returns the peer
    port's number of streams by method.
    """
    metrics = Metrics("coordinator")
    metrics.add(lambda: _of_raft(coordinator))
    metrics.add(lambda: _streams(coordinator, taken()))
    metrics.add(lambda: _of_leader(coordinator))
    metrics.add(lambda: admission_metrics.families(guard))
    view = ClusterView(coordinator)
    metrics.add(view.note_table)
    metrics.add(view.families, on_loop=False)
    metrics.add(lambda: _of_disk(coordinator), on_loop=False)
    return metrics


def _of_raft(coordinator: Coordinator) -> Iterable[Family]:
    try:
        status = coordinator.raft_status()
    except UnavailableError:  # the coordinator is about to stop
        return
    counters = status.counters
    numbers: tuple[tuple[str, Kind, str, int], ...] = (
        ("is_leader", "gauge", "Whether this coordinator leads.", int(coordinator.leads)),
        ("term", "gauge", "The current term.", status.term),
        ("commit_index", "gauge", "The last entry known to be committed.", status.commit_index),
        ("applied_index", "gauge", "The last entry applied here.", status.applied_index),
        (
            "log_entries",
            "gauge",
            "Entries in the log after the last snapshot.",
            status.last_index - status.snapshot_index,
        ),
        (
            "leader_changes_total",
            "counter",
            "Leaders that this coordinator has heard of, one after the other.",
            counters.leader_changes,
        ),
        (
            "elections_started_total",
            "counter",
            "Elections in which this coordinator stood.",
            counters.elections_started,
        ),
    )
    for name, kind, meaning, value in numbers:
        yield single(f"koinon_raft_{name}", kind, meaning, value)
    raft = coordinator.raft
    yield distribution(
        "koinon_raft_commit_duration_seconds",
        "From a proposal to its application, on the leader that proposed it.",
        raft.commit_seconds,
    )
    yield distribution(
        "koinon_raft_sync_duration_seconds",
        "Writes to the log, with their sync to disk.",
        raft.sync_seconds,
    )
    yield single(
        "koinon_raft_pending_sync_seconds",
        "gauge",
        "The age of the write to the log that is under way; 0 if none is.",
        status.pending_save_s,
    )
    yield single(
        "koinon_fences_total", "counter", "Nodes that this leader has fenced.", coordinator.fences
    )
    yield single(
        "koinon_old_stores_total",
        "counter",
        "Nodes that this leader has registered with an old copy of their data directory.",
        coordinator.old_stores,
    )


def _of_disk(coordinator: Coordinator) -> Iterable[Family]:
    """Return the metrics of the file system, whose call may block."""
    free, size = coordinator.disk_room()
    if size:
        yield single(
            "koinon_disk_free_bytes",
            "gauge",
            "What is free on the file system of the data directory, to this user.",
            free,
        )
        yield single("koinon_disk_total_bytes", "gauge", "Its size.", size)


def _streams(coordinator: Coordinator, taken: Mapping[str, int]) -> Iterable[Family]:
    yield labelled(
        "koinon_peer_port_streams",
        "gauge",
        "Streams of frames that this coordinator's peer port has taken, by method.",
        ("method",),
        {(method,): count for method, count in taken.items()},
    )
    yield single(
        "koinon_raft_streams",
        "gauge",
        "Streams of this coordinator to the others.",
        coordinator.transport.open_streams(),
    )


# --- the table ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RowCounts:
    """Counts over all rows."""

    statuses: Mapping[PartitionStatus, int]
    under_replicated: int
    below_minimum: int
    primaries: Mapping[NodeNumber, int]
    replicas: Mapping[NodeNumber, int]


def count_rows(table: Table) -> RowCounts:
    """Count rows and copies. Only live nodes' copies count, since a node that is down stays in
    ``in_sync`` if a row would have too few members without it. Replicas that a move adds are not
    missing before the move is over; replicas that it removes never are.
    """
    statuses: Counter[PartitionStatus] = Counter()
    primaries: Counter[NodeNumber] = Counter()
    replicas: Counter[NodeNumber] = Counter()
    live = {node.number for node in table.nodes.values() if node.status in LIVE_STATUSES}
    under = below = 0
    for row in table.used_rows:
        statuses[row.status] += 1
        primaries[row.primary] += 1
        replicas.update(row.replicas)
        in_sync = sum(number in live for number in row.in_sync)
        under += in_sync < _wanted(row)
        below += in_sync < table.keyspaces.min_in_sync(row)
    return RowCounts(
        statuses=statuses,
        under_replicated=under,
        below_minimum=below,
        primaries=primaries,
        replicas=replicas,
    )


def _wanted(row: PartitionRow) -> int:
    if not row.adding and not row.removing:
        return len(row.replicas)
    return min(len(row.settled), len(row.target))


class ClusterView:
    """The metrics of the table that is applied here."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._table: Table | None = None
        self._made: tuple[Table, list[Family]] | None = None

    def note_table(self) -> Iterable[Family]:
        """Keep the newest table for the endpoint's thread; return no families of its own."""
        self._table = self._coordinator.table()
        return ()

    def families(self) -> Iterable[Family]:
        """Return the metrics of the table."""
        table = self._table
        if table is None:
            return ()
        if self._made is None or self._made[0] is not table:
            self._made = table, list(_of_table(table))
        return self._made[1]


def _of_table(table: Table) -> Iterator[Family]:
    counts = count_rows(table)
    nodes = [node for node in table.nodes.values() if node.status is not NodeStatus.LEFT]
    statuses = Counter(node.status for node in table.nodes.values())
    yield single("koinon_table_version", "gauge", "The table's version.", table.table_version)
    yield labelled(
        "koinon_cluster_partitions",
        "gauge",
        "Partitions by their status: served (online), given to a node that has not yet taken them "
        "over (assigned), without a primary (offline).",
        ("status",),
        {(status.name.lower(),): counts.statuses.get(status, 0) for status in PartitionStatus},
    )
    yield single(
        "koinon_cluster_under_replicated_partitions",
        "gauge",
        "Partitions with fewer in-sync copies on live nodes than they are to have.",
        counts.under_replicated,
    )
    yield single(
        "koinon_cluster_below_min_in_sync_partitions",
        "gauge",
        "Partitions that take no writes, because too few copies are in sync.",
        counts.below_minimum,
    )
    yield labelled(
        "koinon_cluster_nodes",
        "gauge",
        "Nodes by their status.",
        ("status",),
        {(status.name.lower(),): statuses.get(status, 0) for status in NodeStatus},
    )
    yield labelled(
        "koinon_cluster_node_partitions",
        "gauge",
        "Partitions of which each node has a replica, and those of them that it leads (primary).",
        ("node", "role"),
        {
            (node.node_id, role): found.get(node.number, 0)
            for node in nodes
            for role, found in (("primary", counts.primaries), ("replica", counts.replicas))
        },
    )
    yield labelled(
        "koinon_cluster_node_weight",
        "gauge",
        "Each active node's share of partitions, relative to the others'.",
        ("node", "rack"),
        {
            (node.node_id, node.rack): node.weight
            for node in nodes
            if node.status is NodeStatus.ACTIVE
        },
    )


# --- metrics of the leader ---------------------------------------------------------------------


def _of_leader(coordinator: Coordinator) -> Iterable[Family]:
    leadership = coordinator.leadership if coordinator.leads else None
    yield _sessions(coordinator, leadership)
    yield from _moves(coordinator, leadership)
    yield from _loads(coordinator, leadership)
    yield from _consumer_groups(coordinator, leadership)


def _sessions(coordinator: Coordinator, leadership: Leadership | None) -> Family:
    values: dict[tuple[str, ...], int] = {}
    if leadership is not None:
        now = boottime()
        live = [
            leadership.members.sessions.is_live(record.info.number, now)
            for record in coordinator.state.nodes
            if record.info.status is not NodeStatus.LEFT
        ]
        values = {("live",): sum(live), ("silent",): len(live) - sum(live)}
    return labelled(
        "koinon_sessions",
        "gauge",
        "Nodes that the leader hears, and those that it does not. Only on the leader.",
        ("state",),
        values,
    )


def bytes_remaining(progress: ProgressOf) -> int:
    """Return the bytes still to be received by the replicas that nodes are copying, as far as they
    know.
    """
    return sum(
        max(0, one.bytes_total - one.bytes)
        for of_node in progress.values()
        for one in of_node.values()
        if one.stage is not ReplicaStage.LIVE
    )


def _moves(coordinator: Coordinator, leadership: Leadership | None) -> Iterable[Family]:
    moves = coordinator.state.moves.values()
    running = sum(move.running for move in moves)
    yield labelled(
        "koinon_moves",
        "gauge",
        "Moves of replicas that wait for their turn (queued) or are under way (running).",
        ("state",),
        {("queued",): len(moves) - running, ("running",): running},
    )
    remaining = pace = eta = None
    if leadership is not None:
        remaining = bytes_remaining(leadership.mover.progress)
        pace = leadership.mover.pace.per_second(boottime())
        if not moves:
            eta = 0.0
        elif pace >= 1 and running == len(moves):
            eta = remaining / pace
    for name, meaning, value in (
        (
            "bytes_remaining",
            "What nodes still have to receive of the replicas that they are at work on: those of "
            "moves, and those that catch up. Queued moves are not in it. Only on the leader.",
            remaining,
        ),
        (
            "bytes_per_second",
            "What nodes received of such replicas, over about ten seconds. Only on the leader.",
            pace,
        ),
        (
            "eta_seconds",
            "Bytes remaining at this pace; 0 where there are no moves, missing while moves are "
            "queued or nothing comes. Only on the leader.",
            eta,
        ),
    ):
        series = () if value is None else (f"koinon_moves_{name}",)
        values = () if value is None else (value,)
        yield Family(f"koinon_moves_{name}", "gauge", meaning, series, values)


def _loads(coordinator: Coordinator, leadership: Leadership | None) -> Iterable[Family]:
    active = coordinator.state.loads.active.values()
    states = Counter(load.state for load in active)
    yield labelled(
        "koinon_loads",
        "gauge",
        "Bulk loads that are open or merging.",
        ("state",),
        {(s.name.lower(),): states.get(s, 0) for s in (LoadState.OPEN, LoadState.MERGING)},
    )
    totals: list[tuple[str, str]] = [
        ("koinon_load_rows", "Rows of those loads"),
        ("koinon_load_staged_bytes", "Bytes of those loads"),
    ]
    staged = leadership.loading.staged() if leadership is not None else None
    for index, (name, meaning) in enumerate(totals):
        series, values = ((name,), (staged[index],)) if staged is not None else ((), ())
        yield Family(
            name,
            "gauge",
            f"{meaning}, as their jobs reported them so far. Only on the leader.",
            series,
            values,
        )


def _consumer_groups(coordinator: Coordinator, leadership: Leadership | None) -> Iterable[Family]:
    """Return the metrics of consumer groups: the replicated ones, and those of the leader alone."""
    groups = coordinator.state.groups
    yield labelled(
        "koinon_consumer_group_generation",
        "gauge",
        "The generation of a consumer group: it rises with each batch of grants.",
        ("group",),
        {(group.name,): group.generation for group in groups.by_name.values()},
    )
    cores = leadership.groups.cores.values() if leadership is not None else ()
    now = boottime()
    for name, meaning, value in (
        ("members", "Members of a consumer group.", lambda core: len(core.members)),
        (
            "partitions",
            "Partitions that the members of a consumer group subscribe to.",
            lambda core: sum(map(len, core.subscribed().values())),
        ),
        ("unowned_partitions", "Those of them that no member is granted.", GroupMembers.unowned),
        (
            "unchanged_seconds",
            "The time since a grant of a consumer group was made or taken.",
            lambda core: now - core.changed_at,
        ),
    ):
        yield labelled(
            f"koinon_consumer_group_{name}",
            "gauge",
            f"{meaning} Only on the leader.",
            ("group",),
            {(core.name,): value(core) for core in cores},
        )
