"""A simulated storage node: a disk, and lives of the real parts on it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from koinon_node.bulk_load.merge_scheduler import MergeScheduler
from koinon_node.bulk_load.stager import Prepared, Stager
from koinon_node.core.formats import records
from koinon_node.core.formats.records import U32Array
from koinon_node.core.membership.assignment import Adoption
from koinon_node.core.writes.atomic_batch import Check
from koinon_node.core.writes.change_tail import ChangeTail
from koinon_node.partition import request_limits
from koinon_node.partition.batches import (
    AtomicAnswer,
    AtomicBatch,
    Durability,
    ReadAnswer,
    WriteAnswer,
    WriteBatch,
)
from koinon_node.partition.change_feeds import ChangeFeeds, FeedMessage, FeedRequest, Position
from koinon_node.partition.copy_drops import CopyDropper
from koinon_node.partition.engine import Engine
from koinon_node.partition.serving_context import ServingContext
from koinon_node.ports import FollowerEnd, PeerLostError
from koinon_node.replication.commit_tracker import CommitTracker
from koinon_node.replication.follower import Follower
from koinon_node.replication.replicator import Replicator
from koinon_node.state import NodeState, WallClock
from koinon_node.storage.environment import DATA_DB
from koinon_node.storage.index_sweeper import in_steps
from koinon_node.storage.local_replicas import LocalReplicas
from koinon_node.storage.sizes import SizeEstimates
from koinon_node.storage.writer import Writer
from koinon_node.storage.writer_channel import WriterChannel
from koinon_proto.contract.access import Action
from koinon_proto.contract.errors import (
    KoinonError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from koinon_proto.contract.keyspaces import DEFAULT_ID
from koinon_proto.contract.table import NodeInfo, NodeNumber, Table
from koinon_proto.security.authentication import Authenticator
from koinon_proto.v1 import membership_pb2, replication_pb2
from tests.checkers.applied import noting
from tests.simulation.agent import SimulatedAgent, while_no_room
from tests.simulation.disks import Disk, SimulatedChannel, SimulatedLogDisk, logged
from tests.simulation.loop import Process, VirtualLoop
from tests.simulation.network import Network, StreamEnd

if TYPE_CHECKING:
    from tests.simulation.cluster import Simulation

RECLAIM_ROWS = 8
FEED_MESSAGES = 3  # that one call of a reader gets
EPOCH_MS = 1_700_000_000_000


class VirtualWallClock(WallClock):
    """A node's wall clock: not quite another node's."""

    def __init__(self, loop: VirtualLoop, offset_ms: int) -> None:
        super().__init__()
        self._loop = loop
        self._offset_ms = offset_ms

    def now_ms(self) -> int:
        return EPOCH_MS + self._offset_ms + int(self._loop.now * 1000)


class SimulatedPeers:
    """ports.Peers over the simulated network."""

    def __init__(
        self, network: Network, process: Process, on_page: Callable[[str, str], None]
    ) -> None:
        self._network = network
        self._process = process
        self._on_page = on_page  # is told who has pulled a page, and of whom

    async def follow(self, node: NodeInfo) -> FollowerEnd:
        return self._network.connect(self._process, self._process.name, node.node_id)

    async def read_page(
        self, node: NodeInfo, request: replication_pb2.ReadPageRequest
    ) -> replication_pb2.RecordPage:
        page: replication_pb2.RecordPage = await self._call(node, "read_page", request)
        self._on_page(self._process.name, node.node_id)
        return page

    async def read_keys(
        self, node: NodeInfo, request: replication_pb2.ReadKeysRequest
    ) -> replication_pb2.RecordPage:
        page: replication_pb2.RecordPage = await self._call(node, "read_keys", request)
        return page

    async def _call(self, node: NodeInfo, service: str, request: Any) -> Any:
        return await self._network.call(self._process.name, node.node_id, service, request)


class Life:
    """One process of a node: what node.py wires, but for what is outside."""

    def __init__(self, node: SimulatedNode) -> None:
        simulation = node.simulation
        loop, rng = simulation.loop, simulation.rng

        def now() -> float:
            return loop.now + node.offset_s

        self.node = node
        self.process = Process(loop, node.name)
        self.store = node.disk.open()
        self.state = NodeState(node.name, now, now, VirtualWallClock(loop, node.offset_ms))
        self._gate = Authenticator(lambda: self.state.access, takes_tls=True)
        commit_s = simulation.scenario.commit_s
        self._stored = SimulatedChannel(loop, rng, self.process, self.store, node.disk, commit_s)
        self._logged: SimulatedLogDisk | None = None
        self._channel: WriterChannel = self._stored
        if node.disk.logged:
            self._logged = SimulatedLogDisk(loop, rng, self.process, node.disk, commit_s)
            self._channel = logged(self._stored, self.store, rng, self._logged)
        self.started = self.leaving = False
        self.process.spawn(self._run())

    async def _run(self) -> None:
        node, simulation, limits = self.node, self.node.simulation, self.node.simulation.limits
        state, store = self.state, self.store
        local = LocalReplicas(store, node.name, limits, simulation.scenario.journal_rows)
        self.agent = agent = SimulatedAgent(
            node.name,
            node.rack,
            store,
            state,
            self,
            simulation.network,
            [member.name for member in simulation.group.members],
            simulation.rng,
        )
        commits = CommitTracker(local, state, agent.on_ready)
        self._writer = writer = Writer(
            local, commits, limits, self._on_writer_lost, self._channel, state.now
        )
        await writer.start()
        self.replicator = Replicator(local, commits, writer, agent, limits, SizeEstimates())
        note = simulation.checker.on_decided
        self.replicator.submit = noting(self.replicator.submit, note)  # type: ignore[method-assign]
        self.engine = Engine(ServingContext(local, state, writer, self.replicator, limits))
        commits.tail = ChangeTail(simulation.tail_bytes)
        self.feeds = ChangeFeeds(self.engine.context, commits)
        self.stager = Stager(self.engine)
        self.merger = MergeScheduler(self.engine, agent)
        peers = SimulatedPeers(simulation.network, self.process, simulation.faults.on_page)
        seeded = random.Random(simulation.rng.random())
        self.follower = Follower(local, state, writer, peers, limits, seeded)
        self.drops = CopyDropper(local, state, self.follower)
        node.machine.services = {
            "read": self._read,
            "may_read": self._may_read,
            "write": self._write,
            "commit": self._commit,
            "changes": self._changes,
            "stage": self.stager.stage,
            "prepare": self._prepare,
            "read_page": self.replicator.pages.read_page,
            "read_keys": self.replicator.pages.read_keys,
        }
        node.machine.accept = self._accept
        self.started = True
        simulation.keyspaces.checker.on_started(self)
        self.process.thread().spawn(agent.run())
        async with asyncio.TaskGroup() as group:
            for work in (
                self.replicator.run(),
                self.follower.run(),
                self.drops.run(),
                self.merger.run(),
                in_steps(self.engine.sweeper.step, rows=RECLAIM_ROWS),
            ):
                group.create_task(work)

    def _on_writer_lost(self, reason: str) -> None:
        raise AssertionError(reason)

    # --- services ----------------------------------------------------------------------------

    async def _may_read(self, token: str, key: bytes) -> tuple[int, bool]:
        """Answer a caller that shows this token: by which access state, and whether it may."""
        self.state.check_lease()
        version = self.state.access.version
        try:
            self._gate.who(None, lambda: token).check_keys(Action.READ, DEFAULT_ID, [key])
        except (PermissionDeniedError, UnauthenticatedError):
            return version, False
        return version, True

    def _check_keyspace(
        self, keyspace_id: int, partition_ids: Sequence[int] | U32Array, table_version: int
    ) -> None:
        """Check what a request names, as the services do (``serving.service``)."""
        keyspace = request_limits.known_keyspace(self.state.table(), keyspace_id, table_version)
        request_limits.check_partitions(keyspace, partition_ids)

    async def _read(
        self,
        keys: list[bytes],
        partition_ids: U32Array,
        table_version: int,
        keyspace_id: int,
    ) -> ReadAnswer:
        self._check_keyspace(keyspace_id, partition_ids, table_version)
        answer = await self.engine.reads.read(
            keys, partition_ids, table_version, want_versions=True
        )
        missing = set(answer.missing)
        self.node.simulation.checker.on_acknowledged(
            [
                (int(partition_ids[row]), key, int(answer.versions[row]))
                for row, key in enumerate(keys)
                if row not in missing and int(partition_ids[row]) not in answer.refusals
            ]
        )
        return answer

    async def _write(self, batch: WriteBatch, keyspace_id: int) -> WriteAnswer:
        self._check_keyspace(keyspace_id, batch.partition_ids, batch.table_version)
        answer = await self.engine.writes.write(batch)
        if batch.durability is Durability.ALL_IN_SYNC:
            written = np.flatnonzero(answer.versions).tolist()
            self.node.simulation.checker.on_acknowledged(
                [
                    (int(batch.partition_ids[r]), batch.keys[r], int(answer.versions[r]))
                    for r in written
                    if r not in answer.row_errors
                ]
            )
        return answer

    async def _commit(self, batch: AtomicBatch, keyspace_id: int) -> AtomicAnswer:
        self._check_keyspace(keyspace_id, [batch.partition_id], batch.table_version)
        answer = await self.engine.writes.commit(batch)
        written = [
            (batch.partition_id, key, answer.version)
            for key, step, result in zip(batch.keys, batch.steps, answer.results, strict=True)
            if answer.version and result is not False and not isinstance(step, Check)
        ]
        self.node.simulation.checker.on_acknowledged(written)
        return answer

    async def _changes(self, position: Position) -> list[FeedMessage]:
        """Return the next messages of a partition's feed."""
        feed = self.feeds.open(FeedRequest(positions=[position]))
        messages: list[FeedMessage] = []
        try:
            while len(messages) < FEED_MESSAGES and (message := await feed.next()) is not None:
                messages.append(message)
                for advance in message.advances:
                    p = advance.position.partition_id
                    self.node.simulation.checker.on_acknowledged(
                        [(p, change.key, change.sequence) for change in advance.changes]
                    )
                if not message.rows:
                    break  # a reader of a stream would wait
        finally:
            feed.close()
        return messages

    async def _prepare(
        self, load_id: int, attempts: frozenset[int], rows: dict[int, int], table_version: int
    ) -> Prepared:
        return await self.stager.prepare(
            load_id, attempts, rows, table_version, find_duplicates=False
        )

    async def _accept(self, end: StreamEnd) -> None:
        """Serve a follower; it is told why if that ends by an error (as in replication_grpc.py)."""
        try:
            await self.replicator.followers.serve(end)
        except PeerLostError:
            end.close()
        except KoinonError as error:
            end.close(error)
        else:
            end.close()

    # --- the agent's host --------------------------------------------------------------------

    async def adopt(self, adoptions: Sequence[Adoption]) -> None:
        await self.drops.erased_past([a.partition_id for a in adoptions])
        await while_no_room(lambda: self.replicator.adopt(adoptions))
        self.node.simulation.keyspaces.checker.on_adopted(self, adoptions)

    async def put_meta(self, values: dict[bytes, str]) -> None:
        await while_no_room(lambda: self._writer.put_meta(values))

    def stats(self) -> membership_pb2.NodeStats:
        out_ms = round(self._writer.disk.out_s * 1000)
        return membership_pb2.NodeStats(commit_out_ms=out_ms)

    def erased(self) -> Sequence[int]:
        return self.drops.erased

    def on_table(self, table: Table, number: NodeNumber, node_epoch: int) -> None:
        self.follower.on_table(table, number, node_epoch)
        self.replicator.on_table(table, number, node_epoch)
        self.drops.on_table(table, number, node_epoch)
        self.merger.on_table(table, number, node_epoch)

    # --- what is asked of it -----------------------------------------------------------------

    def serves(self, partition_id: int) -> bool:
        served = self.state.served
        return (
            self.state.serving()
            and partition_id < len(served.epochs)
            and bool(served.epochs[partition_id])
            and not self.state.stopped[partition_id]
        )

    def records_of(self, partition_id: int) -> dict[bytes, tuple[int, bytes]]:
        """Return what the store holds, of all kinds: {kind and key: (sequence, value)}, tombstones
        left out.
        """
        held = self.held_of(partition_id)
        return {key: (r.sequence, r.value) for key, r in held.items() if not r.tombstone}

    def held_of(self, partition_id: int) -> dict[bytes, records.Record]:
        """Return all that the store holds: {kind and key: record}."""
        held = dict(self.store.read_range(partition_id, b"", 0, 1_000_000, 1 << 40).rows)
        prefix = records.prefix_of(partition_id)
        for layer in self.store.overlay._layers:  # in the order of the log
            for key, row in layer.databases[DATA_DB].items():
                if key.startswith(prefix):
                    held.pop(key, None)
                    held.update({} if row is None else {key: row})
        return {key[2:]: records.decode_record(data) for key, data in held.items()}

    def kill(self) -> None:
        self.process.kill()
        self._stored.kill()
        if self._logged is not None:
            self._logged.kill()
        self.store.close(clean=False)


class SimulatedNode:
    """One node. ``life`` is None while it is down."""

    def __init__(self, simulation: Simulation, name: str, disk: Disk) -> None:
        rng = simulation.rng
        self.simulation = simulation
        self.name = name
        self.rack = rng.choice(["", "a", "b"])
        self.disk = disk
        self.offset_s = rng.uniform(0, 1000)
        self.offset_ms = rng.randrange(-20, 20)
        self.machine = simulation.network.add(name)
        self.life: Life | None = None

    def boot(self) -> None:
        self.life = Life(self)
        self.machine.process = self.life.process

    def kill(self) -> None:
        if self.life is not None:
            self.machine.process = None
            self.life.kill()
            self.simulation.network.on_killed(self.life.process)
            self.life = None

    def close(self) -> None:
        """The simulation is over."""
        if self.life is not None:
            self.life.store.close(clean=False)
            self.life = None
