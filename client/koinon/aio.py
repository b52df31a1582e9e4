"""The asyncio client."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Unpack

from koinon.core.batching import PendingOperation
from koinon.core.feeds import ChangeBatch
from koinon.core.row_chunks import Chunk
from koinon.driver.batch import AsyncBatch
from koinon.driver.change_feed import ChangeFeed
from koinon.driver.client_api import (
    ClientApi,
    InKeyspace,
    InOpenedKeyspace,
    async_iterable,
    awaitable,
    described,
)
from koinon.driver.engine import Engine
from koinon.driver.group import AsyncGroup, GroupArguments
from koinon.driver.scan_pages import Pages
from koinon.driver.sharded import AsyncSharded
from koinon.driver.writes import Load
from koinon.options import ClientOptions, Options, parse, with_options
from koinon.types import BytesLike, Entry, WriteResult
from koinon_proto.contract.errors import KoinonError

if TYPE_CHECKING:
    from koinon_proto.contract.table import Table


@with_options
def connect(
    coordinators: str | Sequence[str] | None = None, **options: Unpack[Options]
) -> Connecting:
    """Connect to the cluster that these coordinators (or nodes) belong to. Await the result for a
    client, or use it as ``async with koinon.aio.connect(...) as client``, which also closes the
    client.

    Arguments and errors are those of :func:`koinon.connect`.
    """
    return Connecting(*parse(coordinators, options))


class Connecting(Coroutine[Any, Any, "AsyncClient"]):
    """The result of ``connect``: awaitable, and an asynchronous context manager; both give a
    client.
    """

    def __init__(self, addresses: Sequence[str], options: ClientOptions) -> None:
        self._work = _connect(addresses, options)
        self._client: AsyncClient | None = None

    def __await__(self) -> Generator[Any, Any, AsyncClient]:
        return self._work.__await__()

    async def __aenter__(self) -> AsyncClient:
        self._client = await self._work
        return self._client

    async def __aexit__(self, *_: object) -> None:
        assert self._client is not None, "it was entered"
        await self._client.close()

    def send(self, value: Any) -> Any:
        return self._work.send(value)

    def throw(self, *error: Any) -> Any:
        return self._work.throw(*error)

    def close(self) -> None:
        self._work.close()


async def _connect(addresses: Sequence[str], options: ClientOptions) -> AsyncClient:
    engine = Engine(addresses, options)
    await engine.start()
    return AsyncClient(engine, addresses)


class AsyncOperations(InKeyspace, ABC):
    """The operations of an asyncio client, in one keyspace."""

    @abstractmethod
    async def _run_single(self, single: PendingOperation) -> Any:
        """Submit an operation and wait for its result."""

    async def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return await work

    get = awaitable(ClientApi.get)
    get_entry = awaitable(ClientApi.get_entry)
    put = awaitable(ClientApi.put)
    delete = awaitable(ClientApi.delete)
    exists = awaitable(ClientApi.exists)
    increment = awaitable(ClientApi.increment)
    touch = awaitable(ClientApi.touch)
    get_or_put = awaitable(ClientApi.get_or_put)
    get_many = awaitable(ClientApi.get_many)
    get_entries = awaitable(ClientApi.get_entries)
    put_many = awaitable(ClientApi.put_many)
    delete_many = awaitable(ClientApi.delete_many)
    scan = async_iterable(ClientApi.scan)
    changes = async_iterable(ClientApi.changes)
    cluster_status = awaitable(ClientApi.cluster_status)

    async def _scan(self, open_pages: Callable[[], Pages]) -> AsyncIterator[Entry]:
        pages = open_pages()
        try:
            while (page := await pages.next()) is not None:
                for entry in page:
                    yield entry
        finally:
            pages.close()

    async def _changes(self, open_feed: Callable[[], ChangeFeed]) -> AsyncIterator[ChangeBatch]:
        feed = open_feed()
        try:
            while True:
                yield await feed.next()
        finally:
            feed.close()

    def batch(self, routing_key: BytesLike) -> AsyncBatch:
        """Return an atomic batch; see :meth:`koinon.Client.batch`. Its ``commit`` is awaited."""
        return AsyncBatch(self, routing_key)

    def sharded(self, key: BytesLike, shards: int) -> AsyncSharded:
        """Return a counter or a set, spread over this many shards; see
        :meth:`koinon.Client.sharded`.
        """
        return AsyncSharded(self, key, shards)

    def group(self, name: str, **arguments: Unpack[GroupArguments]) -> AsyncGroup:
        """Return a consumer in a group: ``async with client.group("billing") as group: async for
        batch in group: ...; await batch.commit()``. Arguments are those of :class:`koinon.Group`;
        the callbacks may be coroutine functions.
        """
        return AsyncGroup(self, name, arguments)

    async def _load(self, load: Load, chunks: Iterable[Chunk]) -> WriteResult:
        with load.observed():
            try:
                for step in load.steps(chunks):
                    await step
            except BaseException as error:
                # a second error must not hide the one that ended the load
                with suppress(KoinonError):
                    await load.abandon()
                raise load.error_for_caller(error) from error.__cause__
            return load.result()


class AsyncClient(AsyncOperations):
    """A client for one event loop; tasks share it freely. Made by :func:`koinon.aio.connect`. On
    another loop every call raises ``WrongEventLoopError`` at once.

    Every call has a deadline (``timeout_ms``, or that of ``connect``). Until then refusals are
    retried; when it passes, ``UnavailableError`` says that nothing was applied, and
    ``UnknownFateError`` that a write may have been. If a call is cancelled after its write was
    sent, the write may be applied.
    """

    def __init__(self, engine: Engine, addresses: Sequence[str]) -> None:
        self._connected = engine
        self._addresses = addresses
        if engine.options.observer is not None:  # clients without an observer pay nothing for it
            self._run_single = self._run_observed  # type: ignore[method-assign]
            engine.observing.watch(self)

    def __repr__(self) -> str:
        engine = self._connected
        return described(
            "AsyncClient", self._addresses, engine.router.routing, closed=engine.closed
        )

    @property
    def _engine(self) -> Engine:  # type: ignore[override]
        """The engine; raises unless the caller runs on the engine's loop."""
        self._connected.check_loop()
        return self._connected

    async def keyspace(self, name: str) -> AsyncKeyspaceClient:
        """Return the operations of this client in another keyspace, when awaited: ``carts = await
        client.keyspace("carts")``; see :meth:`koinon.Client.keyspace`.
        """
        return AsyncKeyspaceClient(self, await self._engine.open_keyspace(name))

    async def table(self) -> Table:
        """Return the partition table that this client knows."""
        return self._engine.routing().table

    async def close(self) -> None:
        """End the operations under way and close the connections. Idempotent."""
        await self._engine.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _run_observed(self, single: PendingOperation) -> Any:
        with self._engine.observing.operation(single.kind.value, 1):
            return await AsyncClient._run_single(self, single)

    async def _run_single(self, single: PendingOperation) -> Any:
        future = asyncio.get_running_loop().create_future()
        self._engine.singles.submit(single, lambda ended: _resolve(future, ended))
        try:
            return await future
        except asyncio.CancelledError:
            self._engine.singles.abandon(single)
            raise


AsyncClient.__module__ = "koinon"


class AsyncKeyspaceClient(InOpenedKeyspace, AsyncOperations):
    """A client's operations in one keyspace; see :class:`koinon.KeyspaceClient`. Made by
    :meth:`koinon.AsyncClient.keyspace`.
    """

    _client: AsyncClient

    async def _run_single(self, single: PendingOperation) -> Any:
        return await self._client._run_single(single)


AsyncKeyspaceClient.__module__ = "koinon"


def _resolve(future: asyncio.Future[Any], ended: PendingOperation) -> None:
    if future.done():
        return
    if ended.error is not None:
        future.set_exception(ended.error)
    else:
        future.set_result(ended.result)
