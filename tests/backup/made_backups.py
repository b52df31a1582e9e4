"""Manifests, pages and directories of backups that no cluster has made."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from koinon.backup.destination import Found
from koinon.backup.manifest import FilePart, KeyspacePart, Manifest, PartitionPart
from koinon_proto.contract import columns
from koinon_proto.contract.keyspaces import default_keyspace
from tests.kit.tables import config_of

BACKUP_ID = "20261128T120000Z-0123abcd"


def part_of(
    partition_id: int = 0, files: Sequence[str] = ("default/00000-0.parquet",)
) -> PartitionPart:
    """Return a partition of a row in each file."""
    return PartitionPart(
        partition_id=partition_id,
        sequence=7,
        rows=len(files),
        bytes=10,
        digest="d",
        files=tuple(FilePart(path=path, rows=1, bytes=100, sha256="0" * 64) for path in files),
    )


def manifest_of(*parts: PartitionPart, backup_id: str = BACKUP_ID, cut_ms: int = 1_000) -> Manifest:
    """Return a manifest of these partitions of ``default``, or of three."""
    parts = parts or tuple(part_of(p, (f"default/{p:05d}-0.parquet",)) for p in range(3))
    settings = default_keyspace(
        config_of(len(parts), replication_factor=1, min_in_sync=1, max_value_bytes=1024)
    )
    return Manifest(
        backup_id=backup_id,
        cluster_id="c",
        made_by="a test",
        table_version=3,
        began_ms=cut_ms,
        cut_ms=cut_ms,
        ended_ms=cut_ms,
        held_ms=4,
        keyspaces=(KeyspacePart(settings=settings, partitions=parts),),
    )


def found_of(backup_id: str, cut_s: float, *, fault: str = "", finished: bool = True) -> Found:
    """Return a directory that is a backup of this time."""
    good = finished and not fault
    return Found(
        backup_id=backup_id,
        manifest=manifest_of(backup_id=backup_id, cut_ms=int(cut_s * 1000)) if good else None,
        fault=fault,
        changed_s=cut_s,
        file_bytes=1,
    )


def page_of(rows: Sequence[tuple[bytes, bytes, int, int]]) -> bytes:
    """Return the page of rows: key, value, version, expiry."""
    keys, values, versions, expiries = (list(column) for column in zip(*rows, strict=True))
    return columns.pack(
        np.array([len(key) for key in keys], np.uint32),
        b"".join(keys),
        np.array([len(value) for value in values], np.uint32),
        b"".join(values),
        orders=np.array(versions, np.uint64),
        expiries=np.array(expiries, np.uint64) if any(expiries) else None,
    )
