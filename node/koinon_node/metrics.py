"""A node's metrics; docs/metrics.md explains each.

Plain numbers are read on the event loop. Metrics by partition are read on the endpoint's thread:
tables are immutable, and any thread may read the columns of traffic and sizes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from koinon_node.assembly import Parts
from koinon_node.core.formats.records import U32Array
from koinon_node.core.replication.replica_sync import Stage
from koinon_proto.contract.table import NodeNumber, Table
from koinon_proto.process.measures import Family, Number, distribution, labelled, single
from koinon_proto.server import admission_metrics
from koinon_proto.server.guard import Guard
from koinon_proto.server.metrics_server import Metrics

_TRAFFIC = (
    ("reads", "Rows read by clients, of partitions led here.", "reads"),
    ("writes", "Rows written by clients or bulk loads, of partitions led here.", "writes"),
    ("read_bytes", "Bytes of keys and values of those that were read, about.", "read_bytes"),
    ("written_bytes", "Bytes of keys and values of those that were written.", "written_bytes"),
)
_ROLES = ("primary", "backup", "adding")


def node_metrics(parts: Parts, guard: Guard) -> Metrics:
    """Return the metrics of a node with these parts, and of its server's guard."""
    metrics = Metrics("node")
    hosted = Hosted(parts)
    for source in (
        hosted.look,
        lambda: _of_rows(parts),
        lambda: _of_quotas(parts),
        lambda: _of_commits(parts),
        lambda: _of_replication(parts),
        lambda: _of_lease(parts),
        lambda: _of_load(parts),
        lambda: _of_loads(parts),
        lambda: _of_feeds(parts),
        lambda: _of_log(parts),
        lambda: _of_redis(parts),
        lambda: _of_resources(parts),
        lambda: _of_store(parts),
        lambda: _of_clock_and_store(parts),
        lambda: admission_metrics.families(guard),
    ):
        metrics.add(source)
    metrics.add(hosted.families, on_loop=False)
    metrics.add(lambda: _of_disk(parts), on_loop=False)
    return metrics


# --- by partition ------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def _series(name: str, role: str, partitions: int) -> tuple[str, ...]:
    """Return the series names of a metric by partition. Cached, since there may be many."""
    of_role = f',role="{role}"' if role else ""
    return tuple(f'{name}{{partition="{p}"{of_role}}}' for p in range(partitions))


class PartitionColumn(Sequence[str]):
    """The series names of some partitions, built when they are rendered."""

    def __init__(self, name: str, partitions: int, groups: Iterable[tuple[str, U32Array]]) -> None:
        self._name = name
        self._partitions = partitions
        self._groups = list(groups)
        self._made: list[str] | None = None

    def _all(self) -> list[str]:
        if self._made is None:
            self._made = [
                known[p]
                for role, ids in self._groups
                for known in (_series(self._name, role, self._partitions),)
                for p in ids.tolist()
            ]
        return self._made

    def __len__(self) -> int:
        return sum(len(ids) for _, ids in self._groups)

    def __getitem__(self, index: Any) -> Any:
        return self._all()[index]


class IntColumn(Sequence[Number]):
    """The values of such series, converted to Python numbers when they are rendered."""

    def __init__(self, values: npt.NDArray[Any]) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, index: Any) -> Any:
        return self._values[index].tolist()


class FloatColumn(IntColumn):
    """Likewise, rounded to millionths."""

    def __init__(self, values: npt.NDArray[Any]) -> None:
        super().__init__(np.round(values, 6))


class Hosted:
    """The partitions of which this node has a copy, by the copy's role."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._known: tuple[Table | None, NodeNumber, dict[str, U32Array]]
        self._known = (None, NodeNumber(0), {role: _ids(()) for role in _ROLES})

    def look(self) -> Iterable[Family]:
        """Count the waiting batches of the traffic counters. Runs on the event loop."""
        self._parts.engine.context.traffic.flush()
        return ()

    def families(self) -> Iterator[Family]:
        """Return the metrics by partition, and the number of partitions by role. Runs off the event
        loop.
        """
        by_role, partitions = self._by_role()
        yield labelled(
            "koinon_partitions",
            "gauge",
            "Partitions of which this node has a copy: those that it leads (primary), follows "
            "(backup), or gets by a move (adding).",
            ("role",),
            {(role,): len(ids) for role, ids in by_role.items()},
        )
        yield from self._traffic(by_role["primary"], partitions)
        yield self._load(by_role["primary"], partitions)
        yield from self._sizes(by_role, partitions)

    def _by_role(self) -> tuple[dict[str, U32Array], int]:
        served = self._parts.state.served
        table, me = served.table, served.node_number
        known_table, known_me, by_role = self._known
        if table is not None and (table is not known_table or me != known_me):
            by_role = _roles(table, me)
            self._known = table, me, by_role
        return by_role, len(table.rows) if table is not None else 0

    def _traffic(self, led: U32Array, partitions: int) -> Iterator[Family]:
        traffic = self._parts.engine.context.traffic
        told = np.zeros(partitions, np.bool_)
        told[led] = True
        told |= (traffic.reads[:partitions] | traffic.writes[:partitions]) != 0
        ids = np.flatnonzero(told).astype(np.uint32)
        for suffix, meaning, column in _TRAFFIC:
            name = f"koinon_partition_{suffix}_total"
            values = getattr(traffic, column)[ids]
            series = PartitionColumn(name, partitions, [("", ids)])
            yield Family(name, "counter", meaning, series, IntColumn(values))

    def _load(self, led: U32Array, partitions: int) -> Family:
        name = "koinon_partition_load"
        cores = np.zeros(partitions)
        lead = self._parts.load.partitions[0][:partitions]
        cores[: len(lead)] = lead
        return Family(
            name,
            "gauge",
            "Work of the partitions that are led here, in cores of the reference machine: counted "
            "rows and bytes times their costs, a mean that decays over two minutes.",
            PartitionColumn(name, partitions, [("", led)]),
            FloatColumn(cores[led]),
        )

    def _sizes(self, by_role: dict[str, U32Array], partitions: int) -> Iterator[Family]:
        groups = [
            ("primary", by_role["primary"]),
            ("backup", np.concatenate([by_role["backup"], by_role["adding"]])),
        ]
        ids = np.concatenate([of_role for _, of_role in groups])
        for (name, meaning), values in zip(
            (
                ("koinon_partition_records", "Records here, as a background pass counted them."),
                ("koinon_partition_bytes", "Bytes of their keys and values."),
            ),
            self._parts.sizes.of_many(ids),
            strict=True,
        ):
            series = PartitionColumn(name, partitions, groups)
            yield Family(name, "gauge", meaning, series, IntColumn(values))


def _roles(table: Table, me: NodeNumber) -> dict[str, U32Array]:
    found: dict[str, list[int]] = {role: [] for role in _ROLES}
    for row in table.rows:
        if row.primary == me:
            found["primary"].append(row.partition_id)
        elif me in row.adding:
            found["adding"].append(row.partition_id)
        elif me in row.replicas:
            found["backup"].append(row.partition_id)
    return {role: _ids(ids) for role, ids in found.items()}


def _ids(partition_ids: Sequence[int]) -> U32Array:
    return np.array(partition_ids, np.uint32)


# --- rows and groups ---------------------------------------------------------------------------


def _of_rows(parts: Parts) -> Iterator[Family]:
    counts = parts.rows
    yield labelled(
        "koinon_rows_total",
        "counter",
        "Rows that clients asked for, by what came of them.",
        ("operation", "outcome"),
        {(operation, outcome): rows for (operation, outcome), rows in counts.rows.items()},
    )
    yield labelled(
        "koinon_row_bytes_total",
        "counter",
        "Bytes of the values of those that were done; staged ones as they are packed.",
        ("operation",),
        {(name,): size for name, size in counts.bytes.items() if name != "delete"},
    )


def _of_quotas(parts: Parts) -> Iterator[Family]:
    refused = parts.state.quotas.refused_rows()
    yield labelled(
        "koinon_quota_refused_rows_total",
        "counter",
        "Rows that were refused because their keyspace is at its limit of rows or bytes a second.",
        ("keyspace",),
        {(name,): rows for name, rows in refused.items()},
    )


def _of_commits(parts: Parts) -> Iterator[Family]:
    writer = parts.writer
    yield distribution(
        "koinon_commit_rows", "Rows of a group, committed together.", writer.commit_rows
    )
    yield distribution("koinon_commit_bytes", "Bytes of such a group.", writer.commit_bytes)
    yield distribution(
        "koinon_commit_duration_seconds",
        "From a group's way to the writer process to its answer that it is on disk.",
        writer.commit_seconds,
    )
    yield single(
        "koinon_pending_commit_seconds",
        "gauge",
        "For how long the disk has not answered the oldest commit; 0 if none is under way.",
        writer.disk.out_s,
    )
    yield distribution(
        "koinon_group_completion_seconds",
        "From a group's way to the writer process until it is durable on all required replicas.",
        parts.commits.seconds,
    )


def _of_replication(parts: Parts) -> Iterator[Family]:
    table = parts.state.served.table
    nodes = table.nodes if table is not None else {}
    names = {number: str(node.node_id) for number, node in nodes.items()}
    lags = parts.replicator.follower_lags()
    for suffix, meaning, values in (
        (
            "records",
            "Records sent to a follower and not acknowledged by it.",
            [lag.records for lag in lags],
        ),
        ("seconds", "The age of the oldest of them.", [lag.age_s for lag in lags]),
    ):
        yield labelled(
            f"koinon_replication_lag_{suffix}",
            "gauge",
            meaning,
            ("follower",),
            {
                (names.get(lag.number, str(lag.number)),): value
                for lag, value in zip(lags, values, strict=True)
            },
        )
    yield labelled(
        "koinon_follower_streams",
        "gauge",
        "Streams of the nodes that follow this one.",
        (),
        {(): parts.replication.streams},
    )
    leading = parts.replicator.leading
    sizes = np.bincount(leading.live_in_sync()[leading.led].astype(np.int64)).tolist()
    yield labelled(
        "koinon_in_sync_replicas",
        "gauge",
        "Partitions led here by how many in-sync replicas they have on live nodes, this one "
        "included.",
        ("size",),
        {(str(size),): count for size, count in enumerate(sizes) if size},
    )
    yield labelled(
        "koinon_copied_bytes_total",
        "counter",
        "Bytes of records that this node pulled from primaries to repair, catch up or take a "
        "snapshot, and that it served to others for that.",
        ("direction",),
        {
            ("pulled",): parts.follower.bytes_pulled,
            ("served",): parts.replicator.pages.bytes_served,
        },
    )
    stages = parts.follower.stages()
    yield labelled(
        "koinon_copies_in_progress",
        "gauge",
        "Copies here that do not follow their primary's stream yet, by how far they are.",
        ("stage",),
        {(stage.name.lower(),): stages[stage] for stage in Stage if stage is not Stage.LIVE},
    )


# --- the lease, loads, the store ---------------------------------------------------------------


def _of_lease(parts: Parts) -> Iterator[Family]:
    state = parts.state
    remaining_s = max(0.0, state.lease.until_s - state.now())
    yield single(
        "koinon_serving", "gauge", "Whether this node holds a lease.", int(state.serving())
    )
    yield single(
        "koinon_lease_remaining_seconds", "gauge", "For how long it holds it.", remaining_s
    )
    yield single(
        "koinon_lease_losses_total",
        "counter",
        "Leases that ended without being renewed, or by a fence, while this process went on.",
        parts.agent.lease_losses,
    )
    yield distribution(
        "koinon_heartbeat_duration_seconds",
        "From a heartbeat to its acknowledgement, of those that were acknowledged.",
        parts.agent.heartbeat_seconds,
    )


def _of_load(parts: Parts) -> Iterator[Family]:
    load = parts.load
    for name, meaning, value in (
        (
            "node_load",
            "All work of this node, as primary and as follower, in the unit of "
            "koinon_partition_load.",
            load.work,
        ),
        (
            "event_loop_busy_ratio",
            "The part of the time in which the event loop's thread ran or waited for a CPU; a mean "
            "that decays over two minutes.",
            load.busy,
        ),
    ):
        yield single(f"koinon_{name}", "gauge", meaning, round(value, 6))


def _of_loads(parts: Parts) -> Iterator[Family]:
    counts = parts.rows
    for name, meaning, value in (
        ("staged_bytes", "Packed bytes that bulk loads staged here.", counts.bytes["stage"]),
        ("staged_rows", "Rows that bulk loads staged here.", counts.rows["stage", "ok"]),
        (
            "merged_rows",
            "Staged rows that this node, as primary, merged into its partitions.",
            parts.merger.rows_merged,
        ),
    ):
        yield single(f"koinon_{name}_total", "counter", meaning, value)
    yield single(
        "koinon_staging_bytes", "gauge", "Bytes being staged now.", parts.stager.staging_bytes
    )


def _of_feeds(parts: Parts) -> Iterator[Family]:
    yield single(
        "koinon_change_feeds", "gauge", "Change feeds that are open here.", parts.feeds.open_feeds
    )
    yield single(
        "koinon_feed_changes_total",
        "counter",
        "Changes that feeds were told here.",
        parts.feeds.changes_sent,
    )


def _of_store(parts: Parts) -> Iterator[Family]:
    env, used_bytes = parts.store.env, parts.writer.used_bytes
    pages = env.info()["last_pgno"] + 1
    used_pages = used_bytes // env.stat()["psize"]
    readers = env.readers().count("\n") - 1  # a head, or that there are none
    for name, meaning, value in (
        ("map_bytes", "How much puts may fill of the store.", parts.store.config.map_size_bytes),
        ("used_bytes", "How much the store's records and indexes fill.", used_bytes),
        (
            "free_pages",
            "Pages of the store's file that hold none of that: they are written again before the "
            "file grows.",
            max(0, pages - used_pages),
        ),
        ("readers", "Read transactions that are open in the store.", readers),
    ):
        yield single(f"koinon_store_{name}", "gauge", meaning, value)


def _of_log(parts: Parts) -> Iterator[Family]:
    overlay = parts.store.overlay
    for name, meaning, value in (
        ("rows", "Rows that are durable in the log and not yet in the store.", overlay.rows),
        ("bytes", "The bytes of these rows in the log.", overlay.size),
    ):
        yield single(f"koinon_log_pending_{name}", "gauge", meaning, value)
    yield distribution(
        "koinon_log_take_over_duration_seconds",
        "The time in which the store takes over a stretch of the log.",
        parts.writer.take_over_seconds,
    )


def _of_resources(parts: Parts) -> Iterator[Family]:
    yield labelled(
        "koinon_resource_used",
        "gauge",
        "How much of a resource is used.",
        ("resource",),
        {(use.name,): use.used for use in parts.resources},
    )
    yield labelled(
        "koinon_resource_limit",
        "gauge",
        "How much of a resource there is; 0: it has no limit, or that is not known.",
        ("resource",),
        {(use.name,): use.limit for use in parts.resources},
    )


def _of_redis(parts: Parts) -> Iterator[Family]:
    redis = parts.redis
    yield single(
        "koinon_redis_connections",
        "gauge",
        "Connections that speak the Redis protocol.",
        len(redis.connections),
    )
    yield single(
        "koinon_redis_held_bytes",
        "gauge",
        "Bytes of commands that come in or wait, of transactions, and of replies that wait.",
        redis.budget.held_bytes,
    )
    yield labelled(
        "koinon_redis_connections_closed_total",
        "counter",
        "Connections of the Redis protocol that the node closed.",
        ("reason",),
        {(reason,): count for reason, count in redis.closed_for.items()},
    )


def _of_disk(parts: Parts) -> Iterator[Family]:
    """Return the metrics of the file system, whose call may block."""
    disk = os.statvfs(parts.store.config.directory)
    yield single(
        "koinon_disk_free_bytes",
        "gauge",
        "What is free on the file system of the data directory, to this user.",
        disk.f_bavail * disk.f_frsize,
    )
    yield single("koinon_disk_total_bytes", "gauge", "Its size.", disk.f_blocks * disk.f_frsize)


def _of_clock_and_store(parts: Parts) -> Iterator[Family]:
    yield single(
        "koinon_clock_ahead_seconds",
        "gauge",
        "By how much this node's wall clock is ahead of the leading coordinator's, at least; "
        "negative: behind.",
        parts.agent.clock_ahead_ms / 1000,
    )
    yield single(
        "koinon_old_store",
        "gauge",
        "Whether this process was started on a store that may lack acknowledged writes: an old "
        "copy of its directory, or one that is not trusted.",
        int(bool(parts.old_store)),
    )
