"""Nodes of a table as people know them: by name, in the order of names."""

from __future__ import annotations

from collections.abc import Iterable

from koinon_proto.contract.table import NodeInfo, NodeNumber, Table


def node_name(table: Table, number: int) -> str:
    """Return a node's id; ``node 7`` where the table has none of this number."""
    node = table.nodes.get(NodeNumber(number))
    return node.node_id if node else f"node {number}"


def name_order(name: str) -> tuple[int, str]:
    """Sort n2 before n10."""
    return len(name), name


def by_name(nodes: Iterable[NodeInfo]) -> list[NodeInfo]:
    """Return the nodes in the order of their names."""
    return sorted(nodes, key=lambda node: name_order(node.node_id))
