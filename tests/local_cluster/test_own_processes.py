"""A local cluster is ready when its own processes say so, whatever answers at its addresses."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from koinon.local import LocalCluster
from koinon.local import cluster_files as files
from koinon.local.cluster_files import ClusterFile, LocalClusterError
from koinon.local.member_processes import MemberProcesses
from koinon.local.processes import ManagedProcess, ProcessState, pid_path, wait_stopped
from koinon_proto.contract.errors import ConfigurationError, UnavailableError, WrongClusterError
from koinon_proto.process.pid_file import pid_file
from tests.conftest import ClusterFactory
from tests.kit.forked import Forked
from tests.local_cluster.test_local_cluster import SMALL
from tests.local_cluster.test_processes import SLEEP, wait_until_gone


def other_on_the_same_ports(original: LocalCluster, directory: Path) -> LocalCluster:
    """Return a stopped cluster of its own whose members have the addresses of the original's."""
    theirs = files.load(original.data_dir)
    assert theirs is not None
    files.save(directory, ClusterFile(members=theirs.members, bootstrap_nodes=1))
    return LocalCluster(directory)


def copy_of(original: LocalCluster, directory: Path) -> LocalCluster:
    shutil.copytree(original.data_dir, directory, dirs_exist_ok=True)
    return LocalCluster(directory)


@pytest.fixture
def running(make_cluster: ClusterFactory, tmp_path: Path) -> LocalCluster:
    cluster = make_cluster(tmp_path / "original", **SMALL)
    cluster.start()
    cluster.wait_ready()
    return cluster


BESIDE = pytest.mark.parametrize("make", [other_on_the_same_ports, copy_of])


@BESIDE
def test_cluster_whose_addresses_another_has_starts_nothing_and_names_them(
    make: Callable[..., LocalCluster], running: LocalCluster, tmp_path: Path
) -> None:
    (tmp_path / "beside").mkdir()
    beside = make(running, tmp_path / "beside")
    try:
        assert set(beside.states.values()) == {ProcessState.STOPPED}  # it takes none for its own
        for _ in range(2):
            with pytest.raises(LocalClusterError) as caught:
                beside.start()
            beside.undo_start()
            assert f"{running.address('n1')} (n1)" in str(caught.value)
            is_copy = make is copy_of
            assert (f"koinon down --data {running.data_dir}" in str(caught.value)) is is_copy
        with pytest.raises(UnavailableError, match="no coordinator of this cluster"):
            beside.status()
    finally:
        beside.close()
    assert set(running.states.values()) == {ProcessState.RUNNING}


@BESIDE
def test_cluster_is_not_ready_because_another_answers_at_its_addresses(
    make: Callable[..., LocalCluster],
    running: LocalCluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As if the other had begun to listen after the addresses were looked at."""
    monkeypatch.setattr(MemberProcesses, "require_ports", lambda *_: None)
    (tmp_path / "beside").mkdir()
    beside = make(running, tmp_path / "beside")
    try:
        beside.start()
        with pytest.raises(LocalClusterError, match="exited"):
            beside.wait_ready()
    finally:
        beside.close()


def test_down_on_a_copy_does_not_end_the_original(
    running: LocalCluster, tmp_path: Path, forked: Forked
) -> None:
    copy_of(running, tmp_path / "beside").close()
    ended = forked.koinon("down", "--data", str(tmp_path / "beside"))
    assert ended.returncode == 1
    assert "no cluster runs" in ended.stderr
    assert set(running.states.values()) == {ProcessState.RUNNING}


def test_directory_that_was_moved_is_started_as_before(
    running: LocalCluster, tmp_path: Path, make_cluster: ClusterFactory
) -> None:
    with running.client() as client:
        client.put(b"k", b"v")
    running.close()
    shutil.copytree(running.data_dir, tmp_path / "moved")
    shutil.rmtree(running.data_dir)
    with make_cluster(tmp_path / "moved") as moved, moved.client() as client:
        assert client.get(b"k") == b"v"


def test_cluster_id_is_remembered_and_another_is_refused(
    running: LocalCluster, make_cluster: ClusterFactory
) -> None:
    running.close()
    remembered = files.load(running.data_dir)
    assert remembered is not None
    assert remembered.cluster_id
    remembered.cluster_id = "another"
    files.save(running.data_dir, remembered)
    again = make_cluster(running.data_dir)
    again.start()
    with pytest.raises(WrongClusterError, match="another"):
        again.wait_ready()


def test_process_serves_once_it_has_written_its_own_id(tmp_path: Path) -> None:
    made = ManagedProcess("sleeper", SLEEP, tmp_path / "sleeper.log")
    said = pid_path(made.log_path)
    said.write_text("1\n")  # of a process of long ago
    identity = made.start(os.environ)
    try:
        assert identity is not None
        answers = [made.serves]
        for text in ("", "1\n", f"{identity.pid}\n"):
            said.write_text(text)
            answers.append(made.serves)
        assert answers == [False, False, False, True]
    finally:
        made.signal(signal.SIGKILL)
        wait_stopped([made], 60)
    assert not made.serves


def test_pid_file_is_there_while_its_process_serves(tmp_path: Path) -> None:
    path = tmp_path / "n1.pid"
    with pid_file(path):
        assert path.read_text() == f"{os.getpid()}\n"
    assert list(tmp_path.iterdir()) == []
    missing = tmp_path / "missing" / "n1.pid"
    with pytest.raises(ConfigurationError, match=r"missing/n1\.pid"), pid_file(missing):
        pass


KILLED_BEFORE_IT_SAVES = """
import os, signal, sys
from koinon.local import LocalCluster, cluster_files

cluster = LocalCluster(sys.argv[1], nodes=1, coordinators=1)

def save(directory, content):
    print(*(identity.pid for identity in content.processes.values()), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

cluster_files.save = save
cluster.start(detached=True)
"""


def test_processes_of_a_start_that_is_killed_before_it_saves_them_end(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED_BEFORE_IT_SAVES, str(tmp_path / "cluster")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    (pid,) = map(int, ended.stdout.split())
    assert wait_until_gone(pid)
    assert files.running_cluster(tmp_path / "cluster") is None
