"""Atomic batches on real processes: whole or nothing, whoever is killed."""

from __future__ import annotations

import os
import random
import threading
from collections import Counter
from typing import Any

import pytest

import koinon
from koinon.local import LocalCluster, Setup
from koinon_proto.contract.errors import CheckFailedError, KoinonError
from tests.conftest import ClusterFactory
from tests.integration.copies import is_settled
from tests.kit.threads import Beside
from tests.kit.waiting import wait_until

GROUPS = [b"{g%d}" % n for n in range(8)]
MEMBERS = 12
KILLS = int(os.environ.get("KOINON_TEST_KILLS", "100"))
"""In the long set; with 1,000 it takes about two hours."""


def members(group: bytes) -> list[bytes]:
    return [group + b"/%02d" % n for n in range(MEMBERS)]


class Writers(Beside):
    """Each batch writes one number into all members of a group, and counts it. Readers look at all
    of a group at once, and note what they saw by half.
    """

    def __init__(self, cluster: LocalCluster) -> None:
        self.committed: Counter[bytes] = Counter()
        self.unknown: Counter[bytes] = Counter()
        self.failed: list[KoinonError] = []
        self.halves: list[Any] = []
        self.looks = 0
        self._client = cluster.client(timeout_ms=30_000)
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._write, args=(n,)) for n in range(3)]
        self._threads += [threading.Thread(target=self._read) for _ in range(2)]

    def _close(self) -> None:
        self._client.close()

    def _write(self, number: int) -> None:
        rng, written = random.Random(number), 0
        while not self._stop.is_set():
            group, written = rng.choice(GROUPS), written + 1
            batch = self._client.batch(group).increment(group + b"count")
            for key in members(group):
                batch.put(key, b"%d.%d" % (number, written))
            try:
                batch.commit()
            except KoinonError as error:
                if error.maybe_applied:
                    self.unknown[group] += 1
                else:
                    self.failed.append(error)
            else:
                self.committed[group] += 1

    def _read(self) -> None:
        rng = random.Random()
        while not self._stop.is_set():
            group = rng.choice(GROUPS)
            keys = members(group)
            rng.shuffle(keys)
            try:
                self.look(group, self._client.get_many(keys))
            except KoinonError:
                continue

    def look(self, group: bytes, found: list[bytes | None]) -> None:
        self.looks += 1
        if len(set(found)) != 1:
            self.halves.append((group, found))

    def wait_for_progress(self, batches: int = 100) -> None:
        target = self.committed.total() + batches
        wait_until(lambda: self.committed.total() >= target, "batches go on", timeout_s=60)


@pytest.fixture
def tagged(make_cluster: ClusterFactory) -> LocalCluster:
    """A cluster that routes keys by their hash tags."""
    flags = ["--partitions", "16", "--partitioner", "crc16"]
    cluster = make_cluster(
        nodes=3, coordinators=1, setup=Setup(replication_factor=3, coordinator_flags=flags)
    )
    cluster.start()
    cluster.wait_ready()
    cluster.wait_for(is_settled, timeout_s=60, what="all are in sync")
    return cluster


def test_batch_writes_checks_and_counts_in_one_step(tagged: LocalCluster) -> None:
    with tagged.client() as client:
        version = client.put(b"{u}/a", b"1")
        result = (
            client.batch(b"{u}")
            .check(b"{u}/a", version)
            .check(b"{u}/new", 0)
            .put(b"{u}/a", b"2")
            .put(b"{u}/new", b"x", ttl_ms=60_000)
            .delete(b"{u}/gone")
            .increment(b"{u}/n", 5)
            .commit()
        )
        assert result.results == [None, None, None, None, False, 5]
        entries = client.get_entries([b"{u}/a", b"{u}/new", b"{u}/n"])
        assert [entry.version for entry in entries if entry] == [result.version] * 3
        with pytest.raises(CheckFailedError) as failed:
            client.batch(b"u").delete(b"{u}/a").check(b"{u}/new", 1).commit()
        assert failed.value.key == b"{u}/new"
        assert client.get(b"{u}/a") == b"2"
        with pytest.raises(koinon.NotANumberError):
            client.batch(b"{u}").put(b"{u}/a", b"3").increment(b"{u}/new").commit()
        assert client.get(b"{u}/a") == b"2"
        with pytest.raises(koinon.InvalidArgumentError, match="same routing bytes"):
            client.batch(b"{u}").put(b"{v}/a", b"3")


@pytest.mark.parametrize("kills", [3, pytest.param(KILLS, marks=pytest.mark.long)])
@pytest.mark.timeout(300 + 60 * KILLS)
def test_never_half_through_real_kills(tagged: LocalCluster, kills: int) -> None:
    """Kill -9 of nodes in turn, each a primary of some groups and a follower of others. Thousands
    of simulated crashes are in tests/simulation.
    """
    with Writers(tagged) as writers:
        for number in range(kills):
            name = f"n{number % 3 + 1}"
            writers.wait_for_progress()
            tagged.kill(name)
            writers.wait_for_progress(20)
            tagged.restart(name)
            tagged.wait_ready()
            if number % 2:  # else the next is killed while this one catches up
                tagged.wait_for(is_settled, timeout_s=120, what="all are in sync")
        tagged.wait_for(is_settled, timeout_s=120, what="all are in sync")
    with tagged.client() as client:
        for group in GROUPS:
            writers.look(group, client.get_many(members(group)))
            count = int(client.get(group + b"count") or b"0")
            committed, unknown = writers.committed[group], writers.unknown[group]
            assert committed <= count <= committed + unknown, "no batch counts twice"
    assert not writers.halves
    assert not writers.failed
    assert writers.looks > 100
