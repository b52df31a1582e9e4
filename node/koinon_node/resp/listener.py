"""The ports of the Redis protocol: accepts connections, limits them, and closes them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from typing import cast

from koinon_node.resp.commands import table
from koinon_node.resp.connection import Connection
from koinon_node.resp.memory_budget import Holder, MemoryBudget
from koinon_node.resp.service import RedisService
from koinon_proto.contract.errors import ConfigurationError
from koinon_proto.process.logs import LinesPerSecond
from koinon_proto.process.resources import Use
from koinon_proto.security.audit import NO_AUDIT, Audit
from koinon_proto.security.authentication import Authenticator, Version
from koinon_proto.security.sockets import Server, serve, serve_at_chosen
from koinon_proto.security.transport import Listening
from koinon_proto.server import requests

log = logging.getLogger(__name__)

CONNECTIONS_MAX = 16_384
_PAUSE_S = 0.01
_TICK_S = 1.0
_lines = LinesPerSecond(1)


class RedisListener:
    """Accepts connections of Redis clients at one or more ports, with limits over all ports
    together. Belongs to the event loop.
    """

    def __init__(
        self,
        service: RedisService,
        listening: Listening,
        gate: Authenticator,
        audit: Audit = NO_AUDIT,
    ) -> None:
        self.audit = audit
        self.service = service
        self.gate = gate
        self._listening = listening
        self.connections: set[Connection] = set()
        self.closed_for = {"too_many": 0, "holds_most": 0, "protocol_error": 0}
        self.budget = MemoryBudget(time.monotonic, self._on_cut)
        self._ticking: asyncio.TimerHandle | None = None
        self._numbers = itertools.count(1)
        self._servers: list[Server] = []

    async def start(self, address: str, keyspace: str) -> int:
        """Listen at ``host:port`` for clients of this keyspace; return the port, which the system
        chooses for port 0.

        Raises:
            ConfigurationError: the address cannot be bound.
        """
        port = int(address.rpartition(":")[2])

        def opened() -> Connection:
            return Connection(self, next(self._numbers), keyspace)

        for spec in table.ALL:
            requests.methods[spec.method.service, spec.method.name] = spec.method
        try:
            if port:
                server = await serve(address, opened, self._listening)
            else:
                server, port = await serve_at_chosen(address, opened, self._listening)
        except OSError as error:
            raise ConfigurationError(
                reason=f"redis-listen {address}: cannot be bound ({error.strerror or error})"
            ) from error
        self._servers.append(server)
        if self._ticking is None:
            self._tick()
        return port

    async def stop(self, grace_s: float) -> None:
        """Stop listening; answer the commands under way, for at most ``grace_s``."""
        for listening in self._servers:
            listening.close()
        if self._ticking is not None:
            self._ticking.cancel()
        for connection in list(self.connections):
            connection.finish()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while self.connections:  # noqa: ASYNC110 (once, at the end)
                    await asyncio.sleep(_PAUSE_S)
        for connection in list(self.connections):
            connection.abort()
        await self.service.close()

    def look_at_callers(self, version: Version, now_s: float) -> None:
        """Close the connections of clients that have lost their rights; ask clients to reconnect
        whose certificate authorities are no longer trusted.
        """
        for connection in list(self.connections):
            standing = connection.session.standing
            if standing.fault is not None or standing.is_stale(version, now_s):
                connection.close_if_refused()

    def connections_used(self) -> Use:
        """Return the number of open connections, and the most that may be open."""
        return Use("connections of the Redis ports", len(self.connections), CONNECTIONS_MAX)

    # --- called by connections -------------------------------------------------------------

    def not_understood(self) -> None:
        """Count a connection that sent bytes which are no command."""
        self.closed_for["protocol_error"] += 1

    def opened(self, connection: Connection) -> bool:
        if len(self.connections) >= CONNECTIONS_MAX:
            self.closed_for["too_many"] += 1
            self.service.listening.rejected += 1
            return False
        self.connections.add(connection)
        self.service.listening.received += 1
        self.service.listening.connected = len(self.connections)
        return True

    def closed(self, connection: Connection) -> None:
        self.connections.discard(connection)
        self.service.listening.connected = len(self.connections)
        self.budget.release(connection)

    # --- internal --------------------------------------------------------------------------

    def _tick(self) -> None:
        self.budget.cut_slow()
        self._ticking = asyncio.get_running_loop().call_later(_TICK_S, self._tick)

    def _on_cut(self, count: int, size: int, first: Holder) -> None:
        self.closed_for["holds_most"] += count
        if _lines.may_log():
            log.warning(
                "connections closed: they hold most count=%d bytes=%d left=%d first=%s unlogged=%d",
                count,
                size,
                self.budget.held_bytes,
                cast(Connection, first).session.peer,
                _lines.take_unlogged(),
            )
