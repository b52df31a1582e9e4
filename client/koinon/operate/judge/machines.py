"""Judges the machines of a cluster's nodes: room in stores and on disks, slow or hanging disks,
clocks, old stores. Each line names the node, the problem and the remedy. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from koinon.operate.cluster_status import ClusterStatus, SessionView
from koinon.operate.wording import count, node_name
from koinon_proto.contract.table import NodeInfo, NodeNumber

FULL = 0.95
"""A store with this share of its limit in use is about to refuse writes."""
FILLING = 0.8
DISK_FREE_SHARE_MIN = 0.05
DISK_FREE_BYTES_ENOUGH = 4 << 30
"""A disk is nearly full if it has less than both."""
CLOCK_SKEW_MS_MAX = 500
"""The greatest tolerated difference of clocks. Under NTP they are within milliseconds;
docs/runbook.md alerts from this value on, too.
"""
HANGS_MS_MIN = 1_500
"""A commit that has been waiting for less does not count as hanging."""
SLOW, SLOW_MS_MIN = 10, 50
"""On a slow disk commits take this many times as long as elsewhere, and at least this many
milliseconds.
"""


_SCARCE = {
    "file descriptors": "find the programs that hold the connections (ss -tnp), or raise the limit "
    "(LimitNOFILE, ulimit -n); beyond it the node takes no connections",
    "threads": "raise the limit of processes and threads (TasksMax, pids.max)",
    "bytes of memory": "give it more memory, or stop other programs; at the limit the system "
    "kills the node",
    "connections of the Redis ports": "find the programs that hold them (ss -tnp, CLIENT LIST), or "
    "add nodes; more are refused",
}
"""The remedy for a resource that is nearly used up, by its name in heartbeats."""


def stores_full(status: ClusterStatus, least: float, below: float) -> list[str]:
    """Return a line for each store that uses from ``least`` to ``below`` of its limit."""
    found = []
    for node, session in running(status):
        used = used_share(session)
        if not least <= used < below:
            continue
        soon = "" if used < FULL else ", and writes to it fail soon or already"
        others = "add nodes and 'koinon admin rebalance', "
        if any(wait.node_number == node.number for wait in status.room_waits):
            others = ""  # moves bring it more than fits, so planning other moves does not help
        found.append(
            f"the store of node {node.node_id} is {used:.0%} full{soon}: delete records, {others}"
            "or start it with a greater --map-size-bytes"
        )
    return found


def disks_full(status: ClusterStatus) -> list[str]:
    """Return a line for each node whose disk is nearly full, whatever its store's limit."""
    found = []
    for node, session in running(status):
        scarce = min(DISK_FREE_SHARE_MIN * session.disk_bytes, DISK_FREE_BYTES_ENOUGH)
        if session.disk_free_bytes >= scarce:
            continue
        found.append(
            f"the disk of node {node.node_id} has {session.disk_free_bytes / 1e6:,.0f} MB left, "
            "and writes to it fail soon or already: make room there, then it continues by itself"
        )

    scarce = min(DISK_FREE_SHARE_MIN * status.disk_bytes, DISK_FREE_BYTES_ENOUGH)
    if status.disk_free_bytes < scarce:
        found.append(
            f"the disk of coordinator {status.member_id} has "
            f"{status.disk_free_bytes / 1e6:,.0f} MB left; once it is full that coordinator ends, "
            "and without a majority of coordinators nothing is served: make room there"
        )
    return found


def waits_for_room(status: ClusterStatus) -> list[str]:
    """Return a line for each node without room for its incoming moves."""
    table = status.table
    if table is None:
        return []
    return [
        f"{count(wait.moves, 'move')} {'waits' if wait.moves == 1 else 'wait'} for room on node "
        f"{node_name(table, wait.node_number)} (they need {wait.needs_bytes / 1e6:,.1f} MB, it "
        f"has {wait.has_bytes / 1e6:,.1f} MB: {wait.limit}): start it with a greater "
        "--map-size-bytes "
        "or give it a larger disk: they go on by themselves; or 'koinon admin cancel' drops them"
        for wait in status.room_waits
    ]


def clocks_differ(status: ClusterStatus) -> list[str]:
    """Return a line for each node whose clock differs from the leader's: records expire by nodes'
    clocks.
    """
    return [
        f"the clock of node {node.node_id} is {abs(session.clock_ahead_ms) / 1000:.1f} s "
        f"{'ahead of' if session.clock_ahead_ms > 0 else 'behind'} that of {status.leader_id}, and "
        "records with a time to live end early or late by as much: look at NTP on both machines"
        for node, session in running(status)
        if abs(session.clock_ahead_ms) >= CLOCK_SKEW_MS_MAX
    ]


def disks_hang(status: ClusterStatus) -> list[str]:
    """Return a line for each node whose disk has not answered for a session's length; other nodes
    lead its partitions by then, where they can.
    """
    table = status.table
    if table is None:
        return []
    found = []
    hangs_ms = max(HANGS_MS_MIN, table.cluster.session_timeout_ms)
    for node, session in running(status):
        if session.commit_out_ms <= hangs_ms:
            continue
        led = sum(row.primary == node.number for row in table.used_rows)
        rest = "; other nodes now lead its partitions"
        if led:
            rest = f", and {count(led, 'partition')} that no other node can lead accept no writes"
        found.append(
            f"the disk of node {node.node_id} has not answered for "
            f"{session.commit_out_ms / 1000:.0f} s{rest}: look at the disk; once it answers the "
            f"node continues by itself, else stop its process"
        )
    return found


def disks_slow(status: ClusterStatus) -> list[str]:
    """Return a line for each node whose commits take many times as long as other nodes', so that
    writes wait for it.
    """
    known = [s for s in status.sessions if s.live and s.commit_ms]
    found = []
    for node, session in running(status):
        others = [other.commit_ms for other in known if other is not session]
        if not others or session.commit_ms < SLOW_MS_MIN:
            continue
        usual = median(others)
        if session.commit_ms >= SLOW * usual:
            found.append(
                f"the disk of node {node.node_id} is slow: a commit takes {session.commit_ms:,} ms "
                f"there and {usual:,.0f} ms elsewhere, and every write to its copies waits for it: "
                f"look at the disk, or 'koinon admin drain {node.node_id}'"
            )
    return found


def scarce_resources(status: ClusterStatus) -> list[str]:
    """Return a line for each resource of a node that is nearly used up."""
    return [
        f"node {node.node_id} has used {one.used:,} of {one.limit:,} {one.name}: "
        f"{_SCARCE.get(one.name, 'raise its limit')}"
        for node, session in running(status)
        for one in session.scarce
    ]


def running(status: ClusterStatus) -> Iterator[tuple[NodeInfo, SessionView]]:
    """Yield the nodes of the table that have a live session, with the session."""
    for session in status.sessions:
        node = status.table.nodes.get(NodeNumber(session.node_number)) if status.table else None
        if node is not None and session.live:
            yield node, session


def used_share(session: SessionView) -> float:
    """Return the share of a node's store that is in use; 0 if unknown."""
    return session.used_bytes / session.map_bytes if session.map_bytes else 0.0


def old_stores(status: ClusterStatus) -> list[str]:
    """Return a line for each node that was started on a store which lacked acknowledged writes."""
    return [
        f"node {node.node_id} was started on a store that may lack acknowledged writes "
        f"({session.old_store}): none of its copies counted as in sync, and each is brought up to "
        "date from the others'. This is shown until the node is started again"
        for node, session in running(status)
        if session.old_store
    ]
