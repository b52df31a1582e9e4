"""Rows of backups as Arrow columns and Parquet files.

The columns are ``key``, ``value``, ``version`` and ``expires_at``, which is null where a record
never expires. All rows of a file belong to one partition and are in the order of their keys.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from koinon.backup.destination import HashedFile
from koinon.backup.manifest import BackupDamagedError, BackupError, FilePart
from koinon.spark.encoding import arrays
from koinon_proto.contract import arrow, columns

SCHEMA: Final = pa.schema(
    [
        pa.field("key", pa.binary(), nullable=False),
        pa.field("value", pa.binary(), nullable=False),
        pa.field("version", pa.uint64(), nullable=False),
        pa.field("expires_at", pa.timestamp("ms", tz="UTC")),
    ]
)
ROW_GROUP_BYTES: Final = 8 << 20
"""The size of a row group, in bytes of keys and values; one is held in memory."""
FILE_BYTES_MAX: Final = 64 << 20
"""The size in bytes from which a partition continues in another file: a restore holds a whole file
in memory.
"""


def batch_of(page: bytes) -> Any:
    """Decode a page of a cut as an Arrow record batch.

    Raises:
        InvalidArgumentError: the page is damaged.
    """
    found = columns.unpack(page)
    rows = found.header.rows
    versions = found.orders if found.orders is not None else np.zeros(rows, np.uint64)
    expiries = found.expiries if found.expiries is not None else np.zeros(rows, np.uint64)
    valid = np.packbits(expiries != 0, bitorder="little")
    times = [pa.py_buffer(valid), pa.py_buffer(np.ascontiguousarray(expiries))]
    return pa.RecordBatch.from_arrays(
        [
            arrays.from_offsets(found.key_offsets, found.keys),
            arrays.from_offsets(found.value_offsets, found.values),
            pa.Array.from_buffers(
                pa.uint64(), rows, [None, pa.py_buffer(np.ascontiguousarray(versions))]
            ),
            pa.Array.from_buffers(SCHEMA.field("expires_at").type, rows, times),
        ],
        schema=SCHEMA,
    )


def bytes_of(batch: Any) -> int:
    """Return the size of a batch: the bytes of its keys and values."""
    return sum(int(arrays.lengths_of(batch.column(at)).sum()) for at in (0, 1))


class RowsDigest:
    """A digest over rows in their order, independent of how they are divided into batches."""

    def __init__(self) -> None:
        self.rows = 0
        self._hashes = [hashlib.blake2b(digest_size=32) for _ in range(6)]

    def add(self, batch: Any) -> None:
        """Add the next rows to the digest."""
        self.rows += len(batch)
        parts: list[Any] = []
        for at in (0, 1):
            column = batch.column(at)
            parts += (arrays.lengths_of(column), arrays.contents_of(column))
        expires = pc.fill_null(batch.column(3).cast(pa.int64()), 0)
        parts += (arrow.numbers_of(batch.column(2)), arrow.numbers_of(expires))
        for part, digest in zip(parts, self._hashes, strict=True):
            digest.update(np.ascontiguousarray(part).tobytes())

    def value(self) -> str:
        """Return the digest of all rows so far, in hexadecimal."""
        joined = b"".join(digest.digest() for digest in self._hashes)
        return hashlib.blake2b(joined, digest_size=16).hexdigest()


class PartitionWriter:
    """Writes one partition's rows as Parquet files, compressed with zstd. ``open_file`` opens the
    file with this number (from 0), and returns it with its path in the backup.
    """

    def __init__(self, open_file: Callable[[int], tuple[str, HashedFile]]) -> None:
        self._open_file = open_file
        self._batches: list[Any] = []
        self._buffered = 0  # bytes of keys and values in ``_batches``
        self._file: HashedFile | None = None
        self._path = ""
        self._writer: Any = None  # number of the open file
        self._file_rows = 0
        self._files: list[FilePart] = []
        self.digest = RowsDigest()
        self.bytes = 0
        """Bytes of keys and values written so far."""

    def add(self, batch: Any) -> None:
        """Write the next rows, or buffer them for the next row group.

        Raises:
            BackupError: a file cannot be written.
        """
        size = bytes_of(batch)
        self.digest.add(batch)
        self.bytes += size
        self._batches.append(batch)
        self._buffered += size
        if self._buffered >= ROW_GROUP_BYTES:
            with self._errors():
                self._write_group()

    def close(self) -> tuple[FilePart, ...]:
        """Write the buffered rows; return the files.

        Raises:
            BackupError: a file cannot be written.
        """
        with self._errors():
            self._write_group()
            self._end_file()
        return tuple(self._files)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise BackupError(reason=f"{self._path}: {error}") from error

    def abort(self) -> None:
        """Close the open file, whose rows are incomplete."""
        if self._file is not None:
            self._file.close()

    def _write_group(self) -> None:
        if not self._batches:
            return
        group = pa.Table.from_batches(self._batches, schema=SCHEMA)
        self._batches, self._buffered = [], 0
        if self._file is None:
            self._path, self._file = self._open_file(len(self._files))
            self._writer = pq.ParquetWriter(
                self._file, SCHEMA, compression="zstd", compression_level=1, use_dictionary=False
            )
        self._writer.write_table(group, row_group_size=len(group))
        self._file_rows += len(group)
        if self._file.bytes >= FILE_BYTES_MAX:
            self._end_file()

    def _end_file(self) -> None:
        file = self._file
        if file is None:
            return
        self._writer.close()  # closing the Parquet writer writes the footer
        file.close()
        part = FilePart(path=self._path, rows=self._file_rows, bytes=file.bytes, sha256=file.sha256)
        self._files.append(part)
        self._file, self._file_rows = None, 0


def batches_of(content: bytes, part: FilePart) -> Iterator[Any]:
    """Yield the record batches of a Parquet file whose SHA-256 the caller has checked.

    Raises:
        BackupDamagedError: the content is not Parquet, or its columns or its number of rows are not
            the manifest's.
    """
    try:
        file = pq.ParquetFile(pa.BufferReader(content))
        if file.metadata.num_rows != part.rows or not file.schema_arrow.equals(SCHEMA):
            raise BackupDamagedError(
                reason=f"{part.path}: its columns or its number of rows are not the manifest's"
            )
        for at in range(file.num_row_groups):
            yield from file.read_row_group(at).to_batches()
    except pa.ArrowException as error:
        raise BackupDamagedError(reason=f"{part.path}: {error}") from error
