"""Kills of processes while Spark writes: whole rows or none, and a rerun succeeds.

The driver, its JVM, an executor, Python workers, a node, the coordinators' leader; speculation is
on, so that tasks have twins. ``KOINON_LOAD_ROUNDS=10 pytest tests/spark/test_kills.py`` is the
longer form.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from koinon import java
from koinon.client import Client
from koinon.local import LocalCluster
from koinon.local.servers import environment
from koinon.operate.loads_client import LoadsClient, LoadState
from tests.kit.waiting import wait_until

ROWS = 60_000
TIMEOUT_S = 120.0
ROUNDS = int(os.environ.get("KOINON_LOAD_ROUNDS", "1"))
LOCAL = "local[2,4]"  # a task that fails is tried four times
EXECUTORS = "local-cluster[2,1,512]"
ABANDONED, PATIENT = "10s", "5m"  # a load that is not touched: of jobs that end, and that go on

pytestmark = pytest.mark.timeout(420 * ROUNDS)


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[Client]:
    with cluster.client(timeout_ms=60_000) as connected:
        yield connected


class SparkJob:
    """A driver process, and all that it starts, in a session of their own."""

    def __init__(
        self,
        cluster: LocalCluster,
        master: str,
        prefix: str,
        scratch: Path,
        load_timeout: str = PATIENT,
    ) -> None:
        import pyspark

        arguments = [master, cluster.coordinators, prefix, str(ROWS), load_timeout]
        self._errors = (scratch / f"{prefix}.log").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.spark.job_process", *arguments],
            env={
                **environment(),
                "PYTHONPATH": os.pathsep.join(
                    [str(Path(__file__).parents[2]), environment()["PYTHONPATH"]]
                ),
                "JAVA_HOME": str(java.find_java(spark_version=pyspark.__version__).home),
                "PYSPARK_PYTHON": sys.executable,
                "SPARK_HOME": str(Path(pyspark.__file__).parent),
                "SPARK_LOCAL_DIRS": str(scratch),
                "SPARK_WORKER_DIR": str(scratch),
            },
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            cwd=scratch,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "running\n", self.errors()

    def errors(self) -> str:
        self._errors.seek(0)
        return self._errors.read()[-4_000:]

    def members(self, *names: str) -> list[int]:
        """Return the processes of the job whose command lines have one of these in them."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                if os.getsid(int(entry.name)) == self.process.pid:
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    if any(name in command for name in names):
                        found.append(int(entry.name))
        return found

    def kill(self, *names: str) -> int:
        """Kill those processes; return how many there were."""
        killed = 0
        for pid in self.members(*names):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                killed += 1
        return killed

    def wait(self) -> bool:
        """Wait for the end; return whether the driver saw the rows saved."""
        assert self.process.stdout is not None
        said = self.process.stdout.read()
        self.process.wait(TIMEOUT_S)
        return "saved" in said

    def close(self) -> None:
        """End what is left of it."""
        self.kill("")
        self.process.wait(TIMEOUT_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._errors.close()


VICTIMS = {
    "driver": (LOCAL, ("job_process", "SparkSubmit", "pyspark.daemon")),
    "JVM": (LOCAL, ("SparkSubmit",)),
    "executor": (EXECUTORS, ("CoarseGrainedExecutorBackend",)),
    "workers": (LOCAL, ("pyspark.daemon",)),
    "node": (LOCAL, ()),
    "leader": (LOCAL, ()),
}


@pytest.mark.long  # test_cluster kills workers and a node; integration/test_loads leaves loads open
@pytest.mark.parametrize("victim", list(VICTIMS))
def test_job_ends_whole_or_without_a_trace_whoever_is_killed(
    cluster: LocalCluster, client: Client, victim: str, tmp_path: Path
) -> None:
    rng = random.Random(victim)
    master, names = VICTIMS[victim]
    with LoadsClient(cluster.coordinators, timeout_s=TIMEOUT_S) as loads:
        for number in range(ROUNDS):
            prefix = f"{victim}{number}"
            known = {load.load_id for load in loads.loads()}
            ends = victim in ("driver", "JVM")
            job = SparkJob(cluster, master, prefix, tmp_path, ABANDONED if ends else PATIENT)
            try:
                _wait_for_new(loads, known)
                time.sleep(rng.uniform(0, 1.0))
                _strike(cluster, job, victim, names)
                saved = job.wait()
            finally:
                job.close()
            state = _end_of(loads, known)
            there = sum(1 for _ in client.scan(prefix=f"{prefix}:".encode(), keys_only=True))
            print(f"{victim} killed: saved={saved} {state.name} rows={there}")
            assert there == (ROWS if state is LoadState.DONE else 0)
            assert state is LoadState.DONE or not saved
            if not ends:
                assert saved, f"the job does not go on without the {victim}"
            if state is not LoadState.DONE:
                _run_again(cluster, client, prefix, tmp_path)


def _strike(cluster: LocalCluster, job: SparkJob, victim: str, names: tuple[str, ...]) -> None:
    if victim == "executor":
        executors = job.members(*names)
        if executors:
            os.kill(executors[0], signal.SIGKILL)
    elif names:
        job.kill(*names)
    else:
        leader = cluster.wait_for(lambda s: s.is_leader, timeout_s=TIMEOUT_S, what="one leads")
        name = "n2" if victim == "node" else leader.member_id
        cluster.kill(name)
        time.sleep(1.0)
        cluster.restart(name)


def _new(loads: LoadsClient, known: set[int]) -> int | None:
    return next((load.load_id for load in loads.loads() if load.load_id not in known), None)


def _wait_for_new(loads: LoadsClient, known: set[int]) -> None:
    wait_until(lambda: _new(loads, known) is not None, timeout_s=TIMEOUT_S)


def _end_of(loads: LoadsClient, known: set[int]) -> LoadState:
    """Wait until the job's load has ended; a job that is gone is given up after ten seconds."""
    load_id = _new(loads, known)
    assert load_id is not None
    ends: list[LoadState] = []

    def ended() -> bool:
        load = loads.get(load_id)
        assert load is not None
        ends.append(load.state)
        return load.state in (LoadState.DONE, LoadState.ABORTED)

    wait_until(ended, timeout_s=TIMEOUT_S)
    return ends[-1]


def _run_again(cluster: LocalCluster, client: Client, prefix: str, scratch: Path) -> None:
    job = SparkJob(cluster, LOCAL, prefix, scratch)
    try:
        assert job.wait(), job.errors()
    finally:
        job.close()
    rows = {entry.key: entry.value for entry in client.scan(prefix=f"{prefix}:".encode())}
    assert rows == {f"{prefix}:{i:07}".encode(): f"v{i}".encode() for i in range(ROWS)}
