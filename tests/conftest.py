"""Clusters of real processes for the tests that need one; what the simulation covered."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from koinon.client import Client
from koinon.local import LocalCluster

ClusterFactory = Callable[..., LocalCluster]

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


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how much the simulation covered, however many processes it ran in."""
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
