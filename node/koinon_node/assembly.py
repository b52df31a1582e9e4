"""Wires the parts of one node process.

Once the agent has published a table, the event loop's parts get it in this order: the primary's
side first, so that partitions are given up before they are followed; then the follower's side; then
the code that deletes copies.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol

from koinon_node.bulk_load.column_reader import ColumnReader
from koinon_node.bulk_load.emptier import Emptier
from koinon_node.bulk_load.merge_scheduler import MergeScheduler
from koinon_node.bulk_load.stager import Stager
from koinon_node.config import Limits, NodeConfig
from koinon_node.core.membership.assignment import Adoption
from koinon_node.grpc.replication_service import ReplicationService
from koinon_node.membership.agent import Agent
from koinon_node.membership.coordinator_calls import Channels, LeaderCalls
from koinon_node.partition.change_feeds import ChangeFeeds
from koinon_node.partition.copy_drops import CopyDropper
from koinon_node.partition.cuts import Cuts
from koinon_node.partition.engine import Engine
from koinon_node.partition.graceful_drain import GracefulDrain
from koinon_node.partition.load import LoadMeter
from koinon_node.partition.row_metrics import RowCounts
from koinon_node.partition.serving_context import ServingContext
from koinon_node.replication.commit_tracker import CommitTracker
from koinon_node.replication.follower import Follower
from koinon_node.replication.peers import NodePeers
from koinon_node.replication.replicator import Replicator
from koinon_node.resp.listener import RedisListener
from koinon_node.resp.passing import Passing
from koinon_node.resp.service import RedisService
from koinon_node.state import NodeState
from koinon_node.storage.checksums import Checksums
from koinon_node.storage.local_replicas import LocalReplicas
from koinon_node.storage.sizes import SizeEstimates
from koinon_node.storage.store import Store
from koinon_node.storage.writer import Writer
from koinon_proto.contract.bounds_gen import COUNT
from koinon_proto.contract.errors import StorageFullError
from koinon_proto.contract.table import NodeNumber, Table
from koinon_proto.process.resources import Use
from koinon_proto.security.authentication import Authenticator
from koinon_proto.security.trust import Trust
from koinon_proto.v1 import (
    membership_pb2,
)

log = logging.getLogger(__name__)

_NO_ROOM_PAUSE_S = 1.0


class Lifetime(Protocol):
    """Ends the node on behalf of a part."""

    def end(self, error: BaseException) -> None:
        """End the node with the error. Call on the event loop."""

    def end_from_thread(self, error: BaseException) -> None:
        """End the node with the error. Call from any thread."""

    def on_writer_lost(self, reason: str) -> None:
        """Handle the unexpected end of the writer process. Call on the event loop."""


class Parts:
    """The parts of a node, over an open store."""

    def __init__(
        self, config: NodeConfig, limits: Limits, store: Store, state: NodeState, life: Lifetime
    ) -> None:
        local = LocalReplicas(store, config.node_id, limits)
        self.state = state
        self.store = store
        # Reported by heartbeats; the node's background work keeps both up to date.
        self.stats = membership_pb2.NodeStats()
        self.resources: Sequence[Use] = ()
        self.tls_mode = str(config.listening.mode)
        self.open_addresses: tuple[str, ...] = ()  # addresses open to other machines without TLS
        self.progress: Sequence[membership_pb2.ReplicaProgress] = ()
        self.sizes = SizeEstimates()
        dialing = config.listening.dialing()
        channels = Channels(dialing)
        self.gate = Authenticator(
            lambda: state.access,
            takes_tls=config.listening.takes_tls,
            trust=Trust(config.listening.bundle),
            table=lambda: state.served.table,
        )
        self.peers = NodePeers(dialing)
        self.graceful_drain = GracefulDrain()
        self.agent = Agent(
            config, store.identity(), store.seen_epochs, state, _Host(self, life), channels
        )
        self.leader_calls = LeaderCalls(config.node_id, self.agent, channels)
        self.commits = CommitTracker(local, state, self.agent.on_ready)
        self.writer = Writer(local, self.commits, limits, life.on_writer_lost)
        self.replicator = Replicator(
            local, self.commits, self.writer, self.leader_calls, limits, self.sizes
        )
        self.engine = Engine(ServingContext(local, state, self.writer, self.replicator, limits))
        self.feeds = ChangeFeeds(self.engine.context, self.commits)
        self.rows = RowCounts()
        self.replication = ReplicationService(
            self.replicator.followers,
            self.replicator.pages,
            state,
            Checksums(store, self.writer),
            self.sizes,
            local.primaries,
        )
        self.redis = self._redis(config)
        self.cuts = Cuts(self.engine.context, self.commits)
        self.stager = Stager(self.engine, self.rows)
        self.column_reader = ColumnReader(self.engine, self.rows)
        self.merger = MergeScheduler(self.engine, self.leader_calls)
        self.follower = Follower(local, state, self.writer, self.peers, limits, random.Random())
        self.load = LoadMeter(self.engine.context.traffic, self.follower.applier)
        self.drops = CopyDropper(local, state, self.follower)

    def _redis(self, config: NodeConfig) -> RedisListener:
        """Return the ports for the Redis protocol, by which other nodes follow this one, too."""
        service = RedisService(
            self.engine,
            Emptier(self.state, self.leader_calls),
            self.rows,
            self.graceful_drain,
            self.replication,
            self.sizes,
        )
        if config.resp_proxy:
            service.passing = Passing(self.state, config.listening.dialing())
        return RedisListener(service, config.listening, self.gate, config.audit)

    @property
    def old_store(self) -> str:
        """The reason why this process's store may lack acknowledged writes; '': it does not."""
        return self.store.distrusted_for or self.agent.old_store


class _Host:
    """The event loop's side, for the agent."""

    def __init__(self, parts: Parts, life: Lifetime) -> None:
        self._parts = parts
        self._life = life

    async def adopt(self, adoptions: Sequence[Adoption]) -> None:
        await self._parts.drops.erased_past([a.partition_id for a in adoptions])
        await _when_there_is_room(lambda: self._parts.replicator.adopt(adoptions))

    async def put_meta(self, values: Mapping[bytes, str]) -> None:
        await _when_there_is_room(lambda: self._parts.writer.put_meta(values))

    def on_table(self, table: Table, number: NodeNumber, node_epoch: int) -> None:
        parts = self._parts
        parts.state.quotas.take(parts.state.served.shares)
        try:
            parts.replicator.on_table(table, number, node_epoch)
            parts.follower.on_table(table, number, node_epoch)
            parts.drops.on_table(table, number, node_epoch)
            parts.merger.on_table(table, number, node_epoch)
            parts.peers.on_table(table)
        except Exception as error:
            log.exception("a table could not be applied version=%d", table.table_version)
            self._life.end(error)

    def stats(self) -> membership_pb2.NodeStats:
        stats = membership_pb2.NodeStats()
        stats.CopyFrom(self._parts.stats)
        stats.tls_mode = self._parts.tls_mode
        stats.old_store = self._parts.old_store
        stats.clock_ahead_ms = self._parts.agent.clock_ahead_ms
        stats.open_addresses.extend(self._parts.open_addresses)
        stats.commit_out_ms = min(round(self._parts.writer.disk.out_s * 1000), COUNT)
        return stats

    def sizes(self) -> membership_pb2.PartitionSizes:
        partition_ids, _, size = self._parts.sizes.columns()
        return membership_pb2.PartitionSizes(partition_ids=partition_ids, bytes=size)

    def load(self, lag_s: float) -> membership_pb2.NodeLoad:
        return self._parts.load.report(lag_s)

    def progress(self) -> Sequence[membership_pb2.ReplicaProgress]:
        return self._parts.progress

    def erased(self) -> Sequence[int]:
        return self._parts.drops.erased

    def on_fatal(self, error: BaseException) -> None:
        self._life.end_from_thread(error)


async def _when_there_is_room(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Do the work; retry while the disk is full, since ending the process would not make room."""
    while True:
        try:
            return await work()
        except StorageFullError as error:
            log.warning("no room even for metadata, retrying reason=%s", error.reason)
            await asyncio.sleep(_NO_ROOM_PAUSE_S)
