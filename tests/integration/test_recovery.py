"""The way back after a majority of the coordinators is lost for good."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from koinon.local import LocalCluster
from koinon.operate.admin import Admin
from koinon.operate.loads_client import LoadMode, LoadsClient, OpenedLoad
from koinon_coordinator.recover import Found, ask_nodes
from tests.conftest import ClusterFactory

WAIT_S = 60.0
ROWS = {b"recovery/%d" % n: b"value %d" % n for n in range(300)}


def recover(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "koinon_coordinator.recover", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def lose_majority(cluster: LocalCluster) -> None:
    """End all coordinators; the directories of two of them are gone."""
    for name in cluster.coordinator_names:
        cluster.kill(name)
    for name in cluster.coordinator_names[1:]:
        shutil.rmtree(cluster.member_dir(name))


def open_load(cluster: LocalCluster) -> OpenedLoad:
    """Open a load and wait until every node knows of it."""
    with LoadsClient(cluster.coordinators) as loads:
        opened = loads.open_load(job_id="job", mode=LoadMode.APPEND)
    found = Found()
    deadline = time.monotonic() + WAIT_S
    while min((t.table_version for t in found.tables.values()), default=0) < opened.table_version:
        assert time.monotonic() < deadline, "the nodes never heard of the load"
        found = Found()
        ask_nodes([cluster.address("n1")], found)
    return opened


@pytest.mark.parametrize("source", ["member", "nodes"])
def test_lost_majority_of_coordinators_is_recovered_with_all_data(
    make_cluster: ClusterFactory, tmp_path: Path, source: str
) -> None:
    cluster = make_cluster(nodes=3, coordinators=3)
    cluster.start()
    before = cluster.wait_ready()
    assert before.table is not None
    with cluster.client() as client:
        assert not client.put_many(ROWS).refused
    load = open_load(cluster)
    lose_majority(cluster)

    survivor = cluster.member_dir("c1")
    arguments = ["--id", "c1", "--advertise", cluster.address("c1"), "--data", str(tmp_path / "c1")]
    if source == "member":
        arguments += ["--from-member", f"c1={survivor}"]
    else:
        arguments += ["--nodes", cluster.address("n1")]
    refused = recover(*arguments)
    assert refused.returncode == 2
    assert "--yes" in refused.stderr
    made = recover(*arguments, "--yes")
    assert made.returncode == 0, made.stderr
    assert before.table.cluster.cluster_id in made.stdout
    assert "nodes reached  3 of 3" in made.stdout
    given_up = f"Bulk loads that were open and are given up: {load.load_id}."
    assert (given_up in made.stdout) == (source == "nodes")

    shutil.rmtree(survivor)
    shutil.move(tmp_path / "c1", survivor)
    cluster.restart("c1")
    after = cluster.wait_for(lambda s: s.ready, timeout_s=90, what="the nodes are back")
    assert after.table is not None
    assert after.table.cluster.cluster_id == before.table.cluster.cluster_id
    assert after.table.table_version > before.table.table_version
    with LoadsClient(cluster.address("c1")) as loads:
        kept = loads.get(load.load_id)
        assert (kept is not None) == (source == "member")
        again = loads.open_load(job_id="another", mode=LoadMode.APPEND)
        assert again.load_id > load.load_id
    name = cluster.add_coordinator()
    with Admin(cluster.coordinators, timeout_ms=60_000) as admin:
        admin.add_coordinator(name, cluster.address(name))
    with cluster.client() as client:
        found = dict(zip(ROWS, client.get_many(ROWS), strict=True))
        client.put(b"recovery/after", b"1")
    assert found == ROWS


def test_recovery_into_a_used_directory_or_from_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    common = ["--id", "c1", "--advertise", "127.0.0.1:7400", "--yes"]
    nothing = recover(*common, "--data", str(tmp_path / "new"))
    assert nothing.returncode == 2
    assert "--from-member" in nothing.stderr
    silent = recover(*common, "--data", str(tmp_path / "new"), "--nodes", "127.0.0.1:1")
    assert silent.returncode == 2
    assert not (tmp_path / "new").exists()
