"""Carrying out ``put_many`` and ``delete_many``: chunks under way side by side, in bounds."""

from __future__ import annotations

import asyncio

from koinon.core import limits
from koinon.core.loading import Chunk, LoadProgress
from koinon.core.operations import WriteRows
from koinon.engine import Engine


class Load:
    """One ``*_many`` write. Belongs to the engine's loop; made on any thread.

    Who reads the input calls ``begin`` for each chunk, ``drain`` at its end.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        ttl_ms: int | None,
        timeout_ms: int | None,
        retry_unknown: bool | None,
    ) -> None:
        limits.check_ttl(ttl_ms)
        self.progress = LoadProgress(in_flight_max=engine.options.batches_in_flight)
        self._engine = engine
        self._ttl_ms = ttl_ms
        self._timeout_ms = engine.timeout_ms(timeout_ms)
        self._retry_unknown = (
            engine.options.retry_unknown if retry_unknown is None else retry_unknown
        )
        self._ended_one = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def begin(self, chunk: Chunk) -> None:
        """Wait for room, then send the chunk on its way."""
        while not self.progress.may_start(chunk):
            await self._wait()
        self.progress.start(chunk)
        task = asyncio.create_task(self._run(chunk))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def drain(self) -> None:
        """Return when every chunk is settled; raise the defect that ended one, if any."""
        while not self.progress.idle:
            await self._wait()
        if self.progress.error is not None:
            raise self.progress.error

    async def abandon(self) -> None:
        """End what is under way: the caller is gone, or the input is bad."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _wait(self) -> None:
        self._ended_one.clear()
        await self._ended_one.wait()

    async def _run(self, chunk: Chunk) -> None:
        engine = self._engine
        operation = WriteRows(
            chunk.keys,
            chunk.values,
            engine.routing().partitioner.partitions_of(chunk.keys),
            ttl_ms=self._ttl_ms,
            retry_unknown=self._retry_unknown,
            policy=engine.policy,
            random=engine.random,
        )
        try:
            await engine.run_rows(operation, self._timeout_ms)
        except Exception as error:
            self.progress.error = error
        finally:
            self.progress.finish(chunk, operation.failures, operation.absent)
            self._ended_one.set()
