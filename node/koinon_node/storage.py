"""The store: one LMDB environment, read here, written by the writer process alone (writer.py).

This module opens and checks a store, makes a fresh one, and reads. The only writes that it makes
itself are those of opening and closing, while no writer runs.

databases: data, expiry, partitions (see core/records.py) and meta: what the node knows of itself.
"""

from __future__ import annotations

import logging
import operator
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from types import TracebackType
from typing import Any

import lmdb
import numpy as np

from koinon_node import directory as files
from koinon_node.config import StoreConfig
from koinon_node.core import records
from koinon_node.core.records import PartitionEpochs, U64Array
from koinon_proto.errors import DataDirectoryError, UnsupportedVersionError

log = logging.getLogger(__name__)

DATABASES = ("data", "expiry", "partitions", "meta")
DATA_DB, EXPIRY_DB, PARTITIONS_DB, META_DB = range(len(DATABASES))

FORMAT = b"format_version"
STORE_ID = b"store_id"
NEXT_STORE_ID = b"next_store_id"
CLUSTER_ID = b"cluster_id"
NODE_ID = b"node_id"
NODE_EPOCH = b"node_epoch"
REGISTRATION_ID = b"registration_id"
RUN_STATE = b"run_state"  # "clean" or "open <durability> <boot id>"

_ALL_PARTITIONS = 65_536
_value_after = {
    False: operator.itemgetter(slice(records.HEADER_BYTES, None)),
    True: operator.itemgetter(slice(records.HEADER_WITH_EXPIRY_BYTES, None)),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """What the node durably knows of itself."""

    store_id: str
    cluster_id: str
    node_epoch: int
    registration_id: str


def open_environment(config: StoreConfig, *, sync: bool = True) -> lmdb.Environment:
    """Open the environment with the settings that every process of a node shares."""
    return lmdb.open(
        str(config.directory),
        map_size=config.mapped_bytes,
        max_dbs=len(DATABASES),
        max_readers=128,
        max_spare_txns=8,
        readahead=False,
        meminit=False,
        sync=sync,
    )


def open_databases(env: lmdb.Environment, *, create: bool = False) -> list[Any]:
    """Return the handles in the order of DATABASES."""
    return [env.open_db(name.encode(), create=create) for name in DATABASES]


class Store:
    """An open store. Reading is thread-safe; each read sees one committed state."""

    def __init__(self, config: StoreConfig) -> None:
        """Lock and open the directory, or make a fresh store in it.

        Raises:
            DataDirectoryError: it is in use, or something in it is torn, truncated, missing or
                foreign.
        """
        self.config = config
        self.lock_descriptor = files.lock_directory(config.directory)
        self._env: lmdb.Environment | None = None
        try:
            fresh = files.begin_if_fresh(config.directory)
            store_id = files.new_store_id() if fresh else files.read_identity(config.directory)
            self._open(fresh, store_id)
            self._distrust_after_crash()
            self._set_run_state(f"open {config.durability} {files.boot_id()}")
            self.env.reader_check()
        except BaseException:
            self._release()
            raise

    @property
    def env(self) -> lmdb.Environment:
        assert self._env is not None, "the store is closed"
        return self._env

    def _open(self, fresh: bool, store_id: str) -> None:
        path = self.config.directory / files.DATA
        if not fresh and path.stat().st_size < 2 * 4096:
            raise DataDirectoryError(path=str(path), reason="truncated: no room for its head")
        try:
            self._env = open_environment(self.config)
            if fresh:
                self._make(store_id)
            else:
                info, stat = self.env.info(), self.env.stat()
                files.check_not_truncated(self.config.directory, info["last_pgno"], stat["psize"])
            self._databases = open_databases(self.env)
            self._check_meta(store_id)
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
        if version != str(files.FORMAT_VERSION):
            raise DataDirectoryError(
                path=path,
                reason=f"store format version {version or 'missing'}; "
                f"this build supports {files.FORMAT_VERSION}",
            )
        own, following = self._meta(STORE_ID), self._meta(NEXT_STORE_ID)
        if following and following == store_id:  # a change of id was cut short after the file
            self._put_meta({STORE_ID: store_id, NEXT_STORE_ID: ""})
        elif own != store_id:
            raise DataDirectoryError(
                path=path, reason=f"belongs to store {own}, the identity file names {store_id}"
            )

    def _distrust_after_crash(self) -> None:
        """Rule 3: after an unclean end under durability=interval, another boot means that rows
        which had been acknowledged may be gone. The copy then gives up its identity: it registers
        under a new store_id, the coordinator treats the old store as lost (out of in_sync; where
        it was the only member, offline), and what is on the disk stays there for the operator.
        """
        state = self._meta(RUN_STATE).split(" ")
        if state[:2] != ["open", "interval"] or state[2] == files.boot_id():
            return
        store_id = files.new_store_id()
        log.warning(
            "copy untrusted: the machine went down while durability was interval "
            "directory=%s old_store_id=%s new_store_id=%s",
            self.config.directory,
            self.identity().store_id,
            store_id,
        )
        self._put_meta({NEXT_STORE_ID: store_id})
        files.write_identity(self.config.directory, store_id)
        self._put_meta({STORE_ID: store_id, NEXT_STORE_ID: ""})

    def claim(self, node_id: str) -> None:
        """Make the store this node's, if it is nobody's yet.

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
            self._set_run_state("clean")
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
        """What was known of each partition's epochs when the store was opened."""
        return self._seen_epochs

    def partition_epochs(self) -> dict[int, PartitionEpochs]:
        """Read the epochs of all partitions that this store has seen."""
        return {
            int.from_bytes(key[:2], "big"): records.decode_epochs(value)
            for key, value in self._partition_entries(0)
        }

    def progress(self) -> tuple[U64Array, U64Array]:
        """Read (complete_through, purge floors) of all partitions, as columns over their ids."""
        complete_through = np.zeros(_ALL_PARTITIONS, np.uint64)
        purge_floors = np.zeros(_ALL_PARTITIONS, np.uint64)
        for key, value in self._partition_entries(1):
            partition_id = int.from_bytes(key[:2], "big")
            through, floor = records.decode_progress(value)
            complete_through[partition_id], purge_floors[partition_id] = through, floor
        return complete_through, purge_floors

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
        self.env.sync(True)

    # --- records ---------------------------------------------------------------------------

    def get(self, data_key: bytes) -> bytes | None:
        """Return the stored record (with its header), or None."""
        with self.env.begin(self._databases[DATA_DB]) as txn:
            value: bytes | None = txn.get(data_key)
            return value

    def get_many(self, data_keys: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
        """Return (data key, record) of those that exist, in the order asked for."""
        with self.env.begin(self._databases[DATA_DB]) as txn, txn.cursor() as cursor:
            rows: list[tuple[bytes, bytes]] = cursor.getmulti(data_keys)
            return rows

    def scan(
        self, partition_id: int, prefix: bytes, after_key: bytes, rows_max: int, bytes_max: int
    ) -> tuple[list[tuple[bytes, bytes]], bool]:
        """Return ((data key, record)..., whether there is more) of one partition from after_key.

        Ends after ``rows_max`` rows, or with the row that reaches ``bytes_max``.
        """
        head = records.prefix_of(partition_id) + prefix
        after = records.prefix_of(partition_id) + after_key
        start = after + b"\x00" if after_key and after >= head else head
        found: list[tuple[bytes, bytes]] = []
        with self.env.begin(self._databases[DATA_DB]) as txn, txn.cursor() as cursor:
            if not cursor.set_range(start):
                return found, False
            rows = cursor.iternext(keys=True, values=True)
            size, step = 0, 4  # small first: each of these values may have a MiB
            while len(found) < rows_max and size < bytes_max:
                chunk = list(islice(rows, min(step, rows_max - len(found))))
                inside = [row for row in chunk if row[0].startswith(head)]
                found += inside
                size += sum(map(len, map(operator.itemgetter(1), inside)))
                if len(inside) < len(chunk) or not chunk:
                    return found, False
                step = max(1, min(512, (bytes_max - size) * len(found) // max(size, 1)))
            return found, True

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
        if len(inside) < rows_max:
            return inside, b""
        return inside, inside[-1] + b"\x00"

    def count(self) -> int:
        """Return how many records there are (of all partitions, expired ones included)."""
        with self.env.begin() as txn:
            entries: int = txn.stat(self._databases[DATA_DB])["entries"]
            return entries

    def used_bytes(self) -> int:
        """Return how much of the map holds something now; freed pages do not count."""
        with self.env.begin() as txn:
            return tree_bytes(txn, self._databases)


def tree_bytes(txn: lmdb.Transaction, databases: Sequence[Any]) -> int:
    """Return the size of the pages that the databases consist of."""
    pages = page_bytes = 0
    for database in databases:
        stat = txn.stat(database)
        pages += stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
        page_bytes = stat["psize"]
    return pages * page_bytes


def values_of(rows: Sequence[bytes], *, with_expiry: bool) -> list[bytes]:
    """Return the values of records that all have, or all lack, an expiry."""
    return list(map(_value_after[with_expiry], rows))
