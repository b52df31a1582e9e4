"""The ports of the Redis protocol: takes connections, bounds them, and sees them off."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging

from koinon_node.resp.commands import (  # noqa: F401 (they join the table)
    cluster,
    introspection,
    keys,
    koinon_commands,
    replication,
    scans,
    server,
    strings,
    transactions,
)
from koinon_node.resp.commands.table import COMMANDS
from koinon_node.resp.connection import Connection
from koinon_node.resp.service import RedisService
from koinon_proto.contract.errors import ConfigurationError
from koinon_proto.security.audit import NO_AUDIT, Audit
from koinon_proto.security.authentication import Authenticator
from koinon_proto.security.sockets import Server, serve
from koinon_proto.security.transport import Listening
from koinon_proto.server import requests

log = logging.getLogger(__name__)

CONNECTIONS_MAX = 16_384
HELD_BYTES_MAX = 128 * 1024 * 1024
"""Of all connections together: commands that are coming in, replies that do not leave."""
_PAUSE_S = 0.01


class RedisListener:
    """Accepts connections of Redis clients at one or more ports, in bounds that are of all of them
    together. For the event loop only.
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
        service.connected = lambda: len(self.connections)
        self.closed_for = {"too_many": 0, "holds_most": 0, "protocol_error": 0}
        self.held_bytes = 0
        self._numbers = itertools.count(1)
        self._servers: list[Server] = []

    async def start(self, address: str, keyspace: str) -> None:
        """Listen at ``host:port`` too, for clients of the keyspace of this name.

        Raises:
            ConfigurationError: it cannot be bound.
        """
        for spec in COMMANDS.values():
            requests.methods[spec.method.service, spec.method.name] = spec.method
        try:
            server = await serve(
                address, lambda: Connection(self, next(self._numbers), keyspace), self._listening
            )
        except OSError as error:
            raise ConfigurationError(
                reason=f"redis-listen {address}: cannot be bound ({error.strerror or error})"
            ) from error
        self._servers.append(server)

    async def stop(self, grace_s: float) -> None:
        """Take no more connections; answer what is under way, for so long at most."""
        for listening in self._servers:
            listening.close()
        for connection in list(self.connections):
            connection.finish()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while self.connections:  # noqa: ASYNC110 (once, at the end)
                    await asyncio.sleep(_PAUSE_S)
        for connection in list(self.connections):
            connection.abort()
        await self.service.close()

    def look_at_callers(self) -> None:
        """Tell those clients to go whose certificates' authorities are trusted no more."""
        for connection in self.connections:
            connection.session.look()

    # --- what connections tell -------------------------------------------------------------

    def not_understood(self) -> None:
        """Count a connection that sent something that is no command."""
        self.closed_for["protocol_error"] += 1

    def opened(self, connection: Connection) -> bool:
        if len(self.connections) >= CONNECTIONS_MAX:
            self.closed_for["too_many"] += 1
            return False
        self.connections.add(connection)
        return True

    def closed(self, connection: Connection) -> None:
        self.connections.discard(connection)
        self.holds(connection, 0)

    def holds(self, connection: Connection, size: int) -> None:
        """Note it; where all hold too much, close who holds most, strangers first."""
        self.held_bytes += size - connection.held_bytes
        connection.held_bytes = size
        if self.held_bytes > HELD_BYTES_MAX:
            most = max(self.connections, key=_stranger_and_held)
            self.closed_for["holds_most"] += 1
            log.warning(
                "connection closed: it holds most bytes=%d of_all=%d peer=%s",
                most.held_bytes,
                self.held_bytes,
                most.session.peer,
            )
            most.abort()


def _stranger_and_held(connection: Connection) -> tuple[bool, int]:
    return connection.held_bytes > 0 and not connection.is_known, connection.held_bytes
