"""Two operators that create, alter, drop and create again two keyspaces beside ``default``.

Drawn from numbers of their own, in some of the seeds only, so that others are what they were. Each
of the keyspaces has a client and one of atomic batches, which go on in whichever keyspace has the
name by then. Besides the faults of the seed, somebody is often hit right after a change of a
keyspace is committed: a node or the coordinators' leader, killed, paused or cut off.

What must hold:

- a change is made whole or not at all, whatever its caller was told, and changes nothing else: what
  every command leaves is what a plain model of keyspaces says, ids never come again, and ranges do
  not overlap;
- what was answered has been done. From the answer to a drop on, no node serves the keyspace, and no
  operation on it succeeds;
- once a keyspace is forgotten, no node holds anything of it, no node that comes back either, except
  on an old copy of its disk. Its partitions then go to another keyspace, in which nothing is ever
  found of it: whoever leads there holds nothing of it when that begins;
- what clients were told of each keyspace, from its creation to its drop, is linearizable.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from koinon_coordinator.core.cluster.commands import (
    AlterKeyspace,
    Command,
    CreateKeyspace,
    DropKeyspace,
    ForgetKeyspace,
    SetReplicationFactor,
)
from koinon_coordinator.core.decide.keyspace_requests import Alteration
from koinon_coordinator.core.decide.plan_requests import PlanKind, PlanWish
from koinon_coordinator.leader.leadership import Leadership
from koinon_node.core.membership.assignment import Adoption
from koinon_proto.contract.errors import KoinonError
from koinon_proto.contract.keyspaces import ALTERABLE, DEFAULT_ID, Keyspace
from koinon_proto.contract.table import SEQUENCE_COUNTER_BITS, NodeId, Table
from koinon_proto.partitioner import canonical_name
from tests.checkers.history import Operation, Outcome
from tests.simulation.checkers import ViolationError
from tests.simulation.loop import Process

if TYPE_CHECKING:
    from tests.simulation.cluster import Simulation
    from tests.simulation.node import Life

SEEDS = (2, 7, 12)
"""The seeds that have these keyspaces, and those that are 20, 40, … above."""
NAMES = ("one", "two")
OPERATORS = ("owner1", "owner2")
T = TypeVar("T")
KEYS = 5  # of each keyspace's client
PAUSE_S = 0.7
CALL_TIMEOUT_S = 3.0
WAIT_S = 2.0  # for a change to be in force: so long it may take
HIT = 0.3  # how probable it is that somebody is hit after a change


class KeyspaceChecker:
    """Looks at all that is committed, at all nodes, and at what clients were told."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._before: tuple[Keyspace, ...] = ()
        self._last_id = DEFAULT_ID
        self._gone_at: dict[int, float] = {}  # by id: since when a drop is in force
        self._ids_of: dict[str, list[int]] = {name: [] for name in NAMES}
        self._asked: list[tuple[str, Alteration]] = []
        self._factors: dict[tuple[int, int], float] = {}  # (id, factor): when it was last set
        self.erased: dict[int, int] = {}
        """Partitions of keyspaces that were forgotten, and the last epochs that these had there."""
        self._set_back: dict[str, set[int]] = {}
        """By node: partitions of these of which its disk, an old copy, may hold something again."""

    # --- what is committed -------------------------------------------------------------------

    def on_committed(self, command: Command) -> None:
        """Check what the command has left."""
        table = self._simulation.table()
        if table is None:
            return
        if isinstance(command, SetReplicationFactor):
            place = command.keyspace_id, command.replication_factor
            self._factors[place] = self._simulation.loop.now
        before, self._before = self._before, table.keyspaces.all
        if not before or self._before == before:
            return
        expected = self._changed(before, command, table)
        if self._before != tuple(sorted(expected, key=lambda keyspace: keyspace.base)):
            raise ViolationError(f"{command} made {self._before} of {before}")

    def _changed(
        self, before: tuple[Keyspace, ...], command: Command, table: Table
    ) -> list[Keyspace]:
        """Return the keyspaces that the command may leave, if it changes any."""
        known = {keyspace.keyspace_id: keyspace for keyspace in before}
        match command:
            case CreateKeyspace(keyspace=wanted):
                return [*before, self._created(wanted, before, table)]
            case AlterKeyspace(keyspace=wanted) if not known[wanted.keyspace_id].is_dropping:
                self._check_asked(known[wanted.keyspace_id], wanted)
                known[wanted.keyspace_id] = wanted
            case SetReplicationFactor(keyspace_id=keyspace_id, replication_factor=factor):
                least = (factor + 1) // 2
                known[keyspace_id] = replace(
                    known[keyspace_id], replication_factor=factor, min_in_sync=least
                )
            case DropKeyspace(keyspace_id=keyspace_id):
                self._on_dropped(known[keyspace_id], table)
                known[keyspace_id] = replace(known[keyspace_id], is_dropping=True)
            case ForgetKeyspace(keyspace_id=keyspace_id) if known[keyspace_id].is_dropping:
                self._on_forgotten(known.pop(keyspace_id), table)
            case _:
                raise ViolationError(f"{command} changed keyspaces: {before}")
        return list(known.values())

    def on_asked(self, name: str, change: Alteration) -> None:
        """An operator asks for this; it may come true at any time from here on."""
        self._asked.append((name, change))

    def _check_asked(self, before: Keyspace, after: Keyspace) -> None:
        """Check that somebody asked for what differs, and for all of it: else a change has undone
        another one.
        """
        changed = {
            setting: getattr(after, setting)
            for setting in ALTERABLE
            if getattr(after, setting) != getattr(before, setting)
        }
        if not any(
            name == before.name and all(getattr(c, s, None) == v for s, v in changed.items())
            for name, c in self._asked
        ):
            raise ViolationError(f"nobody asked for {changed} of {before}")

    def on_factor_set(self, keyspace: Keyspace, factor: int, asked_at: float) -> None:
        """A plan for a replication factor was answered: the factor was set, of this keyspace or
        of another that has the name.
        """
        ids = self._ids_of[keyspace.name]
        if not any(self._factors.get((i, factor), -1.0) >= asked_at for i in ids):
            raise ViolationError(f"answered, and never set: factor {factor} of {keyspace}")

    def _created(self, wanted: Keyspace, before: tuple[Keyspace, ...], table: Table) -> Keyspace:
        """Check that a new keyspace has an id and rows of its own; return it."""
        ids = wanted.partition_ids
        made = table.keyspaces.of(ids.start)
        if made is None or made.keyspace_id <= self._last_id:
            raise ViolationError(f"an id comes again: {made}, {self._last_id} was given")
        self._last_id = made.keyspace_id
        self._ids_of[made.name].append(made.keyspace_id)
        for other in before:
            if not set(ids).isdisjoint(other.partition_ids):
                raise ViolationError(f"{made} has partitions of {other}")
            if other.name == made.name and not other.is_dropping:
                raise ViolationError(f"{made} has the name of {other}")
        for p in ids:
            row = table.rows[p]
            if len(row.replicas) != made.replication_factor or row.in_sync != row.replicas:
                raise ViolationError(f"{made} began with {row}")
            if row.primary_epoch <= self.erased.get(p, 0):
                raise ViolationError(f"{row} of {made} has an epoch of the keyspace before")
            if row.primary_epoch != made.first_epoch:
                raise ViolationError(f"{row} of {made} does not begin with its first epoch")
        self._note("created")
        return replace(wanted, keyspace_id=made.keyspace_id, first_epoch=made.first_epoch)

    def _on_dropped(self, keyspace: Keyspace, table: Table) -> None:
        kept = [row for p in keyspace.partition_ids if not (row := table.rows[p]).unused]
        if kept:
            raise ViolationError(f"{keyspace} is dropped, and has copies: {kept}")
        self._note("dropped")

    def _on_forgotten(self, keyspace: Keyspace, table: Table) -> None:
        for p in keyspace.partition_ids:
            self.erased[p] = table.rows[p].primary_epoch
        self._simulation.checker.forget_acknowledged(keyspace.partition_ids)
        for node in self._simulation.nodes.values():
            info = table.by_id.get(NodeId(node.name))
            if info is not None and node.disk.is_known_as(info):  # it has said so of this disk
                self._set_back.get(node.name, set()).difference_update(keyspace.partition_ids)
            else:
                self._set_back.setdefault(node.name, set()).update(keyspace.partition_ids)
            if node.life is not None and node.life.started:
                self.on_started(node.life)
        self._note("forgotten")

    def _note(self, what: str) -> None:
        self._simulation.stats[f"keyspaces {what}"] += 1

    # --- nodes -------------------------------------------------------------------------------

    def on_disk_exchanged(self, name: str, *, by_an_old_copy: bool) -> None:
        """The node is about to start on another disk."""
        self._set_back[name] = set(self.erased) if by_an_old_copy else set()

    def on_started(self, life: Life) -> None:
        """Check that the node holds nothing of keyspaces that were forgotten."""
        for p in self.erased.keys() - self._set_back.get(life.node.name, set()):
            self._check_erased(life, p)

    def on_adopted(self, life: Life, adoptions: Sequence[Adoption]) -> None:
        """Check that what the node has taken over begins without anything of such a keyspace."""
        for p, primary_epoch in adoptions:
            if primary_epoch > self.erased.get(p, primary_epoch):
                self._check_erased(life, p)

    def _check_erased(self, life: Life, p: int) -> None:
        for key, record in life.held_of(p).items():
            if record.sequence >> SEQUENCE_COUNTER_BITS <= self.erased[p]:
                raise ViolationError(
                    f"{life.node.name} holds {key!r} of a keyspace that is forgotten: "
                    f"partition {p}, epoch {self.erased[p]}, {record}"
                )

    def on_gone(self, keyspace: Keyspace) -> None:
        """A drop was answered, and is in force."""
        now = self._simulation.loop.now
        self._gone_at.setdefault(keyspace.keyspace_id, now)
        table = self._simulation.table()
        assert table is not None
        for node in self._simulation.nodes.values():
            for p in keyspace.partition_ids:
                if node.life is None or not node.life.serves(p):
                    continue
                served = node.life.state.served.table
                found = served.keyspaces.of(p) if served is not None else None
                if found is not None and found.keyspace_id == keyspace.keyspace_id:
                    raise ViolationError(f"{node.name} serves {p} of {keyspace}, which is dropped")

    # --- clients -----------------------------------------------------------------------------

    def check_history(self, operations: list[Operation]) -> None:
        """Check that nothing was done in a keyspace whose drop was in force."""
        for operation in operations:
            keyspace_id, colon, _ = operation.key.partition(b":")
            if not colon or operation.outcome not in (Outcome.OK, Outcome.REFUSED):
                continue
            self._simulation.stats["operations in keyspaces"] += 1
            if operation.invoked_at > self._gone_at.get(int(keyspace_id), operation.invoked_at):
                raise ViolationError(f"done in a keyspace that was dropped: {operation}")


class KeyspaceOperators:
    """See the module's text."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._rng = random.Random(f"keyspaces of {simulation.seed}")
        self.active = simulation.seed % 20 in SEEDS
        self._over = False
        self.checker = KeyspaceChecker(simulation)

    def start(self) -> None:
        if not self.active:
            return
        for name in OPERATORS:
            machine = self._simulation.network.add(name)
            machine.process = Process(self._simulation.loop, name)
            machine.process.spawn(self._go_on(name))

    def stop(self) -> None:
        """Change nothing any more."""
        self._over = True

    def on_committed(self, command: Command) -> None:
        if not self.active:
            return
        self.checker.on_committed(command)
        is_change = isinstance(
            command, CreateKeyspace | AlterKeyspace | DropKeyspace | ForgetKeyspace
        )
        if is_change and not self._over and self._rng.random() < HIT:
            delay_s = self._rng.choice([0.0, 0.05, 0.5]) * self._rng.random()
            self._simulation.loop.call_later(delay_s, self._simulation.faults.hit, self._rng)

    def existing(self) -> list[Keyspace]:
        """The keyspaces beside ``default`` after all that is committed."""
        table = self._simulation.table()
        assert table is not None
        return [keyspace for keyspace in table.keyspaces if keyspace.keyspace_id != DEFAULT_ID]

    # --- changes -----------------------------------------------------------------------------

    async def _go_on(self, operator: str) -> None:
        while not self._over:
            name = self._rng.choice(NAMES)
            known = {keyspace.name: keyspace for keyspace in self.existing()}
            if name not in known or self._rng.random() < 0.1:
                await self._create(operator, name)
            elif self._rng.random() < 0.4:
                await self._drop(operator, known[name])
            else:
                await self._alter(operator, known[name])
            await asyncio.sleep(self._rng.expovariate(1 / PAUSE_S))

    async def _create(self, operator: str, name: str) -> None:
        wanted = self._drawn(name)
        made = await self._ask(
            operator, "create", lambda leader: leader.keyspaces.create(wanted, WAIT_S)
        )
        if made is not None and made.keyspace.name != name:
            raise ViolationError(f"asked for {wanted}, got {made}")

    def _drawn(self, name: str) -> Keyspace:
        rng, scenario = self._rng, self._simulation.scenario
        return wanted_keyspace(
            name,
            count=rng.choice([1, 2, 4]),
            router=rng.choice(["", "first:5"]),
            replicas=min(rng.choice([1, 2, 3, 3]), scenario.nodes),
        )

    async def _drop(self, operator: str, keyspace: Keyspace) -> None:
        """Drop it, by its id or by its name, which may be another's by then."""
        keyspace_id = self._rng.choice([keyspace.keyspace_id, keyspace.keyspace_id, 0])
        made = await self._ask(
            operator,
            "drop",
            lambda leader: leader.keyspaces.drop(keyspace.name, keyspace_id, WAIT_S),
        )
        if made is None:
            return
        if not made.keyspace.is_dropping or (
            keyspace_id and made.keyspace.keyspace_id != keyspace_id
        ):
            raise ViolationError(f"asked to drop {keyspace}, got {made}")
        if not made.in_force.serves_s:
            self.checker.on_gone(made.keyspace)

    async def _alter(self, operator: str, keyspace: Keyspace) -> None:
        rng = self._rng
        if rng.random() < 0.3:
            factor = min(rng.choice([1, 2, 3]), self._simulation.scenario.nodes)
            wish = PlanWish(
                kind=PlanKind.REPLICATION_FACTOR,
                replication_factor=factor,
                keyspace=keyspace.name,
            )
            asked_at = self._simulation.loop.now
            if await self._ask(operator, "factor", lambda leader: _execute(leader, wish)):
                self.checker.on_factor_set(keyspace, factor, asked_at)
            return
        change = Alteration(
            min_in_sync=rng.choice([None, rng.randint(1, keyspace.replication_factor)]),
            max_value_bytes=rng.choice([None, rng.randint(1_000, 10_000)]),
        )
        self.checker.on_asked(keyspace.name, change)
        await self._ask(
            operator, "alter", lambda leader: leader.keyspaces.alter(keyspace.name, change, WAIT_S)
        )

    async def _ask(
        self, operator: str, what: str, work: Callable[[Leadership], Awaitable[T]]
    ) -> T | None:
        """Have the leader do it; return what it says, None if it refused or was not heard."""
        simulation = self._simulation
        leader = simulation.group.leader or simulation.group.members[0]
        try:
            made: T = await simulation.network.call(
                operator, leader.name, "admin", work, timeout_s=CALL_TIMEOUT_S, may_double=True
            )
        except KoinonError as error:
            simulation.stats[f"keyspaces: {what}: {type(error).__name__}"] += 1
            return None
        simulation.trace(f"answered: {what}")
        return made

    # --- the end -----------------------------------------------------------------------------

    async def finish(self) -> None:
        """Drop all, then create one keyspace over all partitions that any has ever had: nothing is
        found there.
        """
        if not self.active or not self.checker.erased:
            return
        simulation = self._simulation
        while existing := self.existing():
            await self._drop(OPERATORS[0], existing[0])
        await simulation.until_converged("no convergence after all keyspaces were dropped")
        base = simulation.scenario.partitions
        count = max(self.checker.erased) + 1 - base
        wanted = wanted_keyspace(NAMES[0], count=count, router="", replicas=1)
        while not self.existing():
            await self._ask(
                OPERATORS[0], "create", lambda leader: leader.keyspaces.create(wanted, WAIT_S)
            )
        await simulation.until_converged("no convergence after a keyspace was created again")
        for node in simulation.nodes.values():
            assert node.life is not None
            held = {p: node.life.held_of(p) for p in range(base, base + count)}
            if any(held.values()):
                raise ViolationError(f"{node.name} holds rows of a keyspace that is new: {held}")


def wanted_keyspace(name: str, *, count: int, router: str, replicas: int) -> Keyspace:
    """Return a keyspace as a request has it: 0 and "" are as usual."""
    return Keyspace(
        keyspace_id=DEFAULT_ID,
        name=name,
        base=0,
        partition_count=count,
        partitioner=canonical_name("murmur2", router),
        replication_factor=replicas,
        min_in_sync=0,
        max_value_bytes=0,
    )


async def _execute(leader: Leadership, wish: PlanWish) -> bool:
    planned = await leader.operations.plan(wish)
    await leader.operations.execute(wish, planned.plan.plan_id)
    return True
