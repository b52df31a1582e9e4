"""A whole cluster in one thread, driven by one seed through faults, then healed.

    python -m tests.simulation --help

What runs is the real code of coordinators and nodes (leadership, membership, mover and
operations; engine, replicator, follower, drops, reclaimer, the writer's and LMDB's transactions),
on virtual time, a simulated network and simulated disks. ``checkers`` looks on after every event.
Clients read, write, delete and compare all the while. Then all faults end: within
``HEALED_S_MAX`` every move must be finished and every partition online with all its replicas in
sync and alike, and what clients were told must be linearizable.

Covered, in random mixtures, and also right when it hurts (as soon as a change of a row is
committed):

- nodes: killed (one, or many at once) and started again soon or late, paused, stopped as an
  operator does, added, given an empty disk once their copies are spare;
- the network: nodes and coordinators cut off, both ways or one way, as groups, pairwise, or from
  all but the clients; streams that break, or stall and go on; calls that are lost on the way
  there or back, answered late, carried out twice; slow links;
- disks: slow, full, hanging (``half_deaths``); a commit under way when its process is killed, done
  or not done;
- event loops that do not turn, while the thread that holds the lease goes on (``half_deaths``);
- coordinators: the leader or another one killed, paused, cut off; a leader that does not know
  that it is one no longer; proposals of unknown fate that the next leader commits;
- operators meanwhile: rebalance, drain, replace, replication factor 1, 2 and 3 and changes of it,
  moves cancelled, paused, slowed down, wanted primaries, nodes that stay away and are replaced;
- users, roles and tokens that are changed (``access``);
- keyspaces that are created, altered, dropped and created again (``keyspaces``);
- bulk loads that commit, abort, or are left alone, whose tasks fail and are doubled, with merges
  of many small steps;
- readers of change feeds, whose copies are compared in the end (``feeds``);
- small journals and pages, and tombstones that are soon purged, so that snapshots, passes cut
  short and floors are frequent.

Not covered: Raft itself (``coordinators.py`` gives what it promises; tests/raft simulates it),
gRPC, the agent (``agent.py`` is a twin of the node's), expiry, scans, ``durability =
interval``, disks that lie or decay, clocks that run at different speeds, forced elections, more
than 16 partitions or 6 nodes. Streams lose and reorder nothing, as TCP does not: gaps have
directed tests. Too few descriptors and too little memory show here as what they do to others:
links that are cut, streams that break, pauses, a slow disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import random
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from koinon_coordinator.config import BootstrapConfig, TimingConfig
from koinon_coordinator.core.cluster.commands import Command
from koinon_node.bulk_load import staged_chunks, stager
from koinon_node.config import Limits
from koinon_node.core.formats import records
from koinon_node.storage import merge_executor
from koinon_proto.contract.errors import KoinonError
from koinon_proto.contract.keyspaces import DEFAULT
from koinon_proto.contract.table import NodeStatus, PartitionStatus, Table
from tests.checkers.history import History
from tests.checkers.linearizability import check
from tests.simulation import batchers, disks, feeds
from tests.simulation.access import AccessOperator
from tests.simulation.batchers import Batcher
from tests.simulation.checkers import ClusterChecker, ViolationError
from tests.simulation.clients import Client
from tests.simulation.coordinators import RaftGroup
from tests.simulation.disks import Disk
from tests.simulation.faults import Faults
from tests.simulation.feeds import FeedReader
from tests.simulation.half_deaths import HalfDeaths
from tests.simulation.keyspaces import KEYS, NAMES, KeyspaceOperators
from tests.simulation.loaders import Loader, apply_rows
from tests.simulation.loop import Process, VirtualLoop
from tests.simulation.network import Network, Weather
from tests.simulation.node import SimulatedNode

START_S_MAX = 30.0
FAULTS_S = 18.0
HEALED_S_MAX = 60.0
LOADS_S_MAX = 30.0  # what loads take to end in a healed cluster: up to 11 s in 120 seeds
POLL_S = 0.1
LAST_READS_MAX = 50
LOADS_PAUSE_S = 0.2

# A node imports it on a thread with its first load: once a process, so whatever ran before a seed
# in this one would be part of what happens in it.
stager._modules[merge_executor.__name__] = merge_executor


SEEDS_WITH_BATCHES = (4, 9)
"""The last digits of the seeds that have atomic batches; the others go as they always did."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """The settings of a simulated cluster that are drawn per seed."""

    nodes: int
    partitions: int
    replicas: int
    clients: int
    keys: int
    client_pause_s: float
    commit_s: float
    fault_interval_s: float
    operator_interval_s: float
    reaction: float  # how probable it is that something goes wrong right when it hurts
    journal_rows: int
    page_rows: int
    tombstone_ms: int
    rereplicate_after_ms: int
    weather: Weather
    loaders: int
    step_bytes: int  # of a merge

    @property
    def page_bytes(self) -> int:
        """Small where the rows do not bound a page, and the journal seldom has what is missing."""
        return 120 if self.page_rows == 1_000 and self.journal_rows < 1_000 else 2 << 20

    @property
    def router(self) -> str:
        """In a share of the seeds keys lie together in groups: ``key 1`` with ``key 10``."""
        return "first:5" if self.keys == 40 and self.clients == 4 else ""

    @classmethod
    def draw(cls, rng: random.Random) -> Scenario:
        nodes = rng.choice([3, 3, 4, 5])
        return cls(
            nodes=nodes,
            partitions=rng.choice([4, 8, 16]),
            replicas=rng.choice([1, 2, 2, 3, 3, 3]),
            clients=rng.choice([2, 4, 6]),
            keys=rng.choice([3, 12, 40]),
            client_pause_s=rng.choice([0.01, 0.03, 0.1]),
            commit_s=rng.choice([0.001, 0.004, 0.02]),
            fault_interval_s=rng.choice([0.3, 0.8, 2.0, 4.0]),
            operator_interval_s=rng.choice([0.3, 1.0, 3.0]),
            reaction=rng.choice([0.0, 0.02, 0.1]),
            journal_rows=rng.choice([8, 64, 1_000]),
            page_rows=rng.choice([2, 5, 1_000]),
            tombstone_ms=rng.choice([50, 1_000, 5_000, 600_000]),
            rereplicate_after_ms=rng.choice([2_000, 600_000, 600_000]),
            weather=Weather.draw(rng),
            loaders=rng.choice([0, 1, 2, 3]),
            step_bytes=rng.choice([50, 200, 1 << 22]),
        )


class Simulation:
    """One seed's run."""

    def __init__(self, seed: int, root: Path, trace: Callable[[str], None] | None = None) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        random.seed(seed)
        self.scenario = Scenario.draw(self.rng)
        self.limits = Limits(
            page_rows=self.scenario.page_rows,
            page_bytes=self.scenario.page_bytes,
            tombstone_ms=self.scenario.tombstone_ms,
            write_timeout_ms=self.rng.choice([500, 5_000]),
        )
        staged_chunks.STEP_BYTES = self.scenario.step_bytes
        self.loop = VirtualLoop()
        self.stats: Counter[str] = Counter()
        self.trace_lines: list[str] = []
        self._trace = trace
        self._root = root
        self._logged = bool(seed % 2) if disks.LOGGED is None else disks.LOGGED
        self.network = Network(self.loop, self.rng)
        self.history = History(self.loop.time)
        self.group = RaftGroup(
            self.loop,
            self.rng,
            self.network,
            BootstrapConfig(
                bootstrap_nodes=self.scenario.nodes,
                replication_factor=self.scenario.replicas,
                partition_count=self.scenario.partitions,
                router=self.scenario.router,
            ),
            TimingConfig(rereplicate_after_ms=self.scenario.rereplicate_after_ms),
            self.stats,
        )
        self.group.trace = self.trace
        self.nodes: dict[str, SimulatedNode] = {}
        self.checker = ClusterChecker(self.nodes, self.table)
        self.group.on_committed = self._on_committed
        self.clients: list[Client] = []
        self.loaders: list[Loader] = []
        self.batchers: list[Batcher] = []
        self.faults = Faults(self)
        self.feed_reader: FeedReader | None = None
        self.tail_bytes = random.Random(seed).choice(feeds.TAIL_BYTES)
        self.half_deaths = HalfDeaths(self)
        self.access = AccessOperator(self)
        self.keyspaces = KeyspaceOperators(self)
        for _ in range(self.scenario.nodes):
            self.add_node()
        self.loop.after_event = self._after_event

    def trace(self, text: str) -> None:
        """Note an event; the last ones are shown with a violation."""
        line = f"{self.loop.now - 1000.0:9.4f} {text}"
        self.trace_lines.append(line)
        if self._trace is not None:
            self._trace(line)

    def table(self) -> Table | None:
        """The table after all that is committed."""
        return self.group.newest_state().state.table()

    def add_node(self) -> SimulatedNode:
        name = f"n{len(self.nodes) + 1}"
        node = SimulatedNode(self, name, Disk(self._root, name, logged=self._logged))
        self.nodes[name] = node
        node.boot()
        return node

    def _on_committed(self, command: Command) -> None:
        self.checker.on_committed(command)
        self.faults.on_committed(command)
        self.access.on_committed(command)
        self.keyspaces.on_committed(command)

    def _after_event(self, process: Process | None) -> None:
        if process is not None and process.name in self.nodes:
            self.checker.after_event(process.name)
            self.access.checker.after_event(process.name)
        if self.loop.failures:
            raise ViolationError(_describe(self.loop.failures[0]))

    # --- the run -----------------------------------------------------------------------------

    def run(self) -> Counter[str]:
        try:
            self.loop.run_until_complete(self._main())
            for process in self.loop.processes:
                process.forget_tasks()
            self._after_event(None)
        finally:
            self.stats["events"] = self.loop.events
            self.stats["virtual seconds"] = int(self.loop.now - 1000.0)
            self.stats["checks"] = self.checker.checks
            self._close()
        return self.stats

    def _close(self) -> None:
        with _no_complaints():
            self.loop.end()
            for node in self.nodes.values():
                node.close()
            self.loop.close()

    async def _main(self) -> None:
        await self._until(self._is_started, START_S_MAX, "the cluster did not start")
        self.trace(f"started {self.scenario}")
        self._start_clients()
        self.access.start()
        self.keyspaces.start()
        self.network.weather = self.scenario.weather
        half_deaths = asyncio.ensure_future(self.half_deaths.run(FAULTS_S))
        await self.faults.run(FAULTS_S)
        half_deaths.cancel()
        self.access.stop()
        self.keyspaces.stop()
        self.trace("healed")
        self.network.tell_of_breaks()  # or it would not be whole yet when a half-death begins
        await self.until_converged("no convergence")
        await self.half_deaths.last()
        await self.until_converged("no convergence after that")
        await self._until_quiet()
        await self._read_all()
        await self.until_converged("no convergence in the end")
        self._check_copies()
        await self._check_feed()
        await self.keyspaces.finish()
        self._check_history()

    async def until_converged(self, what: str) -> None:
        """Wait until nothing is on its way any more; ``what`` says so if that takes too long."""
        await self._until(self._has_converged, HEALED_S_MAX, what)

    async def _until(self, condition: Callable[[], str], seconds: float, what: str) -> None:
        """Wait until the condition says that nothing is missing."""
        deadline = self.loop.now + seconds
        while missing := condition():
            if self.loop.now > deadline:
                raise ViolationError(f"{what} within {seconds} s: {missing}")
            await asyncio.sleep(POLL_S)

    def _is_started(self) -> str:
        table = self.table()
        if table is None or not table.bootstrapped:
            return "there is no table"
        return self._what_is_missing(table)

    def _has_converged(self) -> str:
        state = self.group.newest_state().state
        if state.moves:
            return f"moves {list(state.moves.values())}"
        table = self.table()
        assert table is not None
        if table.keyspaces.dropping:
            return f"not erased yet: {table.keyspaces.dropping}"
        return self._what_is_missing(table)

    def _what_is_missing(self, table: Table) -> str:
        for info in table.nodes.values():
            if info.status not in (NodeStatus.ACTIVE, NodeStatus.DRAINING):
                return f"node {info}"
        for row in table.used_rows:
            if row.status is not PartitionStatus.ONLINE or set(row.in_sync) != set(row.replicas):
                return f"row {row}"
            life = self.nodes[table.nodes[row.primary].node_id].life
            if life is None or not life.serves(row.partition_id):
                return f"nobody serves {row}"
        return ""

    def _start_clients(self) -> None:
        keys = [f"key {number}".encode() for number in range(self.scenario.keys)]
        for number in range(self.scenario.clients):
            self._start_client(f"client{number + 1}", keys)
        self.keys = keys
        if self.keyspaces.active:
            for name in NAMES:
                self._start_client(f"client in {name}", keys[:KEYS], name)
                self._start_batcher(f"batcher in {name}", name)
        if self.seed % 10 in SEEDS_WITH_BATCHES:
            for number in range(2):
                self._start_batcher(f"batcher{number + 1}")
        if self.seed % 10 in feeds.SEEDS:
            self._start_feed_reader()
        for number in range(self.scenario.loaders):
            self._start_loader(f"loader{number + 1}")

    def _start_client(self, name: str, keys: Sequence[bytes], keyspace: str = DEFAULT) -> None:
        machine = self.network.add(name)
        process = machine.process = Process(self.loop, name)
        client = Client(
            name,
            process,
            self.network,
            [member.name for member in self.group.members],
            self.history,
            keys,
            self.rng,
            self.stats,
            keyspace,
        )
        self.clients.append(client)
        process.spawn(client.run(self.scenario.client_pause_s))

    def _start_batcher(self, name: str, keyspace: str = DEFAULT) -> None:
        machine = self.network.add(name)
        process = machine.process = Process(self.loop, name)
        batcher = Batcher(
            name,
            process,
            self.network,
            [member.name for member in self.group.members],
            self.history,
            self.rng,
            self.stats,
            self._violated,
            keyspace,
        )
        self.batchers.append(batcher)
        process.spawn(batcher.run(self.scenario.client_pause_s))

    def _start_feed_reader(self) -> None:
        machine = self.network.add(feeds.NAME)
        process = machine.process = Process(self.loop, feeds.NAME)
        self.feed_reader = FeedReader(
            self.network,
            [member.name for member in self.group.members],
            self.scenario.partitions,
            random.Random(self.seed),
            self.stats,
            self._violated,
        )
        process.spawn(self.feed_reader.run())

    def _start_loader(self, name: str) -> None:
        machine = self.network.add(name)
        process = machine.process = Process(self.loop, name)
        loader = Loader(
            name,
            process,
            self.network,
            [member.name for member in self.group.members],
            self.history,
            self.keys,
            self.rng,
            self.stats,
            self._violated,
        )
        self.loaders.append(loader)
        process.spawn(loader.run(LOADS_PAUSE_S))

    def _violated(self, what: str) -> None:
        raise ViolationError(what)

    async def _until_quiet(self) -> None:
        """Let clients finish what they have begun, and replicas all that is left."""
        for client in self.clients:
            client.stopping = True
        for loader in self.loaders:
            loader.stopping = True
        for batcher in self.batchers:
            batcher.stopping = True
        if (reader := self.feed_reader) is not None:
            reader.stopping = True
            await self._until(
                lambda: "a feed" if reader.reading else "", 10.0, "the reader of feeds goes on"
            )
        await self._until(
            lambda: "batchers" if any(b.busy for b in self.batchers) else "", 10.0, "batches go on"
        )
        await self._until(
            lambda: "clients" if any(c.busy for c in self.clients) else "", 10.0, "clients go on"
        )
        await self._until(
            lambda: "loaders" if any(o.busy for o in self.loaders) else "",
            LOADS_S_MAX,
            "loads go on",
        )
        await self._until(self._what_loads_left, HEALED_S_MAX, "something is left of loads")
        await asyncio.sleep(1.0)

    def _what_loads_left(self) -> str:
        state = self.group.newest_state().state
        if state.loads.active:
            return f"loads {list(state.loads.active.values())}"
        table = self.table()
        assert table is not None
        for row in table.used_rows:
            for number in row.replicas:
                life = self.nodes[table.nodes[number].node_id].life
                assert life is not None
                left = staged_chunks.staged_loads(life.store, [row.partition_id])
                if left:
                    return f"{life.node.name} holds what was staged: {left}"
        return ""

    async def _read_all(self) -> None:
        """Every key can be read, and what is found is part of the history."""
        there = {DEFAULT, *(keyspace.name for keyspace in self.keyspaces.existing())}
        clients = {one.keyspace: one for one in reversed(self.clients) if one.keyspace in there}
        for client in clients.values():
            for key in client.keys:
                await self._until_done(partial(client.read_now, key), f"{key!r} cannot be read")
        batchers = {one.keyspace: one for one in reversed(self.batchers) if one.keyspace in there}
        for batcher in batchers.values():
            await self._until_done(batcher.read_all, "what batches wrote cannot be read")

    async def _until_done(self, work: Callable[[], Awaitable[bool]], what: str) -> None:
        for _ in range(LAST_READS_MAX):
            if await work():
                return
            await asyncio.sleep(POLL_S)
        raise ViolationError(what)

    # --- at the end --------------------------------------------------------------------------

    def _check_copies(self) -> None:
        table = self.table()
        assert table is not None
        for row in table.used_rows:
            copies = {}
            for number in row.replicas:
                node = self.nodes[table.nodes[number].node_id]
                assert node.life is not None
                copies[node.name] = node.life.records_of(row.partition_id)
            first, *others = copies.values()
            if any(other != first for other in others):
                different = {
                    name: {k: v for k, v in copy.items() if first.get(k) != v or k not in first}
                    for name, copy in copies.items()
                }
                raise ViolationError(
                    f"copies of partition {row.partition_id} differ: {different} "
                    f"sizes { {name: len(copy) for name, copy in copies.items()} } {row}"
                )
            self.checker.check_copies(row)
        self._check_loads(table)

    async def _check_feed(self) -> None:
        """Check that the reader's copy, once it has caught up, is what the primaries hold."""
        reader = self.feed_reader
        if reader is None:
            return
        table = self.table()
        assert table is not None
        for row in table.rows[: self.scenario.partitions]:
            p = row.partition_id
            life = self.nodes[table.nodes[row.primary].node_id].life
            assert life is not None
            await self._until_done(partial(reader.read, p), f"the feed of {p} does not end")
            held = life.records_of(p)
            users = {key[1:]: record for key, record in held.items() if key[0] == records.USER}
            told = reader.live(p)
            if told != users:
                wrong = sorted(k for k in told | users if told.get(k) != users.get(k))
                some = {key: (told.get(key), users.get(key)) for key in wrong[:5]}
                raise ViolationError(
                    f"{len(wrong)} keys of partition {p} differ from what its feed has told: "
                    f"(told, held) {some}"
                )

    def _check_loads(self, table: Table) -> None:
        """Beside the clients' keys there is what committed loads have left, and nothing else."""
        held: dict[bytes, bytes] = {}
        for row in table.rows[: self.scenario.partitions]:  # of ``default``
            life = self.nodes[table.nodes[row.primary].node_id].life
            assert life is not None
            for key, (_, value) in life.records_of(row.partition_id).items():
                held[key[1:]] = value
        expected = {key: value for o in self.loaders for key, value in o.model.items()}
        for _, rows in sorted((one for o in self.loaders for one in o.common), key=itemgetter(0)):
            apply_rows(expected, rows)
        others = {key: v for key, v in held.items() if not key.startswith(batchers.PREFIX)}
        own = {key: value for key, value in others.items() if key not in self.keys}
        if own != expected:
            wrong = sorted(k for k in own | expected if own.get(k) != expected.get(k))
            some = {key: (own.get(key), expected.get(key)) for key in wrong[:5]}
            raise ViolationError(
                f"{len(wrong)} keys differ from what loads have left: (held, expected) {some}"
            )

    def _check_history(self) -> None:
        operations = self.history.operations()
        self.stats["operations"] = len(operations)
        self.keyspaces.checker.check_history(operations)
        violations = check(operations)
        if violations:
            raise ViolationError("not linearizable:\n" + "\n".join(map(str, violations)))


def _describe(context: dict[str, Any]) -> str:
    error = context.get("exception")
    if error is None:
        return f"in the loop: {context}"
    if isinstance(error, ViolationError):
        return str(error)
    return "a task failed:\n" + "".join(traceback.format_exception(error))


@contextlib.contextmanager
def _no_complaints() -> Iterator[None]:
    """Ignore the errors that dead coroutines raise while they are closed."""
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        yield
    finally:
        sys.unraisablehook = hook


class _Errors(logging.Handler):
    """An exception that the code did not expect, and logs, is a failure of the seed."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(logging.ERROR)
        self._simulation = simulation

    def emit(self, record: logging.LogRecord) -> None:
        self._simulation.trace(f"log: {record.getMessage()}")
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and not isinstance(error, KoinonError):
            context = {"message": record.getMessage(), "exception": error}
            self._simulation.loop.failures.append(context)


class SeedFailedError(AssertionError):
    """A seed's run broke a rule: which, and what happened last."""

    def __init__(self, text: str, stats: Counter[str]) -> None:
        super().__init__(text)
        self.stats = stats


def run_seed(
    seed: int, trace: Callable[[str], None] | None = None, lines_max: int = 25
) -> Counter[str]:
    """Run one seed; return counts of what has happened.

    Raises:
        SeedFailedError: something broke; the last events are named.
    """
    memory = Path("/dev/shm")
    _freeze_once()
    gc.disable()  # it would close a dead process's coroutines in the middle of a run
    try:
        with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as root:
            stats, failure = _run(seed, Path(root), trace, lines_max)
    finally:
        with _no_complaints():
            gc.collect()
        gc.enable()
    if failure:
        raise SeedFailedError(f"seed {seed}: {failure}", stats)
    return stats


@functools.cache
def _freeze_once() -> None:
    """Let the garbage collector pass over all that exists before the first seed."""
    gc.collect()
    gc.freeze()


def _run(
    seed: int, root: Path, trace: Callable[[str], None] | None, lines_max: int
) -> tuple[Counter[str], str]:
    """Return (counts, what broke). Nothing of the simulation is left in what is returned."""
    simulation = Simulation(seed, root, trace)
    handler = _Errors(simulation)
    loggers = logging.getLogger("koinon_node"), logging.getLogger("koinon_coordinator")
    for logger in loggers:
        logger.addHandler(handler)
        logger.propagate = False
    try:
        return simulation.run(), ""
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        if not isinstance(error, ViolationError):
            what += "\n" + "".join(traceback.format_tb(error.__traceback__))
        lines = "\n".join(simulation.trace_lines[-lines_max:])
        return simulation.stats, f"{what}\nlast events:\n{lines}"
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
            logger.propagate = True
