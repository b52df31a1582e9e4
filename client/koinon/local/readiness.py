"""Judges from its leader's status whether a local cluster is ready. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Set

from koinon.operate.cluster_status import ClusterStatus
from koinon.operate.judge.health import problems
from koinon_proto.contract.table import NodeStatus

_SERVING = (NodeStatus.ACTIVE, NodeStatus.DRAINING)


def is_ready(status: ClusterStatus, waited_for: Set[str], epochs_before: Mapping[str, int]) -> bool:
    """Return whether every partition is served and the leader has heard from all members in
    ``waited_for``. ``epochs_before`` has members' node epochs from before their start: until the
    leader knows a later one, its status is about the former process.
    """
    if not (status.is_leader and status.ready):
        return False
    heard = {c.member_id for c in status.coordinators if c.active or c.leader}
    heard |= {status.member_id}
    for node in status.table.nodes.values() if status.table else ():
        session = status.session_of(node.number)
        told = session is not None and session.live and session.map_bytes > 0
        new = node.node_epoch > epochs_before.get(node.node_id, 0)
        if node.status in _SERVING and told and new:
            heard.add(node.node_id)
    return waited_for <= heard


def left(status: ClusterStatus) -> set[str]:
    """Return the nodes that an operator has removed from the cluster."""
    nodes = status.table.nodes.values() if status.table else ()
    return {str(node.node_id) for node in nodes if node.status is NodeStatus.LEFT}


def node_epochs(status: ClusterStatus) -> dict[str, int]:
    """Return the epoch of every known node."""
    nodes = status.table.nodes.values() if status.table else ()
    return {str(node.node_id): node.node_epoch for node in nodes}


def described(status: ClusterStatus) -> str:
    """Return the cluster's problems as text; without problems, its term and leader."""
    return "; ".join(problems(status)) or f"term {status.term}, led by {status.leader_id}"
