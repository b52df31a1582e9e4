"""The writer leaves no entry of the expiry index for what a write with an entry replaces."""

from __future__ import annotations

import asyncio
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from koinon_node.config import Limits
from koinon_node.core.formats import record_layout, records
from koinon_node.storage import transactions
from koinon_node.storage.environment import DATA_DB, EXPIRY_DB
from koinon_node.storage.store import Store
from koinon_node.storage.writer import Writer
from tests.node.kit.staged_chunks import content
from tests.node.kit.support import MIB, config_of, with_writer


def with_entry(key: bytes, sequence: int, expires_at_ms: int) -> Any:
    """Return a ticket's writes: a record and, if it expires, its entry in the expiry index."""
    record = records.encode_record(sequence, b"v", expires_at_ms)
    entries = [record_layout.expiry_key(expires_at_ms, key)] if expires_at_ms else []
    return ((DATA_DB, [key], [record]), (EXPIRY_DB, entries, [b""] * len(entries)))


@pytest.mark.parametrize("group_rows", [2, 1000])
def test_key_written_again_with_a_time_to_live_has_one_entry_in_the_expiry_index(
    tmp_path: Path, group_rows: int
) -> None:
    """However the writes fall into groups: else there would be an entry a write until it is due."""
    key, other = b"\0\0\0key", b"\0\0\0other"

    async def write(writer: Writer, *times: int) -> None:
        writes = [with_entry(key, 1, at_ms) for at_ms in times]
        writes.insert(1, with_entry(other, 1, 7))
        await asyncio.gather(*(writer.submit(w, 2, 20) for w in writes))

    async def use(writer: Writer, store: Store) -> None:
        await write(writer, 5, 9, 6, 6, 8)
        await write(writer, 8, 3)
        assert set(content(store)[1]) == {
            record_layout.expiry_key(3, key),
            record_layout.expiry_key(7, other),
        }
        await write(writer, 4, 0)  # it does not expire any more
        left = set(content(store)[1]) - {record_layout.expiry_key(7, other)}
        assert left <= {record_layout.expiry_key(4, key)}  # until it is due, at the most
        await write(writer, 5, 2)
        assert record_layout.expiry_key(2, key) in content(store)[1]

    with_writer(config_of(tmp_path), use, Limits(group_rows=group_rows))


def test_entries_of_large_records_are_found_without_a_copy_of_these(tmp_path: Path) -> None:
    """The records that a group replaces may be as large as the store: far larger than the group."""
    keys = [b"\0\0\0%02d" % number for number in range(40)]
    with Store(config_of(tmp_path)) as store:
        data = store.databases[DATA_DB]
        with store.env.begin(data, write=True) as txn:
            for key in keys:
                txn.put(key, records.encode_record(1, bytes(MIB), 7))
        tracemalloc.start()
        with store.env.begin(data, buffers=True) as before:
            found = transactions.stored_entries(before, keys)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert found == [record_layout.expiry_key(7, key) for key in keys]
    assert peak < MIB


def test_tombstone_takes_the_place_of_its_record_in_the_expiry_index(tmp_path: Path) -> None:
    key = b"\0\0\0key"

    async def use(writer: Writer, store: Store) -> None:
        await writer.submit(with_entry(key, 1, 50), 2, 20)
        entry = record_layout.expiry_key(90, key)
        tombstone = records.encode_tombstone(2, 90)
        await writer.submit(((DATA_DB, [key], [tombstone]), (EXPIRY_DB, [entry], [b""])), 2, 20)
        assert content(store) == ({key: tombstone}, {entry: b""})
        await writer.submit(((DATA_DB, [key], [None]), (EXPIRY_DB, [entry], [None])), 2, 20)
        assert content(store) == ({}, {})

    with_writer(config_of(tmp_path), use)
