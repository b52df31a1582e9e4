"""The data directory: made, opened again, and refused when anything in it is not right."""

from __future__ import annotations

import errno
import itertools
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import lmdb
import pytest

from koinon_node.core.formats import records
from koinon_node.core.formats.records import EpochStart, PartitionEpochs
from koinon_node.core.replication.copies import CopyState
from koinon_node.storage import directory as files
from koinon_node.storage.environment import DATA_DB, PARTITIONS_DB
from koinon_node.storage.opened_store import COPIED_WHILE_OPEN
from koinon_node.storage.store import Store
from koinon_node.storage.writer import Writer
from koinon_node.store_config import Durability, StoreConfig
from koinon_proto.contract.cluster_errors import DataDirectoryError
from koinon_proto.contract.errors import ConfigurationError
from koinon_proto.contract.table import first_sequence
from tests.kit.waiting import until
from tests.node.kit.scripted_primary import PARTITIONS, Rig, ScriptedPrimary, a_row, a_table, follow
from tests.node.kit.support import with_writer


def config_of(directory: Path, **changes: object) -> StoreConfig:
    return StoreConfig(directory=directory, map_size_bytes=8 << 20, **changes)  # type: ignore[arg-type]


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """A store with some records, closed clean."""
    directory = tmp_path / "n1"

    async def fill(writer: Writer, store: Store) -> None:
        keys = [records.head_of(i % 4) + b"key%05d" % i for i in range(2000)]
        values: list[bytes | None] = [records.encode_record(i, bytes(100)) for i in range(2000)]
        await writer.submit(((DATA_DB, keys, values),), 2000, 0)
        epochs = records.encode_epochs(records.PartitionEpochs(primary_epoch=7))
        await writer.submit(((PARTITIONS_DB, [records.epochs_key(3)], [epochs]),), 1, 0)
        await writer.put_meta({b"cluster_id": "c1", b"node_epoch": "5"})

    with_writer(config_of(directory), fill)
    return directory


def test_store_reopened_has_its_records_identity_and_epochs(filled: Path) -> None:
    with Store(config_of(filled)) as store:
        assert store.count() == 2000
        identity = store.identity()
        assert (identity.cluster_id, identity.node_epoch) == ("c1", 5)
        assert identity.store_id == files.read_identity(filled)
        assert store.seen_epochs[3] == 7
        assert store.get(records.head_of(1) + b"key00001") == records.encode_record(1, bytes(100))
        missing = records.head_of(1) + b"nothing"
        assert store.get(missing) is None
        assert store.get_many([missing]) == []


def test_scan_pages_resume_by_key_and_stay_in_partition_and_prefix(filled: Path) -> None:
    with Store(config_of(filled)) as store:
        seen, after = [], b""
        while True:
            rows, more = store.scan(1, b"key000", after, rows_max=7, bytes_max=1 << 20)
            seen += [key for key, _ in rows]
            if not more:
                break
            after = rows[-1][0][records.KEY_AT :]
        expected = [records.head_of(1) + b"key%05d" % i for i in range(1, 100, 4)]
        assert seen == expected
        rows, more = store.scan(1, b"", b"", rows_max=1000, bytes_max=300)
        assert more
        assert len(rows) <= 4


def test_scan_from_a_key_and_backwards_returns_what_a_sorted_list_has(tmp_path: Path) -> None:
    names = [b"a", b"a\x00", b"ab", b"b", b"b\xff", b"b\xff\xff", b"c", b"\xff", b"\xff\xff"]
    parts = [b"", b"a", b"b\xff", b"bb", b"d", b"\xff", b"\xff\xff\xff"]
    with Store(config_of(tmp_path)) as store:
        with store.env.begin(store.databases[DATA_DB], write=True) as txn:
            for partition_id in (0, 1, 255, 256):
                for name in names:
                    txn.put(records.head_of(partition_id) + name, records.encode_record(1, b"v"))
        for partition_id, prefix, start, reverse in itertools.product(
            (0, 1, 255, 256), parts, parts, (False, True)
        ):
            wanted = [
                name
                for name in sorted(names, reverse=reverse)
                if name.startswith(prefix)
                and (not start or (name <= start if reverse else name >= start))
            ]
            found, after, more = [], b"", True
            while more:
                rows, more = store.scan(
                    partition_id, prefix, after, 2, 1 << 20, start=start, reverse=reverse
                )
                found += [key for key, _ in rows]
                after = rows[-1][0][records.KEY_AT :] if rows else b""
            assert found == [records.head_of(partition_id) + name for name in wanted]


@pytest.mark.parametrize("small", [200, 700, 1500])
def test_pages_keep_their_bound_where_large_records_follow_small_ones(
    tmp_path: Path, small: int
) -> None:
    """As the chunks of a bulk load follow the users' records in every partition."""
    sizes = [1] * small + [4_000] * 300
    keys = [records.head_of(0) + b"%05d" % n for n in range(len(sizes))]
    bound = 64_000
    with Store(config_of(tmp_path)) as store:
        with store.env.begin(store.databases[DATA_DB], write=True) as txn:
            for key, size in zip(keys, sizes, strict=True):
                txn.put(key, records.encode_record(1, bytes(size)))

        def walked(read: Callable[[int], list[tuple[bytes, bytes]]]) -> None:
            found: list[bytes] = []
            while len(found) < len(keys):
                rows = read(len(found))
                assert rows
                assert sum(len(record) for _, record in rows) <= bound + 4_009
                found += [key for key, _ in rows]
            assert found == keys

        def after(done: int) -> bytes:
            return keys[done - 1][2:] if done else b""

        walked(lambda done: store.read_range(0, after(done), 0, 10_000, bound).rows)
        walked(lambda done: store.read_keys(0, keys[done:], bound).rows)
        walked(lambda done: store.scan(0, b"", after(done)[1:], 10_000, bound)[0])


@pytest.mark.parametrize("bound", [1_000, 20_000, 1 << 20])
@pytest.mark.parametrize("largest", [30, 2_000, 20_000])
def test_pages_above_a_sequence_leave_nothing_out(tmp_path: Path, largest: int, bound: int) -> None:
    """Whatever lies between the records that are wanted, and however their sizes change."""
    rng = random.Random(largest + bound)
    rows = [
        (records.head_of(0) + b"%05d" % n, rng.choice([1, 2, 3]), rng.randrange(largest))
        for n in range(400)
    ]
    with Store(config_of(tmp_path)) as store:
        with store.env.begin(store.databases[DATA_DB], write=True) as txn:
            for key, sequence, size in rows:
                txn.put(key, records.encode_record(sequence, bytes(size)))
        for sequence in (0, 1, 2, 3):
            found: list[bytes] = []
            page = store.read_range(0, b"", sequence, 10_000, bound)
            while not page.end:
                before = page.last_key
                found += [key for key, _ in page.rows]
                page = store.read_range(0, page.last_key, sequence, 10_000, bound)
                assert page.end or page.last_key > before
            found += [key for key, _ in page.rows]
            assert found == [key for key, given, _ in rows if given > sequence]


def test_directory_second_process_is_refused_by_name(filled: Path) -> None:
    with Store(config_of(filled)):
        with pytest.raises(DataDirectoryError, match="another node process") as caught:
            files.lock_directory(filled, wait_s=0.05)
        assert caught.value.path.endswith("in-use")


# --- the corruption matrix ---------------------------------------------------------------------


def truncate_half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def truncate_empty(path: Path) -> None:
    os.truncate(path, 0)


def fill_with_garbage(path: Path) -> None:
    path.write_bytes(random.Random(5).randbytes(path.stat().st_size))


def tear_last_byte(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-3] + b"zz\n")


def lose(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("identity", truncate_half),
        ("identity", truncate_empty),
        ("identity", fill_with_garbage),
        ("identity", tear_last_byte),
        ("identity", lose),
        ("data.mdb", truncate_half),
        ("data.mdb", truncate_empty),
        ("data.mdb", fill_with_garbage),
        ("data.mdb", lose),
    ],
)
def test_store_with_a_damaged_file_is_refused_and_the_file_named(
    filled: Path, name: str, damage: Callable[[Path], None]
) -> None:
    damage(filled / name)
    with pytest.raises(DataDirectoryError) as caught:
        Store(config_of(filled))
    assert caught.value.path == str(filled / name)
    assert not (filled / files.UNFINISHED).exists()


@pytest.mark.parametrize("damage", [truncate_half, truncate_empty, fill_with_garbage, lose])
def test_store_reader_table_damaged_is_made_anew(
    filled: Path, damage: Callable[[Path], None]
) -> None:
    damage(filled / files.LMDB_LOCK)
    with Store(config_of(filled)) as store:
        assert store.count() == 2000


@pytest.mark.parametrize("name", ["identity", "data.mdb"])
def test_store_with_a_file_of_another_store_is_refused(
    filled: Path, tmp_path: Path, name: str
) -> None:
    other = tmp_path / "other"
    Store(config_of(other)).close(clean=True)
    (other / name).replace(filled / name)
    with pytest.raises(DataDirectoryError, match="belongs to store"):
        Store(config_of(filled))


def test_store_with_a_foreign_lmdb_file_is_refused(filled: Path, tmp_path: Path) -> None:
    env = lmdb.open(str(tmp_path / "foreign"))
    with env.begin(write=True) as txn:
        txn.put(b"a", b"b")
    env.close()
    (tmp_path / "foreign" / "data.mdb").replace(filled / "data.mdb")
    with pytest.raises(DataDirectoryError, match="not a Koinon store"):
        Store(config_of(filled))


def test_directory_with_foreign_files_only_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(DataDirectoryError, match="not empty") as caught:
        Store(config_of(tmp_path))
    assert caught.value.path.endswith("thesis.txt")


def test_store_of_a_newer_format_is_refused_with_both_versions(filled: Path) -> None:
    env = lmdb.open(str(filled), max_dbs=8)
    with env.begin(write=True) as txn:
        txn.put(b"format_version", b"4", db=env.open_db(b"meta", txn=txn))
    env.close()
    with pytest.raises(DataDirectoryError, match="version 4; this build supports 2 and 3"):
        Store(config_of(filled))


def test_store_whose_making_was_cut_short_is_made_anew(tmp_path: Path) -> None:
    (tmp_path / files.UNFINISHED).touch()
    (tmp_path / files.DATA).write_bytes(b"half a file")
    with Store(config_of(tmp_path)) as store:
        assert store.count() == 0


def test_store_file_rightly_short_is_verified_and_opened(filled: Path) -> None:
    data = filled / files.DATA
    needed = data.stat().st_size
    env = lmdb.open(str(filled), max_dbs=8)
    last = env.info()["last_pgno"]
    env.close()
    files.check_not_truncated(filled, last, 4096)
    files.check_not_truncated(filled, last + 3, 4096)  # pages that no tree uses are missing
    assert data.stat().st_size == max(needed, (last + 4) * 4096)


# --- durability = interval ---------------------------------------------------------------------


def _run_state(directory: Path, state: str) -> None:
    """Let an earlier process have left this state, of the data file that is there."""
    state += f" {files.data_file_id(directory)}" * state.startswith("open")
    env = lmdb.open(str(directory), max_dbs=8)
    with env.begin(write=True) as txn:
        txn.put(b"run_state", state.encode(), db=env.open_db(b"meta", txn=txn))
    env.close()


@pytest.mark.parametrize(
    ("state", "trusted"),
    [
        ("clean", True),
        ("open commit another-boot", True),
        ("open interval another-boot", False),
        (f"open interval {files.boot_id()}", True),
    ],
)
def test_store_unclean_interval_on_another_boot_gives_up_its_identity(
    filled: Path, state: str, trusted: bool
) -> None:
    before = files.read_identity(filled)
    _run_state(filled, state)
    with Store(config_of(filled, durability="interval")) as store:
        assert (store.identity().store_id == before) is trusted
        assert store.count() == 2000
    with Store(config_of(filled)) as store:  # and keeps what it has become
        assert (store.identity().store_id == before) is trusted


def test_rule_3_copies_of_a_store_that_is_not_trusted_are_replaced_by_their_primarys(
    tmp_path: Path,
) -> None:
    """Of what was acknowledged any part may be missing, not only the newest."""
    begun = first_sequence(4)
    epochs = PartitionEpochs(primary_epoch=4, history=(EpochStart(4, 0),))
    rows = {key: records.encode_record(begun + n, b"v") for n, key in enumerate((b"a", b"b"), 1)}

    async def hold(rig: Rig) -> None:
        await rig.put(0, {b"b": rows[b"b"]}, through=begun + 2, epochs=epochs)  # "a" was lost

    follow(tmp_path, ScriptedPrimary(), hold)
    _run_state(tmp_path, "open interval another-boot")
    primary = ScriptedPrimary()
    primary.lead(0, 5, [(4, 0), (5, begun + 2)]).rows = rows

    async def back(rig: Rig) -> None:
        assert rig.copies.states[0] == CopyState.UNTRUSTED
        rig.on_table(a_table(1, [a_row(p, in_sync=False) for p in range(PARTITIONS)]))
        await until(lambda: 0 in primary.positions(), "it follows")
        assert primary.page_requests[0].snapshot
        assert set(rig.rows(0)) == {b"a", b"b"}
        assert rig.copies.states[0] == CopyState.USABLE
        assert rig.durable(0)[1] == CopyState.USABLE

    follow(tmp_path, primary, back)


def test_directory_that_cannot_be_synced_is_refused_before_anything_is_built_on_it(
    filled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier start may have changed its entries, and failed to make that durable."""

    def fail(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(DataDirectoryError, match="not synced"):
        Store(config_of(filled))
    monkeypatch.undo()
    with Store(config_of(filled)) as store:
        assert store.count() == 2000


@pytest.mark.parametrize("durability", ["commit", "interval"])
@pytest.mark.parametrize(
    ("open_when_copied", "deleted_first", "trusted"),
    [(True, False, False), (True, True, False), (False, False, True)],
)
def test_rule_3_copy_of_a_directory_that_was_open_gives_up_its_identity(
    filled: Path,
    tmp_path: Path,
    durability: Durability,
    open_when_copied: bool,
    deleted_first: bool,
    trusted: bool,
) -> None:
    """``deleted_first``: the copy may get the inode that the original had."""
    kept, config = tmp_path / "kept", config_of(filled, durability=durability)
    store_id = files.read_identity(filled)
    with Store(config):
        if open_when_copied:
            shutil.copytree(filled, kept)
    if not open_when_copied:
        shutil.copytree(filled, kept)
    if deleted_first:
        shutil.rmtree(filled)
    else:
        filled.rename(tmp_path / "away")
    shutil.copytree(kept, filled)
    with Store(config) as store:
        assert (store.identity().store_id == store_id) is trusted
        assert store.distrusted_for == ("" if trusted else COPIED_WHILE_OPEN)
    with Store(config) as store:  # and is trusted from then on, as the store that it has become
        assert store.distrusted_for == ""


def test_directory_that_is_moved_after_a_crash_stays_the_same_store(
    filled: Path, tmp_path: Path
) -> None:
    store_id = files.read_identity(filled)
    Store(config_of(filled)).close(clean=False)
    moved = tmp_path / "moved"
    filled.rename(moved)
    with Store(config_of(moved)) as store:
        assert store.identity().store_id == store_id


def test_failed_sync_that_cannot_be_noted_is_told_and_a_noted_one_of_a_whole_store_forgotten(
    filled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files.read_identity(filled)
    files.note_failed_sync(filled / "gone")
    assert "do not start a node on this directory again" in capsys.readouterr().err
    files.note_failed_sync(filled)
    for _ in range(2):
        with Store(config_of(filled)) as store:  # it was closed clean
            assert store.identity().store_id == before
        assert not files.noted_failed_sync(filled)


@pytest.mark.parametrize("identity_written", [False, True])
def test_store_change_of_identity_cut_short_is_completed(
    filled: Path, identity_written: bool
) -> None:
    before = files.read_identity(filled)
    _run_state(filled, "open interval another-boot")
    env = lmdb.open(str(filled), max_dbs=8)
    with env.begin(write=True) as txn:
        txn.put(b"next_store_id", b"e" * 32, db=env.open_db(b"meta", txn=txn))
    env.close()
    if identity_written:
        files.write_identity(filled, "e" * 32)
    with Store(config_of(filled)) as store:
        assert store.identity().store_id not in ("", before)
        assert store.identity().store_id == files.read_identity(filled)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"map_size_bytes": 5}, "map-size-bytes 5"),
        ({"durability": "never"}, "durability 'never'"),
        ({"sync_interval_ms": 0}, "sync-interval-ms 0"),
    ],
)
def test_config_out_of_bounds_is_refused_with_name_and_value(
    tmp_path: Path, changes: dict[str, object], names: str
) -> None:
    with pytest.raises(ConfigurationError, match=names):
        StoreConfig(directory=tmp_path, **changes)  # type: ignore[arg-type]


def test_verify_store_missing_pages_end_that_process_not_this_one(filled: Path) -> None:
    os.truncate(filled / files.DATA, 3 * 4096)
    result = subprocess.run(
        [sys.executable, "-m", "koinon_node.storage.verify_store", str(filled)],
        capture_output=True,
        check=False,
    )
    assert result.returncode != 0


def test_store_of_another_node_is_refused_with_both_names(tmp_path: Path) -> None:
    with Store(config_of(tmp_path)) as store:
        store.claim("n1")
        store.claim("n1")
    with (
        Store(config_of(tmp_path)) as store,
        pytest.raises(DataDirectoryError, match=r"'n1', not 'n2'"),
    ):
        store.claim("n2")
