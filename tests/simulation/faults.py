"""Faults of a simulated cluster, and what its operators do meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from koinon_coordinator.core.cluster.commands import (
    AlterPartitions,
    Command,
    PartitionsHosted,
    WantPrimaries,
)
from koinon_coordinator.core.decide.plan_requests import PlanKind, PlanWish
from koinon_coordinator.leader.leadership import Leadership
from koinon_proto.contract.errors import KoinonError
from koinon_proto.contract.table import NodeStatus
from tests.simulation.coordinators import Member
from tests.simulation.network import Weather

if TYPE_CHECKING:
    from tests.simulation.cluster import Simulation
    from tests.simulation.disks import Disk
    from tests.simulation.node import Life, SimulatedNode

NODES_MAX = 6
HEALED_OPERATIONS_S = 20.0
HAND_OVER_S = 3.0
KEEP_SHARE = 0.1  # of the faults are preceded by a copy of a disk


class Faults:
    """Draws what happens next from the seed."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._rng = simulation.rng
        self._began = self._over = False
        # Draws about old copies of disks: what seeds draw beside them stays what it was.
        self._old_copies = random.Random(f"old copies {simulation.seed}")
        self._restarts: set[asyncio.Task[None]] = set()

    async def run(self, seconds: float) -> None:
        """Let things go wrong for so long, then end all faults."""
        loop = self._simulation.loop
        ends_at = loop.now + seconds
        interval_s = self._simulation.scenario.fault_interval_s
        self._began = True
        operator = asyncio.ensure_future(self._operate())
        while loop.now < ends_at:
            await asyncio.sleep(self._rng.expovariate(1 / interval_s))
            self._keep_a_disk()
            self._next()
        self._over = True
        operator.cancel()
        await self._heal()

    def _next(self) -> None:
        faults: list[tuple[int, Callable[[], None]]] = [
            (5, self._kill_node),
            (1, self._kill_many),
            (4, self._pause_node),
            (4, self._isolate),
            (5, self._reconnect),
            (3, self._reset_stream),
            (2, self._kill_coordinator),
            (2, self._pause_coordinator),
            (1, self._transfer_leadership),
            (1, self._fill_disk),
            (2, self._slow_disk),
            (2, self._stop_node),
            (2, self._replace_disk),
            (1, self._change_weather),
            (2, self._strangle_one),
        ]
        self._rng.choices([fault for _, fault in faults], [weight for weight, _ in faults])[0]()

    def on_committed(self, command: Command) -> None:
        """React to what was committed: whoever it is about is hit before it hears of it."""
        simulation = self._simulation
        if self._over or not self._began or self._rng.random() >= simulation.scenario.reaction:
            return
        if isinstance(command, AlterPartitions | PartitionsHosted):
            table = simulation.table()
            assert table is not None
            node = simulation.nodes[table.nodes[command.node_number].node_id]
            actions = [self._strangle, self._kill, self._pause_life, self._cut_off]
            self._later(0.0, lambda: None if self._over else self._rng.choice(actions)(node))

    def on_page(self, follower: str, primary: str) -> None:
        """A pass has come one page further: it may be cut short here."""
        simulation = self._simulation
        if self._over or not self._began or self._rng.random() >= simulation.scenario.reaction:
            return
        node = simulation.nodes[self._rng.choice([follower, follower, primary])]
        action = self._rng.choice([self._kill, self._kill, self._pause_life, self._cut_off])
        delay_s = self._rng.choice([0.0, 0.005, 0.02]) * self._rng.random()
        self._later(delay_s, lambda: None if self._over or node.life is None else action(node))

    def _note(self, what: str) -> None:
        self._simulation.trace(what)
        self._simulation.stats[what.split(" ", 1)[0]] += 1

    # --- nodes -------------------------------------------------------------------------------

    def _running(self) -> list[SimulatedNode]:
        return [node for node in self._simulation.nodes.values() if node.life is not None]

    def _kill_node(self) -> None:
        running = self._running()
        if running:
            self._kill(self._rng.choice(running))

    def _kill_many(self) -> None:
        for node in self._running():
            if self._rng.random() < 0.6:
                self._kill(node)

    def _kill(self, node: SimulatedNode, *, down_s: float | None = None) -> None:
        self._note(f"kill {node.name}")
        node.kill()
        self._simulation.checker.forget(node.name)
        if down_s is None:
            down_s = self._rng.choice([0.01, 0.5, 0.5, 2.5, 2.5, 8.0]) * self._rng.random()
        self._later(down_s, lambda: self._boot(node))

    def _stop_node(self) -> None:
        """Stop a node as an operator does: it hands over what it leads, is put out of where others
        lead, says farewell, and ends.
        """
        running = [node for node in self._running() if node.life and node.life.started]
        if running:
            node = self._rng.choice(running)
            life = node.life
            assert life is not None
            self._note(f"stop {node.name}")
            life.leaving = True  # also of one that is paused, and begins to leave later
            life.process.spawn(self._stop(node, life))

    async def _stop(self, node: SimulatedNode, life: Life) -> None:
        await life.replicator.hand_over_all(HAND_OVER_S)
        life.follower.leave()
        await asyncio.sleep(self._rng.choice([0.0, 0.05, 0.3]))
        if self._rng.random() < 0.8:
            await life.agent.leave()
        self._later(0.0, lambda: self._end(node, life))

    def _end(self, node: SimulatedNode, life: Life) -> None:
        if node.life is life and not self._over:
            self._kill(node)

    def _boot(self, node: SimulatedNode) -> None:
        if node.life is None:
            self._note(f"boot {node.name}")
            node.boot()

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        self._simulation.loop.call_later(delay_s, action)

    def _pause_node(self) -> None:
        running = self._running()
        if running:
            self._pause_life(self._rng.choice(running))

    def _pause_life(self, node: SimulatedNode) -> None:
        if node.life is not None and not node.life.process.paused:
            self._pause(node.life.process)

    def _strangle_one(self) -> None:
        running = self._running()
        if running:
            self._strangle(self._rng.choice(running))

    def _strangle(self, node: SimulatedNode) -> None:
        """Cut a node off the other nodes, and kill it a moment later, with what it alone holds."""
        others = [name for name in self._simulation.nodes if name != node.name]
        self._cut({(node.name, o) for o in others} | {(o, node.name) for o in others})
        self._later(
            self._rng.uniform(0.05, 1.2),
            lambda: None if self._over or node.life is None else self._kill(node),
        )

    def _cut_off(self, node: SimulatedNode) -> None:
        """Cut a node off everybody but the clients."""
        names = self._simulation.network.machines
        others = [n for n in names if n != node.name and not n.startswith("client")]
        self._cut({(node.name, o) for o in others} | {(o, node.name) for o in others})

    def cut_off_coordinators(self, node: SimulatedNode) -> None:
        """Cut a node off the coordinators, beside what is cut already."""
        if self._over:
            return
        members = [member.name for member in self._simulation.group.members]
        cut = {(node.name, m) for m in members} | {(m, node.name) for m in members}
        self._cut(cut | set(self._simulation.network.cut))

    def hit(self, choice: random.Random) -> None:
        """Kill, pause or cut off a node, or kill or pause a coordinator, while faults go on."""
        running = self._running()
        if self._over or not running:
            return
        if choice.random() < 0.3:
            choice.choice([self._kill_coordinator, self._pause_coordinator])()
        else:
            node = choice.choice(running)
            choice.choice([self._kill, self._pause_life, self._cut_off])(node)

    def _cut(self, cut: set[tuple[str, str]]) -> None:
        self._note("isolate " + " ".join(f"{a}>{b}" for a, b in sorted(cut)))
        self._simulation.network.set_cut(cut)
        if self._rng.random() < 0.7:
            self._later(self._rng.uniform(0.1, 4.0), self._reconnect)

    def _pause(self, process: Any) -> None:
        pause_s = self._rng.choice([0.1, 1.0, 3.0]) * self._rng.random()
        self._note(f"pause {process.name} for {pause_s:.3f} s")
        process.pause()
        self._later(pause_s, lambda: self._resume(process))

    def _resume(self, process: Any) -> None:
        if process.alive and process.paused:
            self._simulation.trace(f"resume {process.name}")
            process.resume(self._rng)

    def _fill_disk(self) -> None:
        running = self._running()
        if running:
            node = self._rng.choice(running)
            node.disk.full = True
            self._note(f"full disk of {node.name}")
            self._later(self._rng.uniform(0.1, 3.0), lambda: self._empty_disk(node))

    def _empty_disk(self, node: SimulatedNode) -> None:
        node.disk.full = False
        self._simulation.trace(f"room again on {node.name}")

    def _slow_disk(self) -> None:
        running = self._running()
        if running:
            disk = self._rng.choice(running).disk
            disk.slowness = self._rng.choice([10.0, 100.0])
            self._note(f"slow disk of {disk.name}, {disk.slowness:.0f} times")
            self._later(self._rng.uniform(0.1, 4.0), lambda: self._quicken_disk(disk))

    def _quicken_disk(self, disk: Disk) -> None:
        disk.slowness = 1.0

    def _replace_disk(self) -> None:
        """Kill a node; once it is fenced, and its copies are not needed, give it an empty disk, or
        an old copy of its own: often of the life that ends so.
        """
        running = self._running()
        if running:
            node = self._rng.choice(running)
            delay_s = 0.0
            if self._old_copies.random() < 0.5:
                self._keep(node)
                delay_s = self._old_copies.uniform(0.3, 3.0)
            self._later(delay_s, lambda: self._kill_for_new_disk(node))

    def _kill_for_new_disk(self, node: SimulatedNode) -> None:
        if self._over or node.life is None:
            return
        self._note(f"kill {node.name} for a new disk")
        node.kill()
        self._simulation.checker.forget(node.name)
        self._later(2.0, lambda: self._boot_on_new_disk(node, 5))

    def _boot_on_new_disk(self, node: SimulatedNode, tries: int) -> None:
        if node.life is not None:
            return
        if self._over or not tries or self._is_spare(node):
            if self._is_spare(node):
                self._exchange_disk(node)
            self._boot(node)
        else:
            self._later(0.5, lambda: self._boot_on_new_disk(node, tries - 1))

    def _keep_a_disk(self) -> None:
        """Copy the directory of a node aside, which may run meanwhile: at times."""
        choice = self._old_copies
        if choice.random() < KEEP_SHARE:
            self._keep(choice.choice(list(self._simulation.nodes.values())))

    def _keep(self, node: SimulatedNode) -> None:
        if epoch := self._epoch_of(node):
            self._note(f"keep a copy of the disk of {node.name} at epoch {epoch}")
            node.disk.keep(epoch)

    def _epoch_of(self, node: SimulatedNode) -> int:
        """Return the node's newest epoch as a coordinator knows it; 0: it has none."""
        table = self._simulation.table()
        info = table.by_id.get(node.name) if table is not None else None  # type: ignore[call-overload]
        return 0 if info is None else info.node_epoch

    def _exchange_disk(self, node: SimulatedNode) -> None:
        """Give the node an empty disk, or one on which its own is as it was some time ago. A volume
        that is rolled back within an epoch is not noticed: that needs a file system which knows.
        """
        disk, epoch = node.disk, self._epoch_of(node)
        if not disk.kept_at_epoch or self._old_copies.random() < 0.3:
            self._note(f"replace the disk of {node.name}")
            disk.replace()
            disk.kept_at_epoch = 0
            self._simulation.keyspaces.checker.on_disk_exchanged(node.name, by_an_old_copy=False)
            return
        as_a_volume = disk.kept_at_epoch < epoch and self._old_copies.random() < 0.5
        self._note(
            f"put-back an old copy of the disk of {node.name}, of epoch {disk.kept_at_epoch}, at "
            f"{epoch}" + ", as a volume" * as_a_volume
        )
        disk.put_back(epoch, as_a_volume=as_a_volume)
        self._simulation.keyspaces.checker.on_disk_exchanged(node.name, by_an_old_copy=True)

    def _is_spare(self, node: SimulatedNode) -> bool:
        """Tell whether each partition has another in-sync replica, and the node is fenced."""
        table = self._simulation.table()
        info = table.by_id.get(node.name) if table is not None else None  # type: ignore[call-overload]
        if table is None or info is None or info.status is not NodeStatus.FENCED:
            return False
        lost = [
            other.number
            for other in table.nodes.values()
            if (known := self._simulation.nodes.get(other.node_id)) is not None
            and not known.disk.is_known_as(other)
        ]
        return all(set(row.in_sync) - {info.number, *lost} for row in table.used_rows)

    # --- the network -------------------------------------------------------------------------

    def _isolate(self) -> None:
        """Cut some machines off from the others, or single directions of links."""
        network = self._simulation.network
        names = [name for name in network.machines if not name.startswith("client")]
        cut: set[tuple[str, str]] = set()
        kind = self._rng.random()
        if kind < 0.4:
            chance = self._rng.choice([0.1, 0.3])
            cut = {(a, b) for a in names for b in names if self._rng.random() < chance}
            if self._rng.random() < 0.5:
                cut |= {(b, a) for a, b in cut}
        else:
            among = names if kind < 0.7 else [name for name in names if name.startswith("n")]
            apart = set(
                self._rng.sample(among, self._rng.randrange(1, max(2, len(among) // 2 + 1)))
            )
            one_way = self._rng.random() < 0.3
            for a in among:
                for b in among:
                    if (a in apart) != (b in apart) and (a in apart or not one_way):
                        cut.add((a, b))
        self._cut(cut)

    def _reconnect(self) -> None:
        if not self._simulation.network.cut:
            return
        self._note("reconnect")
        self._simulation.network.set_cut(set())

    def _reset_stream(self) -> None:
        self._note("reset a stream")
        self._simulation.network.reset_some()

    def _change_weather(self) -> None:
        weather = self._simulation.network.weather = Weather.draw(self._rng)
        self._note(f"weather {weather}")

    # --- coordinators ------------------------------------------------------------------------

    def _some_coordinator(self) -> Member | None:
        group = self._simulation.group
        if group.leader is not None and self._rng.random() < 0.6:
            chosen = group.leader
        else:
            chosen = self._rng.choice(group.members)
        return chosen if chosen.process.alive and not chosen.process.paused else None

    def _kill_coordinator(self) -> None:
        member = self._some_coordinator()
        if member is not None:
            self._note(f"kill {member.name}")
            member.kill()
            self._later(
                self._rng.choice([0.1, 1.0, 2.0]) * self._rng.random(),
                lambda: self._boot_coordinator(member),
            )

    def _boot_coordinator(self, member: Member) -> None:
        if not member.process.alive:
            self._simulation.trace(f"boot {member.name}")
            member.boot()

    def _pause_coordinator(self) -> None:
        member = self._some_coordinator()
        if member is not None:
            self._pause(member.process)

    def _transfer_leadership(self) -> None:
        self._note("transfer the coordinators' leadership")
        self._simulation.group.transfer()

    # --- the end -----------------------------------------------------------------------------

    async def _heal(self) -> None:
        simulation = self._simulation
        simulation.network.weather = Weather()
        simulation.network.set_cut(set())
        for node in simulation.nodes.values():
            node.disk.full = False
            node.disk.slowness = 1.0
            node.disk.release()
            if node.life is not None and node.life.leaving:
                self._kill(node)
            if node.life is not None:
                self._resume(node.life.process)
                node.life.process.release(self._rng)
        for member in simulation.group.members:
            self._boot_coordinator(member)
            self._resume(member.process)
        for node in simulation.nodes.values():
            self._boot(node)
        await self._settle_operations()

    async def _settle_operations(self) -> None:
        """Moves go on, whatever operators had set."""
        ends_at = self._simulation.loop.now + HEALED_OPERATIONS_S
        while self._simulation.loop.now < ends_at:
            try:
                await self._ask(
                    lambda leader: leader.operations.set_moves(
                        paused=False, bytes_per_second=0, moves_per_node=4
                    )
                )
            except KoinonError:
                await asyncio.sleep(0.2)
            else:
                return

    # --- operators ---------------------------------------------------------------------------

    async def _operate(self) -> None:
        """Ask the leader for something, now and then."""
        while True:
            interval_s = self._simulation.scenario.operator_interval_s
            await asyncio.sleep(self._rng.expovariate(1 / interval_s))
            work = self._rng.choice(
                [
                    self._plan,
                    self._plan,
                    self._cancel,
                    self._settings,
                    self._restore_primaries,
                    self._want_primaries,
                    self._want_primaries,
                    self._undrain,
                    self._grow,
                ]
            )
            with contextlib.suppress(KoinonError):
                await work()

    async def _ask(self, work: Callable[[Leadership], Awaitable[Any]]) -> Any:
        group = self._simulation.group
        leader = group.leader or group.members[0]
        return await self._simulation.network.call("operator", leader.name, "admin", work)

    async def _plan(self) -> None:
        wish = self._wish()

        async def execute(leader: Leadership) -> int:
            planned = await leader.operations.plan(wish)
            await leader.operations.execute(wish, planned.plan.plan_id)
            return len(planned.plan.moves)

        moves = await self._ask(execute)
        if moves:
            self._note(f"plan {wish.kind.value} {wish.node_id} moves={moves}")

    def _wish(self) -> PlanWish:
        rng = self._rng
        names = list(self._simulation.nodes)
        kind = rng.choice([PlanKind.REBALANCE, *PlanKind])
        one, other = rng.choice(names), rng.choice(names)
        factor = rng.choice([1, 2, 3])
        return PlanWish(kind=kind, node_id=one, with_node_id=other, replication_factor=factor)

    async def _cancel(self) -> None:
        count = self._simulation.scenario.partitions
        partitions = [] if self._rng.random() < 0.5 else [self._rng.randrange(count)]
        dropped, turned = await self._ask(lambda leader: leader.operations.cancel(partitions))
        if dropped or turned:
            self._note(f"cancel moves dropped={dropped} turned_back={turned}")

    async def _settings(self) -> None:
        paused = self._rng.random() < 0.3
        rate = self._rng.choice([0, 0, 2_000])
        moves = self._rng.choice([1, 4, 8])

        async def set_moves(leader: Leadership) -> None:
            if not self._over:  # one that is long on its way must not undo what healing sets
                await leader.operations.set_moves(
                    paused=paused, bytes_per_second=rate, moves_per_node=moves
                )

        await self._ask(set_moves)
        self._note(f"settings paused={paused} bytes_per_second={rate} moves_per_node={moves}")

    async def _restore_primaries(self) -> None:
        wanted = await self._ask(lambda leader: leader.operations.restore_primaries())
        if wanted:
            self._note(f"wanted primaries {wanted}")

    async def _want_primaries(self) -> None:
        """Wish, as a move would, that other in-sync replicas lead some partitions."""
        table = self._simulation.table()
        assert table is not None
        rows = [row for row in table.rows if len(row.in_sync) > 1 and self._rng.random() < 0.5]
        wishes = tuple((row.partition_id, self._rng.choice(row.in_sync)) for row in rows)
        if wishes:
            command = WantPrimaries(wishes=wishes)
            await self._ask(lambda leader: leader.term.committed(command))

    async def _undrain(self) -> None:
        async def undrain(leader: Leadership) -> None:
            for name in list(self._simulation.nodes):
                await leader.operations.set_node_status(name, NodeStatus.ACTIVE)

        await self._ask(undrain)

    async def _grow(self) -> None:
        if len(self._simulation.nodes) < NODES_MAX and self._rng.random() < 0.3:
            node = self._simulation.add_node()
            self._note(f"add {node.name}")
