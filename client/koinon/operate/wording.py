"""Formats numbers, sizes, times and nodes for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from koinon_proto.contract.table import NodeInfo, NodeNumber, Table

RANGES_MAX = 10
"""With more ranges than this, the first are named, and the others counted."""


def count(number: int, noun: str) -> str:
    """Return ``1 row``, ``2,000 rows``, ``3 copies``."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun[:-1]}ies" if noun.endswith("py") else f"{number:,} {noun}s"


def listed(names: Sequence[str]) -> str:
    """Return ``a``, ``a and b``, ``a, b and c``."""
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def ranges(numbers: Sequence[int]) -> str:
    """Return sorted numbers as ranges: ``0-3, 7``; the first few of many."""
    parts: list[str] = []
    start = previous = None
    for number in [*numbers, None]:
        if previous is not None and number == previous + 1:
            previous = number
            continue
        if previous is not None:
            parts.append(f"{start}" if start == previous else f"{start}-{previous}")
        start = previous = number
    more = len(parts) - RANGES_MAX
    return ", ".join(parts[:RANGES_MAX]) + (f" and {more} more" if more > 0 else "")


def bytes_text(number: float) -> str:
    """Return a size: ``12.3 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"


def duration_text(seconds: float) -> str:
    """Return a duration in its two greatest units: ``240 ms``, ``3.2 s``, ``4 min 05 s``."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    if not hours:
        return f"{minutes} min {int(seconds % 60):02d} s"
    if hours < 24:
        return f"{hours} h {minutes % 60:02d} min"
    return f"{hours // 24} d {hours % 24:02d} h"


def rate_text(rate: float) -> str:
    """Return a rate; a small one with a digit behind the point."""
    return f"{rate:,.0f}" if rate >= 10 or rate == 0 else f"{rate:.1f}"


def node_name(table: Table, number: int) -> str:
    """Return a node's id; ``node 7`` if the table has no node of this number."""
    node = table.nodes.get(NodeNumber(number))
    return node.node_id if node else f"node {number}"


def node_names(table: Table, numbers: Iterable[int]) -> str:
    return ", ".join(node_name(table, number) for number in numbers)


def name_order(name: str) -> tuple[int, str]:
    """Return a sort key that puts n2 before n10."""
    return len(name), name


def by_name(nodes: Iterable[NodeInfo]) -> list[NodeInfo]:
    """Return the nodes in the order of their names."""
    return sorted(nodes, key=lambda node: name_order(node.node_id))
