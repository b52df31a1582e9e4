"""Carrying out a scan: one page is always being fetched while another is read.

A page is asked for by RESP where the node offers that, else by gRPC. The first one a thread of the
blocking client fetches itself, if it has a socket to do so: a short scan needs no hop to the loop.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from koinon.core import limits
from koinon.core.exchange import Command, PendingMessage
from koinon.core.operations import attempt_timeout_s
from koinon.core.retry import final_error
from koinon.core.scanning import ScanCall, ScanProgress, ScanReply, partitions_with
from koinon.core.target import Target
from koinon.driver import request_ids
from koinon.driver.engine import Engine
from koinon.driver.node_link import scan_reply
from koinon.driver.resp.messages import reply_of
from koinon.driver.resp.pool import Pools
from koinon.types import BytesLike, Entry
from koinon_proto.contract.errors import (
    KoinonError,
    NotSentError,
    UnsupportedVersionError,
)
from koinon_proto.v1 import kv_pb2


class _Tried(NamedTuple):
    """An attempt that a thread made, with its outcome; the loop goes on from it."""

    call: ScanCall
    outcome: ScanReply | KoinonError
    deadline: float
    began: float


class Pages:
    """The pages of one scan. Belongs to the engine's loop; made on any thread, which may fetch the
    first page before the loop hears of it.
    """

    def __init__(
        self,
        engine: Engine,
        target: Target,
        *,
        prefix: BytesLike,
        start: BytesLike,
        limit: int | None,
        reverse: bool,
        page_rows: int,
        keys_only: bool,
        timeout_ms: int | None,
    ) -> None:
        self._keyspace_id = target.settings(engine.routing()).keyspace_id
        self._prefix = limits.check_key_part("prefix", prefix)
        self._start = limits.check_key_part("start", start)
        limits.check_page_rows(page_rows)
        if limit is not None:
            limits.check_positive("limit", limit)
        self._engine = engine
        self._left = limit  # rows that may still be returned; None: any number
        self._reverse = bool(reverse)
        self._page_rows = page_rows
        self._keys_only = keys_only
        self._timeout_ms = engine.timeout_ms(timeout_ms)
        self._progress = ScanProgress(
            partitions_with(self._prefix, target.partitioner),
            keys_only=keys_only,
            policy=engine.policy,
            random=engine.random,
        )
        self._tried: _Tried | None = None
        self._fetching: asyncio.Task[list[Entry] | None] | None = None
        self.ended = False  # true once there is no further page to be had; read by any thread
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
        """Begin to fetch the page after the one that is read."""
        if not self.ended and self._fetching is None:
            self._fetching = asyncio.create_task(self._fetch())
            self._fetching.add_done_callback(_forget)

    def _taken(self, page: list[Entry] | None) -> list[Entry] | None:
        """Return what the caller is given of a page."""
        if page is not None and self._left is not None:
            page = page[: self._left]
            self._left -= len(page)
        if page is None or self._left == 0 or self._progress.done:
            self.ended = True
        return page

    def close(self) -> None:
        """Drop the page being fetched."""
        self.ended = True
        if self._fetching is not None:
            self._fetching.cancel()
            self._fetching = None

    # --- on a thread ----------------------------------------------------------------------------

    def fetch_here(self, engine: Engine) -> list[Entry] | None:
        """Return the first page, fetched on this thread, before anything else is called. None: it
        is for ``next``, which goes on from what this has come to; or there is none (``ended``).
        ``engine`` is the client's: in a forked child it is another than the one of a scan that was
        begun in the parent, whose sockets are not to be used.
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
        """Return what the node answers; None: it was not asked."""
        pool = pools.by_place.get((call.address, self._keyspace_id))
        if pool is None or not pool.answers_pages:
            return None
        page = self._pending(self._request_for(call), deadline)
        error = pool.run(page, self._engine.routing())
        if isinstance(error, UnsupportedVersionError):
            pool.answers_pages = False
            return None
        page.error = page.error or error
        return self._outcome_of(page, call)

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
            if self._progress.steps > steps:  # the deadline is that of a step forward
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
        request = self._request_for(call)
        timeout_s = attempt_timeout_s(max(0.001, deadline - engine.now()), write=False)
        listener = engine.singles.resp_link(call.address, self._keyspace_id, routing)
        if listener is not None:
            page = self._pending(request, deadline)
            await listener.ask(page, timeout_s)
            if (outcome := self._outcome_of(page, call)) is not None:
                return outcome
        link = engine.link(call.address)
        if not link.ready() and not await link.connect_soon():
            return link.not_sent()
        timeout_s = attempt_timeout_s(max(0.001, deadline - engine.now()), write=False)
        engine.watch_answers()
        reply = await link.scan(request, timeout_s)
        return self._checked(reply, call) if isinstance(reply, ScanReply) else reply

    # --- messages -------------------------------------------------------------------------------

    def _request_for(self, call: ScanCall) -> kv_pb2.ScanRequest:
        request = kv_pb2.ScanRequest(
            cluster_id=self._engine.cluster_id,
            table_version=call.table_version,
            partition_ids=call.partition_ids,
            keyspace_id=self._keyspace_id,
            prefix=self._prefix,
            start=self._start,
            reverse=self._reverse,
            limit=self._page_rows if self._left is None else min(self._page_rows, self._left),
            keys_only=self._keys_only,
            want_versions=True,
        )
        if call.after_key:
            request.cursor.partition_id = call.partition_ids[0]
            request.cursor.after_key = call.after_key
        return request

    def _pending(self, request: kv_pb2.ScanRequest, deadline: float) -> PendingMessage:
        return PendingMessage(
            command=Command.SCAN,
            deadline=deadline,
            timeout_ms=self._timeout_ms,
            value=request.SerializeToString(),
            request=self._request,
        )

    def _outcome_of(self, page: PendingMessage, call: ScanCall) -> ScanReply | KoinonError | None:
        """Return what asking by RESP came to; None: the page was not sent so."""
        reply = reply_of(page, kv_pb2.ScanResponse, call.address)
        if reply is None or isinstance(reply, KoinonError):
            return reply
        return self._checked(scan_reply(reply), call)

    def _checked(self, reply: ScanReply, call: ScanCall) -> ScanReply | KoinonError:
        if (self._start or self._reverse) and not reply.in_range:
            what = f"{call.address}: scans with start or reverse"
            return UnsupportedVersionError(what=what, version=0, supported=1)
        return reply


def _forget(task: asyncio.Task[list[Entry] | None]) -> None:
    """Look at the outcome: asyncio reports it as lost for a page that no caller asks for."""
    if not task.cancelled():
        task.exception()
