"""Clusters of real processes for the tests that need one; which process of a run takes which tests
when, and the long tests.

Tests that are marked ``long`` are run by ``make test-long``. KOINON_TESTS_UNTIL (seconds since
1970) says when no more of them are begun: the others are skipped, and named at the end.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

from koinon.client import Client
from koinon.local import LocalCluster, processes
from tests.kit.clusters import end_at_once
from tests.kit.forked import Forked
from tests.kit.warm import WarmServers

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ClusterFactory = Callable[..., LocalCluster]

SPARK = "tests/spark"
LONGEST_FIRST = (
    *("simulation/test_simulation", "integration", "local_cluster", "observe", "raft"),
    *("coordinator", "fuzz", "nemesis", "node", "client", "cli"),
)
"""Folders and modules whose tests take long: they are begun before the others, so that those at the
end of a run are short.
"""
ASYNC_TEST_TIMEOUT_S = 240.0
"""The bound of an ``async def test_…``; it is below pytest-timeout's, so that the failure shows the
statement at which the test waits.
"""
LEFT_OUT = "left out, for the time for long tests is over"

# Tests start some hundreds of processes; without bytecode on disk, each would compile the whole
# tree again, a third of what it takes to start a server.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A test's Spark job is over before what Java's second compiler makes of it pays: half of its CPU.
os.environ.setdefault("SPARK_SUBMIT_OPTS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")


@pytest.fixture(autouse=True)
def _takes_hangups() -> None:
    """Take hangups, and have all that the test starts take them: the parent of a run in the
    background may ignore them, as do servers that an earlier test ran in this process.
    """
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


# Of an example: the first one imports what it needs, and the machine may do much else.
hypothesis.settings.register_profile(
    "koinon",
    hypothesis.settings(),
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
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
SERVERS = WarmServers()
processes.launch = SERVERS.launch

# Where nothing else is said, clusters have more time to be ready, and members to end by themselves
# before they are killed, than users give them: the machine may do much else.
LocalCluster.wait_ready.__defaults__ = (120.0,)
LocalCluster.terminate.__defaults__ = LocalCluster.stop.__defaults__ = (60.0,)


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
        tree = Path(__file__).parents[1]
        patch.setenv("PYTHONPATH", f"{environment()['PYTHONPATH']}{os.pathsep}{tree}")
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
            .config("spark.python.daemon.module", "tests.spark.warm_workers")
            .getOrCreate()
        )
        session.sparkContext.setLogLevel("OFF")
        register(session)
        yield session
        session.stop()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine function, on an event loop of its own and within a bound. A
    fixture that is an asynchronous context manager is entered, and the test gets what it yields.
    """
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {
        name: value
        for name, value in pyfuncitem.funcargs.items()
        if name in inspect.signature(pyfuncitem.obj).parameters
    }

    async def run() -> None:
        async with AsyncExitStack() as stack:
            for name, value in arguments.items():
                if isinstance(value, AbstractAsyncContextManager):
                    arguments[name] = await stack.enter_async_context(value)
            await asyncio.wait_for(pyfuncitem.obj(**arguments), ASYNC_TEST_TIMEOUT_S)

    asyncio.run(run())
    return True


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Deal out whole modules in the order of the list, each to the process that is free next. All
    that is tried on Spark is for one of them: its session takes seconds to start.
    """
    from xdist.scheduler.loadscope import LoadScopeScheduling

    def module_of(nodeid: str) -> str:
        return SPARK if nodeid.startswith(SPARK) else nodeid.partition("::")[0]

    config.option.loadscopereorder = False
    scheduler = LoadScopeScheduling(config, log)
    scheduler._split_scope = module_of
    return scheduler


@pytest.hookimpl(trylast=True)  # after those that leave out what is not run
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put Spark first, then what asks for the shared cluster, then the other long ones."""
    asking = (i.path for i in items if "shared_cluster" in getattr(i, "fixturenames", ()))
    SHARED.modules = set(asking)
    items.sort(key=_place)


def _place(item: pytest.Item) -> tuple[bool, bool, int]:
    path, folder = item.path, item.nodeid.split("/")[1]
    on_spark = item.nodeid.startswith(SPARK)
    names = [name for name in (f"{folder}/{path.stem}", folder) if name in LONGEST_FIRST]
    place = LONGEST_FIRST.index(names[0]) if names else len(LONGEST_FIRST)
    return not on_spark, path not in SHARED.modules, place


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    if nextitem is None or nextitem.path not in SHARED.modules:
        SHARED.close()


def pytest_sessionfinish() -> None:
    SHARED.close()
    SERVERS.close()


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


def pytest_collection_finish() -> None:
    """Let the garbage collector pass over what collection has made: it is there to the end."""
    gc.collect()
    gc.freeze()
