"""A layout during planning: dense indexes, and counts that are kept up to date.

A node is identified by its index in ascending order of numbers, so that everything is
deterministic. A row is the list of a partition's members in order. In a row that may change,
*pinned* members stay in any case; the others are *loose*. ``cap[p]`` is the most replicas of ``p``
on one rack: the least number for which a row with the pinned members exists; 1 while there are
enough racks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from koinon_coordinator.core.planning.model import Balance, Layout, PlanNode, Replicas
from koinon_proto.contract.table import NodeNumber


class Draft:
    """Rows that change, replica counts by node, and checks of allowed places."""

    def __init__(self, layout: Layout) -> None:
        known = {node.number: node for node in layout.nodes}
        for number in sorted({n for row in layout.replicas for n in row} - known.keys()):
            known[number] = PlanNode(number=number, rack="", weight=1, takes=False, gives=True)
        self.nodes = [known[number] for number in sorted(known)]
        self.index = {node.number: i for i, node in enumerate(self.nodes)}
        index = self.index
        self.origin = [tuple([index[n] for n in row]) for row in layout.replicas]
        self.rows = [list(row) for row in self.origin]
        self.takers = [i for i, node in enumerate(self.nodes) if node.takes]
        self.takes = [node.takes for node in self.nodes]
        self.weight = [max(1, node.weight) for node in self.nodes]
        self.rack_names = sorted({node.rack for node in self.nodes})
        rack_index = {rack: r for r, rack in enumerate(self.rack_names)}
        self.rack = [rack_index[node.rack] for node in self.nodes]
        self.takers_by_rack: list[list[int]] = [[] for _ in self.rack_names]
        for i in self.takers:
            self.takers_by_rack[self.rack[i]].append(i)
        self.taking_racks = sum(1 for members in self.takers_by_rack if members)
        self.count = [0] * len(self.nodes)
        for row in self.origin:
            for i in row:
                self.count[i] += 1
        self.pinned: dict[int, frozenset[int]] = {}
        self.cap = [len(self.nodes)] * len(self.rows)
        self._caps: dict[tuple[tuple[int, bool], ...], int] = {}

    # ------------------------------------------------------------------ what is possible

    def pin(self, partition: int, pinned: Iterable[int], size: int) -> None:
        """Set the members of a row that stay, and the wanted number of members; sets its
        ``cap``.
        """
        members = frozenset(pinned)
        self.pinned[partition] = members
        self.cap[partition] = self.least_cap(members, size)

    def least_cap(self, pinned: frozenset[int], size: int) -> int:
        """Return how many replicas of a row of ``size`` a rack must be allowed to hold for such a
        row to exist, or to come as near to ``size`` as the nodes allow.
        """
        if not pinned or self.taking_racks < size:
            return self._least_cap(pinned, size)
        held = Counter(self.rack[i] for i in pinned)
        open_racks = self.taking_racks - sum(1 for r in held if self.takers_by_rack[r])
        if len(pinned) + open_racks >= size:
            return 1
        return self._least_cap(pinned, size)

    def _least_cap(self, pinned: frozenset[int], size: int) -> int:
        key = (*sorted((self.rack[i], self.takes[i]) for i in pinned), (size, True))
        if (cap := self._caps.get(key)) is None:
            cap = 1
            rooms = self.rack_rooms(pinned)
            size = min(size, sum(held + free for held, free in rooms))
            while sum(max(held, min(cap, held + free)) for held, free in rooms) < size:
                cap += 1
            self._caps[key] = cap
        return cap

    def rack_rooms(self, pinned: frozenset[int]) -> list[tuple[int, int]]:
        """Return for each rack the number of pinned members, and of further nodes that take
        replicas.
        """
        rooms = [(0, len(members)) for members in self.takers_by_rack]
        for i in pinned:
            held, free = rooms[self.rack[i]]
            rooms[self.rack[i]] = held + 1, free - self.takes[i]
        return rooms

    def held_by_rack(self, row: Iterable[int], rack: int) -> int:
        """Return how many of the members are in the rack."""
        racks = self.rack
        return sum([racks[i] == rack for i in row])

    def may_replace(self, partition: int, old: int, new: int) -> bool:
        """Return whether ``new``, a node that takes replicas, may replace ``old``."""
        row = self.rows[partition]
        if new in row:
            return False
        rack = self.rack[new]
        return rack == self.rack[old] or self.held_by_rack(row, rack) < self.cap[partition]

    # ------------------------------------------------------------------ changes

    def replace(self, partition: int, old: int, new: int) -> None:
        """Replace ``old`` by ``new``."""
        row = self.rows[partition]
        row[row.index(old)] = new
        self.count[old] -= 1
        self.count[new] += 1

    def add(self, partition: int, new: int) -> None:
        """Put ``new`` at the row's end."""
        self.rows[partition].append(new)
        self.count[new] += 1

    def drop(self, partition: int, old: int) -> None:
        """Take ``old`` off the row."""
        self.rows[partition].remove(old)
        self.count[old] -= 1

    def restore(self, partition: int) -> None:
        """Reset the row to its members before the plan."""
        for i in self.rows[partition]:
            self.count[i] -= 1
        for i in self.origin[partition]:
            self.count[i] += 1
        self.rows[partition] = list(self.origin[partition])

    def reorder(self, partition: int) -> None:
        """Put each old member into its old place as far as possible, and the new ones between
        them.
        """
        origin, members = self.origin[partition], self.rows[partition]
        new = [i for i in members if i not in origin]
        places = [i if i in members else (new.pop(0) if new else None) for i in origin]
        self.rows[partition] = [i for i in places if i is not None] + new

    # ------------------------------------------------------------------ results

    def changed(self, partition: int) -> bool:
        return tuple(self.rows[partition]) != self.origin[partition]

    def added(self, partition: int) -> list[int]:
        """Return the nodes that the row has gained."""
        return [i for i in self.rows[partition] if i not in self.origin[partition]]

    def dropped(self, partition: int) -> list[int]:
        """Return the nodes that the row has lost."""
        return [i for i in self.origin[partition] if i not in self.rows[partition]]

    def replicas(self, row: Iterable[int]) -> Replicas:
        """Return the members' node numbers."""
        return tuple(NodeNumber(self.nodes[i].number) for i in row)

    def balance(self, rows: Iterable[Iterable[int]]) -> tuple[Balance, ...]:
        """Return each node's counts in the rows."""
        replicas: Counter[int] = Counter()
        primaries: Counter[int] = Counter()
        for row in rows:
            members = tuple(row)
            replicas.update(members)
            primaries.update(members[:1])
        return tuple(
            Balance(node_number=node.number, replicas=replicas[i], primaries=primaries[i])
            for i, node in enumerate(self.nodes)
        )
