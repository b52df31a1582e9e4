"""Estimates of what each partition holds: found by a slow pass, replaced by the next."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import numpy as np

from koinon_node.core.formats import records
from koinon_node.storage.environment import DATA_DB
from koinon_node.storage.sizes import SizeEstimates, SizeScan
from koinon_node.storage.store import Store
from koinon_node.storage.writer import Writer
from koinon_node.store_config import StoreConfig
from tests.node.kit.support import with_writer

ROW = records.KEY_AT + records.HEADER_BYTES


def test_estimates_of_a_partition_change_when_the_pass_has_left_it() -> None:
    sizes = SizeEstimates()
    sizes.add(2, 10, 10 * (ROW + 5))
    sizes.add(2, 10, 10 * (ROW + 5))
    assert sizes.of(2) == (0, 0)
    sizes.add(4, 1, ROW + 7)
    assert sizes.of(2) == (20, 100)
    sizes.end_pass()
    assert sizes.columns() == ([2, 4], [20, 1], [100, 7])


def test_estimates_of_partitions_that_the_next_pass_finds_empty_are_gone() -> None:
    sizes = SizeEstimates()
    for partition_id in (0, 1, 2, 3, 65_535):
        sizes.add(partition_id, 1, ROW + 1)
    sizes.end_pass()
    assert sizes.columns()[0] == [0, 1, 2, 3, 65_535]
    sizes.add(2, 1, ROW + 1)
    assert sizes.columns()[0] == [2, 3, 65_535]
    sizes.end_pass()
    assert sizes.columns()[0] == [2]
    sizes.end_pass()
    assert sizes.columns() == ([], [], [])


def test_size_is_stale_once_its_copy_was_written_to_after_the_visit() -> None:
    sizes = SizeEstimates()
    sizes.add(2, 512, 512 * ROW, through=40)
    sizes.add(2, 10, 10 * ROW, through=45)  # the rows before may miss what came in between
    sizes.add(4, 1, ROW, through=7)
    sizes.end_pass()
    assert sizes.stale([2, 4, 5], np.array([40, 8, 1], np.uint64)).tolist() == [False, True, True]
    sizes.add(2, 522, 522 * ROW, through=45)
    sizes.end_pass()
    assert sizes.stale([2, 4], np.array([45, 8], np.uint64)).tolist() == [False, True]


async def put(writer: Writer, partition_id: int, count: int, value: bytes) -> None:
    keys = [records.head_of(partition_id) + b"%05d" % n for n in range(count)]
    encoded: list[bytes | None] = [records.encode_record(n + 1, value) for n in range(count)]
    await writer.submit(((DATA_DB, keys, encoded),), count, 1)


def test_scan_counts_every_partition_in_bounded_steps(tmp_path: Path) -> None:
    counts = {0: 1, 1: 511, 2: 512, 3: 513, 7: 3000, 1023: 2}

    async def use(writer: Writer, store: Store) -> None:
        for partition_id, count in counts.items():
            await put(writer, partition_id, count, b"v" * 20)
        sizes = SizeEstimates()
        scan = SizeScan(store, sizes)
        steps = 1
        while scan.step(0.0):
            steps += 1
        assert steps > sum(counts.values()) // 512
        partition_ids, rows, size = sizes.columns()
        assert dict(zip(partition_ids, rows, strict=True)) == counts
        assert size == [count * 25 for count in counts.values()]
        assert scan.step(60.0) is False  # the next pass, in one step
        assert sizes.columns()[1] == list(counts.values())

    with_writer(StoreConfig(directory=tmp_path / "n1"), use)


def test_scan_of_an_empty_store_ends_at_once(tmp_path: Path) -> None:
    with Store(StoreConfig(directory=tmp_path / "n1")) as store:
        sizes = SizeEstimates()
        assert SizeScan(store, sizes).step(1.0) is False
        assert sizes.columns() == ([], [], [])


def test_scan_in_the_background_takes_little_of_a_core(tmp_path: Path) -> None:
    async def use(writer: Writer, store: Store) -> None:
        await put(writer, 5, 3_000, b"v" * 100)
        sizes = SizeEstimates()
        cpu, began = time.thread_time(), time.perf_counter()
        scanning = asyncio.ensure_future(SizeScan(store, sizes).run())
        async with asyncio.timeout(60):
            while sizes.of(5)[0] < 3_000:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        share = (time.thread_time() - cpu) / (time.perf_counter() - began)
        scanning.cancel()
        assert share < 0.1

    with_writer(StoreConfig(directory=tmp_path / "n1"), use)


def test_scan_knows_which_records_are_staged(tmp_path: Path) -> None:
    """No client reads those: they are left out of what a node says that it holds."""

    async def use(writer: Writer, store: Store) -> None:
        for partition_id in (1, 2, 3):
            await put(writer, partition_id, 5, b"v")
        for partition_id, count in ((0, 4), (2, 3)):
            head = records.head_of(partition_id, records.STAGED)
            keys = [head + b"%05d" % n for n in range(count)]
            chunks: list[bytes | None] = [records.encode_record(1, b"chunk")] * count
            await writer.submit(((DATA_DB, keys, chunks),), count, 1)
        sizes = SizeEstimates()
        scan = SizeScan(store, sizes)
        while scan.step(1.0):
            pass
        assert sizes.hidden() == 7
        assert store.count() - sizes.hidden() == 15
        assert sizes.columns()[1] == [4, 5, 8, 5]

    with_writer(StoreConfig(directory=tmp_path / "n1"), use)


def test_columns_are_read_by_a_thread_while_partitions_become_empty_and_full() -> None:
    estimates, ended = SizeEstimates(), threading.Event()

    def count() -> None:
        while not ended.is_set():
            for partition_id in range(0, 65_000, 100):
                estimates.add(partition_id, 1, 100)
            estimates.end_pass()
            estimates.end_pass()  # a pass that found nothing: all are empty

    thread = threading.Thread(target=count)
    thread.start()
    try:
        for _ in range(3_000):
            partition_ids, counts, sizes = estimates.columns()
            assert len(partition_ids) == len(counts) == len(sizes)
    finally:
        ended.set()
        thread.join()
