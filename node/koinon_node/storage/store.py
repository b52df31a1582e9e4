"""The store: one LMDB environment, read here, written by the writer process alone (writer.py).

This module opens and checks a store, makes a fresh one, and reads. The only writes that it makes
itself are those of opening and closing, while no writer runs.

databases: data, expiry, partitions (see core/records.py) and meta: what the node knows of itself.
"""

from __future__ import annotations

import logging
import operator
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, compress, islice
from types import TracebackType
from typing import Any, NamedTuple

import lmdb
import numpy as np

from koinon_node.config import StoreConfig
from koinon_node.core import records
from koinon_node.core.overlay import Overlay
from koinon_node.core.records import PartitionEpochs
from koinon_node.core.replication.copies import Copies, Copy, CopyState
from koinon_node.storage import directory as files
from koinon_node.storage import log_replay, write_ahead_log
from koinon_node.storage.environment import (
    DATA_DB,
    EXPIRY_DB,
    META_DB,
    PARTITIONS_DB,
    open_databases,
    open_environment,
    tree_bytes,
)
from koinon_node.storage.write_ahead_log import LOG_STATE
from koinon_proto.contract.errors import DataDirectoryError, UnsupportedVersionError

log = logging.getLogger(__name__)

FORMAT = b"format_version"
LOG_FORMAT_VERSION = 3
"""Of a store with a write-ahead log, which may hold what the store lacks."""
STORE_ID = b"store_id"
NEXT_STORE_ID = b"next_store_id"
CLUSTER_ID = b"cluster_id"
NODE_ID = b"node_id"
NODE_EPOCH = b"node_epoch"
REGISTRATION_ID = b"registration_id"
RUN_STATE = b"run_state"  # "clean" or "open <durability> <boot id>"

_EPOCHS, _PROGRESS, _DROPPING = range(3)  # kinds of a partition's metadata
_ALL_PARTITIONS = 65_536
_NO_BOUND = 2**62
_SEEN_BYTES = 8 * 1024 * 1024  # looked at in one transaction, wanted or not
_SCANNED_FIRST, _SCANNED_AT_ONCE = 16, 64  # at most: each of these values may have a MiB
_second = operator.itemgetter(1)
_value_after = {
    False: operator.itemgetter(slice(records.HEADER_BYTES, None)),
    True: operator.itemgetter(slice(records.HEADER_WITH_EXPIRY_BYTES, None)),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """The node's durable facts about itself."""

    store_id: str
    cluster_id: str
    node_epoch: int
    registration_id: str


class Range(NamedTuple):
    """Records of one partition as one transaction saw them, and what it saw beside them."""

    rows: list[tuple[bytes, bytes]]  # (data key, record)
    last_key: bytes  # how far it looked
    end: bool  # and looked to the partition's end
    complete_through: int
    purge_floor: int


def _distrust_copies(txn: lmdb.Transaction[bytes], partitions: Any) -> None:
    """Mark every copy as one that may lack any of what it says it holds."""
    found = [(key, value) for key, value in txn.cursor(partitions) if key[2] == _PROGRESS]
    for key, value in found:
        through, floor, state = records.decode_progress(value)
        columns = np.array([through], np.uint64), np.array([floor], np.uint64)
        (marked,) = records.encode_progress(*columns, state | CopyState.UNTRUSTED)
        txn.put(key, marked, db=partitions)


class Store:
    """An open store. Reading is thread-safe; each read sees one committed state."""

    def __init__(self, config: StoreConfig) -> None:
        """Lock and open the directory, or make a fresh store in it.

        Raises:
            DataDirectoryError: it is in use, or something in it is torn, truncated, missing or
                foreign.
        """
        self.config = config
        self.overlay = Overlay()  # what is durable in the log and not in here yet
        self.lock_descriptor = files.lock_directory(config.directory)
        self._env: lmdb.Environment | None = None
        try:
            fresh = files.begin_if_fresh(config.directory)
            store_id = files.new_store_id() if fresh else files.read_identity(config.directory)
            self._open(fresh, store_id)
            self._distrust_after_crash()
            self._set_run_state(f"open {config.durability} {files.boot_id()}")
            files.forget_failed_sync(config.directory)
            self.env.reader_check()
        except BaseException:
            self._release()
            raise

    @property
    def env(self) -> lmdb.Environment:
        assert self._env is not None, "the store is closed"
        return self._env

    @property
    def is_open(self) -> bool:
        return self._env is not None

    @property
    def databases(self) -> list[Any]:
        """The handles, in the order of DATABASES."""
        return self._databases

    def _open(self, fresh: bool, store_id: str) -> None:
        path = self.config.directory / files.DATA
        if not fresh and path.stat().st_size < 2 * 4096:
            raise DataDirectoryError(path=str(path), reason="truncated: no room for its head")
        try:
            self._env = open_environment(self.config)
            self._sync()
            if fresh:
                self._make(store_id)
            else:
                info, stat = self.env.info(), self.env.stat()
                files.check_not_truncated(self.config.directory, info["last_pgno"], stat["psize"])
            self._databases = open_databases(self.env)
            self._check_meta(store_id)
            self._take_over_log()
            self._seen_epochs = self.partition_epochs()
        except lmdb.NotFoundError:
            raise DataDirectoryError(path=str(path), reason="not a Koinon store") from None
        except (lmdb.Error, UnsupportedVersionError) as error:
            raise DataDirectoryError(path=str(path), reason=f"unusable: {error}") from error

    def _make(self, store_id: str) -> None:
        meta = open_databases(self.env, create=True)[META_DB]
        with self.env.begin(write=True, db=meta) as txn:
            txn.put(FORMAT, str(files.FORMAT_VERSION).encode())
            txn.put(STORE_ID, store_id.encode())
        files.write_identity(self.config.directory, store_id)
        files.finish_fresh(self.config.directory)

    def _check_meta(self, store_id: str) -> None:
        path = str(self.config.directory / files.DATA)
        version = self._meta(FORMAT)
        if version not in (str(files.FORMAT_VERSION), str(LOG_FORMAT_VERSION)):
            raise DataDirectoryError(
                path=path,
                reason=f"store format version {version or 'missing'}; "
                f"this build supports {files.FORMAT_VERSION} and {LOG_FORMAT_VERSION}",
            )
        own, following = self._meta(STORE_ID), self._meta(NEXT_STORE_ID)
        if following and following == store_id:  # a change of id was cut short after the file
            self._put_meta({STORE_ID: store_id, NEXT_STORE_ID: ""})
        elif own != store_id:
            raise DataDirectoryError(
                path=path, reason=f"belongs to store {own}, the identity file names {store_id}"
            )

    def _take_over_log(self) -> None:
        """Take what a crash has left in the write-ahead log into the store, and begin a new life of
        the log: whatever its segments hold counts as nothing from then on.

        A store with a log has a format of its own until it is closed clean, so that an older build,
        which knows of none, does not leave out what is only there.

        Raises:
            DataDirectoryError: the log is missing or damaged, or the store has no room for it.
        """
        directory = self.config.directory
        life, position = write_ahead_log.decode_state(self._meta(LOG_STATE))
        if self._meta(FORMAT) == str(LOG_FORMAT_VERSION):
            if not write_ahead_log.has_log(directory):
                path = str(directory / write_ahead_log.LOG)
                raise DataDirectoryError(path=path, reason="missing: it holds what the store lacks")
            try:
                log_replay.replay(self.env, self._databases, directory, life, position)
            except DataDirectoryError as error:
                if not self._cause_of_distrust():
                    raise
                log.warning("the log of an untrusted store ends early error=%s", error)
        self.log_life = write_ahead_log.new_life()
        self.logged = self.config.write_ahead_log and write_ahead_log.make_log(directory)
        version = LOG_FORMAT_VERSION if self.logged else files.FORMAT_VERSION
        state = write_ahead_log.encode_state(self.log_life, 0).decode()
        self._put_meta({FORMAT: str(version), LOG_STATE: state})
        if not self.logged:
            write_ahead_log.remove_log(directory)

    def _distrust_after_crash(self) -> None:
        """Rule 3: after an unclean end under durability=interval, rows which had been acknowledged
        may be gone, any of them, if the machine has been down since (this is another boot) or a
        sync has failed. The store then gives up its identity: it registers under a new store_id,
        the coordinator treats the old one as lost (out of in_sync; where it was the only member,
        offline). Its copies say themselves that they are not to be built on: each is replaced by
        its primary's. What is on the disk stays there for the operator until then.

        With durability=commit nothing of the kind is needed. A transaction is acknowledged once its
        pages, and after these the head that leads to them, were synced. Where the pages' sync
        failed, nothing leads to them. Where the head's did, this process may see a transaction that
        the disk does not have: whole, of unknown fate, and durable with the next commit, which is
        made here before anything is served.
        """
        cause = self._cause_of_distrust()
        if not cause:
            return
        store_id = files.new_store_id()
        log.warning(
            "copy untrusted cause=%s directory=%s old_store_id=%s new_store_id=%s",
            cause,
            self.config.directory,
            self.identity().store_id,
            store_id,
        )
        meta, partitions = self._databases[META_DB], self._databases[PARTITIONS_DB]
        with self.env.begin(write=True) as txn:
            txn.put(NEXT_STORE_ID, store_id.encode(), db=meta)
            _distrust_copies(txn, partitions)
        files.write_identity(self.config.directory, store_id)
        self._put_meta({STORE_ID: store_id, NEXT_STORE_ID: ""})

    def _cause_of_distrust(self) -> str:
        """Return why acknowledged rows may be gone; '' where none can be."""
        state = self._meta(RUN_STATE).split(" ")
        if state[:2] != ["open", "interval"]:
            return ""
        if files.noted_failed_sync(self.config.directory):
            return "sync failed"
        return "machine went down" if state[2] != files.boot_id() else ""

    def claim(self, node_id: str) -> None:
        """Make the store this node's, if it is new.

        Raises:
            DataDirectoryError: it is another node's. Registered under this id it would pass for a
                lost disk of this node, and its own node's partitions would wait for it.
        """
        owner = self._meta(NODE_ID)
        if not owner:
            self._put_meta({NODE_ID: node_id})
        elif owner != node_id:
            raise DataDirectoryError(
                path=str(self.config.directory),
                reason=f"belongs to node {owner!r}, not {node_id!r}",
            )

    def close(self, *, clean: bool) -> None:
        """Release the store. ``clean``: the writer has ended and nothing is unsynced."""
        if clean:
            self._put_meta({FORMAT: str(files.FORMAT_VERSION), RUN_STATE: "clean"})
        self._release()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._env is not None:
            self.close(clean=kind is None)

    def _release(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None
        os.close(self.lock_descriptor)

    # --- the node's own facts --------------------------------------------------------------

    def identity(self) -> Identity:
        return Identity(
            store_id=self._meta(STORE_ID),
            cluster_id=self._meta(CLUSTER_ID),
            node_epoch=int(self._meta(NODE_EPOCH) or 0),
            registration_id=self._meta(REGISTRATION_ID),
        )

    @property
    def seen_epochs(self) -> dict[int, PartitionEpochs]:
        """The epochs that were known of each partition when the store was opened."""
        return self._seen_epochs

    def partition_epochs(self) -> dict[int, PartitionEpochs]:
        """Read the epochs of all partitions that this store has seen."""
        return {
            int.from_bytes(key[:2], "big"): records.decode_epochs(value)
            for key, value in self._partition_entries(_EPOCHS)
        }

    def copies(self) -> Copies:
        """Read what is held of every partition."""
        complete_through = np.zeros(_ALL_PARTITIONS, np.uint64)
        purge_floors = np.zeros(_ALL_PARTITIONS, np.uint64)
        states = np.zeros(_ALL_PARTITIONS, np.uint8)
        for key, value in self._partition_entries(_PROGRESS):
            partition_id = int.from_bytes(key[:2], "big")
            through, floor, state = records.decode_progress(value)
            complete_through[partition_id], purge_floors[partition_id] = through, floor
            states[partition_id] = state
        for partition_id in self.dropping():
            states[partition_id] |= CopyState.UNUSABLE
        return Copies(complete_through, purge_floors, states, self.partition_epochs())

    def read_copies(self, partition_ids: Sequence[int]) -> dict[int, Copy]:
        """Read what is held of these partitions, as of one moment."""
        found: dict[int, Copy] = {}
        keys_of = (records.progress_key, records.dropping_key, records.epochs_key)
        keys = [key_of(p) for p in partition_ids for key_of in keys_of]
        laid_over = self.overlay.find(PARTITIONS_DB, keys) if self.overlay else {}
        with self.env.begin(self._databases[PARTITIONS_DB]) as txn:

            def read(key: bytes) -> bytes | None:
                return laid_over[key] if key in laid_over else txn.get(key)

            for partition_id in partition_ids:
                progress = read(records.progress_key(partition_id))
                through, floor, state = records.decode_progress(progress) if progress else (0, 0, 0)
                if read(records.dropping_key(partition_id)) is not None:
                    state |= CopyState.UNUSABLE
                data = read(records.epochs_key(partition_id))
                epochs = records.decode_epochs(data) if data else PartitionEpochs(primary_epoch=0)
                found[partition_id] = Copy(through, floor, CopyState(state), epochs)
        return found

    def dropping(self) -> list[int]:
        """Return the partitions whose data is being deleted."""
        return [int.from_bytes(key[:2], "big") for key, _ in self._partition_entries(_DROPPING)]

    def _partition_entries(self, kind: int) -> Iterator[tuple[bytes, bytes]]:
        with self.env.begin(self._databases[PARTITIONS_DB]) as txn:
            for key, value in txn.cursor():
                if key[2] == kind:
                    yield key, value

    def _meta(self, key: bytes) -> str:
        with self.env.begin(self._databases[META_DB]) as txn:
            value = txn.get(key)
        return value.decode() if value is not None else ""

    def _put_meta(self, values: dict[bytes, str]) -> None:
        with self.env.begin(self._databases[META_DB], write=True) as txn:
            for key, value in values.items():
                txn.put(key, value.encode())

    def _set_run_state(self, state: str) -> None:
        self._put_meta({RUN_STATE: state})

    def _sync(self) -> None:
        """Make durable what an earlier process with durability=interval may have left in the page
        cache. Should it not have seen a failed write, this does.
        """
        try:
            self.env.sync(True)
        except lmdb.Error:
            files.note_failed_sync(self.config.directory)
            raise

    # --- records ---------------------------------------------------------------------------

    def get(self, data_key: bytes) -> bytes | None:
        """Return the stored record (with its header), or None."""
        return self.get_each((data_key,))[0]

    def get_each(self, data_keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the record of each key (with its header), or None."""
        laid_over = self.overlay.find(DATA_DB, data_keys) if self.overlay else None
        with self.env.begin(self._databases[DATA_DB]) as txn:
            found: list[bytes | None] = list(map(txn.get, data_keys))
        if laid_over:
            return [laid_over.get(k, r) for k, r in zip(data_keys, found, strict=True)]
        return found

    def get_many(self, data_keys: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
        """Return (data key, record) of those that exist, in the order asked for."""
        laid_over = self.overlay.find(DATA_DB, data_keys) if self.overlay else None
        wanted = [key for key in data_keys if key not in laid_over] if laid_over else data_keys
        with self.env.begin(self._databases[DATA_DB]) as txn, txn.cursor() as cursor:
            rows: list[tuple[bytes, bytes]] = cursor.getmulti(wanted)
        if not laid_over:
            return rows
        found = {**dict(rows), **laid_over}
        return [(key, row) for key in data_keys if (row := found.get(key)) is not None]

    def lengths(self, data_keys: Sequence[bytes]) -> list[int]:
        """Return the bytes of each stored record, 0 where there is none, without holding them."""
        laid_over = self.overlay.find(DATA_DB, data_keys) if self.overlay else {}
        with self.env.begin(self._databases[DATA_DB], buffers=True) as txn:
            rows = (laid_over[key] if key in laid_over else txn.get(key) for key in data_keys)
            return [len(row) if row is not None else 0 for row in rows]

    def lacks(self, partition_ids: Iterable[int]) -> bool:
        """Return whether the log holds rows of these partitions that are not in here yet."""
        if not self.overlay:
            return False
        # A row changes how far its partition is complete, which is written with it.
        keys = list(map(records.progress_key, partition_ids))
        return self.overlay.holds(PARTITIONS_DB, keys)

    def stored_through(self, partition_id: int) -> int:
        """Return up to where the copy is complete in the store itself."""
        with self.env.begin() as txn:
            return self._progress(txn, partition_id)[0]

    def scan(
        self,
        partition_id: int,
        prefix: bytes,
        after_key: bytes,
        rows_max: int,
        bytes_max: int,
        *,
        start: bytes = b"",
        reverse: bool = False,
    ) -> tuple[list[tuple[bytes, bytes]], bool]:
        """Return ((data key, record)..., whether there is more) of one partition's user records,
        from ``start`` on, beyond ``after_key``; with ``reverse`` keys descend.

        Ends after ``rows_max`` rows, or with the row that reaches ``bytes_max``.
        """
        own = records.head_of(partition_id)
        head = own + prefix
        found: list[tuple[bytes, bytes]] = []
        with self.env.begin(self._databases[DATA_DB]) as txn, txn.cursor() as cursor:
            if reverse:
                end = scan_end(partition_id, prefix, start, after_key)
                some_there = cursor.prev() if cursor.set_range(end) else cursor.last()
                rows = cursor.iterprev(keys=True, values=True)
            else:
                first = max(head, own + start)
                after = own + after_key
                some_there = cursor.set_range(
                    after + b"\x00" if after_key and after >= first else first
                )
                rows = cursor.iternext(keys=True, values=True)
            if not some_there:
                return found, False
            size, step = 0, _SCANNED_FIRST
            while len(found) < rows_max and size < bytes_max:
                count = min(step, rows_max - len(found))
                some = list(islice(rows, count))
                inside = _within(some, head)
                found += inside
                size += sum(map(len, map(_second, inside)))
                if len(inside) < count and size < bytes_max:
                    return found, False
                fit = (bytes_max - size) * len(found) // max(size, 1)  # if all are alike
                step = max(_SCANNED_FIRST, min(_SCANNED_AT_ONCE, fit))
            while found and size - len(found[-1][1]) >= bytes_max:
                size -= len(found.pop()[1])
            return found, True

    def read_range(
        self,
        partition_id: int,
        after_key: bytes,
        after_sequence: int,
        rows_max: int,
        bytes_max: int,
    ) -> Range:
        """Read the records above ``after_sequence`` of one partition, from ``after_key``, in key
        order. Looks at no more than ``rows_max`` records, and returns none beyond the one that
        reaches ``bytes_max``.
        """
        head = records.prefix_of(partition_id)
        with self.env.begin() as txn:
            through, floor = self._progress(txn, partition_id)
            with txn.cursor(self._databases[DATA_DB]) as cursor:
                start = head + after_key + b"\x00" if after_key else head
                rows = cursor.iternext(keys=True, values=True) if cursor.set_range(start) else []
                found: list[tuple[bytes, bytes]] = []
                looked, size, seen, last, end = 0, 0, 0, after_key, False
                step = 4  # small first: each of these values may have a MiB
                while looked < rows_max and size < bytes_max and seen < _SEEN_BYTES and not end:
                    count = min(step, rows_max - looked)
                    inside = _within(list(islice(rows, count)), head)
                    end = len(inside) < count
                    if not inside:
                        break
                    last = inside[-1][0][2:]
                    looked += len(inside)
                    seen += sum(map(len, map(_second, inside)))
                    above = _above(inside, after_sequence)
                    taken = _fitting(above, bytes_max - size)
                    found += taken
                    if len(taken) < len(above):  # those behind it are the next call's
                        last, end = taken[-1][0][2:], False
                        break
                    size += sum(map(len, map(_second, taken)))
                    left = min(bytes_max - size, _SEEN_BYTES - seen)
                    step = max(1, min(_SCANNED_AT_ONCE, left * looked // max(seen, 1)))
        return Range(found, last, end, through, floor)

    def read_keys(self, partition_id: int, data_keys: Sequence[bytes], bytes_max: int) -> Range:
        """Read the records of these keys of one partition, in one transaction. Ends before the
        last of them with the one that reaches ``bytes_max``.
        """
        found: list[tuple[bytes, bytes]] = []
        done, size = 0, 0
        with self.env.begin(self._databases[DATA_DB]) as txn:
            through, floor = self._progress(txn, partition_id)
            while done < len(data_keys) and size < bytes_max:
                key = data_keys[done]
                record: bytes | None = txn.get(key)
                done += 1
                if record is not None:
                    found.append((key, record))
                    size += len(record)
        last = data_keys[done - 1][2:] if done else b""
        return Range(found, last, done == len(data_keys), through, floor)

    def keys_above(
        self, partition_id: int, sequence: int, after_key: bytes, limit: int
    ) -> tuple[list[bytes], bytes | None]:
        """Return (data keys of records above ``sequence``, the key to go on after or None at the
        end). Looks at no more than ``limit`` records, from ``after_key``.
        """
        page = self.read_range(partition_id, after_key, sequence, limit, _NO_BOUND)
        return [key for key, _ in page.rows], None if page.end else page.last_key

    def scan_keys(
        self, partition_id: int, after_key: bytes, until_key: bytes, limit: int
    ) -> list[bytes]:
        """Return up to ``limit`` data keys of one partition in (after_key, until_key]; without an
        ``until_key`` to the partition's end, without an ``after_key`` from its beginning.
        """
        head = records.prefix_of(partition_id)
        start = head + after_key + b"\x00" if after_key else head
        with self.env.begin(self._databases[DATA_DB]) as txn, txn.cursor() as cursor:
            if not cursor.set_range(start):
                return []
            keys = list(islice(cursor.iternext(keys=True, values=False), limit))
        until = head + until_key
        return [k for k in keys if k.startswith(head) and (not until_key or k <= until)]

    def _progress(self, txn: lmdb.Transaction, partition_id: int) -> tuple[int, int]:
        key = records.progress_key(partition_id)
        data = txn.get(key, db=self._databases[PARTITIONS_DB])
        if data is None:
            return 0, 0
        through, floor, _ = records.decode_progress(bytes(data))
        return through, floor

    def expired_entries(
        self, start: bytes, before_ms: int, rows_max: int
    ) -> tuple[list[bytes], bytes]:
        """Return (keys of the expiry index from ``start`` up to ``before_ms``, where to go on).

        Where to go on is empty at the end.
        """
        end = records.expiry_key(before_ms + 1, b"")
        with self.env.begin(self._databases[EXPIRY_DB]) as txn, txn.cursor() as cursor:
            if not cursor.set_range(start):
                return [], b""
            keys = list(islice(cursor.iternext(keys=True, values=False), rows_max))
        inside = [key for key in keys if key < end]
        goes_on = inside[-1] + b"\x00" if len(inside) == rows_max else b""
        if self.overlay and (laid_over := self.overlay.find(EXPIRY_DB, inside)):
            inside = [key for key in inside if laid_over.get(key, b"") is not None]
        return inside, goes_on

    def count(self) -> int:
        """Return how many records there are (of all partitions, expired ones included)."""
        with self.env.begin() as txn:
            entries: int = txn.stat(self._databases[DATA_DB])["entries"]
            return entries

    def used_bytes(self) -> int:
        """Return how much of the map holds something now; freed pages do not count."""
        with self.env.begin() as txn:
            return tree_bytes(txn, self._databases)


def _fitting(rows: list[tuple[bytes, bytes]], size: int) -> list[tuple[bytes, bytes]]:
    """Return the rows up to the one with which their records have ``size`` bytes."""
    if sum(map(len, map(_second, rows))) < size:
        return rows
    ends = accumulate(map(len, map(_second, rows)))
    return rows[: next(at for at, end in enumerate(ends, 1) if end >= size)]


def scan_end(partition_id: int, prefix: bytes, start: bytes, after_key: bytes) -> bytes:
    """Return the data key below which a reverse scan begins."""
    own = records.head_of(partition_id)
    cut = (own + prefix).rstrip(b"\xff")  # of which the kind of a record is left at least
    end = cut[:-1] + bytes((cut[-1] + 1,))  # the first key that does not begin so
    if start:
        end = min(end, own + start + b"\x00")
    return min(end, own + after_key) if after_key else end


def _within(rows: list[tuple[bytes, bytes]], head: bytes) -> list[tuple[bytes, bytes]]:
    """Return the first rows, whose keys go on from one that begins so, up to where they do not."""
    if not rows or rows[-1][0].startswith(head):
        return rows
    return [row for row in rows if row[0].startswith(head)]


def _above(rows: list[tuple[bytes, bytes]], sequence: int) -> list[tuple[bytes, bytes]]:
    """Return the rows whose records are above the sequence."""
    if not sequence:
        return rows
    above = records.sequences_of([record for _, record in rows]) > np.uint64(sequence)
    return list(compress(rows, above.tolist()))


def values_of(rows: Sequence[bytes], *, with_expiry: bool) -> list[bytes]:
    """Return the values of records that all have, or all lack, an expiry."""
    return list(map(_value_after[with_expiry], rows))
