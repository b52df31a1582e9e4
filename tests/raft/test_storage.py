"""The promises of every Raft storage, and the directories that LMDB's refuses to open."""

from __future__ import annotations

import errno
import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from koinon_coordinator.core.raft import (
    Configuration,
    Entry,
    EntryKind,
    HardState,
    LogPosition,
    Snapshot,
    SnapshotWrite,
)
from koinon_coordinator.raft import (
    LmdbRaftStorage,
    RaftStorage,
    StorageFailedError,
)
from koinon_coordinator.raft import (
    storage as storage_module,
)
from koinon_proto.contract.cluster_errors import DataDirectoryError
from koinon_proto.contract.errors import UnsupportedVersionError

from .group import addresses, entries_of
from .memory import MemoryRaftStorage

CONFIGURATION = Configuration(voters=addresses("abc"))
Opener = Callable[[], RaftStorage]


def lmdb_storage(directory: Path, **settings: int) -> LmdbRaftStorage:
    sizes: dict[str, Any] = {"map_bytes": 1 << 20, **settings}
    return LmdbRaftStorage(directory, "a", CONFIGURATION, **sizes)


@pytest.fixture(params=["memory", "lmdb"])
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opener]:
    """Opens the storage, closing it first if it is open: what is there must have survived."""
    if request.param == "memory":
        memory = MemoryRaftStorage(CONFIGURATION)
        yield lambda: memory
        return
    opened: list[LmdbRaftStorage] = []

    def open_again() -> RaftStorage:
        if opened:
            opened.pop().close()
        opened.append(lmdb_storage(tmp_path / "a"))
        return opened[0]

    yield open_again
    for storage in opened:
        storage.close()


def save(
    storage: RaftStorage,
    *,
    hard_state: HardState | None = None,
    snapshot: Snapshot | None = None,
    base: LogPosition | None = None,
    installed: bool = False,
    entries: tuple[Entry, ...] = (),
) -> None:
    write = None
    if snapshot is not None:
        at = base or LogPosition(snapshot.index, snapshot.term)
        write = SnapshotWrite(snapshot=snapshot, base=at, installed=installed)
    storage.save(hard_state=hard_state, snapshot_write=write, entries=entries)


# -- the contract


def test_storage_new_begins_with_the_configuration(reopen: Opener) -> None:
    for _ in range(2):
        state = reopen().load()
        assert state.hard_state == HardState()
        assert state.snapshot == Snapshot.of(0, 0, CONFIGURATION, b"")
        assert state.base == (0, 0)
        assert state.entries == ()


def test_storage_reopened_holds_what_was_saved(reopen: Opener) -> None:
    storage = reopen()
    entries = entries_of([1, 1, 3])
    save(storage, hard_state=HardState(term=3, vote="b"), entries=entries)
    store_id = storage.store_id
    storage = reopen()
    assert storage.store_id == store_id
    assert storage.load().entries == entries
    assert storage.load().hard_state == HardState(term=3, vote="b")


def test_storage_vote_can_be_cleared(reopen: Opener) -> None:
    save(reopen(), hard_state=HardState(term=3, vote="b"))
    save(reopen(), hard_state=HardState(term=4, vote=None))
    assert reopen().load().hard_state == HardState(term=4, vote=None)


def test_storage_entries_replace_the_tail_from_their_first(reopen: Opener) -> None:
    storage = reopen()
    save(storage, entries=entries_of([1, 1, 1, 1, 1]))
    save(storage, entries=entries_of([2], first=3))
    assert [e.term for e in reopen().load().entries] == [1, 1, 2]
    save(reopen(), entries=entries_of([2], first=4))
    assert [e.term for e in reopen().load().entries] == [1, 1, 2, 2]


def test_storage_own_snapshot_keeps_entries_after_its_base(reopen: Opener) -> None:
    storage = reopen()
    save(storage, entries=entries_of([1] * 10))
    snapshot = Snapshot.of(7, 1, CONFIGURATION, b"state")
    save(storage, snapshot=snapshot, base=LogPosition(5, 1), entries=entries_of([2], first=11))
    state = reopen().load()
    assert state.snapshot == snapshot
    assert state.base == (5, 1)
    assert [e.index for e in state.entries] == [6, 7, 8, 9, 10, 11]


def test_storage_installed_snapshot_replaces_the_whole_log(reopen: Opener) -> None:
    storage = reopen()
    save(storage, entries=entries_of([1] * 10))
    snapshot = Snapshot.of(7, 2, CONFIGURATION, b"state")
    save(storage, snapshot=snapshot, installed=True, entries=entries_of([3], first=8))
    state = reopen().load()
    assert (state.snapshot, state.base) == (snapshot, (7, 2))
    assert [(e.index, e.term) for e in state.entries] == [(8, 3)]
    save(reopen(), entries=entries_of([3], first=9))
    assert [e.index for e in reopen().load().entries] == [8, 9]


def test_storage_snapshot_of_many_rows_comes_back_whole(reopen: Opener) -> None:
    data = random.Random(1).randbytes(3 * storage_module.SNAPSHOT_ROW_BYTES + 17)
    save(reopen(), snapshot=Snapshot.of(1, 1, CONFIGURATION, data), installed=True)
    assert reopen().load().snapshot.data == data
    save(reopen(), snapshot=Snapshot.of(2, 1, CONFIGURATION, b"small"), installed=True)
    assert reopen().load().snapshot.data == b"small"


def test_storage_entry_kinds_and_bytes_come_back(reopen: Opener) -> None:
    entries = (
        Entry(1, 1, EntryKind.NOOP, b""),
        Entry(2, 1, EntryKind.CONFIGURATION, CONFIGURATION.encode()),
        Entry(3, 2**40, EntryKind.COMMAND, bytes(range(256))),
    )
    save(reopen(), entries=entries)
    assert reopen().load().entries == entries


def test_storage_pins_are_kept(reopen: Opener) -> None:
    storage = reopen()
    assert storage.pinned_stores() == {}
    storage.pin_store("b", "one")
    storage.pin_store("c", "two")
    assert reopen().pinned_stores() == {"b": "one", "c": "two"}


def test_storage_twins_agree_on_any_history(tmp_path: Path) -> None:
    rng = random.Random(5)
    memory, lmdb = MemoryRaftStorage(CONFIGURATION), lmdb_storage(tmp_path / "a")
    base = last = 0
    for step in range(1, 120):
        state = memory.load()
        entries: tuple[Entry, ...] = ()
        snapshot, at, installed = None, None, False
        choice = rng.random()
        if choice < 0.15 and last > base:
            index = rng.randrange(base, last) + 1
            new_base = rng.randrange(base, index + 1)
            term = next((e.term for e in state.entries if e.index == new_base), state.base.term)
            snapshot = Snapshot.of(index, step, CONFIGURATION, rng.randbytes(50))
            base, at = new_base, LogPosition(new_base, term)
        elif choice < 0.25:
            base = last = last + rng.randrange(1, 5)
            snapshot = Snapshot.of(base, step, CONFIGURATION, rng.randbytes(50))
            at, installed = LogPosition(base, step), True
        if rng.random() < 0.8:
            first = rng.randrange(base, last + 1) + 1
            entries = entries_of([step] * rng.randrange(1, 6), first)
            last = entries[-1].index
        vote = rng.choice([None, "a", "b"])
        for storage in (memory, lmdb):
            save(
                storage,
                hard_state=HardState(term=step, vote=vote),
                snapshot=snapshot,
                base=at,
                installed=installed,
                entries=entries,
            )
        assert lmdb.load() == memory.load()
        if rng.random() < 0.1:
            lmdb.close()
            lmdb = lmdb_storage(tmp_path / "a")
    lmdb.close()


# -- LMDB: room


def test_lmdb_full_map_grows(tmp_path: Path) -> None:
    storage = lmdb_storage(tmp_path / "a", map_bytes=1 << 17)
    entries = tuple(Entry(i, 1, EntryKind.COMMAND, b"x" * 1000) for i in range(1, 1001))
    save(storage, entries=entries)
    storage.close()
    storage = lmdb_storage(tmp_path / "a", map_bytes=1 << 17)
    assert storage.load().entries == entries
    storage.close()


def test_lmdb_map_at_its_limit_is_an_error_that_names_it(tmp_path: Path) -> None:
    storage = lmdb_storage(tmp_path / "a", map_bytes=1 << 17, map_bytes_max=1 << 18)
    entries = tuple(Entry(i, 1, EntryKind.COMMAND, b"x" * 1000) for i in range(1, 1001))
    with pytest.raises(StorageFailedError, match="map_bytes_max"):
        save(storage, entries=entries)
    assert storage.load().entries == (), "nothing is half written"
    storage.close()


# -- LMDB: directories that are not as they should be


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A closed directory with some content."""
    path = tmp_path / "a"
    storage = lmdb_storage(path)
    save(storage, hard_state=HardState(term=2, vote="a"), entries=entries_of([1] * 200))
    storage.close()
    return path


def refusal(directory: Path, named: str) -> str:
    with pytest.raises(DataDirectoryError) as caught:
        lmdb_storage(directory).load()
    assert Path(caught.value.path).name == named
    return caught.value.reason


def test_lmdb_directory_in_use_is_refused(tmp_path: Path) -> None:
    storage = lmdb_storage(tmp_path / "a")
    assert "in use" in refusal(tmp_path / "a", "lock")
    storage.close()
    lmdb_storage(tmp_path / "a").close()


def test_lmdb_what_is_found_is_made_durable_before_anybody_acts_on_it(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have been left by a process that a failed sync ended: it is seen, and not stored."""
    synced: list[Path] = []
    monkeypatch.setattr(storage_module, "_fsync_directory", synced.append)
    storage = lmdb_storage(directory)
    seen = storage._environment.info()["last_txnid"]
    storage.load()
    assert storage._environment.info()["last_txnid"] == seen + 1  # a commit, which syncs
    assert synced == [directory]
    storage.close()

    def fail(_: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(storage_module, "_fsync_directory", fail)
    assert "durable" in refusal(directory, "data.mdb")


def test_lmdb_read_only_reads_what_is_there_and_writes_nothing(directory: Path) -> None:
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    storage = LmdbRaftStorage(directory, "a", CONFIGURATION, read_only=True)
    read = storage.load()
    with pytest.raises(DataDirectoryError, match="in use"):
        lmdb_storage(directory)
    storage.close()
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before
    writer = lmdb_storage(directory)
    assert read == writer.load()
    writer.close()


@pytest.mark.parametrize("cut_short", [False, True])
def test_lmdb_read_only_makes_no_member_where_there_is_none(
    directory: Path, tmp_path: Path, cut_short: bool
) -> None:
    path = tmp_path / "none"
    path.mkdir()
    if cut_short:
        identity = json.loads((directory / "identity.json").read_text())
        (path / "identity.json").write_text(json.dumps({**identity, "initializing": True}))
    before = list(path.iterdir())
    with pytest.raises(DataDirectoryError, match="cut short" if cut_short else "no member's"):
        LmdbRaftStorage(path, "a", CONFIGURATION, read_only=True)
    assert list(path.iterdir()) == before


def test_lmdb_refused_directory_is_not_left_locked(directory: Path) -> None:
    with pytest.raises(DataDirectoryError):
        LmdbRaftStorage(directory, "other", CONFIGURATION)
    lmdb_storage(directory).close()


def test_lmdb_another_members_directory_is_refused(directory: Path) -> None:
    with pytest.raises(DataDirectoryError, match="'a', not to 'b'"):
        LmdbRaftStorage(directory, "b", CONFIGURATION)


@pytest.mark.parametrize("size", [0, 100, 4096, 8192, 12288])
def test_lmdb_truncated_data_is_refused(directory: Path, size: int) -> None:
    with (directory / "data.mdb").open("r+b") as file:
        file.truncate(size)
    refusal(directory, "data.mdb")


def test_lmdb_garbage_is_refused(directory: Path) -> None:
    (directory / "data.mdb").write_bytes(random.Random(3).randbytes(1 << 20))
    refusal(directory, "data.mdb")


@pytest.mark.parametrize("page", range(16))
def test_lmdb_garbage_page_is_refused_or_was_not_in_use(directory: Path, page: int) -> None:
    content = bytearray((directory / "data.mdb").read_bytes())
    content[page * 4096 : (page + 1) * 4096] = random.Random(page).randbytes(4096)
    (directory / "data.mdb").write_bytes(content)
    entries: tuple[Entry, ...] = ()
    refused_file = ""
    try:
        storage = lmdb_storage(directory)
        try:
            entries = storage.load().entries
        finally:
            storage.close()
    except DataDirectoryError as error:
        refused_file = Path(error.path).name
    assert refused_file == "data.mdb" or len(entries) == 200


def test_lmdb_foreign_environment_is_refused(directory: Path, tmp_path: Path) -> None:
    other = LmdbRaftStorage(tmp_path / "other", "a", CONFIGURATION, map_bytes=1 << 20)
    other.close()
    (directory / "data.mdb").write_bytes((tmp_path / "other" / "data.mdb").read_bytes())
    assert "another store" in refusal(directory, "data.mdb")


def test_lmdb_missing_data_is_refused(directory: Path) -> None:
    (directory / "data.mdb").unlink()
    refusal(directory, "data.mdb")
    assert not (directory / "data.mdb").exists(), "it did not start empty"


def test_lmdb_missing_identity_is_refused(directory: Path) -> None:
    (directory / "identity.json").unlink()
    refusal(directory, "identity.json")


@pytest.mark.parametrize("text", ["", "not json", "[]", '{"kind": "koinon raft member"}'])
def test_lmdb_damaged_identity_is_refused(directory: Path, text: str) -> None:
    (directory / "identity.json").write_text(text)
    refusal(directory, "identity.json")


def test_lmdb_identity_of_another_kind_is_refused(directory: Path) -> None:
    document = json.loads((directory / "identity.json").read_text())
    (directory / "identity.json").write_text(json.dumps({**document, "kind": "something else"}))
    assert "something else" in refusal(directory, "identity.json")


def test_lmdb_unknown_format_version_is_refused_by_name(directory: Path) -> None:
    document = json.loads((directory / "identity.json").read_text())
    (directory / "identity.json").write_text(json.dumps({**document, "format_version": 99}))
    with pytest.raises(UnsupportedVersionError, match=r"identity\.json has version 99"):
        lmdb_storage(directory)


def test_lmdb_unknown_entry_version_is_refused_by_name(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_module, "ENTRY_FORMAT_VERSION", 2)
    storage = lmdb_storage(directory)
    with pytest.raises(UnsupportedVersionError, match=r"log entry 1 .* version 1"):
        storage.load()
    storage.close()


def test_lmdb_damaged_record_is_refused(directory: Path) -> None:
    path = directory / "data.mdb"
    content = bytearray(path.read_bytes())
    positions = [content.find(b"150 in 1"), content.rfind(b"150 in 1")]
    for position in positions:
        content[position : position + 3] = b"151"
    path.write_bytes(content)
    assert "log entry 150" in refusal(directory, "data.mdb")


def test_lmdb_start_cut_short_before_anything_was_promised_begins_again(directory: Path) -> None:
    path = directory / "identity.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "initializing": True}))
    (directory / "data.mdb").write_bytes(b"half")
    storage = lmdb_storage(directory)
    assert storage.load().entries == ()
    storage.close()
    assert json.loads(path.read_text())["initializing"] is False


def test_lmdb_write_after_a_failed_disk_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = lmdb_storage(tmp_path / "a")

    class Broken:
        def __getattr__(self, name: str) -> object:
            raise OSError(5, "Input/output error")

    environment = storage._environment
    monkeypatch.setattr(storage, "_environment", Broken())
    with pytest.raises(StorageFailedError, match="Input/output error"):
        save(storage, hard_state=HardState(term=1))
    monkeypatch.setattr(storage, "_environment", environment)
    storage.close()
