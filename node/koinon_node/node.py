"""One node process: starts and stops its parts in order, and runs its background work."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from dataclasses import replace
from typing import Any

from koinon_node.assembly import Parts
from koinon_node.config import CONTROL_LANE, DATA_LANE, REPLY_BYTES, Limits, NodeConfig
from koinon_node.controlled_shutdown import shut_down
from koinon_node.core.membership.lease import NO_LEASE
from koinon_node.grpc.backup_service import BackupService
from koinon_node.grpc.bulk_service import BulkService
from koinon_node.grpc.cursor_service import CursorService
from koinon_node.grpc.feed_service import FeedService
from koinon_node.grpc.key_value_service import KeyValueService, NodeTableService
from koinon_node.grpc.replication_service import NODE_SERVER_OPTIONS
from koinon_node.grpc.traffic_service import TrafficService
from koinon_node.state import NodeState
from koinon_node.storage.sizes import SizeScan
from koinon_node.storage.store import Store
from koinon_node.store_config import KEPT_BYTES
from koinon_proto.contract.errors import ConfigurationError, InternalError
from koinon_proto.process import resources
from koinon_proto.process.pid_file import pid_file
from koinon_proto.process.resources import Use
from koinon_proto.process.rounds import next_round
from koinon_proto.security.exposure import warn_of_strangers
from koinon_proto.server import rpc
from koinon_proto.server.aio_server import GuardedServer
from koinon_proto.server.guard import Guard
from koinon_proto.v1 import (
    backup_pb2_grpc,
    feed_pb2_grpc,
    groups_pb2_grpc,
    kv_pb2_grpc,
    loads_pb2_grpc,
    membership_pb2,
    table_pb2_grpc,
    traffic_pb2_grpc,
)

log = logging.getLogger(__name__)

SERVICES = (
    "koinon.v1.KeyValue",
    "koinon.v1.Bulk",
    "koinon.v1.Feed",
    "koinon.v1.TableService",
    "koinon.v1.Replication",
    "koinon.v1.Traffic",
    "koinon.v1.Backup",
    "koinon.v1.Cursors",
)
_HEALTH_INTERVAL_S = 0.2
_STATS_INTERVAL_S = 1.0
_PROGRESS_INTERVAL_S = 0.2


def _looked_at(directory: str | os.PathLike[str]) -> tuple[os.statvfs_result, list[Use]]:
    return os.statvfs(directory), resources.uses()


def _log_scarce(used: list[Use]) -> None:
    for use in used:
        if use.is_scarce:
            log.warning(
                "a resource is nearly used up resource=%s used=%d limit=%d",
                use.name,
                use.used,
                use.limit,
            )


class Node:
    """A node process. Create it and await ``run``."""

    def __init__(self, config: NodeConfig, limits: Limits | None = None) -> None:
        self._config = config
        self._limits = limits or Limits()
        self.state = NodeState(config.node_id)
        self._fatal: BaseException | None = None
        self._ended = asyncio.Event()
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self) -> None:
        """Serve until ``stop`` is called.

        Raises:
            KoinonError: the error that ended the node, if ``stop`` did not.
        """
        self._loop = loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as opened:
            endpoint = None
            if self._config.metrics_listen:  # its imports are a twentieth of a node's memory
                from koinon_proto.server.metrics_server import MetricsEndpoint

                endpoint = MetricsEndpoint(self._config.metrics_listen, self._config.listening)
                opened.callback(endpoint.close)
            store = Store(self._config.store)
            opened.callback(lambda: store.close(clean=False) if not self._closed else None)
            store.claim(self._config.node_id)
            parts = Parts(self._config, self._limits, store, self.state, self)
            await parts.writer.start()
            guard = Guard(
                DATA_LANE, CONTROL_LANE, REPLY_BYTES, KEPT_BYTES, parts.gate, self._config.audit
            )
            guard.look_at_callers += (
                parts.redis.look_at_callers,
                parts.replication.look_at_callers,
            )
            server, health = await self._serve(parts, guard)
            await self._open_data_ports(parts)
            tasks = self._start_tasks(parts, health)
            parts.agent.start(loop)
            if endpoint is not None:
                from koinon_node.metrics import node_metrics

                endpoint.start(node_metrics(parts, guard))
            self._log_started(parts)
            opened.enter_context(pid_file(self._config.pid_file))
            await self._ended.wait()
            if self._fatal is None:
                await shut_down(parts, server, health)
            await self._stop_parts(parts, server, tasks)
            if endpoint is not None:
                await loop.run_in_executor(None, endpoint.close)
            await parts.peers.close()
            await parts.leader_calls.close()
            clean = await parts.writer.stop()
            await loop.shutdown_default_executor()  # threads that still read the store's map
            store.close(clean=clean)
            self._closed = True
        if self._fatal is not None:
            raise self._fatal
        log.info("node stopped node=%s", self._config.node_id)

    def _start_tasks(self, parts: Parts, health: Any) -> list[asyncio.Task[None]]:
        """Start the tasks that run until the node stops."""
        works = (
            self._report_health(health),
            parts.engine.sweeper.run(),
            self._collect_stats(parts),
            self._collect_progress(parts),
            parts.replicator.run(),
            parts.follower.run(),
            parts.drops.run(),
            parts.merger.run(),
            SizeScan(parts.store, parts.sizes).run(),
        )
        return [asyncio.create_task(self._watched(work)) for work in works]

    def _log_started(self, parts: Parts) -> None:
        """Log that the node serves, and which of its addresses accept unauthenticated clients."""
        config = self._config
        addresses = {
            "--listen": config.listen,
            **{f"--redis-listen {r.keyspace}": r.listen for r in config.redis},
            "--metrics-listen": config.metrics_listen,
        }
        parts.open_addresses = warn_of_strangers(config.listening, addresses)
        log.info(
            "node started node=%s listen=%s data=%s",
            config.node_id,
            config.listen,
            config.store.directory,
        )

    async def _stop_parts(
        self, parts: Parts, server: GuardedServer, tasks: list[asyncio.Task[None]]
    ) -> None:
        """Stop all parts except the writer and the parts that it needs."""
        loop = asyncio.get_running_loop()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # After an error at once, so that other nodes may lead soon.
        await loop.run_in_executor(None, lambda: parts.agent.stop(farewell=True))
        parts.replication.close()
        await parts.redis.stop(0.0)
        await server.stop(0.0)
        self._config.listening.close()
        await loop.run_in_executor(None, self._config.audit.close)

    def stop(self) -> None:
        """End ``run``: stop taking calls, drain writes, close the store."""
        self._ended.set()

    def end_from_thread(self, error: BaseException) -> None:
        """End ``run`` with the error, from any thread."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self.end, error)

    def end(self, error: BaseException) -> None:
        """End ``run`` with the error."""
        self._fatal = self._fatal or error
        self.state.lease = NO_LEASE
        self._ended.set()

    def on_writer_lost(self, reason: str) -> None:
        """Stop the node: the writer process has ended by itself."""
        # The writes in flight have an unknown fate, and the node must not serve above them.
        log.critical("store failed: the node stops reason=%s", reason)
        self.end(InternalError(reason=f"{reason}; see its message above"))

    async def _open_data_ports(self, parts: Parts) -> None:
        """Open the Redis ports, and have the agent register their addresses."""
        opened = [
            endpoint.at_port(await parts.redis.start(endpoint.listen, endpoint.keyspace))
            for endpoint in self._config.redis
        ]
        parts.agent.served_at(replace(self._config, redis=tuple(opened)))

    async def _serve(self, parts: Parts, guard: Guard) -> tuple[GuardedServer, Any]:
        rpc.raise_descriptor_limit()
        server = GuardedServer(guard, NODE_SERVER_OPTIONS)
        traffic = TrafficService(parts.engine.context.traffic, parts.replicator, self.state)
        service = KeyValueService(parts.engine, self.state, parts.rows, parts.graceful_drain)
        kv_pb2_grpc.add_KeyValueServicer_to_server(service, server)
        loads_pb2_grpc.add_BulkServicer_to_server(
            BulkService(parts.stager, parts.column_reader, self.state), server
        )
        backup_pb2_grpc.add_BackupServicer_to_server(BackupService(parts.cuts, self.state), server)
        feed_pb2_grpc.add_FeedServicer_to_server(FeedService(parts.feeds, self.state), server)
        cursors = CursorService(parts.engine, self.state, parts.commits.leading, parts.rows)
        groups_pb2_grpc.add_CursorsServicer_to_server(cursors, server)
        table_pb2_grpc.add_TableServiceServicer_to_server(NodeTableService(self.state), server)
        traffic_pb2_grpc.add_TrafficServicer_to_server(traffic, server)
        parts.replication.add_to(server)
        health = await rpc.add_health_and_reflection(server, SERVICES)
        try:
            bound = self._config.listening.add_port(server, self._config.listen)
        except RuntimeError as error:
            raise ConfigurationError(
                reason=f"listen {self._config.listen}: cannot be bound ({error})"
            ) from error
        if not bound:
            raise ConfigurationError(reason=f"listen {self._config.listen}: cannot be bound")
        guard.floods.ports |= self._config.listening.grpc_ports
        await self._set_health(health, False)
        await server.start()
        return server, health

    # --- background work -------------------------------------------------------------------

    async def _watched(self, work: Any) -> None:
        try:
            await work
        except Exception as error:
            log.exception("background work failed")
            self.end(error)

    async def _report_health(self, health: Any) -> None:
        told = False
        while True:
            serving = self.state.serving()
            if serving != told:
                await self._set_health(health, serving)
                told = serving
            await next_round(_HEALTH_INTERVAL_S)

    async def _set_health(self, health: Any, serving: bool) -> None:
        from grpc_health.v1 import health_pb2

        status = health_pb2.HealthCheckResponse
        for name in ("", *SERVICES):
            await health.set(name, status.SERVING if serving else status.NOT_SERVING)

    async def _collect_stats(self, parts: Parts) -> None:
        traffic, store, writer = parts.engine.context.traffic, parts.store, parts.writer
        read, written, at = traffic.rows_read, traffic.rows_written, time.monotonic()
        while True:
            traffic.flush()
            disk, used = await asyncio.to_thread(_looked_at, store.config.directory)
            used.append(parts.redis.connections_used())
            parts.resources = used
            _log_scarce(used)
            now = time.monotonic()
            elapsed_s = max(now - at, 0.001)
            parts.stats = membership_pb2.NodeStats(
                records=max(0, store.count() - parts.sizes.hidden()),
                used_bytes=writer.used_bytes,
                map_bytes=self._config.store.map_size_bytes,
                reads_per_second=(traffic.rows_read - read) / elapsed_s,
                writes_per_second=(traffic.rows_written - written) / elapsed_s,
                disk_free_bytes=disk.f_bavail * disk.f_frsize,
                disk_bytes=disk.f_blocks * disk.f_frsize,
                reusable_bytes=store.reusable_bytes(writer.used_bytes),
                commit_ms=round(writer.disk.typical_s(now) * 1000),
                scarce=[
                    membership_pb2.ScarceResource(**use._asdict()) for use in used if use.is_scarce
                ],
            )
            read, written, at = traffic.rows_read, traffic.rows_written, now
            table = self.state.served.table
            parts.load.observe(len(table.rows) if table is not None else 0)
            await next_round(_STATS_INTERVAL_S)

    async def _collect_progress(self, parts: Parts) -> None:
        while True:
            parts.progress = [
                membership_pb2.ReplicaProgress(**progress._asdict())
                for progress in parts.follower.progress()
            ]
            await next_round(_PROGRESS_INTERVAL_S)
