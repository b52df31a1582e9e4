"""Group commit over the writer process: order, bounds, no room, and death."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from koinon_node.config import Limits, StoreConfig
from koinon_node.core.replica import PendingWrites
from koinon_node.storage import DATA_DB, Store
from koinon_node.writer import Writer
from koinon_proto.errors import ResourceExhaustedError, StorageFullError, UnknownFateError
from tests.node.support import WAIT_S, with_writer

MIB = 1024 * 1024


def config_of(directory: Path, map_size_bytes: int = 64 * MIB, **changes: object) -> StoreConfig:
    return StoreConfig(directory=directory, map_size_bytes=map_size_bytes, **changes)  # type: ignore[arg-type]


def put(writer: Writer, key: bytes, value: bytes | None, after: int = 0) -> asyncio.Future[None]:
    size = len(key) + len(value or b"")
    return writer.submit(((DATA_DB, [key], [value]),), 1, size, after_group=after)


def test_writer_last_write_of_a_key_wins_within_and_across_groups(tmp_path: Path) -> None:
    async def use(writer: Writer, store: Store) -> None:
        futures = [put(writer, b"\0\0k", b"%d" % i) for i in range(20)]
        await asyncio.gather(*futures)
        assert store.get(b"\0\0k") == b"19"
        await asyncio.gather(put(writer, b"\0\0k", None), put(writer, b"\0\0j", b"x"))
        assert store.get(b"\0\0k") is None
        await asyncio.gather(put(writer, b"\0\0k", None), put(writer, b"\0\0k", b"back"))
        assert store.get(b"\0\0k") == b"back"

    with_writer(config_of(tmp_path), use, Limits(group_rows=3))


def test_writer_group_done_returns_when_the_group_is_durable(tmp_path: Path) -> None:
    async def use(writer: Writer, store: Store) -> None:
        future = put(writer, b"\0\0k", b"v")
        await asyncio.wait_for(writer.group_done(1), WAIT_S)
        assert future.done()
        assert store.get(b"\0\0k") == b"v"
        await writer.group_done(1)  # long gone

    with_writer(config_of(tmp_path), use)


def test_writer_queue_full_refuses_at_once_and_recovers(tmp_path: Path) -> None:
    async def use(writer: Writer, store: Store) -> None:
        writer.check_room(1000, 0, 0)  # an empty queue takes any one batch
        future = writer.submit(
            ((DATA_DB, [b"\0\0%d" % i for i in range(90)], [b"v"] * 90),), 90, 900
        )
        with pytest.raises(ResourceExhaustedError, match="rows waiting"):
            writer.check_room(20, 10, 10)
        with pytest.raises(ResourceExhaustedError, match="bytes waiting"):
            writer.check_room(2, 200, 10)
        await future
        writer.check_room(20, 200, 10)

    with_writer(config_of(tmp_path), use, Limits(pending_rows=100, pending_bytes=1000))


def test_store_full_refuses_puts_serves_reads_takes_deletes_and_recovers(tmp_path: Path) -> None:
    value = bytes(20_000)

    async def use(writer: Writer, store: Store) -> None:
        keys = []
        for number in range(10_000):
            key = b"\0\0%06d" % number
            try:
                writer.check_room(1, len(value), len(value))
            except StorageFullError:
                break
            await put(writer, key, value)
            keys.append(key)
        assert 50 < len(keys) < 2 * 2**20 // 10_000
        assert store.get(keys[0]) == value
        writer.check_room(1, 10, 0)  # deletes have a reserve
        for key in keys[: len(keys) // 2]:
            await put(writer, key, None)
        writer.check_room(1, len(value), len(value))
        await put(writer, b"\0\0again", value)
        assert store.get(b"\0\0again") == value

    with_writer(config_of(tmp_path, 2 * MIB), use)


def test_map_full_in_a_group_fails_only_the_ticket_without_room(tmp_path: Path) -> None:
    async def use(writer: Writer, store: Store) -> None:
        huge = [bytes(MIB)] * 40  # more than map and reserve together
        small = put(writer, b"\0\0small", b"v")
        big = writer.submit(((DATA_DB, [b"\0\0big%d" % i for i in range(40)], list(huge)),), 40, 0)
        builds_on_big = put(writer, b"\0\0big0", b"changed", after=1)
        other = put(writer, b"\0\0other", b"v")
        results = await asyncio.gather(small, big, builds_on_big, other, return_exceptions=True)
        assert [type(r) for r in results] == [
            type(None),
            StorageFullError,
            StorageFullError,
            type(None),
        ]
        assert store.get(b"\0\0big0") is None
        assert store.get(b"\0\0other") == b"v"

    with_writer(config_of(tmp_path, MIB), use)


def test_disk_full_fails_that_write_and_recovers_when_there_is_room(tmp_path: Path) -> None:
    """The file size limit of a process stands in for a full disk."""

    async def use(writer: Writer, store: Store) -> None:
        await put(writer, b"\0\0first", b"v")
        size = (tmp_path / "data.mdb").stat().st_size
        limits = resource.prlimit(writer.process_id, resource.RLIMIT_FSIZE)
        resource.prlimit(writer.process_id, resource.RLIMIT_FSIZE, (size + 64_000, limits[1]))
        with pytest.raises(StorageFullError):
            await put(writer, b"\0\0big", bytes(MIB))
        await put(writer, b"\0\0small", b"v")
        assert store.get(b"\0\0first") == b"v"
        await put(writer, b"\0\0first", None)
        resource.prlimit(writer.process_id, resource.RLIMIT_FSIZE, limits)
        await put(writer, b"\0\0big", bytes(MIB))
        assert store.get(b"\0\0big") == bytes(MIB)
        assert store.get(b"\0\0first") is None

    with_writer(config_of(tmp_path), use)


def test_writer_process_killed_leaves_fates_unknown_and_tells_the_node(tmp_path: Path) -> None:
    async def run() -> None:
        lost: list[str] = []
        store = Store(config_of(tmp_path))
        writer = Writer(store, PendingWrites(), "n1", Limits(), lost.append)
        await writer.start()
        await put(writer, b"\0\0k", b"v")
        os.kill(writer.process_id, signal.SIGSTOP)
        future = put(writer, b"\0\0l", b"v")
        await asyncio.sleep(0)
        os.kill(writer.process_id, signal.SIGKILL)
        with pytest.raises(UnknownFateError):
            await asyncio.wait_for(future, WAIT_S)
        assert lost == ["the writer process ended"]
        with pytest.raises(UnknownFateError):
            await put(writer, b"\0\0m", b"v")
        assert not await writer.stop()
        store.close(clean=False)

    asyncio.run(run())


@pytest.mark.parametrize("durability", ["commit", "interval"])
def test_writer_of_a_killed_node_keeps_what_was_acknowledged(
    tmp_path: Path, durability: str
) -> None:
    program = textwrap.dedent(
        """
        import asyncio, sys
        from pathlib import Path
        from koinon_node.config import Limits, StoreConfig
        from koinon_node.core.replica import PendingWrites
        from koinon_node.storage import DATA_DB, Store
        from koinon_node.writer import Writer

        async def main():
            config = StoreConfig(
                directory=Path(sys.argv[1]), map_size_bytes=64 << 20, durability=sys.argv[2]
            )
            store = Store(config)
            writer = Writer(store, PendingWrites(), "n1", Limits(), print)
            await writer.start()

            async def work(worker):
                for n in range(10**9):
                    key = b"\\0\\0%d-%d" % (worker, n)
                    await writer.submit(((DATA_DB, [key], [b"v"]),), 1, 10)
                    print(key[2:].decode(), flush=True)

            await asyncio.gather(*(work(n) for n in range(8)))

        asyncio.run(main())
        """
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path), durability], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    acknowledged = [process.stdout.readline() for _ in range(500)]
    process.kill()
    acknowledged += process.stdout.read().splitlines(keepends=True)
    process.wait(WAIT_S)
    with Store(config_of(tmp_path)) as store:  # waits until the old writer has let go
        whole = [line.strip() for line in acknowledged if line.endswith(b"\n")]
        assert len(whole) >= 500
        assert [key for key in whole if store.get(b"\0\0" + key) is None] == []
