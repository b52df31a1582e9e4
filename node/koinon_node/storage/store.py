"""The store: one LMDB environment, read here, written by the writer process alone (writer.py).

Reads records by key or in key order. opened_store.py opens the store.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from itertools import accumulate, compress, islice
from typing import NamedTuple

import lmdb
import numpy as np

from koinon_node.core.formats import record_layout, records
from koinon_node.storage.environment import (
    DATA_DB,
    EXPIRY_DB,
    PARTITIONS_DB,
    tree_bytes,
)
from koinon_node.storage.opened_store import OpenedStore

_NO_BOUND = 2**62
_SEEN_BYTES = 8 * 1024 * 1024  # read in one transaction at most, wanted or not
_SCANNED_FIRST, _SCANNED_AT_ONCE = 16, 64  # rows between checks of the size: values may be large
_second = operator.itemgetter(1)
_value_after = {
    False: operator.itemgetter(slice(records.HEADER_BYTES, None)),
    True: operator.itemgetter(slice(records.HEADER_WITH_EXPIRY_BYTES, None)),
}


class Range(NamedTuple):
    """Records of one partition and the copy's progress, from one LMDB snapshot."""

    rows: list[tuple[bytes, bytes]]  # (data key, record)
    last_key: bytes  # the last key that was read, wanted or not
    end: bool  # the partition ends there
    complete_through: int
    purge_floor: int


class Store(OpenedStore):
    """An open store. Reads are thread-safe; each read sees one committed state."""

    def get(self, data_key: bytes) -> bytes | None:
        """Return the stored record (with its header), or None."""
        return self.get_each((data_key,))[0]

    def get_each(self, data_keys: Sequence[bytes]) -> list[bytes | None]:
        """Return for each key the stored record (with its header), or None."""
        laid_over = self.overlay.find(DATA_DB, data_keys) if self.overlay else None
        with self.env.begin(self._databases[DATA_DB]) as txn:
            found: list[bytes | None] = list(map(txn.get, data_keys))
        if laid_over:
            return [laid_over.get(k, r) for k, r in zip(data_keys, found, strict=True)]
        return found

    def get_many(self, data_keys: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
        """Return (data key, record) of the existing records, in the given order."""
        laid_over = self.overlay.find(DATA_DB, data_keys) if self.overlay else None
        wanted = [key for key in data_keys if key not in laid_over] if laid_over else data_keys
        with self.env.begin(self._databases[DATA_DB]) as txn, txn.cursor() as cursor:
            rows: list[tuple[bytes, bytes]] = cursor.getmulti(wanted)
        if not laid_over:
            return rows
        found = {**dict(rows), **laid_over}
        return [(key, row) for key in data_keys if (row := found.get(key)) is not None]

    def lengths(self, data_keys: Sequence[bytes]) -> list[int]:
        """Return the bytes of each stored record without copying it; 0 if there is none."""
        laid_over = self.overlay.find(DATA_DB, data_keys) if self.overlay else {}
        with self.env.begin(self._databases[DATA_DB], buffers=True) as txn:
            rows = (laid_over[key] if key in laid_over else txn.get(key) for key in data_keys)
            return [len(row) if row is not None else 0 for row in rows]

    def lacks(self, partition_ids: Iterable[int]) -> bool:
        """Return whether the log has rows of these partitions that are not in the store yet."""
        if not self.overlay:
            return False
        # Every row is written together with its partition's progress.
        keys = list(map(records.progress_key, partition_ids))
        return self.overlay.holds(PARTITIONS_DB, keys)

    def stored_through(self, partition_id: int) -> int:
        """Return the sequence through which the copy is complete in the store itself, without the
        overlay.
        """
        with self.env.begin() as txn:
            return self._progress(txn, partition_id)[0]

    def scan(
        self,
        partition_id: int,
        prefix: bytes,
        after_key: bytes,
        rows_max: int,
        bytes_max: int,
        *,
        start: bytes = b"",
        reverse: bool = False,
    ) -> tuple[list[tuple[bytes, bytes]], bool]:
        """Return the (data key, record) rows of one partition's users, from ``start`` on and beyond
        ``after_key``, and whether more rows follow. With ``reverse`` keys descend.

        Ends after ``rows_max`` rows, or with the row that reaches ``bytes_max``.
        """
        own = records.head_of(partition_id)
        head = own + prefix
        found: list[tuple[bytes, bytes]] = []
        with self.env.begin(self._databases[DATA_DB]) as txn, txn.cursor() as cursor:
            if reverse:
                end = scan_end(partition_id, prefix, start, after_key)
                some_there = cursor.prev() if cursor.set_range(end) else cursor.last()
                rows = cursor.iterprev(keys=True, values=True)
            else:
                first = max(head, own + start)
                after = own + after_key
                some_there = cursor.set_range(
                    after + b"\x00" if after_key and after >= first else first
                )
                rows = cursor.iternext(keys=True, values=True)
            if not some_there:
                return found, False
            size, step = 0, _SCANNED_FIRST
            while len(found) < rows_max and size < bytes_max:
                count = min(step, rows_max - len(found))
                some = list(islice(rows, count))
                inside = _within(some, head)
                found += inside
                size += sum(map(len, map(_second, inside)))
                if len(inside) < count and size < bytes_max:
                    return found, False
                fit = (bytes_max - size) * len(found) // max(size, 1)  # if rows have like sizes
                step = max(_SCANNED_FIRST, min(_SCANNED_AT_ONCE, fit))
            while found and size - len(found[-1][1]) >= bytes_max:
                size -= len(found.pop()[1])
            return found, True

    def read_range(
        self,
        partition_id: int,
        after_key: bytes,
        after_sequence: int,
        rows_max: int,
        bytes_max: int,
        *,
        start_key: bytes = b"",
    ) -> Range:
        """Read the records of one partition above ``after_sequence``, beyond ``after_key`` and from
        ``start_key`` on, in key order. It reads at most ``rows_max`` records, and stops at the
        record that reaches ``bytes_max``.
        """
        head = records.prefix_of(partition_id)
        with self.env.begin() as txn:
            through, floor = self._progress(txn, partition_id)
            with txn.cursor(self._databases[DATA_DB]) as cursor:
                start = head + max(after_key + b"\x00" if after_key else b"", start_key)
                rows = cursor.iternext(keys=True, values=True) if cursor.set_range(start) else []
                found: list[tuple[bytes, bytes]] = []
                looked, size, seen, last, end = 0, 0, 0, after_key, False
                step = 4  # begin small, since values may be large
                while looked < rows_max and size < bytes_max and seen < _SEEN_BYTES and not end:
                    count = min(step, rows_max - looked)
                    inside = _within(list(islice(rows, count)), head)
                    end = len(inside) < count
                    if not inside:
                        break
                    last = inside[-1][0][2:]
                    looked += len(inside)
                    seen += sum(map(len, map(_second, inside)))
                    above = _above(inside, after_sequence)
                    taken = _fitting(above, bytes_max - size)
                    found += taken
                    if len(taken) < len(above):  # the next call returns the others
                        last, end = taken[-1][0][2:], False
                        break
                    size += sum(map(len, map(_second, taken)))
                    left = min(bytes_max - size, _SEEN_BYTES - seen)
                    step = max(1, min(_SCANNED_AT_ONCE, left * looked // max(seen, 1)))
        return Range(found, last, end, through, floor)

    def read_keys(self, partition_id: int, data_keys: Sequence[bytes], bytes_max: int) -> Range:
        """Read the records of these keys of one partition in one transaction. It stops at the
        record that reaches ``bytes_max``.
        """
        found: list[tuple[bytes, bytes]] = []
        done, size = 0, 0
        with self.env.begin(self._databases[DATA_DB]) as txn:
            through, floor = self._progress(txn, partition_id)
            while done < len(data_keys) and size < bytes_max:
                key = data_keys[done]
                record: bytes | None = txn.get(key)
                done += 1
                if record is not None:
                    found.append((key, record))
                    size += len(record)
        last = data_keys[done - 1][2:] if done else b""
        return Range(found, last, done == len(data_keys), through, floor)

    def keys_above(
        self, partition_id: int, sequence: int, after_key: bytes, limit: int
    ) -> tuple[list[bytes], bytes | None]:
        """Return the data keys of records above ``sequence``, and the key after which to continue,
        None at the end. It reads at most ``limit`` records from ``after_key`` on.
        """
        page = self.read_range(partition_id, after_key, sequence, limit, _NO_BOUND)
        return [key for key, _ in page.rows], None if page.end else page.last_key

    def scan_keys(
        self, partition_id: int, after_key: bytes, until_key: bytes, limit: int
    ) -> list[bytes]:
        """Return up to ``limit`` data keys of one partition in (after_key, until_key]; b"" leaves
        an end open.
        """
        head = records.prefix_of(partition_id)
        start = head + after_key + b"\x00" if after_key else head
        with self.env.begin(self._databases[DATA_DB]) as txn, txn.cursor() as cursor:
            if not cursor.set_range(start):
                return []
            keys = list(islice(cursor.iternext(keys=True, values=False), limit))
        until = head + until_key
        return [k for k in keys if k.startswith(head) and (not until_key or k <= until)]

    def _progress(self, txn: lmdb.Transaction, partition_id: int) -> tuple[int, int]:
        key = records.progress_key(partition_id)
        data = txn.get(key, db=self._databases[PARTITIONS_DB])
        if data is None:
            return 0, 0
        through, floor, _ = records.decode_progress(bytes(data))
        return through, floor

    def expired_entries(
        self, start: bytes, before_ms: int, rows_max: int
    ) -> tuple[list[bytes], bytes]:
        """Return the entries of the expiry index from ``start`` up to ``before_ms``, and the entry
        to continue from, b"" at the end.

        Where to go on is empty at the end.
        """
        end = record_layout.expiry_key(before_ms + 1, b"")
        with self.env.begin(self._databases[EXPIRY_DB]) as txn, txn.cursor() as cursor:
            if not cursor.set_range(start):
                return [], b""
            keys = list(islice(cursor.iternext(keys=True, values=False), rows_max))
        inside = [key for key in keys if key < end]
        goes_on = inside[-1] + b"\x00" if len(inside) == rows_max else b""
        if self.overlay and (laid_over := self.overlay.find(EXPIRY_DB, inside)):
            inside = [key for key in inside if laid_over.get(key, b"") is not None]
        return inside, goes_on

    def count(self) -> int:
        """Return the number of records of all partitions, including expired ones."""
        with self.env.begin() as txn:
            entries: int = txn.stat(self._databases[DATA_DB])["entries"]
            return entries

    def reusable_bytes(self, used_bytes: int) -> int:
        """Return the free bytes inside the store's file, of which records and indexes take
        ``used_bytes``. LMDB reuses these pages before the file grows.
        """
        return max(0, self.file_bytes - used_bytes)

    @property
    def file_bytes(self) -> int:
        """The size of the part of the file that LMDB has ever used. It never shrinks."""
        pages: int = self.env.info()["last_pgno"] + 1
        return pages * int(self.env.stat()["psize"])

    def used_bytes(self) -> int:
        """Return the bytes of the map in use, without freed pages."""
        with self.env.begin() as txn:
            return tree_bytes(txn, self._databases)


def _fitting(rows: list[tuple[bytes, bytes]], size: int) -> list[tuple[bytes, bytes]]:
    """Return the rows up to the one whose record brings the total to ``size`` bytes."""
    if sum(map(len, map(_second, rows))) < size:
        return rows
    ends = accumulate(map(len, map(_second, rows)))
    return rows[: next(at for at, end in enumerate(ends, 1) if end >= size)]


def scan_end(partition_id: int, prefix: bytes, start: bytes, after_key: bytes) -> bytes:
    """Return the data key below which a reverse scan begins."""
    own = records.head_of(partition_id)
    cut = (own + prefix).rstrip(b"\xff")  # at least the kind is left
    end = cut[:-1] + bytes((cut[-1] + 1,))  # the first key beyond the prefix
    if start:
        end = min(end, own + start + b"\x00")
    return min(end, own + after_key) if after_key else end


def _within(rows: list[tuple[bytes, bytes]], head: bytes) -> list[tuple[bytes, bytes]]:
    """Return the leading rows with this key prefix."""
    if not rows or rows[-1][0].startswith(head):
        return rows
    return [row for row in rows if row[0].startswith(head)]


def _above(rows: list[tuple[bytes, bytes]], sequence: int) -> list[tuple[bytes, bytes]]:
    """Return the rows whose records are above the sequence."""
    if not sequence:
        return rows
    above = records.sequences_of([record for _, record in rows]) > np.uint64(sequence)
    return list(compress(rows, above.tolist()))


def values_of(rows: Sequence[bytes], *, with_expiry: bool) -> list[bytes]:
    """Return the values of records that all have, or all lack, an expiry."""
    return list(map(_value_after[with_expiry], rows))
