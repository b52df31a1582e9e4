"""Clusters of real processes for the tests that need one; which tests stay together in a process of
the run, and the long tests.

Tests that are marked ``long`` are run by ``make test-long``. KOINON_TESTS_UNTIL (seconds since
1970) says when no more of them are begun: the others are skipped, and named at the end.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

from koinon.client import Client
from koinon.local import LocalCluster
from tests.kit.clusters import end_at_once
from tests.kit.forked import Forked

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ClusterFactory = Callable[..., LocalCluster]

TOGETHER = ("spark", "shared_cluster")
"""Fixtures that are made once a run: all modules with a test that asks for one are in its group."""
LONGEST_FIRST = (
    *TOGETHER,
    *("integration.test_loads", "simulation.test_simulation", "integration.test_isolation"),
    *("integration", "local_cluster", "observe", "coordinator", "raft", "fuzz", "nemesis"),
)
"""Groups and folders whose tests take seconds each: they are begun before the others, so that those
at the end of a run are short.
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
    """One cluster of 3 coordinators and 3 nodes for all tests that ask for it. It runs from the
    first of them to the end of the last module that has any: idle, it takes a fifth of a core.
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
            end_at_once(self._running)
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
        end_at_once(one)


@pytest.fixture(scope="session")
def forked() -> Iterator[Forked]:
    """Runs ``koinon`` in processes of its own, which need not import it."""
    running = Forked()
    yield running
    running.close()


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """One session for all tests of this process: it takes seconds to start."""
    import pyspark
    from pyspark.sql import SparkSession

    from koinon import java
    from koinon.local.servers import environment
    from koinon.spark import register

    scratch = tmp_path_factory.mktemp("spark")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        patch.setenv("JAVA_HOME", str(java.find_java(spark_version=pyspark.__version__).home))
        patch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
        session = (
            SparkSession.builder.master("local[2,2]")  # a task that fails is tried once more
            .config("spark.ui.enabled", "false")
            .config("spark.ui.showConsoleProgress", "false")
            .config("spark.driver.host", "127.0.0.1")
            .config("spark.driver.bindAddress", "127.0.0.1")
            .config("spark.driver.memory", "1g")
            .config("spark.sql.shuffle.partitions", "2")
            .config("spark.sql.adaptive.enabled", "false")
            .config("spark.sql.codegen.wholeStage", "false")  # jobs end before it pays
            .config("spark.sql.warehouse.dir", str(scratch / "warehouse"))
            .config("spark.local.dir", str(scratch))
            .getOrCreate()
        )
        session.sparkContext.setLogLevel("OFF")
        register(session)
        yield session
        session.stop()


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group the tests: a process of the run takes a whole group, the next one in this order."""
    SHARED.modules = _modules_with("shared_cluster", items)
    groups = {item.path: f"{item.path.parent.name}.{item.path.stem}" for item in items}
    for fixture in reversed(TOGETHER):
        groups |= dict.fromkeys(_modules_with(fixture, items), fixture)
    for item in items:
        item.add_marker(pytest.mark.xdist_group(groups[item.path]))
    items.sort(key=lambda item: (_place(groups[item.path]), item.path not in SHARED.modules))


def _modules_with(fixture: str, items: list[pytest.Item]) -> set[Path]:
    """Return those with a test that asks for the fixture."""
    return {item.path for item in items if fixture in getattr(item, "fixturenames", ())}


def _place(group: str) -> int:
    """Return the place of a group's name, or of its folder's."""
    names = [name for name in (group, group.partition(".")[0]) if name in LONGEST_FIRST]
    return LONGEST_FIRST.index(names[0]) if names else len(LONGEST_FIRST)


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
    left_out = [
        report.nodeid.partition("@")[0] for report in skipped if LEFT_OUT in str(report.longrepr)
    ]
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
