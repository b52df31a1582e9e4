"""Clusters of real processes for the tests that need one; the order of tests, and the long ones.

Tests that are marked ``long`` are run by ``make test-long``. KOINON_TESTS_UNTIL (seconds since
1970) says when no more of them are begun: the others are skipped, and named at the end.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from koinon.client import Client
from koinon.local import LocalCluster

ClusterFactory = Callable[..., LocalCluster]

LONGEST_FIRST = ("spark", "ingest", "demo", "simulation", "integration", "observe", "raft")
"""Folders whose tests take seconds each. They are begun first, so that the last tests of a run are
short ones, which any process that has nothing left to do can take over.
"""
LEFT_OUT = "left out, for the time for long tests is over"

# Tests start some hundreds of processes; without bytecode on disk, each would compile the whole
# tree again, a third of what it takes to start a server.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A test's Spark job is over before what Java's second compiler makes of it pays: half of its CPU.
os.environ.setdefault("SPARK_SUBMIT_OPTS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")


@pytest.fixture(scope="session")
def cluster() -> Iterator[LocalCluster]:
    """One cluster of 3 coordinators and 3 nodes for all tests of this process. Tests leave every
    member running, and use keys of their own.
    """
    with LocalCluster() as running:
        yield running


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[Client]:
    """A blocking client of the shared cluster."""
    with cluster.client() as connected:
        yield connected


@pytest.fixture
def make_cluster() -> Iterator[ClusterFactory]:
    """Makes private clusters (not started), and ends them after the test."""
    made: list[LocalCluster] = []

    def make(*args: Any, **options: Any) -> LocalCluster:
        made.append(LocalCluster(*args, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the folders with the longest tests first; the order within a folder stays."""
    places = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.path.parent.name, len(places)))


def pytest_runtest_setup(item: pytest.Item) -> None:
    until = float(os.environ.get("KOINON_TESTS_UNTIL", "inf"))
    if time.time() > until and item.get_closest_marker("long") is not None:
        pytest.skip(LEFT_OUT)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say which long tests were left out, and how much the simulation covered, however many
    processes it ran in.
    """
    skipped = terminalreporter.stats.get("skipped", ())
    left_out = [report.nodeid for report in skipped if LEFT_OUT in str(report.longrepr)]
    if left_out:
        terminalreporter.write_line(f"{len(left_out)} long tests were left out:")
        for name in left_out:
            terminalreporter.write_line(f"  {name}")
    totals: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", "") == "call":
                totals.update(dict(report.user_properties).get("simulated", {}))
    if totals:
        terminalreporter.write_line(
            f"simulation: {totals['seeds']} seeds, {totals['events']:,} events, "
            f"{totals['virtual seconds'] / 3600:.2f} hours simulated, "
            f"{totals['operations']:,} operations checked for linearizability"
        )
