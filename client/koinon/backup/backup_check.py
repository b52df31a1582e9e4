"""Compares the files of a backup with its manifest."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from koinon.backup import manifest as manifests
from koinon.backup.destination import Destination
from koinon.backup.manifest import BackupDamagedError, KeyspacePart, Manifest, PartitionPart
from koinon.backup.parquet_rows import RowsDigest, batches_of
from koinon.spark.encoding import arrays
from koinon_proto.partitioner import Partitioner, partitioner_of

WORKERS = 4


@dataclass(kw_only=True)
class CheckReport:
    """The result of a check. ``strangers``: files in the backup's directory that its manifest does
    not list.
    """

    files: int = 0
    bytes: int = 0
    rows: int = 0
    faults: list[str] = field(default_factory=list)
    strangers: list[str] = field(default_factory=list)


def first_faults(destination: Destination, manifest: Manifest) -> list[str]:
    """Compare the manifest with the directory by names and sizes; describe each file that is
    missing or has another size.
    """
    sizes = destination.sizes(manifest.backup_id)
    faults = []
    for part in manifest.files:
        size = sizes.get(part.path)
        if size is None:
            faults.append(f"{part.path}: is missing")
        elif size != part.bytes:
            faults.append(f"{part.path}: has {size} bytes; the manifest says {part.bytes}")
    return faults


def check_backup(
    destination: Destination,
    manifest: Manifest,
    *,
    deep: bool = False,
    on_progress: Callable[[CheckReport], None] = lambda _report: None,
    stopped: Callable[[], bool] = lambda: False,
) -> CheckReport:
    """Read all files of a backup and compare their SHA-256 with the manifest's. ``deep``: also read
    all rows, and compare each partition's digest, the order of its keys and the partition of each
    key.

    Args:
        on_progress: called after each partition.
        stopped: asked after each partition; once it returns True, KeyboardInterrupt is raised.
    """
    known = {part.path for part in manifest.files} | {manifests.NAME}
    report = CheckReport(strangers=sorted(set(destination.sizes(manifest.backup_id)) - known))
    work = [(keyspace, part) for keyspace in manifest.keyspaces for part in keyspace.partitions]

    def check(of: tuple[KeyspacePart, PartitionPart]) -> list[str]:
        if stopped():
            return []
        return list(_faults(destination, manifest.backup_id, *of, deep=deep))

    with ThreadPoolExecutor(WORKERS, thread_name_prefix="koinon-check") as pool:
        for (_, part), faults in zip(work, pool.map(check, work), strict=True):
            report.faults += faults
            report.files += len(part.files)
            report.bytes += sum(file.bytes for file in part.files)
            report.rows += part.rows
            on_progress(report)
    if stopped():
        raise KeyboardInterrupt
    return report


def _faults(
    destination: Destination,
    backup_id: str,
    keyspace: KeyspacePart,
    part: PartitionPart,
    *,
    deep: bool,
) -> Iterator[str]:
    """Yield a description of each fault in a partition's files."""
    digest, rows = RowsDigest(), _RowRules(partitioner_of(keyspace.settings), part)
    for file in part.files:
        try:
            content = destination.read_part(backup_id, file)
            for batch in batches_of(content, file) if deep else ():
                digest.add(batch)
                rows.check(batch)
        except BackupDamagedError as error:
            yield error.reason
            return
    if deep and (digest.rows, digest.value()) != (part.rows, part.digest):
        yield f"partition {part.partition_id}: the digest of its rows is not the manifest's"


class _RowRules:
    """Checks the rows of one partition, batch by batch: keys ascend, and every key hashes to this
    partition.
    """

    def __init__(self, partitioner: Partitioner, part: PartitionPart) -> None:
        self._partitioner = partitioner
        self._part = part
        self._last_key = b""

    def check(self, batch: Any) -> None:
        """Check the next batch of rows.

        Raises:
            BackupDamagedError: a key is out of order, or belongs to another partition.
        """
        keys: list[bytes] = _keys_of(batch)
        p = self._part.partition_id
        if sorted(set(keys)) != keys or (self._last_key and keys and keys[0] <= self._last_key):
            raise BackupDamagedError(reason=f"partition {p}: its keys are not in ascending order")
        if keys and (self._partitioner.partitions_of(keys) != p).any():
            raise BackupDamagedError(reason=f"partition {p}: it holds keys of other partitions")
        self._last_key = keys[-1] if keys else self._last_key


def _keys_of(batch: Any) -> list[bytes]:
    column = batch.column(0)
    offsets, data = arrays.offsets_of(column).tolist(), arrays.bytes_of(column).tobytes()
    return [data[a:b] for a, b in itertools.pairwise(offsets)]
