"""The manifest: what is written is read, and what was altered is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from koinon.backup import manifest as manifests
from koinon.backup.manifest import BackupDamagedError, BackupError
from tests.backup.made_backups import manifest_of, part_of


def test_manifest_that_is_written_is_read() -> None:
    manifest = manifest_of()
    assert manifests.decode(manifests.encode(manifest)) == manifest
    assert manifest.rows == 3
    with pytest.raises(BackupError, match="only default"):
        manifest.keyspace("carts")


@pytest.mark.parametrize(
    "path", ["../other.parquet", "/etc/00000-0.parquet", "default/../../00000-0.parquet", "x"]
)
def test_manifest_with_a_path_outside_of_its_backup_is_refused(path: str) -> None:
    manifest = manifest_of(part_of(files=(path,)))
    with pytest.raises(BackupDamagedError, match="no path"):
        manifests.decode(manifests.encode(manifest))


def _altered(change: Callable[[dict[str, Any]], object]) -> bytes:
    whole = json.loads(manifests.encode(manifest_of()))
    change(whole)
    return json.dumps(whole).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        manifests.encode(manifest_of())[:-1],
        _altered(lambda whole: whole["backup"].update(cluster_id="another")),
        _altered(lambda whole: whole.update(sha256="0" * 64)),
        manifests.encode(replace(manifest_of(), backup_id="..")),
    ],
)
def test_manifest_that_is_none_or_altered_is_refused(data: bytes) -> None:
    with pytest.raises(BackupDamagedError):
        manifests.decode(data)


def test_manifest_of_a_newer_format_is_refused_by_name() -> None:
    with pytest.raises(BackupError, match="format 2; this Koinon reads format 1"):
        manifests.decode(_altered(lambda whole: whole.update(format=2)))
