"""The network between simulated processes: delays, cut links, lost streams, lost calls.

A stream keeps its order. While its link is cut, what is sent waits; the stream ends if that lasts,
or its messages arrive late if it does not. A call may be lost on its way there or back, or arrive
long after its caller gave up; one that a caller may repeat may also be carried out twice. Messages
of streams are encoded and decoded on the way, so that no two processes share an object.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from koinon_node.ports import PeerLostError
from koinon_proto.contract.errors import KoinonError
from koinon_proto.v1 import replication_pb2
from tests.simulation.loop import Process, VirtualLoop

T = TypeVar("T")
CALL_TIMEOUT_S = 3.0


@dataclass(kw_only=True, slots=True)
class Weather:
    """The faults of the network, and how frequent they are: seconds or probabilities."""

    delay_s: float = 0.001
    slow: float = 0.0
    slow_s: float = 0.0
    lose: float = 0.0  # a call, on its way there or back
    double: float = 0.0  # a call

    @classmethod
    def draw(cls, rng: random.Random) -> Weather:
        return cls(
            delay_s=rng.choice([0.0005, 0.002, 0.01]),
            slow=rng.choice([0.0, 0.01, 0.05]),
            slow_s=rng.choice([0.05, 0.3, 1.0]),
            lose=rng.choice([0.0, 0.01, 0.05]),
            double=rng.choice([0.0, 0.02, 0.1]),
        )


class Message(Protocol):
    """A message as streams carry it."""

    def SerializeToString(self) -> bytes: ...  # noqa: N802


@dataclass(eq=False)
class Machine:
    """A name on the network, and the process that answers to it now."""

    name: str
    process: Process | None = None
    services: dict[str, Callable[..., Awaitable[Any]]] = field(default_factory=dict)
    accept: Callable[[StreamEnd], Awaitable[None]] | None = None


@dataclass(eq=False)
class _Call:
    source: str
    to: str
    process: Process  # that serves it
    answer: asyncio.Future[Any]


class Network:
    """See the module's text."""

    def __init__(self, loop: VirtualLoop, rng: random.Random) -> None:
        self.loop = loop
        self.rng = rng
        self.weather = Weather()
        self.machines: dict[str, Machine] = {}
        self.cut: set[tuple[str, str]] = set()
        self.streams: list[_Stream] = []
        self._calls: list[_Call] = []

    def add(self, name: str) -> Machine:
        machine = self.machines[name] = Machine(name)
        return machine

    def reaches(self, source: str, to: str) -> bool:
        return source == to or (source, to) not in self.cut

    def connected(self, one: str, other: str) -> bool:
        """Tell whether both ways are open."""
        return self.reaches(one, other) and self.reaches(other, one)

    def set_cut(self, cut: set[tuple[str, str]]) -> None:
        """Cut these links and no others; what waited on an open one arrives."""
        self.cut = cut
        self.streams = [stream for stream in self.streams if stream.open]
        for stream in self.streams:
            stream.flush()

    def delay_s(self) -> float:
        weather = self.weather
        if weather.slow and self.rng.random() < weather.slow:
            return self.rng.random() * weather.slow_s
        return self.rng.uniform(0.2, 1.8) * weather.delay_s

    def on_killed(self, process: Process) -> None:
        """Tell those that are connected to it: soon, or late where the link is cut."""
        for stream in self.streams:
            for end in stream.ends:
                if end.process is process:
                    end.ended = True
                    self._lose_later(end.peer)
        for call in self._calls:
            if call.process is process and not call.answer.done():
                self._fail_later(call.to, call.source, call.answer, "the process ended")
        self._calls = [call for call in self._calls if not call.answer.done()]

    def _lose_later(self, end: StreamEnd) -> None:
        quick = self.connected(end.machine, end.peer.machine)
        delay_s = self.delay_s() if quick else self.rng.uniform(1.0, 5.0)
        self.loop.call_later(delay_s, end.lose, PeerLostError(reason="the other process ended"))

    def _fail_later(self, source: str, to: str, answer: asyncio.Future[Any], why: str) -> None:
        if self.connected(source, to):
            self.loop.call_later(self.delay_s(), _fail, answer, PeerLostError(reason=why))

    # --- streams -----------------------------------------------------------------------------

    def connect(self, process: Process, source: str, to: str) -> StreamEnd:
        """Open a stream. The other side sees it when the first message arrives there."""
        stream = _Stream(self, process, source, to)
        self.streams.append(stream)
        return stream.ends[0]

    def reset_some(self) -> None:
        """A stream breaks for no reason; each end learns of it by itself."""
        self.streams = [stream for stream in self.streams if stream.open]
        if self.streams:
            self.rng.choice(self.streams).break_soon()

    def tell_of_breaks(self) -> None:
        """Have the ends of streams that have broken know now."""
        for stream in self.streams:
            if stream.is_broken:
                stream.tell_that_it_broke()

    # --- calls -------------------------------------------------------------------------------

    async def call(
        self,
        source: str,
        to: str,
        service: str,
        *arguments: Any,
        timeout_s: float = CALL_TIMEOUT_S,
        may_double: bool = False,
        **named: Any,
    ) -> Any:
        """Call a service of another machine. One that ``may_double`` may be carried out again
        later, as one that an earlier attempt had made.

        Raises:
            PeerLostError: no answer; its reason begins with NOT_SENT where nothing was carried out.
            KoinonError: what the service raised.
        """
        loop = self.loop
        answer: asyncio.Future[Any] = loop.create_future()
        tasks: list[asyncio.Task[Any]] = []
        work = _Work(service, arguments, named)
        loop.call_later(self.delay_s(), self._arrive, source, to, work, answer, tasks)
        if may_double and self.weather.double and self.rng.random() < self.weather.double:
            nobody: asyncio.Future[Any] = loop.create_future()
            delay_s = self.delay_s() + self.rng.random() * timeout_s
            loop.call_later(delay_s, self._arrive, source, to, work, nobody, [])
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise PeerLostError(reason=f"{to} did not answer in time") from None
        finally:
            if not answer.done():
                answer.cancel()
            for task in tasks:
                if not task.done() and self.connected(source, to) and self.rng.random() < 0.5:
                    self.loop.call_later(self.delay_s(), task.cancel)

    def _arrive(
        self,
        source: str,
        to: str,
        work: Callable[[Machine], Awaitable[Any]],
        answer: asyncio.Future[Any],
        tasks: list[asyncio.Task[Any]],
    ) -> None:
        if not self.reaches(source, to) or self._is_lost():
            return
        machine = self.machines[to]
        process = machine.process
        if process is None or not process.alive:
            self._fail_later(to, source, answer, f"{NOT_SENT}: nobody listens at {to}")
            return
        if answer.done() and not answer.cancelled():
            return
        self._calls.append(_Call(source, to, process, answer))
        if len(self._calls) > 500:
            self._calls = [call for call in self._calls if not call.answer.done()]

        async def serve() -> None:
            try:
                result, error = await work(machine), None
            except KoinonError as failure:
                result, error = None, failure
            if not self._is_lost():
                self.loop.call_later(
                    self.delay_s(), self._return, to, source, answer, result, error
                )

        tasks.append(process.spawn(serve()))

    def _return(
        self,
        source: str,
        to: str,
        answer: asyncio.Future[Any],
        result: Any,
        error: KoinonError | None,
    ) -> None:
        if answer.done() or not self.reaches(source, to):
            return
        if error is not None:
            _fail(answer, error)
        else:
            answer.set_result(result)

    def _is_lost(self) -> bool:
        return self.weather.lose > 0 and self.rng.random() < self.weather.lose


NOT_SENT = "not sent"


@dataclass(frozen=True, slots=True)
class _Work:
    service: str
    arguments: tuple[Any, ...]
    named: dict[str, Any]

    async def __call__(self, machine: Machine) -> Any:
        return await machine.services[self.service](*self.arguments, **self.named)


def _fail(answer: asyncio.Future[Any], error: KoinonError) -> None:
    if not answer.done():
        answer.set_exception(error)
        answer.exception()  # the caller may be dead, and not look at it


class StreamEnd:
    """One end, as ports.Stream wants it."""

    def __init__(self, stream: _Stream, process: Process | None, machine: str) -> None:
        self.process = process
        self.machine = machine
        self.peer: StreamEnd
        self.ended = False
        self._stream = stream
        self._inbox: deque[Any] = deque()
        self._error: KoinonError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.begun = asyncio.Event()  # the other side serves it
        self.outbox: deque[tuple[type[Any] | None, bytes, KoinonError | None]] = deque()
        self._sent_bytes = 0  # on the way
        self.arrival = 0.0

    def send(self, message: Message) -> None:
        self._queue(type(message), message.SerializeToString())

    def send_encoded(self, parts: Sequence[bytes]) -> None:
        self._queue(replication_pb2.FollowResponse, b"".join(parts))

    def _queue(self, kind: type[Message], data: bytes) -> None:
        if self.ended:
            raise PeerLostError(reason="the stream has ended")
        self._sent_bytes += len(data)
        self._stream.send(self, (kind, data, None))

    @property
    def queued_bytes(self) -> int:
        return self._sent_bytes

    async def connected(self) -> None:
        await self.begun.wait()  # where it ends before, ``receive`` says so

    async def receive(self) -> Any:
        while not self._inbox:
            if self._error is not None:
                raise self._error
            if self.ended:
                raise PeerLostError(reason="the stream was closed here")
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._inbox.popleft()

    def close(self, error: KoinonError | None = None) -> None:
        if not self.ended and (self.process is None or self.process.alive):
            self.ended = True
            self._inbox.clear()
            self._wake()
            self._stream.send(self, (None, b"", error))

    def delivered(self, item: tuple[type[Any] | None, bytes, KoinonError | None]) -> None:
        """The peer's message is here."""
        kind, data, error = item
        self.peer._sent_bytes -= len(data)
        if self.ended:
            return
        if kind is None:
            self.lose(error or PeerLostError(reason="the other side closed the stream"))
            return
        self._inbox.append(kind.FromString(data))
        self._wake()

    def lose(self, error: KoinonError) -> None:
        """The stream is over for this end."""
        if self.ended:
            return
        self.ended = True
        self._error = error
        if self._stream.forgets:
            self._inbox.clear()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


_BROKE = PeerLostError(reason="the stream broke")


class _Stream:
    def __init__(self, network: Network, process: Process, source: str, to: str) -> None:
        self._network = network
        self.ends = (StreamEnd(self, process, source), StreamEnd(self, None, to))
        self.ends[0].peer, self.ends[1].peer = self.ends[1], self.ends[0]
        self.forgets = network.rng.random() < 0.5
        self._accepted = False
        self._breaking = False
        self.is_broken = False  # its ends learn of it by and by

    @property
    def open(self) -> bool:
        return not (self.ends[0].ended and self.ends[1].ended)

    def send(self, end: StreamEnd, item: tuple[Any, bytes, KoinonError | None]) -> None:
        network = self._network
        end.outbox.append(item)
        end.arrival = max(end.arrival + 1e-9, network.loop.now + network.delay_s())
        network.loop.call_at(end.arrival, self._deliver, end)

    def _deliver(self, end: StreamEnd) -> None:
        if not end.outbox:
            return
        if not self._network.reaches(end.machine, end.peer.machine):
            if not self._breaking:
                self._breaking = True
                self._network.loop.call_later(
                    self._network.rng.uniform(0.5, 4.0), self._break_if_stalled
                )
            return
        if not self._accepted and not self._accept():
            return
        end.peer.delivered(end.outbox.popleft())

    def flush(self) -> None:
        """The link may be open again: what has waited arrives, in order."""
        now = self._network.loop.now
        for end in self.ends:
            if end.arrival <= now and self._network.reaches(end.machine, end.peer.machine):
                for _ in range(len(end.outbox)):
                    end.arrival = max(end.arrival, now) + self._network.rng.random() * 0.01
                    self._network.loop.call_at(end.arrival, self._deliver, end)

    def _accept(self) -> bool:
        end = self.ends[1]
        machine = self._network.machines[end.machine]
        process = machine.process
        if process is None or not process.alive or machine.accept is None:
            self._network.loop.call_later(
                self._network.delay_s(), self.ends[0].lose, PeerLostError(reason="nobody listens")
            )
            end.ended = True
            return False
        self._accepted = True
        self.ends[0].begun.set()
        end.process = process
        process.spawn(_ignore(machine.accept(end)))
        return True

    def _break_if_stalled(self) -> None:
        self._breaking = False
        now = self._network.loop.now
        if any(end.outbox and end.arrival <= now for end in self.ends):
            self.break_soon()

    def break_soon(self) -> None:
        self.is_broken = True
        for end in self.ends:
            delay_s = self._network.rng.random() * self._network.rng.choice([0.01, 0.5, 2.0])
            self._network.loop.call_later(delay_s, end.lose, _BROKE)

    def tell_that_it_broke(self) -> None:
        """Have both ends know now."""
        for end in self.ends:
            end.lose(_BROKE)


async def _ignore(work: Awaitable[None]) -> None:
    """Serve a stream: how it ends is told to the other side, by the server."""
    await work
