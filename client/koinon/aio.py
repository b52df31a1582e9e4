"""The asyncio client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from koinon.core.batching import Kind, PendingOperation
from koinon.core.row_chunks import Chunk
from koinon.driver.engine import Engine
from koinon.driver.scans import Pages
from koinon.driver.writes import Load
from koinon.options import ClientOptions, parse_addresses
from koinon.types import Durability, Entry, WriteResult

if TYPE_CHECKING:
    from koinon_proto.contract.table import Table
    from koinon_proto.v1.admin_pb2 import ClusterStatus


async def connect(coordinators: str | Sequence[str], **options: Any) -> AsyncClient:
    """Return a client of the cluster that these coordinators (or nodes) belong to.

    Args:
        coordinators: ``"host:port,host:port"`` or a sequence of such; any one that answers serves.
        options: the fields of :class:`koinon.ClientOptions`.

    Raises:
        ClusterNotReadyError: the cluster still waits for its first nodes, up to the deadline.
        UnavailableError: nobody answered in time.
    """
    engine = Engine(parse_addresses(coordinators), ClientOptions(**options))
    try:
        await engine.start()
    except BaseException:
        await engine.close()
        raise
    return AsyncClient(engine)


class AsyncClient:
    """A client for one event loop; tasks share it freely. Made by :func:`koinon.aio.connect`. On
    another loop every call raises ``WrongEventLoopError``, at once.

    Every call has a deadline (``timeout_ms``, or that of ``connect``). Inside it, refusals are
    retried; when it passes, ``UnavailableError`` says that nothing was applied, and
    ``UnknownFateError`` that a write may have been. A cancelled write that was sent may be applied.
    """

    def __init__(self, engine: Engine) -> None:
        self._connected = engine

    @property
    def _engine(self) -> Engine:
        """The engine, for a call from its own loop."""
        self._connected.check_loop()
        return self._connected

    async def get(self, key: bytes, *, timeout_ms: int | None = None) -> bytes | None:
        """Return the value, or None."""
        single = self._engine.make_single(Kind.GET, key, timeout_ms=timeout_ms)
        value: bytes | None = await self._run(single)
        return value

    async def get_entry(self, key: bytes, *, timeout_ms: int | None = None) -> Entry | None:
        """Return the record with its version and expiry, or None."""
        single = self._engine.make_single(Kind.GET_ENTRY, key, timeout_ms=timeout_ms)
        entry: Entry | None = await self._run(single)
        return entry

    async def put(
        self,
        key: bytes,
        value: bytes,
        *,
        ttl_ms: int | None = None,
        if_version: int | None = None,
        retry_unknown: bool | None = None,
        durability: Durability = "all_in_sync",
        timeout_ms: int | None = None,
    ) -> int:
        """Write a record and return its version; see :meth:`koinon.Client.put`."""
        single = self._engine.make_single(
            Kind.PUT,
            key,
            value=value,
            ttl_ms=ttl_ms,
            if_version=if_version,
            retry_unknown=retry_unknown,
            durability=durability,
            timeout_ms=timeout_ms,
        )
        version: int = await self._run(single)
        return version

    async def delete(
        self,
        key: bytes,
        *,
        if_version: int | None = None,
        retry_unknown: bool | None = None,
        durability: Durability = "all_in_sync",
        timeout_ms: int | None = None,
    ) -> bool:
        """Delete a record; return whether there was one. See :meth:`koinon.Client.delete`."""
        single = self._engine.make_single(
            Kind.DELETE,
            key,
            if_version=if_version,
            retry_unknown=retry_unknown,
            durability=durability,
            timeout_ms=timeout_ms,
        )
        found: bool = await self._run(single)
        return found

    async def get_many(
        self, keys: Iterable[bytes], *, timeout_ms: int | None = None
    ) -> list[bytes | None]:
        """Return the values in the order of the keys, None for those without a record. Keys go in
        batches, side by side; ``timeout_ms`` bounds each, not the whole.
        """
        return await self._engine.read_many(
            as_columns(keys), want_entries=False, timeout_ms=timeout_ms
        )

    async def get_entries(
        self, keys: Iterable[bytes], *, timeout_ms: int | None = None
    ) -> list[Entry | None]:
        """Return the records, as :meth:`get_many` does the values."""
        return await self._engine.read_many(
            as_columns(keys), want_entries=True, timeout_ms=timeout_ms
        )

    async def put_many(
        self,
        items: Mapping[bytes, bytes] | Iterable[tuple[bytes, bytes]],
        *,
        ttl_ms: int | None = None,
        retry_unknown: bool | None = None,
        durability: Durability = "all_in_sync",
        timeout_ms: int | None = None,
    ) -> WriteResult:
        """Write any number of records; see :meth:`koinon.Client.put_many`."""
        engine = self._engine
        load = Load(
            engine,
            ttl_ms=ttl_ms,
            timeout_ms=timeout_ms,
            retry_unknown=retry_unknown,
            durability=durability,
        )
        return await self._load(load, engine.put_chunks(items))

    async def delete_many(
        self,
        keys: Iterable[bytes],
        *,
        retry_unknown: bool | None = None,
        durability: Durability = "all_in_sync",
        timeout_ms: int | None = None,
    ) -> WriteResult:
        """Delete any number of records; see :meth:`koinon.Client.delete_many`."""
        engine = self._engine
        load = Load(
            engine,
            ttl_ms=None,
            timeout_ms=timeout_ms,
            retry_unknown=retry_unknown,
            durability=durability,
        )
        return await self._load(load, engine.delete_chunks(keys))

    async def _load(self, load: Load, chunks: Iterable[Chunk]) -> WriteResult:
        try:
            for step in load.steps(chunks):
                await step
        except BaseException as error:
            await load.abandon()
            raise load.told(error) from error.__cause__
        return load.result()

    async def scan(
        self,
        *,
        prefix: bytes = b"",
        page_rows: int = 1_000,
        keys_only: bool = False,
        timeout_ms: int | None = None,
    ) -> AsyncIterator[Entry]:
        """Yield the records whose keys begin with ``prefix``; see :meth:`koinon.Client.scan`."""
        pages = Pages(
            self._engine,
            prefix=prefix,
            page_rows=page_rows,
            keys_only=keys_only,
            timeout_ms=timeout_ms,
        )
        try:
            while (page := await pages.next()) is not None:
                for entry in page:
                    yield entry
        finally:
            pages.close()

    async def table(self) -> Table:
        """Return the partition table as this client holds it."""
        return self._engine.routing().table

    async def cluster_status(self, *, timeout_ms: int | None = None) -> ClusterStatus:
        """Return the coordinators' view of the cluster, the leader's if there is one."""
        engine = self._engine
        return await engine.discovery.cluster_status(engine.timeout_ms(timeout_ms))

    async def close(self) -> None:
        """End what is under way and close the connections. Idempotent."""
        await self._engine.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def _run(self, single: PendingOperation) -> Any:
        future = asyncio.get_running_loop().create_future()
        self._engine.submit(single, lambda ended: _resolve(future, ended))
        try:
            return await future
        except asyncio.CancelledError:
            self._engine.abandon(single)
            raise


def _resolve(future: asyncio.Future[Any], ended: PendingOperation) -> None:
    if future.done():
        return
    if ended.error is not None:
        future.set_exception(ended.error)
    else:
        future.set_result(ended.result)


def as_columns(keys: Iterable[bytes]) -> Sequence[bytes]:
    """Return the keys as a list or tuple."""
    if isinstance(keys, bytes | str):
        raise TypeError(f"keys must be an iterable of bytes, not {type(keys).__name__}")
    return keys if isinstance(keys, list | tuple) else list(keys)
