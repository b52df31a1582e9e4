"""Stores gathered rows in a store's databases, in one transaction."""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import lmdb

from koinon_node.core.formats import record_layout
from koinon_node.storage.environment import DATA_DB, DATABASES, EXPIRY_DB

Gathered = list[dict[bytes, bytes | None]]
"""By database: the value of each key; None deletes the key. Large values may be memory views.
"""

_key_of = operator.itemgetter(0)


def gathered() -> Gathered:
    return [{} for _ in DATABASES]


def put(
    environment: lmdb.Environment, txn: lmdb.Transaction, databases: Sequence[Any], rows: Gathered
) -> None:
    """Store the gathered rows in key order, and clear them."""
    if rows[EXPIRY_DB]:
        with environment.begin(databases[DATA_DB], buffers=True) as before:
            drop_replaced_entries(before, rows[DATA_DB], rows[EXPIRY_DB])
    for database, entries in zip(databases, rows, strict=True):
        _put_sorted(txn, database, entries)
        entries.clear()


def drop_replaced_entries(
    before: lmdb.Transaction,
    rows: Mapping[bytes, bytes | None],
    entries: dict[bytes, bytes | None],
) -> None:
    """Add to ``entries`` (of the expiry index) the deletes of entries of replaced records: of
    records stored ``before`` the group, and of records that the group itself replaces.

    So a key that is written again and again with a time to live has one entry, not one per write.
    Only keys that get an entry are checked: reading every replaced record would cost too much.
    """
    added = [entry for entry, value in entries.items() if value is not None]
    keys = set(map(record_layout.key_of_entry, added))
    if len(keys) < len(added):  # the group writes some keys twice
        last = [(key, row) for key in keys if (row := rows.get(key)) is not None]
        needed = set(record_layout.expiry_keys_of([k for k, _ in last], _heads(r for _, r in last)))
        written = {key for key, _ in last}
        for entry in added:
            if entry not in needed and record_layout.key_of_entry(entry) in written:
                entries[entry] = None
    for entry in stored_entries(before, sorted(keys)):
        entries.setdefault(entry, None)


def stored_entries(before: lmdb.Transaction, keys: Sequence[bytes]) -> list[bytes]:
    """Return the expiry-index entries of stored records. The read transaction must use buffers: a
    record may be large, and only its header is read.
    """
    with before.cursor() as cursor:
        found = cast("list[tuple[memoryview, memoryview]]", cursor.getmulti(keys))
        heads = _heads(record for _, record in found)
        return record_layout.expiry_keys_of([bytes(key) for key, _ in found], heads)


def _heads(rows: Iterable[bytes | memoryview]) -> list[bytes]:
    return [bytes(row[: record_layout.HEADER_WITH_EXPIRY_BYTES]) for row in rows]


def _put_sorted(txn: lmdb.Transaction, database: Any, rows: dict[bytes, bytes | None]) -> None:
    """Apply the rows in key order. Rows after the last key are appended, which fills pages: without
    that, LMDB leaves a third to a half of a page with few rows empty.
    """
    if not rows:
        return
    keys = sorted(rows)
    with txn.cursor(database) as cursor:
        if None in rows.values():
            for key in keys:
                if rows[key] is None and cursor.set_key(key):
                    cursor.delete()
        items = [(key, value) for key in keys if (value := rows[key]) is not None]
        end = bisect_right(items, bytes(cursor.key()), key=_key_of) if cursor.last() else 0
        cursor.putmulti(items[:end])
        cursor.putmulti(items[end:], append=True)
