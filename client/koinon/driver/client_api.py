"""The operations that both clients have: their arguments, types and texts, written once.

A face says in ``_run``, ``_run_single``, ``_load`` and ``_scan`` how work is waited for: the
blocking client returns its result, and the asyncio client an awaitable or an iterator.
``awaitable`` and ``async_iterable`` give a method the type that it has there.
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
    """An engine, and the keyspace of the operations that go over it. Both faces have these."""

    _engine: Engine

    def __reduce_ex__(self, _protocol: object) -> NoReturn:
        """Refuse to be pickled or copied: a copy would share the connections, and close them.

        Raises:
            TypeError
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
        """Return an operation, ready to be run; ``options`` are those of the engine's."""
        return self._engine.singles.make(self._target, kind, key, **options)

    def _open_pages(self, query: ScanQuery, timeout_ms: int | None) -> Pages:
        """Return the pages of a scan."""
        with self._engine.observing.call("scan"):
            self._engine.routing()  # in a forked child the engine stands from here on
            return Pages(self._engine, self._target, query, timeout_ms)

    def _open_feed(self, query: FeedQuery, timeout_ms: int | None) -> ChangeFeed:
        """Return a change feed."""
        self._engine.routing()
        return ChangeFeed(self._engine, self._target, query, timeout_ms)

    def _retries_unknown(self, asked: bool | None) -> bool:
        """Return whether attempts of unknown fate are repeated: the client's default for None."""
        return self._engine.options.retry_unknown if asked is None else asked


class InOpenedKeyspace(InKeyspace):
    """The same over a client's engine, in a keyspace of its own choice."""

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
        """Wait for the engine's work."""

    @abstractmethod
    def _run_single(self, single: PendingOperation) -> Any:
        """Submit an operation and wait for its result."""

    @abstractmethod
    def _load(self, load: Load, chunks: Iterable[Chunk]) -> WriteResult:
        """Write the chunks."""

    @abstractmethod
    def _scan(self, open_pages: Callable[[], Pages]) -> Iterator[Entry]:
        """Yield the records of the pages that ``open_pages`` returns. The asyncio client opens them
        with the first record that is asked for, on the loop on which it is.
        """

    @abstractmethod
    def _changes(self, open_feed: Callable[[], ChangeFeed]) -> Iterator[ChangeBatch]:
        """Yield the batches of the feed that ``open_feed`` returns; end it after the last."""

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
            ttl_ms: the record expires so many milliseconds after the write. None: after those
                that the keyspace has as its default, or never.
            if_version: write only if the record has this version; 0: only if there is none.
            retry_unknown: repeat an attempt of unknown fate instead of raising (default: as given
                at ``connect``). The record may then be written twice, and the second may overwrite
                what another client wrote in between; the version returned is that of the last. A
                conditional write is never repeated: its second attempt would meet its first.
            durability: ``"all_in_sync"``: answered once the record is durable on every in-sync
                replica. ``"primary"``: once it is durable on the primary, which is sooner, but
                OUTSIDE the promise that no acknowledged write is lost: a failover may lose it.

        Raises:
            InvalidArgumentError: the value or ``ttl_ms`` is beyond the keyspace's limit.
            ConditionFailedError: the record has another version; nothing was written.
            UnknownFateError: the write was sent, and no answer came.
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

        Arguments and errors are those of :meth:`put`. After a repeated attempt of unknown fate
        the answer is that of the last attempt, which may have found the first one's work done.
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
        """Return whether there is a record."""
        found: bool = self._run_single(self._single(Kind.EXISTS, key, timeout_ms=timeout_ms))
        return found

    # --- updates: the primary reads, decides and writes, with nothing in between ----------------

    def increment(
        self,
        key: BytesLike,
        by: int = 1,
        *,
        ttl_ms: int | None = None,
        durability: Durability = "all_in_sync",
        timeout_ms: int | None = None,
    ) -> int:
        """Add to an integer and return the sum. The value is decimal text of 64 bits with a sign;
        no record counts as 0.

        An increment of unknown fate is never repeated, whatever ``retry_unknown`` says.

        Args:
            ttl_ms: a record that this makes expires so many milliseconds later (None: as with
                :meth:`put`). One that is there keeps its expiry.

        Raises:
            NotANumberError, NumberOverflowError: nothing was written.
            UnknownFateError: it was sent, and no answer came; it may have been counted.
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
        """Have the record expire ``ttl_ms`` from now (None: never); return whether there is one.
        Errors are those of :meth:`increment`, and InvalidArgumentError where that is longer than
        the records of the keyspace may live.
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
        """Return the record's value; if there is none, write this one and return it. ``ttl_ms`` is
        of the record that this makes. Errors are those of :meth:`increment`.
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
        """Return the values in the order of the keys, None for those without a record. Keys go in
        batches, side by side; ``timeout_ms`` bounds each, not the whole.
        """
        return self._run(
            self._engine.rows.read(
                self._target, _as_columns(keys), want_entries=False, timeout_ms=timeout_ms
            )
        )

    def get_entries(
        self, keys: Iterable[BytesLike], *, timeout_ms: int | None = None
    ) -> list[Entry | None]:
        """Return the records, as :meth:`get_many` does the values."""
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
        """Write any number of records; return what became of each.

        The input may be a generator of millions of rows: it is read as fast as the nodes take it,
        and only failed rows are remembered. Of rows with the same key the last wins. ``timeout_ms``
        bounds each batch, not the whole. ``durability`` is that of :meth:`put`.

        Args:
            items: pairs of key and value; or key, value and the row's own time to live in
                milliseconds, where None stands for ``ttl_ms``.
            if_absent: write only rows whose keys have no record. The others are counted as
                ``present``; so is a row, with ``retry_unknown``, whose first attempt was applied
                but had no answer.

        Raises:
            InvalidArgumentError, TypeError: a row is bad; the error names it. Nothing is sent if
                the input has a length; of an iterator, rows before it may have been written.
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

        Records come partition by partition, by key inside each; not in order over all. Where the
        prefix holds what the keyspace's router takes of a key (``city/`` with ``until:2f``), one
        partition is asked, and all come in order. Every record that is there throughout is yielded
        once; what is written meanwhile may be missed.

        Args:
            start: only records with this key or a greater one; with ``reverse`` a lesser one.
            limit: at most so many records, of the partitions that happen to come first.
            reverse: inside each partition the keys descend.
            page_rows: records that are fetched at a time.
            keys_only: the values are empty.
            timeout_ms: bounds each page.
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
        """Yield what is written to keys that begin with ``prefix``, in batches, without end. An
        empty batch comes after a second without a change.

        Only what is durable on every in-sync replica is told, so no failover takes it back. Of each
        key, versions rise, and the newest is never left out; older ones may be. A change may come
        twice, after a failover say. docs/feed.md says how to write a consumer.

        Args:
            since: ``positions`` of an earlier batch, or their text: all that came after. None:
                every record that there is, then what changes. ``"now"``: only what changes.
            keys_only: the values of what was put are empty.
            timeout_ms: how long a partition may be out of reach before the feed ends; by default a
                minute.

        Raises:
            SnapshotNeededError, HistoryBranchedError: a partition cannot go on from its position:
                leave it out of ``since`` (``positions.without``) to begin it anew.
            WrongClusterError, InvalidArgumentError: ``since`` is of another cluster or keyspace.
            PermissionDeniedError: the caller may not ``feed`` all keys with this prefix.
            UnavailableError: a partition was not served for the timeout.
        """
        query = FeedQuery(prefix=prefix, since=since, keys_only=keys_only)
        return self._changes(lambda: self._open_feed(query, timeout_ms))

    def cluster_status(self, *, timeout_ms: int | None = None) -> ClusterStatus:
        """Return the coordinators' view of the cluster, the leader's if there is one."""
        engine = self._engine
        return self._run(engine.discovery.cluster_status(engine.timeout_ms(timeout_ms)))


def awaitable(
    method: Callable[Concatenate[Any, P], T],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """Return a method of ``ClientApi`` for a client whose ``_run``, ``_run_single`` and ``_load``
    return awaitables: a coroutine function of the same arguments and text.
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
    """Return a method of ``ClientApi`` for a client whose ``_scan`` returns asynchronous iterators:
    a function of the same arguments and text.
    """

    @functools.wraps(method)
    def call(face: Any, /, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[T]:
        entries: Any = method(face, *args, **kwargs)
        found: AsyncIterator[T] = entries
        return found

    return call


def described(name: str, addresses: Sequence[str], routing: Routing | None, *, closed: bool) -> str:
    """Return what ``repr`` says of a client: where it is connected."""
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
