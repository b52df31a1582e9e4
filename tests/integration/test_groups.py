"""Groups of real consumers in a real cluster: members come and are killed, a node and the leader of
the coordinators are killed, and every acknowledged write is processed, of each key in order.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from koinon.client import Client
from koinon.core.cursor_rows import CursorAction, CursorRows, CursorWork
from koinon.core.feeds import PartitionPosition
from koinon.local import LocalCluster, Setup
from koinon_proto.contract.errors import KoinonError, StaleGenerationError
from koinon_proto.partitioner import partitioner
from tests.checkers.load import RecordedLoad
from tests.kit.clusters import running_cluster
from tests.kit.waiting import wait_until

PARTITIONS = 24
PARTITION_OF = partitioner("murmur2", PARTITIONS).partition_of
SESSION_MS = 2_000
TIMEOUT_S = 60.0

CONSUMER = """
import json, sys, koinon
from contextlib import suppress

def said(**what):
    print(json.dumps(what), flush=True)

addresses, member = sys.argv[1:3]
with (
    koinon.connect(addresses, timeout_ms=20_000) as client,
    client.group(
        "g",
        member=member or None,
        session_ms=int(sys.argv[3]),
        on_granted=lambda partitions: said(granted=partitions),
        on_revoked=lambda partitions: said(revoked=partitions),
    ) as group,
):
    for batch in group:
        if len(batch):
            said(changes=[[c.key.decode(), c.version] for c in batch])
        with suppress(koinon.StaleGenerationError):
            batch.commit()
            if len(batch):
                said(committed=batch.partitions)
"""


class Consumer:
    """A consumer in a process of its own. ``changes`` are (key, version) pairs in their order;
    where partitions were granted, the keys before may come again.
    """

    def __init__(self, cluster: LocalCluster, member: str = "") -> None:
        arguments = [sys.executable, "-c", CONSUMER, cluster.coordinators, member, str(SESSION_MS)]
        self.process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
        self.partitions: set[int] = set()
        self.changes: list[tuple[str, int]] = []
        self.faults: list[str] = []
        self._newest: dict[str, int] = {}  # by key, of the partitions as they were granted last
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            said: dict[str, Any] = json.loads(line)
            granted = set(said.get("granted", ()))
            for key in [key for key in self._newest if PARTITION_OF(key.encode()) in granted]:
                del self._newest[key]
            self.partitions |= granted
            self.partitions -= set(said.get("revoked", ()))
            for key, version in said.get("changes", ()):
                if version < self._newest.get(key, 0):
                    self.faults.append(f"{key}: {version} after {self._newest[key]}")
                self._newest[key] = version
                self.changes.append((key, version))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        self.partitions = set()


class Members:
    """The consumers of a test, also those that were killed."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self.all: list[Consumer] = []

    def join(self, member: str = "") -> Consumer:
        self.all.append(Consumer(self._cluster, member))
        return self.all[-1]

    def wait_shared(self, *consumers: Consumer) -> None:
        """Wait until these consumers own all partitions, in even shares."""

        def is_shared() -> bool:
            owned = [p for consumer in consumers for p in list(consumer.partitions)]
            counts = [len(consumer.partitions) for consumer in consumers]
            is_even = max(counts) - min(counts) <= 1
            return sorted(owned) == list(range(PARTITIONS)) and is_even

        wait_until(is_shared, f"{len(consumers)} consumers share all", timeout_s=TIMEOUT_S)

    def judge(self, client: Client) -> None:
        """Wait until the newest version of every key was processed; the versions of a key never
        fell while a consumer owned it.
        """
        expected = {entry.key.decode(): entry.version for entry in client.scan()}

        def missed() -> list[str]:
            newest: dict[str, int] = {}
            for consumer in self.all:
                for key, version in list(consumer.changes):
                    newest[key] = max(newest.get(key, 0), version)
            return [key for key, version in expected.items() if newest.get(key, 0) < version]

        wait_until(lambda: not missed(), "all is processed", timeout_s=TIMEOUT_S)
        assert not [fault for consumer in self.all for fault in consumer.faults]


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    setup = Setup(coordinator_flags=["--partitions", str(PARTITIONS)])
    with running_cluster(nodes=3, coordinators=3, setup=setup) as running:
        yield running


@pytest.fixture
def members(cluster: LocalCluster) -> Iterator[Members]:
    made = Members(cluster)
    try:
        yield made
    finally:
        for consumer in made.all:
            consumer.kill()


def test_every_write_is_processed_while_consumers_nodes_and_the_leader_die(
    cluster: LocalCluster, members: Members
) -> None:
    with cluster.client() as client:
        with RecordedLoad(cluster.client) as load:
            first, second = members.join(), members.join()
            members.wait_shared(first, second)
            third = members.join()
            members.wait_shared(first, second, third)
            load.wait_for_progress()
            second.kill()
            members.wait_shared(first, third)
            cluster.kill("n2")
            load.wait_for_progress()
            cluster.restart("n2")
            leader = cluster.leader()
            assert leader is not None
            cluster.kill(leader)
            load.wait_for_progress()
            fourth = members.join()
            members.wait_shared(first, third, fourth)
            cluster.restart(leader)
            load.wait_for_progress()
        members.judge(client)


@pytest.mark.long
def test_frozen_consumer_is_replaced_and_its_commits_are_refused(
    cluster: LocalCluster, members: Members
) -> None:
    with cluster.client() as client:
        with RecordedLoad(cluster.client) as load:
            first, second = members.join(), members.join()
            members.wait_shared(first, second)
            load.wait_for_progress()
            first.process.send_signal(signal.SIGSTOP)
            wait_until(lambda: len(second.partitions) == PARTITIONS, "it is replaced")
            load.wait_for_progress()
            first.process.send_signal(signal.SIGCONT)
            members.wait_shared(first, second)
            load.wait_for_progress()
        members.judge(client)


def test_cursor_is_where_its_partition_is(cluster: LocalCluster) -> None:
    """Cursors survive their primary's death and follow a hand-over, with their generation."""
    place = PartitionPosition(9, 11, b"\0k")

    def act(client: Client, action: CursorAction, generation: int) -> CursorRows:
        rows = dict.fromkeys(range(PARTITIONS), (generation, place))
        work = CursorWork(action=action, keyspace_id=0, group_id=3, member_id="m", rows=rows)
        operation = CursorRows(work, client._engine.policy)
        client._run(client._engine.rows.run(operation, 30_000))
        return operation

    with cluster.client() as client:
        assert not act(client, CursorAction.CLAIM, 5).failures
        assert not act(client, CursorAction.COMMIT, 5).failures
        for name in cluster.node_names:
            cluster.kill(name)
            done = act(client, CursorAction.READ, 0)
            assert not done.failures
            assert {(c.position, c.generation) for c in done.cursors.values()} == {(place, 5)}
            cluster.restart(name)
        refused: dict[int, KoinonError] = act(client, CursorAction.CLAIM, 4).failures
        assert len(refused) == PARTITIONS
        assert all(isinstance(error, StaleGenerationError) for error in refused.values())
        assert len(list(client.scan())) == 0


def test_watch_prints_a_share_and_goes_on_where_the_group_is(
    cluster: LocalCluster,
) -> None:
    line = [sys.executable, "-m", "koinon.cli", "watch", "--group", "w", "--json"]
    line += ["--since", "start", "--coordinators", cluster.coordinators]

    def watched(last: str) -> set[str]:
        """Return the keys that are printed up to this one, and have it all committed."""
        with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            keys: set[str] = set()
            while len(keys) < 50 and last not in keys:
                keys.add(json.loads(process.stdout.readline())["key"])
            client.put(b"end", b"")  # it is printed once what was printed before is committed
            while "end" not in keys:
                keys.add(json.loads(process.stdout.readline())["key"])
            process.send_signal(signal.SIGINT)
            assert process.wait(TIMEOUT_S) == 0
        return keys

    with cluster.client() as client:
        client.put_many({b"a%d" % n: b"" for n in range(50)}).raise_for_errors()
        assert len(watched("")) == 51
        client.put(b"more", b"")
        assert watched("more") == {"more", "end"}
