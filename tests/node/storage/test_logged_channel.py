"""A write-ahead log in front of a store: what is durable, when it is seen, and what is left of it.

Real writer processes and files. "Killed" is a node of which nothing was closed.
"""

from __future__ import annotations

import asyncio
import os
import random
import resource
import shutil
import signal
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import lmdb
import pytest

from koinon_node.core.formats import log_format, record_layout, records
from koinon_node.core.formats.writer_frames import CHAINED, LOOSE, TicketFrame, Writes
from koinon_node.storage import logged_channel
from koinon_node.storage.environment import DATA_DB, EXPIRY_DB, PARTITIONS_DB
from koinon_node.storage.log_files import LOG, Record, take_over
from koinon_node.storage.logged_channel import Bounds, LoggedChannel, refused
from koinon_node.storage.store import Store
from koinon_node.storage.transactions import Gathered
from koinon_node.storage.write_ahead_log import LogThread, WriteAheadLog
from koinon_node.storage.writer_channel import ProcessChannel
from koinon_node.store_config import StoreConfig
from koinon_proto.contract.cluster_errors import DataDirectoryError
from koinon_proto.contract.errors import StorageFullError
from tests.node.kit.groups import lone_writer
from tests.node.kit.support import WAIT_S

P = 3
NEVER = Bounds(take_over_s=3600.0, spare_bytes=0)
SEGMENT_BYTES = 256 * 1024


def key(name: str) -> bytes:
    return records.head_of(P) + name.encode()


def config_of(directory: Path, **options: Any) -> StoreConfig:
    options = {"map_size_bytes": 256 << 20, "write_ahead_log": True, **options}
    return StoreConfig(directory=directory / "data", **options)


class Rig:
    """A store, its log and its writer process, begun and ended as the test says."""

    def __init__(self, config: StoreConfig, bounds: Bounds = NEVER) -> None:
        self.store = Store(config)
        self.process = ProcessChannel(self.store)
        wal = WriteAheadLog(config.directory, self.store.log_life, segment_bytes=SEGMENT_BYTES)
        self.lost: list[str] = []
        self.channel = LoggedChannel(self.process, wal, self.store, LogThread, bounds)
        self.writer = lone_writer(self.store, self.lost.append, channel=self.channel)

    def put(self, rows: dict[str, bytes | None], **options: Any) -> asyncio.Future[None]:
        keys = list(map(key, rows))
        values = [None if v is None else records.encode_record(1, v, 0) for v in rows.values()]
        progress: list[bytes | None] = [records.encode_one_progress(1, 0)]
        writes = ((DATA_DB, keys, values), (PARTITIONS_DB, [records.progress_key(P)], progress))
        size = sum(map(len, keys)) + sum(len(value or b"") for value in values)
        return self.writer.submit(writes, len(keys), size, **options)

    def get(self, name: str) -> bytes | None:
        record = self.store.get(key(name))
        return None if record is None else record[records.HEADER_BYTES :]

    def in_store(self) -> dict[str, bytes]:
        """Return the records that the store itself has."""
        rows, _ = self.store.scan(P, b"", b"", 100_000, 1 << 30)
        return {k[records.KEY_AT :].decode(): v[records.HEADER_BYTES :] for k, v in rows}

    def kill(self) -> None:
        """End as by kill -9 of the node and its writer process."""
        os.kill(self.process.process_id, signal.SIGKILL)
        self.channel._log.close()  # its thread would outlive the test
        self.store.close(clean=False)


def use(
    config: StoreConfig, test: Callable[[Rig], Awaitable[None]], bounds: Bounds = NEVER
) -> None:
    """Run the test on an open store; close that clean, unless the test has killed it."""

    async def run() -> None:
        rig = Rig(config, bounds)
        await rig.writer.start()
        try:
            await asyncio.wait_for(test(rig), WAIT_S)
        finally:
            if rig.store.is_open:
                rig.store.close(clean=await rig.writer.stop())

    asyncio.run(run())


async def nothing(rig: Rig) -> None:
    pass


def test_row_is_durable_and_read_before_the_store_has_it(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        await rig.put({"a": b"1", "b": b"1"})
        await rig.put({"a": b"2", "b": None})
        assert rig.in_store() == {}
        assert (rig.get("a"), rig.get("b")) == (b"2", None)
        both = [key("b"), key("a")]
        assert rig.store.get_many(both) == [(key("a"), records.encode_record(1, b"2", 0))]
        assert rig.store.lacks((P,))
        assert not rig.store.lacks((P + 1,))
        await rig.writer.settle((P + 1,))
        assert rig.in_store() == {}
        await rig.writer.settle((P,))
        assert rig.in_store() == {"a": b"2"}
        assert not rig.store.lacks((P,))
        assert not rig.store.overlay

    use(config_of(tmp_path), test)


def test_what_was_durable_is_in_the_store_after_a_kill(tmp_path: Path) -> None:
    async def first(rig: Rig) -> None:
        await rig.put({"a": b"1", "b": b"1", "c": b"1"})
        await rig.writer.settle((P,))
        await rig.put({"a": b"2", "b": None})
        assert rig.in_store() == {"a": b"1", "b": b"1", "c": b"1"}
        rig.kill()

    async def second(rig: Rig) -> None:
        assert rig.in_store() == {"a": b"2", "c": b"1"}
        await rig.put({"a": b"3"})
        rig.kill()

    async def third(rig: Rig) -> None:
        assert rig.in_store() == {"a": b"3", "c": b"1"}

    for test in first, second, third:
        use(config_of(tmp_path), test)


def test_store_that_was_killed_opens_without_a_log_as_well(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        await rig.put({"a": b"1"})
        rig.kill()

    use(config_of(tmp_path), test)
    with Store(config_of(tmp_path, write_ahead_log=False)) as store:
        assert store.get(key("a")) is not None


def test_store_says_by_its_format_that_its_log_has_rows(tmp_path: Path) -> None:
    def version() -> bytes:
        with (
            lmdb.open(str(tmp_path / "data"), readonly=True, max_dbs=8, lock=False) as env,
            env.begin(env.open_db(b"meta", create=False)) as txn,
        ):
            return bytes(txn.get(b"format_version") or b"")

    async def test(rig: Rig) -> None:
        await rig.put({"a": b"1"})
        rig.kill()

    use(config_of(tmp_path), test)
    assert version() == b"3"
    use(config_of(tmp_path), nothing)
    assert version() == b"2"  # it was closed clean: all is in the store


def test_store_without_a_log_gets_one_and_gives_it_back(tmp_path: Path) -> None:
    direct = config_of(tmp_path, write_ahead_log=False)

    async def fill() -> None:
        store = Store(direct)
        writer = lone_writer(store, lambda _: None)
        await writer.start()
        await writer.submit(((DATA_DB, [key("old")], [b"\0" * 20]),), 1, 1)
        store.close(clean=await writer.stop())

    async def test(rig: Rig) -> None:
        assert rig.get("old") is not None
        await rig.put({"new": b"1"})

    asyncio.run(fill())
    use(config_of(tmp_path), test)
    with Store(direct) as store:
        assert store.count() == 2


def test_large_values_and_what_follows_them_keep_their_order(tmp_path: Path) -> None:
    bounds = Bounds(take_over_s=3600.0, spare_bytes=0, large_group_bytes=5_000, large_row_bytes=50)

    async def test(rig: Rig) -> None:
        first = rig.put({"a": b"1", "b": b"1"})
        rig.writer.end_group()
        large = rig.put({"a": b"x" * 10_000})
        rig.writer.end_group()
        last = rig.put({"b": b"2"})
        await asyncio.gather(first, large, last)
        assert rig.in_store() == {"a": b"x" * 10_000, "b": b"1"}
        assert rig.get("b") == b"2"
        rig.kill()

    async def again(rig: Rig) -> None:
        assert rig.in_store() == {"a": b"x" * 10_000, "b": b"2"}

    use(config_of(tmp_path), test, bounds)
    use(config_of(tmp_path), again, bounds)


def test_pages_of_a_catch_up_go_to_the_store_and_clients_rows_do_not(tmp_path: Path) -> None:
    bounds = Bounds(take_over_s=3600.0, spare_bytes=0, page_bytes=5_000)

    async def test(rig: Rig) -> None:
        rows: dict[str, bytes | None] = {f"{n:04}": b"v" * 10 for n in range(1_000)}
        await rig.put(rows)
        assert rig.in_store() == {}
        await rig.put({"page": b"v", **rows}, bulk=True)
        assert len(rig.in_store()) == 1_001

    use(config_of(tmp_path), test, bounds)


def test_overlay_at_its_bound_waits_for_the_store(tmp_path: Path) -> None:
    bounds = Bounds(layer_rows=10**9, overlay_rows=200, take_over_s=3600.0, spare_bytes=0)

    async def test(rig: Rig) -> None:
        for number in range(50):
            await rig.put({f"{number}-{row}": b"v" for row in range(20)})
            assert rig.store.overlay.rows < 200 + 21
        await rig.writer.settle((P,))
        assert len(rig.in_store()) == 1_000

    use(config_of(tmp_path), test, bounds)


def test_log_is_used_again_and_again(tmp_path: Path) -> None:
    bounds = Bounds(layer_rows=50, take_over_s=3600.0, spare_bytes=0)

    async def test(rig: Rig) -> None:
        for number in range(200):
            await rig.put({f"{row}": b"%d" % number * 3_000 for row in range(3)})
        rig.kill()

    async def again(rig: Rig) -> None:
        assert rig.in_store() == {f"{row}": b"199" * 3_000 for row in range(3)}

    use(config_of(tmp_path), test, bounds)
    segments = list((tmp_path / "data" / LOG).iterdir())
    assert len(segments) <= 8
    assert {path.stat().st_size for path in segments} == {SEGMENT_BYTES}
    use(config_of(tmp_path), again, bounds)


@pytest.mark.parametrize("seed", range(12))
def test_killed_at_any_moment_it_has_what_was_acknowledged(tmp_path: Path, seed: int) -> None:
    """Four times over: writes, deletions, large values, take-overs; then the node is killed."""
    rng = random.Random(seed)
    bounds = Bounds(
        layer_rows=rng.choice([5, 50]),
        overlay_rows=rng.choice([60, 10_000]),
        take_over_s=rng.choice([0.001, 3600.0]),
        spare_bytes=0,
        large_group_bytes=2_000,
        large_row_bytes=300,
    )
    acknowledged: dict[str, bytes | None] = {}
    sent: dict[str, set[bytes | None]] = {}

    async def test(rig: Rig) -> None:
        for name, value in acknowledged.items():
            assert rig.get(name) in sent.pop(name, set()) | {value}, name
        sent.clear()
        await rig.writer.settle((P,))
        acknowledged.update({name: rig.get(name) for name in acknowledged})

        def is_done(rows: dict[str, bytes | None]) -> Callable[[Any], None]:
            def note(future: asyncio.Future[None]) -> None:
                if not future.cancelled() and future.exception() is None:
                    acknowledged.update(rows)

            return note

        for _ in range(rng.randrange(20, 120)):
            size = rng.choice([1, 20, 20, 3_000])
            rows = {
                f"{rng.randrange(30)}": rng.choice([None, rng.randbytes(size)])
                for _ in range(rng.randrange(1, 8))
            }
            for name, value in rows.items():
                sent.setdefault(name, set()).add(value)
            future = rig.put(rows)
            future.add_done_callback(is_done(rows))
            if rng.random() < 0.3:
                await asyncio.sleep(rng.choice([0.0, 0.002]))
            if rng.random() < 0.05:
                rig.writer.end_group()
        rig.kill()

    for _ in range(4):
        use(config_of(tmp_path), test, bounds)


def test_expired_entries_are_those_of_the_newest_record(tmp_path: Path) -> None:
    """As without a log: one entry a key, however often it was written."""

    async def test(rig: Rig) -> None:
        for at_ms in (1_000, 2_000, 3_000):
            record = records.encode_record(1, b"v", at_ms)
            entry = record_layout.expiry_key(at_ms, key("k"))
            writes: Writes = ((DATA_DB, [key("k")], [record]), (EXPIRY_DB, [entry], [b""]))
            await rig.writer.submit(writes, 2, 1)
            if at_ms == 1_000:
                await rig.channel.settle()
        await rig.channel.settle()
        entries, _ = rig.store.expired_entries(b"", 10_000, 100)
        assert entries == [record_layout.expiry_key(3_000, key("k"))]
        await rig.writer.submit(((EXPIRY_DB, entries, [None]),), 1, 1)
        assert rig.store.expired_entries(b"", 10_000, 100) == ([], b"")

    use(config_of(tmp_path), test)


def test_store_without_room_refuses_what_it_would_store_and_goes_on_when_there_is_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logged_channel, "_RETRY_S", 0.05)

    async def test(rig: Rig) -> None:
        await rig.put({"a": b"1"})
        pid = rig.process.process_id
        unlimited = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        size = (tmp_path / "data" / "data.mdb").stat().st_size
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, unlimited[1]))
        acknowledged = 0
        with pytest.raises(StorageFullError):  # noqa: PT012
            while True:
                await rig.put({f"{acknowledged}": b"v" * 4_000})
                acknowledged += 1
                rig.channel._catch_up()
                await asyncio.sleep(0.02)
        await rig.put({"a": None})  # what only removes is taken
        assert rig.get("a") is None
        resource.prlimit(pid, resource.RLIMIT_FSIZE, unlimited)
        await rig.writer.settle((P,))
        assert rig.in_store() == {f"{row}": b"v" * 4_000 for row in range(acknowledged)}
        await rig.put({"after": b"1"})

    use(config_of(tmp_path), test)


def test_disk_with_little_room_is_written_without_the_log(tmp_path: Path) -> None:
    bounds = Bounds(take_over_s=3600.0, spare_bytes=1 << 60)

    async def test(rig: Rig) -> None:
        await rig.put({"a": b"1"})
        assert rig.in_store() == {"a": b"1"}

    use(config_of(tmp_path), test, bounds)


async def test_failed_sync_of_the_log_ends_the_node_unacknowledged(
    tmp_path: Path,
) -> None:
    class Failing(LogThread):
        fails = False

        def sync(self, descriptor: int) -> None:
            if self.fails:
                raise OSError(5, "Input/output error")
            super().sync(descriptor)

    rig = Rig(config_of(tmp_path))
    made: list[Failing] = []

    def make(on_failure: Callable[[str], None]) -> Failing:
        made.append(Failing(on_failure))
        return made[0]

    rig.channel._make_disk = make
    await rig.writer.start()
    await rig.put({"a": b"1"})
    made[0].fails = True
    future = rig.put({"a": b"2"})
    with pytest.raises(Exception, match="unknown fate"):
        await asyncio.wait_for(future, WAIT_S)
    assert len(rig.lost) == 1
    rig.kill()


def test_damaged_log_is_refused_with_the_file_and_the_place(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        for number in range(5):
            await rig.put({f"{number}": b"v"})
        rig.kill()

    use(config_of(tmp_path), test)
    (segment,) = (tmp_path / "data" / LOG).iterdir()
    content = bytearray(segment.read_bytes())
    at = content.index(b"kRec") + 60
    content[at] ^= 1
    segment.write_bytes(content)
    with pytest.raises(DataDirectoryError, match=r"log/0.*damaged at byte 4096.*was durable"):
        Store(config_of(tmp_path))


def test_writer_of_a_store_with_a_log_has_one_in_front(tmp_path: Path) -> None:
    with Store(config_of(tmp_path)) as store:
        writer = lone_writer(store, lambda _: None)
        assert isinstance(writer._channel, LoggedChannel)


def ticket(name: str, value: bytes | None, *, after: int = 0, ties: int = 0) -> TicketFrame:
    writes: Writes = (
        (DATA_DB, [key(name)], [value]),
        (PARTITIONS_DB, [records.progress_key(P)], [b""]),
    )
    return after, ties, writes


def test_what_builds_on_a_refused_ticket_is_refused_though_there_is_room_for_it() -> None:
    put, remove = ticket("a", b"v"), ticket("b", None)
    assert refused([put, remove], 0, "") == {}
    assert list(refused([put, remove], 0, "full")) == [0]
    assert list(refused([put, ticket("b", None, ties=CHAINED)], 0, "full")) == [0, 1]
    assert list(refused([ticket("a", b"v", ties=LOOSE), remove], 0, "full")) == [0]
    assert list(refused([ticket("b", None, after=4), ticket("c", None, after=5)], 4, "")) == [0]


def test_refused_row_takes_along_what_was_decided_upon_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logged_channel, "_RETRY_S", 3600.0)

    async def test(rig: Rig) -> None:
        await rig.put({"a": b"1"})
        rig.channel._no_room = "full"
        first = rig.put({"a": b"2"}, chained=True)
        number = rig.writer.pending.open.number
        rig.writer.end_group()
        second = rig.put({"b": None}, chained=True, after_group=number)
        other = rig.put({"c": None})
        for refusal in first, second:
            with pytest.raises(StorageFullError):
                await refusal
        await other
        rig.channel._no_room = ""
        assert rig.get("a") == b"1"

    use(config_of(tmp_path), test)


def test_small_map_has_room_for_whatever_was_acknowledged(tmp_path: Path) -> None:
    """Rows at random change a page each: of a tree that fills half of the map, all of it."""
    config = config_of(tmp_path, map_size_bytes=24 << 20)
    rng = random.Random(3)

    async def fill(rig: Rig) -> None:
        for first in range(0, 80_000, 5_000):
            await rig.put({f"{n:08}": b"v" * 100 for n in range(first, first + 5_000)})

    async def overwrite(rig: Rig) -> None:
        for _ in range(40):
            await rig.put({f"{rng.randrange(80_000):08}": b"w" * 100 for _ in range(1_000)})
        await rig.put({"last": b"1"})
        rig.kill()

    async def again(rig: Rig) -> None:
        assert rig.get("last") == b"1"

    bounds = Bounds(take_over_s=3600.0)
    for test in fill, overwrite, again:
        use(config, test, bounds)


def test_take_over_that_finds_no_room_goes_on_in_parts(tmp_path: Path) -> None:
    taken: list[int] = []

    def put(rows: Gathered, _: int) -> str:
        count = len(rows[DATA_DB])
        if count > 3:
            return "full"
        taken.append(count)
        return ""

    def record(position: int, names: Sequence[str]) -> Record:
        encoded = log_format.encode_record(
            [ticket(name, b"v")[2] for name in names], 1, position, 0
        )
        return position, memoryview(encoded)[log_format.RECORD_HEAD_BYTES :]

    small = [record(n, [f"{n}"]) for n in range(1, 11)]
    assert take_over(small, 1, put) == (10, "")
    assert sum(taken) == 10
    large = [*small[:5], record(6, ["a", "b", "c", "d"]), *small[6:]]
    assert take_over(large, 1, put) == (5, "full")


def test_missing_log_is_refused_and_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    async def test(rig: Rig) -> None:
        await rig.put({"a": b"1"})
        rig.kill()

    use(config_of(tmp_path), test)
    shutil.rmtree(tmp_path / "data" / LOG)
    with pytest.raises(DataDirectoryError, match=r"data/log.*has rows that the store lacks"):
        Store(config_of(tmp_path))


def test_value_that_looks_like_a_record_is_none(tmp_path: Path) -> None:
    """Left behind the end of a later life of the log; the life's number cannot be guessed."""
    forged = b"".join(
        log_format.encode_record([ticket("victim", b"forged")[2]], life, position, 1 << 40)
        for life in range(50)
        for position in (1, 2, 3)
    )

    async def first(rig: Rig) -> None:
        await rig.put({"a": forged[:100_000]})

    async def second(rig: Rig) -> None:
        await rig.put({"b": b"1"})
        rig.kill()

    async def third(rig: Rig) -> None:
        assert rig.get("victim") is None
        assert rig.get("b") == b"1"

    for test in first, second, third:
        use(config_of(tmp_path), test)
