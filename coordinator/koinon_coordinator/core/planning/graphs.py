"""Flow graphs of what may go where: replicas between nodes, and leads within a row."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from koinon_coordinator.core.planning.draft import Draft
from koinon_coordinator.core.planning.leveling import Levels, Lowest, Unseen

QUICK = 64
"""The number of a node's replicas that are looked at for one that goes the preferred way, before
others are tried."""


class Ranking:
    """The nodes that take, by distance from their shares: over all, and by rack."""

    def __init__(self, draft: Draft, levels: Levels) -> None:
        self._draft = draft
        self._all = Lowest(levels, draft.takers)
        self._by_rack = {
            rack: Lowest(levels, members)
            for rack, members in enumerate(draft.takers_by_rack)
            if members
        }

    def changed(self, *nodes: int) -> None:
        """Take note that the nodes' counts have changed."""
        for node in nodes:
            if self._draft.takes[node]:
                self._all.push(node)
                self._by_rack[self._draft.rack[node]].push(node)

    def lowest(self) -> tuple[int, int] | None:
        """Return distance and index of the node that is furthest below its share."""
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
    """A step gives a loose replica to a node that may have its place.

    ``copies``: old replicas may move too, not only those that are new in this plan, or that take
    the place of another old one. With it, ``partitions`` are all that may change; else it is
    enough to name those that have changed.
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
        # Of each node: replicas that are new in this plan, old ones that lead, other old ones. An
        # entry whose partition has left the node has aged and is skipped.
        self._held: list[tuple[deque[int], deque[int], deque[int]]] = [
            (deque(), deque(), deque()) for _ in draft.nodes
        ]
        # From a node to a rack: none found among a few, or among all. Other moves may open a way
        # again: the search for paths finds what is missed then.
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
        """Return a single step to the lowest node that takes one from ``giver``."""
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
        """Return a partition whose replica can go from the one to the other: new replicas first;
        leads before others if the one has leads to spare and the other lacks some. (Else the others
        first: the row changes, so its lead may go to the taker from anywhere at no cost.)
        ``limit``: look at that many of each at most.
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
        """Return the next partition that can go; those that cannot wait until the others have had
        their turn, so that a search does not begin with the same ones each time.
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
        """Return the racks that have no room for another replica once ``giver`` has left."""
        rack = self._draft.rack
        racks = [rack[i] for i in self._draft.rows[partition]]
        cap = self._draft.cap[partition]
        return {r for r in racks if racks.count(r) >= cap} - {rack[giver]}


class LeadGraph:
    """A step makes another member of a row its preferred primary; the replicas stay.

    Only nodes that take replicas give or get a lead. Rows that change anyway (``free``) go first.
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
        """Return the last partition that was laid from the one to the other and still holds."""
        way = self._ways[giver][taker]
        while way:
            if self._rows[way[-1]][0] == giver:
                return way[-1]
            way.pop()
        return None
