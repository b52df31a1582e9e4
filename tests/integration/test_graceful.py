"""Processes that are stopped by SIGTERM and started again, one at a time, under a load of every
kind of operation: no caller hears of it.

``KOINON_GRACEFUL_ROUNDS=10 pytest tests/integration/test_graceful.py`` is the longer form, which
wants a machine of its own. ``make compose-test`` stops and rolls every server in containers, under
a load that leaves room.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from koinon.local import LocalCluster, Setup
from koinon.operate.admin import Admin
from tests.checkers.steady import SteadyLoad
from tests.conftest import ClusterFactory
from tests.integration.copies import held_by, table_of
from tests.integration.loading import Load, readable, rows_of
from tests.integration.rolling import PATIENT, STOP_S_MAX, restart, restore_primaries, wait_well
from tests.integration.test_moves import REBALANCE, execute, joined, wait_moved
from tests.kit.addresses import free_address
from tests.kit.clusters import running_cluster

ROUNDS = int(os.environ.get("KOINON_GRACEFUL_ROUNDS", "1"))
PARTITIONS = ["--partitions", "48"]
LOADED_ROWS = 20_000

pytestmark = pytest.mark.timeout(300 * ROUNDS)


def start(make_cluster: ClusterFactory, replicas: int) -> LocalCluster:
    cluster = make_cluster(
        setup=Setup(replication_factor=replicas, coordinator_flags=[*PARTITIONS, *PATIENT])
    )
    cluster.start()
    wait_well(cluster)
    return cluster


@pytest.mark.long  # a node and the leader: test_load_goes_on; every node: test_leaving
@pytest.mark.parametrize("replicas", [3, 2])
def test_rolling_restart_fails_no_operation(make_cluster: ClusterFactory, replicas: int) -> None:
    cluster = start(make_cluster, replicas)
    with SteadyLoad(cluster) as load, Admin(cluster.coordinators) as admin:
        for _ in range(ROUNDS):
            for name in [*cluster.node_names, *cluster.coordinator_names]:
                load.wait_for_progress()
                restart(cluster, name)
                assert not load.failed, name
            restart(cluster, cluster.leader() or "c1")
            restore_primaries(cluster, admin)
            load.wait_for_progress()
    load.judge()


@pytest.fixture(scope="module")
def stoppable() -> Iterator[LocalCluster]:
    with running_cluster(
        setup=Setup(replication_factor=3, coordinator_flags=[*PARTITIONS, *PATIENT])
    ) as cluster:
        yield cluster


@pytest.fixture
def cluster(stoppable: LocalCluster) -> LocalCluster:
    """The same for all tests that leave its members as they are."""
    stoppable.start()  # those that the last test has stopped
    wait_well(stoppable)
    return stoppable


def test_load_goes_on_while_a_node_and_the_leader_are_stopped(cluster: LocalCluster) -> None:
    for number in range(ROUNDS):
        loading = Load(cluster, rows_of(f"load{number}", LOADED_ROWS))
        with SteadyLoad(cluster) as load, ThreadPoolExecutor() as pool:
            load.wait_for_progress()
            saved = pool.submit(loading.save)
            for name in ("n1", cluster.leader() or "c1"):
                restart(cluster, name)
            assert saved.result()
            load.wait_for_progress()
        load.judge()
        with cluster.client() as client:
            assert readable(client, loading.rows) == LOADED_ROWS


@pytest.mark.long  # test_moves kills them instead
def test_moves_go_on_after_a_source_and_a_target_were_stopped(
    make_cluster: ClusterFactory,
) -> None:
    cluster = start(make_cluster, 3)
    with SteadyLoad(cluster) as load, Admin(cluster.coordinators, timeout_ms=10_000) as admin:
        load.wait_for_progress()
        new = joined(cluster)
        admin.set_moves(bytes_per_second=4_000)
        assert execute(admin, REBALANCE) > 10
        cluster.wait_for(
            lambda s: held_by(table_of(s), new) > 0, timeout_s=60, what="moves under way"
        )
        for name in ("n1", new):
            cluster.terminate(name, timeout_s=STOP_S_MAX)
            cluster.restart(name)
            cluster.wait_ready(60.0)
        admin.set_moves(bytes_per_second=0)
        wait_moved(cluster, admin)
        load.wait_for_progress()
    load.judge()
    assert held_by(table_of(cluster.status()), new) == 48 * 3 // 4


def test_cluster_that_is_stopped_at_once_takes_no_longer_than_one_process(
    cluster: LocalCluster,
) -> None:
    cluster.stop(timeout_s=STOP_S_MAX)
    for name in cluster.names:
        log = cluster.log_path(name).read_text()
        # gRPC may have a word after it, of the stream of a peer that stops as well.
        ends = log.splitlines()[-3:]
        assert any(" stopped " in line for line in ends), f"{name} was killed:\n{log[-2000:]}"


def wait_until_caught(pid: int) -> None:
    """Wait until the process minds SIGTERM; before, it is but an interpreter that begins."""
    bit = 1 << (signal.SIGTERM - 1)
    deadline = time.monotonic() + 120.0
    while True:
        status = Path(f"/proc/{pid}/status").read_text()
        (caught,) = [line.split()[1] for line in status.splitlines() if line.startswith("SigCgt")]
        if int(caught, 16) & bit:
            return
        assert time.monotonic() < deadline, "it does not mind SIGTERM"
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT])
@pytest.mark.parametrize("kind", ["koinon_node", "koinon_coordinator"])
def test_process_ends_with_0_whenever_it_is_told_to(
    tmp_path: Path, kind: str, number: signal.Signals
) -> None:
    """From its first moments on, twice in a row, and without anybody to say farewell to."""
    address = "127.0.0.1:1"
    others = {
        "koinon_node": ["--coordinators", address],
        "koinon_coordinator": ["--members", "x=127.0.0.1:1,y=127.0.0.1:2,z=127.0.0.1:3"],
    }
    for delay_s in (0.0, 0.4, 1.2):
        data = tmp_path / f"{delay_s}"
        command = [sys.executable, "-m", kind, "--id", "x", "--listen", free_address()]
        with subprocess.Popen(
            [*command, "--advertise", address, "--data", str(data), *others[kind]],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            wait_until_caught(process.pid)
            time.sleep(delay_s)
            process.send_signal(number)
            process.send_signal(number)
            _, told = process.communicate(timeout=STOP_S_MAX)
        assert process.returncode == 0, told
