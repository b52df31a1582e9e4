"""Carries out ``put_many`` and ``delete_many``: a bounded number of chunks in flight."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from koinon.core.operations import WriteOptions, WriteRows
from koinon.core.row_chunks import Chunk, LoadProgress
from koinon.core.target import Target
from koinon.driver import request_ids
from koinon.driver.engine import Engine
from koinon.driver.observing import outcome_of
from koinon.types import WriteResult
from koinon_proto.contract.errors import ClientClosedError, KoinonError, UnknownFateError


class Load:
    """One ``*_many`` write. Belongs to the engine's loop; made on any thread.

    The caller, who has the input, carries out ``steps`` one by one, then takes the ``result``;
    after any exception it carries out ``abandon``.
    """

    def __init__(
        self,
        engine: Engine,
        target: Target,
        operation: str,
        options: WriteOptions,
        timeout_ms: int | None,
    ) -> None:
        self.progress = LoadProgress(in_flight_max=engine.options.batches_in_flight)
        self._operation = operation  # the name of the client's method
        self._engine = engine
        self._target = target
        self._options = options
        self._timeout_ms = engine.timeout_ms(timeout_ms)
        self._ended_one = asyncio.Event()  # set when a chunk has ended
        self._tasks: set[asyncio.Task[None]] = set()  # one for each chunk
        self._input_left = False  # the load stopped before the end of its input
        self._begun = False  # a chunk was sent
        self._request = request_ids.given() or request_ids.RequestId()

    def steps(self, chunks: Iterable[Chunk]) -> Iterator[Coroutine[Any, Any, None]]:
        """Yield the coroutines that carry out the load: the caller awaits each on the engine's loop
        before it takes the next. The input is read here, in the caller's own thread.
        """
        for chunk in chunks:
            if self.progress.stopped:
                self._input_left = True
                break
            yield self._begin(chunk)
        yield self._drain()

    @contextmanager
    def observed(self) -> Iterator[None]:
        """Report the load inside this context to the client's observer when it ends."""
        with self._engine.observing.operation(self._operation) as ending:
            result = self.progress.result
            try:
                yield
            finally:
                ending.rows = result.rows
            failed = [*result.refused[:1], *result.unknown[:1]]
            if failed:
                ending.outcome = outcome_of(min(failed, key=lambda failure: failure.row).error)

    def result(self) -> WriteResult:
        """Return the counts and the failed rows."""
        return self.progress.end(self._input_left)

    def error_for_caller(self, error: BaseException) -> BaseException:
        """Return the error to raise to the caller for the error that ended the load early. If the
        client was closed after rows had been sent, that is UnknownFateError.
        """
        if self._begun and self._engine.closed and isinstance(error, ClientClosedError):
            error = UnknownFateError(reason="the client was closed while rows were under way")
        self._request.name(error)
        return error

    async def _begin(self, chunk: Chunk) -> None:
        """Wait for room, then send the chunk."""
        self._engine.routing()  # raises if the client is closed
        while not self.progress.may_start(chunk):
            await self._wait()
        if self.progress.error is not None:
            raise self.progress.error
        self._begun = True
        self.progress.start(chunk)
        task = asyncio.create_task(self._run(chunk))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _drain(self) -> None:
        """Wait until every chunk is settled; raise the unexpected exception that ended one, if
        any.
        """
        while not self.progress.idle:
            await self._wait()
        if self.progress.error is not None:
            raise self.progress.error

    async def abandon(self) -> None:
        """Cancel the chunks in flight: the caller is gone, or the input is invalid."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _wait(self) -> None:
        self._ended_one.clear()
        await self._ended_one.wait()

    async def _run(self, chunk: Chunk) -> None:
        engine = self._engine
        request_ids.adopt(self._request)
        failures: dict[int, KoinonError] = {}
        present: list[int] = []
        absent = 0
        try:
            operation = WriteRows(
                chunk,
                self._target.partitioner.partitions_of(chunk.keys),
                engine.policy,
                self._target.keyspace_id,
                self._options,
            )
            await engine.rows.run(operation, self._timeout_ms)
            failures, present = operation.failures, operation.present
            absent = operation.absent
            for error in failures.values():
                self._request.name(error)
        except BaseException as error:
            self.progress.error = error  # no result is returned then, so these rows are in no count
            if not isinstance(error, Exception):
                raise
        finally:
            self.progress.finish(chunk, failures, absent, present)
            self._ended_one.set()
