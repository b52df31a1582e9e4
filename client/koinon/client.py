"""The blocking client: the same engine on an event loop of its own, in a background thread.

Threads send single operations themselves, each on a socket of its own, to nodes that offer RESP.
What does not go as it should, and all else, is handed to the loop and waited for.
"""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import os
import sys
import threading
import time
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, Unpack, cast

from koinon.core.batching import PendingOperation
from koinon.core.closing import Closing
from koinon.core.feeds import ChangeBatch
from koinon.core.row_chunks import Chunk
from koinon.driver.batch import Batch
from koinon.driver.change_feed import ChangeFeed
from koinon.driver.client_api import ClientApi, InOpenedKeyspace, described
from koinon.driver.engine import Engine
from koinon.driver.scan_pages import Pages
from koinon.driver.sharded import Sharded
from koinon.driver.writes import Load
from koinon.options import ClientOptions, Options, parse, with_options
from koinon.types import BytesLike, Entry, WriteResult
from koinon_proto.contract.errors import (
    ClientClosedError,
    ConditionFailedError,
    ConfigurationError,
    KoinonError,
    UnknownFateError,
)

if TYPE_CHECKING:
    from koinon_proto.contract.table import Table

T = TypeVar("T")

_WAKE_AGAIN_S = 1.0
"""A thread that waits for the loop wakes it again after so long: signals may have interrupted
another thread on its way to wake it."""
_ENDED_POLL_S = 0.01

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


def _make_task(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
    """Return a task that asyncio forgets as soon as it has ended. Else it does so when the task is
    freed, in Python, on whichever thread collects garbage: what a signal handler raises in the main
    thread at that moment is lost.
    """
    task = asyncio.Task(work, loop=loop, **options)
    task.add_done_callback(asyncio._unregister_task)
    return task


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

    def _scan(self, open_pages: Callable[[], Pages]) -> Iterator[Entry]:
        return self._records_of(open_pages())

    def _records_of(self, pages: Pages) -> Iterator[Entry]:
        first = True
        try:
            while not pages.ended and (page := self._page(pages, first=first)) is not None:
                yield from page
                first = False
        finally:
            if not pages.ended:
                with suppress(KoinonError):
                    self._wake(pages.close)

    def _changes(self, open_feed: Callable[[], ChangeFeed]) -> Iterator[ChangeBatch]:
        return self._batches_of(open_feed())

    def _batches_of(self, feed: ChangeFeed) -> Iterator[ChangeBatch]:
        try:
            while True:
                yield self._run(feed.next())
        finally:
            with suppress(KoinonError):
                self._wake(feed.close)

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

    def _load(self, load: Load, chunks: Iterable[Chunk]) -> WriteResult:
        with load.observed():
            try:
                for step in load.steps(chunks):
                    self._run(step)
            except BaseException as error:
                with suppress(KoinonError):  # it must not hide what ended the load
                    self._run(load.abandon())
                raise load.error_for_caller(error) from error.__cause__
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
        _refuse_gevent()
        self._addresses = addresses
        self._options = options
        # One thread closes; in a child, one connects. A signal handler may close in the thread that
        # closes.
        self._close_lock = threading.RLock()
        if options.observer is not None:  # others pay nothing for it
            self._run_single = self._run_observed  # type: ignore[method-assign]
        self._connect()
        if options.observer is not None:
            self._engine.observing.watch(self)
        _open_clients.add(self)

    def _connect(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(_report)
        self._loop.set_task_factory(_make_task)
        self._submissions: deque[_Waiter] = deque()  # for the loop to take
        self._stopped = False  # the loop was told to stop, and knows
        self._wake_due = False  # the loop has been told of them and has not looked yet
        self._thread = threading.Thread(target=self._serve, name="koinon-client", daemon=True)
        self._thread.start()
        self._stopping = False  # the loop takes no more
        try:
            self._engine = self._run(_make_engine(self._addresses, self._options))
        except BaseException:
            self._stop_loop()
            raise

    def _begin_anew(self) -> None:
        """In a forked child: the loop, its thread, and whoever held a lock stayed in the parent."""
        if isinstance(self._engine, Engine) and self._engine.pools is not None:
            self._engine.pools.let_go()
        self._close_lock = threading.RLock()
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
        ends with the client. Each call asks the coordinators: keep the result. (The asyncio client
        returns it once this is awaited: ``carts = await client.keyspace("carts")``.)

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
                if not self._stopping:  # else a signal has interrupted this before
                    with suppress(ClientClosedError):  # a signal handler has closed it meanwhile
                        self._run(self._engine.close())
                self._stop_loop()
            _open_clients.discard(self)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        try:  # on this thread, which no signal interrupts half-way
            self._refuse_all()  # what was handed over too late
            self._loop.run_until_complete(_end_tasks())
        finally:
            self._loop.close()
            self._refuse_all()  # what came since: its wake-up found the loop open, but not running

    def _stop_loop(self) -> None:
        self._stopping = True
        with suppress(KoinonError):  # a close that was interrupted has stopped it
            self._wake(self._stop_once)
        self._thread.join()
        while not self._loop.is_closed():  # Python counts a thread as ended once a join of it was
            time.sleep(_ENDED_POLL_S)  # interrupted, and this is the close after that

    def _stop_once(self) -> None:
        """On the loop: stop it, unless it was stopped and now ends its tasks."""
        if not self._stopped:
            self._stopped = True
            self._loop.stop()

    def _wake(self, callback: Callable[..., object], *args: Any) -> None:
        """Call back on the loop."""
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:  # the loop was closed since this call began
            raise ClientClosedError() from None

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and return what it returns."""
        waiter = _WorkWaiter(work)
        self._wait_for(waiter)
        if waiter.error is not None:
            raise waiter.error
        return cast(T, waiter.result)

    def _run_single(self, single: PendingOperation) -> Any:
        failure = self._run_here(single)
        if not single.done:
            self._wait_for(_SingleWaiter(single, failure))
        if single.error is not None:
            raise single.error
        return single.result

    def _run_observed(self, single: PendingOperation) -> Any:
        with self._engine.observing.operation(single.kind.value, 1):
            return Client._run_single(self, single)

    def _run_here(self, single: PendingOperation) -> KoinonError | None:
        """Try the operation on a socket of this thread, if there is one. A success or a final error
        ends it; any other error is returned, and the engine decides about a retry.
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

    def _wait_for(self, waiter: _Waiter) -> None:
        """Hand something over to the loop, and wait until that has ended.

        A signal handler may raise between any two steps of a main thread. So this thread does
        nothing that has to be undone, and holds no lock: it appends to a deque, wakes the loop, and
        waits for a lock of its own. All else, giving up included, happens on the loop.
        """
        try:
            self._submissions.append(waiter)
            if not self._wake_due:  # else a wake-up is on its way, and will find this one
                self._wake_due = True
                self._wake_to_submit()
            while not waiter.lock.acquire(timeout=_WAKE_AGAIN_S):
                self._wake_to_submit()
        except BaseException:  # this thread was interrupted, maybe before the loop was told
            self._wake_to_submit()
            with suppress(KoinonError):
                self._wake(waiter.abandon, self)
            raise

    def _wake_to_submit(self) -> None:
        try:
            self._wake(self._submit_all)
        except KoinonError:
            self._refuse_all()  # others may have relied on this wake-up

    def _submit_all(self) -> None:
        """On the loop: begin what threads have handed over."""
        self._wake_due = False  # before the first look: what comes later wakes the loop again
        while (waiter := self._next_submission()) is not None:
            if self._stopping:
                waiter.refuse(ClientClosedError())
            else:
                waiter.begin(self)

    def _refuse_all(self) -> None:
        """The loop has stopped, and the engine is closed: end what threads hand over all the
        same.
        """
        while (waiter := self._next_submission()) is not None:
            waiter.refuse(ClientClosedError())

    def _next_submission(self) -> _Waiter | None:
        try:
            return self._submissions.popleft()
        except IndexError:
            return None


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


class _Waiter(Protocol):
    """A thread's wait for the loop. All methods run on the loop, but for ``refuse`` once the loop
    has stopped; ``lock`` is free as soon as the wait is over.
    """

    lock: threading.Lock

    def begin(self, client: Client) -> None:
        """Begin what is waited for, unless the thread is gone."""

    def refuse(self, error: KoinonError) -> None:
        """End the wait by the error: nothing was begun."""

    def abandon(self, client: Client) -> None:
        """The thread is gone."""


class _SingleWaiter:
    """A wait for a single operation; ``failure``: the error of the thread's own attempt, if any."""

    __slots__ = ("_begun", "_failure", "_gone", "_single", "lock")

    def __init__(self, single: PendingOperation, failure: KoinonError | None) -> None:
        self._single = single
        self._failure = failure
        self._begun = self._gone = False
        self.lock = threading.Lock()
        self.lock.acquire()

    def begin(self, client: Client) -> None:
        if self._gone:
            return
        try:
            client._engine.singles.submit(self._single, self._end, self._failure)
            self._begun = True
        except KoinonError as error:
            self.refuse(error)

    def refuse(self, error: KoinonError) -> None:
        self._single.fail(error)
        self._end(self._single)

    def abandon(self, client: Client) -> None:
        self._gone = True
        if self._begun:
            client._engine.singles.abandon(self._single)

    def _end(self, _: PendingOperation) -> None:
        self.lock.release()


class _WorkWaiter:
    """A wait for a coroutine, which runs in the context that the thread has now. Once it is handed
    over, only the loop's thread may touch it: closing a coroutine runs its ``finally`` blocks.
    """

    __slots__ = ("_context", "_gone", "_task", "_work", "error", "lock", "result")

    def __init__(self, work: Coroutine[Any, Any, Any]) -> None:
        self._work = work
        self._context = contextvars.copy_context()
        self._task: asyncio.Task[Any] | None = None
        self._gone = False
        self.result: Any = None
        self.error: BaseException | None = None
        self.lock = threading.Lock()
        self.lock.acquire()

    def begin(self, client: Client) -> None:
        if not self._gone:
            self._task = client._loop.create_task(self._work, context=self._context)
            self._task.add_done_callback(self._end)

    def refuse(self, error: KoinonError) -> None:
        self._work.close()  # it was never begun
        self.error = error
        self.lock.release()

    def abandon(self, _: Client) -> None:
        self._gone = True
        if self._task is None:
            self._work.close()
        else:
            self._task.cancel()

    def _end(self, task: asyncio.Task[Any]) -> None:
        if task.cancelled():
            self.error = ClientClosedError()
        elif (error := task.exception()) is not None:
            self.error = error
        else:
            self.result = task.result()
        self._task = None  # asyncio is told of its end in Python: on the thread that drops it last
        self.lock.release()


def _refuse_gevent() -> None:
    """Refuse to connect where gevent has replaced threads by greenlets, in which the client's loop
    would keep all others from running, and ``connect`` would never return.

    Raises:
        ConfigurationError
    """
    monkey = sys.modules.get("gevent.monkey")
    if monkey is not None and monkey.is_module_patched("threading"):
        raise ConfigurationError(
            reason="gevent has patched threads, without which the client cannot run: use it in a "
            "process in which gevent.monkey is not applied"
        )


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
