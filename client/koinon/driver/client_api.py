"""The operations of both clients: their arguments, types and documentation, written once.

Each client implements ``_run``, ``_run_single``, ``_load`` and ``_scan``, which wait for work: the
blocking client returns the result, the asyncio client an awaitable or an asynchronous iterator.
``awaitable`` and ``async_iterable`` give a method the asyncio client's type.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import (
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import TYPE_CHECKING, Any, Concatenate, NoReturn, ParamSpec, TypeVar

from koinon.core.batching import Kind, PendingOperation
from koinon.core.feeds import ChangeBatch
from koinon.core.operations import WriteOptions
from koinon.core.row_chunks import Chunk
from koinon.core.scanning import ScanQuery
from koinon.core.target import Target
from koinon.driver.change_feed import ChangeFeed, FeedQuery, Since
from koinon.driver.engine import Engine
from koinon.driver.scan_pages import Pages
from koinon.driver.writes import Load
from koinon.types import BytesLike, Durability, Entry, Row, WriteResult

if TYPE_CHECKING:
    from koinon.core.routing import Routing
    from koinon_proto.v1.admin_pb2 import ClusterStatus

T = TypeVar("T")
P = ParamSpec("P")


class InKeyspace:
    """An engine, and the keyspace of the operations. The base of both clients."""

    _engine: Engine

    def __reduce_ex__(self, _protocol: object) -> NoReturn:
        """Refuse to be pickled or copied: a copy would share the connections, and close them.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            f"a {type(self).__name__} cannot be pickled or copied, since it holds connections: "
            "share it between threads or tasks, and connect anew in other processes"
        )

    @property
    def _target(self) -> Target:
        """The keyspace of the operations."""
        return self._engine.target

    def _single(self, kind: Kind, key: BytesLike, **options: Any) -> PendingOperation:
        """Return an operation, ready to run; ``options`` are the options of
        ``SingleOperations.make``.
        """
        return self._engine.singles.make(self._target, kind, key, **options)

    def _open_pages(self, query: ScanQuery, timeout_ms: int | None) -> Pages:
        """Return the pages of a scan."""
        with self._engine.observing.call("scan"):
            # in a forked child, this attribute access replaces the engine by a new one
            self._engine.routing()
            return Pages(self._engine, self._target, query, timeout_ms)

    def _open_feed(self, query: FeedQuery, timeout_ms: int | None) -> ChangeFeed:
        """Return a change feed."""
        self._engine.routing()
        return ChangeFeed(self._engine, self._target, query, timeout_ms)

    def _retries_unknown(self, asked: bool | None) -> bool:
        """Return whether attempts of unknown fate are repeated; None: the client's default."""
        return self._engine.options.retry_unknown if asked is None else asked


class InOpenedKeyspace(InKeyspace):
    """A client's engine, with another keyspace."""

    def __init__(self, client: Any, target: Target) -> None:
        self._client = client
        self._opened = target

    def __repr__(self) -> str:
        return f"<keyspace {self._opened.name!r} of {self._client!r}>"

    @property
    def _engine(self) -> Engine:  # type: ignore[override]
        engine: Engine = self._client._engine
        return engine

    @property
    def _target(self) -> Target:
        return self._opened


class ClientApi(InKeyspace, ABC):
    """A client's operations, typed as the blocking client has them."""

    @abstractmethod
    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the engine's loop and wait for it."""

    @abstractmethod
    def _run_single(self, single: PendingOperation) -> Any:
        """Submit an operation and wait for its result."""

    @abstractmethod
    def _load(self, load: Load, chunks: Iterable[Chunk]) -> WriteResult:
        """Write the chunks; return the result of the load."""

    @abstractmethod
    def _scan(self, open_pages: Callable[[], Pages]) -> Iterator[Entry]:
        """Yield the records of the pages that ``open_pages`` returns. The asyncio client calls it
        when the first record is requested, on the caller's loop.
        """

    @abstractmethod
    def _changes(self, open_feed: Callable[[], ChangeFeed]) -> Iterator[ChangeBatch]:
        """Yield the batches of the feed that ``open_feed`` returns, and close the feed at the
        end.
        """

    # --- single records -------------------------------------------------------------------------

    def get(self, key: BytesLike, *, timeout_ms: int | None = None) -> bytes | None:
        """Return the value, or None."""
        value: bytes | None = self._run_single(self._single(Kind.GET, key, timeout_ms=timeout_ms))
        return value

    def get_entry(self, key: BytesLike, *, timeout_ms: int | None = None) -> Entry | None:
        """Return the record with its version and expiry, or None."""
        entry: Entry | None = self._run_single(
            self._single(Kind.GET_ENTRY, key, timeout_ms=timeout_ms)
        )
        return entry

    def put(
        self,
        key: BytesLike,
        value: BytesLike,
        *,
        ttl_ms: int | None = None,
        if_version: int | None = None,
        retry_unknown: bool | None = None,
        durability: Durability = "all_in_sync",
        timeout_ms: int | None = None,
    ) -> int:
        """Write a record and return its version.

        Args:
            ttl_ms: the record expires this many milliseconds after the write. None: the keyspace's
                default, or never.
            if_version: write only if the record has this version; 0: only if there is none.
            retry_unknown: repeat an attempt of unknown fate instead of raising (default: the option
                of ``connect``). The record may then be written twice, and the second write may
                overwrite what another client wrote in between; the returned version is that of the
                last write. A conditional write is never repeated: its second attempt would meet its
                own first one.
            durability: ``"all_in_sync"``: acknowledged once the record is durable on every in-sync
                replica. ``"primary"``: once it is durable on the primary, which is sooner, but
                OUTSIDE the promise that no acknowledged write is lost: a failover may lose it.

        Raises:
            InvalidArgumentError: the value or ``ttl_ms`` is beyond the keyspace's limit.
            ConditionFailedError: the record has another version; nothing was written.
            UnknownFateError: the write was sent, and no reply came.
            UnavailableError: the deadline passed; nothing was written.
        """
        version: int = self._run_single(
            self._single(
                Kind.PUT,
                key,
                value=value,
                ttl_ms=ttl_ms,
                if_version=if_version,
                retry_unknown=retry_unknown,
                durability=durability,
                timeout_ms=timeout_ms,
            )
        )
        return version

    def delete(
        self,
        key: BytesLike,
        *,
        if_version: int | None = None,
        retry_unknown: bool | None = None,
        durability: Durability = "all_in_sync",
        timeout_ms: int | None = None,
    ) -> bool:
        """Delete a record; return whether there was one.

        Arguments and errors are those of :meth:`put`. If an attempt of unknown fate was repeated,
        the result is that of the last attempt: it may be False although the first attempt deleted
        the record.
        """
        found: bool = self._run_single(
            self._single(
                Kind.DELETE,
                key,
                if_version=if_version,
                retry_unknown=retry_unknown,
                durability=durability,
                timeout_ms=timeout_ms,
            )
        )
        return found

    def exists(self, key: BytesLike, *, timeout_ms: int | None = None) -> bool:
        """Return whether the record exists."""
        found: bool = self._run_single(self._single(Kind.EXISTS, key, timeout_ms=timeout_ms))
        return found

    # --- updates: the primary reads, decides and writes in one step ------------------------------

    def increment(
        self,
        key: BytesLike,
        by: int = 1,
        *,
        ttl_ms: int | None = None,
        durability: Durability = "all_in_sync",
        timeout_ms: int | None = None,
    ) -> int:
        """Add to an integer and return the sum. The value is decimal text of 64 bits with a sign; a
        missing record counts as 0.

        An increment of unknown fate is never repeated, whatever ``retry_unknown`` says.

        Args:
            ttl_ms: if the increment creates the record, it expires after this many milliseconds
                (None: as with :meth:`put`). An existing record keeps its expiry.

        Raises:
            NotANumberError, NumberOverflowError: nothing was written.
            UnknownFateError: it was sent, and no reply came; it may have been counted.
            UnavailableError: the deadline passed; it was not counted.
        """
        total: int = self._run_single(
            self._single(
                Kind.INCREMENT,
                key,
                by=by,
                ttl_ms=ttl_ms,
                durability=durability,
                timeout_ms=timeout_ms,
            )
        )
        return total

    def touch(
        self,
        key: BytesLike,
        ttl_ms: int | None,
        *,
        durability: Durability = "all_in_sync",
        timeout_ms: int | None = None,
    ) -> bool:
        """Set the record's expiry to ``ttl_ms`` from now (None: never); return whether the record
        exists. Errors are those of :meth:`increment`, and InvalidArgumentError if ``ttl_ms`` is
        beyond the keyspace's limit.
        """
        found: bool = self._run_single(
            self._single(
                Kind.TOUCH, key, ttl_ms=ttl_ms, durability=durability, timeout_ms=timeout_ms
            )
        )
        return found

    def get_or_put(
        self,
        key: BytesLike,
        value: BytesLike,
        *,
        ttl_ms: int | None = None,
        durability: Durability = "all_in_sync",
        timeout_ms: int | None = None,
    ) -> bytes:
        """Return the record's value; if there is no record, write this value and return it.
        ``ttl_ms`` applies to a record that this call writes. Errors are those of :meth:`increment`.
        """
        found: bytes = self._run_single(
            self._single(
                Kind.GET_OR_PUT,
                key,
                value=value,
                ttl_ms=ttl_ms,
                durability=durability,
                timeout_ms=timeout_ms,
            )
        )
        return found

    # --- many records ---------------------------------------------------------------------------

    def get_many(
        self, keys: Iterable[BytesLike], *, timeout_ms: int | None = None
    ) -> list[bytes | None]:
        """Return the values in the order of the keys, None for keys without a record. Keys are sent
        in concurrent batches; ``timeout_ms`` limits each batch, not the whole call.
        """
        return self._run(
            self._engine.rows.read(
                self._target, _as_columns(keys), want_entries=False, timeout_ms=timeout_ms
            )
        )

    def get_entries(
        self, keys: Iterable[BytesLike], *, timeout_ms: int | None = None
    ) -> list[Entry | None]:
        """Return the records in the order of the keys, as :meth:`get_many` returns the values."""
        return self._run(
            self._engine.rows.read(
                self._target, _as_columns(keys), want_entries=True, timeout_ms=timeout_ms
            )
        )

    def put_many(
        self,
        items: Mapping[bytes, BytesLike] | Iterable[Row],
        *,
        ttl_ms: int | None = None,
        if_absent: bool = False,
        retry_unknown: bool | None = None,
        durability: Durability = "all_in_sync",
        timeout_ms: int | None = None,
    ) -> WriteResult:
        """Write any number of records; return counts, and the rows that failed.

        The input may be a generator of millions of rows: it is read as fast as the nodes accept
        rows, and only failed rows are remembered. Of rows with the same key the last wins.
        ``timeout_ms`` limits each batch, not the whole call. ``durability`` is that of :meth:`put`.

        Args:
            items: pairs of key and value; or key, value and the row's own time to live in
                milliseconds, where None stands for ``ttl_ms``.
            if_absent: write only rows whose keys have no record. The others are counted as
                ``present``; so is a row, with ``retry_unknown``, whose first attempt was applied
                but had no reply.

        Raises:
            InvalidArgumentError, TypeError: a row is invalid; the error names it. If the input has
                a length, nothing was sent; rows of an iterator before the bad one may have been
                written.
        """
        chunks = self._engine.rows.put_chunks(self._target, items)
        options = WriteOptions(
            ttl_ms=ttl_ms,
            if_absent=if_absent,
            retry_unknown=self._retries_unknown(retry_unknown),
            durability=durability,
        )
        load = Load(self._engine, self._target, "put_many", options, timeout_ms)
        return self._load(load, chunks)

    def delete_many(
        self,
        keys: Iterable[BytesLike],
        *,
        retry_unknown: bool | None = None,
        durability: Durability = "all_in_sync",
        timeout_ms: int | None = None,
    ) -> WriteResult:
        """Delete any number of records; as :meth:`put_many`. ``absent`` counts those not found."""
        chunks = self._engine.rows.delete_chunks(keys)
        options = WriteOptions(
            retry_unknown=self._retries_unknown(retry_unknown), durability=durability
        )
        load = Load(self._engine, self._target, "delete_many", options, timeout_ms)
        return self._load(load, chunks)

    def scan(
        self,
        *,
        prefix: BytesLike = b"",
        start: BytesLike = b"",
        limit: int | None = None,
        reverse: bool = False,
        page_rows: int = 1_000,
        keys_only: bool = False,
        timeout_ms: int | None = None,
    ) -> Iterator[Entry]:
        """Yield the records whose keys begin with ``prefix``, a page at a time.

        Records come partition by partition and by key inside each, in no global order. If the
        prefix includes all routing bytes of its keys (``city/`` with ``until:2f``), only one
        partition is read, and all records come in order. Every record that exists throughout the
        scan is yielded once; a record written during the scan may be missed.

        Args:
            start: only records with this key or a greater one; with ``reverse`` a lesser one.
            limit: the most records to yield, from whichever partitions come first.
            reverse: keys descend inside each partition.
            page_rows: the number of records in a page.
            keys_only: values are left empty.
            timeout_ms: limits each page.
        """
        query = ScanQuery(
            prefix=prefix,
            start=start,
            limit=limit,
            reverse=reverse,
            page_rows=page_rows,
            keys_only=keys_only,
        )
        return self._scan(lambda: self._open_pages(query, timeout_ms))

    def changes(
        self,
        *,
        prefix: BytesLike = b"",
        since: Since = None,
        keys_only: bool = False,
        timeout_ms: int | None = None,
    ) -> Iterator[ChangeBatch]:
        """Yield the changes of keys that begin with ``prefix``, in batches, without end. An empty
        batch comes after a second without a change.

        A change is yielded once it is durable on every in-sync replica, so no failover takes it
        back. The versions of a key rise, and its newest version is never left out; older ones may
        be. A change may come twice, for instance after a failover. docs/feed.md says how to write a
        consumer.

        Args:
            since: ``positions`` of an earlier batch, or ``str`` of them: yield all changes after
                it. None: yield every existing record, then changes. ``"now"``: only changes from
                now on.
            keys_only: values of puts are left empty.
            timeout_ms: how long a partition may be out of reach before the feed ends; a minute by
                default.

        Raises:
            SnapshotNeededError, HistoryBranchedError: a partition cannot continue from its
                position: leave it out of ``since`` (``positions.without``) to begin it with a
                snapshot.
            WrongClusterError, InvalidArgumentError: ``since`` is of another cluster or keyspace.
            PermissionDeniedError: the caller may not ``feed`` all keys with this prefix.
            UnavailableError: no node served a partition for the timeout.
        """
        query = FeedQuery(prefix=prefix, since=since, keys_only=keys_only)
        return self._changes(lambda: self._open_feed(query, timeout_ms))

    def cluster_status(self, *, timeout_ms: int | None = None) -> ClusterStatus:
        """Return the cluster's status as the coordinators' leader sees it, or another coordinator
        if there is no leader.
        """
        engine = self._engine
        return self._run(engine.discovery.cluster_status(engine.timeout_ms(timeout_ms)))


def awaitable(
    method: Callable[Concatenate[Any, P], T],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """Return the asyncio client's form of a ``ClientApi`` method: a coroutine function with the
    same arguments and documentation.
    """

    @functools.wraps(method)
    async def call(face: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        work: Any = method(face, *args, **kwargs)
        result: T = await work
        return result

    return call


def async_iterable(
    method: Callable[Concatenate[Any, P], Iterator[T]],
) -> Callable[Concatenate[Any, P], AsyncIterator[T]]:
    """Return the asyncio client's form of a ``ClientApi`` method that yields: a function with the
    same arguments and documentation that returns an asynchronous iterator.
    """

    @functools.wraps(method)
    def call(face: Any, /, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[T]:
        entries: Any = method(face, *args, **kwargs)
        found: AsyncIterator[T] = entries
        return found

    return call


def described(name: str, addresses: Sequence[str], routing: Routing | None, *, closed: bool) -> str:
    """Return the ``repr`` of a client, with its addresses and its cluster."""
    at = ",".join(addresses)
    if closed:
        return f"<koinon.{name} of {at}, closed>"
    if routing is None:
        return f"<koinon.{name} of {at}, not connected yet>"
    nodes = len(routing.addresses) - 1
    cluster = routing.table.cluster.cluster_id
    return f"<koinon.{name} of {at}: cluster {cluster}, {nodes} node{'s' * (nodes != 1)}>"


def _as_columns(keys: Iterable[BytesLike]) -> Sequence[BytesLike]:
    """Return the keys as a list or tuple."""
    if isinstance(keys, BytesLike | str):
        raise TypeError(f"keys must be an iterable of bytes, not {type(keys).__name__}")
    return keys if isinstance(keys, list | tuple) else list(keys)
