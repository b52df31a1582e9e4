"""A client's access to its cluster: routing, gRPC links, waits for a newer table, and timeouts.

Operations of all kinds use it (``single_operations``, ``row_operations``, ``scan_pages``). All
methods run on the client's loop unless their docstrings say otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from koinon.core import limits
from koinon.core.retry import RetryAfter, RetryPolicy
from koinon.core.routing import Router, Routing
from koinon.driver.observing import Observing
from koinon.driver.resp.pool import SOCKETS_MAX, Pools
from koinon.driver.rpc.node_link import Link
from koinon.driver.table_refresh import Cancel, TableRefresh
from koinon.options import ClientOptions
from koinon_proto.contract.errors import ClientClosedError, WrongEventLoopError
from koinon_proto.security.transport import dialing

if TYPE_CHECKING:
    from koinon.core.routing import PartitionIds

SLOW_S = 0.5
"""A node that has sent no reply for this long may hang or be gone."""


class ClusterAccess(ABC):
    """The state that all operations of one client share. Made on the client's loop. With
    ``threads``, threads send operations themselves (``pools``) where possible.
    """

    def __init__(self, seeds: Sequence[str], options: ClientOptions, *, threads: bool) -> None:
        self.options = options
        self.dialing = dialing(options.tls_bundle, options.token_file)
        self.observing = Observing(options.observer)
        self.router = Router()
        self.policy = RetryPolicy()
        self.closed = False  # no operation begins any more
        self.loop = asyncio.get_running_loop()
        # works on threads, too; uvloop's own clock stops while the loop waits
        self.now = time.monotonic
        sockets_max = min(SOCKETS_MAX, options.max_pending)
        self.pools = (
            Pools(self._on_late, self.dialing, sockets_max=sockets_max) if threads else None
        )
        self.links: dict[str, Link] = {}  # by address; kept until the client is closed
        self.tasks: set[asyncio.Task[Any]] = set()  # asyncio itself holds tasks only weakly
        # Ends the wait for the next check of silent nodes; None: no check is scheduled.
        self.cancel_look: Cancel | None = None
        self.discovery = TableRefresh(seeds, self.router, self.link, self.dialing)

    @abstractmethod
    def look_for_silent_nodes(self) -> None:
        """Check the nodes that have not replied for long; schedule the next check if needed."""

    def link(self, address: str) -> Link:
        """Return the gRPC link to this address; it connects at its first use."""
        link = self.links.get(address)
        if link is None:
            link = self.links[address] = Link(address, self.dialing)
        return link

    def check_loop(self) -> None:
        """Raise if called on another loop; if the client is closed, raise ClientClosedError on any
        loop.

        Raises:
            WrongEventLoopError: the running loop is not the client's.
            ClientClosedError: the client is closed.
        """
        if asyncio.get_running_loop() is not self.loop and not self.closed:
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
        """The id of the client's cluster; it never talks to another one."""
        return self.routing().table.cluster.cluster_id

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = self.loop.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def watch_answers(self) -> None:
        """Check for silent nodes from now on, as long as operations are in flight."""
        if self.cancel_look is None and not self.closed:
            self.cancel_look = self.loop.call_later(SLOW_S, self.look_for_silent_nodes).cancel

    def _on_late(self) -> None:
        """Begin to check for silent nodes, because a thread's reply is late. From any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(self._look_now)

    def _look_now(self) -> None:
        if self.cancel_look is None:
            self.look_for_silent_nodes()

    def wake_on_news(self, revision: int) -> None:
        """Wake the waiting operations if a refusal has changed the routing since ``revision``."""
        if self.router.revision > revision:
            self.discovery.wake()

    async def wait_for_news(
        self,
        again: RetryAfter,
        revision: int,
        deadline: float,
        partition_ids: PartitionIds | Sequence[int],
    ) -> bool:
        """Wait until one of the partitions has changed since ``revision``, for the delay at most;
        return False if the deadline passed, or comes before a retry can succeed.
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
        """Return the timeout, checked, or the default for None. From any thread."""
        if timeout_ms is None:
            return self.options.timeout_ms
        limits.check_positive("timeout_ms", timeout_ms)
        return timeout_ms
