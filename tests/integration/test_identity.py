"""Nodes that may not join: with a directory of another cluster, or an id in use."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from koinon.local import LocalCluster
from koinon.local.cluster_files import choose_addresses
from tests.conftest import ClusterFactory
from tests.integration.copies import epochs


def run_node(
    name: str, address: str, data: Path, coordinators: str
) -> subprocess.CompletedProcess[str]:
    """Run a node that is expected to refuse and end."""
    command = [sys.executable, "-m", "koinon_node", "--id", name, "--listen", address]
    command += ["--data", str(data), "--coordinators", coordinators]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_node_with_directory_of_another_cluster_refuses_and_names_both(
    cluster: LocalCluster, make_cluster: ClusterFactory, tmp_path: Path
) -> None:
    with make_cluster(nodes=1, coordinators=1) as other:
        table = other.status().table
        assert table is not None
        other_id = table.cluster.cluster_id
        other.terminate("n1")
        shutil.copytree(other.member_dir("n1"), tmp_path / "n1")
    address = choose_addresses(1, 0)[0]
    ended = run_node("n1", address, tmp_path / "n1", cluster.coordinators)
    assert ended.returncode == 2
    own = cluster.status().table
    assert own is not None
    assert other_id in ended.stderr
    assert own.cluster.cluster_id in ended.stderr
    assert "Traceback" not in ended.stderr


def test_node_with_an_id_in_use_is_refused_and_the_other_goes_on(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    before = cluster.wait_ready()
    address = choose_addresses(1, 0)[0]
    ended = run_node("n1", address, tmp_path, cluster.coordinators)
    assert ended.returncode == 2
    assert address in ended.stderr
    assert cluster.address("n1") in ended.stderr
    assert "Traceback" not in ended.stderr
    assert epochs(cluster.status()) == epochs(before)
