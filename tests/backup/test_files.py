"""Files of backups: rows come back as they went, in whatever pages and files they were cut."""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from koinon.backup import parquet_rows
from koinon.backup.destination import Destination, HashedFile, split_source
from koinon.backup.manifest import NAME, BackupDamagedError, BackupError, FilePart
from koinon.backup.parquet_rows import PartitionWriter, RowsDigest, batch_of, batches_of
from koinon_proto.contract.errors import ConfigurationError, InvalidArgumentError
from tests.backup.made_backups import BACKUP_ID, manifest_of, page_of, part_of

Rows = list[tuple[bytes, bytes, int, int]]
ROWS: Rows = [
    (b"%04d" % n, os.urandom(n % 300), n + 1, (n % 3) * 1_795_000_000_000) for n in range(999)
]


def writer_in(place: Destination) -> PartitionWriter:
    def open_file(number: int) -> tuple[str, HashedFile]:
        path = f"default/00000-{number}.parquet"
        return path, place.write(f"{BACKUP_ID}/{path}")

    return PartitionWriter(open_file)


def rows_of(place: Destination, parts: tuple[FilePart, ...]) -> list[dict[str, Any]]:
    """Return the rows of files, each checked before it is read."""
    found = []
    for part in parts:
        for batch in batches_of(place.read_part(BACKUP_ID, part), part):
            found += batch.to_pylist()
    return found


def test_rows_come_back_from_several_files_and_row_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet_rows, "ROW_GROUP_BYTES", 10_000)
    monkeypatch.setattr(parquet_rows, "FILE_BYTES_MAX", 30_000)
    place = Destination(str(tmp_path))
    writer = writer_in(place)
    for at in range(0, len(ROWS), 7):
        writer.add(batch_of(page_of(ROWS[at : at + 7])))
    parts = writer.close()
    assert len(parts) > 2
    assert sum(part.rows for part in parts) == len(ROWS)
    for part in parts:
        content = (tmp_path / BACKUP_ID / part.path).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (part.bytes, part.sha256)
    expected = [
        {
            "key": key,
            "value": value,
            "version": version,
            "expires_at": datetime.fromtimestamp(expiry / 1000, UTC) if expiry else None,
        }
        for key, value, version, expiry in ROWS
    ]
    assert rows_of(place, parts) == expected
    assert pq.read_table(tmp_path / BACKUP_ID / parts[0].path).num_rows == parts[0].rows


def test_partition_without_rows_has_no_file(tmp_path: Path) -> None:
    assert writer_in(Destination(str(tmp_path))).close() == ()
    assert not list(tmp_path.iterdir())


@given(st.sets(st.integers(1, len(ROWS) - 1), max_size=5), st.integers(0, len(ROWS) - 1))
def test_digest_depends_on_the_rows_and_not_on_how_they_are_cut(cuts: set[int], row: int) -> None:
    whole, pieces, other = RowsDigest(), RowsDigest(), RowsDigest()
    whole.add(batch_of(page_of(ROWS)))
    bounds = [0, *sorted(cuts), len(ROWS)]
    for start, end in itertools.pairwise(bounds):
        pieces.add(batch_of(page_of(ROWS[start:end])))
    assert pieces.value() == whole.value()
    key, value, version, expiry = ROWS[row]
    changed = [*ROWS[:row], (key, value, version, expiry + 1), *ROWS[row + 1 :]]
    other.add(batch_of(page_of(changed)))
    assert other.value() != whole.value()


def test_digest_tells_where_a_key_ends() -> None:
    one, other = RowsDigest(), RowsDigest()
    one.add(batch_of(page_of([(b"ab", b"c", 1, 0)])))
    other.add(batch_of(page_of([(b"a", b"bc", 1, 0)])))
    assert one.value() != other.value()


def test_page_that_was_damaged_on_its_way_is_refused() -> None:
    page = bytearray(page_of(ROWS))
    page[-1] ^= 1
    with pytest.raises(InvalidArgumentError, match="damaged"):
        batch_of(bytes(page))


def test_file_that_is_no_parquet_is_refused_even_if_the_manifest_says_so() -> None:
    part = FilePart(path="default/00000-0.parquet", rows=1, bytes=3, sha256="")
    with pytest.raises(BackupDamagedError):
        list(batches_of(b"abc", part))


# --- destinations --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "s3://key:secret@bucket/path",
        "s3://bucket/path?access_key=a&secret_key=b",
        "nothing://bucket",
        "",
    ],
)
def test_destination_with_a_secret_or_of_no_known_kind_is_refused(text: str) -> None:
    with pytest.raises((ConfigurationError, BackupError)) as refused:
        Destination(text)
    assert "secret@" not in str(refused.value)


def test_backup_is_one_once_its_manifest_is_there_and_deleted_manifest_first(
    tmp_path: Path,
) -> None:
    place = Destination(f"file://{tmp_path}")
    assert place.backups() == []
    with place.write(f"{BACKUP_ID}/default/00000-0.parquet") as file:
        file.write(b"abc")
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "file").touch()
    (unfinished,) = place.backups()
    assert unfinished.is_unfinished
    place.finish(manifest_of(part_of()))
    (found,) = place.backups()
    assert found.manifest == manifest_of(part_of())
    (tmp_path / BACKUP_ID / NAME).write_text("{}")
    (damaged,) = place.backups()
    assert damaged.fault
    assert not damaged.is_unfinished
    place.delete(BACKUP_ID)
    assert [path.name for path in tmp_path.iterdir()] == ["others"]


def test_manifest_of_another_backup_is_refused(tmp_path: Path) -> None:
    place, other = Destination(str(tmp_path)), "20261128T120000Z-ffffffff"
    place.finish(manifest_of())
    (tmp_path / BACKUP_ID).rename(tmp_path / other)
    with pytest.raises(BackupDamagedError, match="is the manifest of"):
        place.manifest(other)


def test_destination_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BackupError, match="file"):
        Destination(str(tmp_path / "file")).write(f"{BACKUP_ID}/default/00000-0.parquet")


def test_full_destination_is_an_error_of_the_backup() -> None:
    class Full:
        def write(self, data: bytes) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self) -> None:
            pass

    def open_file(number: int) -> tuple[str, HashedFile]:
        return "default/00000-0.parquet", HashedFile(Full(), "")

    writer = PartitionWriter(open_file)
    writer.add(batch_of(page_of(ROWS)))
    with pytest.raises(BackupError, match=r"00000-0\.parquet.*No space left"):
        writer.close()


@pytest.mark.parametrize(
    ("text", "split"),
    [
        ("/b", ("/b", "")),
        (f"/b/{BACKUP_ID}", ("/b", BACKUP_ID)),
        (f"/b/{BACKUP_ID}/", ("/b", BACKUP_ID)),
        (f"s3://b/{BACKUP_ID}", ("s3://b", BACKUP_ID)),
        (BACKUP_ID, (".", BACKUP_ID)),
        (f"/{BACKUP_ID}", ("/", BACKUP_ID)),
        ("", ("", "")),
    ],
)
def test_source_names_a_destination_or_one_backup_there(text: str, split: tuple[str, str]) -> None:
    assert split_source(text) == split
