"""The store: one LMDB environment, read here, written by the writer process alone (writer.py).

Reads of records, by key or in the order of keys. What opening a store takes is in opened_store.py.
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
_SEEN_BYTES = 8 * 1024 * 1024  # looked at in one transaction, wanted or not
_SCANNED_FIRST, _SCANNED_AT_ONCE = 16, 64  # at most: each of these values may have a MiB
_second = operator.itemgetter(1)
_value_after = {
    False: operator.itemgetter(slice(records.HEADER_BYTES, None)),
    True: operator.itemgetter(slice(records.HEADER_WITH_EXPIRY_BYTES, None)),
}


class Range(NamedTuple):
    """Records of one partition as one transaction saw them, and what it saw beside them."""

    rows: list[tuple[bytes, bytes]]  # (data key, record)
    last_key: bytes  # how far it looked
    end: bool  # and looked to the partition's end
    complete_through: int
    purge_floor: int


class Store(OpenedStore):
    """An open store. Reading is thread-safe; each read sees one committed state."""

    def get(self, data_key: bytes) -> bytes | None:
        """Return the stored record (with its header), or None."""
        return self.get_each((data_key,))[0]

    def get_each(self, data_keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the record of each key (with its header), or None."""
        laid_over = self.overlay.find(DATA_DB, data_keys) if self.overlay else None
        with self.env.begin(self._databases[DATA_DB]) as txn:
            found: list[bytes | None] = list(map(txn.get, data_keys))
        if laid_over:
            return [laid_over.get(k, r) for k, r in zip(data_keys, found, strict=True)]
        return found

    def get_many(self, data_keys: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
        """Return (data key, record) of those that exist, in the order asked for."""
        laid_over = self.overlay.find(DATA_DB, data_keys) if self.overlay else None
        wanted = [key for key in data_keys if key not in laid_over] if laid_over else data_keys
        with self.env.begin(self._databases[DATA_DB]) as txn, txn.cursor() as cursor:
            rows: list[tuple[bytes, bytes]] = cursor.getmulti(wanted)
        if not laid_over:
            return rows
        found = {**dict(rows), **laid_over}
        return [(key, row) for key in data_keys if (row := found.get(key)) is not None]

    def lengths(self, data_keys: Sequence[bytes]) -> list[int]:
        """Return the bytes of each stored record, 0 where there is none, without holding them."""
        laid_over = self.overlay.find(DATA_DB, data_keys) if self.overlay else {}
        with self.env.begin(self._databases[DATA_DB], buffers=True) as txn:
            rows = (laid_over[key] if key in laid_over else txn.get(key) for key in data_keys)
            return [len(row) if row is not None else 0 for row in rows]

    def lacks(self, partition_ids: Iterable[int]) -> bool:
        """Return whether the log holds rows of these partitions that are not in here yet."""
        if not self.overlay:
            return False
        # A row changes how far its partition is complete, which is written with it.
        keys = list(map(records.progress_key, partition_ids))
        return self.overlay.holds(PARTITIONS_DB, keys)

    def stored_through(self, partition_id: int) -> int:
        """Return up to where the copy is complete in the store itself."""
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
        """Return ((data key, record)..., whether there is more) of one partition's user records,
        from ``start`` on, beyond ``after_key``; with ``reverse`` keys descend.

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
                fit = (bytes_max - size) * len(found) // max(size, 1)  # if all are alike
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
        """Read the records above ``after_sequence`` of one partition, beyond ``after_key`` and from
        ``start_key`` on, in key order. Looks at no more than ``rows_max`` records, and returns none
        beyond the one that reaches ``bytes_max``.
        """
        head = records.prefix_of(partition_id)
        with self.env.begin() as txn:
            through, floor = self._progress(txn, partition_id)
            with txn.cursor(self._databases[DATA_DB]) as cursor:
                start = head + max(after_key + b"\x00" if after_key else b"", start_key)
                rows = cursor.iternext(keys=True, values=True) if cursor.set_range(start) else []
                found: list[tuple[bytes, bytes]] = []
                looked, size, seen, last, end = 0, 0, 0, after_key, False
                step = 4  # small first: each of these values may have a MiB
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
                    if len(taken) < len(above):  # those behind it are the next call's
                        last, end = taken[-1][0][2:], False
                        break
                    size += sum(map(len, map(_second, taken)))
                    left = min(bytes_max - size, _SEEN_BYTES - seen)
                    step = max(1, min(_SCANNED_AT_ONCE, left * looked // max(seen, 1)))
        return Range(found, last, end, through, floor)

    def read_keys(self, partition_id: int, data_keys: Sequence[bytes], bytes_max: int) -> Range:
        """Read the records of these keys of one partition, in one transaction. Ends before the
        last of them with the one that reaches ``bytes_max``.
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
        """Return (data keys of records above ``sequence``, the key to go on after or None at the
        end). Looks at no more than ``limit`` records, from ``after_key``.
        """
        page = self.read_range(partition_id, after_key, sequence, limit, _NO_BOUND)
        return [key for key, _ in page.rows], None if page.end else page.last_key

    def scan_keys(
        self, partition_id: int, after_key: bytes, until_key: bytes, limit: int
    ) -> list[bytes]:
        """Return up to ``limit`` data keys of one partition in (after_key, until_key]; without an
        ``until_key`` to the partition's end, without an ``after_key`` from its beginning.
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
        """Return (keys of the expiry index from ``start`` up to ``before_ms``, where to go on).

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
        """Return how many records there are (of all partitions, expired ones included)."""
        with self.env.begin() as txn:
            entries: int = txn.stat(self._databases[DATA_DB])["entries"]
            return entries

    def reusable_bytes(self, used_bytes: int) -> int:
        """Return the free bytes inside the store's file, of which records and indexes fill
        ``used_bytes``: LMDB uses these pages again before the file grows.
        """
        return max(0, self.file_bytes - used_bytes)

    @property
    def file_bytes(self) -> int:
        """The size of the part of the file that LMDB has used so far. It never shrinks."""
        pages: int = self.env.info()["last_pgno"] + 1
        return pages * int(self.env.stat()["psize"])

    def used_bytes(self) -> int:
        """Return how much of the map holds something now; freed pages do not count."""
        with self.env.begin() as txn:
            return tree_bytes(txn, self._databases)


def _fitting(rows: list[tuple[bytes, bytes]], size: int) -> list[tuple[bytes, bytes]]:
    """Return the rows up to the one with which their records have ``size`` bytes."""
    if sum(map(len, map(_second, rows))) < size:
        return rows
    ends = accumulate(map(len, map(_second, rows)))
    return rows[: next(at for at, end in enumerate(ends, 1) if end >= size)]


def scan_end(partition_id: int, prefix: bytes, start: bytes, after_key: bytes) -> bytes:
    """Return the data key below which a reverse scan begins."""
    own = records.head_of(partition_id)
    cut = (own + prefix).rstrip(b"\xff")  # of which the kind of a record is left at least
    end = cut[:-1] + bytes((cut[-1] + 1,))  # the first key that does not begin so
    if start:
        end = min(end, own + start + b"\x00")
    return min(end, own + after_key) if after_key else end


def _within(rows: list[tuple[bytes, bytes]], head: bytes) -> list[tuple[bytes, bytes]]:
    """Return the first rows, whose keys go on from one that begins so, up to where they do not."""
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
