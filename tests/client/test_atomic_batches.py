"""Atomic batches of both clients: their limits, results and fates, and an older node."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import koinon
from tests.client.conftest import Connect
from tests.client.kit.fake_cluster import FakeCluster
from tests.client.kit.helpers import LEASE, keys_of


def test_batch_answers_with_its_version_and_the_results_of_its_operations(
    cluster: FakeCluster, client: Any
) -> None:
    version = client.put(b"k", b"5")
    batch = client.batch(b"k").check(b"k", version).increment(b"k", 2).put(b"k", b"x").delete(b"k")
    assert len(batch) == 4
    result = batch.commit()
    assert result.version > version
    assert result.results == [None, 7, None, True]
    assert client.get(b"k") is None
    assert cluster.count("CommitBatch") == 1, "one round trip"


def test_failed_check_names_key_and_versions_and_is_not_tried_again(
    cluster: FakeCluster, client: Any
) -> None:
    version = client.put(b"k", b"v")
    with pytest.raises(koinon.CheckFailedError) as failed:
        client.batch(b"k").check(b"k", version + 1).put(b"k", b"new").commit()
    error = failed.value
    assert (error.key, error.expected_version, error.current_version) == (
        *(b"k", version + 1, version),
    )
    assert isinstance(error, koinon.ConditionFailedError)
    assert client.get(b"k") == b"v"
    assert cluster.count("CommitBatch") == 1


def test_refused_batch_goes_again(cluster: FakeCluster, client: Any) -> None:
    key = keys_of(cluster, cluster.nodes[0])[0]
    refusals = iter([LEASE, LEASE])
    cluster.nodes[0].refuse = lambda _p: next(refusals, None)
    assert client.batch(key).increment(key).commit().results == [1]
    assert cluster.count("CommitBatch") == 3


def test_batch_of_unknown_fate_is_never_repeated(cluster: FakeCluster, connect: Connect) -> None:
    client = connect(cluster.nodes[1].address, retry_unknown=True)
    cluster.exhausted_replies = {"CommitBatch"}
    batch = client.batch(b"k").put(b"k", b"v")
    with pytest.raises(koinon.UnknownFateError):
        batch.commit()
    assert cluster.count("CommitBatch") == 1
    with pytest.raises(koinon.InvalidArgumentError, match="committed before"):
        batch.commit()
    assert cluster.count("CommitBatch") == 1


def test_bad_operations_are_refused_when_they_are_added(cluster: FakeCluster, client: Any) -> None:
    batch = client.batch(b"k")
    with pytest.raises(koinon.InvalidArgumentError, match="same routing bytes"):
        batch.put(b"other", b"v")
    for name, argument in (("put", "text"), ("check", None), ("increment", 1.5)):
        with pytest.raises(TypeError):
            getattr(batch, name)(b"k", argument)
    with pytest.raises(koinon.InvalidArgumentError):
        batch.check(b"k", -1)
    with pytest.raises(koinon.InvalidArgumentError):
        batch.put(b"k", b"v", ttl_ms=0)
    with pytest.raises(koinon.InvalidArgumentError, match="no operations"):
        batch.commit()
    for _ in range(1_000):
        batch.delete(b"k")
    with pytest.raises(koinon.InvalidArgumentError, match="too many operations"):
        batch.delete(b"k")
    large = client.batch(b"k")
    for _ in range(7):
        large.put(b"k", b"x" * 512 * 1024)
    with pytest.raises(koinon.InvalidArgumentError, match="too many bytes"):
        large.put(b"k", b"x" * 512 * 1024)
    assert cluster.count("CommitBatch") == 0


async def test_asyncio_batches_side_by_side(cluster: FakeCluster) -> None:
    async with await koinon.aio.connect(cluster.nodes[0].address) as client:
        work = (client.batch(b"n").increment(b"n").commit() for _ in range(50))
        found = [result.results[0] for result in await asyncio.gather(*work)]
    assert set(found) == set(range(1, 51))
