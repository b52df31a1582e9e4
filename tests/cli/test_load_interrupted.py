"""A load that is left in the middle."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import koinon
from koinon.cli.data.load import Loader, Tally
from koinon.cli.data.sources import Slab
from tests.client.fake_cluster import FakeCluster

TIMEOUT_S = 30


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
            koinon.connect(cluster.seeds, timeout_ms=20_000) as client,
            Loader(client, Tally(), TIMEOUT_S * 1000) as loader,
        ):
            for key in (b"a", b"b"):
                loader.write(Path("a.csv"), Slab(keys=[key], values=[b"v"]))
            assert gate.reached.wait(10)
            raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert time.monotonic() - began < TIMEOUT_S / 2
    gate.open()
