"""Carries out a scan: the next page is fetched while the caller reads the present one.

A page is fetched by RESP if the node offers it, else by gRPC. A thread of the blocking client
fetches the first page itself if it has a socket: a short scan needs no hop to the loop.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from koinon.core.exchange import Command
from koinon.core.retry import final_error
from koinon.core.scanning import (
    ScanCall,
    ScanProgress,
    ScanQuery,
    ScanReply,
    partitions_with,
)
from koinon.core.target import Target
from koinon.driver import request_ids
from koinon.driver.engine import Engine
from koinon.driver.node_requests import SCAN, message_of, outcome_as
from koinon.driver.resp.pool import Pools
from koinon.driver.resp.replies import reply_of
from koinon.driver.rpc.kv_messages import scan_reply
from koinon.types import Entry
from koinon_proto.contract.errors import KoinonError, NotSentError
from koinon_proto.v1 import kv_pb2


class _Tried(NamedTuple):
    """An attempt made on a thread, with its outcome; the loop continues after it."""

    call: ScanCall
    outcome: ScanReply | KoinonError
    deadline: float
    began: float


class Pages:
    """The pages of one scan. Belongs to the engine's loop; made on any thread, which may fetch the
    first page before the loop takes over.
    """

    def __init__(
        self,
        engine: Engine,
        target: Target,
        query: ScanQuery,
        timeout_ms: int | None,
    ) -> None:
        self._keyspace_id = target.settings(engine.routing()).keyspace_id
        self._query = query.checked()
        self._engine = engine
        self._left = query.limit  # rows that may still be returned; None: no limit
        self._timeout_ms = engine.timeout_ms(timeout_ms)
        self._progress = ScanProgress(
            partitions_with(bytes(self._query.prefix), target.partitioner),
            engine.policy,
            keys_only=query.keys_only,
        )
        self._tried: _Tried | None = None
        self._fetching: asyncio.Task[list[Entry] | None] | None = None
        self.ended = False  # True once there is no further page; read by any thread
        self._request = request_ids.given() or request_ids.RequestId()

    async def next(self) -> list[Entry] | None:
        """Return the next page that has records; None at the end.

        Raises:
            WrongEventLoopError: this is another loop, or that of a forked child, and the parent has
                begun the scan.
        """
        if self.ended:
            return None
        self._engine.check_loop()
        page = await (self._fetching or self._fetch())
        self._fetching = None
        page = self._taken(page)
        self.prefetch()
        return page

    def prefetch(self) -> None:
        """Begin to fetch the next page."""
        if not self.ended and self._fetching is None:
            self._fetching = asyncio.create_task(self._fetch())
            self._fetching.add_done_callback(_forget)

    def _taken(self, page: list[Entry] | None) -> list[Entry] | None:
        """Return the page, cut at the scan's limit."""
        if page is not None and self._left is not None:
            page = page[: self._left]
            self._left -= len(page)
        if page is None or self._left == 0 or self._progress.done:
            self.ended = True
        return page

    def close(self) -> None:
        """Cancel the fetch in progress."""
        self.ended = True
        if self._fetching is not None:
            self._fetching.cancel()
            self._fetching = None

    # --- on a thread ----------------------------------------------------------------------------

    def fetch_here(self, engine: Engine) -> list[Entry] | None:
        """Fetch the first page on this thread, before any other call. Returns None if ``next`` must
        fetch it (and continue from the attempt made here, if any), or if the scan has no records
        (``ended``). ``engine`` is the client's present engine: in a forked child it is not the
        engine of a scan begun by the parent, whose sockets the child must not use.
        """
        observing, pools = engine.observing, engine.pools
        if engine is not self._engine or pools is None or not pools.by_place:
            return None
        began = observing.now()
        with observing.operation("scan") as page, request_ids.operation(self._request):
            entries = self._taken_here(pools, began)
            page.rows = len(entries or ())
            page.goes_on = entries is None and not self.ended
        return entries

    def _taken_here(self, pools: Pools, began: float) -> list[Entry] | None:
        engine = self._engine
        while (call := self._progress.next_call(engine.routing())) is not None:
            deadline = engine.now() + self._timeout_ms / 1000
            outcome = self._ask_here(pools, call, deadline)
            if outcome is None:
                return None
            if isinstance(outcome, KoinonError) or outcome.refused:
                self._tried = _Tried(call, outcome, deadline, began)
                return None
            entries, _ = self._progress.settle(call, outcome, engine.router)
            if entries:
                return self._taken(entries)
        return self._taken(None)

    def _ask_here(
        self, pools: Pools, call: ScanCall, deadline: float
    ) -> ScanReply | KoinonError | None:
        """Return the node's reply; None: nothing was sent."""
        pool = pools.by_place.get((call.address, self._keyspace_id))
        if pool is None:
            return None
        page = message_of(
            Command.SCAN, self._request_for(call), deadline, self._timeout_ms, self._request
        )
        error = pool.send(page, self._engine.routing())
        page.error = page.error or error
        outcome = reply_of(page, kv_pb2.ScanResponse, call.address)
        return None if outcome is None else outcome_as(scan_reply, outcome)

    # --- on the loop ----------------------------------------------------------------------------

    async def _fetch(self) -> list[Entry] | None:
        observing, tried = self._engine.observing, self._tried
        began = tried.began if tried is not None else None
        with observing.operation("scan", began=began) as page, request_ids.operation(self._request):
            entries = await self._next_records()
            page.rows = len(entries or ())
            return entries

    async def _next_records(self) -> list[Entry] | None:
        engine = self._engine
        tried, self._tried = self._tried, None
        deadline = engine.now() + self._timeout_ms / 1000
        while True:
            if tried is not None:
                call, outcome, deadline, _ = tried
                tried = None
            else:
                following = self._progress.next_call(engine.routing())
                if following is None:
                    return None
                call = following
                outcome = await self._ask(call, deadline)
            steps = self._progress.steps
            entries, again = self._progress.settle(call, outcome, engine.router)
            if entries:
                return entries
            if self._progress.steps > steps:  # the deadline until the scan must advance
                deadline = engine.now() + self._timeout_ms / 1000
            if again is None:
                continue
            if not await engine.wait_for_news(again, call.revision, deadline, call.partition_ids):
                raise final_error(
                    self._progress.last_error or NotSentError(reason="the deadline passed"),
                    write=False,
                    maybe_applied=False,
                    timed_out_ms=self._timeout_ms,
                )

    async def _ask(self, call: ScanCall, deadline: float) -> ScanReply | KoinonError:
        engine, routing = self._engine, self._engine.routing()
        if not call.address:
            return routing.offline(call.partition_ids[0])
        requests = engine.rows.requests
        outcome = await requests.send(SCAN, call.address, self._request_for(call), deadline)
        settled: ScanReply | KoinonError = outcome_as(scan_reply, outcome)
        return settled

    def _request_for(self, call: ScanCall) -> kv_pb2.ScanRequest:
        query = self._query
        request = kv_pb2.ScanRequest(
            cluster_id=self._engine.cluster_id,
            table_version=call.table_version,
            partition_ids=call.partition_ids,
            keyspace_id=self._keyspace_id,
            prefix=bytes(query.prefix),
            start=bytes(query.start),
            reverse=query.reverse,
            limit=query.page_rows if self._left is None else min(query.page_rows, self._left),
            keys_only=query.keys_only,
            want_versions=True,
        )
        if call.after_key:
            request.cursor.partition_id = call.partition_ids[0]
            request.cursor.after_key = call.after_key
        return request


def _forget(task: asyncio.Task[list[Entry] | None]) -> None:
    """Retrieve the outcome, so that asyncio does not report an unretrieved exception of a page that
    no caller wants.
    """
    if not task.cancelled():
        task.exception()
