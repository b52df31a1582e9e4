"""Carrying out a scan: one page is always being fetched while another is read."""

from __future__ import annotations

import asyncio

from koinon.core import limits
from koinon.core.operations import attempt_timeout_s
from koinon.core.retry import final_error
from koinon.core.scanning import ScanCall, ScanProgress, ScanReply, partitions_with
from koinon.core.target import Target
from koinon.driver import request_ids
from koinon.driver.engine import Engine
from koinon.types import BytesLike, Entry
from koinon_proto.contract.errors import KoinonError, NotSentError, UnsupportedVersionError
from koinon_proto.v1 import kv_pb2


class Pages:
    """The pages of one scan. Belongs to the engine's loop; made on any thread."""

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
        self._fetching: asyncio.Task[list[Entry] | None] | None = None
        self.ended = False  # true once there is no further page to be had; read by any thread
        self._request = request_ids.given() or request_ids.RequestId()

    async def next(self) -> list[Entry] | None:
        """Return the next page that has records; None at the end."""
        if self.ended:
            return None
        page = await (self._fetching or self._fetch())
        self._fetching = None
        if page is not None and self._left is not None:
            page = page[: self._left]
            self._left -= len(page)
        if page is None or self._left == 0 or self._progress.done:
            self.ended = True
        else:
            self._fetching = asyncio.create_task(self._fetch())
            self._fetching.add_done_callback(_forget)
        return page

    def close(self) -> None:
        """Drop the page being fetched."""
        self.ended = True
        if self._fetching is not None:
            self._fetching.cancel()
            self._fetching = None

    async def _fetch(self) -> list[Entry] | None:
        observing = self._engine.observing
        with observing.operation("scan") as page, request_ids.operation(self._request):
            entries = await self._next_records()
            page.rows = len(entries or ())
            return entries

    async def _next_records(self) -> list[Entry] | None:
        engine = self._engine
        deadline = engine.now() + self._timeout_ms / 1000
        while True:
            call = self._progress.next_call(engine.routing())
            if call is None:
                return None
            steps = self._progress.steps
            outcome = await self._ask(call, deadline)
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
        engine = self._engine
        if not call.address:
            return engine.routing().offline(call.partition_ids[0])
        link = engine.link(call.address)
        if not link.ready() and not await link.connect_soon():
            return link.not_sent()
        request = kv_pb2.ScanRequest(
            cluster_id=engine.cluster_id,
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
        left_s = max(0.001, deadline - engine.now())
        engine.watch_answers()
        reply = await link.scan(request, attempt_timeout_s(left_s, write=False))
        asked = self._start or self._reverse
        if asked and isinstance(reply, ScanReply) and not reply.in_range:
            what = f"{call.address}: scans with start or reverse"
            return UnsupportedVersionError(what=what, version=0, supported=1)
        return reply


def _forget(task: asyncio.Task[list[Entry] | None]) -> None:
    """Look at the outcome: asyncio reports it as lost for a page that no caller asks for."""
    if not task.cancelled():
        task.exception()
