"""Consumers of a group that are killed, frozen and replaced, beside nodes that are killed: the
program of docs/groups.md counts each word once.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from koinon.client import Client
from koinon.local import LocalCluster, Setup
from tests.client.kit.scripted_groups import ScriptedGroups, scripted_groups
from tests.kit.clusters import running_cluster
from tests.kit.waiting import wait_until

PROGRAM = Path(__file__).parents[2] / "docs" / "examples" / "count_words.py"
PARTITIONS = range(8)
WORDS = [b"%c" % letter for letter in b"abcdefgh"]
TIMEOUT_S = 60.0


class Counters:
    """Processes of the example, which share the partitions as the test says."""

    def __init__(self, cluster: LocalCluster, groups: ScriptedGroups) -> None:
        nodes = [cluster.address(name) for name in cluster.node_names]
        self._addresses = ",".join([groups.address, *nodes])  # nodes know the table
        self._groups = groups
        self._generation = 0
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        arguments = ["--coordinators", self._addresses, "--member", name]
        self.processes[name] = subprocess.Popen([sys.executable, str(PROGRAM), *arguments])

    def kill(self, name: str) -> None:
        process = self.processes.pop(name)
        process.kill()
        process.wait()

    def kill_all(self) -> None:
        for name in list(self.processes):
            self.kill(name)

    def share(self, *names: str) -> None:
        """Grant all partitions anew, to these members in turn, whoever holds them."""
        self._generation += 1_000
        for at, name in enumerate(names):
            self._groups.grant(name, *PARTITIONS[at :: len(names)], generation=self._generation)


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    flags = ["--partitions", str(len(PARTITIONS))]
    setup = Setup(router="until:2f", coordinator_flags=flags)
    with running_cluster(nodes=3, coordinators=1, setup=setup) as running:
        yield running


@pytest.fixture
def counters(cluster: LocalCluster) -> Iterator[Counters]:
    with scripted_groups() as groups, ExitStack() as ended:
        made = Counters(cluster, groups)
        ended.callback(made.kill_all)
        yield made


def write_lines(client: Client, first: int, count: int, words: Counter[bytes]) -> None:
    """Write lines of random words in several documents, and count the words."""
    for number in range(first, first + count):
        document = b"doc%d" % random.randrange(40)
        line = random.choices(WORDS, k=5)
        client.put(b"%s/line/%d" % (document, number), b" ".join(line), timeout_ms=30_000)
        words.update(b"%s/count/%s" % (document, word) for word in line)


def counted(client: Client) -> dict[bytes, int]:
    return {e.key: int(e.value) for e in client.scan(timeout_ms=30_000) if b"/count/" in e.key}


def wait_counted(client: Client, words: Counter[bytes]) -> None:
    """Wait until all words are counted; fail if one was counted twice."""

    def is_done() -> bool:
        found = counted(client)
        twice = {key: (n, words[key]) for key, n in found.items() if n > words[key]}
        assert not twice, f"counted too often: {twice}"
        return found == words

    wait_until(is_done, "every word is counted", timeout_s=TIMEOUT_S)


@pytest.mark.long
def test_words_are_counted_once_although_consumers_and_a_node_die(
    cluster: LocalCluster, counters: Counters
) -> None:
    words: Counter[bytes] = Counter()
    with cluster.client() as client:
        write_lines(client, 0, 300, words)  # some are a snapshot's
        for name in ("a", "b"):
            counters.start(name)
        counters.share("a", "b")
        write_lines(client, 1_000, 300, words)
        counters.kill("a")
        counters.start("c")
        counters.share("b", "c")
        write_lines(client, 2_000, 300, words)
        counters.kill("b")
        counters.start("b")
        cluster.kill("n1")
        write_lines(client, 3_000, 300, words)
        cluster.restart("n1")
        counters.share("c", "b")
        wait_counted(client, words)


@pytest.mark.long
def test_frozen_consumer_that_wakes_counts_nothing_twice(
    cluster: LocalCluster, counters: Counters
) -> None:
    words: Counter[bytes] = Counter()
    with cluster.client() as client:
        counters.start("a")
        counters.share("a")
        write_lines(client, 0, 200, words)
        for at in range(3):  # it is frozen wherever it is
            counters.processes["a"].send_signal(signal.SIGSTOP)
            write_lines(client, 1_000 * (at + 1), 200, words)
            if not at:
                counters.start("b")
            counters.share("b")
            wait_counted(client, words)
            counters.processes["a"].send_signal(signal.SIGCONT)
            write_lines(client, 1_000 * (at + 1) + 500, 200, words)
            counters.share("a", "b")
            wait_counted(client, words)
