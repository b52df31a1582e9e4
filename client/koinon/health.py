"""What a cluster's status means: what is wrong and what to do about it, and what is under way.

Pure: judges a ``ClusterStatus``, asks nobody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from koinon.admin import ClusterStatus
from koinon_proto.table import (
    NodeInfo,
    NodeNumber,
    NodeStatus,
    OfflineReason,
    PartitionRow,
    PartitionStatus,
    Table,
    min_in_sync_of,
)

_NAMED_MAX = 5


def problems(status: ClusterStatus) -> list[str]:
    """Return what is wrong and what to do about it, most urgent first; [] if all is well."""
    found = []
    if not status.leader_id:
        known = "" if status.table is None else "; the table shown is the last known one"
        found.append(
            "no coordinator leads: a majority of them must run and reach one another. Until then "
            f"nodes cannot hold leases, and nothing is served{known}"
        )
    found += _table_problems(status)
    if status.is_leader:
        silent = [c.member_id for c in status.coordinators if not c.active and not c.leader]
        if silent:
            found.append(f"coordinator {', '.join(silent)} does not answer: start it again")
    return found


def notes(status: ClusterStatus) -> list[str]:
    """Return what is under way, and what may be done next: nothing that is wrong."""
    table = status.table
    if table is None or not table.bootstrapped:
        return []
    found = []
    moving = sum(bool(row.adding or row.removing) for row in table.rows)
    if moving:
        paused = "; they are paused: 'koinon admin resume'" if table.moves.paused else ""
        found.append(
            f"{_count(moving, 'partition')} {_are(moving)} being moved "
            f"('koinon admin moves --watch' follows){paused}"
        )
    elif table.moves.paused:
        found.append("moves are paused: 'koinon admin resume' lets them go on")
    held = replicas_by_node(table)
    for node in table.nodes.values():
        if node.status is NodeStatus.DRAINING and held[node.number]:
            found.append(
                f"node {node.node_id} drains: it still has "
                f"{_count(held[node.number], 'replica')} and gets no new ones"
            )
        elif node.status is NodeStatus.DRAINING:
            found.append(
                f"node {node.node_id} is drained: 'koinon admin remove {node.node_id}' takes it "
                "out for good"
            )
        elif node.status is NodeStatus.ACTIVE and not held[node.number]:
            found.append(
                f"node {node.node_id} holds nothing yet: 'koinon admin rebalance' gives it "
                "its share"
            )
    return found


def _table_problems(status: ClusterStatus) -> list[str]:
    table = status.table
    if table is None:
        return ["the cluster has no table yet: it waits for its coordinators to agree"]
    if not table.bootstrapped:
        need, have = table.cluster.bootstrap_nodes, len(table.nodes)
        return [f"waiting for the first {need} nodes ({have} registered): start more nodes"]
    return [
        *_unserved(table),
        *_lost(table),
        *_below_minimum(table),
        *_down(table),
        *_under_replicated(table),
    ]


def _unserved(table: Table) -> list[str]:
    unserved = [row for row in table.rows if row.status is not PartitionStatus.ONLINE]
    if not unserved:
        return []
    offline = sum(row.status is PartitionStatus.OFFLINE for row in unserved)
    starting = len(unserved) - offline
    parts = [f"{offline} offline"] * bool(offline) + [f"{starting} starting"] * bool(starting)
    wait = "start its nodes again" if offline else "this takes a moment"
    return [f"partitions: {', '.join(parts)} of {len(table.rows)}: {wait}"]


def _lost(table: Table) -> list[str]:
    lost = [row for row in table.rows if row.offline_reason is OfflineReason.STORE_LOST]
    if not lost:
        return []
    ids = ranges([row.partition_id for row in lost])
    example = lost[0]
    left = [n for n in example.replicas if _is_live(table, n)]
    nodes = _names(table, left or example.replicas)
    return [
        f"{_count(len(lost), 'partition')} lost every in-sync copy with its store ({ids}): bring "
        "the disk back that had it and start its node on it. If it is gone for good: 'koinon admin "
        f"force-primary {example.partition_id} NODE' makes do with another replica (of "
        f"{example.partition_id}: {nodes}), which may lack acknowledged writes"
    ]


def _below_minimum(table: Table) -> list[str]:
    short = [
        row
        for row in table.rows
        if row.status is PartitionStatus.ONLINE
        and _live_in_sync(table, row) < min_in_sync_of(table.cluster, row)
    ]
    if not short:
        return []
    why = _missing(table, short)
    return [
        f"{_count(len(short), 'partition')} {_are(len(short))} read-only: fewer copies are in sync "
        f"than a write needs ({why}): start those nodes again"
    ]


def _down(table: Table) -> list[str]:
    held = replicas_by_node(table)
    found = []
    for node in table.nodes.values():
        if node.status is not NodeStatus.FENCED:
            continue
        replicas = held[node.number]
        after_ms = table.cluster.rereplicate_after_ms
        alone = table.cluster.replication_factor < 2
        later = ""
        if replicas and after_ms and not alone:
            later = f". After {after_ms / 60_000:g} min others are given its replicas"
        unit = "partition" if alone else "replica"
        found.append(
            f"node {node.node_id} at {node.address} is down ({_count(replicas, unit)}): "
            f"start it{later}"
        )
    return found


def _under_replicated(table: Table) -> list[str]:
    short = [row for row in table.rows if is_short(row)]
    if not short:
        return []
    return [
        f"{_count(len(short), 'partition')} {_have(len(short))} fewer copies in sync than wanted "
        f"({_missing(table, short)}): they catch up by themselves while their nodes run"
    ]


def _missing(table: Table, rows: Iterable[PartitionRow]) -> str:
    """Which nodes' copies are missing, and how those nodes are."""
    counts = Counter(n for row in rows for n in row.target if n not in row.in_sync)
    if not counts:
        counts = Counter(n for row in rows for n in row.in_sync if not _is_live(table, n))
    parts = []
    for number, missing in sorted(counts.items()):
        state = "catching up" if _is_live(table, number) else "down"
        parts.append(f"{_names(table, [number])} is {state}: {missing:,}")
    return ", ".join(parts[:_NAMED_MAX]) + (", …" if len(parts) > _NAMED_MAX else "")


def is_short(row: PartitionRow) -> bool:
    """Whether a partition that has a primary lacks a copy in sync; one being added is none yet."""
    return row.status is not PartitionStatus.OFFLINE and any(
        number not in row.in_sync and number not in row.adding for number in row.target
    )


def replicas_by_node(table: Table) -> Counter[int]:
    """Return how many replicas each node has, by node number."""
    return Counter(number for row in table.rows for number in row.replicas)


def _live_in_sync(table: Table, row: PartitionRow) -> int:
    return sum(_is_live(table, number) for number in row.in_sync)


def _is_live(table: Table, number: int) -> bool:
    node = _node(table, number)
    return node is not None and node.status in (NodeStatus.ACTIVE, NodeStatus.DRAINING)


def _node(table: Table, number: int) -> NodeInfo | None:
    return table.nodes.get(NodeNumber(number))


def _names(table: Table, numbers: Iterable[int]) -> str:
    nodes = ((number, _node(table, number)) for number in numbers)
    return ", ".join(node.node_id if node else f"node {number}" for number, node in nodes)


def ranges(numbers: Sequence[int]) -> str:
    """Return sorted numbers as ranges for people: ``0-3, 7``; the first few of many."""
    parts: list[str] = []
    start = previous = None
    for number in [*numbers, None]:
        if previous is not None and number == previous + 1:
            previous = number
            continue
        if previous is not None:
            parts.append(f"{start}" if start == previous else f"{start}-{previous}")
        start = previous = number
    more = len(parts) - 2 * _NAMED_MAX
    return ", ".join(parts[: 2 * _NAMED_MAX]) + (f" and {more} more" if more > 0 else "")


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _are(number: int) -> str:
    return "is" if number == 1 else "are"


def _have(number: int) -> str:
    return "has" if number == 1 else "have"
