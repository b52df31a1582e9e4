"""Which cluster a command reaches: the one that was named, or none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from koinon.cli.console import which_cluster
from koinon.cli.console.which_cluster import USUAL_COORDINATORS, default_coordinators
from koinon.local import cluster_files as files
from koinon.local.cluster_files import ClusterFile, ClusterStoppedError, Member
from koinon.local.processes import ProcessIdentity, identify
from tests.kit.command_line import koinon_app

MEMBERS = {
    "c1": Member(kind="coordinator", address="127.0.0.1:1"),
    "c2": Member(kind="coordinator", address="127.0.0.1:2"),
    "n1": Member(kind="node", address="127.0.0.1:3"),
}
ENDED = ProcessIdentity(pid=1, started="before this boot")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("KOINON_COORDINATORS", "KOINON_DATA", "KOINON_KEYSPACE", "KOINON_CLUSTER_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))


def remember(directory: Path, *running: str) -> Path:
    """Make a data directory of a cluster, some members of which run (as this process)."""
    directory.mkdir(parents=True)
    ours = identify(os.getpid())
    assert ours is not None
    processes = {name: ours if name in running else ENDED for name in MEMBERS}
    files.save(directory, ClusterFile(members=MEMBERS, bootstrap_nodes=1, processes=processes))
    return directory


def test_without_any_local_cluster_it_is_that_of_the_usual_addresses() -> None:
    assert default_coordinators() == USUAL_COORDINATORS


@pytest.mark.parametrize("is_named", [False, True])
@pytest.mark.parametrize(("running", "said"), [((), "does not run"), (("n1",), "no coordinator")])
def test_local_cluster_that_does_not_run_is_not_replaced_by_the_usual_addresses(
    running: tuple[str, ...],
    said: str,
    is_named: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = tmp_path / "mine" if is_named else which_cluster.default_data_dir()
    remember(place, *running)
    if is_named:
        monkeypatch.setenv("KOINON_DATA", str(place))
    with pytest.raises(ClusterStoppedError, match=said) as caught:
        default_coordinators()
    start = f"'koinon up --data {place}' starts it" if is_named else "'koinon up' starts it"
    assert start in str(caught.value)


def test_directory_that_was_named_and_has_no_cluster_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KOINON_DATA", str(tmp_path / "mine"))
    with pytest.raises(ClusterStoppedError, match="was never made"):
        default_coordinators()


def test_addresses_of_coordinators_that_do_not_run_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KOINON_DATA", str(remember(tmp_path / "mine", "c2", "n1")))
    assert default_coordinators() == "127.0.0.1:2"


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (["get", "k"], "--coordinators"),
        (["get", "k"], "--keyspace"),
        (["get", "k"], "--tls-bundle"),
        (["get", "k"], "--token-file"),
        (["up"], "--data"),
        (["down"], "--data"),
        (["copy", "--to", "other"], "--from"),
        (["copy", "--from", "other"], "--to"),
    ],
)
def test_option_that_names_a_target_and_is_empty_is_refused(
    command: list[str], option: str
) -> None:
    ended = CliRunner().invoke(koinon_app(), [*command, option, ""], env={"COLUMNS": "200"})
    assert ended.exit_code == 2
    assert option in ended.stderr
    assert "is empty" in ended.stderr


@pytest.mark.parametrize(
    ("command", "variable"),
    [
        (["get", "k"], "KOINON_COORDINATORS"),
        (["get", "k"], "KOINON_DATA"),
        (["get", "k"], "KOINON_KEYSPACE"),
        (["admin", "status"], "KOINON_CLUSTER_ID"),
        (["up"], "KOINON_DATA"),
        (["down"], "KOINON_DATA"),
    ],
)
def test_variable_that_names_a_target_and_is_empty_is_refused(
    command: list[str], variable: str
) -> None:
    ended = CliRunner().invoke(koinon_app(), command, env={variable: ""})
    assert ended.exit_code == 2
    assert f"the variable {variable} is set and empty" in ended.stderr


def test_command_for_a_cluster_that_does_not_run_ends_as_not_available(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KOINON_DATA", str(remember(tmp_path / "mine")))
    ended = CliRunner().invoke(koinon_app(), ["put", "k", "v"])
    assert ended.exit_code == 3
    assert "does not run" in ended.stderr


def test_data_directory_that_is_no_directory_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KOINON_DATA", str(tmp_path / "file"))
    ended = CliRunner().invoke(koinon_app(), ["get", "k"])
    assert ended.exit_code == 2
    assert ended.stderr == f"koinon: {tmp_path}/file/cluster.json: Not a directory\n"
