"""Disks that hang, or whose writers die, under real processes.

A writer process that is stopped by SIGSTOP does what one does whose fsync blocks: nothing.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Sequence

import pytest

from koinon.local import LocalCluster, Setup
from koinon.operate.admin import Admin
from koinon.operate.cluster_status import ClusterStatus
from koinon.operate.judge.health import problems
from tests.checkers.load import RecordedLoad
from tests.conftest import ClusterFactory
from tests.integration.copies import (
    is_fenced,
    is_settled,
    judge,
    led_by,
    number_of,
    table_of,
)
from tests.integration.rolling import restore_primaries
from tests.integration.test_full_disk import writer_of
from tests.integration.watching import wait_for_table
from tests.kit.clusters import running_cluster
from tests.kit.waiting import wait_until

TIMEOUT_S = 90.0
STREAM_ENDED = "stream to primary ended"
NODE_LEFT = "node left node=n1"


@pytest.fixture(scope="module")
def shaken() -> Iterator[LocalCluster]:
    """One for all tests here."""
    flags = ["--partitions", "64", "--replication-factor", "3"]
    # With a log in front of the store a writer process that is stopped is noticed later.
    direct = ["--write-ahead-log", "off"]
    with running_cluster(
        coordinators=1, setup=Setup(coordinator_flags=flags, node_flags=direct)
    ) as cluster:
        yield cluster


@pytest.fixture
def logged(make_cluster: ClusterFactory) -> LocalCluster:
    """Three nodes with a write-ahead log."""
    flags = ["--partitions", "64", "--replication-factor", "3"]
    cluster = make_cluster(coordinators=1, setup=Setup(coordinator_flags=flags))
    cluster.start()
    cluster.wait_for(is_settled, timeout_s=TIMEOUT_S, what="every replica in sync")
    return cluster


@pytest.fixture
def cluster(shaken: LocalCluster) -> LocalCluster:
    """Three nodes, of which each leads and follows."""
    shaken.wait_for(is_settled, timeout_s=TIMEOUT_S, what="every replica in sync")
    with Admin(shaken.coordinators) as admin:
        restore_primaries(shaken, admin)
    assert all(led_by(table_of(shaken.status()), name) > 10 for name in shaken.node_names)
    return shaken


def writers_of(cluster: LocalCluster, names: Sequence[str]) -> list[int]:
    return [writer_of(pid) for name in names if (pid := cluster.pid(name)) is not None]


@contextlib.contextmanager
def hanging(cluster: LocalCluster, *names: str) -> Iterator[None]:
    """Have the nodes' disks hang."""
    writers = writers_of(cluster, names)
    for writer in writers:
        os.kill(writer, signal.SIGSTOP)
    try:
        yield
    finally:
        for writer in writers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(writer, signal.SIGCONT)


def is_spared(status: ClusterStatus, name: str) -> bool:
    """Tell whether others lead everything, and no write waits for the node."""
    assert status.table is not None
    number = number_of(table_of(status), name)
    return status.ready and all(
        row.primary != number and number not in row.in_sync for row in status.table.rows
    )


def test_node_whose_disk_hangs_leads_nothing_until_it_answers(cluster: LocalCluster) -> None:
    def is_said_first() -> bool:
        told = problems(cluster.status())
        return bool(told) and told[0].startswith("the disk of node n1 has not answered for ")

    with RecordedLoad(cluster.client, prefix=b"leads/") as load:
        load.wait_for_progress()
        with hanging(cluster, "n1"):
            cluster.wait_for(
                lambda s: is_spared(s, "n1"), timeout_s=TIMEOUT_S, what="others lead what n1 led"
            )
            load.wait_for_progress()
            wait_until(is_said_first, "it is said, before all else")
        cluster.wait_for(is_settled, timeout_s=TIMEOUT_S, what="n1 has caught up")
        load.wait_for_progress()
    judge(cluster, load)
    wait_until(lambda: not problems(cluster.status()), "all is well")


@pytest.mark.long  # the simulation has hanging disks of both kinds
def test_node_whose_store_does_not_catch_up_with_its_log_leads_nothing_until_it_does(
    logged: LocalCluster,
) -> None:
    with RecordedLoad(logged.client, prefix=b"lags/") as load:
        load.wait_for_progress()
        with hanging(logged, "n1"):
            logged.wait_for(
                lambda s: is_spared(s, "n1"), timeout_s=TIMEOUT_S, what="others lead what n1 led"
            )
            load.wait_for_progress()
        logged.wait_for(is_settled, timeout_s=TIMEOUT_S, what="n1 has caught up")
        load.wait_for_progress()
    judge(logged, load)


@pytest.mark.long  # a stop waits for 22 s
def test_node_whose_disk_hangs_is_stopped_by_sigterm(cluster: LocalCluster) -> None:
    with RecordedLoad(cluster.client, prefix=b"stopped/") as load:
        load.wait_for_progress()
        with hanging(cluster, "n1"):
            cluster.terminate("n1", timeout_s=22.0)  # by force it would end after 25 s
            assert led_by(table_of(cluster.status()), "n1") == 0
            load.wait_for_progress()
        cluster.restart("n1")
        cluster.wait_for(is_settled, timeout_s=TIMEOUT_S, what="every replica in sync")
    judge(cluster, load)


def test_disks_that_hang_together_depose_nobody(cluster: LocalCluster) -> None:
    def sets() -> list[tuple[int, tuple[int, ...]]]:
        table = cluster.status().table
        assert table is not None
        return [(row.primary, row.in_sync) for row in table.rows]

    before = sets()
    with contextlib.ExitStack() as hung:
        hung.enter_context(hanging(cluster, *cluster.node_names))
        with RecordedLoad(cluster.client, prefix=b"together/") as load:
            cluster.wait_for(
                lambda s: all(session.commit_out_ms > 3_000 for session in s.sessions),
                timeout_s=TIMEOUT_S,
                what="all disks hang",
            )
            hung.close()
            load.wait_for_progress()
    assert sets() == before
    judge(cluster, load)


def test_node_whose_writer_dies_is_replaced_at_once(cluster: LocalCluster) -> None:
    (writer,) = writers_of(cluster, ["n1"])
    log, coordinator_log = cluster.log_path("n1"), cluster.log_path("c1")
    ended_before = log.read_text().count(STREAM_ENDED)
    left_before = coordinator_log.read_text().count(NODE_LEFT)
    with RecordedLoad(cluster.client, prefix=b"dies/") as load:
        load.wait_for_progress()
        os.kill(writer, signal.SIGKILL)
        # The cluster's own wait fails when a process has ended by itself.
        wait_for_table(cluster.coordinators, lambda t: is_fenced(t, "n1"), what="it has left")
        # It said so itself: the others did not wait until its session had ended.
        wait_until(
            lambda: coordinator_log.read_text().count(NODE_LEFT) > left_before,
            "it said that it left",
        )
        load.wait_for_progress()
    ended = log.read_text().count(STREAM_ENDED) - ended_before
    assert ended <= len(cluster.node_names)
    cluster.restart("n1")
    judge(cluster, load)
