"""One node process: the parts, wired, and their orderly start and end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import grpc

from koinon_node.agent import Agent
from koinon_node.config import Limits, NodeConfig
from koinon_node.core.assignment import Adoption
from koinon_node.core.replica import PendingWrites
from koinon_node.engine import Engine
from koinon_node.service import KeyValueService, NodeTableService
from koinon_node.state import NodeState, WallClock
from koinon_node.storage import Store
from koinon_node.writer import Writer
from koinon_proto import rpc
from koinon_proto.errors import ConfigurationError, InternalError, StorageFullError
from koinon_proto.v1 import kv_pb2_grpc, membership_pb2, table_pb2_grpc

log = logging.getLogger(__name__)

SERVICES = ("koinon.v1.KeyValue", "koinon.v1.TableService")
_HEALTH_INTERVAL_S = 0.05
_RECLAIM_INTERVAL_S = 0.5
_RECLAIM_ROWS = 256
_RECLAIM_PAUSE_S = 0.02
_STOP_GRACE_S = 2.0
_STATS_INTERVAL_S = 1.0
_NO_ROOM_PAUSE_S = 1.0


class Node:
    """Start it, wait for ``run`` to end."""

    def __init__(self, config: NodeConfig, limits: Limits | None = None) -> None:
        self._config = config
        self._limits = limits or Limits()
        self._state = NodeState(config.node_id)
        self._fatal: BaseException | None = None
        self._ended = asyncio.Event()
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stats = membership_pb2.NodeStats()

    async def run(self) -> None:
        """Serve until ``stop`` is called.

        Raises:
            KoinonError: what ended the node, if it was not ``stop``.
        """
        self._loop = loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as opened:
            store = Store(self._config.store)
            opened.callback(lambda: store.close(clean=False) if not self._closed else None)
            store.claim(self._config.node_id)
            pending = PendingWrites()
            writer = Writer(
                store, pending, self._config.node_id, self._limits, self._on_writer_lost
            )
            await writer.start()
            engine = Engine(self._state, store, writer, pending, self._limits, WallClock())
            server, health = await self._serve(engine)
            agent = Agent(
                self._config,
                store.identity(),
                {p: epochs.primary_epoch for p, epochs in store.seen_epochs.items()},
                self._state,
                _Host(engine, writer, self),
                self._end_from_thread,
            )
            tasks = [
                asyncio.create_task(self._watched(work))
                for work in (
                    self._tell_health(health),
                    self._reclaim(engine, writer),
                    self._collect_stats(engine, store, writer),
                )
            ]
            agent.start(loop)
            log.info(
                "node started node=%s listen=%s data=%s",
                self._config.node_id,
                self._config.listen,
                self._config.store.directory,
            )
            await self._ended.wait()
            await health.enter_graceful_shutdown()
            await server.stop(_STOP_GRACE_S)
            for task in tasks:
                task.cancel()
            await loop.run_in_executor(None, agent.stop)
            clean = await writer.stop()
            store.close(clean=clean)
            self._closed = True
        if self._fatal is not None:
            raise self._fatal
        log.info("node stopped node=%s", self._config.node_id)

    def stop(self) -> None:
        """End ``run``: stop taking calls, drain writes, close the store."""
        self._ended.set()

    def _end_from_thread(self, error: BaseException) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._end, error)

    def _end(self, error: BaseException) -> None:
        self._fatal = self._fatal or error
        self._ended.set()

    def _on_writer_lost(self, reason: str) -> None:
        # What was in flight has an unknown fate, and nothing may be served on top of it.
        log.critical("store failed: the node stops reason=%s", reason)
        self._end(InternalError(reason=f"{reason}; see its message above"))

    async def _serve(self, engine: Engine) -> tuple[grpc.aio.Server, Any]:
        rpc.raise_descriptor_limit()
        server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
        for add, servicer in (
            (kv_pb2_grpc.add_KeyValueServicer_to_server, KeyValueService(engine, self._state)),
            (table_pb2_grpc.add_TableServiceServicer_to_server, NodeTableService(self._state)),
        ):
            add(servicer, server)  # type: ignore[no-untyped-call]
        health = await rpc.add_health_and_reflection(server, SERVICES)
        try:
            bound = server.add_insecure_port(self._config.listen)
        except RuntimeError as error:
            raise ConfigurationError(
                reason=f"listen {self._config.listen}: cannot be bound ({error})"
            ) from error
        if not bound:
            raise ConfigurationError(reason=f"listen {self._config.listen}: cannot be bound")
        await self._set_health(health, False)
        await server.start()
        return server, health

    # --- background work -------------------------------------------------------------------

    async def _watched(self, work: Any) -> None:
        try:
            await work
        except Exception as error:
            log.exception("background work failed")
            self._end(error)

    async def _tell_health(self, health: Any) -> None:
        told = False
        while True:
            serving = self._state.serving()
            if serving != told:
                await self._set_health(health, serving)
                told = serving
            await asyncio.sleep(_HEALTH_INTERVAL_S)

    async def _set_health(self, health: Any, serving: bool) -> None:
        from grpc_health.v1 import health_pb2

        status = health_pb2.HealthCheckResponse
        for name in ("", *SERVICES):
            await health.set(name, status.SERVING if serving else status.NOT_SERVING)

    async def _reclaim(self, engine: Engine, writer: Writer) -> None:
        """Reclaim expired records in small steps, only while the writer has little to do."""
        while True:
            more = True
            while more and not writer.pending_rows:
                more = await engine.reclaim_step(_RECLAIM_ROWS)
                await asyncio.sleep(_RECLAIM_PAUSE_S)
            await asyncio.sleep(_RECLAIM_INTERVAL_S)

    async def _collect_stats(self, engine: Engine, store: Store, writer: Writer) -> None:
        read, written, at = engine.rows_read, engine.rows_written, time.monotonic()
        while True:
            now = time.monotonic()
            elapsed_s = max(now - at, 0.001)
            self._stats = membership_pb2.NodeStats(
                records=store.count(),
                used_bytes=writer.used_bytes,
                map_bytes=self._config.store.map_size_bytes,
                reads_per_second=(engine.rows_read - read) / elapsed_s,
                writes_per_second=(engine.rows_written - written) / elapsed_s,
            )
            read, written, at = engine.rows_read, engine.rows_written, now
            await asyncio.sleep(_STATS_INTERVAL_S)

    @property
    def stats(self) -> membership_pb2.NodeStats:
        return self._stats


class _Host:
    """The agent's view of the event loop's side."""

    def __init__(self, engine: Engine, writer: Writer, node: Node) -> None:
        self._engine = engine
        self._writer = writer
        self._node = node

    async def adopt(self, adoptions: Sequence[Adoption]) -> None:
        await _when_there_is_room(lambda: self._engine.adopt(adoptions))

    async def put_meta(self, values: Mapping[bytes, str]) -> None:
        await _when_there_is_room(lambda: self._writer.put_meta(values))

    def stats(self) -> membership_pb2.NodeStats:
        return self._node.stats


async def _when_there_is_room(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Do the work, again and again while the disk is full: ending would not make room either."""
    while True:
        try:
            return await work()
        except StorageFullError as error:
            log.warning("no room even for metadata: tries again reason=%s", error.reason)
            await asyncio.sleep(_NO_ROOM_PAUSE_S)
