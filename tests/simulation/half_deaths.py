"""Half-deaths: disks that hang, alone or together, slow ones, links that carry one way only, event
loops that do not turn while their nodes' heartbeats go on.

Drawn from numbers of their own, so that what else happens in a seed is what it was without them. In
some seeds they come among the other faults. In some, once the cluster is whole again, one of them
is kept up for longer than it may do harm: then it is checked that no write waits for it any more,
and that no primary was deposed whose disk does no worse than others.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from enum import Enum, auto
from typing import TYPE_CHECKING

import numpy as np

from koinon_node.core.membership.lease import PATIENCE_LEASES
from koinon_node.core.writes.commit_group import GroupState
from koinon_proto.contract.table import NodeNumber, PartitionRow, Table
from tests.simulation.checkers import ViolationError

if TYPE_CHECKING:
    from tests.simulation.cluster import Simulation
    from tests.simulation.node import Life, SimulatedNode

INTERVAL_S = 3.0
LEASE_S, SESSION_S = 1.0, 1.5
HARM_S = SESSION_S + 2.0
"""For so long a write may wait for what a half-death has made of one copy."""
ONE_WAY_S = 9.0  # a stream that stalls is noticed after up to 4 s, its follower put out 1 s later


class Act(Enum):
    """One that lasts."""

    HANG_ONE = auto()
    HANG_ALL = auto()
    SLOW_ALL = auto()
    CUT_ONE_WAY = auto()
    HANG_A_LOOP = auto()


def draw(seed: int) -> tuple[random.Random, bool, Act | None]:
    """Return the seed's numbers, whether half-deaths come among its other faults, and which
    lasts.
    """
    rng = random.Random(f"half-deaths of {seed}")
    among_others = rng.random() < 0.3
    return rng, among_others, rng.choice(list(Act)) if rng.random() < 0.4 else None


class HalfDeaths:
    """One seed's."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._rng, self._among_others, act = draw(simulation.seed)
        acts: dict[Act, Callable[[], Awaitable[None]]] = {
            Act.HANG_ONE: self._hang_one,
            Act.HANG_ALL: self._hang_all,
            Act.SLOW_ALL: self._slow_all,
            Act.CUT_ONE_WAY: self._cut_one_way,
            Act.HANG_A_LOOP: self._hang_a_loop,
        }
        self._act = None if act is None else acts[act]

    def _note(self, what: str) -> None:
        self._simulation.trace(what)
        self._simulation.stats[f"half-death: {what.split(' ', 1)[0]}"] += 1

    def _nodes(self) -> list[SimulatedNode]:
        return [node for node in self._simulation.nodes.values() if node.life is not None]

    # --- among other faults ------------------------------------------------------------------

    async def run(self, seconds: float) -> None:
        """Let disks and event loops hang now and then."""
        loop = self._simulation.loop
        ends_at = loop.now + seconds
        while self._among_others:
            await asyncio.sleep(self._rng.expovariate(1 / INTERVAL_S))
            if loop.now >= ends_at:
                return
            nodes = self._nodes()
            if nodes:
                node, hangs_s = self._rng.choice(nodes), self._rng.uniform(0.2, 6.0)
                life = node.life
                assert life is not None
                if self._rng.random() < 0.3:
                    self._note(f"loop of {node.name} does not turn for {hangs_s:.3f} s")
                    life.process.hang()
                    loop.call_later(hangs_s, self._let_turn, life)
                else:
                    self._note(f"hang the disk of {node.name}")
                    node.disk.hang()
                    loop.call_later(hangs_s, node.disk.release)

    def _let_turn(self, life: Life) -> None:
        if life.process.alive:
            self._simulation.trace(f"loop of {life.node.name} turns again")
            life.process.release(self._rng)

    # --- one that lasts ----------------------------------------------------------------------

    async def last(self) -> None:
        """Keep one up, in a cluster that is whole, under clients that go on."""
        if self._act is not None and len(self._nodes()) > 1:
            await self._act()

    async def _hang_one(self) -> None:
        node = self._rng.choice(self._nodes())
        self._note(f"hang the disk of {node.name} for long")
        node.disk.hang()
        await asyncio.sleep(2 * HARM_S)
        hung_at = node.disk.stalled_at
        if hung_at and self._simulation.loop.now - hung_at > HARM_S:
            self._check_leads_nothing(node, "a disk that hangs")
        self._check_no_write_waits()
        node.disk.release()

    async def _hang_a_loop(self) -> None:
        """Let a loop hang while its node's heartbeats go on, so that the others cannot know."""
        node = self._rng.choice(self._nodes())
        assert node.life is not None
        self._note(f"loop of {node.name} does not turn for long")
        node.life.process.hang()
        await asyncio.sleep(PATIENCE_LEASES * LEASE_S + HARM_S)
        self._check_leads_nothing(node, "a loop that does not turn")
        self._check_no_write_waits()
        self._let_turn(node.life)

    async def _hang_all(self) -> None:
        """Let all disks hang: none does better than another, so every primary is to lead on."""
        await self._together("hang", lambda node: node.disk.hang())

    async def _slow_all(self) -> None:
        slowest = self._rng.choice(self._nodes())
        await self._together(
            "slow", lambda node: node.disk.slow_down(3.0 if node is slowest else 1.2)
        )

    async def _together(self, what: str, begin: Callable[[SimulatedNode], None]) -> None:
        simulation, nodes = self._simulation, self._nodes()
        await asyncio.sleep(1.0)  # until primaries have been handed their partitions
        self._note(f"{what} all disks for long")
        led = {row.partition_id: row.primary for row in self._table().used_rows}
        began_at = simulation.loop.now
        # A follower may have made durable what their own disks had not yet: it does look better.
        amid_a_commit = {self._number(node) for node in nodes if _has_a_group_out(node)}
        for node in nodes:
            begin(node)
        await asyncio.sleep(2 * HARM_S)
        stalled = [node.disk.stalled_at for node in nodes]
        for node in nodes:
            node.disk.release()
        # One that had nothing to write at first may have been believed to answer.
        if what == "slow" or all(began_at <= at < began_at + SESSION_S / 3 for at in stalled):
            for row in self._table().used_rows:
                # Who hands over by a plan, or because it is cut off (rule 6), stays in sync.
                before = led[row.partition_id]
                if row.primary != before not in row.in_sync and before not in amid_a_commit:
                    raise ViolationError(f"deposed by a disk that all share: {row}")
            simulation.stats["half-death: shared"] += 1

    async def _cut_one_way(self) -> None:
        one, other = self._rng.sample([node.name for node in self._nodes()], 2)
        self._note(f"one-way link {one}>{other} is cut for long")
        self._simulation.network.set_cut({(one, other)})
        await asyncio.sleep(ONE_WAY_S)
        self._check_no_write_waits()
        self._simulation.network.set_cut(set())

    # --- what is checked ---------------------------------------------------------------------

    def _table(self) -> Table:
        table = self._simulation.table()
        assert table is not None
        return table

    def _number(self, node: SimulatedNode) -> NodeNumber:
        return next(n.number for n in self._table().nodes.values() if n.node_id == node.name)

    def _check_leads_nothing(self, node: SimulatedNode, what: str) -> None:
        """The node does not lead what others could."""
        number, table = self._number(node), self._table()
        for row in table.used_rows:
            if _spares(table, row, number) and row.primary == number:
                raise ViolationError(f"{node.name} leads on with {what}: {row}")

    def _check_no_write_waits(self) -> None:
        """Check that no write has waited long for a copy that it could do without."""
        table = self._table()
        for node in self._nodes():
            assert node.life is not None
            leading, now = node.life.replicator.leading, node.life.state.now()
            for group in leading.pending.sent():
                if now - group.sent_at <= HARM_S:
                    break
                missing = leading.missing(group.touched, group.lasts)
                is_out = group.state is GroupState.OUT
                for place in np.flatnonzero(missing.any(axis=0) | is_out).tolist():
                    row = table.rows[int(group.touched[place])]
                    led = leading.epochs[row.partition_id] == row.primary_epoch
                    if led and len(row.in_sync) > table.keyspaces.min_in_sync(row):
                        raise ViolationError(f"a write waits at {node.name}: {row} {group}")


def _has_a_group_out(node: SimulatedNode) -> bool:
    """Return whether the node's disk has a commit group that it has not answered yet."""
    assert node.life is not None
    sent = node.life.replicator.leading.pending.sent()
    return any(group.state is GroupState.OUT for group in sent)


def _spares(table: Table, row: PartitionRow, number: NodeNumber) -> bool:
    return number in row.in_sync and len(row.in_sync) > table.keyspaces.min_in_sync(row)
