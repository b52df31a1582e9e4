"""Digests of copies: of what is there, whatever way it came and however it is read."""

from __future__ import annotations

import asyncio
import itertools
import time
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from koinon_node.core.formats import records
from koinon_node.core.formats.records import PartitionEpochs
from koinon_node.core.replication.copies import CopyState
from koinon_node.storage.checksums import Checksums, Digest
from koinon_node.storage.environment import DATA_DB, PARTITIONS_DB
from koinon_node.storage.store import Store
from koinon_node.storage.writer import Writer
from koinon_node.store_config import StoreConfig
from koinon_proto.v1 import replication_pb2
from tests.node.kit.support import with_writer

Rows = dict[bytes, bytes]
P = 3


def record(sequence: int, value: bytes, expires_at_ms: int = 0) -> bytes:
    return records.encode_record(sequence, value, expires_at_ms)


async def fill(
    writer: Writer, rows: Rows, partition_id: int = P, *, through: int = 9, state: int = 0
) -> None:
    """Make a copy that holds these rows."""
    prefix = records.head_of(partition_id)
    progress = records.encode_progress(
        np.array([through], np.uint64), np.zeros(1, np.uint64), state
    )
    epochs = records.encode_epochs(PartitionEpochs(primary_epoch=1))
    await writer.submit(
        (
            (DATA_DB, [prefix + key for key in rows], list(rows.values())),
            (
                PARTITIONS_DB,
                [records.progress_key(partition_id), records.epochs_key(partition_id)],
                [progress[0], epochs],
            ),
        ),
        len(rows),
        1,
    )


def checksum(
    tmp_path: Path, rows: Rows, *, name: str = "a", partition_id: int = P, state: int = 0
) -> replication_pb2.CopyChecksum:
    """Return the checksum of a new store that holds these rows in P (and others beside it)."""

    async def use(writer: Writer, store: Store) -> replication_pb2.CopyChecksum:
        await fill(writer, rows, state=state)
        for beside in (P - 1, P + 1):
            await fill(writer, {b"beside": record(1, b"x")}, beside)
        (found,) = await Checksums(store, writer).of([partition_id])
        return found

    return with_writer(StoreConfig(directory=tmp_path / name), use)


ROWS = {b"a": record(1, b"one"), b"b": record(2, b"", 77), b"c": record(3, b"three")}


def test_checksum_counts_records_bytes_and_says_how_far_the_copy_is_complete(
    tmp_path: Path,
) -> None:
    found = checksum(tmp_path, ROWS)
    assert (found.usable, found.complete_through) == (True, 9)
    assert (found.records, found.bytes) == (3, 3 + len(b"one" + b"three"))


def test_checksum_is_the_same_with_tombstones_left_or_purged(tmp_path: Path) -> None:
    found = checksum(tmp_path, ROWS)
    with_tombstones = {**ROWS, b"": records.encode_tombstone(4, 99)}
    with_tombstones |= {b"b%d" % n: records.encode_tombstone(5 + n, 99) for n in range(2000)}
    del with_tombstones[b""]
    assert checksum(tmp_path, with_tombstones, name="b") == found


def test_checksum_differs_by_value_sequence_expiry_and_key(tmp_path: Path) -> None:
    variants = [
        ROWS,
        {**ROWS, b"a": record(1, b"two")},
        {**ROWS, b"a": record(2, b"one")},
        {**ROWS, b"a": record(1, b"one", 5)},
        {b"aa": ROWS[b"a"], b"b": ROWS[b"b"], b"c": ROWS[b"c"]},
        {b"a": ROWS[b"a"], b"b": ROWS[b"b"]},
        {},
    ]
    digests = [checksum(tmp_path, rows, name=f"v{n}").digest for n, rows in enumerate(variants)]
    assert len(set(digests)) == len(variants)


def test_checksum_of_no_copy_or_one_being_replaced_is_not_usable(tmp_path: Path) -> None:
    for name, state in (("a", CopyState.UNUSABLE), ("b", CopyState.DIRTY_TAIL)):
        assert not checksum(tmp_path, ROWS, name=name, state=state).usable
    unknown = checksum(tmp_path, ROWS, name="c", partition_id=P + 5)
    assert (unknown.partition_id, unknown.usable) == (P + 5, False)


def test_checksum_of_an_empty_copy_is_usable(tmp_path: Path) -> None:
    found = checksum(tmp_path, {})
    assert (found.usable, found.records, found.bytes) == (True, 0, 0)


def test_checksum_sees_one_state_and_lets_the_loop_run(tmp_path: Path) -> None:
    rows = {b"%06d" % n: record(n + 1, b"v" * (2**20 if n == 700 else 100)) for n in range(50_000)}

    async def use(writer: Writer, store: Store) -> None:
        await fill(writer, rows)
        sums = Checksums(store, writer)
        (before,) = await sums.of([P])
        stalls: list[float] = []
        at = time.perf_counter()
        summing = asyncio.ensure_future(sums.of([P]))
        changed = None
        while not summing.done():
            await asyncio.sleep(0)
            now = time.perf_counter()
            stalls.append(now - at)
            at = now
            if len(stalls) == 5:  # under way
                changed = fill(writer, {b"%06d" % n: record(99, b"new") for n in range(50_000)})
                changed_task = asyncio.ensure_future(changed)
        assert await summing == [before]
        assert changed is not None
        await changed_task
        assert (await sums.of([P]))[0].digest != before.digest
        assert len(stalls) > 50
        assert sorted(stalls)[len(stalls) * 9 // 10] < 0.02

    with_writer(StoreConfig(directory=tmp_path / "n1"), use)


@given(
    st.lists(st.tuples(st.binary(max_size=5), st.binary(max_size=5), st.booleans()), max_size=20),
    st.lists(st.integers(0, 20)),
)
def test_digest_does_not_depend_on_how_rows_are_cut(
    drawn: list[tuple[bytes, bytes, bool]], cuts: list[int]
) -> None:
    rows = [
        (
            b"\x00\x03\x00" + key,
            records.encode_tombstone(1, 2) if dead else record(1, value, len(value)),
        )
        for key, value, dead in drawn
    ]
    whole, parts = Digest(), Digest()
    whole.add(rows)
    places = [0, *sorted(min(cut, len(rows)) for cut in cuts), len(rows)]
    for start, end in itertools.pairwise(places):
        parts.add(rows[start:end])
    assert (whole.value(), whole.records, whole.bytes) == (
        parts.value(),
        parts.records,
        parts.bytes,
    )
    live = [(key, value) for key, value, dead in drawn if not dead]
    assert whole.records == len(live)
    assert whole.bytes == sum(len(key) + len(value) for key, value in live)
