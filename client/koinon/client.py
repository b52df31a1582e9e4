"""The blocking client: the same engine on an event loop of its own, in a background thread.

Threads send single operations themselves, each on a socket of its own, to nodes that offer RESP.
Everything else, and operations that fail there, is handed to the loop, and the thread waits for it.
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
from koinon.driver.group import Group, GroupArguments
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
"""A thread that waits for the loop wakes it again after this time: a signal may have interrupted
another thread that was about to wake it.
"""
_ENDED_POLL_S = 0.01

_open_clients: weakref.WeakSet[Client] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Close the clients that the program left open, while its threads can still be joined."""
    for client in list(_open_clients):
        client.close()


def _begin_anew() -> None:
    """Prepare the parent's clients in a forked child: each connects again at its next call."""
    for client in list(_open_clients):
        client._begin_anew()


os.register_at_fork(after_in_child=_begin_anew)


def _report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an exception of a callback on the loop, except one complaint of gRPC's.

    gRPC learns of events on whichever loop runs, and hands them to the loop of the call. That loop
    may be closed by then, if it was another client's that was closed with calls under way. Events
    of such calls concern no caller.
    """
    is_grpc = "PollerCompletionQueue" in context.get("message", "")
    if not (is_grpc and str(context.get("exception")) == "Event loop is closed"):
        loop.default_exception_handler(context)


def _make_task(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
    """Return a task that asyncio forgets as soon as the task has ended. By default asyncio forgets
    it when it is freed, in Python code, on whichever thread collects garbage: an exception that a
    signal handler raises in the main thread at that moment would be lost.
    """
    task = asyncio.Task(work, loop=loop, **options)
    task.add_done_callback(asyncio._unregister_task)
    return task


@with_options
def connect(coordinators: str | Sequence[str] | None = None, **options: Unpack[Options]) -> Client:
    """Connect to the cluster that these coordinators (or nodes) belong to; return a client.

    Args:
        coordinators: ``"host:port,host:port"`` or a sequence of addresses; one that answers is
            enough. Or a URL with options, ``"koinon://host:port,host:port?timeout_ms=500"``. By
            default the environment's ``KOINON_URL``.
        options: the fields of :class:`koinon.ClientOptions`.

    Raises:
        ClusterNotReadyError: the cluster still waits for its first nodes, up to the deadline.
        ConfigurationError: there is no address, or an option is invalid.
        NobodyListensError, UnknownHostError: no address accepts a connection. Raised at once.
        UnavailableError: no address answered in time.
    """
    return Client(*parse(coordinators, options))


class Operations(ClientApi):
    """The operations of a blocking client, in one keyspace."""

    @abstractmethod
    def _wake(self, callback: Callable[..., object], *args: Any) -> None:
        """Call a function on the engine's loop."""

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
            with suppress(KoinonError):  # closed: asking for the next page raises the error
                self._wake(pages.prefetch)
        return page

    def batch(self, routing_key: BytesLike) -> Batch:
        """Return an atomic batch of operations on keys with the same routing bytes as this key:
        ``client.batch(b"{u7}").put(b"{u7}/a", b"1").delete(b"{u7}/b").commit()``. The keyspace's
        router decides which bytes of a key are its routing bytes
        (:class:`koinon.driver.batch.BatchBuilder`).
        """
        return Batch(self, routing_key)

    def sharded(self, key: BytesLike, shards: int) -> Sharded:
        """Return a counter or a set, spread over this many shards (1 to 256) in different
        partitions: ``client.sharded(b"visits", 8).increment()``, and ``total()`` to read. It suits
        data that is written too often for one partition, and read only as a sum or a union.

        Raises:
            InvalidArgumentError: too many shards, or the keyspace's router cannot place them apart.
        """
        return Sharded(self, key, shards)

    def group(self, name: str, **arguments: Unpack[GroupArguments]) -> Group:
        """Return a consumer in a group, whose consumers share the partitions of some keyspaces:
        ``with client.group("billing") as group: for batch in group: ...; batch.commit()``. See
        :class:`koinon.Group` for the arguments and docs/groups.md for a consumer.
        """
        return Group(self, name, arguments)

    def _load(self, load: Load, chunks: Iterable[Chunk]) -> WriteResult:
        with load.observed():
            try:
                for step in load.steps(chunks):
                    self._run(step)
            except BaseException as error:
                # a second error must not hide the one that ended the load
                with suppress(KoinonError):
                    self._run(load.abandon())
                raise load.error_for_caller(error) from error.__cause__
            return load.result()


class Client(Operations, Closing):
    """A blocking client; threads share it freely. Made by :func:`koinon.connect`.

    Every call has a deadline (``timeout_ms``, or that of ``connect``). Until then refusals are
    retried; when it passes, ``UnavailableError`` says that nothing was applied, and
    ``UnknownFateError`` that a write may have been.

    In a forked child, a client of the parent's connects anew with its first call. The parent's
    client continues, and the child repeats none of the parent's operations. A scan that the parent
    has begun cannot be continued in the child (``WrongEventLoopError``).
    """

    def __init__(self, addresses: Sequence[str], options: ClientOptions) -> None:
        _refuse_gevent()
        self._addresses = addresses
        self._options = options
        # One thread closes the client; in a child, one connects it. Reentrant, since a signal
        # handler may call ``close`` in the thread that is in ``close``.
        self._close_lock = threading.RLock()
        if options.observer is not None:  # clients without an observer pay nothing for it
            self._run_single = self._run_observed  # type: ignore[method-assign]
        self._connect()
        if options.observer is not None:
            self._engine.observing.watch(self)
        _open_clients.add(self)

    def _connect(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(_report)
        self._loop.set_task_factory(_make_task)
        # waits of threads that the loop has not begun yet
        self._submissions: deque[_Waiter] = deque()
        self._stopped = False  # set on the loop once it was told to stop
        # a wake-up is on its way, and the loop has not emptied ``_submissions`` since
        self._wake_due = False
        self._thread = threading.Thread(target=self._serve, name="koinon-client", daemon=True)
        self._thread.start()
        self._stopping = False  # the loop accepts no more work
        try:
            self._engine = self._run(_make_engine(self._addresses, self._options))
        except BaseException:
            self._stop_loop()
            raise

    def _begin_anew(self) -> None:
        """In a forked child: drop the loop, its thread and all locks, which stayed in the
        parent.
        """
        if isinstance(self._engine, Engine) and self._engine.pools is not None:
            self._engine.pools.let_go()
        self._close_lock = threading.RLock()
        self._engine = cast(Engine, _NotConnected(self))

    def _connected(self, former: _NotConnected) -> Engine:
        """Connect in a forked child unless another thread has; return the engine."""
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
        """Return the operations of this client in another keyspace. They share the client's
        connections, and end with the client. Each call asks the coordinators: keep the result. (For
        the asyncio client, await it: ``carts = await client.keyspace("carts")``.)

        Raises:
            UnknownKeyspaceError: there is no keyspace of this name.
        """
        return KeyspaceClient(self, self._run(self._engine.open_keyspace(name)))

    def table(self) -> Table:
        """Return the partition table that this client knows."""
        return self._engine.routing().table

    # --- the background loop --------------------------------------------------------------------

    def close(self) -> None:
        """End the operations under way and close the connections. Idempotent."""
        with self._close_lock:
            if isinstance(self._engine, _NotConnected):
                self._engine.closed = True
            # ``engine.closed`` is set earlier, before the engine has ended
            elif not self._loop.is_closed():
                if not self._stopping:  # False: a signal has interrupted an earlier call here
                    with suppress(ClientClosedError):  # a signal handler has closed it meanwhile
                        self._run(self._engine.close())
                self._stop_loop()
            _open_clients.discard(self)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        try:  # on this thread, which no signal interrupts half-way
            self._refuse_all()  # work that was handed over too late
            self._loop.run_until_complete(_end_tasks())
        finally:
            self._loop.close()
            self._refuse_all()  # work whose wake-up found the loop open, but not running

    def _stop_loop(self) -> None:
        self._stopping = True
        with suppress(KoinonError):  # an interrupted ``close`` has already stopped it
            self._wake(self._stop_once)
        self._thread.join()
        # After an interrupted join, Python counts the thread as ended, although it may still run.
        while not self._loop.is_closed():
            time.sleep(_ENDED_POLL_S)  # interrupted, and this is the close after that

    def _stop_once(self) -> None:
        """On the loop: stop it, unless it was already stopped and is now ending its tasks."""
        if not self._stopped:
            self._stopped = True
            self._loop.stop()

    def _wake(self, callback: Callable[..., object], *args: Any) -> None:
        """Call a function on the loop."""
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:  # the loop was closed since this call began
            raise ClientClosedError() from None

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop; return its result."""
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
        ends the operation; any other error is returned, and the engine decides about a retry.
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
        failure = pool.send(single, routing)
        if isinstance(failure, ConditionFailedError) or (
            isinstance(failure, UnknownFateError) and not single.idempotent
        ):
            single.fail(failure)
        elif isinstance(failure, UnknownFateError):
            single.maybe_applied = single.write
        return failure

    def _wait_for(self, waiter: _Waiter) -> None:
        """Hand a wait over to the loop, and block until it has ended.

        A signal handler may raise between any two steps of the main thread. So this thread does
        nothing that would have to be undone, and holds no lock: it appends to a deque, wakes the
        loop, and waits for a lock of its own. Everything else, also abandoning the wait, happens on
        the loop.
        """
        try:
            self._submissions.append(waiter)
            if not self._wake_due:  # if True, the wake-up on its way will find this wait
                self._wake_due = True
                self._wake_to_submit()
            while not waiter.lock.acquire(timeout=_WAKE_AGAIN_S):
                self._wake_to_submit()
        except BaseException:  # this thread was interrupted, perhaps before it woke the loop
            self._wake_to_submit()
            with suppress(KoinonError):
                self._wake(waiter.abandon, self)
            raise

    def _wake_to_submit(self) -> None:
        try:
            self._wake(self._submit_all)
        except KoinonError:
            self._refuse_all()  # other threads may have relied on this wake-up

    def _submit_all(self) -> None:
        """On the loop: begin the waits that threads have handed over."""
        self._wake_due = False  # cleared first: later submissions wake the loop again
        while (waiter := self._next_submission()) is not None:
            if self._stopping:
                waiter.refuse(ClientClosedError())
            else:
                waiter.begin(self)

    def _refuse_all(self) -> None:
        """After the loop has stopped and the engine is closed: fail the waits that threads still
        hand over.
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

    Once the keyspace has been dropped every call raises ``UnknownKeyspaceError``, even if a new
    keyspace has been created under its name.
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
    """Takes the engine's place in a forked child until the first use: any attribute access
    connects, and returns the new engine's attribute.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self.closed = False

    def __getattr__(self, name: str) -> Any:
        engine = self._client._engine
        if cast(object, engine) is self:  # no lock, on any thread, once the client has connected
            engine = self._client._connected(self)
        return getattr(engine, name)


class _Waiter(Protocol):
    """A thread's wait for the loop. All methods run on the loop, except ``refuse`` once the loop
    has stopped; ``lock`` is released when the wait is over.
    """

    lock: threading.Lock

    def begin(self, client: Client) -> None:
        """Begin the work, unless the thread has abandoned the wait."""

    def refuse(self, error: KoinonError) -> None:
        """End the wait with this error: the work was not begun."""

    def abandon(self, client: Client) -> None:
        """Cancel the work: the waiting thread was interrupted."""


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
    """A wait for a coroutine, which runs in the thread's present context. Once it is handed over,
    only the loop's thread may touch it: closing a coroutine runs its ``finally`` blocks.
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
        self._work.close()  # the coroutine was never begun
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
        # Released here on the loop's thread: asyncio runs Python code when the task is freed.
        self._task = None
        self.lock.release()


def _refuse_gevent() -> None:
    """Refuse to connect where gevent has replaced threads by greenlets: the client's loop would
    keep all others from running, and ``connect`` would never return.

    Raises:
        ConfigurationError: gevent has patched threads.
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
    """Cancel and await the tasks that still run on a loop that is about to close."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    if tasks:
        _, late = await asyncio.wait(tasks, timeout=1.0)
        for task in late:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
