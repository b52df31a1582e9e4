"""Keeps the table fresh: one refresh at a time serves all waiters.

Coordinators and nodes both serve the table. A refresh asks one of them, and the next if that one
fails or is slow, until the table is as new as refusals have named. Waiters then continue at once;
operations in flight are not affected.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from koinon.core.retry import RetryAfter, final_error
from koinon.core.routing import RefreshSchedule, Router
from koinon.driver.request_ids import operation
from koinon.driver.rpc.node_link import Link
from koinon.driver.rpc.reachability import why_unreachable
from koinon.driver.table_requests import TableRequests
from koinon_proto.contract.errors import (
    ClientClosedError,
    KoinonError,
    NobodyListensError,
    NotSentError,
    UnavailableError,
    UnknownHostError,
)
from koinon_proto.process.logs import LinesPerSecond
from koinon_proto.security.transport import PLAIN, Dialing
from koinon_proto.v1 import admin_pb2

if TYPE_CHECKING:
    from koinon.core.routing import PartitionIds

log = logging.getLogger(__name__)
_refusals = LinesPerSecond(1)

_ASK_S = 1.0
_NEXT_AFTER_S = 0.15

Cancel = Callable[[], object]
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Waiter:
    """One caller that waits for a change of some partitions since a revision of the routing."""

    resume: Callable[[], None]
    partition_ids: PartitionIds | Sequence[int]
    revision: int
    timer: asyncio.TimerHandle | None = None  # the timer that resumes it at the latest


class TableRefresh:
    """Fetches tables for a router, and wakes the callers that wait for a change. Belongs to one
    event loop.
    """

    def __init__(
        self,
        seeds: Sequence[str],
        router: Router,
        link: Callable[[str], Link],
        dialing: Dialing = PLAIN,
    ) -> None:
        self._dialing = dialing
        self._seeds = list(seeds)
        self._router = router
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._schedule = RefreshSchedule()
        self._waiters: dict[_Waiter, None] = {}  # waiters that were not resumed yet, in order
        self._waking = False  # ``wake`` is running: a resumed waiter may call it again
        # the refresh in progress; there is at most one
        self._refreshing: asyncio.Task[None] | None = None
        self._source = TableRequests(seeds, router)
        self._closed = False

    @property
    def seeds(self) -> Sequence[str]:
        """The addresses that the program has named."""
        return self._seeds

    # --- waiting for a change -------------------------------------------------------------------

    def on_news(
        self,
        resume: Callable[[], None],
        again: RetryAfter,
        revision: int,
        partition_ids: PartitionIds | Sequence[int],
    ) -> Cancel:
        """Call ``resume`` when one of the partitions has changed since ``revision``, after the
        delay at the latest, or at once if closed; return a function that cancels the wait.
        """
        if again.refresh:
            self.refresh_soon()
        routing = self._router.routing
        if (
            self._closed
            or not again.delay_s
            or (routing and routing.changed_since(partition_ids, revision))
        ):
            return self._loop.call_soon(resume).cancel
        waiter = _Waiter(resume, partition_ids, revision)
        self._waiters[waiter] = None
        waiter.timer = self._loop.call_later(again.delay_s, self._resume, waiter)
        return lambda: self._remove(waiter)

    def _remove(self, waiter: _Waiter) -> bool:
        """Remove a waiter; return False if it was resumed or cancelled before."""
        if waiter not in self._waiters:
            return False
        del self._waiters[waiter]
        assert waiter.timer is not None, "it is set together with the waiter"
        waiter.timer.cancel()
        return True

    def _resume(self, waiter: _Waiter) -> None:
        """Resume a waiter, unless it was resumed before."""
        if self._remove(waiter):
            waiter.resume()

    def close(self) -> None:
        """End the refresh and resume all waiters, which then find the client closed."""
        self._closed = True
        if self._refreshing is not None:
            self._refreshing.cancel()
        for waiter in list(self._waiters):
            self._resume(waiter)

    def wake(self) -> None:
        """Resume the waiters whose partitions have changed in the routing.

        A waiter may call this again while it is resumed, and may begin a new wait. The outer call
        then checks again: calls do not nest, however many operations wait.
        """
        if self._waking:
            return
        self._waking = True
        try:
            while due := self._due():
                for waiter in due:
                    self._resume(waiter)
        finally:
            self._waking = False

    def _due(self) -> list[_Waiter]:
        routing = self._router.routing
        if routing is None:
            return []
        return [
            waiter
            for waiter in self._waiters
            if routing.changed_since(waiter.partition_ids, waiter.revision)
        ]

    # --- the refresh ----------------------------------------------------------------------------

    def refresh_soon(self) -> None:
        """Ask for the table unless a refresh is already in progress; waiters are resumed on a
        change.
        """
        if self._refreshing is None and not self._closed:
            self._refreshing = self._loop.create_task(self._refresh_when_due())

    async def _refresh_when_due(self) -> None:
        news = False
        try:
            await asyncio.sleep(self._schedule.delay_s(self._loop.time()))
            news, error = await self._ask_around()
            if error is not None and not error.retriable and _refusals.may_log():
                log.warning("table refused error=%s unlogged=%d", error, _refusals.take_unlogged())
        finally:
            self._refreshing = None
            self._schedule.on_end(news, self._loop.time())
        if news:
            self.wake()

    async def first_table(self, timeout_ms: int) -> None:
        """Fetch the first table.

        Raises:
            ClusterNotReadyError: the cluster has no table yet.
            NobodyListensError, UnknownHostError: no address accepts a connection; raised at once.
            UnavailableError: no address answered.
            KoinonError: a server refused with an error that a retry does not mend.
        """
        deadline = self._loop.time() + timeout_ms / 1000
        error: KoinonError = NotSentError(reason=f"no answer from {', '.join(self._seeds)}")
        try:
            async with asyncio.timeout_at(deadline):
                while self._router.routing is None:
                    await asyncio.sleep(self._schedule.delay_s(self._loop.time()))
                    news, failure = await self._ask_around()
                    self._schedule.on_end(news, self._loop.time())
                    if isinstance(failure, NotSentError):
                        failure = await why_unreachable(self._seeds, self._dialing)
                        if isinstance(failure, NobodyListensError | UnknownHostError):
                            raise failure
                    error = failure or error
                    if failure is not None and not (failure.retriable or failure.maybe_applied):
                        raise failure
        except TimeoutError:
            raise final_error(
                error, write=False, maybe_applied=False, timed_out_ms=timeout_ms
            ) from None

    async def _ask_around(self) -> tuple[bool, KoinonError | None]:
        """Ask addresses until the table is as new as wanted or all were asked; return whether the
        table is newer, and if not, the most telling error.
        """
        before, wanted = self._router.table_version, self._router.wanted_version
        errors: list[KoinonError] = []
        answered = False
        async with aclosing(self._outcomes(self._source.addresses(), self._ask)) as outcomes:
            async for error in outcomes:
                if error is not None:
                    errors.append(error)
                    continue
                answered = True
                if self._router.table_version >= wanted:
                    break
        news = self._router.table_version > before
        return news, None if news or answered else _most_telling(errors)

    async def _outcomes(
        self, addresses: list[str], ask: Callable[[str], Coroutine[Any, Any, T]]
    ) -> AsyncGenerator[T, None]:
        """Ask one address after the other, the next when none has answered for a while, and yield
        the outcomes. The caller may change ``addresses`` meanwhile.
        """
        asking: set[asyncio.Task[T]] = set()
        try:
            while addresses or asking:
                if addresses:
                    asking.add(self._loop.create_task(ask(addresses.pop(0))))
                done, asking = await asyncio.wait(
                    asking,
                    timeout=_NEXT_AFTER_S if addresses else None,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                for task in done:
                    yield task.result()
        finally:
            for task in asking:
                task.cancel()

    async def _ask(self, address: str) -> KoinonError | None:
        """Ask one address for the table, and apply it to the router; return the error, if any."""
        reply = await self._link(address).get_table(self._source.request(), _ASK_S)
        return reply if isinstance(reply, KoinonError) else self._source.apply_reply(reply)

    # --- the cluster's status -------------------------------------------------------------------

    async def cluster_status(
        self, timeout_ms: int, known_version: int = 0
    ) -> admin_pb2.ClusterStatus:
        """Return the status from the leader, or from any coordinator if there is no leader. Its
        table has only the changes since ``known_version``.

        Raises:
            ClientClosedError: the client is closed.
            UnavailableError: no coordinator answered.
        """
        if self._closed:
            raise ClientClosedError
        with operation():
            return await self._cluster_status(timeout_ms, known_version)

    async def _cluster_status(self, timeout_ms: int, known_version: int) -> admin_pb2.ClusterStatus:
        seen: admin_pb2.ClusterStatus | None = None
        error: KoinonError = UnavailableError(reason="it took too long")
        asked: set[str] = set()
        addresses = list(dict.fromkeys(self._seeds))
        request = admin_pb2.GetStatusRequest(
            cluster_id=self._source.cluster_id, known_version=known_version
        )

        def ask(address: str) -> Coroutine[Any, Any, Any]:
            asked.add(address)
            return self._link(address).get_status(request, _ASK_S)

        try:
            async with (
                asyncio.timeout(timeout_ms / 1000),
                aclosing(self._outcomes(addresses, ask)) as replies,
            ):
                async for reply in replies:
                    if isinstance(reply, KoinonError):
                        error = reply
                        continue
                    if reply.is_leader:
                        return _status(reply)
                    seen = reply
                    named = [reply.leader_address, *(c.address for c in reply.coordinators)]
                    known = dict.fromkeys([a for a in named if a] + addresses)
                    addresses[:] = [a for a in known if a not in asked]
        except TimeoutError:
            pass
        if seen is not None:
            return seen
        raise UnavailableError(reason=f"no coordinator answered: {error}") from error


def _status(reply: Any) -> admin_pb2.ClusterStatus:
    assert isinstance(reply, admin_pb2.ClusterStatus)
    return reply


def _most_telling(errors: Sequence[KoinonError]) -> KoinonError | None:
    """Return the most useful error: a final one, else one from a server, else that no address was
    reached.
    """
    for error in errors:
        if not error.retriable and not error.maybe_applied:
            return error
    for error in errors:
        if not isinstance(error, NotSentError) and not error.maybe_applied:
            return error
    return errors[-1] if errors else None
