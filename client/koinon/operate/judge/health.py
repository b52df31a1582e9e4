"""Judges a cluster's status: its problems and their remedies, and work under way.

Pure: judges a ``ClusterStatus`` (and the bulk loads, if they are given).
"""

from __future__ import annotations

import contextlib
import ipaddress
from collections import Counter
from collections.abc import Iterable

from koinon.operate.cluster_status import ClusterStatus
from koinon.operate.judge.machines import (
    FILLING,
    FULL,
    clocks_differ,
    disks_full,
    disks_hang,
    disks_slow,
    old_stores,
    scarce_resources,
    stores_full,
    waits_for_room,
)
from koinon.operate.loads_client import LoadView
from koinon.operate.wording import count, node_name, node_names, ranges
from koinon_proto.contract.table import (
    NodeNumber,
    NodeStatus,
    OfflineReason,
    PartitionRow,
    PartitionStatus,
    Table,
)

_NAMED_MAX = 5
UNEVEN = 1.25
"""A node with more than this many times its share of replicas is worth a note."""
SCANT = 0.5
"""A node with less than this part of its share is worth a note, even if no other has too much."""
FLAPPING_CHANGES, FLAPPING_TERMS = 6, 12
"""More changes of the leader or of the term than this in ten minutes are not explained by
restarts.
"""
FLAPPING_QUIET_MS = 2 * 60_000
"""Leadership counts as stable after this time without an election."""
IDLE_MS = 5 * 60_000
"""A load that was not touched for this long may have lost its job."""


def summary(status: ClusterStatus, found: list[str] | None = None) -> str:
    """Return one line that says whether all is well, or else the most urgent problem and its
    remedy. ``found``: the problems, if known already; finding them looks at each partition.
    """
    found = problems(status) if found is None else found
    table = status.table
    halted = table is not None and table.moves.paused
    paused = " Moves are paused: 'koinon admin resume' resumes them." if halted else ""
    if not found:
        return f"All is well. {_headline(status)}{paused}"
    more = f" ({count(len(found) - 1, 'more problem')})" if len(found) > 1 else ""
    return f"Attention: {found[0]}{more}{'.' * halted}{paused}"


def _headline(status: ClusterStatus) -> str:
    table = status.table
    assert table is not None, "without one all is not well"
    live = sum(_is_live(table, number) for number in table.nodes)
    return (
        f"{count(len(table.used_rows), 'partition')} online on {count(live, 'node')}; "
        f"{count(len(status.coordinators), 'coordinator')}, {status.leader_id} leads."
    )


def problems(status: ClusterStatus) -> list[str]:
    """Return the problems with their remedies, the most urgent first; [] if all is well."""
    found = []
    if not status.leader_id:
        known = "" if status.table is None else "; everything else shown is the last known state"
        found.append(
            "no coordinator leads, so nothing is served: start coordinators until a majority of "
            f"them run and reach one another{known}"
        )
        found += filter(None, [status.moved_coordinator])
    found += _flapping(status)
    found += disks_hang(status)
    found += _table_problems(status)
    found += waits_for_room(status)
    found += stores_full(status, FULL, 2.0)
    found += disks_full(status)
    found += scarce_resources(status)
    found += clocks_differ(status)
    found += disks_slow(status)
    if status.table is not None:
        found += _under_replicated(status.table)
    return found + _silent_coordinators(status)


def _flaps(status: ClusterStatus) -> bool:
    seen = status.elections
    many = seen.leader_changes >= FLAPPING_CHANGES or seen.terms >= FLAPPING_TERMS
    return many and seen.quiet_ms < FLAPPING_QUIET_MS


def _flapping(status: ClusterStatus) -> list[str]:
    if not _flaps(status):
        return []
    return [
        f"the coordinators' leadership does not stay ({_elections(status)}), and each change halts "
        "failovers and moves: look at CPU, disks and network of the coordinators; where they stay "
        "busy, start them with a greater --election-timeout-ms, one at a time"
    ]


def _elections(status: ClusterStatus) -> str:
    """Describe the recent elections: ``7 changes of the leader in 10 min, from term 72 to 117``."""
    seen = status.elections
    changes = count(seen.leader_changes, "change") + " of the leader"
    return (
        f"{changes} in {_minutes(seen.watched_ms)}, from term {status.term - seen.terms:,} to "
        f"{status.term:,}"
    )


def _silent_coordinators(status: ClusterStatus) -> list[str]:
    if not status.is_leader:
        return []
    silent = [c for c in status.coordinators if not c.active and not c.leader]
    voters = [c.member_id for c in silent if c.voter]
    verb, them = ("does", "it") if len(voters) == 1 else ("do", "them")
    again = f"coordinator {', '.join(voters)} {verb} not answer: start {them} again"
    # A learner may have been added before it was ever started.
    return [again] * bool(voters) + [
        f"coordinator {c.member_id}, which does not vote yet, does not answer: start it at "
        f"{c.address} with --join, or 'koinon admin coordinators remove {c.member_id}' takes it out"
        for c in silent
        if not c.voter
    ]


def notes(status: ClusterStatus, loads: Iterable[LoadView] = ()) -> list[str]:
    """Return remarks on work under way and on possible next steps; none of them is a problem."""
    table = status.table
    if table is None or not table.bootstrapped:
        return []
    return [
        *_moving(table),
        *_of_loads(table, loads),
        *stores_full(status, FILLING, FULL),
        *_of_nodes(table),
        *old_stores(status),
        *_uneven(table),
        *_of_coordinators(status),
        *_of_security(status),
    ]


def _of_security(status: ClusterStatus) -> list[str]:
    table = status.table
    assert table is not None, "the caller has looked"
    names = {node.number: str(node.node_id) for node in table.nodes.values()}
    found = [
        (names[NodeNumber(one.node_number)], one.tls_mode, one.open_addresses)
        for one in status.sessions
        if one.node_number in names
    ]
    found.append((status.member_id, status.tls_mode, status.open_addresses))
    if open_ones := [one for one in found if one[2]]:
        some = "; ".join(
            f"{name} at {', '.join(at)} (--tls {mode})" for name, mode, at in open_ones[:_NAMED_MAX]
        )
        more = len(open_ones) - _NAMED_MAX
        return [
            "servers accept every caller without TLS: "
            f"{some}{f' and {more} more' if more > 0 else ''} "
            "(docs/security.md says how to turn TLS on while the cluster serves)"
        ]
    addresses = [member.address for member in status.coordinators]
    addresses += [n.address for n in table.nodes.values() if n.status is not NodeStatus.LEFT]
    if not status.plain or all(map(_is_local, addresses)):
        return []
    return [
        "there is no access control: everybody who can reach these addresses may read, change "
        "and delete everything "
        "(docs/security.md says how to turn TLS on while the cluster serves)"
    ]


def _is_local(address: str) -> bool:
    """Return whether only its own machine can reach an address; names are not resolved."""
    host = address.rpartition(":")[0].strip("[]")
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _moving(table: Table) -> list[str]:
    found = []
    moving = sum(bool(row.adding or row.removing) for row in table.used_rows)
    if moving:
        paused = "; they are paused: 'koinon admin resume'" if table.moves.paused else ""
        found.append(
            f"{count(moving, 'partition')} {_are(moving)} being moved "
            f"('koinon admin moves --watch' follows){paused}"
        )
    elif table.moves.paused:
        found.append("moves are paused: 'koinon admin resume' resumes them")
    return found


def _of_loads(table: Table, loads: Iterable[LoadView]) -> list[str]:
    if not table.loads:
        return []
    merging = sum(load.merging for load in table.loads)
    parts = [f"{len(table.loads) - merging} open"] * (merging < len(table.loads))
    parts += [f"{merging} being merged"] * bool(merging)
    found = [f"bulk loads: {', '.join(parts)} ('koinon admin loads --watch' follows)"]
    for load in loads:
        if load.idle_ms is not None and load.idle_ms >= min(IDLE_MS, load.timeout_ms // 2):
            left_ms = max(0, load.timeout_ms - load.idle_ms)
            found.append(
                f"no task has touched load {load.load_id} for {_minutes(load.idle_ms)}: if its job "
                f"is gone, 'koinon admin loads abort {load.load_id}' ends it; without that it "
                f"ends in "
                f"{_minutes(left_ms)}"
            )
    return found


def _of_nodes(table: Table) -> list[str]:
    found = []
    held = replicas_by_node(table)
    for node in table.nodes.values():
        if node.status is NodeStatus.DRAINING and held[node.number]:
            found.append(
                f"node {node.node_id} drains: it still has "
                f"{count(held[node.number], 'replica')} and gets no new ones"
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


def _uneven(table: Table) -> list[str]:
    """Return remarks on replicas that do not match the nodes' weights, and on primaries that are
    not the preferred ones.
    """
    if any(row.adding or row.removing for row in table.used_rows):
        return []
    found = []
    held = replicas_by_node(table)
    for rack in sorted({node.rack for node in table.nodes.values()}):
        found += _uneven_in(table, rack, held)
    waiting = sum(_could_lead(table, row) for row in table.used_rows)
    if waiting:
        found.append(
            f"{count(waiting, 'partition')} {_are(waiting)} led by another node than preferred: "
            "'koinon admin primaries' gives them back"
        )
    return found


def _uneven_in(table: Table, rack: str, held: Counter[int]) -> list[str]:
    """Return remarks on the nodes of one rack: replicas are balanced inside racks only, since
    between racks they are bound to differ as the nodes do.
    """
    nodes = [n for n in table.nodes.values() if n.rack == rack and n.status is NodeStatus.ACTIVE]
    nodes = [node for node in nodes if held[node.number]]
    weights = sum(node.weight for node in nodes)
    if not weights:
        return []
    whole = sum(held[node.number] for node in nodes)
    shares = {node.number: whole * node.weight / weights for node in nodes}
    above = [node for node in nodes if held[node.number] > UNEVEN * shares[node.number] + 1]
    below = [
        node
        for node in nodes
        if held[node.number] + 1 < min(shares[node.number], len(table.used_rows)) / UNEVEN
    ]
    scant = [
        node
        for node in nodes
        if held[node.number] + 1 < SCANT * min(shares[node.number], len(table.used_rows))
    ]
    if not scant and not (above and below):
        return []
    words = (
        f"{node.node_id} has {held[node.number]:,}, by its weight {shares[node.number]:,.0f}"
        for node in (*above, *(below or scant))[:_NAMED_MAX]
    )
    return [
        f"replicas lie unevenly ({'; '.join(words)}): 'koinon admin rebalance --dry-run' shows "
        "what would move"
    ]


def _could_lead(table: Table, row: PartitionRow) -> bool:
    """Return whether another node leads although the preferred one could."""
    preferred = row.replicas[0] if row.replicas else row.primary
    return (
        row.status is PartitionStatus.ONLINE
        and row.primary != preferred
        and row.wanted_primary != preferred
        and preferred in row.in_sync
        and _is_live(table, preferred)
    )


def _of_coordinators(status: ClusterStatus) -> list[str]:
    found = []
    if status.elections.leader_changes and status.leader_id and not _flaps(status):
        found.append(
            f"{_elections(status)}: {status.leader_id} has led for "
            f"{_minutes(status.elections.quiet_ms)}"
        )
    voters = [c for c in status.coordinators if c.voter]
    learners = [c for c in status.coordinators if not c.voter and c.active]
    if learners and status.is_leader:
        first = learners[0]
        found.append(
            f"coordinator {first.member_id} does not vote yet: 'koinon admin coordinators add "
            f"{first.member_id} {first.address}' makes it"
        )
    if len(voters) == 1:
        found.append("one coordinator alone votes: while it is down, nothing is served")
    elif len(voters) % 2 == 0 and voters:
        may_fail = (len(voters) - 1) // 2
        found.append(
            f"{len(voters)} coordinators vote, of which {may_fail} may fail: one more would let "
            f"{may_fail + 1} fail ('koinon admin coordinators add')"
        )
    return found


def _minutes(ms: int) -> str:
    return f"{ms / 60_000:.0f} min" if ms >= 60_000 else f"{ms / 1000:.0f} s"


def _table_problems(status: ClusterStatus) -> list[str]:
    table = status.table
    if table is None:
        return ["no table is known yet: it is known again once a coordinator leads"]
    if not table.bootstrapped:
        need, have = table.cluster.bootstrap_nodes, len(table.nodes)
        return [f"waiting for the first {need} nodes ({have} registered): start more nodes"]
    return [
        *_lost(table),
        *_unserved(table),
        *_below_minimum(table),
        *_down(table),
    ]


def _unserved(table: Table) -> list[str]:
    """Return the problem of partitions without a primary, except those that have lost their
    stores.
    """
    unserved = [
        row
        for row in table.used_rows
        if row.status is not PartitionStatus.ONLINE
        and row.offline_reason is not OfflineReason.STORE_LOST
    ]
    if not unserved:
        return []
    offline = [row for row in unserved if row.status is PartitionStatus.OFFLINE]
    starting = len(unserved) - len(offline)
    parts = [f"{len(offline):,} offline"] * bool(offline)
    parts += [f"{starting:,} starting"] * bool(starting)
    wait = "this takes a moment"
    absent = {
        n
        for row in unserved
        if row.status is PartitionStatus.ASSIGNED
        and _live_in_sync(table, row) < table.keyspaces.min_in_sync(row)
        for n in row.in_sync
        if not _is_live(table, n)
    }
    if absent:
        wait = (
            f"fewer copies are in sync than a write needs without "
            f"{node_names(table, sorted(absent)[:_NAMED_MAX])}: start it again"
        )
    if offline:
        down = sorted({n for row in offline for n in row.in_sync if not _is_live(table, n)})
        wait = f"start {node_names(table, down[:_NAMED_MAX]) or 'its nodes'} again"
    return [f"partitions: {', '.join(parts)} of {len(table.used_rows):,}: {wait}"]


def _lost(table: Table) -> list[str]:
    lost = [row for row in table.used_rows if row.offline_reason is OfflineReason.STORE_LOST]
    if not lost:
        return []
    ids = ranges([row.partition_id for row in lost])
    down = sorted({n for row in lost for n in row.replicas if not _is_live(table, n)})
    first = ""
    if down:
        first = f"start {node_names(table, down[:_NAMED_MAX])}, whose copies may be the best left; "
    return [
        f"{count(len(lost), 'partition')} lost every in-sync copy with its store ({ids}): bring "
        f"the disk back that had it and start its node on it. If it is gone for good: {first}"
        "'koinon admin force-primary lost' shows the copies that are left, and makes do with the "
        "most complete of each, which may lack acknowledged writes"
    ]


def _below_minimum(table: Table) -> list[str]:
    short = [
        row
        for row in table.used_rows
        if row.status is PartitionStatus.ONLINE
        and _live_in_sync(table, row) < table.keyspaces.min_in_sync(row)
    ]
    if not short:
        return []
    why = _missing(table, short)
    return [
        f"{count(len(short), 'partition')} {_are(len(short))} read-only: fewer copies are in "
        f"sync than a write needs ({why}): start those nodes again"
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
        if after_ms and not alone:
            later = f". After {_minutes(after_ms)} others are given its replicas"
        if not replicas:
            found.append(
                f"node {node.node_id} at {node.address} is down and holds nothing: start it, or "
                f"'koinon admin remove {node.node_id}' takes it out for good"
            )
            continue
        unit = "partition" if alone else "replica"
        found.append(
            f"node {node.node_id} at {node.address} is down ({count(replicas, unit)}): "
            f"start it{later}"
        )
    return found


def _under_replicated(table: Table) -> list[str]:
    short = [row for row in table.used_rows if is_short(row)]
    if not short:
        return []
    return [
        f"{count(len(short), 'partition')} {_have(len(short))} fewer copies in sync than wanted "
        f"({_missing(table, short)}): they catch up by themselves while their nodes run"
    ]


def _missing(table: Table, rows: Iterable[PartitionRow]) -> str:
    """Return the nodes whose copies are missing, each with its state."""
    counts = Counter(
        n for row in rows for n in row.target if n not in row.in_sync or not _is_live(table, n)
    )
    if not counts:
        counts = Counter(n for row in rows for n in row.in_sync if not _is_live(table, n))
    parts = []
    for number, missing in sorted(counts.items()):
        state = "catching up" if _is_live(table, number) else "down"
        parts.append(f"{node_name(table, number)} is {state}: {missing:,}")
    return ", ".join(parts[:_NAMED_MAX]) + (", …" if len(parts) > _NAMED_MAX else "")


def is_short(row: PartitionRow) -> bool:
    """Return whether a partition with a primary lacks a copy in sync; copies being added do not
    count.
    """
    return row.status is not PartitionStatus.OFFLINE and any(
        number not in row.in_sync and number not in row.adding for number in row.target
    )


def replicas_by_node(table: Table) -> Counter[int]:
    """Return the number of replicas of each node, by node number."""
    return Counter(number for row in table.used_rows for number in row.replicas)


def _live_in_sync(table: Table, row: PartitionRow) -> int:
    return sum(_is_live(table, number) for number in row.in_sync)


def _is_live(table: Table, number: int) -> bool:
    node = table.nodes.get(NodeNumber(number))
    return node is not None and node.status in (NodeStatus.ACTIVE, NodeStatus.DRAINING)


def _are(number: int) -> str:
    return "is" if number == 1 else "are"


def _have(number: int) -> str:
    return "has" if number == 1 else "have"
