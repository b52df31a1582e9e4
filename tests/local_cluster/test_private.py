"""Files of a cluster, with its users' records, are open to the user that it runs as alone."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

import pytest

import koinon
from koinon_proto.process import private_files


def modes(directory: Path) -> dict[str, str]:
    """Return the modes that are wider than the owner's alone, by path."""
    found = [directory, *directory.rglob("*")]
    wide = {str(p.relative_to(directory)): stat.S_IMODE(p.stat().st_mode) for p in found}
    return {name: oct(mode) for name, mode in wide.items() if mode & 0o077}


def test_files_of_a_cluster_are_private_from_the_first_and_become_so_if_they_were_not(
    tmp_path: Path,
) -> None:
    data = tmp_path / "cluster"
    before = os.umask(0o022)
    try:
        with koinon.LocalCluster(nodes=1, coordinators=1, data_dir=data) as cluster:
            with cluster.client() as client:
                client.put(b"k", b"v")
            assert modes(data) == {}
        for path in (data, *data.rglob("*")):  # as an earlier build left them
            path.chmod(0o755 if path.is_dir() else 0o644)
        with koinon.LocalCluster(nodes=1, coordinators=1, data_dir=data) as cluster:
            with cluster.client() as client:
                assert client.get(b"k") == b"v"
            assert modes(data) == {}
            log = (data / "logs" / "n1.log").read_text()
        assert "data directory was open to other users: made private" in log
    finally:
        os.umask(before)


def test_directory_that_is_not_ours_is_left_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "photo").touch(0o644)
    with caplog.at_level(logging.WARNING):
        private_files.make_directory(tmp_path, "identity")
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
    assert not caplog.records


def test_owner_alone_keeps_its_own_rights(tmp_path: Path) -> None:
    for path, mode in ((tmp_path / "readonly", 0o444), (tmp_path / "plain", 0o664)):
        path.touch()
        path.chmod(mode)
    private_files.make_directory(tmp_path)
    found = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert found == {"readonly": 0o400, "plain": 0o600}
