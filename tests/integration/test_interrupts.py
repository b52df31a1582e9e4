"""A signal handler that raises in the middle of the blocking client's calls, thousands of times."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from koinon.local.local_cluster import LocalCluster

TIMES = 1_500
BOUND_S = 600.0


@pytest.fixture(scope="module")
def coordinators() -> Iterator[str]:
    with LocalCluster(nodes=1, coordinators=1) as cluster:
        yield cluster.coordinators


@pytest.mark.parametrize(
    ("transport", "again"),
    [
        *(("auto", 0), ("grpc", 2)),
        *(pytest.param(*case, marks=pytest.mark.long) for case in (("auto", 2), ("grpc", 0))),
    ],
)
def test_only_the_programs_own_exception_comes_out_and_later_calls_are_right(
    coordinators: str, transport: str, again: int
) -> None:
    module = "tests.integration.interrupted"
    command = [sys.executable, "-m", module, coordinators, transport, str(TIMES), str(again)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BOUND_S, check=False)
    assert done.returncode == 0, done.stderr[-4_000:]
    told = json.loads(done.stdout)
    assert told["raised"] >= TIMES
    assert told["checks"] >= TIMES // 100 - 1
    assert told["foreign"] == {}
    if not again:  # else what is raised within Python's report of something raised is lost
        assert told["lost"] == 0
