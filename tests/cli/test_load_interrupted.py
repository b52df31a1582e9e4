"""A load that is left in the middle."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import koinon
from koinon.cli.data.load import Loader, Tally
from koinon.sources.slabs import Slab
from koinon.types import WriteResult
from tests.client.kit.fake_cluster import FakeCluster

TIMEOUT_S = 120


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    made = FakeCluster(nodes=1)
    yield made
    made.close()


def test_load_interrupted_does_not_wait_for_what_is_under_way(cluster: FakeCluster) -> None:
    gate = cluster.gate()

    async def hold(method: str, request: object) -> None:
        if method == "BatchWrite":
            await gate(method, request)

    cluster.nodes[0].before = hold

    def interrupted() -> None:
        with (
            koinon.connect(cluster.seeds, timeout_ms=TIMEOUT_S * 1000) as client,
            Loader(client, Tally(), TIMEOUT_S * 1000, lambda _: None) as loader,
        ):
            for key in (b"a", b"b"):
                loader.write(Path("a.csv"), Slab(keys=[key], values=[b"v"]), 0)
            assert gate.reached.wait(TIMEOUT_S)
            raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert time.monotonic() - began < TIMEOUT_S / 2
    gate.open()


def test_load_progress_is_what_is_written_not_what_is_read() -> None:
    class Client:
        """Writes each batch when it is told to."""

        def __init__(self) -> None:
            self.may_end = [threading.Event() for _ in range(3)]
            self._begun = iter(self.may_end)

        def put_many(self, rows: list[tuple[bytes, bytes]], **_: object) -> WriteResult:
            assert next(self._begun).wait(TIMEOUT_S)
            return WriteResult(applied=len(rows))

    seen: list[int] = []
    client = Client()
    with Loader(client, Tally(), TIMEOUT_S * 1000, seen.append) as loader:
        loader.write(Path("a.csv"), Slab(keys=[b"a"], values=[b"v"]), 10)
        loader.write(Path("a.csv"), Slab(keys=[b"b"], values=[b"v"]), 20)
        assert seen == [0, 0]
        client.may_end[0].set()
        loader.write(Path("a.csv"), Slab(keys=[b"c"], values=[b"v"]), 30)
        assert seen == [0, 0, 10, 10]
        for event in client.may_end:
            event.set()
        loader.drain()
    assert seen[-1] == 30
