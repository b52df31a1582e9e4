"""Virtual time for asyncio: nothing waits, nothing is read from outside, one order of events.

The loop runs one handle at a time; when nothing is ready, its clock jumps to the next timer. Every
handle belongs to a simulated process, or to none (the network, the disks, the faults): the process
is found in the handle's context, which tasks and futures' callbacks inherit. The handles of a
paused process are held back until it goes on; those of a dead one are dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import heapq
import random
import warnings
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

EVENTS_AT_ONCE_MAX = 200_000
TASKS_KEPT_MAX = 2_000
THREAD_S = 0.002
EVENT_S = 1e-7  # what each takes: who waits for the least moment does not wait for ever

_PROCESS: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


def _end(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


class StuckError(Exception):
    """The simulation cannot go on: nothing is due any more, or time stands still."""


class _Task(asyncio.Task[Any]):
    """A task whose place in a set does not depend on its address: a TaskGroup cancels its tasks in
    the order of a set.
    """

    def __init__(self, work: Any, *, number: int, **options: Any) -> None:
        self._number = number  # before the base class adds the task to a set
        super().__init__(work, **options)

    def __hash__(self) -> int:
        return self._number


class _Future(asyncio.Future[Any]):
    """A future whose place in a set does not depend on its address."""

    def __init__(self, *, number: int, loop: asyncio.AbstractEventLoop) -> None:
        self._number = number
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self._number


class Process:
    """One life of a simulated process: its gate. Threads beside the first one have gates of their
    own: all are paused, go on and end together, and one that is stuck holds up no other.
    """

    def __init__(self, loop: VirtualLoop, name: str) -> None:
        self.name = name
        self.alive = True
        self.paused = False
        self.stuck = False  # its own work takes for ever
        self.held: list[asyncio.Handle] = []
        self.threads = [self]
        self.tasks: list[asyncio.Task[Any]] = []
        self._loop = loop
        context = contextvars.Context()
        context.run(_PROCESS.set, self)
        self.context = context
        loop.processes.append(self)

    @property
    def runs(self) -> bool:
        return not (self.paused or self.stuck)

    def thread(self) -> Process:
        """Return another thread of this process."""
        thread = Process(self._loop, self.name)
        self.threads.append(thread)
        return thread

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run the coroutine in this process. It must not fail."""
        task = self._loop.create_task(work, context=self.context.copy())
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._loop.failures.append({"message": f"{self.name} failed", "exception": error})

    def forget_tasks(self) -> None:
        """Forget the tasks that have ended. One whose error was not looked at is a failure."""
        for task in self.tasks:
            if task.done() and task._log_traceback:
                self._ended(task)
        self.tasks = [task for task in self.tasks if not task.done()]

    def call_soon(self, callback: Callable[..., object], *arguments: Any) -> None:
        self._loop.call_soon(callback, *arguments, context=self.context)

    def call_later(
        self, delay_s: float, callback: Callable[..., object], *arguments: Any
    ) -> asyncio.TimerHandle:
        timer: asyncio.TimerHandle = self._loop.call_later(
            delay_s, callback, *arguments, context=self.context
        )
        return timer

    def kill(self) -> None:
        """Let nothing of it run any more, not even what cleans up."""
        for thread in self.threads:
            thread.alive = False
            thread.held.clear()

    def pause(self) -> None:
        for thread in self.threads:
            thread.paused = True

    def resume(self, rng: random.Random) -> None:
        """Go on; what came in from outside may be seen before the timers that were due."""
        timers_last = rng.random() < 0.5
        for thread in self.threads:
            thread.paused = False
            thread._release(timers_last=timers_last)

    def hang(self) -> None:
        """Let this thread do nothing; the others go on."""
        self.stuck = True

    def release(self, rng: random.Random) -> None:
        """End that, as ``resume`` does."""
        if self.stuck:
            self.stuck = False
            self._release(timers_last=rng.random() < 0.5)

    def _release(self, *, timers_last: bool) -> None:
        if not self.runs:
            return
        held, self.held = self.held, []
        if timers_last:
            held.sort(key=lambda handle: isinstance(handle, asyncio.TimerHandle))
        self._loop.ready.extend(held)


class VirtualLoop(asyncio.BaseEventLoop):
    """See the module's text. ``after_event`` is called after every handle."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.events = 0
        self.after_event: Callable[[Process | None], None] = lambda _: None
        self.failures: list[dict[str, Any]] = []
        self.processes: list[Process] = []  # dead ones too: see _make_task
        self.ready: Any = self._ready  # type: ignore[attr-defined]
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._timers_made = 0
        self._futures_made = 0  # tasks among them
        self._at_once = 0
        self._over = False
        self.set_exception_handler(lambda _, context: self.failures.append(context))
        factory: Any = _make_task
        self.set_task_factory(factory)

    @property
    def is_over(self) -> bool:
        return self._over

    def time(self) -> float:
        return self.now

    def next_number(self) -> int:
        """Return the number of the next future or task of this loop."""
        self._futures_made += 1
        return self._futures_made

    def create_future(self) -> asyncio.Future[Any]:
        return _Future(number=self.next_number(), loop=self)

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, work: Callable[..., T], *arguments: Any
    ) -> asyncio.Future[T]:
        """Do a thread's work at once; what comes of it is known a moment later."""
        future: asyncio.Future[T] = self.create_future()
        try:
            result = work(*arguments)
        except Exception as error:
            self.call_later(THREAD_S, _fail, future, error)
        else:
            self.call_later(THREAD_S, _end, future, result)
        return future

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Any, *args: Any, context: Any = None
    ) -> Any:
        return self.call_soon(callback, *args, context=context)

    def call_soon(  # type: ignore[override]
        self, callback: Any, *args: Any, context: Any = None
    ) -> Any:
        handle = asyncio.Handle(callback, args, self, context)
        if not self._over:
            self.ready.append(handle)
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Any = None
    ) -> Any:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        if not self._over:
            self._timers_made += 1
            heapq.heappush(self._timers, (when, self._timers_made, timer))
        return timer

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Any, *args: Any, context: Any = None
    ) -> Any:
        return self.call_at(self.now + delay, callback, *args, context=context)

    def _run_once(self) -> None:
        if self._over:
            return
        timers, ready = self._timers, self.ready
        if not ready:
            self._jump()
        while timers and timers[0][0] <= self.now:
            ready.append(heapq.heappop(timers)[2])
        handle = ready.popleft()
        if handle.cancelled():
            return
        process = handle._context.get(_PROCESS)
        if process is not None:
            if not process.alive:
                return
            if not process.runs:
                process.held.append(handle)
                return
        self.events += 1
        self.now += EVENT_S
        self._at_once += 1
        if self._at_once > EVENTS_AT_ONCE_MAX:
            raise StuckError(f"{EVENTS_AT_ONCE_MAX} events at one instant: {handle}")
        handle._run()
        self.after_event(process)

    def _jump(self) -> None:
        """Set the clock to the next timer."""
        timers = self._timers
        while timers and timers[0][2].cancelled():
            heapq.heappop(timers)
        if not timers:
            raise StuckError("nothing is due any more")
        when = timers[0][0]
        if when > self.now:
            if when > self.now + 1000 * EVENT_S:
                self._at_once = 0
            self.now = when

    def end(self) -> None:
        """Let nothing run any more; coroutines are closed without an effect on anything."""
        self._over = True
        self.after_event = lambda _: None
        self.set_exception_handler(lambda *_: None)
        for task in asyncio.all_tasks(self):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            with contextlib.suppress(BaseException), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of what was never awaited
                task.get_coro().close()
        self.ready.clear()
        self._timers.clear()

    def _write_to_self(self) -> None:
        """Do nothing: the loop does not sleep, so it need not be woken."""


def _make_task(
    loop: VirtualLoop,
    work: Any,
    *,
    context: contextvars.Context | None = None,
    name: str | None = None,
) -> asyncio.Task[Any]:
    if loop.is_over:
        work.close()
        work = _nothing()
    task = _Task(work, number=loop.next_number(), loop=loop, context=context, name=name)
    process = context.get(_PROCESS) if context is not None else _PROCESS.get()
    if process is not None:
        # Kept for as long as it may be needed: a dead process's coroutines must not be closed, and
        # so cleaned up, in the middle of somebody else's work.
        process.tasks.append(task)
        if len(process.tasks) > TASKS_KEPT_MAX:
            process.forget_tasks()
    return task


async def _nothing() -> None:
    pass
