"""The blocking client: the same engine on an event loop of its own, in a background thread.

Threads send single operations themselves, each on a socket of its own, to nodes that offer RESP.
What does not go as it should, and all else, is handed to the loop and waited for.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, cast

from koinon.core.batching import PendingOperation
from koinon.core.closing import Closing
from koinon.core.row_chunks import Chunk
from koinon.driver.batch import Batch
from koinon.driver.client_api import ClientApi, InOpenedKeyspace, described
from koinon.driver.engine import Engine
from koinon.driver.scans import Pages
from koinon.driver.sharded import Sharded
from koinon.driver.writes import Load
from koinon.options import ClientOptions, Options, parse, with_options
from koinon.types import BytesLike, Entry, WriteResult
from koinon_proto.contract.errors import (
    ClientClosedError,
    ConditionFailedError,
    KoinonError,
    UnknownFateError,
)

if TYPE_CHECKING:
    from koinon_proto.contract.table import Table

T = TypeVar("T")

_open_clients: weakref.WeakSet[Client] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Close what the program left open, while its threads can still be joined."""
    for client in list(_open_clients):
        client.close()


def _begin_anew() -> None:
    """In a forked child: let clients of the parent's connect for themselves."""
    for client in list(_open_clients):
        client._begin_anew()


os.register_at_fork(after_in_child=_begin_anew)


def _report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log what a callback on the loop has raised, but for one complaint of gRPC's.

    gRPC hears of calls on whichever loop runs, and hands the news to the loop of the call. That may
    be closed by then: of another client of this program, which was closed with calls under way. The
    last news of these calls concern no caller.
    """
    is_grpc = "PollerCompletionQueue" in context.get("message", "")
    if not (is_grpc and str(context.get("exception")) == "Event loop is closed"):
        loop.default_exception_handler(context)


@with_options
def connect(coordinators: str | Sequence[str] | None = None, **options: Unpack[Options]) -> Client:
    """Return a client of the cluster that these coordinators (or nodes) belong to.

    Args:
        coordinators: ``"host:port,host:port"`` or a sequence of such; any one that answers serves.
            Or a URL with options, ``"koinon://host:port,host:port?timeout_ms=500"``. By default
            the environment's ``KOINON_URL``.
        options: the fields of :class:`koinon.ClientOptions`.

    Raises:
        ClusterNotReadyError: the cluster still waits for its first nodes, up to the deadline.
        ConfigurationError: there is no address, or an option has no sense.
        NobodyListensError, UnknownHostError: no address can be connected to. Raised at once.
        UnavailableError: no address answered in time.
    """
    return Client(*parse(coordinators, options))


class Operations(ClientApi):
    """The operations of a blocking client, in one keyspace."""

    @abstractmethod
    def _wake(self, callback: Callable[..., object], *args: Any) -> None:
        """Call back on the engine's loop."""

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

        Raises:
            UnsupportedVersionError: a node is of a build that knows no ``start`` and ``reverse``.
        """
        pages = self._pages(
            prefix=prefix,
            start=start,
            limit=limit,
            reverse=reverse,
            page_rows=page_rows,
            keys_only=keys_only,
            timeout_ms=timeout_ms,
        )
        return self._scan(pages)

    def _scan(self, pages: Pages) -> Iterator[Entry]:
        first = True
        try:
            while not pages.ended and (page := self._page(pages, first=first)) is not None:
                yield from page
                first = False
        finally:
            if not pages.ended:
                with suppress(KoinonError):
                    self._wake(pages.close)

    def _page(self, pages: Pages, *, first: bool) -> list[Entry] | None:
        with self._engine.observing.call("scan"):
            page = pages.fetch_here(self._engine) if first else None
            if page is None and not pages.ended:
                return self._run(pages.next())
        if not pages.ended:
            with suppress(KoinonError):  # closed: who asks for the next page is told
                self._wake(pages.prefetch)
        return page

    def batch(self, routing_key: BytesLike) -> Batch:
        """Return an atomic batch of operations on keys with the same routing bytes as this key:
        ``client.batch(b"{u7}").put(b"{u7}/a", b"1").delete(b"{u7}/b").commit()``. Which bytes of a
        key route it says the cluster's partitioner (:class:`koinon.driver.batch.BatchBuilder`).
        """
        return Batch(self, routing_key)

    def sharded(self, key: BytesLike, shards: int) -> Sharded:
        """Return a counter, or a set, in so many shards (1 to 256), which lie in different
        partitions: ``client.sharded(b"visits", 8).increment()``, and ``total()`` to read. For what
        is written too often for one partition, and only needs a sum or a union.

        Raises:
            InvalidArgumentError: too many shards, or the keyspace's router does not tell them
                apart.
        """
        return Sharded(self, key, shards)

    def _load(self, chunks: Iterable[Chunk], **options: Any) -> WriteResult:
        load = Load(self._engine, self._target, **options)
        with load.observed():
            try:
                for step in load.steps(chunks):
                    self._run(step)
            except BaseException as error:
                with suppress(KoinonError):  # it must not hide what ended the load
                    self._run(load.abandon())
                raise load.told(error) from error.__cause__
            return load.result()


class Client(Operations, Closing):
    """A blocking client; threads share it freely. Made by :func:`koinon.connect`.

    Every call has a deadline (``timeout_ms``, or that of ``connect``). Inside it, refusals are
    retried; when it passes, ``UnavailableError`` says that nothing was applied, and
    ``UnknownFateError`` that a write may have been.

    In a forked child a client that the parent has open connects by itself, with the first call; the
    parent's goes on, and nothing that the parent had under way is repeated in the child. A scan
    of the parent's is not read on in the child (``WrongEventLoopError``).
    """

    def __init__(self, addresses: Sequence[str], options: ClientOptions) -> None:
        self._addresses = addresses
        self._options = options
        self._close_lock = threading.Lock()  # one thread closes; in a child, one connects
        if options.observer is not None:  # others pay nothing for it
            self._run_single = self._run_observed  # type: ignore[method-assign]
        self._connect()
        if options.observer is not None:
            self._engine.observing.watch(self)
        _open_clients.add(self)

    def _connect(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(_report)
        self._submissions: deque[_Waiter] = deque()  # for the loop to take
        self._wake_due = False  # the loop has been told of them and has not looked yet
        self._thread = threading.Thread(target=self._serve, name="koinon-client", daemon=True)
        self._thread.start()
        self._submit_lock = threading.Lock()  # orders submissions and the loop's stop
        self._stopping = False  # the loop takes no more; under the lock
        try:
            self._engine = self._run(_make_engine(self._addresses, self._options))
        except BaseException:
            self._stop_loop()
            raise

    def _begin_anew(self) -> None:
        """In a forked child: the loop, its thread, and whoever held a lock stayed in the parent."""
        if isinstance(self._engine, Engine) and self._engine.pools is not None:
            self._engine.pools.let_go()
        self._close_lock = threading.Lock()
        self._engine = cast(Engine, _NotConnected(self))

    def _connected(self, former: _NotConnected) -> Engine:
        """Return the engine in a forked child; the first call connects."""
        with self._close_lock:
            if former.closed:
                raise ClientClosedError
            if cast(object, self._engine) is former:
                self._connect()
            return self._engine

    def __repr__(self) -> str:
        engine = self._engine
        routing = None if isinstance(engine, _NotConnected) else engine.router.routing
        return described("Client", self._addresses, routing, closed=engine.closed)

    def keyspace(self, name: str) -> KeyspaceClient:
        """Return the operations of this client in another keyspace. It shares the connections, and
        ends with the client. Each call asks the coordinators: keep the result.

        Raises:
            UnknownKeyspaceError: there is none of this name.
        """
        return KeyspaceClient(self, self._run(self._engine.open_keyspace(name)))

    def table(self) -> Table:
        """Return the partition table as this client holds it."""
        return self._engine.routing().table

    # --- the background loop --------------------------------------------------------------------

    def close(self) -> None:
        """End what is under way and close the connections. Idempotent."""
        with self._close_lock:
            if isinstance(self._engine, _NotConnected):
                self._engine.closed = True
            elif not self._loop.is_closed():  # the engine is closed before it has ended
                self._run(self._engine.close())
                self._stop_loop()
            _open_clients.discard(self)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _stop_loop(self) -> None:
        with self._submit_lock:
            self._stopping = True
        self._wake(self._loop.stop)
        self._thread.join()
        self._submit_all()  # what was handed over too late is refused
        self._loop.run_until_complete(_end_tasks())
        self._loop.close()
        self._refuse_all()  # what came since: its wake-up found the loop open, but not running

    def _wake(self, callback: Callable[..., object], *args: Any) -> None:
        """Call back on the loop."""
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:  # the loop was closed since this call began
            raise ClientClosedError() from None

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and return what it returns."""
        try:
            with self._submit_lock:  # what is submitted before the loop stops is ended with it
                if self._stopping:
                    raise ClientClosedError()
                future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        except BaseException:
            work.close()
            raise
        try:
            return future.result()
        except CancelledError:
            raise ClientClosedError() from None
        except BaseException:
            future.cancel()  # in case it was this thread that was interrupted
            raise

    def _run_single(self, single: PendingOperation) -> Any:
        failure = self._run_here(single)
        if not single.done:
            self._hand_over(single, failure)
        if single.error is not None:
            raise single.error
        return single.result

    def _run_observed(self, single: PendingOperation) -> Any:
        with self._engine.observing.operation(single.kind.value, 1):
            return Client._run_single(self, single)

    def _run_here(self, single: PendingOperation) -> KoinonError | None:
        """Carry the operation out on a socket of this thread's, if there is one; return the error
        that the attempt came to, if the engine is to see to it. What is final ends here.
        """
        engine = self._engine
        routing = engine.router.routing
        assert routing is not None, "the engine has started"
        pools = engine.pools
        if pools is None:
            return None
        owner = routing.owner_of[single.partition_id]
        pool = pools.by_place.get((owner, single.keyspace_id))
        if pool is None:
            return None
        failure = pool.run(single, routing)
        if isinstance(failure, ConditionFailedError) or (
            isinstance(failure, UnknownFateError) and not single.idempotent
        ):
            single.fail(failure)
        elif isinstance(failure, UnknownFateError):
            single.maybe_applied = single.write
        return failure

    def _hand_over(self, single: PendingOperation, failure: KoinonError | None) -> None:
        """Let the engine end the operation, and wait for that."""
        waiter = _Waiter(single, failure)
        try:
            self._submissions.append(waiter)
            if not self._wake_due:  # else a wake-up is on its way, and will find this one
                self._wake_due = True
                self._wake_to_submit()
            waiter.lock.acquire()
        except BaseException:  # this thread was interrupted, maybe before the loop was told
            self._wake_to_submit()
            with suppress(KoinonError):
                self._wake(self._engine.singles.abandon, single)
            raise

    def _wake_to_submit(self) -> None:
        try:
            self._wake(self._submit_all)
        except KoinonError:
            self._refuse_all()  # others may have relied on this wake-up

    def _submit_all(self) -> None:
        """On the loop: begin what threads have handed over."""
        self._wake_due = False  # before the first look: what comes later wakes the loop again
        submissions = self._submissions
        while submissions:
            waiter = submissions.popleft()
            try:
                self._engine.singles.submit(waiter.single, waiter.end, waiter.failure)
            except KoinonError as error:
                waiter.single.fail(error)
                waiter.end(waiter.single)

    def _refuse_all(self) -> None:
        """The loop is closed, and the engine with it: end what threads hand over all the same."""
        with self._submit_lock:
            self._submit_all()


Client.__module__ = "koinon"


class KeyspaceClient(InOpenedKeyspace, Operations):
    """A client's operations in one keyspace. Made by :meth:`koinon.Client.keyspace`.

    Once the keyspace has been dropped every call raises ``UnknownKeyspaceError``, also where one
    has been created since under its name.
    """

    _client: Client

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._client._run(work)

    def _run_single(self, single: PendingOperation) -> Any:
        return self._client._run_single(single)

    def _wake(self, callback: Callable[..., object], *args: Any) -> None:
        self._client._wake(callback, *args)


KeyspaceClient.__module__ = "koinon"


class _NotConnected:
    """Stands for a client's engine in a forked child. What asks it for anything connects, and is
    given what the engine has.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self.closed = False

    def __getattr__(self, name: str) -> Any:
        engine = self._client._engine
        if cast(object, engine) is self:  # else it has connected since: no lock, on any thread
            engine = self._client._connected(self)
        return getattr(engine, name)


class _Waiter:
    """A thread's wait for one operation, and what its own attempt came to."""

    __slots__ = ("failure", "lock", "single")

    def __init__(self, single: PendingOperation, failure: KoinonError | None) -> None:
        self.single = single
        self.failure = failure
        self.lock = threading.Lock()
        self.lock.acquire()

    def end(self, _: PendingOperation) -> None:
        self.lock.release()


async def _make_engine(addresses: Sequence[str], options: ClientOptions) -> Engine:
    engine = Engine(addresses, options, threads=True)
    await engine.start()
    return engine


async def _end_tasks() -> None:
    """End what still runs on a loop that is about to close."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    if tasks:
        _, late = await asyncio.wait(tasks, timeout=1.0)
        for task in late:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
