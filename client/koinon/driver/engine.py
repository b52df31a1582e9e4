"""The driver under both clients: one event loop that carries out what the core decides.

All methods run on the engine's loop, unless they say otherwise. The engine owns the channels, the
table refresh and the watch for silent nodes, and with them two parts: ``singles``, the single
operations, and ``rows``, those over many rows. Which rows go where, what is retried and what an
error means is decided in ``koinon.core``.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine, Sequence
from random import Random
from typing import TYPE_CHECKING, Any

from koinon.core import limits
from koinon.core.retry import RetryAfter, RetryPolicy
from koinon.core.routing import Router, Routing
from koinon.core.target import Target, target_named
from koinon.driver import forks, request_ids
from koinon.driver.node_link import Link
from koinon.driver.observing import Observing
from koinon.driver.resp.link import RespLink
from koinon.driver.resp.pool import SOCKETS_MAX, Pools
from koinon.driver.row_operations import RowOperations
from koinon.driver.single_operations import SingleOperations
from koinon.driver.table_refresh import Cancel, TableRefresh
from koinon.options import ClientOptions
from koinon_proto.contract import convert
from koinon_proto.contract.errors import (
    ClientClosedError,
    UnavailableError,
    WrongEventLoopError,
)
from koinon_proto.contract.keyspaces import DEFAULT
from koinon_proto.security.transport import dialing

if TYPE_CHECKING:
    from koinon.core.routing import PartitionIds

_SLOW_S = 0.5  # without any answer: a node may hang, or be gone
_SUSPECT_S = 0.25  # between two questions whether it is


class Engine:
    """Everything that one client shares. Make it on its loop; ``start`` before use. With
    ``threads``, threads send operations themselves (``pools``) where they can.
    """

    def __init__(
        self, seeds: Sequence[str], options: ClientOptions, *, threads: bool = False
    ) -> None:
        forks.holds_channels(self)
        self.options = options
        self.dialing = dialing(options.tls_bundle, options.token_file)
        self.observing = Observing(options.observer)
        self.router = Router()
        self.policy = RetryPolicy()
        self.random = Random()
        self.closed = False  # no operation begins any more
        self._loop = asyncio.get_running_loop()
        self.now = time.monotonic  # also on threads: uvloop's own clock stands while it waits
        sockets_max = min(SOCKETS_MAX, options.max_pending)
        self.pools = (
            Pools(self._on_late, self.dialing, sockets_max=sockets_max) if threads else None
        )
        self._links: dict[str, Link] = {}  # by address; kept until the client is closed
        self._tasks: set[asyncio.Task[Any]] = set()  # asyncio itself holds tasks weakly
        self._look_after: Cancel | None = None  # ends the wait for the next look at silent nodes
        self.discovery = TableRefresh(seeds, self.router, self.link, self.dialing)
        self.singles = SingleOperations(self)
        self.rows = RowOperations(self)
        self._opened: Target | None = None  # the keyspace that ``options`` names

    async def start(self) -> None:
        """Fetch the table within the default timeout; where that fails, close.

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
        """End every operation under way and close the channels."""
        if self.closed:
            return
        self.closed = True
        if self._look_after is not None:
            self._look_after()
        self.discovery.close()
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.singles.close()
        await asyncio.gather(*[link.close() for link in self._links.values()])

    def link(self, address: str) -> Link:
        link = self._links.get(address)
        if link is None:
            link = self._links[address] = Link(address, self.dialing)
        return link

    def check_loop(self) -> None:
        """Refuse a call from another loop. A client that is closed says that instead, on any.

        Raises:
            WrongEventLoopError: the running loop is not the engine's.
        """
        if asyncio.get_running_loop() is not self._loop and not self.closed:
            raise WrongEventLoopError

    def routing(self) -> Routing:
        """Return the current routing. From any thread."""
        if self.closed:
            raise ClientClosedError()
        routing = self.router.routing
        assert routing is not None, "start() has returned"
        return routing

    @property
    def cluster_id(self) -> str:
        """The one cluster that this client ever talks to."""
        return self.routing().table.cluster.cluster_id

    @property
    def target(self) -> Target:
        """The keyspace of operations that name none. From any thread."""
        assert self._opened is not None, "start() has returned"
        return self._opened

    async def open_keyspace(self, name: str) -> Target:
        """Return the keyspace of this name. But for ``default`` the coordinators are asked what has
        changed: it may be new, or another of the same name. Where none answers, this client's table
        has to do.

        Raises:
            UnknownKeyspaceError: there is none.
        """
        if name not in ("", DEFAULT):
            with contextlib.suppress(UnavailableError):
                version = self.router.table_version
                status = await self.discovery.cluster_status(self.options.timeout_ms, version)
                self.router.on_update(convert.update_from_proto(status.table))
        return target_named(name, self.routing())

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def watch_answers(self) -> None:
        """Look after nodes that do not answer, from now on and as long as anything is sent."""
        if self._look_after is None and not self.closed:
            self._look_after = self._loop.call_later(_SLOW_S, self._look).cancel

    def _on_late(self) -> None:
        """A thread has waited long for an answer. From any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._look_now)

    def _look_now(self) -> None:
        if self._look_after is None:
            self._look()

    def _look(self) -> None:
        """Ask which nodes serve the partitions of a node that has not answered for long. What is
        still queued for it goes there; what was sent is given up once the node is known to be gone.
        """
        self._look_after = None
        if self.closed:
            return
        links: list[Link | RespLink] = [*self._links.values(), *self.singles.resp_links]
        silences = [link.silence_s for link in links]
        silent = [
            link for link, silence_s in zip(links, silences, strict=True) if silence_s >= _SLOW_S
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
                self._look_after = self.discovery.on_news(
                    self._look, again, routing.revision, owned
                )
        elif any(silences):
            self.watch_answers()

    def wake_on_news(self, revision: int) -> None:
        """Wake the operations that wait, if a refusal of one of them changed the routing."""
        if self.router.revision > revision:
            self.discovery.wake()

    async def wait_for_news(
        self,
        again: RetryAfter,
        revision: int,
        deadline: float,
        partition_ids: PartitionIds | Sequence[int],
    ) -> bool:
        """Wait until one of the partitions has changed since ``revision``, at the latest for the
        delay; return False if the deadline passed, or will have before it is any use.
        """
        if self.now() + again.not_before_s >= deadline:
            return False
        event = asyncio.Event()
        cancel = self.discovery.on_news(event.set, again, revision, partition_ids)
        try:
            async with asyncio.timeout_at(deadline):
                await event.wait()
        except TimeoutError:
            return False
        finally:
            cancel()
        return self.now() < deadline

    def timeout_ms(self, timeout_ms: int | None) -> int:
        """Return the given timeout, checked, or the default. From any thread."""
        if timeout_ms is None:
            return self.options.timeout_ms
        limits.check_positive("timeout_ms", timeout_ms)
        return timeout_ms
