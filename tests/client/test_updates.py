"""increment, touch, get_or_put and exists of both clients: results, fates, and an older node."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import koinon
from tests.client.conftest import Connect
from tests.client.kit.fake_cluster import FakeCluster
from tests.client.kit.helpers import LEASE, keys_of


def test_updates_answer_what_became_of_the_record(cluster: FakeCluster, client: Any) -> None:
    assert client.increment(b"n") == 1
    assert client.increment(b"n", -3, ttl_ms=1_000) == -2
    assert client.get(b"n") == b"-2"
    assert client.get_or_put(b"k", b"first", ttl_ms=7_000) == b"first"
    assert client.get_or_put(b"k", b"second") == b"first"
    assert client.exists(b"k") is True
    assert client.exists(b"missing") is False
    assert client.touch(b"k", 5_000) is True
    assert client.touch(b"k", None) is True
    assert client.touch(b"missing", 5_000) is False


def test_increment_of_text_is_an_error_and_never_tried_again(
    cluster: FakeCluster, client: Any
) -> None:
    client.put(b"k", b"text")
    with pytest.raises(koinon.NotANumberError, match="not an integer"):
        client.increment(b"k")
    assert cluster.count("BatchUpdate") == 1


def test_refused_increment_goes_again_and_counts_once(cluster: FakeCluster, client: Any) -> None:
    key = keys_of(cluster, cluster.nodes[0])[0]
    refusals = iter([LEASE, LEASE])
    cluster.nodes[0].refuse = lambda _p: next(refusals, None)
    assert client.increment(key) == 1
    assert cluster.count("BatchUpdate") == 3


@pytest.mark.parametrize("operation", ["increment", "touch", "get_or_put"])
def test_update_of_unknown_fate_is_never_repeated(
    cluster: FakeCluster, connect: Connect, operation: str
) -> None:
    client = connect(cluster.nodes[1].address, retry_unknown=True)
    cluster.exhausted_replies = {"BatchUpdate"}
    arguments = {"increment": (), "touch": (1_000,), "get_or_put": (b"v",)}[operation]
    with pytest.raises(koinon.UnknownFateError):
        getattr(client, operation)(b"k", *arguments)
    assert cluster.count("BatchUpdate") == 1


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"by": 1.0}, TypeError),
        ({"by": True}, TypeError),
        ({"by": 1 << 63}, koinon.InvalidArgumentError),
        ({"ttl_ms": 0}, koinon.InvalidArgumentError),
    ],
)
def test_increment_with_a_bad_argument_sends_nothing(
    cluster: FakeCluster, client: Any, arguments: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        client.increment(b"k", **arguments)
    assert cluster.count("BatchUpdate") == 0


async def test_asyncio_increments_side_by_side_lose_none(cluster: FakeCluster) -> None:
    async with await koinon.aio.connect(cluster.nodes[0].address) as client:
        found = await asyncio.gather(*(client.increment(b"n") for _ in range(100)))
    assert sorted(found) == list(range(1, 101))
    assert cluster.count("BatchUpdate") < 100, "they ride together"
