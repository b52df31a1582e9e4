"""Stores a member's durable state: term and vote, log, snapshot, peers' store ids.

`LmdbRaftStorage` is one LMDB environment in one directory. Every write is one transaction and
durable when it returns.

The directory holds
    identity.json   who it belongs to; says `initializing` until the environment is complete
    data.mdb        the environment; its file is always as long as its map, so that a truncated
                    one is recognised before a page that is not there is touched
    lock            held (flock) while a process uses the directory
and is refused, with the file's name, if any of these is not as it should be. An empty environment
is made only where there is neither an identity nor data, and never by a read-only caller.
"""

import contextlib
import fcntl
import json
import os
import struct
import uuid
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import lmdb

from koinon_coordinator.core.raft import (
    Configuration,
    ConfigurationFormatError,
    Entry,
    EntryKind,
    HardState,
    LogPosition,
    RestoredState,
    Snapshot,
    SnapshotWrite,
)
from koinon_coordinator.raft.errors import StorageFailedError
from koinon_proto.contract.cluster_errors import DataDirectoryError
from koinon_proto.contract.errors import UnsupportedVersionError
from koinon_proto.process import private_files

STORAGE_FORMAT_VERSION = 1
ENTRY_FORMAT_VERSION = 1
SNAPSHOT_FORMAT_VERSION = 1
SNAPSHOT_ROW_BYTES = 1 << 20

_ENTRY_HEADER = struct.Struct(">BBQI")  # format version, kind, term, CRC-32 of kind, term, data
_HARD_STATE = struct.Struct(">Q?")  # term, has a vote; the vote follows
_POSITION = struct.Struct(">QQ")
_SEAL = struct.Struct(">I")
_INDEX_KEY = struct.Struct(">Q")
_KIND_BY_NUMBER = {int(kind): kind for kind in EntryKind}
_IDENTITY_KIND = "koinon raft member"


class RaftStorage(Protocol):
    """Durable state of one member. Methods block; one thread calls them at a time."""

    @property
    def store_id(self) -> str:
        """A random id, made with the directory: another id means other data."""
        ...

    def load(self) -> RestoredState:
        """Return everything, as of the last `save`."""
        ...

    def save(
        self,
        *,
        hard_state: HardState | None,
        snapshot_write: SnapshotWrite | None,
        entries: Sequence[Entry],
    ) -> None:
        """Write all arguments in one transaction; durable on return.

        `entries` replace everything stored at and after the first one's index. A snapshot that
        was `installed` replaces the whole log, before `entries` are added.
        """
        ...

    def pinned_stores(self) -> dict[str, str]:
        """Return the store id with which each other member was first seen."""
        ...

    def pin_store(self, member_id: str, store_id: str) -> None:
        """Remember a member's store id for good; durable on return."""
        ...

    def close(self) -> None: ...


class _Identity(NamedTuple):
    member_id: str
    store_id: str
    initializing: bool


class LmdbRaftStorage:
    """The LMDB environment of one member, held exclusively from construction to `close`."""

    def __init__(
        self,
        directory: Path,
        member_id: str,
        configuration: Configuration,
        *,
        map_bytes: int = 256 << 20,
        map_bytes_max: int = 16 << 30,
        read_only: bool = False,
    ) -> None:
        """Open the directory, or make a new one that begins with `configuration`; `read_only`: open
        a directory that has a member's data, and change nothing in it.

        Raises DataDirectoryError or UnsupportedVersionError, naming the file, for a directory
        that is in use, torn, truncated, foreign, another member's or of an unknown format.
        """
        self._directory = directory
        self._map_bytes_max = map_bytes_max
        self._environment: Any = None
        self._read_only = read_only
        if not read_only:
            private_files.make_directory(directory, "identity.json")
        self._lock_fd = _lock_directory(directory, read_only=read_only)
        try:
            identity = self._claim(member_id)
            self._store_id = identity.store_id
            self._open(map_bytes, is_new=identity.initializing)
            if identity.initializing:
                self._initialize(configuration)
                self._write_identity(identity._replace(initializing=False))
            self._last_index = self._load_last_index()
        except BaseException:
            self.close()
            raise

    @property
    def store_id(self) -> str:
        return self._store_id

    @property
    def data_path(self) -> Path:
        return data_path(self._directory)

    # -- opening

    def _claim(self, member_id: str) -> _Identity:
        """Check that the directory is this member's, or make it so if it is new."""
        path = self._directory / "identity.json"
        has_data = self.data_path.exists()
        if not path.exists():
            if has_data:
                raise DataDirectoryError(
                    path=str(path), reason="missing, though there is a data.mdb beside it"
                )
            if self._read_only:
                raise DataDirectoryError(path=str(path), reason="missing: no member's directory")
            identity = _Identity(member_id, uuid.uuid4().hex, initializing=True)
            self._write_identity(identity)
            return identity
        identity = _read_identity(path)
        if identity.member_id != member_id:
            raise DataDirectoryError(
                path=str(path),
                reason=f"belongs to member {identity.member_id!r}, not to {member_id!r}",
            )
        if identity.initializing and self._read_only:
            raise DataDirectoryError(
                path=str(path), reason="says that the member's first start was cut short: no data"
            )
        if identity.initializing:
            # A start was cut short before anything was promised: begin again.
            self.data_path.unlink(missing_ok=True)
        elif not has_data:
            raise DataDirectoryError(
                path=str(self.data_path),
                reason="missing, though identity.json says that this member has data",
            )
        return identity

    def _write_identity(self, identity: _Identity) -> None:
        document = {
            "kind": _IDENTITY_KIND,
            "format_version": STORAGE_FORMAT_VERSION,
            "member_id": identity.member_id,
            "store_id": identity.store_id,
            "initializing": identity.initializing,
        }
        scratch = self._directory / "identity.json.new"
        with scratch.open("w") as file:
            json.dump(document, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        scratch.rename(self._directory / "identity.json")
        _fsync_directory(self._directory)
        _fsync_directory(self._directory.parent)

    def _open(self, map_bytes: int, *, is_new: bool) -> None:
        path = self.data_path
        size_bytes = 0 if is_new else path.stat().st_size
        try:
            self._environment = lmdb.open(
                str(self._directory),
                map_size=max(map_bytes, size_bytes),
                max_dbs=3,
                max_readers=8,
                create=is_new,
                readonly=self._read_only,
                mode=private_files.FILE_MODE,
                lock=not self._read_only,  # the lock above is held
            )
            if not is_new:
                self._refuse_truncated(size_bytes)
            self._meta = self._environment.open_db(b"meta", create=is_new)
            self._log = self._environment.open_db(b"log", create=is_new)
            self._snapshots = self._environment.open_db(b"snapshot", create=is_new)
        except lmdb.Error as error:
            raise DataDirectoryError(
                path=str(path), reason=f"not a usable environment: {error}"
            ) from error
        if not self._read_only:
            self._extend_file_to(self._environment.info()["map_size"])

    def _refuse_truncated(self, size_bytes: int) -> None:
        page_bytes = self._environment.stat()["psize"]
        needed_bytes = (self._environment.info()["last_pgno"] + 1) * page_bytes
        if size_bytes < needed_bytes:
            raise DataDirectoryError(
                path=str(self.data_path),
                reason=f"truncated: {size_bytes} bytes, {needed_bytes} are in use",
            )

    def _extend_file_to(self, size_bytes: int) -> None:
        """Make the file (sparsely) as long as the map: see the module's docstring."""
        with self.data_path.open("r+b") as file:
            if os.fstat(file.fileno()).st_size < size_bytes:
                os.ftruncate(file.fileno(), size_bytes)
                os.fsync(file.fileno())

    def _initialize(self, configuration: Configuration) -> None:
        initial = Snapshot.of(0, 0, configuration, b"")
        with self._environment.begin(write=True) as txn:
            self._put_snapshot(txn, initial, LogPosition(0, 0))
            txn.put(b"store_id", _seal(self._store_id.encode()), db=self._meta)

    def close(self) -> None:
        if self._environment is not None:
            self._environment.close()
            self._environment = None
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    # -- reading

    @contextlib.contextmanager
    def _reading(self) -> Iterator[Any]:
        """A read transaction. An error in it becomes an error of the file."""
        try:
            with self._environment.begin() as txn:
                yield txn
        except (lmdb.Error, struct.error, ValueError, KeyError) as error:
            raise self._torn(f"unreadable: {error!r}") from error

    def _load_last_index(self) -> int:
        with self._reading() as txn:
            cursor = txn.cursor(self._log)
            if cursor.last():
                return int(_INDEX_KEY.unpack(cursor.key())[0])
            return _POSITION.unpack(self._get(txn, b"base"))[0]  # type: ignore[no-any-return]

    def load(self) -> RestoredState:
        """Return everything; raise DataDirectoryError if a checksum or the order is wrong."""
        restored = self._load()
        if not self._read_only:
            self._make_durable()
        return restored

    def _make_durable(self) -> None:
        """Sync the data that are found here, before anybody acts on them. An earlier process may
        have ended because a sync failed, of the directory or of the page that leads to the newest
        transaction: then the page cache shows data that the disk may lack, and a vote that is
        repeated because it is found here must not be lost afterwards.
        """
        sealed = _seal(self._store_id.encode())
        try:
            _fsync_directory(self._directory)
            self._commit(lambda txn: txn.put(b"store_id", sealed, db=self._meta))
        except (OSError, StorageFailedError) as error:
            raise self._torn(f"not to be made durable: {error}") from error

    def _load(self) -> RestoredState:
        with self._reading() as txn:
            if self._get(txn, b"store_id") != self._store_id.encode():
                raise self._torn("belongs to another store than identity.json")
            base = LogPosition(*_POSITION.unpack(self._get(txn, b"base")))
            entries: list[Entry] = []
            for key, value in txn.cursor(self._log):
                entry = self._decode_entry(_INDEX_KEY.unpack(key)[0], value)
                if entry.index != base.index + 1 + len(entries):
                    raise self._torn(f"log entry {base.index + 1 + len(entries)} is missing")
                entries.append(entry)
            return RestoredState(
                hard_state=self._load_hard_state(txn),
                snapshot=self._load_snapshot(txn),
                base=base,
                entries=tuple(entries),
            )

    def _load_hard_state(self, txn: Any) -> HardState:
        if txn.get(b"hard_state", db=self._meta) is None:
            return HardState()
        sealed = self._get(txn, b"hard_state")
        term, has_vote = _HARD_STATE.unpack_from(sealed)
        return HardState(term=term, vote=sealed[_HARD_STATE.size :].decode() if has_vote else None)

    def _load_snapshot(self, txn: Any) -> Snapshot:
        about = json.loads(self._get(txn, b"snapshot"))
        if about["format_version"] != SNAPSHOT_FORMAT_VERSION:
            raise UnsupportedVersionError(
                what=f"the snapshot in {self.data_path}",
                version=about["format_version"],
                supported=SNAPSHOT_FORMAT_VERSION,
            )
        data = b"".join(bytes(value) for _, value in txn.cursor(self._snapshots))
        if zlib.crc32(data) != about["checksum"]:
            raise self._torn("the snapshot's checksum is wrong")
        try:
            configuration = Configuration.decode(about["configuration"].encode())
        except ConfigurationFormatError as error:
            raise self._torn(str(error)) from error
        return Snapshot(
            index=about["index"],
            term=about["term"],
            configuration=configuration,
            data=data,
            checksum=about["checksum"],
        )

    def _decode_entry(self, index: int, value: bytes) -> Entry:
        version, kind, term, checksum = _ENTRY_HEADER.unpack_from(value)
        if version != ENTRY_FORMAT_VERSION:
            raise UnsupportedVersionError(
                what=f"log entry {index} in {self.data_path}",
                version=version,
                supported=ENTRY_FORMAT_VERSION,
            )
        data = bytes(value[_ENTRY_HEADER.size :])
        if _entry_checksum(kind, term, data) != checksum or kind not in _KIND_BY_NUMBER:
            raise self._torn(f"log entry {index} is damaged")
        return Entry(index, term, _KIND_BY_NUMBER[kind], data)

    def _get(self, txn: Any, key: bytes) -> bytes:
        sealed = txn.get(key, db=self._meta)
        if sealed is None:
            raise self._torn(f"{key.decode()!r} is missing")
        payload = bytes(sealed[_SEAL.size :])
        if _SEAL.unpack_from(sealed)[0] != zlib.crc32(payload):
            raise self._torn(f"{key.decode()!r} is damaged")
        return payload

    def _torn(self, reason: str) -> DataDirectoryError:
        return DataDirectoryError(path=str(self.data_path), reason=reason)

    # -- writing

    def save(
        self,
        *,
        hard_state: HardState | None,
        snapshot_write: SnapshotWrite | None,
        entries: Sequence[Entry],
    ) -> None:
        def write(txn: Any) -> None:
            last_index = self._last_index
            if snapshot_write is not None:
                last_index = self._replace_snapshot(txn, snapshot_write)
            if entries:
                self._replace_entries(txn, entries, last_index)
            if hard_state is not None:
                vote = hard_state.vote
                packed = _HARD_STATE.pack(hard_state.term, vote is not None)
                txn.put(b"hard_state", _seal(packed + (vote or "").encode()), db=self._meta)

        self._commit(write)
        if entries:
            self._last_index = entries[-1].index
        elif snapshot_write is not None and snapshot_write.installed:
            self._last_index = snapshot_write.snapshot.index

    def _commit(self, write: Callable[[Any], None]) -> None:
        """Run `write` in a transaction; a full map is doubled, any other failure is final."""
        while True:
            try:
                with self._environment.begin(write=True) as txn:
                    write(txn)
                return
            except lmdb.MapFullError as error:
                map_bytes = self._environment.info()["map_size"] * 2
                if map_bytes > self._map_bytes_max:
                    raise self._failed(
                        f"the map is full at {map_bytes // 2} bytes "
                        f"(map_bytes_max={self._map_bytes_max})"
                    ) from error
                self._extend_file_to(map_bytes)
                self._environment.set_mapsize(map_bytes)
            except (lmdb.Error, OSError) as error:
                raise self._failed(f"write failed: {error}") from error

    def _failed(self, reason: str) -> StorageFailedError:
        return StorageFailedError(path=str(self.data_path), reason=reason)

    def _replace_snapshot(self, txn: Any, write: SnapshotWrite) -> int:
        """Write the snapshot, delete the entries that it covers, and store where the log ends
        now.
        """
        self._put_snapshot(txn, write.snapshot, write.base)
        if write.installed:
            txn.drop(self._log, delete=False)
            return write.snapshot.index
        cursor = txn.cursor(self._log)
        if cursor.first():
            while cursor.key() and _INDEX_KEY.unpack(cursor.key())[0] <= write.base.index:
                cursor.delete()
        return self._last_index

    def _replace_entries(self, txn: Any, entries: Sequence[Entry], last_index: int) -> None:
        first = entries[0].index
        for index in range(first, last_index + 1):
            txn.delete(_INDEX_KEY.pack(index), db=self._log)
        put, log = txn.put, self._log
        for entry in entries:
            put(_INDEX_KEY.pack(entry.index), _encode_entry(entry), db=log, append=True)

    def _put_snapshot(self, txn: Any, snapshot: Snapshot, base: LogPosition) -> None:
        about = {
            "format_version": SNAPSHOT_FORMAT_VERSION,
            "index": snapshot.index,
            "term": snapshot.term,
            "checksum": snapshot.checksum,
            "configuration": snapshot.configuration.encode().decode(),
        }
        txn.put(b"snapshot", _seal(json.dumps(about).encode()), db=self._meta)
        txn.put(b"base", _seal(_POSITION.pack(*base)), db=self._meta)
        txn.drop(self._snapshots, delete=False)
        for offset in range(0, len(snapshot.data), SNAPSHOT_ROW_BYTES):
            row = snapshot.data[offset : offset + SNAPSHOT_ROW_BYTES]
            txn.put(_INDEX_KEY.pack(offset), row, db=self._snapshots, append=True)

    # -- pins

    def pinned_stores(self) -> dict[str, str]:
        pins = {}
        with self._reading() as txn:
            cursor = txn.cursor(self._meta)
            if cursor.set_range(b"pin:"):
                for key, _ in cursor:
                    if not key.startswith(b"pin:"):
                        break
                    pins[key[4:].decode()] = self._get(txn, bytes(key)).decode()
        return pins

    def pin_store(self, member_id: str, store_id: str) -> None:
        def write(txn: Any) -> None:
            txn.put(b"pin:" + member_id.encode(), _seal(store_id.encode()), db=self._meta)

        self._commit(write)


def _encode_entry(entry: Entry) -> bytes:
    checksum = _entry_checksum(entry.kind, entry.term, entry.data)
    return _ENTRY_HEADER.pack(ENTRY_FORMAT_VERSION, entry.kind, entry.term, checksum) + entry.data


def _entry_checksum(kind: int, term: int, data: bytes) -> int:
    return zlib.crc32(data, (term << 2 | kind) & 0xFFFFFFFF)


def _seal(payload: bytes) -> bytes:
    return _SEAL.pack(zlib.crc32(payload)) + payload


def _read_identity(path: Path) -> _Identity:
    try:
        document = json.loads(path.read_bytes())
        kind, version = document["kind"], document["format_version"]
        if kind == _IDENTITY_KIND and version != STORAGE_FORMAT_VERSION:
            raise UnsupportedVersionError(
                what=str(path), version=version, supported=STORAGE_FORMAT_VERSION
            )
        if kind != _IDENTITY_KIND:
            raise DataDirectoryError(path=str(path), reason=f"is a {kind!r}, not a Raft member's")
        return _Identity(
            document["member_id"], document["store_id"], bool(document["initializing"])
        )
    except (ValueError, KeyError, TypeError) as error:
        raise DataDirectoryError(path=str(path), reason=f"damaged: {error!r}") from error


def _lock_directory(directory: Path, *, read_only: bool) -> int:
    path = directory / "lock"
    if read_only and not path.exists():
        return -1  # not made, or copied from elsewhere: no process uses it
    flags = os.O_RDONLY if read_only else os.O_RDWR | os.O_CREAT
    fd = os.open(path, flags | os.O_CLOEXEC, private_files.FILE_MODE)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise DataDirectoryError(
            path=str(path), reason="the directory is in use by another process"
        ) from error
    return fd


def data_path(directory: Path) -> Path:
    """Return the file that a member's directory has once there was a member."""
    return directory / "data.mdb"


def _fsync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
