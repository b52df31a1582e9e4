"""Builds one plan: first the necessary changes, then leveling, then leads, then texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from fractions import Fraction
from hashlib import blake2b

from koinon_coordinator.core.planning.draft import Draft
from koinon_coordinator.core.planning.graphs import LeadGraph, Ranking, ReplicaGraph
from koinon_coordinator.core.planning.leveling import Levels, flow_balance
from koinon_coordinator.core.planning.model import Layout, Plan, PlannedMove, Refusal, RefusalCode
from koinon_coordinator.core.planning.room import place_by_size, take_back_misfits
from koinon_coordinator.core.planning.shares import fair_shares, fair_shares_by_rack
from koinon_proto.contract.table import NO_NODE, NodeNumber, PartitionId


class PlanBuilder:
    """The steps of which the plans are composed. Every row that may change is opened first; then
    ``compute_shares`` fixes the shares, and the other steps follow.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.draft = Draft(layout)
        self.refusals: list[Refusal] = []
        self._size: dict[int, int] = {}
        self._leaving: dict[int, str] = {}
        self._causes: dict[int, list[str]] = {}
        self._before = list(self.draft.count)
        self._leads_before: Mapping[int, int] = Counter(r[0] for r in self.draft.origin if r)
        self._levels = Levels(self.draft.count, {})
        self._leads = self._levels

    def name(self, node: int) -> str:
        """Return the name of the node with this index."""
        number = self.draft.nodes[node].number
        return self.layout.names.get(number, f"node {number}")

    # ------------------------------------------------------------------ open rows

    def free(self) -> list[int]:
        """Return the partitions without a move queued or under way."""
        return [p for p in range(len(self.draft.rows)) if p not in self.layout.fixed]

    def leave(self, node: int, reason: str) -> None:
        """Have the node give up its places in open rows, and take none."""
        self._leaving[node] = reason

    def open(self, partition: int, pinned: Iterable[int], size: int) -> None:
        """Allow a row to change to ``size`` members, except for the pinned ones."""
        self._size[partition] = size
        self.draft.pin(partition, pinned, size)

    def cause(self, partition: int, reason: str) -> None:
        """Note a reason for the row's change."""
        causes = self._causes.setdefault(partition, [])
        if reason not in causes:
            causes.append(reason)

    # ------------------------------------------------------------------ shares

    def compute_shares(self) -> None:
        """Fix each node's share of replicas; see ``fair_shares_by_rack``."""
        draft = self.draft
        lower = list(draft.count)
        kinds: Counter[tuple[tuple[tuple[int, bool], ...], int, int]] = Counter()
        samples = {}
        for p, pinned in draft.pinned.items():
            for i in draft.rows[p]:
                lower[i] -= i not in pinned
            signature = tuple(sorted((draft.rack[i], draft.takes[i]) for i in pinned))
            kind = (signature, self._size[p], draft.cap[p])
            kinds[kind] += 1
            samples[kind] = pinned
        upper = [lower[i] for i in draft.takers]
        rack_upper = [sum(lower[i] for i in members) for members in draft.takers_by_rack]
        total = sum(upper)
        node_room = [0] * len(draft.rack_names)
        for kind, rows in kinds.items():
            places = kind[1] - len(samples[kind])
            rooms = draft.rack_rooms(samples[kind])
            total += rows * max(0, min(places, sum(free for _, free in rooms)))
            for rack, (held, free) in enumerate(rooms):
                room = max(0, min(kind[2] - held, free, places))
                rack_upper[rack] += rows * room
                node_room[rack] += rows * (room > 0)
        place = {i: at for at, i in enumerate(draft.takers)}
        held_max = [draft.nodes[i].replicas_max for i in draft.takers]
        most = [low + node_room[draft.rack[i]] for i, low in zip(draft.takers, upper, strict=True)]
        shares = fair_shares_by_rack(
            total,
            [draft.weight[i] for i in draft.takers],
            [lower[i] for i in draft.takers],
            [max(low, min(bounds)) for low, *bounds in zip(upper, most, held_max, strict=True)],
            [[place[i] for i in members] for members in draft.takers_by_rack],
            rack_upper,
        )
        self._levels = Levels(draft.count, dict(zip(draft.takers, shares, strict=True)))
        self._ranking = Ranking(draft, self._levels)

    def _weigh_leads(self, partitions: Iterable[int], *, everywhere: bool) -> None:
        """Fix each node's share of preferred primaries, for partitions whose lead may change.

        No node leads more than it holds: more than its share of replicas (``everywhere``), else
        more than it leads in the other rows and holds in these. The exact share bounds it, not the
        rounded count: with few partitions a count rounded down to 0 would enlarge the other nodes'
        shares.
        """
        draft = self.draft
        count = [0] * len(draft.nodes)
        for row in draft.rows:
            if row:
                count[row[0]] += 1
        lower, upper = list(count), list(count)
        for p in partitions:
            row = draft.rows[p]
            if row and draft.takes[row[0]]:
                lower[row[0]] -= 1
                for i in row[1:]:
                    upper[i] += 1
        if everywhere:
            held = self._levels.shares
            most = [max(Fraction(lower[i]), held[i]) for i in draft.takers]
        else:
            most = [Fraction(upper[i]) for i in draft.takers]
        shares = fair_shares(
            sum(count[i] for i in draft.takers),
            [draft.weight[i] for i in draft.takers],
            [lower[i] for i in draft.takers],
            most,
        )
        self._leads = Levels(count, dict(zip(draft.takers, shares, strict=True)))

    # ------------------------------------------------------------------ necessary changes

    def settle(self, *, repair_racks: bool) -> None:
        """Give every open row its members: replace leaving members, drop excess ones, repair racks,
        and add missing ones. Each place goes to the lowest node that may have it.
        """
        for p in self.draft.pinned:
            self._drop_excess(p)
            self._replace_leaving(p)
            if repair_racks:
                self._repair_racks(p)
            self._add_missing(p)

    def _drop_excess(self, p: int) -> None:
        draft, row, size = self.draft, self.draft.rows[p], self._size[p]
        had = len(row)
        while len(row) > size:
            loose = [i for i in row if i not in draft.pinned[p]]
            if not loose:
                return
            crowded = self._crowded(p) & {draft.rack[i] for i in loose}
            distance = self._levels.distance
            worst = max(
                loose,
                key=lambda i: (
                    i in self._leaving,
                    not draft.takes[i],
                    draft.rack[i] in crowded,
                    distance(i) if draft.takes[i] else 0,
                    i,
                ),
            )
            draft.drop(p, worst)
            self._ranking.changed(worst)
            self.cause(p, f"has {had} replicas, {size} are wanted")

    def _replace_leaving(self, p: int) -> None:
        for node in [i for i in self.draft.rows[p] if i in self._leaving]:
            others = [i for i in self.draft.rows[p] if i != node]
            if (new := self._ranking.candidate(p, others)) is not None:
                self._replace(p, node, new)
                self.cause(p, self._leaving[node])

    def _repair_racks(self, p: int) -> None:
        draft = self.draft
        while crowded := self._crowded(p):
            row, pinned = draft.rows[p], draft.pinned[p]
            loose = [i for i in row if draft.rack[i] in crowded and i not in pinned]
            loose = [i for i in loose if draft.takes[i]]
            if not loose:
                return
            worst = max(loose, key=lambda i: (self._levels.distance(i), i))
            new = self._ranking.candidate(p, [i for i in row if i != worst])
            if new is None:
                return
            held = draft.held_by_rack(row, draft.rack[worst])
            rack = draft.rack_names[draft.rack[worst]]
            where = f"rack {rack}" if rack else "the rack without a name"
            self._replace(p, worst, new)
            self.cause(p, f"{where} held {_words(held)} replicas")

    def _crowded(self, p: int) -> set[int]:
        draft = self.draft
        row, cap = draft.rows[p], draft.cap[p]
        if len(row) <= cap:
            return set()
        racks = [draft.rack[i] for i in row]
        return {r for r in racks if racks.count(r) > cap}

    def _add_missing(self, p: int) -> None:
        draft, row, size = self.draft, self.draft.rows[p], self._size[p]
        had = len(row)
        while len(row) < size and (new := self._ranking.candidate(p, row)) is not None:
            draft.add(p, new)
            self._ranking.changed(new)
            self.cause(p, f"has {had} of {size} replicas")

    def _replace(self, p: int, old: int, new: int) -> None:
        self.draft.replace(p, old, new)
        self._ranking.changed(old, new)

    # ------------------------------------------------------------------ leveling

    def even_replicas(self, *, copies: bool) -> None:
        """Bring counts to their shares: first with replicas that are new in this plan, then
        (``copies``) also with old ones. At last undo the replacements that proved unnecessary.
        """
        draft = self.draft
        changed = [p for p in draft.pinned if draft.changed(p)]
        free = ReplicaGraph(draft, self._levels, self._ranking, changed, copies=False)
        flow_balance(self._levels, free)
        if copies:
            every = ReplicaGraph(draft, self._levels, self._ranking, draft.pinned, copies=True)
            flow_balance(self._levels, every)
            self._take_back()
        for p in draft.pinned:
            if draft.changed(p):
                draft.reorder(p)

    def _take_back(self) -> None:
        """Undo replacements that the counts do not need."""
        draft, levels = self.draft, self._levels
        if not levels.settled():
            return
        for p in [p for p in draft.pinned if draft.changed(p)]:
            row, origin = draft.rows[p], draft.origin[p]
            for old in [i for i in origin if i not in row and draft.takes[i]]:
                for new in [i for i in row if i not in origin]:
                    fits = levels.count[new] > levels.low[new] and (
                        levels.count[old] < levels.high[old]
                    )
                    if fits and draft.may_replace(p, new, old):
                        self._replace(p, new, old)
                        break

    def even_leads(self, *, everywhere: bool) -> None:
        """Bring preferred primaries to their shares by reordering: in the rows that change anyway,
        then (``everywhere``) in all open rows.
        """
        draft = self.draft
        changed = {p for p in draft.pinned if draft.changed(p)}
        self._weigh_leads(draft.pinned if everywhere else changed, everywhere=everywhere)
        flow_balance(self._leads, LeadGraph(draft, self._leads, changed, changed))
        if everywhere:
            flow_balance(self._leads, LeadGraph(draft, self._leads, draft.pinned, changed))

    # ------------------------------------------------------------------ results

    def refuse(
        self,
        code: RefusalCode,
        reason: str,
        *,
        node: int | None = None,
        partitions: Iterable[int] = (),
    ) -> None:
        """Record a change that is left undone."""
        self.refusals.append(
            Refusal(
                code=code,
                reason=reason,
                node_number=NO_NODE if node is None else NodeNumber(self.draft.nodes[node].number),
                partition_ids=tuple(PartitionId(p) for p in partitions),
            )
        )

    def refuse_leftovers(self) -> None:
        """Refuse what the open rows still lack."""
        draft = self.draft
        takers = len(draft.takers)
        for node in sorted(self._leaving):
            if kept := [p for p in draft.pinned if node in draft.rows[p]]:
                reason = (
                    f"{self.name(node)} keeps {len(kept)} replicas: every node that takes any "
                    f"({takers}) has one of these partitions already"
                )
                self.refuse(RefusalCode.NOT_ENOUGH_NODES, reason, node=node, partitions=kept)
        if short := [p for p in draft.pinned if len(draft.rows[p]) < self._size[p]]:
            reason = f"{len(short)} partitions get too few replicas: only {takers} nodes take any"
            self.refuse(RefusalCode.NOT_ENOUGH_NODES, reason, partitions=short)
        if crowded := [p for p in draft.pinned if self._shares_rack(p)]:
            reason = (
                f"{len(crowded)} partitions have replicas that share a rack: too few racks "
                f"({draft.taking_racks}) take replicas"
            )
            self.refuse(RefusalCode.NOT_ENOUGH_RACKS, reason, partitions=crowded)

    def _shares_rack(self, p: int) -> bool:
        draft = self.draft
        racks = {draft.rack[i] for i in draft.rows[p]}
        return len(draft.rack_names) > 1 and len(racks) < len(draft.rows[p]) and draft.cap[p] > 1

    def _refuse_beyond_room(self) -> None:
        """Undo the moves that do not fit into the nodes' room, and record them as refused."""
        draft = self.draft
        sizes = self.layout.sizes or [0] * len(draft.rows)
        coming = Counter(i for p in draft.pinned for i in draft.added(p))
        taken_back, left = take_back_misfits(draft, sizes)
        if self.layout.rest_by_size:
            again = {p for partitions in taken_back.values() for p in partitions}
            placed = place_by_size(draft, again, self._leaving, sizes, left)
            taken_back = {
                node: rest
                for node, partitions in taken_back.items()
                if (rest := [p for p in partitions if p not in placed])
            }
        for node, partitions in sorted(taken_back.items()):
            it = draft.nodes[node]
            needs = megabytes(sum(sizes[p] for p in partitions))
            reason = (
                f"{self.name(node)} has no room for {len(partitions)} of the {coming[node]} "
                f"replicas that it was to get: these take {needs}, and the node may take "
                f"{megabytes(max(0, it.room))} more in all ({it.room_limit}); start it with a "
                "greater --map-size-bytes, give it a larger disk, or add nodes"
            )
            self.refuse(RefusalCode.NO_ROOM, reason, node=node, partitions=sorted(partitions))
        for node, count in sorted(coming.items()):
            if not draft.nodes[node].room_known:
                reason = (
                    f"{self.name(node)} has not said yet how much room it has: whether its {count} "
                    "new replicas fit is not known, and its moves wait until it does"
                )
                self.refuse(RefusalCode.ROOM_UNKNOWN, reason, node=node)

    def finish(self) -> Plan:
        """Return the plan of all changes."""
        draft = self.draft
        self._refuse_beyond_room()
        moves = tuple(
            PlannedMove(
                partition_id=PartitionId(p),
                origin=draft.replicas(draft.origin[p]),
                target=draft.replicas(draft.rows[p]),
                reason=self._reason(p),
            )
            for p in sorted(draft.pinned)
            if draft.changed(p)
        )
        return Plan(
            plan_id=_digest(self.layout, moves),
            moves=moves,
            before=draft.balance(draft.origin),
            after=draft.balance(draft.rows),
            refusals=tuple(self.refusals),
        )

    def _reason(self, p: int) -> str:
        causes = self._causes.get(p, [])
        origin, row = self.draft.origin[p], self.draft.rows[p]
        if set(origin) == set(row):
            return "only the order changes, no data is copied: " + self._lead_reason(
                origin[0], row[0]
            )
        if causes:
            return "; ".join(causes)
        before, levels = self._before, self._levels
        for new in [i for i in row if i not in origin]:
            if before[new] < levels.low[new]:
                return self._share_text(new, before[new], levels)
        for old in [i for i in origin if i not in row]:
            if before[old] > levels.high[old]:
                return self._share_text(old, before[old], levels)
        return "makes room for other moves"

    def _lead_reason(self, old: int, new: int) -> str:
        before, levels = self._leads_before, self._leads
        if new in levels.low and before.get(new, 0) < levels.low[new]:
            return f"{self.name(new)} is first in {_of(before.get(new, 0), levels, new)}"
        if old in levels.low and before.get(old, 0) > levels.high[old]:
            return f"{self.name(old)} is first in {_of(before.get(old, 0), levels, old)}"
        return "makes room for other changes of order"

    def _share_text(self, node: int, had: int, levels: Levels) -> str:
        return f"{self.name(node)} has {_of(had, levels, node)}"


def _of(had: int, levels: Levels, node: int) -> str:
    low, high = levels.low[node], levels.high[node]
    share = f"{low}" if low == high else f"{low} or {high}"
    return f"{had} of its share of {share} partitions"


def megabytes(size: int) -> str:
    """Return a number of bytes as text."""
    return f"{size / 1e6:,.1f} MB"


def _words(count: int) -> str:
    return {2: "two", 3: "three", 4: "four"}.get(count, str(count))


def _digest(layout: Layout, moves: tuple[PlannedMove, ...]) -> str:
    """Return a digest of the plan's input and its moves, which identifies the plan."""
    digest = blake2b(digest_size=8)
    nodes = sorted((n.number, n.rack, n.weight, n.takes, n.gives) for n in layout.nodes)
    digest.update(repr((nodes, sorted(layout.fixed), layout.replication_factor)).encode())
    digest.update(repr(layout.replicas).encode())
    digest.update(repr([(m.partition_id, m.origin, m.target) for m in moves]).encode())
    return digest.hexdigest()
