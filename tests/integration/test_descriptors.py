"""A node without file descriptors: status and log say so, its clients go on, and it recovers."""

from __future__ import annotations

import contextlib
import resource
import socket
from pathlib import Path

import koinon
from koinon.local import LocalCluster, Setup
from koinon.operate.judge.health import problems
from tests.kit.waiting import wait_until
from tests.node.kit.resp_client import RespClient


def test_a_node_without_descriptors_says_so_serves_its_clients_and_recovers() -> None:
    flags = Setup(coordinator_flags=["--partitions", "4"])
    with LocalCluster(coordinators=1, nodes=1, setup=flags) as cluster, cluster.client() as client:
        client.put(b"k", b"0")
        pid = cluster.pid("n1")
        assert pid is not None
        used = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (used + 20, before[1]))
        host, _, port = cluster.redis_address("n1").rpartition(":")
        with contextlib.ExitStack() as held, cluster.admin() as admin:
            for _ in range(40):
                held.enter_context(socket.create_connection((host, int(port))))
            wait_until(lambda: any("file descriptors" in line for line in problems(admin.status())))
            wait_until(lambda: "nearly used up" in cluster.log_path("n1").read_text())
            for number in range(20):
                client.put(b"k", b"%d" % number)
                assert client.get(b"k") == b"%d" % number
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        with RespClient(cluster.redis_address("n1")) as another:
            assert another.call("GET", "k") == b"19"
        with koinon.connect(cluster.coordinators) as another_client:
            assert another_client.get(b"k") == b"19"
