"""The strategies that share partitions among a group's members. Pure functions.

Each takes the members' subscriptions, the partitions of each keyspace and, for ``sticky``, the
present owners, and returns the owner of each partition that any member subscribes to. Members count
in the order of their ids, keyspaces and partitions in the order of theirs, so the result depends on
nothing else.

``range`` and ``round_robin`` are those of Kafka's assignors of these names, with keyspaces as
topics. ``sticky`` chooses, among the assignments with the evenest shares, one that leaves the most
partitions with their owners. Shares are evenest if the sum of their squares is least: where all
members have the same subscriptions, they differ by one at most.

How ``sticky`` finds it: partitions that the same members subscribe to are equal to each other but
for their owners; such partitions are a *lane*. A partition is thus a unit that flows from its lane
to a member. Two kinds of cost are to be least, the evenness first: a member's n-th unit costs ``2n
- 1`` times a number larger than all moves together (the sum of these is the square), a unit that
comes from another owner costs 1. Such a flow has the least cost if and only if no cycle of changes
lowers it (Klein 1967): the search begins with the present owners and applies such cycles until
there is none. One lane needs no search: to give each free unit to the smallest share, and then
units of the largest share to the smallest until they differ by one at most, is the best already.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import chain, cycle, islice

from koinon_proto.contract.groups import GroupStrategy
from koinon_proto.contract.keyspaces import KeyspaceId
from koinon_proto.contract.table import PartitionId

MemberId = str
Subscriptions = Mapping[MemberId, Set[KeyspaceId]]
PartitionsOf = Mapping[KeyspaceId, range]
Owners = Mapping[PartitionId, MemberId]
RELAXATIONS_MAX = 1_000_000
"""Steps of the search of ``sticky``, about 0.1 s. Where many different subscriptions overlap, the
shares may then be less even, and more partitions move, than in the best assignment; each has one
owner still.
"""


def assign(
    strategy: GroupStrategy, members: Subscriptions, partitions: PartitionsOf, owners: Owners
) -> dict[PartitionId, MemberId]:
    """Return the owner of each partition that a member subscribes to. ``partitions`` has every
    keyspace that exists; other subscriptions count for nothing.
    """
    known = {member: members[member] & partitions.keys() for member in sorted(members)}
    return _STRATEGIES[strategy](known, partitions, owners)


def share_by_range(
    members: Subscriptions, partitions: PartitionsOf, _owners: Owners
) -> dict[PartitionId, MemberId]:
    """Give each member of a keyspace a run of its partitions; the first members get one more where
    they do not divide evenly.
    """
    shares: dict[PartitionId, MemberId] = {}
    for keyspace_id, partition_ids in sorted(partitions.items()):
        subscribed = [member for member, wanted in members.items() if keyspace_id in wanted]
        ids = iter(partition_ids)
        for index, member in enumerate(subscribed):
            length = len(partition_ids) // len(subscribed)
            length += index < len(partition_ids) % len(subscribed)
            shares.update((PartitionId(p), member) for p in islice(ids, length))
    return shares


def deal_in_turn(
    members: Subscriptions, partitions: PartitionsOf, _owners: Owners
) -> dict[PartitionId, MemberId]:
    """Deal the partitions of all keyspaces to the members in turn, without those that do not
    subscribe to the keyspace.
    """
    shares: dict[PartitionId, MemberId] = {}
    subscribed = frozenset(chain.from_iterable(members.values()))
    turns = cycle(members.items())
    for keyspace_id in sorted(subscribed):
        for partition_id in partitions[keyspace_id]:
            shares[PartitionId(partition_id)] = next(m for m, w in turns if keyspace_id in w)
    return shares


def keep_owners(
    members: Subscriptions, partitions: PartitionsOf, owners: Owners
) -> dict[PartitionId, MemberId]:
    """Share evenly, and leave as many partitions as that allows with their owners."""
    lanes = _lanes(members, partitions, owners)
    loads = dict.fromkeys(members, 0)
    for lane in lanes:
        for member, kept in lane.owned.items():
            loads[member] += len(kept)
    for lane in sorted(lanes, key=lambda lane: len(lane.members)):
        lane.give_free_units(loads)
    for lane in lanes:
        lane.level(loads)
    if len(lanes) > 1:
        _Search(lanes, loads).run()
    return {p: member for lane in lanes for p, member in lane.dealt()}


@dataclass(slots=True)
class _Lane:
    """Partitions that the same members subscribe to."""

    members: tuple[MemberId, ...]  # ascending
    free: list[PartitionId] = field(default_factory=list)  # of no owner among the members
    owned: dict[MemberId, list[PartitionId]] = field(default_factory=dict)  # at the beginning
    units: dict[MemberId, int] = field(default_factory=dict)  # each member's share by now

    def take_in(self, partition_ids: range, owners: Owners) -> None:
        for partition_id in map(PartitionId, partition_ids):
            owner = owners.get(partition_id, "")
            self.owned.get(owner, self.free).append(partition_id)

    def give_free_units(self, loads: dict[MemberId, int]) -> None:
        """Give each free unit to the member with the smallest load. Begins the lane's ``units``."""
        self.units = {member: len(kept) for member, kept in self.owned.items()}
        heap = [(loads[member], member) for member in self.members]
        heapify(heap)
        for _ in self.free:
            load, member = heappop(heap)
            self.units[member] += 1
            loads[member] = load + 1
            heappush(heap, (load + 1, member))

    def level(self, loads: dict[MemberId, int]) -> None:
        """Move units of the member with the largest load to that with the smallest, as long as the
        loads differ by more than one.
        """
        low = [(loads[member], member) for member in self.members]
        high = [(-loads[member], member) for member in self.members if self.units[member]]
        heapify(low)
        heapify(high)
        while high:
            load, giver = heappop(high)
            least, taker = low[0]
            if -load != loads[giver] or not self.units[giver]:
                continue  # an entry from before a move
            if least != loads[taker]:
                heappop(low)
                heappush(high, (load, giver))
                continue
            if loads[giver] - loads[taker] < 2:
                return
            self.units[giver] -= 1
            self.units[taker] += 1
            for member, change in ((giver, -1), (taker, 1)):
                loads[member] += change
                heappush(low, (loads[member], member))
                heappush(high, (-loads[member], member))

    def dealt(self) -> list[tuple[PartitionId, MemberId]]:
        """Return the owner of each partition, so that each member has its ``units``, and keeps the
        first of the partitions that it owned.
        """
        spare = [p for m, kept in self.owned.items() for p in kept[self.units[m] :]]
        unowned = iter(sorted([*self.free, *spare]))
        shares: list[tuple[PartitionId, MemberId]] = []
        for member, units in self.units.items():
            kept = self.owned[member][:units]
            shares += ((p, member) for p in kept)
            shares += ((p, member) for p in islice(unowned, units - len(kept)))
        return shares


def _lanes(members: Subscriptions, partitions: PartitionsOf, owners: Owners) -> list[_Lane]:
    found: dict[tuple[MemberId, ...], _Lane] = {}
    for keyspace_id, partition_ids in sorted(partitions.items()):
        subscribed = tuple(member for member, wanted in members.items() if keyspace_id in wanted)
        if subscribed:
            fresh = _Lane(subscribed, owned={member: [] for member in subscribed})
            found.setdefault(subscribed, fresh).take_in(partition_ids, owners)
    return list(found.values())


_Point = int | MemberId | None
"""Of the search: a lane's index, a member, or the point at which loads begin and end."""


class _Search:
    """The search for cycles of changes that lower the cost. A cycle takes units from members and
    gives them to others, each within a lane; or it begins at a member whose load falls by one, and
    ends at a member whose load rises by one.

    Each cycle is found by Bellman and Ford's algorithm.
    """

    def __init__(self, lanes: list[_Lane], loads: dict[MemberId, int]) -> None:
        self._lanes = lanes
        self._loads = loads
        self._uneven = 2 * len(lanes) + 1  # a cycle's moves cost less: it passes each lane once
        self._relaxations = 0

    def run(self) -> None:
        """Apply cycles of changes until none lowers the cost."""
        while (cycle_found := self._cycle()) is not None:
            for lane_index, giver, taker in cycle_found:
                units = self._lanes[lane_index].units
                units[giver] -= 1
                units[taker] += 1
                self._loads[giver] -= 1
                self._loads[taker] += 1

    def _arcs(self) -> list[tuple[_Point, _Point, int]]:
        """Return all changes by one unit, with their costs: a member gives a unit to a lane, a lane
        gives one to a member, a member's load falls or rises.
        """
        arcs: list[tuple[_Point, _Point, int]] = []
        for index, lane in enumerate(self._lanes):
            for member, units in lane.units.items():
                owned = len(lane.owned[member])
                if units:
                    arcs.append((member, index, -1 if units > owned else 0))
                arcs.append((index, member, 1 if units >= owned else 0))
        for member, load in self._loads.items():
            if load:
                arcs.append((None, member, -self._uneven * (2 * load - 1)))
            arcs.append((member, None, self._uneven * (2 * load + 1)))
        return arcs

    def _cycle(self) -> list[tuple[int, MemberId, MemberId]] | None:
        """Return a cycle of negative cost as moves (lane, giver, taker); None if there is none, or
        the search has taken long enough.
        """
        arcs = self._arcs()
        cost: dict[_Point, int] = {None: 0}
        cost |= dict.fromkeys(range(len(self._lanes)), 0) | dict.fromkeys(self._loads, 0)
        came_from: dict[_Point, _Point] = {}
        while self._relaxations < RELAXATIONS_MAX:
            self._relaxations += len(arcs)
            has_changed = False
            for start, end, arc_cost in arcs:
                if cost[start] + arc_cost < cost[end]:
                    cost[end] = cost[start] + arc_cost
                    came_from[end] = start
                    has_changed = True
            if not has_changed:
                return None
            if points := _cycle_in(came_from):
                return _moves(points)
        return None


def _cycle_in(came_from: Mapping[_Point, _Point]) -> list[_Point]:
    """Return the points of a cycle, in the order of its arcs; none: there is no cycle. A cycle of
    arcs that have each lowered a cost has a negative cost.
    """
    seen: dict[_Point, int] = {}  # by the walk that was there
    for walk, first in enumerate(came_from):
        point = first
        while point not in seen:
            seen[point] = walk
            if point not in came_from:
                break
            point = came_from[point]
        else:
            if seen[point] == walk:
                points = [point]
                while (point := came_from[point]) != points[0]:
                    points.append(point)
                return points[::-1]
    return []


def _moves(points: list[_Point]) -> list[tuple[int, MemberId, MemberId]]:
    """Return the cycle as moves (lane, giver, taker)."""
    moves = []
    for index, lane in enumerate(points):
        if isinstance(lane, int):
            giver, taker = points[index - 1], points[(index + 1) % len(points)]
            assert isinstance(giver, str)
            assert isinstance(taker, str)
            moves.append((lane, giver, taker))
    return moves


_STRATEGIES: dict[
    GroupStrategy,
    Callable[[Subscriptions, PartitionsOf, Owners], dict[PartitionId, MemberId]],
] = {
    GroupStrategy.RANGE: share_by_range,
    GroupStrategy.ROUND_ROBIN: deal_in_turn,
    GroupStrategy.STICKY: keep_owners,
}
