"""Clusters of real processes for the tests that need one; which process of a run takes which tests
first, and the long tests.

Tests that are marked ``long`` are run by ``make test-long``. KOINON_TESTS_UNTIL (seconds since
1970) says when no more of them are begun: the others are skipped, and named at the end.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
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


# Of an example: the first one imports what it needs, and the machine may do much else.
hypothesis.settings.register_profile("koinon", hypothesis.settings(), deadline=None)
hypothesis.settings.load_profile("koinon")


class SharedCluster:
    """One cluster of 3 coordinators and 3 nodes for all tests of this process that ask for it. It
    runs from the first of them to the end of the last module that has any: idle, it takes a fifth
    of a core.
    """

    def __init__(self) -> None:
        self._running: LocalCluster | None = None
        self.modules: set[Path] = set()
        """Those with a test that asks for it."""

    def running(self) -> LocalCluster:
        if self._running is None:
            self._running = LocalCluster().__enter__()
        return self._running

    def close(self) -> None:
        if self._running is not None:
            self._running.stop(timeout_s=0.0)
            self._running.close()
            self._running = None


SHARED = SharedCluster()


@pytest.fixture
def shared_cluster() -> LocalCluster:
    return SHARED.running()


@pytest.fixture
def cluster(shared_cluster: LocalCluster) -> LocalCluster:
    """The shared cluster. Tests leave every member running, and use keys of their own."""
    return shared_cluster


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
        if any(one.pid(name) is not None for name in one.names):
            one.stop(timeout_s=0.0)  # how they end is another test's subject
        one.close()


@pytest.hookimpl(trylast=True)  # after those that leave out what is not run
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deal the tests to the processes of the run. Each is given one piece of the list, of as many
    tests as another's, and takes over from the end of another's when it has none left.

    The first has all tests that use the session of Spark or the shared cluster, so that there is
    one of each; the others have the folders with long tests, the longest first. Then come, for all,
    the short tests, which are taken over most easily.
    """
    SHARED.modules = _modules_with("shared_cluster", items)
    sharing = _modules_with("spark", items) | SHARED.modules
    places = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.path.parent.name, len(places)))
    items.sort(key=lambda item: item.path in SHARED.modules)  # one after the other
    modules: dict[Path, list[pytest.Item]] = {}
    for item in items:
        modules.setdefault(item.path, []).append(item)
    processes = getattr(config, "workerinput", {}).get("workercount", 1)
    pieces: list[list[pytest.Item]] = [[] for _ in range(processes)]
    others = itertools.cycle(pieces[1:] or pieces)
    short: list[pytest.Item] = []
    for path, tests in modules.items():
        if path in sharing:
            pieces[0] += tests
        else:
            (next(others) if path.parent.name in places else short).extend(tests)
    begins = 0
    for number, piece in enumerate(pieces):
        room = len(items) * (number + 1) // processes - sum(map(len, pieces[: number + 1]))
        piece += short[begins : begins + max(room, 0)]
        begins += max(room, 0)
    items[:] = itertools.chain(*pieces)


def _modules_with(fixture: str, items: list[pytest.Item]) -> set[Path]:
    """Return those with a test that asks for the fixture."""
    return {item.path for item in items if fixture in getattr(item, "fixturenames", ())}


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    if nextitem is None or nextitem.path not in SHARED.modules:
        SHARED.close()


def pytest_sessionfinish() -> None:
    SHARED.close()


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
