"""A backup's manifest: the keyspaces in it, its files, and the size and hash of each file. Pure.

The manifest is written last, and only a directory with a manifest is a backup. It is JSON with two
fields: ``backup``, and ``sha256`` of the compact form of ``backup`` with sorted keys. Paths are
relative to the backup's directory.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from koinon_proto.contract.errors import KoinonError
from koinon_proto.contract.keyspaces import Keyspace

FORMAT = 1
"""The version of the format of files and manifest; a newer version is refused."""
NAME = "manifest.json"
_PATH = re.compile(r"[a-z0-9][a-z0-9_.-]*/[0-9]{5}-[0-9]+\.parquet")
_BACKUP_ID = re.compile(r"[0-9]{8}T[0-9]{6}Z-[0-9a-f]{8}")


@dataclass(kw_only=True, eq=False)
class BackupError(KoinonError):
    """A backup cannot be made, read or restored; ``reason`` says why and what to do."""

    reason: str


@dataclass(kw_only=True, eq=False)
class BackupDamagedError(BackupError):
    """A file of a backup is missing, or differs from the manifest."""


@dataclass(frozen=True, kw_only=True)
class FilePart:
    """One file with rows of one partition. ``sha256`` in hexadecimal."""

    path: str
    rows: int
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class PartitionPart:
    """One partition. ``sequence``: the last sequence in its primary's store at the cut. ``bytes``:
    of keys and values. ``digest``: of all rows (``parquet_rows.RowsDigest``).
    """

    partition_id: int
    sequence: int
    rows: int
    bytes: int
    digest: str
    files: tuple[FilePart, ...]


@dataclass(frozen=True, kw_only=True)
class KeyspacePart:
    """One keyspace: its configuration at the cut, and its partitions by their ids."""

    settings: Keyspace
    partitions: tuple[PartitionPart, ...]

    @property
    def name(self) -> str:
        return self.settings.name

    @property
    def rows(self) -> int:
        return sum(partition.rows for partition in self.partitions)

    @property
    def bytes(self) -> int:
        """The bytes of keys and values of all partitions."""
        return sum(partition.bytes for partition in self.partitions)

    @property
    def files(self) -> list[FilePart]:
        return [file for partition in self.partitions for file in partition.files]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """One backup. Times are Unix milliseconds of the machine that made it; ``cut_ms`` is the time
    of the cut, ``held_ms`` the longest time that a node held commits for it.
    """

    backup_id: str
    cluster_id: str
    made_by: str
    table_version: int
    began_ms: int
    cut_ms: int
    ended_ms: int
    held_ms: int
    keyspaces: tuple[KeyspacePart, ...]

    @property
    def rows(self) -> int:
        return sum(keyspace.rows for keyspace in self.keyspaces)

    @property
    def bytes(self) -> int:
        """The bytes of keys and values of all keyspaces."""
        return sum(keyspace.bytes for keyspace in self.keyspaces)

    @property
    def files(self) -> list[FilePart]:
        return [file for keyspace in self.keyspaces for file in keyspace.files]

    @property
    def file_bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    def keyspace(self, name: str) -> KeyspacePart:
        """Return the keyspace of this name.

        Raises:
            BackupError: the backup has no such keyspace.
        """
        for keyspace in self.keyspaces:
            if keyspace.name == name:
                return keyspace
        names = ", ".join(keyspace.name for keyspace in self.keyspaces)
        raise BackupError(reason=f"backup {self.backup_id} has no keyspace {name!r}, only {names}")


def is_backup_id(text: str) -> bool:
    """Return whether the text has the form of a backup id."""
    return _BACKUP_ID.fullmatch(text) is not None


def encode(manifest: Manifest) -> bytes:
    """Encode a manifest as the content of its file."""
    backup = asdict(manifest)
    for part, keyspace in zip(backup["keyspaces"], manifest.keyspaces, strict=True):
        part["settings"]["partitioner_fingerprint"] = (
            keyspace.settings.partitioner_fingerprint.hex()
        )
    whole = {"format": FORMAT, "backup": backup, "sha256": _digest(backup)}
    return json.dumps(whole, indent=1).encode()


def decode(data: bytes) -> Manifest:
    """Decode the content of a manifest's file, and check its hash.

    Raises:
        BackupDamagedError: the file is no manifest, or was altered.
        BackupError: a newer Koinon made the backup.
    """
    try:
        whole = json.loads(data)
        backup, made_as, said = whole["backup"], whole["format"], whole["sha256"]
    except (ValueError, KeyError, TypeError) as error:
        raise BackupDamagedError(reason=f"{NAME} is no manifest of a backup: {error}") from error
    if made_as != FORMAT:
        reason = (
            f"{NAME} has format {made_as!r}; this Koinon reads format {FORMAT}: use a newer one"
        )
        raise BackupError(reason=reason)
    if _digest(backup) != said:
        raise BackupDamagedError(reason=f"{NAME} was altered: its SHA-256 differs")
    try:
        return _manifest(backup)
    except (ValueError, KeyError, TypeError) as error:
        raise BackupDamagedError(reason=f"{NAME} cannot be read: {error}") from error


def _digest(backup: Any) -> str:
    compact = json.dumps(backup, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(compact.encode()).hexdigest()


def _manifest(backup: Mapping[str, Any]) -> Manifest:
    if not is_backup_id(backup["backup_id"]):
        raise ValueError(f"{backup['backup_id']!r} is no id of a backup")
    return Manifest(**{**backup, "keyspaces": tuple(map(_keyspace, backup["keyspaces"]))})


def _keyspace(part: Mapping[str, Any]) -> KeyspacePart:
    known = {field.name for field in fields(Keyspace)}
    given = {name: value for name, value in part["settings"].items() if name in known}
    given["partitioner_fingerprint"] = bytes.fromhex(given["partitioner_fingerprint"])
    return KeyspacePart(
        settings=Keyspace(**given), partitions=tuple(map(_partition, part["partitions"]))
    )


def _partition(part: Mapping[str, Any]) -> PartitionPart:
    return PartitionPart(**{**part, "files": tuple(_files(part["files"]))})


def _files(parts: Any) -> Iterator[FilePart]:
    for part in parts:
        # the path is read and deleted below the backup's directory
        if not _PATH.fullmatch(part["path"]):
            raise ValueError(f"{part['path']!r} is no path of a backup's file")
        yield FilePart(**part)
