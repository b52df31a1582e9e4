"""Flow graphs: steps of replicas between nodes, and of leads within a row."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from koinon_coordinator.core.planning.draft import Draft
from koinon_coordinator.core.planning.leveling import Levels, Lowest, Unseen

QUICK = 64
"""The number of a node's replicas that are checked for a preferred step before others are tried."""


class Ranking:
    """The nodes that take replicas, by distance from their shares: over all, and by rack."""

    def __init__(self, draft: Draft, levels: Levels) -> None:
        self._draft = draft
        self._all = Lowest(levels, draft.takers)
        self._by_rack = {
            rack: Lowest(levels, members)
            for rack, members in enumerate(draft.takers_by_rack)
            if members
        }

    def changed(self, *nodes: int) -> None:
        """Update the ranking: these nodes' counts have changed."""
        for node in nodes:
            if self._draft.takes[node]:
                self._all.push(node)
                self._by_rack[self._draft.rack[node]].push(node)

    def lowest(self) -> tuple[int, int] | None:
        """Return distance and index of the node furthest below its share."""
        return self._all.first_outside([])

    def lowest_by_rack(self, row: list[int]) -> list[tuple[int, int]]:
        """Return (distance, index) of each rack's lowest node outside the row, lowest first."""
        firsts = (group.first_outside(row) for group in self._by_rack.values())
        return sorted(first for first in firsts if first is not None)

    def candidate(self, partition: int, members: list[int]) -> int | None:
        """Return the lowest node that may join the members of a row, or None."""
        draft = self._draft
        cap = draft.cap[partition]
        first = self._all.first_outside(members)
        if first is None:
            return None
        if draft.held_by_rack(members, draft.rack[first[1]]) < cap:
            return first[1]
        for _, node in self.lowest_by_rack(members):
            if draft.held_by_rack(members, draft.rack[node]) < cap:
                return node
        return None


class ReplicaGraph:
    """The graph of replicas: a step moves a loose replica to a node that may hold it.

    Without ``copies`` only replicas move that are new in this plan, or that replace another old
    one; ``partitions`` must then have at least the changed partitions. With ``copies`` all loose
    replicas of ``partitions`` may move.
    """

    def __init__(
        self,
        draft: Draft,
        levels: Levels,
        ranking: Ranking,
        partitions: Iterable[int],
        *,
        copies: bool,
    ) -> None:
        self._draft = draft
        self._levels = levels
        self._ranking = ranking
        self._copies = copies
        self._primaries = [0] * len(draft.nodes)
        # By node: replicas that are new in this plan, old ones that lead, other old ones. Stale
        # entries, whose partition has left the node, are skipped.
        self._held: list[tuple[deque[int], deque[int], deque[int]]] = [
            (deque(), deque(), deque()) for _ in draft.nodes
        ]
        # (node, rack) pairs without a step among a few replicas, or among all. Later moves may open
        # a step again; the path search finds it then.
        self._slow: set[tuple[int, int]] = set()
        self._blocked: set[tuple[int, int]] = set()
        for row in draft.rows:
            if row:
                self._primaries[row[0]] += 1
        total = sum(draft.weight[i] for i in draft.takers)
        led = sum(self._primaries[i] for i in draft.takers)
        self._fair_leads = [led * weight / max(1, total) for weight in draft.weight]
        for p in partitions:
            origin, pinned = draft.origin[p], draft.pinned[p]
            for place, node in enumerate(draft.rows[p]):
                if node not in pinned and draft.takes[node]:
                    kind = 0 if node not in origin else 1 if place == 0 else 2
                    self._held[node][kind].append(p)

    def nearest(self, giver: int) -> tuple[int, int] | None:
        """Return a single step from ``giver`` to the lowest node that can take one."""
        lowest = self._ranking.lowest()
        if lowest is None or not self._levels.helps(giver, lowest[1]):
            return None
        if (partition := self._pick(giver, lowest[1], QUICK)) is not None:
            return lowest[1], partition
        by_rack = self._ranking.lowest_by_rack([])
        for _, taker in by_rack:
            if not self._levels.under(taker):
                break
            if (partition := self._pick(giver, taker, QUICK)) is not None:
                return taker, partition
        for _, taker in by_rack:
            if not self._levels.helps(giver, taker):
                break
            if (partition := self._pick(giver, taker, None)) is not None:
                return taker, partition
        return None

    def direct(self, giver: int, taker: int) -> int | None:
        return self._pick(giver, taker, None)

    def group(self, node: int) -> int:
        return self._draft.rack[node]

    def steps(self, giver: int, unseen: Unseen) -> Iterator[tuple[int, int]]:
        draft = self._draft
        for held in self._held[giver]:
            for partition in tuple(held):
                if not unseen:
                    return
                row = draft.rows[partition]
                if giver not in row:
                    continue
                full = self._full_racks(partition, giver)
                if self._copies or giver not in draft.origin[partition]:
                    takers = unseen.outside(full, row)
                else:  # an old replica gives way to another old one only
                    takers = [i for i in draft.origin[partition] if i in unseen and i not in row]
                    takers = [i for i in takers if draft.rack[i] not in full]
                for taker in takers:
                    unseen.discard(taker)
                    yield taker, partition

    def shift(self, giver: int, taker: int, partition: int) -> None:
        draft = self._draft
        leads = draft.rows[partition][0] == giver
        draft.replace(partition, giver, taker)
        kind = 0 if taker not in draft.origin[partition] else 1 if leads else 2
        self._held[taker][kind].append(partition)
        self._primaries[giver] -= leads
        self._primaries[taker] += leads
        self._ranking.changed(giver, taker)

    def _pick(self, giver: int, taker: int, limit: int | None) -> int | None:
        """Return a partition whose replica can move from giver to taker, new replicas first.
        Leading replicas come before others if the giver leads too many and the taker too few.
        (Otherwise the others come first: in a changed row the lead may move at no cost.) ``limit``:
        check at most so many of each kind.
        """
        way = (giver, self._draft.rack[taker])
        if way in self._blocked or (limit is not None and way in self._slow):
            return None
        new, leads, others = self._held[giver]
        spare, lack = self._primaries[giver], self._primaries[taker]
        if spare > self._fair_leads[giver] and lack < self._fair_leads[taker]:
            order = (new, leads, others)
        else:
            order = (new, others, leads)
        for group in order:
            if (partition := self._rotate(group, giver, taker, limit)) is not None:
                return partition
        if limit is not None:
            self._slow.add(way)
        elif self._draft.rack[taker] != self._draft.rack[giver]:
            self._blocked.add(way)
        return None

    def _rotate(self, group: deque[int], giver: int, taker: int, limit: int | None) -> int | None:
        """Return the next partition that can move. Partitions that cannot go to the end of the
        queue, so that searches do not check the same ones each time.
        """
        rows = self._draft.rows
        for _ in range(len(group) if limit is None else min(limit, len(group))):
            partition = group.popleft()
            if giver not in rows[partition]:
                continue
            group.append(partition)
            origin = self._draft.origin[partition]
            allowed = self._copies or giver not in origin or taker in origin
            if allowed and self._draft.may_replace(partition, giver, taker):
                return partition
        return None

    def _full_racks(self, partition: int, giver: int) -> set[int]:
        """Return the racks without room for another replica once ``giver`` has left."""
        rack = self._draft.rack
        racks = [rack[i] for i in self._draft.rows[partition]]
        cap = self._draft.cap[partition]
        return {r for r in racks if racks.count(r) >= cap} - {rack[giver]}


class LeadGraph:
    """The graph of leads: a step makes another member of a row its preferred primary.

    Only nodes that take replicas give or get a lead. Rows that change anyway (``free``) come first.
    """

    def __init__(
        self, draft: Draft, levels: Levels, partitions: Iterable[int], free: set[int]
    ) -> None:
        self._rows = draft.rows
        self._takes = draft.takes
        self._levels = levels
        self._ways: list[dict[int, list[int]]] = [{} for _ in draft.nodes]
        for partition in sorted(partitions, key=lambda p: (p in free, -p)):
            if draft.rows[partition] and draft.takes[draft.rows[partition][0]]:
                self._lay(partition)

    def nearest(self, giver: int) -> tuple[int, int] | None:
        """Return a single step to the lowest node that shares a row with ``giver``."""
        distance = self._levels.distance
        for taker in sorted(self._ways[giver], key=lambda i: (distance(i), i)):
            if not self._levels.helps(giver, taker):
                break
            if (partition := self._top(giver, taker)) is not None:
                return taker, partition
        return None

    def direct(self, giver: int, taker: int) -> int | None:
        return self._top(giver, taker) if taker in self._ways[giver] else None

    def group(self, node: int) -> int:
        return 0

    def steps(self, giver: int, unseen: Unseen) -> Iterator[tuple[int, int]]:
        for taker in tuple(self._ways[giver]):
            if taker in unseen and (partition := self._top(giver, taker)) is not None:
                unseen.discard(taker)
                yield taker, partition

    def shift(self, giver: int, taker: int, partition: int) -> None:
        row = self._rows[partition]
        row.remove(taker)
        row.insert(0, taker)
        self._levels.count[giver] -= 1
        self._levels.count[taker] += 1
        self._lay(partition)

    def _lay(self, partition: int) -> None:
        leader, *others = self._rows[partition]
        for other in others:
            if self._takes[other]:
                self._ways[leader].setdefault(other, []).append(partition)

    def _top(self, giver: int, taker: int) -> int | None:
        """Return the last entered partition with a step from giver to taker that still holds."""
        way = self._ways[giver][taker]
        while way:
            if self._rows[way[-1]][0] == giver:
                return way[-1]
            way.pop()
        return None
