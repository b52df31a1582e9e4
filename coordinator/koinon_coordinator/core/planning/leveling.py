"""Evening out: units go from nodes that have too many to nodes that have too few.

The same search serves replicas (a unit is a replica, a step gives it to another node) and preferred
primaries (a unit is a lead, a step gives it to another member of the row). The graph has an edge
from one node to another if some partition's unit can move that way.

Invariant: every applied path makes the sum of squared distances to the shares smaller, so it ends.
Where no path is left, no other assignment is nearer to the shares (flows with a convex cost): in
particular every count is its share rounded down or up wherever that is possible at all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from fractions import Fraction
from heapq import heapify, heappop, heappush
from math import ceil, floor
from typing import Protocol

ONE = 1 << 40
"""One unit, in the fixed-point numbers of distances."""


class Levels:
    """Counts against shares, for the nodes with a share."""

    def __init__(self, count: list[int], shares: Mapping[int, Fraction]) -> None:
        self.count = count
        self.low = {i: floor(share) for i, share in shares.items()}
        self.high = {i: ceil(share) for i, share in shares.items()}
        self.shares = shares
        self._scaled = {i: floor(share * ONE) for i, share in shares.items()}
        self.nodes = sorted(shares)

    def over(self, node: int) -> bool:
        return self.count[node] > self.high[node]

    def under(self, node: int) -> bool:
        return self.count[node] < self.low[node]

    def distance(self, node: int) -> int:
        """Return how far the node's count is above its share; negative: below."""
        return self.count[node] * ONE - self._scaled[node]

    def helps(self, giver: int, taker: int) -> bool:
        """Return whether moving a unit from giver to taker brings the counts nearer to the
        shares.
        """
        return self.distance(giver) - self.distance(taker) > ONE

    def settled(self) -> bool:
        return not any(self.over(i) or self.under(i) for i in self.nodes)


class Lowest:
    """The nodes of a group by distance, the lowest first; stale entries are skipped."""

    def __init__(self, levels: Levels, nodes: list[int]) -> None:
        self._levels = levels
        self._heap = [(levels.distance(i), i) for i in nodes]
        heapify(self._heap)

    def push(self, node: int) -> None:
        """Update the node's entry: its count has changed."""
        heappush(self._heap, (self._levels.distance(node), node))

    def first_outside(self, row: list[int]) -> tuple[int, int] | None:
        """Return distance and index of the lowest node outside the row."""
        heap, aside = self._heap, []
        found = None
        while heap:
            distance, node = heap[0]
            if distance != self._levels.distance(node):
                heappop(heap)
            elif node in row:
                aside.append(heappop(heap))
            else:
                found = heap[0]
                break
        for entry in aside:
            heappush(heap, entry)
        return found


class Unseen:
    """Nodes that a search has not reached yet, by group, in their first order."""

    def __init__(self, nodes: Iterable[int], group: Callable[[int], int]) -> None:
        self._group = {node: group(node) for node in nodes}
        self._members: dict[int, dict[int, None]] = {}
        for node, name in self._group.items():
            self._members.setdefault(name, {})[node] = None

    def __bool__(self) -> bool:
        return bool(self._group)

    def __contains__(self, node: int) -> bool:
        return node in self._group

    def outside(self, groups: Container[int], row: Container[int]) -> list[int]:
        """Return the nodes that are in none of the groups and not in the row."""
        return [
            node
            for name, members in self._members.items()
            if name not in groups
            for node in members
            if node not in row
        ]

    def discard(self, node: int) -> None:
        members = self._members[name := self._group.pop(node)]
        del members[node]
        if not members:
            del self._members[name]


class Graph(Protocol):
    """The steps that units can take between nodes. Steps lead only to nodes with a share."""

    def group(self, node: int) -> int:
        """Return the node's group, for ``Unseen``."""

    def nearest(self, giver: int) -> tuple[int, int] | None:
        """Return (taker, partition) for a single step that helps, if one is found quickly."""

    def direct(self, giver: int, taker: int) -> int | None:
        """Return a partition for a single step from giver to taker, if one is found quickly."""

    def steps(self, giver: int, unseen: Unseen) -> Iterator[tuple[int, int]]:
        """Yield (taker, partition) for every node of ``unseen`` that one step reaches, and remove
        it from ``unseen``.
        """

    def shift(self, giver: int, taker: int, partition: int) -> None:
        """Move the partition's unit, and update the counts."""


def flow_balance(levels: Levels, graph: Graph) -> None:
    """Apply paths until none helps a node that is over or under its share."""
    moved = True
    while moved and not levels.settled():
        moved = _shed(levels, graph)
        moved = _fill(levels, graph) or moved


def _shed(levels: Levels, graph: Graph) -> bool:
    """Relieve nodes above their share, the most loaded first; return whether a unit moved."""
    heap = [(-levels.distance(i), i) for i in levels.nodes if levels.over(i)]
    heapify(heap)
    moved = False
    while heap:
        distance, giver = heappop(heap)
        if -distance != levels.distance(giver):
            heappush(heap, (-levels.distance(giver), giver))
            continue
        if not levels.over(giver):
            continue
        if (direct := graph.nearest(giver)) is not None:
            graph.shift(giver, *direct)
        elif (path := _path_from(levels, graph, giver)) is not None:
            _apply(graph, path)
        else:
            continue  # no node that this one reaches is low enough, nor will be
        moved = True
        heappush(heap, (-levels.distance(giver), giver))
    return moved


def _fill(levels: Levels, graph: Graph) -> bool:
    """Fill nodes below their share, the emptiest first; return whether a unit moved."""
    heap = [(levels.distance(i), i) for i in levels.nodes if levels.under(i)]
    heapify(heap)
    moved = False
    while heap:
        _, taker = heappop(heap)
        if levels.under(taker) and (path := _path_to(levels, graph, taker)) is not None:
            _apply(graph, path)
            moved = True
            heappush(heap, (levels.distance(taker), taker))
    return moved


Path = list[tuple[int, int, int]]
"""Steps (giver, taker, partition), the last one first."""


def _path_from(levels: Levels, graph: Graph, giver: int) -> Path | None:
    """Return the shortest path from ``giver`` to a node that should get a unit."""
    ordered = sorted(levels.nodes, key=levels.distance)
    return _search(graph, [giver], ordered, lambda node: levels.helps(giver, node))


def _path_to(levels: Levels, graph: Graph, taker: int) -> Path | None:
    """Return the shortest path to ``taker`` from a node that can spare a unit."""
    ordered = sorted(levels.nodes, key=levels.distance)
    sources = [i for i in reversed(ordered) if levels.helps(i, taker)]
    for giver in sources:
        if (partition := graph.direct(giver, taker)) is not None:
            return [(giver, taker, partition)]
    return _search(graph, sources, ordered, lambda node: node == taker)


def _search(
    graph: Graph, sources: list[int], ordered: list[int], wanted: Callable[[int], bool]
) -> Path | None:
    """Search breadth first. No two steps of a shortest path interfere: if they used the same
    partition and excluded each other, one step could replace both.
    """
    came: dict[int, tuple[int, int] | None] = dict.fromkeys(sources)
    unseen = Unseen((node for node in ordered if node not in came), graph.group)
    queue = deque(sources)
    while queue and unseen:
        giver = queue.popleft()
        for taker, partition in graph.steps(giver, unseen):
            came[taker] = giver, partition
            if wanted(taker):
                return _traced(came, taker)
            queue.append(taker)
    return None


def _traced(came: Mapping[int, tuple[int, int] | None], last: int) -> Path:
    path: Path = []
    while (step := came[last]) is not None:
        giver, partition = step
        path.append((giver, last, partition))
        last = giver
    return path


def _apply(graph: Graph, path: Path) -> None:
    for giver, taker, partition in path:
        graph.shift(giver, taker, partition)
