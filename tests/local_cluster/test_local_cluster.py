"""LocalCluster and up/down: start, stop, kill, attach, refuse."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from koinon.local import LocalCluster, Ports, Setup
from koinon.local import cluster_files as files
from koinon.local.cluster_files import LocalClusterError
from koinon.local.processes import ProcessState, identify
from koinon.operate.admin import Admin
from koinon_proto.contract.cluster_errors import DataDirectoryError
from koinon_proto.contract.table import NodeStatus
from tests.conftest import ClusterFactory
from tests.kit.clusters import running_cluster
from tests.kit.forked import Forked
from tests.scraping import scrape

SMALL: dict[str, Any] = {"nodes": 1, "coordinators": 1}


@pytest.fixture(scope="module")
def small() -> Iterator[LocalCluster]:
    """One node and one coordinator, for tests that leave both of them running."""
    with running_cluster(**SMALL) as cluster:
        yield cluster


def test_cluster_stopped_and_started_again_keeps_members_and_data(
    make_cluster: ClusterFactory, tmp_path: Path
) -> None:
    with make_cluster(tmp_path, **SMALL) as cluster:
        addresses = {name: cluster.address(name) for name in cluster.names}
        with cluster.client() as client:
            client.put(b"k", b"v")
        pids = [cluster.pid(name) for name in cluster.names]
    assert all(pid is not None and identify(pid) is None for pid in pids)
    again = make_cluster(tmp_path)
    again.start()
    status = again.wait_ready()  # which waits until the node knows what it holds
    assert sum(session.records for session in status.sessions) == 1
    with again.client() as client:
        assert {name: again.address(name) for name in again.names} == addresses
        assert client.get(b"k") == b"v"


def test_cluster_without_directory_removes_its_own(make_cluster: ClusterFactory) -> None:
    cluster = make_cluster(**SMALL)
    cluster.start()
    assert cluster.data_dir.exists()
    cluster.close()
    assert not cluster.data_dir.exists()


def test_member_states_follow_kill_pause_and_restart(small: LocalCluster) -> None:
    small.pause("n1")
    small.kill("n1")
    assert small.states == {"c1": ProcessState.RUNNING, "n1": ProcessState.STOPPED}
    small.restart("n1")
    small.wait_ready()
    assert small.leader() == "c1"
    with pytest.raises(LocalClusterError, match="n9"):
        small.kill("n9")


def test_added_node_registers_and_others_are_undisturbed(small: LocalCluster) -> None:
    before = small.pid("n1")
    assert small.add_node() == "n2"
    table = small.wait_ready().table
    assert table is not None
    assert {node.node_id for node in table.nodes.values()} == {"n1", "n2"}
    assert small.pid("n1") == before


def test_node_that_was_removed_has_a_successor_of_a_new_name(
    make_cluster: ClusterFactory, tmp_path: Path
) -> None:
    cluster = make_cluster(tmp_path, nodes=1, coordinators=1)
    cluster.start()
    cluster.wait_ready()  # else the second may be the first to register, and hold everything
    assert cluster.add_node() == "n2"
    cluster.wait_ready()
    with Admin(cluster.coordinators) as admin:
        admin.set_node_status("n2", NodeStatus.LEFT)
    cluster.close()
    again = make_cluster(tmp_path, nodes=2)
    again.start()
    status = again.wait_ready()
    assert again.node_names == ["n1", "n3"]
    assert again.wait_ready().table == status.table
    assert status.table is not None
    states = {str(node.node_id): node.status for node in status.table.nodes.values()}
    active = NodeStatus.ACTIVE
    assert states == {"n1": active, "n2": NodeStatus.LEFT, "n3": active}
    again.close()
    third = make_cluster(tmp_path, nodes=3)  # n2 is remembered, whatever becomes of its directory
    assert third.node_names == ["n1", "n3", "n4"]


def test_process_that_dies_at_start_is_shown_with_its_log(make_cluster: ClusterFactory) -> None:
    cluster = make_cluster(
        nodes=1, coordinators=1, setup=Setup(coordinator_flags=["--lease-ms", "9000"])
    )
    cluster.start()
    with pytest.raises(LocalClusterError) as caught:
        cluster.wait_ready()
    assert "c1 exited with code" in str(caught.value)
    assert "9000" in str(caught.value)


def test_second_cluster_on_one_directory_is_refused(
    make_cluster: ClusterFactory, tmp_path: Path
) -> None:
    make_cluster(tmp_path, **SMALL)
    with pytest.raises(LocalClusterError, match="already runs"):
        make_cluster(tmp_path)


@pytest.mark.parametrize("counts", [{"coordinators": 2}, {"coordinators": 0}, {"nodes": 0}])
def test_impossible_counts_are_refused(
    make_cluster: ClusterFactory, counts: dict[str, int]
) -> None:
    with pytest.raises(LocalClusterError, match=str(next(iter(counts.values())))):
        make_cluster(**counts)


def test_replication_factor_above_the_nodes_is_refused(make_cluster: ClusterFactory) -> None:
    with pytest.raises(LocalClusterError, match="3 copies"):
        make_cluster(**SMALL, setup=Setup(replication_factor=3))


def test_replication_factor_of_a_cluster_that_exists_is_not_changed_here(
    make_cluster: ClusterFactory, tmp_path: Path
) -> None:
    with make_cluster(tmp_path, **SMALL, setup=Setup(replication_factor=1)) as cluster:
        table = cluster.status().table
        assert table is not None
        assert table.cluster.replication_factor == 1
    make_cluster(tmp_path, setup=Setup(replication_factor=1)).close()
    with pytest.raises(LocalClusterError, match="set-replication-factor 2"):
        make_cluster(tmp_path, setup=Setup(replication_factor=2))


@pytest.mark.parametrize(
    "other",
    [
        Setup(racks=["b"]),
        Setup(node_flags=["--pool", "x"]),
        Setup(coordinator_flags=["--lease-ms", "9"]),
    ],
)
def test_settings_that_a_cluster_keeps_are_refused_where_they_differ(
    other: Setup, make_cluster: ClusterFactory, tmp_path: Path
) -> None:
    kept = Setup(
        racks=["a"], node_flags=["--weight", "50"], coordinator_flags=["--partitions", "8"]
    )
    with make_cluster(tmp_path, **SMALL, setup=replace(kept, partitioner="md5")):
        pass
    make_cluster(tmp_path).close()
    make_cluster(tmp_path, setup=kept).close()
    make_cluster(tmp_path, setup=replace(kept, partitioner="md5")).close()
    with pytest.raises(LocalClusterError, match=r"leave (racks|the flags) out"):
        make_cluster(tmp_path, setup=other)


def test_up_with_settings_for_members_that_run_says_from_when_on_they_count(
    make_cluster: ClusterFactory, tmp_path: Path, forked: Forked
) -> None:
    cluster = make_cluster(tmp_path, **SMALL)
    cluster.start(detached=True)
    cluster.wait_ready()
    cluster.close()
    try:
        asked = ("--metrics", "--redis-keyspace", "carts", "--json")
        again = forked.koinon("up", "--detach", "--data", str(tmp_path), *asked)
        assert "c1 and n1 ran already" in again.stderr
        remembered = files.load(tmp_path)
        assert remembered is not None
        assert (remembered.metrics, remembered.redis_keyspaces) == (True, ["carts"])
    finally:
        forked.koinon("down", "--data", str(tmp_path))


def test_racks_and_weights_reach_the_table(make_cluster: ClusterFactory) -> None:
    with make_cluster(nodes=2, coordinators=1, setup=Setup(racks=["a", "b"])) as cluster:
        cluster.add_node(rack="c", weight=50)
        table = cluster.wait_ready().table
    assert table is not None
    assert {str(n.node_id): n.rack for n in table.nodes.values()} == {
        "n1": "a",
        "n2": "b",
        "n3": "c",
    }
    assert [n.weight for n in table.nodes.values()] == [100, 100, 50]


def test_damaged_cluster_file_is_refused_by_name(
    make_cluster: ClusterFactory, tmp_path: Path
) -> None:
    for content in ("{", "[]", '{"format": 99}', '{"format": 1}'):
        files.cluster_file_path(tmp_path).write_text(content)
        with pytest.raises(DataDirectoryError, match=r"cluster\.json"):
            make_cluster(tmp_path)


def test_stale_pids_of_another_boot_are_no_obstacle(
    make_cluster: ClusterFactory, tmp_path: Path
) -> None:
    never_started = make_cluster(tmp_path, **SMALL)
    never_started.stop()  # notes what runs
    never_started.close()
    path = files.cluster_file_path(tmp_path)
    data = json.loads(path.read_text())
    data["detached"] = True
    data["processes"] = {"n1": {"pid": os.getpid(), "started": "another boot:1"}}
    path.write_text(json.dumps(data))
    with make_cluster(tmp_path) as cluster:
        assert cluster.pid("n1") != os.getpid()


def test_addresses_count_up_from_a_free_port_and_avoid_taken_ones() -> None:
    claims = files.PortClaims()  # until it is bound, lest another cluster takes it
    first = files.port_of(files.choose_addresses(1, 0, claims=claims)[0])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first))
        claims.release()
        addresses = files.choose_addresses(3, first)
        assert f"127.0.0.1:{first}" not in addresses
        assert len(set(addresses)) == 3


def test_port_of_a_member_that_was_removed_is_chosen_again() -> None:
    claims = files.PortClaims()
    first = files.port_of(files.choose_addresses(1, 0)[0])
    addresses = files.choose_addresses(1, first, claims=claims)
    assert files.choose_addresses(1, first, addresses, claims) != addresses
    assert files.choose_addresses(1, first) != addresses  # another cluster's
    assert files.choose_addresses(1, first, (), claims) == addresses
    claims.release([first])
    assert files.choose_addresses(1, first) == addresses
    claims.release()


def test_clusters_made_at_once_choose_different_ports(tmp_path: Path) -> None:
    first = files.port_of(files.choose_addresses(1, 0)[0])
    made = [
        LocalCluster(
            tmp_path / name,
            nodes=1,
            coordinators=1,
            ports=Ports(first_coordinator=first, first_node=first + 1),
        )
        for name in ("a", "b")
    ]
    try:
        chosen = [cluster.address(name) for cluster in made for name in cluster.names]
        assert f"127.0.0.1:{first}" in chosen
        assert len(set(chosen)) == 4
    finally:
        for cluster in made:
            cluster.close()
    last = LocalCluster(
        tmp_path / "c", nodes=1, coordinators=1, ports=Ports(first_coordinator=first)
    )
    assert last.address("c1") == f"127.0.0.1:{first}", "what was never used is free again"
    last.close()


def test_up_detached_then_down_then_up_keeps_the_data(tmp_path: Path, forked: Forked) -> None:
    data = str(tmp_path)
    started = forked.koinon(
        *("up", "--detach", "--data", data, "--nodes", "1", "--coordinators", "1", "--json"),
        "--metrics",
    )
    try:
        assert started.returncode == 0, started.stderr
        answer = json.loads(started.stdout)
        for member in answer["members"].values():
            assert scrape(member["metrics"]).sum("koinon_build_info") == 1
        where = answer["coordinators"]
        assert forked.koinon("put", "k", "v", "--coordinators", where).returncode == 0
        os.kill(answer["members"]["n1"]["pid"], signal.SIGKILL)
        again = forked.koinon("up", "--detach", "--data", data, "--json")
        assert again.returncode == 0, again.stderr
        pids = {name: m["pid"] for name, m in json.loads(again.stdout)["members"].items()}
        assert pids["c1"] == answer["members"]["c1"]["pid"]
        assert pids["n1"] != answer["members"]["n1"]["pid"]
        refused = forked.koinon("up", "--data", data)
        assert refused.returncode == 2
        assert "koinon down" in refused.stderr
        attached = LocalCluster.attach(tmp_path)
        assert set(attached.states.values()) == {ProcessState.RUNNING}
        attached.close()
        assert identify(pids["c1"]) is not None
    finally:
        stopped = forked.koinon("down", "--data", data)
    assert stopped.returncode == 0, stopped.stderr
    assert all(identify(pid) is None for pid in pids.values())
    assert forked.koinon("down", "--data", data).returncode == 1
    with LocalCluster(tmp_path) as cluster, cluster.client() as client:
        assert client.get(b"k") == b"v"


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP, signal.SIGKILL]
)
def test_up_in_the_foreground_leaves_no_process_behind(
    tmp_path: Path, number: signal.Signals
) -> None:
    command = [sys.executable, "-m", "koinon.cli", "up", "--data", str(tmp_path), "--json"]
    command += ["--nodes", "1", "--coordinators", "1"]
    buffered = {name: os.environ[name] for name in os.environ.keys() - {"PYTHONUNBUFFERED"}}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=buffered) as process:
        assert process.stdout is not None
        answer = json.loads(process.stdout.readline())
        process.send_signal(number)
        code = process.wait(timeout=120)
    assert code == (-signal.SIGKILL if number is signal.SIGKILL else 0)
    deadline = time.monotonic() + 60
    if number is not signal.SIGKILL:
        for name in answer["members"]:
            assert " stopped " in (tmp_path / "logs" / f"{name}.log").read_text(), name
    pids = [member["pid"] for member in answer["members"].values()]
    while any(identify(pid) is not None for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _bind_soon(free: socket.socket, host: str, port: int) -> None:
    """Bind the port of a process that has just been killed: its connections are still closing."""
    deadline = time.monotonic() + 60
    while True:
        try:
            return free.bind((host, port))
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def test_up_again_on_a_taken_port_names_member_and_port(
    make_cluster: ClusterFactory, tmp_path: Path
) -> None:
    cluster = make_cluster(tmp_path, nodes=3, coordinators=1)
    cluster.start(detached=True)
    cluster.wait_ready()
    try:
        cluster.kill("n1")
        host, _, port = cluster.address("n1").rpartition(":")
        with socket.socket() as taken:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            _bind_soon(taken, host, int(port))
            taken.listen()
            with pytest.raises(LocalClusterError, match=rf"{cluster.address('n1')} \(n1\)"):
                cluster.start()
            cluster.undo_start()
        assert cluster.states["n2"] is ProcessState.RUNNING
    finally:
        cluster.stop()
