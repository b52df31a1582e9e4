"""Fixtures: a misbehaving cluster, and both clients behind one blocking face."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import koinon
from koinon.driver.resp import link as resp_link
from tests.client.kit.fake_cluster import FakeCluster, LoopThread

SOON_S = resp_link._SOON_S


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations go over RESP wherever they can: a busy machine may take long to connect."""
    monkeypatch.setattr(resp_link, "_SOON_S", 60.0)


class AsyncFace:
    """The asyncio client, called from the test's thread: each method runs on a loop elsewhere."""

    def __init__(self, thread: LoopThread, client: koinon.AsyncClient) -> None:
        self._thread = thread
        self.wrapped = client

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.wrapped, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            async def run() -> Any:
                return await method(*args, **kwargs)

            return self._thread.run(run(), timeout_s=30)

        return call

    def batch(self, routing_key: bytes) -> Any:
        async def begin() -> Any:
            return self.wrapped.batch(routing_key)

        return AsyncBatchFace(self._thread, self._thread.run(begin(), timeout_s=30))

    def scan(self, **kwargs: Any) -> Iterator[koinon.Entry]:
        async def collect() -> list[koinon.Entry]:
            return [entry async for entry in self.wrapped.scan(**kwargs)]

        return iter(self._thread.run(collect(), timeout_s=30))


class AsyncBatchFace:
    """An atomic batch of the asyncio client, committed from the test's thread."""

    def __init__(self, thread: LoopThread, batch: Any) -> None:
        self._thread = thread
        self._batch = batch

    def __len__(self) -> int:
        return len(self._batch)

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            getattr(self._batch, name)(*args, **kwargs)
            return self

        return call

    def commit(self, **kwargs: Any) -> Any:
        async def run() -> Any:
            return await self._batch.commit(**kwargs)

        return self._thread.run(run(), timeout_s=30)


Connect = Callable[..., Any]


@pytest.fixture(params=["grpc", "resp"])
def cluster(request: pytest.FixtureRequest) -> Iterator[FakeCluster]:
    """A cluster whose nodes offer single operations over gRPC alone, or over RESP too."""
    made = FakeCluster(nodes=2, speaks_resp=request.param == "resp")
    yield made
    made.close()


@pytest.fixture(params=["blocking", "asyncio"])
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """Connects a client of either kind; ``connect(addresses, **options)``."""
    closing: list[Callable[[], object]] = []

    def blocking(addresses: str, **options: Any) -> Any:
        client = koinon.connect(addresses, **options)
        closing.append(client.close)
        return client

    def asynchronous(addresses: str, **options: Any) -> Any:
        thread = LoopThread()
        closing.append(thread.stop)
        face = AsyncFace(thread, thread.run(koinon.aio.connect(addresses, **options), 30))
        closing.append(face.close)
        return face

    yield blocking if request.param == "blocking" else asynchronous
    for close in reversed(closing):
        close()


@pytest.fixture
def client(cluster: FakeCluster, connect: Connect) -> Any:
    """A client of either kind, connected to ``cluster``; patient, for the machine may be busy."""
    return connect(cluster.seeds, timeout_ms=20_000)
