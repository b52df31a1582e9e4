"""The simulator's own ground: virtual time, gates, streams."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from koinon_node.ports import PeerLostError
from koinon_proto.v1 import replication_pb2
from tests.simulation.loop import Process, StuckError, VirtualLoop
from tests.simulation.network import Network, StreamEnd


def run(work: Callable[[VirtualLoop], Coroutine[Any, Any, None]]) -> VirtualLoop:
    loop = VirtualLoop()
    try:
        loop.run_until_complete(work(loop))
        assert loop.failures == []
    finally:
        loop.end()
        loop.close()
    return loop


def test_sleeping_costs_no_time() -> None:
    async def work(loop: VirtualLoop) -> None:
        before = loop.time()
        await asyncio.sleep(3600.0)
        assert loop.time() == pytest.approx(before + 3600.0)

    run(work)


def test_loop_with_nothing_to_do_is_stuck() -> None:
    async def work(loop: VirtualLoop) -> None:
        await loop.create_future()

    with pytest.raises(StuckError):
        run(work)


def test_busy_waiting_is_stuck() -> None:
    async def work(loop: VirtualLoop) -> None:
        while True:  # noqa: ASYNC110 (busy on purpose)
            await asyncio.sleep(0)

    with pytest.raises(StuckError):
        run(work)


def test_paused_process_goes_on_later() -> None:
    async def work(loop: VirtualLoop) -> None:
        process = Process(loop, "p")
        woken: list[float] = []

        async def sleeper() -> None:
            await asyncio.sleep(1.0)
            woken.append(loop.time())

        task = process.spawn(sleeper())
        begin = loop.time()
        await asyncio.sleep(0.5)
        process.pause()
        await asyncio.sleep(4.5)
        assert woken == []
        process.resume(random.Random(1))
        await task
        assert woken == [pytest.approx(begin + 5.0)]

    run(work)


def test_thread_that_hangs_holds_up_no_other_and_ends_with_the_process() -> None:
    async def work(loop: VirtualLoop) -> None:
        process = Process(loop, "p")
        other = process.thread()
        ran: list[str] = []

        async def worker(name: str) -> None:
            while True:
                await asyncio.sleep(1.0)
                ran.append(name)

        process.spawn(worker("first"))
        other.spawn(worker("other"))
        await asyncio.sleep(0.5)
        process.hang()
        await asyncio.sleep(3.0)
        assert ran == ["other"] * 3
        process.pause()
        process.release(random.Random(1))
        await asyncio.sleep(3.0)
        assert ran == ["other"] * 3
        process.resume(random.Random(1))
        await asyncio.sleep(0.1)
        assert ran[3:] == ["first", "other"]
        process.kill()
        await asyncio.sleep(3.0)
        assert len(ran) == 5

    run(work)


def test_killed_process_runs_nothing_more() -> None:
    async def work(loop: VirtualLoop) -> None:
        process = Process(loop, "p")
        seen: list[str] = []

        async def worker() -> None:
            try:
                await asyncio.sleep(1.0)
                seen.append("woken")
            finally:
                seen.append("cleaned up")

        process.spawn(worker())
        await asyncio.sleep(0.5)
        process.kill()
        await asyncio.sleep(5.0)
        assert seen == []

    run(work)


def message(number: int) -> replication_pb2.FollowRequest:
    return replication_pb2.FollowRequest(ack=replication_pb2.BatchAck(number=number))


class Pair:
    """Two machines and a stream between them."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.network = Network(loop, random.Random(7))
        self.accepted: list[StreamEnd] = []
        for name in ("a", "b"):
            self.network.add(name).process = Process(loop, name)
        self.network.machines["b"].accept = self._accept
        process = self.network.machines["a"].process
        assert process is not None
        self.end = self.network.connect(process, "a", "b")

    async def _accept(self, end: StreamEnd) -> None:
        self.accepted.append(end)

    async def other(self) -> StreamEnd:
        while not self.accepted:  # noqa: ASYNC110 (virtual time)
            await asyncio.sleep(0.01)
        return self.accepted[0]


def test_stream_keeps_its_order_through_a_short_cut() -> None:
    async def work(loop: VirtualLoop) -> None:
        pair = Pair(loop)
        for number in range(10):
            pair.end.send(message(number))
        other = await pair.other()
        pair.network.set_cut({("a", "b")})
        for number in range(10, 20):
            pair.end.send(message(number))
        await asyncio.sleep(0.2)
        pair.network.set_cut(set())
        received = [(await other.receive()).ack.number for _ in range(20)]
        assert received == list(range(20))
        assert pair.end.queued_bytes == 0

    run(work)


def test_stream_over_a_cut_link_breaks_at_both_ends() -> None:
    async def work(loop: VirtualLoop) -> None:
        pair = Pair(loop)
        pair.end.send(message(1))
        other = await pair.other()
        await other.receive()
        pair.network.set_cut({("a", "b")})
        pair.end.send(message(2))
        with pytest.raises(PeerLostError):
            await pair.end.receive()
        with pytest.raises(PeerLostError):
            await other.receive()
        with pytest.raises(PeerLostError):
            pair.end.send(message(3))

    run(work)


def test_stream_to_a_killed_process_is_lost() -> None:
    async def work(loop: VirtualLoop) -> None:
        pair = Pair(loop)
        pair.end.send(message(1))
        await pair.other()
        process = pair.network.machines["b"].process
        assert process is not None
        process.kill()
        pair.network.on_killed(process)
        with pytest.raises(PeerLostError):
            await pair.end.receive()

    run(work)


def test_call_carries_answers_and_loses_them() -> None:
    async def work(loop: VirtualLoop) -> None:
        pair = Pair(loop)

        async def double(number: int) -> int:
            return 2 * number

        pair.network.machines["b"].services["double"] = double
        assert await pair.network.call("a", "b", "double", 21) == 42
        pair.network.set_cut({("b", "a")})
        with pytest.raises(PeerLostError):
            await pair.network.call("a", "b", "double", 21)

    run(work)
