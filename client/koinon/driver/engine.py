"""The driver under both clients: one event loop that carries out the core's decisions.

The engine is the client's access to its cluster, plus its operations: ``singles``, single
operations, and ``rows``, operations over many rows. It connects, closes, opens keyspaces, and
checks for silent nodes. Routing, retries and the meaning of errors are decided in ``koinon.core``.
All methods run on the engine's loop unless their docstrings say otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from koinon.core.retry import RetryAfter
from koinon.core.target import Target, target_named
from koinon.driver import forks, request_ids
from koinon.driver.cluster_access import SLOW_S, ClusterAccess
from koinon.driver.resp.link import RespLink
from koinon.driver.row_operations import RowOperations
from koinon.driver.rpc.node_link import Link
from koinon.driver.single_operations import SingleOperations
from koinon.options import ClientOptions
from koinon_proto.contract import convert
from koinon_proto.contract.errors import UnavailableError
from koinon_proto.contract.keyspaces import DEFAULT

_SUSPECT_S = 0.25  # between two requests about a silent node


class Engine(ClusterAccess):
    """The engine of one client. Make it on its loop; call ``start`` before use."""

    def __init__(
        self, seeds: Sequence[str], options: ClientOptions, *, threads: bool = False
    ) -> None:
        forks.holds_channels(self)
        super().__init__(seeds, options, threads=threads)
        self.singles = SingleOperations(self)
        self.rows = RowOperations(self, self.singles.resp_link)
        self._opened: Target | None = None  # the keyspace that ``options`` names

    async def start(self) -> None:
        """Fetch the table within the default timeout; on failure, close.

        Raises:
            ClusterNotReadyError, UnavailableError, WrongClusterError, UnknownKeyspaceError
        """
        try:
            with request_ids.operation():
                await self.discovery.first_table(self.options.timeout_ms)
            self._opened = await self.open_keyspace(self.options.keyspace)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """End every operation in flight and close the channels."""
        if self.closed:
            return
        self.closed = True
        if self.cancel_look is not None:
            self.cancel_look()
        self.discovery.close()
        tasks = [task for task in self.tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.singles.close()
        await asyncio.gather(*[link.close() for link in self.links.values()])

    @property
    def target(self) -> Target:
        """The keyspace of operations that name none. From any thread."""
        assert self._opened is not None, "start() has returned"
        return self._opened

    async def open_keyspace(self, name: str) -> Target:
        """Return the keyspace of this name. Except for ``default``, ask the coordinators for a
        newer table first: the keyspace may be new, or a different one of the same name. If no
        coordinator answers, use the client's table.

        Raises:
            UnknownKeyspaceError: there is no such keyspace.
        """
        if name not in ("", DEFAULT):
            with contextlib.suppress(UnavailableError):
                version = self.router.table_version
                status = await self.discovery.cluster_status(self.options.timeout_ms, version)
                self.router.on_update(convert.update_from_proto(status.table))
        return target_named(name, self.routing())

    def look_for_silent_nodes(self) -> None:
        """Ask for the table if a node has not replied for long. Its queued operations then go to
        the new owners; its sent operations fail once the table says that the node is gone.
        """
        self.cancel_look = None
        if self.closed:
            return
        links: list[Link | RespLink] = [*self.links.values(), *self.singles.resp_links]
        silences = [link.silence_s for link in links]
        silent = [
            link for link, silence_s in zip(links, silences, strict=True) if silence_s >= SLOW_S
        ]
        addresses = {link.address for link in silent}
        routing = self.routing()
        for link in silent:
            if not routing.is_live(link.address):
                link.drop()
            elif isinstance(link, RespLink):
                link.ask_elsewhere()
        self.singles.redirect(addresses)
        if silent:
            again, owned = RetryAfter(_SUSPECT_S, refresh=True), routing.owned_by([*addresses])
            with request_ids.operation(silent[0].last_request):
                self.cancel_look = self.discovery.on_news(
                    self.look_for_silent_nodes, again, routing.revision, owned
                )
        elif any(silences):
            self.watch_answers()
