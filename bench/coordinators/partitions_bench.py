"""The cost of many partitions: a cluster of 1,024 beside one of 1,024 and 200 keyspaces of 64.

    python -m bench.coordinators.partitions_bench [--keyspaces 0 200] [--runs 3] [--json]
        [--only state|cluster|start] [--stalls]

``state``: milliseconds of CPU that a coordinator's event loop is kept for one thing at a time, in
this process. ``cluster``: three coordinators and three nodes. A node is killed; the figures are the
time until every partition has a primary that serves it (by the leader's table), and until one key
of each of 1,024 partitions, spread over all, takes a write. Then the node comes back. Nothing else
fails, so each election is a mistake. With ``--stalls`` a process asks each coordinator every 10 ms
for something that needs only its event loop, and takes half a core for it: the slowest answer is
the longest stall. ``start``: one node that leads 16,384 partitions is stopped, and started again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc

from bench.failures.starved_bench import count_events
from koinon import aio
from koinon.local import LocalCluster
from koinon_coordinator.config import BootstrapConfig, TimingConfig
from koinon_coordinator.core.cluster.commands import (
    AlterPartitions,
    AssignPartitions,
    Command,
    ConfirmRegistration,
    CreateCluster,
    CreateKeyspace,
    FenceNode,
    HostedPartition,
    PartitionChange,
    PartitionsHosted,
    RegisterNode,
    SetMoveSettings,
)
from koinon_coordinator.core.decide.keyspaces import decide_creation
from koinon_coordinator.core.planning.initial_placement import place
from koinon_coordinator.state_machine import ReplicatedState
from koinon_coordinator.wire.state_codec import command_to_bytes
from koinon_coordinator.wire.updates import UpdateCache
from koinon_proto.contract.keyspaces import DEFAULT_ID, Keyspace
from koinon_proto.contract.table import MoveSettings, NodeId, NodeNumber, Table
from koinon_proto.partitioner import partitioner_of
from koinon_proto.v1 import table_pb2, table_pb2_grpc

PARTITIONS = 1_024
PER_KEYSPACE = 64
LED_BY_ONE = 16_384  # in ``start``
NODES = 3
PROBES = 1_024
PROBED_KEYSPACES = 16
PROBE_TIMEOUT_MS = 60_000
READY_TIMEOUT_S = 180.0
PING_S = 0.01
QUIET_S = 2.0

# --- state -------------------------------------------------------------------------------------


class Machine:
    """The replicated state of a bootstrapped cluster, driven directly."""

    def __init__(self, keyspaces: int) -> None:
        self.replicated = ReplicatedState()
        self._index = 0
        config = BootstrapConfig(partition_count=PARTITIONS, bootstrap_nodes=NODES)
        self.apply(CreateCluster(config=config.cluster("c0ffee", TimingConfig())))
        for number in range(1, NODES + 1):
            self.register(number)
        nodes = {NodeNumber(n): "" for n in range(1, NODES + 1)}
        rows = place(nodes, partition_count=PARTITIONS, replication_factor=3)
        self.apply(AssignPartitions(replicas=rows))
        for n in range(keyspaces):
            command = decide_creation(self.replicated.state, _wanted(f"k{n}"))
            assert isinstance(command, CreateKeyspace)
            self.apply(command)
        for number in range(1, NODES + 1):
            self.host(number)

    def apply(self, command: Command) -> None:
        self._index += 1
        self.replicated.apply(self._index, command_to_bytes(command))

    def epoch(self, number: int) -> int:
        record = self.replicated.state.node(NodeNumber(number))
        return record.info.node_epoch if record is not None else 0

    def register(self, number: int) -> None:
        known = self.epoch(number)
        self.apply(
            RegisterNode(
                node_id=NodeId(f"n{number}"),
                address=f"127.0.0.1:{number}",
                rack="",
                store_id=f"store-{number}",
                last_node_epoch=known,
                registration_id=f"r{known}",
                known_node_epoch=known,
                base_epoch_counts=True,
            )
        )
        self.apply(
            ConfirmRegistration(node_number=NodeNumber(number), node_epoch=self.epoch(number))
        )

    def hosting(self, number: int) -> PartitionsHosted:
        return PartitionsHosted(
            node_number=NodeNumber(number),
            node_epoch=self.epoch(number),
            hosted=tuple(
                HostedPartition(
                    partition_id=row.partition_id,
                    primary_epoch=row.primary_epoch,
                    partition_epoch=row.partition_epoch,
                )
                for row in self.replicated.state.assigned_to(NodeNumber(number))
            ),
        )

    def host(self, number: int) -> None:
        command = self.hosting(number)
        if command.hosted:
            self.apply(command)

    def widening(self, number: int) -> AlterPartitions:
        """Return what primary ``number`` proposes once the node that came back holds everything."""
        rows = self.replicated.state.table()
        assert rows is not None
        return AlterPartitions(
            node_number=NodeNumber(number),
            node_epoch=self.epoch(number),
            changes=tuple(
                PartitionChange(
                    partition_id=row.partition_id,
                    primary_epoch=row.primary_epoch,
                    partition_epoch=row.partition_epoch,
                    in_sync=row.replicas,
                )
                for row in rows.rows
                if row.primary == number and row.in_sync != row.replicas
            ),
        )

    def table(self) -> Table:
        table = self.replicated.state.table()
        assert table is not None
        return table


def _wanted(name: str) -> Keyspace:
    return Keyspace(
        keyspace_id=DEFAULT_ID,
        name=name,
        base=0,
        partition_count=PER_KEYSPACE,
        partitioner="",
        replication_factor=3,
        min_in_sync=2,
        max_value_bytes=0,
    )


def state_costs(keyspaces: int, rounds: int = 3) -> dict[str, float]:
    """Return milliseconds of CPU of this thread by what it did: the median of some rounds."""
    machine = Machine(keyspaces)
    updates = UpdateCache(machine.replicated.row_forms)
    found: dict[str, list[float]] = {}

    def timed(what: str, work: Callable[..., Any], *args: Any) -> Any:
        began = time.thread_time()
        made = work(*args)
        found.setdefault(what, []).append(1000 * (time.thread_time() - began))
        return made

    def push(what: str, known: int) -> None:
        """Time an update for heartbeats and watches: made for the first that asks, sent to each."""
        timed(f"{what}: made", lambda: updates.update(machine.table(), known))
        update = updates.update(machine.table(), known)
        timed(f"{what}: sent", update.SerializeToString)

    snapshot = machine.replicated.capture()()
    for round_ in range(rounds):
        known = machine.table().table_version
        victim = round_ % NODES + 1
        others = [n for n in range(1, NODES + 1) if n != victim]
        fence = FenceNode(node_number=NodeNumber(victim), node_epoch=machine.epoch(victim))
        timed("fence: applied", machine.apply, fence)
        push("fence: pushed", known)
        for number in others:
            known = machine.table().table_version
            hosting = timed("hosting: decided", machine.hosting, number)
            timed("hosting: applied", machine.apply, hosting)
            push("hosting: pushed", known)
        known = machine.table().table_version
        machine.register(victim)
        for number in others:
            widening = machine.widening(number)
            timed("widening: applied", machine.apply, widening)
        push("widening: pushed", known)
        settings = MoveSettings(bytes_per_second=round_ + 1)
        timed("settings: applied", machine.apply, SetMoveSettings(settings=settings))
        push("settings: pushed", machine.table().table_version - 1)
        push("whole table", 0)
        encode = timed("snapshot: captured", machine.replicated.capture)
        snapshot = timed("snapshot: encoded (a thread)", encode)
        restored = ReplicatedState()
        timed("snapshot: restored", restored.restore, snapshot)
        for number in (1, 2, 3):
            machine.host(number)
    print(f"  a snapshot has {len(snapshot):,} bytes", file=sys.stderr)
    return {what: round(statistics.median(times), 2) for what, times in found.items()}


# --- the cluster -------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Failover:
    """Seconds from the kill; ``back_s``: from the node's start until all is in sync."""

    victim: str
    online_s: float
    writes_s: float
    back_s: float
    stall_ms: dict[str, float]  # by coordinator, from the kill until all is in sync; if looked for


@dataclass(kw_only=True)
class Report:
    """The figures of a cluster with one number of partitions."""

    partitions: int = 0
    start_s: float = 0.0  # of all processes anew, until all is in sync
    push_ms: float = 0.0  # from a change until every watcher has it; the median
    whole_ms: float = 0.0  # a client's first table; the median
    failovers: list[Failover] = field(default_factory=list)
    events: dict[str, int] = field(default_factory=dict)


def _ping(addresses: dict[str, str], pipe: Connection) -> None:
    """In a process of its own: ask each coordinator again and again; answer each line of ``pipe``
    with the slowest answer of each since the last, in seconds.
    """

    async def ask(name: str, address: str, slowest: dict[str, float]) -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            stub: Any = table_pb2_grpc.TableServiceStub(channel)
            request = table_pb2.GetTableRequest(cluster_id="another cluster")  # refused, soon
            while True:
                began = time.monotonic()
                try:
                    await stub.GetTable(request, timeout=30.0)
                except grpc.aio.AioRpcError as error:
                    if error.code() in (
                        grpc.StatusCode.UNAVAILABLE,
                        grpc.StatusCode.RESOURCE_EXHAUSTED,
                    ):
                        await asyncio.sleep(PING_S)
                        continue
                slowest[name] = max(slowest.get(name, 0.0), time.monotonic() - began)
                await asyncio.sleep(PING_S)

    async def run() -> None:
        slowest: dict[str, float] = {}
        tasks = [asyncio.create_task(ask(*pair, slowest)) for pair in addresses.items()]
        loop = asyncio.get_running_loop()
        while await loop.run_in_executor(None, pipe.recv):
            pipe.send(dict(slowest))
            slowest.clear()
        for task in tasks:
            task.cancel()

    asyncio.run(run())


@contextlib.contextmanager
def pinging(cluster: LocalCluster, wanted: bool) -> Iterator[Callable[[], dict[str, float]]]:
    """Yield what returns each coordinator's longest stall since it was called last, in ms; if not
    wanted, none.
    """
    if not wanted:
        yield dict
        return
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    addresses = {name: cluster.address(name) for name in cluster.coordinator_names}
    process = context.Process(target=_ping, args=(addresses, theirs))
    process.start()

    def stalls() -> dict[str, float]:
        ours.send(True)
        return {name: round(1000 * s, 1) for name, s in ours.recv().items()}

    try:
        yield stalls
    finally:
        ours.send(False)
        process.join()


def probe_keys(table: Table) -> list[tuple[str, bytes]]:
    """Return keyspaces and keys, each in a partition of its own, at most ``PROBES`` in all: in
    ``default`` and in a few keyspaces that lie apart.
    """
    found: list[tuple[str, bytes]] = []
    every = list(table.keyspaces)
    keyspaces = every[:: max(1, len(every) // PROBED_KEYSPACES)]
    each = PROBES // len(keyspaces)
    for keyspace in keyspaces:
        partition_of = partitioner_of(keyspace).partition_of
        keys: dict[int, bytes] = {}
        number = 0
        while len(keys) < min(each, keyspace.partition_count):
            key = b"probe/%d" % number
            keys.setdefault(partition_of(key), key)
            number += 1
        found += [(keyspace.name, key) for key in keys.values()]
    return found


class Writes:
    """Writes one key to each of ``PROBES`` partitions, again and again."""

    def __init__(self, keys: list[tuple[aio.AsyncKeyspaceClient | aio.AsyncClient, bytes]]) -> None:
        self._keys = keys

    @classmethod
    async def to(cls, client: aio.AsyncClient, table: Table) -> Writes:
        """Open the keyspaces, once: that is not what is measured."""
        keys = probe_keys(table)
        names = {keyspace for keyspace, _ in keys}
        opened = {name: await client.keyspace(name) for name in names}
        return cls([(opened[keyspace], key) for keyspace, key in keys])

    async def all(self) -> None:
        """Return when all are written."""
        timeout_ms = PROBE_TIMEOUT_MS
        puts = [
            keyspace.put(key, b"", retry_unknown=True, timeout_ms=timeout_ms)
            for keyspace, key in self._keys
        ]
        await asyncio.gather(*puts)


async def watched(
    cluster: LocalCluster,
    is_done: Callable[[Any], bool],
    epochs_before: Mapping[NodeId, int] | None = None,
) -> float:
    """Follow the leader's table until each of its rows is as wanted, and every node has registered
    since it had these epochs; return when that was, in monotonic seconds. It looks only at rows
    that change: what it takes is taken from the servers. (``LocalCluster.wait_for`` asks for all of
    the table again and again.)
    """
    undone: set[int] = set()
    epochs: dict[NodeId, int] = {}
    async with asyncio.timeout(READY_TIMEOUT_S):
        while True:
            name = cluster.leader() or cluster.coordinator_names[0]
            with contextlib.suppress(grpc.aio.AioRpcError):  # it is about to start, or has ended
                async with grpc.aio.insecure_channel(cluster.address(name)) as channel:
                    stub: Any = table_pb2_grpc.TableServiceStub(channel)
                    async for update in stub.WatchTable(table_pb2.GetTableRequest()):
                        for row in update.rows:
                            (undone.discard if is_done(row) else undone.add)(row.partition_id)
                        epochs.update(
                            (NodeId(node.node_id), node.node_epoch) for node in update.nodes
                        )
                        are_back = all(
                            epochs[node] > epoch for node, epoch in (epochs_before or {}).items()
                        )
                        if are_back and not undone:
                            return time.monotonic()
            await asyncio.sleep(0.05)


def served_without(number: int) -> Callable[[Any], bool]:
    """Return whether another one than the node leads the partition."""
    online = table_pb2.PARTITION_STATUS_ONLINE
    return lambda row: row.primary != number and row.status == online


def in_sync(row: Any) -> bool:
    """Return whether the partition is served, and every replica is in sync."""
    online: bool = row.status == table_pb2.PARTITION_STATUS_ONLINE
    return online and len(row.in_sync) == len(row.replicas)


async def fail_over(
    cluster: LocalCluster,
    writes: Writes,
    victim: str,
    stalls: Callable[[], dict[str, float]],
) -> Failover:
    """Kill the node, and bring it back."""
    table = cluster.status().table
    assert table is not None
    await writes.all()
    number = next(n.number for n in table.nodes.values() if n.node_id == victim)
    online = asyncio.create_task(watched(cluster, served_without(number)))
    await asyncio.sleep(QUIET_S)
    stalls()
    await asyncio.to_thread(cluster.kill, victim)
    killed_at = time.monotonic()
    await writes.all()
    writes_at = time.monotonic()
    online_at = await online
    await asyncio.sleep(QUIET_S)
    began = time.monotonic()
    cluster.restart(victim)
    back_at = await watched(cluster, in_sync)
    return Failover(
        victim=victim,
        online_s=online_at - killed_at,
        writes_s=writes_at - killed_at,
        back_s=back_at - began,
        stall_ms=stalls(),
    )


async def push_ms(cluster: LocalCluster, rounds: int = 10) -> float:
    """Return the median time from a change of the table until watchers of all members have it."""
    pushed: list[float] = []
    table = cluster.status().table
    assert table is not None
    request = table_pb2.GetTableRequest(
        cluster_id=table.cluster.cluster_id, known_version=table.table_version
    )
    channels = [
        grpc.aio.insecure_channel(cluster.address(name)) for name in cluster.coordinator_names
    ]
    watches = [table_pb2_grpc.TableServiceStub(c).WatchTable(request) for c in channels]
    await asyncio.gather(*(watch.read() for watch in watches))
    with cluster.admin() as admin:
        for round_ in range(rounds):
            await asyncio.sleep(0.1)
            began = time.monotonic()
            change = asyncio.to_thread(admin.set_moves, bytes_per_second=(round_ + 1) << 20)
            await asyncio.gather(change, *(watch.read() for watch in watches))
            pushed.append(1000 * (time.monotonic() - began))
        await asyncio.to_thread(admin.set_moves, bytes_per_second=0)
    for channel in channels:
        await channel.close()
    return statistics.median(pushed)


async def whole_ms(cluster: LocalCluster, rounds: int = 10) -> float:
    """Return the median time in which a new client has its table."""
    times: list[float] = []
    for _ in range(rounds):
        began = time.monotonic()
        async with await aio.connect(cluster.coordinators):
            times.append(1000 * (time.monotonic() - began))
    return statistics.median(times)


async def _all_figures(
    cluster: LocalCluster, keyspaces: int, runs: int, with_stalls: bool, report: Report
) -> None:
    """Fill the report. One event loop for all: gRPC keeps hold of the first one that it meets."""
    with cluster.admin(timeout_ms=30_000) as admin:
        for n in range(keyspaces):
            await asyncio.to_thread(admin.keyspaces.create, f"k{n}", partition_count=PER_KEYSPACE)
    await watched(cluster, in_sync)
    begin = {name: cluster.log_path(name).stat().st_size for name in cluster.names}
    table = cluster.status().table
    assert table is not None
    report.partitions = len(table.used_rows)
    report.push_ms = await push_ms(cluster)
    report.whole_ms = await whole_ms(cluster)
    with pinging(cluster, with_stalls) as stalls:
        async with await aio.connect(cluster.coordinators) as client:
            writes = await Writes.to(client, table)
            for index in range(runs):
                victim = cluster.node_names[index % NODES]
                run = await fail_over(cluster, writes, victim, stalls)
                report.failovers.append(run)
                print(f"  {asdict(run)}", file=sys.stderr, flush=True)
    report.events = count_events(cluster, begin)
    await watched(cluster, in_sync)
    table = cluster.status().table
    assert table is not None
    await asyncio.to_thread(cluster.stop)
    began = time.monotonic()
    await asyncio.to_thread(cluster.start)
    epochs = {info.node_id: info.node_epoch for info in table.nodes.values()}
    report.start_s = await watched(cluster, in_sync, epochs) - began


def cluster_figures(keyspaces: int, runs: int, with_stalls: bool, data: str | None) -> Report:
    """Return the figures of a fresh cluster."""
    report = Report()
    with LocalCluster(data, nodes=NODES, coordinators=3) as cluster:
        asyncio.run(_all_figures(cluster, keyspaces, runs, with_stalls, report))
    return report


# --- the start of a node -----------------------------------------------------------------------


def _cpu_s(pid: int) -> float:
    """Return the seconds of CPU that the process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _starts(cluster: LocalCluster, runs: int) -> list[tuple[float, float]]:
    """Return seconds from each start of the one node until it serves all, and its CPU till then."""
    (node,) = cluster.node_names
    with cluster.admin(timeout_ms=30_000) as admin:
        partitions = LED_BY_ONE - PARTITIONS
        await asyncio.to_thread(admin.keyspaces.create, "large", partition_count=partitions)
    await watched(cluster, in_sync)
    found: list[tuple[float, float]] = []
    for _ in range(runs):
        table = cluster.status().table
        assert table is not None
        epochs = {info.node_id: info.node_epoch for info in table.nodes.values()}
        await asyncio.to_thread(cluster.terminate, node)
        began = time.monotonic()
        cluster.restart(node)
        seconds = await watched(cluster, in_sync, epochs) - began
        found.append((seconds, _cpu_s(cluster.pid(node) or 0)))
    return found


# --- printing ----------------------------------------------------------------------------------


def print_state(costs: dict[int, dict[str, float]]) -> None:
    """Print milliseconds by what, a column for each size."""
    sizes = [PARTITIONS + PER_KEYSPACE * keyspaces for keyspaces in costs]
    print("ms of the event loop".ljust(28), *(f"{size:>10,}" for size in sizes))
    for what in next(iter(costs.values())):
        print(what.ljust(28), *(f"{of[what]:10.2f}" for of in costs.values()))


def print_cluster(reports: list[Report]) -> None:
    """Print a paragraph for each size."""
    for report in reports:
        runs = report.failovers
        stalls = [max(run.stall_ms.values(), default=0.0) for run in runs]
        longest = (
            f"; longest stalls of a coordinator {statistics.median(stalls):.0f} ms "
            f"(worst {max(stalls):.0f})"
        )
        told = ", ".join(f"{count} {name}" for name, count in report.events.items())
        print(
            f"{report.partitions:,} partitions: served again after "
            f"{statistics.median(run.online_s for run in runs):.2f} s, writes after "
            f"{statistics.median(run.writes_s for run in runs):.2f} s (worst "
            f"{max(run.writes_s for run in runs):.2f}), the node is back after "
            f"{statistics.median(run.back_s for run in runs):.2f} s"
            f"{longest if any(stalls) else ''}\n"
            f"  a change is pushed in {report.push_ms:.0f} ms, a whole table in "
            f"{report.whole_ms:.0f} ms; all start anew in {report.start_s:.1f} s; {told}"
        )


def main() -> int:
    """Print the figures of each size."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--keyspaces", type=int, nargs="+", default=[0, 200])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", choices=("state", "cluster", "start"))
    parser.add_argument("--stalls", action="store_true", help="look for stalls of coordinators")
    parser.add_argument("--data", type=Path, help="a directory for the cluster, kept with its logs")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    costs, reports, starts = {}, [], []
    if options.only in (None, "state"):
        costs = {keyspaces: state_costs(keyspaces) for keyspaces in options.keyspaces}
    if options.only in (None, "start"):
        with LocalCluster(nodes=1, coordinators=1) as cluster:
            starts = asyncio.run(_starts(cluster, options.runs))
    if options.only in (None, "cluster"):
        for keyspaces in options.keyspaces:
            data = options.data and str(options.data / str(keyspaces))
            reports.append(cluster_figures(keyspaces, options.runs, options.stalls, data))
    if options.json:
        told = {"state": costs, "cluster": list(map(asdict, reports)), "start": starts}
        print(json.dumps(told))
        return 0
    if costs:
        print_state(costs)
    for seconds, cpu_s in starts:
        print(f"a node serves {LED_BY_ONE:,} after {seconds:.2f} s, with {cpu_s:.2f} s of CPU")
    print_cluster(reports)
    return 0


if __name__ == "__main__":
    sys.exit(main())
