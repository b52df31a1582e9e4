"""The planner by load: brings the busiest node down to a target, in few and cheap steps.

A node's *pressure* is its load over its capacity (its weight, less where it proved slow). The goal
is that no node's pressure exceeds ``target`` times the mean. A plan by load does not touch counts
of replicas; a plan by counts (``planner``) does not look at load.

Rules:

1. Nothing moves while the busiest node is within the target. A node above it is relieved until it
   is within the *aim*, half-way between the target and the mean, so that noise does not ask for the
   next plan at once. Where one partition keeps a node above the aim, only large gains count.
2. Leads go first: to change the order of a row copies nothing. A replica moves only if no change of
   order helps its node.
3. A step pays: it brings the greatest pressure of the nodes that it touches down by at least
   LEAD_GAIN, or COPY_GAIN for each copy, of the mean. A partition with less load than that moves
   only if moves of its size get the node to the aim in a bounded number.
4. Only nodes that take replicas give or get any. A replica goes only to a node with room, and never
   puts more replicas of a row into one rack than before. Partitions that are ``still`` stay: they
   are being moved, have just been moved, or are led by another node than the preferred one.

Algorithm: local search. A step moves one unit (a lead to another member of the row, or a replica to
another node) off a node that is above the aim, or two units: one to a second node, and one from
there to a third one or back; in small pools also three to five large ones at once. The best step of
the most pressed node is applied, until no node above the aim has a step that pays. The pressures,
in falling order, get smaller with each step, so the search ends. Where it ends, no step pays: the
plan for the result is empty.

Worked example, target 1.3, replication factor 2, loads of primaries (those of followers are 0):

    p0 → 1,2: 5    p1 → 1,3: 3    p2 → 2,3: 1    p3 → 3,1: 0      pressures 8, 1, 0; mean 3

p1 is led by node 3 instead: 5, 1, 3. Node 1 is still above the aim of 3.45, but p0 alone is 5:
wherever it goes, that node has at least as much. The plan says so and names the partition.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

import numpy as np
import numpy.typing as npt

from koinon_coordinator.core.planning.model import (
    Balance,
    LoadAim,
    LoadLayout,
    LoadPlan,
    PlannedMove,
    Refusal,
    RefusalCode,
    Replicas,
)

F64Array = npt.NDArray[np.float64]
I64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

LEAD_GAIN, COPY_GAIN = 0.01, 0.01
"""The least gain of a step, in parts of the mean pressure; for each copy."""
PAIRED_MAX = 192
"""The most units of each of two nodes that are tried together."""
SECONDS_MAX = 12
"""The most nodes through which another one is relieved, the least pressed ones."""
SMALL_POOL = 8
TRIED_TOGETHER = {3: 40, 4: 24, 5: 16}
"""In pools of at most SMALL_POOL nodes, any three of the 40 largest units are tried together, then
any four of 24, and any five of 16: a few partitions may carry most of the load there, and no two of
them may help.
"""
SMALL_LEADS_MAX, SMALL_COPIES_MAX = 16_384, 512
"""A node is relieved by partitions so small that it takes at most so many of them."""
HOPELESS_TIMES = 5.0
"""A node that one partition keeps above the aim needs so many times the gain: it stays above the
target, so that noise would ask for a move in every plan.
"""
_NEARLY_BEST = 0.9
"""Of steps with at least this part of the best gain, the one with the fewest bytes is chosen."""
_NOBODY = -1


def plan_pool(layout: LoadLayout, aim: LoadAim) -> LoadPlan:
    """Return the moves that bring the pool's nodes to the target, as far as moves help."""
    search = _Search(layout, aim)
    before = search.balance()
    pressure_before = search.pressure.copy()
    search.relieve_all()
    moves = tuple(search.moves(pressure_before))
    return LoadPlan(
        moves=moves, before=before, after=search.balance(), refusals=tuple(search.refusals())
    )


@dataclass(frozen=True, slots=True)
class _Units:
    """Units of one node that may move, in columns: the row, the place of the node in the row, the
    node that would get the unit, the load that goes with it, and the bytes that are copied (0: a
    lead).
    """

    row: I64Array
    place: I64Array
    to: I64Array
    amount: F64Array
    size: I64Array

    def __len__(self) -> int:
        return len(self.row)

    def chosen(self, which: npt.NDArray[np.generic]) -> _Units:
        """Return some of the units, by a mask or by indexes."""
        return _Units(
            self.row[which], self.place[which], self.to[which], self.amount[which], self.size[which]
        )

    def thinned(self) -> _Units:
        """Return at most PAIRED_MAX of the units, spread evenly over their amounts."""
        if len(self) <= PAIRED_MAX:
            return self
        ordered = np.argsort(self.amount, kind="stable")
        return self.chosen(ordered[np.linspace(0, len(self) - 1, PAIRED_MAX).astype(np.int64)])


def _joined(units: Sequence[_Units]) -> _Units:
    columns = ("row", "place", "to", "amount", "size")
    return _Units(*(np.concatenate([getattr(u, name) for u in units]) for name in columns))


_Step = tuple[tuple[int, int, int], ...]
"""Units of different rows: (row, place, node that gets it)."""


class _Search:
    """Rows that change, and the nodes' loads. Nodes are indexes in the order of the layout."""

    def __init__(self, layout: LoadLayout, aim: LoadAim) -> None:
        self._layout = layout
        self._aim = aim
        nodes = layout.nodes
        index = {node.number: i for i, node in enumerate(nodes)}
        width = max(map(len, layout.replicas), default=1)
        self._rows = np.full((len(layout.replicas), width), _NOBODY, np.int64)
        for row, replicas in enumerate(layout.replicas):
            self._rows[row, : len(replicas)] = [index.get(n, _NOBODY) for n in replicas]
        self._origin = self._rows.copy()
        self._lead, self._follow = np.array(layout.lead), np.array(layout.follow)
        self._size = np.array(layout.sizes, np.int64)
        self._movable = np.array([p not in layout.still for p in layout.partition_ids], np.bool_)
        self._takes = np.array([node.takes for node in nodes], np.bool_)
        racks = {rack: r for r, rack in enumerate(sorted({node.rack for node in nodes}))}
        self._rack = np.array([racks[node.rack] for node in nodes], np.int64)
        self._above: set[int] = set()  # nodes that were above the target in this plan
        self._room = np.array([node.room for node in nodes], np.int64)
        self.capacity = np.array(
            [max(1, n.weight) / 100 * layout.speeds.get(n.number, 1.0) for n in nodes]
        )
        self.load = np.zeros(len(nodes))
        for place in range(width):
            held = self._rows[:, place]
            amount = self._lead if place == 0 else self._follow
            np.add.at(self.load, held[held >= 0], amount[held >= 0])
        takers = self._takes
        capacity = self.capacity[takers].sum()
        self.mean = float(self.load[takers].sum() / capacity) if capacity else 0.0

    @property
    def pressure(self) -> F64Array:
        """The load of each node over its capacity."""
        pressure: F64Array = self.load / self.capacity
        return pressure

    def _over(self, times_mean: float) -> list[int]:
        """Return the nodes above so many times the mean, the most pressed ones first."""
        pressure = np.where(self._takes, self.pressure, -1.0)
        bound = max(times_mean * self.mean * (1 + 1e-9), 0.0)
        over = np.flatnonzero((pressure > bound) & (self.load > self._layout.least))
        found: list[int] = over[np.argsort(-pressure[over], kind="stable")].tolist()
        return found

    # ------------------------------------------------------------------ the search

    def _to_relieve(self) -> list[int]:
        """Return the nodes above the aim that are, or were in this plan, above the target."""
        self._above.update(self._over(self._aim.target))
        return [node for node in self._over(self._aim.aim + LEAD_GAIN) if node in self._above]

    def relieve_all(self) -> None:
        """Apply steps until no node above the aim has one that pays."""
        stuck: set[int] = set()  # nodes without a step, some steps ago
        while True:
            for node in self._to_relieve():
                if node in stuck:
                    continue
                if (step := self._step(node)) is not None:
                    self._apply(step)
                    break
                stuck.add(node)
            else:
                if not stuck or not self._advance_stuck(stuck):
                    return
                stuck.clear()

    def _advance_stuck(self, stuck: set[int]) -> bool:
        """Apply a step of a node that had none before other nodes changed; return whether there is
        one.
        """
        for node in self._to_relieve():
            if node in stuck and (step := self._step(node)) is not None:
                self._apply(step)
                return True
        return False

    def _step(self, node: int) -> _Step | None:
        """Return the best step that relieves the node, or None; leads before copies."""
        for copies in (False,) if self._aim.leaders_only else (False, True):
            smallest = self._smallest(node, copies)
            units = self._units(node, copies, smallest)
            if step := self._single(node, units, smallest):
                return step
            few = np.count_nonzero(self._takes) <= SMALL_POOL
            if not smallest and not (few and self._aim.target <= 1):
                continue  # one partition keeps the node above the aim
            if step := self._double(node, units, copies):
                return step
            if step := self._several(node, copies):
                return step
        return None

    def _smallest(self, node: int, copies: bool) -> float:
        """Return the least load of a unit that pays although its gain is small: 0.0 if none does,
        since the node has a partition that keeps it above the aim anyway.
        """
        held = np.flatnonzero((self._rows == node).any(axis=1))
        load = np.where(self._rows[held, 0] == node, self._lead[held], self._follow[held])
        enough = self._aim.aim * self.mean * self.capacity[node]
        if load.max(initial=0.0) > enough:
            return 0.0
        return float((self.load[node] - enough) / (SMALL_COPIES_MAX if copies else SMALL_LEADS_MAX))

    def _units(self, node: int, copies: bool, smallest: float = 0.0) -> _Units:
        """Return the units that the node may give away: its leads, and (``copies``) replicas; none
        that is too small to pay, or smaller than ``smallest``.
        """
        least = LEAD_GAIN / 2 * self.mean * self.capacity[node]
        least = min(smallest, least) if smallest else least
        row, place = np.nonzero((self._rows == node) & self._movable[:, None])
        amount = np.where(place == 0, self._lead[row], self._follow[row])
        row, place = row[amount >= least], place[amount >= least]
        found = [*self._leads(row[place == 0])]
        if copies:
            found += self._replicas(node, row, place)
        empty = np.zeros(0, np.int64)
        return _joined([*found, _Units(empty, empty, empty, np.zeros(0), empty)])

    def _leads(self, row: I64Array) -> Iterator[_Units]:
        for place in range(1, self._rows.shape[1]):
            to = self._rows[row, place]
            able = (to >= 0) & self._takes[to]
            of, none = row[able], np.zeros(int(able.sum()), np.int64)
            yield _Units(of, none, to[able], self._lead[of] - self._follow[of], none)

    def _replicas(self, node: int, row: I64Array, place: I64Array) -> Iterator[_Units]:
        members = self._rows[row]
        racks = np.where(members >= 0, self._rack[members], -1)
        amount = np.where(place == 0, self._lead[row], self._follow[row])
        here = self._rack[node]
        beside = (racks == here).sum(axis=1) - 1  # other replicas in the giver's rack
        for to in np.flatnonzero(self._takes).tolist():
            able = (self._room[to] >= self._size[row]) & ~(members == to).any(axis=1)
            if self._rack[to] != here:
                able &= (racks == self._rack[to]).sum(axis=1) <= beside
            of = row[able]
            size = np.maximum(1, self._size[of])
            yield _Units(of, place[able], np.full(len(of), to), amount[able], size)

    def _single(self, node: int, units: _Units, smallest: float) -> _Step | None:
        """Return the unit with the greatest gain, if it pays."""
        if not len(units):
            return None
        given = (self.load[node] - units.amount) / self.capacity[node]
        got = (self.load[units.to] + units.amount) / self.capacity[units.to]
        gain = self.pressure[node] - np.maximum(given, got)
        small = gain > 0
        least = self._least_gain(units.size > 0) * (1.0 if smallest else HOPELESS_TIMES)
        gain[gain < least] = -1.0
        best = _cheapest_of_the_best(gain, units.size)
        if best is not None:
            return (_unit(units, best),)
        return self._many_small(node, units.chosen(small & (units.amount >= smallest)), smallest)

    def _many_small(self, node: int, units: _Units, smallest: float) -> _Step | None:
        """Return as many small units as bring the node to the aim, the largest first, without any
        node that gets one above the aim; None if there are none.
        """
        if not smallest or not len(units):
            return None
        enough = self._aim.aim * self.mean * self.capacity
        left, free = float(self.load[node] - enough[node]), enough - self.load
        room = self._room.copy()
        step: dict[int, tuple[int, int, int]] = {}
        order = np.lexsort((self.pressure[units.to], -units.amount))
        columns = (units.row, units.to, units.amount, units.size)
        for at, row, to, amount, size in zip(
            order.tolist(), *(column[order].tolist() for column in columns), strict=True
        ):
            if left <= 0:
                break
            if row in step or amount > free[to] or amount > 2 * left or size > room[to]:
                continue
            step[row] = _unit(units, at)
            left -= amount
            free[to] -= amount
            room[to] -= size
        return tuple(step.values()) or None

    def _double(self, node: int, units: _Units, copies: bool) -> _Step | None:
        """Return the pair of units with the greatest gain, if it pays: one goes to a second node,
        the other one from there to a third one, or back.
        """
        best: tuple[float, _Step] | None = None
        units = units.chosen(np.flatnonzero(self._may_begin(node, units)))
        seconds = np.unique(units.to)
        seconds = seconds[np.argsort(self.pressure[seconds], kind="stable")][:SECONDS_MAX]
        for second in seconds.tolist():
            first = units.chosen(units.to == second).thinned()
            then = self._units(second, copies).thinned()
            if len(then) and (found := self._best_pair(node, second, first, then)) is not None:
                best = found if best is None or found[0] > best[0] else best
        return None if best is None else best[1]

    def _may_begin(self, node: int, units: _Units) -> BoolArray:
        """Return a mask of the units that may begin a pair: large enough to relieve the node, and
        taken by a node that has a unit large enough to make up for it.
        """
        amount, to, least = units.amount, units.to, LEAD_GAIN * self.mean
        largest = np.zeros(len(self.load))
        for place in range(self._rows.shape[1]):
            held = self._rows[:, place]
            of = self._lead if place == 0 else self._follow
            np.maximum.at(largest, held[held >= 0], of[held >= 0])
        room = (self.pressure[node] - least) * self.capacity[to] - self.load[to]
        may: BoolArray = (amount >= least * self.capacity[node]) & (amount - largest[to] <= room)
        return may

    def _best_pair(
        self, node: int, second: int, first: _Units, then: _Units
    ) -> tuple[float, _Step] | None:
        load, capacity = self.load, self.capacity
        given, passed = first.amount[:, None], then.amount[None, :]
        back = (then.to == node)[None, :]
        left = (load[node] - given + np.where(back, passed, 0.0)) / capacity[node]
        held = (load[second] + given - passed) / capacity[second]
        third = np.where(back, 0.0, (load[then.to] + then.amount) / capacity[then.to])
        gain = self.pressure[node] - np.maximum(np.maximum(left, held), third)
        copied = (first.size > 0).astype(np.int64)[:, None] + (then.size > 0)[None, :]
        gain[(gain < self._least_gain(copied)) | (first.row[:, None] == then.row[None, :])] = -1.0
        best = _cheapest_of_the_best(gain.ravel(), (first.size[:, None] + then.size).ravel())
        if best is None:
            return None
        at, after = divmod(best, len(then))
        return float(gain[at, after]), (_unit(first, at), _unit(then, after))

    def _several(self, node: int, copies: bool) -> _Step | None:
        """Return the units that together have the greatest gain, if they pay, the fewest units that
        do; only in small pools.
        """
        takers = np.flatnonzero(self._takes).tolist()
        if len(takers) > SMALL_POOL:
            return None
        of_node = [self._units(giver, copies) for giver in takers]
        units = _joined(of_node)
        giver = np.repeat(takers, [len(u) for u in of_node])
        ordered = np.argsort(-units.amount, kind="stable")
        for count, among in TRIED_TOGETHER.items():
            chosen = ordered[:among]
            if step := self._together(node, units.chosen(chosen), giver[chosen], count):
                return step
        return None

    def _together(self, node: int, units: _Units, giver: I64Array, many: int) -> _Step | None:
        """Return the best of all choices of so ``many`` units, if it pays."""
        count = len(units)
        effect = np.zeros((count, len(self.load)))
        effect[np.arange(count), giver] -= units.amount
        effect[np.arange(count), units.to] += units.amount
        choices = _choices(count, many)
        rows = np.sort(units.row[choices], axis=1)
        choices = choices[(np.diff(rows, axis=1) != 0).all(axis=1)]  # each row changes once
        change = effect[choices].sum(axis=1)
        after = np.where(change == 0, -np.inf, (self.load + change) / self.capacity)
        gain = self.pressure[node] - after.max(axis=1, initial=-np.inf)
        sizes = units.size[choices]
        copied = (sizes > 0).sum(axis=1)
        gain[(gain < self._least_gain(copied)) | (change[:, node] >= 0)] = -1.0
        best = _cheapest_of_the_best(gain, sizes.sum(axis=1))
        return None if best is None else tuple(_unit(units, at) for at in choices[best].tolist())

    def _least_gain(self, copied: npt.NDArray[np.generic]) -> F64Array:
        """Return the least gain of steps with so many copies."""
        least: F64Array = np.maximum(LEAD_GAIN, COPY_GAIN * copied.astype(np.float64)) * self.mean
        return least

    def _apply(self, step: _Step) -> None:
        for row, place, to in step:
            members = self._rows[row]
            node = int(members[place])
            if (held := np.flatnonzero(members == to)).size:  # a lead: the two change places
                members[held[0]] = node
                amount = self._lead[row] - self._follow[row]
            else:
                amount = self._lead[row] if place == 0 else self._follow[row]
                self._room[to] -= self._size[row]
                self._room[node] += self._size[row]
            members[place] = to
            self.load[node] -= amount
            self.load[to] += amount

    # ------------------------------------------------------------------ results

    def _name(self, node: int) -> str:
        number = self._layout.nodes[node].number
        return self._layout.names.get(number, f"node {number}")

    def _replicas_of(self, members: I64Array) -> Replicas:
        return tuple(self._layout.nodes[i].number for i in members.tolist() if i >= 0)

    def balance(self) -> tuple[Balance, ...]:
        """Return each node's counts, load and capacity."""
        held = self._rows[self._rows >= 0]
        replicas = np.bincount(held, minlength=len(self.load))
        first = self._rows[:, 0]
        primaries = np.bincount(first[first >= 0], minlength=len(self.load))
        return tuple(
            Balance(
                node_number=node.number,
                replicas=int(replicas[i]),
                primaries=int(primaries[i]),
                load=float(self.load[i]),
                capacity=float(self.capacity[i]) if node.takes else 0.0,
            )
            for i, node in enumerate(self._layout.nodes)
        )

    def moves(self, pressure_before: F64Array) -> Iterator[PlannedMove]:
        """Yield the changed rows, in order of partitions."""
        for row in np.flatnonzero((self._rows != self._origin).any(axis=1)).tolist():
            origin, target = self._origin[row], self._rows[row]
            lost = [i for i in origin.tolist() if i not in target]
            giver = lost[0] if lost else int(origin[0])
            times = pressure_before[giver] / self.mean
            if times > 1:
                why = f"{self._name(giver)} has {times:.2f} times the mean load"
            else:
                why = "makes room for other moves"
            if not lost:
                why = f"only the order changes, no data is copied: {why}"
            yield PlannedMove(
                partition_id=self._layout.partition_ids[row],
                origin=self._layout.replicas[row],
                target=self._replicas_of(target),
                reason=why,
            )

    def refusals(self) -> Iterator[Refusal]:
        """Yield the nodes that stay above the target, and the reasons."""
        for node in self._over(self._aim.target):
            times = self.pressure[node] / self.mean
            stays = f"{self._name(node)} stays at {times:.2f} times the mean load"
            held = np.flatnonzero((self._rows == node).any(axis=1))
            yield self._refusal(node, stays, held)

    def _refusal(self, node: int, stays: str, held: I64Array) -> Refusal:
        layout, number = self._layout, self._layout.nodes[node].number
        load = np.where(self._rows[held, 0] == node, self._lead[held], self._follow[held])
        top = int(held[np.argmax(load)])
        share, its = float(load.max()) / self.load[node], layout.partition_ids[top]
        fixed = held[~self._movable[held]]
        if load.max() > self.mean * self.capacity[self._takes].max():
            reason = (
                f"{stays}: partition {its} alone is {share:.0%} of its load, more than the mean of "
                "all nodes, so no move helps; its keys have to be spread"
            )
            return Refusal(
                code=RefusalCode.HOT_PARTITION,
                reason=reason,
                node_number=number,
                partition_ids=(its,),
            )
        if len(fixed) and load[~self._movable[held]].sum() > 0.1 * self.load[node]:
            reason = (
                f"{stays}: {len(fixed)} of its partitions are being moved, were moved within the "
                "last ten minutes, or are not led by their preferred node; plan again later"
            )
            ids = tuple(layout.partition_ids[row] for row in fixed.tolist())
            return Refusal(
                code=RefusalCode.RESTING, reason=reason, node_number=number, partition_ids=ids
            )
        means = "change of order" if self._aim.leaders_only else "move"
        reason = f"{stays}: no {means} of its partitions brings a gain that pays"
        return Refusal(
            code=RefusalCode.NO_GAIN, reason=reason, node_number=number, partition_ids=(its,)
        )


@lru_cache(maxsize=64)
def _choices(count: int, many: int) -> I64Array:
    """Return all choices of so many of ``count`` indexes."""
    return np.array([*combinations(range(count), many)], np.int64).reshape(-1, many)


def _unit(units: _Units, at: int) -> tuple[int, int, int]:
    return int(units.row[at]), int(units.place[at]), int(units.to[at])


def _cheapest_of_the_best(gain: F64Array, size: I64Array) -> int | None:
    """Return the index of the smallest of those with nearly the best gain; None if no gain is
    positive.
    """
    if not len(gain) or (most := gain.max()) <= 0:
        return None
    good = np.flatnonzero(gain >= _NEARLY_BEST * most)
    return int(good[np.lexsort((-gain[good], size[good]))[0]])
