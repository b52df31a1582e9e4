"""Group commit over the writer process: order, bounds, no room, and death."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest

from koinon_node.config import Limits
from koinon_node.core.formats import record_layout, records
from koinon_node.core.formats.writer_frames import LARGE_BYTES, Writes
from koinon_node.storage import directory as files
from koinon_node.storage import transactions
from koinon_node.storage.environment import DATA_DB, EXPIRY_DB, PARTITIONS_DB
from koinon_node.storage.store import Store
from koinon_node.storage.writer import Writer
from koinon_node.storage.writer_channel import ProcessChannel
from koinon_node.storage.writer_process import WriterLoop
from koinon_node.store_config import StoreConfig
from koinon_proto.contract.cluster_errors import DataDirectoryError
from koinon_proto.contract.errors import ResourceExhaustedError, StorageFullError, UnknownFateError
from tests.kit.waiting import wait_until
from tests.node.kit.groups import lone_writer
from tests.node.kit.support import MIB, WAIT_S, config_of, framed, with_writer


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


@pytest.mark.parametrize("size", [LARGE_BYTES - 100, LARGE_BYTES, 300_000])
def test_large_values_come_to_the_store_as_they_were(tmp_path: Path, size: int) -> None:
    """They go to the process beside their group. Of what expires and is written twice in a group,
    the entry of the last stays.
    """

    async def use(writer: Writer, store: Store) -> None:
        rows = [records.encode_record(1, os.urandom(size), at_ms) for at_ms in (1_000, 2_000, 0)]
        entries = [record_layout.expiry_key(at_ms, b"\0\0k") for at_ms in (1_000, 2_000)]
        tickets: list[Writes] = [
            ((DATA_DB, [b"\0\0k"], [row]), (EXPIRY_DB, [entry], [b""]))
            for row, entry in zip(rows, entries, strict=False)
        ]
        tickets.append(((DATA_DB, [b"\0\0a", b"\0\0j", b"\0\0z"], [b"small", rows[2], None]),))
        await asyncio.gather(*(writer.submit(writes, 1, 2 * size) for writes in tickets))
        assert [store.get(b"\0\0" + key) for key in (b"a", b"j", b"k", b"z")] == [
            *(b"small", rows[2], rows[1], None)
        ]
        assert store.expired_entries(b"", 9_000, 9)[0] == [entries[1]]

    with_writer(config_of(tmp_path), use)


def test_writer_group_done_returns_when_the_group_is_durable(tmp_path: Path) -> None:
    async def use(writer: Writer, store: Store) -> None:
        group = writer.pending.open
        future = put(writer, b"\0\0k", b"v")
        await asyncio.wait_for(writer.group_done(group), WAIT_S)
        assert future.done()
        assert store.get(b"\0\0k") == b"v"
        await writer.group_done(group)  # long gone

    with_writer(config_of(tmp_path), use)


def test_group_that_was_ended_takes_nothing_more(tmp_path: Path) -> None:
    async def use(writer: Writer, store: Store) -> None:
        writer.end_group()  # nothing is queued: nothing to end
        first = writer.pending.open.number
        futures = [put(writer, b"\0\0k", b"1")]
        writer.end_group()
        assert writer.pending.open.number == first + 1
        futures.append(put(writer, b"\0\0k", b"2"))
        await asyncio.gather(*futures)
        assert store.get(b"\0\0k") == b"2"

    with_writer(config_of(tmp_path), use)


def test_rows_after_the_last_key_fill_their_pages(tmp_path: Path) -> None:
    """Put one by one, of 1.1 KB, two would be on each page: a node that joins gets its rows in
    order.
    """

    async def use(writer: Writer, store: Store) -> None:
        for start in range(0, 900, 300):
            keys = [b"\0\0%04d" % number for number in range(start, start + 300)]
            await writer.submit(((DATA_DB, keys, [bytes(1_100)] * 300),), 300, 330_000)
        with store.env.begin() as txn:
            pages = txn.stat(store.databases[DATA_DB])["leaf_pages"]
        assert pages == 900 / 3

    with_writer(config_of(tmp_path), use)


def test_group_may_overwrite_delete_and_append(tmp_path: Path) -> None:
    async def use(writer: Writer, store: Store) -> None:
        for key in (b"\0\0b", b"\0\0d", b"\0\0f"):
            await put(writer, key, b"old")
        changes = {b"a": b"1", b"b": b"2", b"d": None, b"f": None, b"e": b"3", b"g": b"4"}
        await asyncio.gather(*[put(writer, b"\0\0" + k, v) for k, v in changes.items()])
        found = [(k[-1:], store.get(k)) for k in store.scan_keys(0, b"", b"", 100)]
        assert found == [(b"a", b"1"), (b"b", b"2"), (b"e", b"3"), (b"g", b"4")]

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


def test_writer_promised_room_is_nobody_elses_until_it_is_redeemed(tmp_path: Path) -> None:
    """A batch that is queued in steps is taken whole, so that the next is refused at once."""

    async def use(writer: Writer, store: Store) -> None:
        writer.promise(90, 900, 900)
        with pytest.raises(ResourceExhaustedError, match="rows waiting"):
            writer.promise(20, 10, 10)
        with pytest.raises(ResourceExhaustedError, match="bytes waiting"):
            writer.promise(2, 200, 10)
        writer.redeem(90, 900)
        writer.promise(20, 200, 10)

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


def test_loose_ticket_without_room_fails_alone(tmp_path: Path) -> None:
    """A ticket that only tidies up fails alone: its partition's writes and those behind go on."""

    async def use(writer: Writer, store: Store) -> None:
        progress: list[bytes | None] = [b"\1" + bytes(16)]
        values: list[bytes | None] = [bytes(MIB)] * 40
        metadata = (PARTITIONS_DB, [records.progress_key(0)], progress)
        huge = (DATA_DB, [b"\0\0big%d" % i for i in range(40)], values)
        group = writer.pending.open.number
        loose = writer.submit((huge, metadata), 40, 0, chained=True, loose=True)
        behind = writer.submit(
            ((DATA_DB, [b"\0\0small"], [b"v"]), metadata), 1, 1, chained=True, after_group=group
        )
        with pytest.raises(StorageFullError):
            await loose
        await behind
        await put(writer, b"\0\0other", b"v", after=group)
        assert store.get(b"\0\0small") == store.get(b"\0\0other") == b"v"

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


def test_rule_3_error_of_the_disk_other_than_full_ends_the_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failed fsync it is not known what is on the disk: the process ends, and so does the
    node (see test_node_whose_writer_dies_stops_loudly_with_1).
    """
    Store(config_of(tmp_path)).close(clean=True)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        loop = WriterLoop(theirs, config_of(tmp_path))

        def fail(*_: object) -> None:
            raise lmdb.Error(f"mdb_txn_commit: {os.strerror(errno.EIO)}")

        monkeypatch.setattr(transactions, "_put_sorted", fail)
        ours.sendall(framed(1, False, [(0, False, ((DATA_DB, [b"\0\0k"], [b"v"]),))]))
        ours.shutdown(socket.SHUT_WR)
        with pytest.raises(lmdb.Error):
            loop.run()
        loop.environment.close()
        theirs.close()
        assert not ours.recv(1)  # nothing was answered


@pytest.mark.parametrize("durability", ["commit", "interval"])
def test_rule_3_store_whose_sync_failed_is_not_trusted_in_the_same_boot_either(
    tmp_path: Path, durability: str
) -> None:
    """The kernel says once that it could not write, and counts what it may have dropped as clean.
    With a sync before each acknowledgement nothing that was acknowledged is among that.
    """
    with Store(config_of(tmp_path)) as store:
        before = store.identity().store_id
    done = subprocess.run(
        [sys.executable, "-m", "tests.node.kit.failing_syncs", str(tmp_path), durability],
        capture_output=True,
        timeout=WAIT_S,
        check=True,
    )
    assert b"Input/output error" in done.stderr
    ends = {"commit": (b"UnknownFateError\n", True), "interval": (b"acknowledged\n", False)}
    printed, trusted = ends[durability]
    assert done.stdout == printed
    with Store(config_of(tmp_path)) as store:
        after = store.identity().store_id
        assert (after == before) is trusted
    with Store(config_of(tmp_path)) as store:  # and stays what it has become
        assert store.identity().store_id == after


async def test_writer_process_killed_leaves_fates_unknown_and_reports_it(
    tmp_path: Path,
) -> None:
    lost: list[str] = []
    store = Store(config_of(tmp_path))
    writer = lone_writer(store, lost.append)
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


def test_writer_that_does_not_end_when_asked_to_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("koinon_node.storage.writer_channel._STOP_TIMEOUT_S", 0.1)

    async def run() -> None:
        store = Store(config_of(tmp_path))
        writer = lone_writer(store, lambda reason: None)
        await writer.start()
        await put(writer, b"\0\0k", b"v")
        os.kill(writer.process_id, signal.SIGSTOP)
        assert not await asyncio.wait_for(writer.stop(), WAIT_S)
        store.close(clean=False)

    asyncio.run(run())
    os.close(files.lock_directory(tmp_path))  # it is free again


def test_disk_that_hangs_while_its_node_stops_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("koinon_node.storage.writer._STOP_TIMEOUT_S", 0.05)

    async def use(writer: Writer, store: Store) -> None:
        await put(writer, b"\0\0a", b"kept")
        os.kill(writer.process_id, signal.SIGSTOP)
        hung = put(writer, b"\0\0b", b"v")
        assert not await asyncio.wait_for(writer.stop(), WAIT_S)
        assert not hung.done()
        assert store.get(b"\0\0a") == b"kept"

    with_writer(config_of(tmp_path), use)


def test_ticket_that_builds_on_a_group_of_which_some_was_refused_is_refused(
    tmp_path: Path,
) -> None:
    """Nothing of it is sent: what it looked at may not be what is stored."""

    async def use(writer: Writer, store: Store) -> None:
        group = writer.pending.open.number
        refused = writer.submit(
            ((DATA_DB, [b"\0\0a"], [b"v"]),), 1, 1, touched=np.array([0], np.uint32)
        )
        mask = np.zeros(65_536, np.bool_)
        mask[0] = True
        refusal = StorageFullError(node_id="n1", reason="handed over")
        writer.pending.refuse_queued(mask, refusal)
        builds_on_it = put(writer, b"\0\0b", b"v", after=group)
        other = put(writer, b"\0\1c", b"v")
        for ticket in (refused, builds_on_it):
            with pytest.raises(StorageFullError):
                await ticket
        await other
        assert store.get(b"\0\0a") is store.get(b"\0\0b") is None

    with_writer(config_of(tmp_path), use)


@pytest.mark.parametrize("durability", ["commit", "interval"])
def test_writer_of_a_killed_node_keeps_what_was_acknowledged(
    tmp_path: Path, durability: str
) -> None:
    program = textwrap.dedent(
        """
        import asyncio, sys
        from pathlib import Path
        from koinon_node.store_config import StoreConfig
        from koinon_node.storage.environment import DATA_DB
        from koinon_node.storage.store import Store
        from tests.node.kit.groups import lone_writer

        async def main():
            config = StoreConfig(
                directory=Path(sys.argv[1]), map_size_bytes=64 << 20, durability=sys.argv[2]
            )
            store = Store(config)
            writer = lone_writer(store, print)
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


@pytest.mark.parametrize(("durability", "synced"), [("commit", True), ("interval", False)])
def test_writer_syncs_data_and_head_at_each_commit_only_under_durability_commit(
    tmp_path: Path, durability: str, synced: bool
) -> None:
    config = config_of(tmp_path, durability=durability)
    with Store(config):
        pass
    ours, theirs = socket.socketpair()
    with ours, theirs:
        loop = WriterLoop(theirs, config)
        flags = loop.environment.flags()
        assert (flags["sync"], flags["metasync"]) == (synced, True)
        assert (flags["writemap"], flags["map_async"]) == (False, False)
        ours.close()
        loop.run()  # ends with the stream


async def test_writer_process_is_given_the_settings_of_the_store(tmp_path: Path) -> None:
    sent: list[Any] = []

    class Recorder(ProcessChannel):
        def send_frame(self, message: Any, large: Sequence[bytes] = ()) -> None:
            sent.append(message)
            super().send_frame(message, large)

    store = Store(config_of(tmp_path, sync_interval_ms=77))
    writer = lone_writer(store, lambda reason: None, channel=Recorder(store))
    await writer.start()
    store.close(clean=await writer.stop())
    assert StoreConfig(**{**sent[0], "directory": Path(sent[0]["directory"])}) == store.config


@pytest.mark.parametrize("urgent", [True, False])
def test_writer_by_interval_syncs_an_urgent_group_before_it_answers(
    tmp_path: Path, urgent: bool
) -> None:
    config = config_of(tmp_path, durability="interval", sync_interval_ms=60_000)
    with Store(config):
        pass
    events: list[str] = []
    ours, theirs = socket.socketpair()
    with ours, theirs:
        loop = RecordedLoop(theirs, config, events)
        ours.sendall(framed(1, urgent, [(0, False, ((DATA_DB, [b"\0\0k"], [b"v"]),))]))
        ours.shutdown(socket.SHUT_WR)
        loop.run()
    assert events == ["sync"] * urgent + ["answer", "sync"]  # the last at its end


class RecordedLoop(WriterLoop):
    """A writer loop that records when it syncs and when it answers."""

    def __init__(self, connection: socket.socket, config: StoreConfig, events: list[str]) -> None:
        super().__init__(connection, config)
        self._events = events
        self.environment = _RecordedEnvironment(self.environment, events)  # type: ignore[assignment]

    def _send(self, answer: Any) -> None:
        self._events.append("answer")
        super()._send(answer)


class _RecordedEnvironment:
    def __init__(self, environment: Any, events: list[str]) -> None:
        self._environment = environment
        self._events = events

    def sync(self, force: bool) -> None:
        assert force
        self._events.append("sync")
        self._environment.sync(force)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environment, name)


async def test_directory_of_a_dead_node_is_locked_until_its_writer_is_gone(
    tmp_path: Path,
) -> None:
    """The node lets go of its lock, as its death would; the writer is stopped and lives on.

    (A real death of the node kills the writer too, but not at once: not while it is in the kernel.)
    """
    store = Store(config_of(tmp_path))
    writer = lone_writer(store, lambda reason: None)
    await writer.start()
    await put(writer, b"\0\0k", b"v")
    os.kill(writer.process_id, signal.SIGSTOP)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, store.lock_descriptor)
    os.close(nothing)
    with pytest.raises(DataDirectoryError, match="another node process"):
        files.lock_directory(tmp_path, wait_s=0.1)
    os.kill(writer.process_id, signal.SIGKILL)
    await writer.stop()
    os.close(files.lock_directory(tmp_path))
    store.close(clean=False)


def test_writer_stopped_when_its_node_is_killed_is_gone_before_the_directory_opens(
    tmp_path: Path,
) -> None:
    program = textwrap.dedent(
        """
        import asyncio, sys
        from pathlib import Path
        from koinon_node.store_config import StoreConfig
        from koinon_node.storage.store import Store
        from tests.node.kit.groups import lone_writer

        async def main():
            store = Store(StoreConfig(directory=Path(sys.argv[1]), map_size_bytes=64 << 20))
            writer = lone_writer(store, print)
            await writer.start()
            await writer.put_meta({b"node_epoch": "1"})
            print(writer.process_id, flush=True)
            await asyncio.Event().wait()

        asyncio.run(main())
        """
    )
    node = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE)
    assert node.stdout is not None
    writer = Path(f"/proc/{int(node.stdout.readline())}")
    lock = (tmp_path / files.IN_USE).stat()
    held = [d.stat() for d in (writer / "fd").iterdir() if d.exists()]
    assert (lock.st_dev, lock.st_ino) in [(one.st_dev, one.st_ino) for one in held]
    os.kill(int(writer.name), signal.SIGSTOP)
    node.kill()
    node.wait(WAIT_S)
    with Store(config_of(tmp_path)) as store:
        wait_until(lambda: not _runs(writer), "the old writer is gone")
        assert store.identity().node_epoch == 1


def _runs(process: Path) -> bool:
    try:
        state = (process / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"
