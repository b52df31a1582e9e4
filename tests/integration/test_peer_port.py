"""Coordinators and nodes of real processes talk in frames, also after faults and garbage."""

from __future__ import annotations

import contextlib
import random
import re
import socket
import ssl

import pytest

from koinon.local import LocalCluster, Ports, Setup
from tests.conftest import ClusterFactory
from tests.integration.copies import epochs
from tests.integration.rolling import PATIENT, restart
from tests.kit.waiting import wait_until
from tests.scraping import scrape

FLAGS = ["--partitions", "16", *PATIENT]
_PORT = re.compile(r"coordinator started .* peer_port=(\d+)")


def streams(cluster: LocalCluster, name: str, metric: str, **labels: str) -> float:
    context = None
    if cluster.tls_bundle:
        context = ssl.create_default_context(cafile=cluster.tls_bundle)
        context.load_cert_chain(cluster.tls_bundle)
        context.check_hostname = False
    return scrape(cluster.metrics_address(name), context=context).sum(metric, **labels)


def framed(cluster: LocalCluster) -> tuple[float, float]:
    """Return (streams between coordinators, nodes whose heartbeats come to the leader by stream).
    A process that is only starting counts no stream.
    """
    leader, raft, beats = cluster.leader(), 0.0, 0.0
    with contextlib.suppress(OSError):
        for name in cluster.coordinator_names:
            if cluster.pid(name) is not None:
                raft += streams(cluster, name, "koinon_raft_streams")
        if leader is not None:
            method = "Membership/Heartbeat"
            beats = streams(cluster, leader, "koinon_peer_port_streams", method=method)
    return raft, beats


def peer_address(cluster: LocalCluster, name: str) -> tuple[str, int]:
    """Return where the coordinator takes frames, as it said at its last start."""
    return "127.0.0.1", int(_PORT.findall(cluster.log_path(name).read_text())[-1])


@pytest.mark.parametrize("tls", [pytest.param(False, marks=pytest.mark.long), True])
def test_all_streams_stand_and_again_after_the_leader_was_killed_paused_and_stopped(
    make_cluster: ClusterFactory, tls: bool
) -> None:
    cluster = make_cluster(
        coordinators=3,
        nodes=3,
        tls=tls,
        setup=Setup(coordinator_flags=FLAGS),
        ports=Ports(metrics=True),
    )
    cluster.start()
    cluster.wait_ready()
    nodes_before, _ = epochs(cluster.status())
    wait_until(lambda: framed(cluster) == (6, 3), "all in frames")
    leader = cluster.leader()
    assert leader is not None
    cluster.kill(leader)
    wait_until(lambda: framed(cluster) == (2, 3), "the others in frames")
    cluster.restart(leader)
    wait_until(lambda: framed(cluster) == (6, 3), "all in frames again")
    leader = cluster.leader()
    assert leader is not None
    cluster.pause(leader)
    cluster.wait_for(lambda status: status.is_leader, timeout_s=60.0, what="another leader")
    cluster.resume(leader)
    wait_until(lambda: framed(cluster) == (6, 3), "all in frames after the pause")
    restart(cluster, cluster.leader() or leader)
    restart(cluster, "n1")
    wait_until(lambda: framed(cluster) == (6, 3), "all in frames after the restarts")
    nodes, _ = epochs(cluster.status())
    assert {**nodes, "n1": 0} == {**nodes_before, "n1": 0}, "a node was fenced"


def test_garbage_at_the_peer_ports_disturbs_nobody(make_cluster: ClusterFactory) -> None:
    cluster = make_cluster(
        coordinators=3, nodes=3, setup=Setup(coordinator_flags=FLAGS), ports=Ports(metrics=True)
    )
    cluster.start()
    cluster.wait_ready()
    before = epochs(cluster.status())
    wait_until(lambda: framed(cluster) == (6, 3), "all in frames")
    rng = random.Random(7)
    beginnings = (
        *(b"", b"KOINON.RAFT 1\r\n", b"KOINON.HEARTBEATS 1\r\n", b"KOINON.RAFT 1"),
        *(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"*1\r\n$4\r\nPING\r\n"),
    )
    for number in range(120):
        name = rng.choice(cluster.coordinator_names)
        with socket.create_connection(peer_address(cluster, name), 60.0) as sock:
            sock.settimeout(0.1)  # of what does not answer garbage
            try:
                sock.sendall(rng.choice(beginnings))
                if number % 2:
                    sock.recv(100)
                sock.sendall(rng.randbytes(rng.choice([1, 100, 70_000])))
            except OSError:
                continue
    wait_until(lambda: framed(cluster) == (6, 3), "all in frames")
    assert epochs(cluster.status()) == before, "a node was fenced"
    for name in cluster.names:
        assert "Traceback" not in cluster.log_path(name).read_text()
