"""Carrying out a scan: one page is always being fetched while another is read."""

from __future__ import annotations

import asyncio

from koinon.core import limits
from koinon.core.operations import attempt_timeout_s
from koinon.core.retry import final_error
from koinon.core.scanning import ScanCall, ScanProgress, ScanReply
from koinon.driver import request_ids
from koinon.driver.engine import Engine
from koinon.types import Entry
from koinon_proto.contract.errors import InvalidArgumentError, KoinonError, NotSentError
from koinon_proto.contract.table import MAX_KEY_BYTES
from koinon_proto.v1 import kv_pb2


class Pages:
    """The pages of one scan. Belongs to the engine's loop; made on any thread."""

    def __init__(
        self,
        engine: Engine,
        *,
        prefix: bytes,
        page_rows: int,
        keys_only: bool,
        timeout_ms: int | None,
    ) -> None:
        if type(prefix) is not bytes:
            raise TypeError(f"prefix must be bytes, not {type(prefix).__name__}")
        if len(prefix) > MAX_KEY_BYTES:
            raise InvalidArgumentError(
                field="prefix",
                reason="longer than a key may be, in bytes",
                limit=MAX_KEY_BYTES,
                actual=len(prefix),
            )
        limits.check_positive("page_rows", page_rows)
        self._engine = engine
        self._prefix = prefix
        self._page_rows = page_rows
        self._keys_only = keys_only
        self._timeout_ms = engine.timeout_ms(timeout_ms)
        self._progress = ScanProgress(
            engine.routing().table.cluster.partition_count,
            keys_only=keys_only,
            policy=engine.policy,
            random=engine.random,
        )
        self._fetching: asyncio.Task[list[Entry] | None] | None = None
        self._ended = False
        self._request = request_ids.given() or request_ids.RequestId()

    async def next(self) -> list[Entry] | None:
        """Return the next page that has records; None at the end."""
        if self._ended:
            return None
        page = await (self._fetching or self._fetch())
        self._fetching = None
        if page is None:
            self._ended = True
        else:
            self._fetching = asyncio.create_task(self._fetch())
            self._fetching.add_done_callback(_forget)
        return page

    def close(self) -> None:
        """Drop the page being fetched."""
        self._ended = True
        if self._fetching is not None:
            self._fetching.cancel()
            self._fetching = None

    async def _fetch(self) -> list[Entry] | None:
        with request_ids.operation(self._request):
            return await self._next_records()

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
            prefix=self._prefix,
            limit=self._page_rows,
            keys_only=self._keys_only,
            want_versions=True,
        )
        if call.after_key:
            request.cursor.partition_id = call.partition_ids[0]
            request.cursor.after_key = call.after_key
        left_s = max(0.001, deadline - engine.now())
        engine.watch_answers()
        return await link.scan(request, attempt_timeout_s(left_s, write=False))


def _forget(task: asyncio.Task[list[Entry] | None]) -> None:
    """Look at the outcome: of a page that nobody asks for any more, asyncio reports it as lost."""
    if not task.cancelled():
        task.exception()
