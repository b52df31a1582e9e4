"""Opens a store: locks the directory, checks or creates the store, replays its log; reads metadata.

This module writes only when it opens and closes the store, while no writer runs.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import lmdb
import numpy as np

from koinon_node.core.formats import records
from koinon_node.core.formats.records import PartitionEpochs
from koinon_node.core.replication.copies import STATES, Copies, Copy, CopyState
from koinon_node.core.writes.overlay import Overlay
from koinon_node.storage import directory as files
from koinon_node.storage import log_files, log_replay
from koinon_node.storage.environment import (
    META_DB,
    PARTITIONS_DB,
    open_databases,
    open_environment,
)
from koinon_node.storage.log_files import LOG_STATE
from koinon_node.store_config import StoreConfig
from koinon_proto.contract.cluster_errors import DataDirectoryError
from koinon_proto.contract.errors import UnsupportedVersionError

log = logging.getLogger(__name__)

FORMAT = b"format_version"
LOG_FORMAT_VERSION = 3
"""The format of a store with a write-ahead log, which may hold records that the store lacks."""
STORE_ID = b"store_id"
NEXT_STORE_ID = b"next_store_id"
CLUSTER_ID = b"cluster_id"
NODE_ID = b"node_id"
NODE_EPOCH = b"node_epoch"
REGISTRATION_ID = b"registration_id"
RUN_STATE = b"run_state"  # "clean" or "open <durability> <boot id> <id of the data file>"
COPIED_WHILE_OPEN = "directory was copied while it was open"
"""A cause of distrust: see ``_distrust_what_may_lack_rows``."""

_EPOCHS, _PROGRESS, _DROPPING = range(3)  # kinds of a partition's metadata
_ALL_PARTITIONS = 65_536


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """The node's durable facts about itself."""

    store_id: str
    cluster_id: str
    node_epoch: int
    registration_id: str


def _distrust_copies(txn: lmdb.Transaction[bytes], partitions: Any) -> None:
    """Mark every copy as untrusted: it may lack any of its records."""
    found = [(key, value) for key, value in txn.cursor(partitions) if key[2] == _PROGRESS]
    for key, value in found:
        through, floor, state = records.decode_progress(value)
        columns = np.array([through], np.uint64), np.array([floor], np.uint64)
        (marked,) = records.encode_progress(*columns, state | CopyState.UNTRUSTED)
        txn.put(key, marked, db=partitions)


class OpenedStore:
    """An LMDB environment with the metadata of the node and its copies; see Store."""

    def __init__(self, config: StoreConfig) -> None:
        """Lock and open the directory, or create a store in it.

        Raises:
            DataDirectoryError: the directory is in use, or a file in it is torn, truncated, missing
                or foreign.
        """
        self.config = config
        self.overlay = Overlay()  # rows that are durable in the log, but not in the store yet
        self.lock_descriptor = files.lock_directory(config.directory)
        self._env: lmdb.Environment | None = None
        self.distrusted_for = ""  # why this start gave the store a new identity; '': it did not
        try:
            fresh = files.begin_if_fresh(config.directory)
            store_id = files.new_store_id() if fresh else files.read_identity(config.directory)
            self._open(fresh, store_id)
            self._distrust_what_may_lack_rows()
            file_id = files.data_file_id(config.directory)
            self._set_run_state(f"open {config.durability} {files.boot_id()} {file_id}")
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
            self._seen_epochs = self._read_seen_epochs()
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
        if following and following == store_id:  # a change of the id was interrupted after the file
            self._put_meta({STORE_ID: store_id, NEXT_STORE_ID: ""})
        elif own != store_id:
            raise DataDirectoryError(
                path=path, reason=f"belongs to store {own}, the identity file names {store_id}"
            )

    def _take_over_log(self) -> None:
        """Take the records left in the write-ahead log into the store, and begin a new life of the
        log: from then on the old contents of its segments are ignored.

        A store with a log has its own format number until it is closed cleanly: if the log is
        missing at the next start, the store is refused instead of served without the log's rows.

        Raises:
            DataDirectoryError: the log is missing or damaged, or the store has no room for its
            rows.
        """
        directory = self.config.directory
        life, position = log_files.decode_state(self._meta(LOG_STATE))
        if self._meta(FORMAT) == str(LOG_FORMAT_VERSION):
            if not log_files.has_log(directory):
                path = str(directory / log_files.LOG)
                raise DataDirectoryError(
                    path=path, reason="missing: it has rows that the store lacks"
                )
            try:
                log_replay.replay(self.env, self._databases, directory, life, position)
            except DataDirectoryError as error:
                if not self._cause_of_distrust():
                    raise
                log.warning("the log of an untrusted store ends early error=%s", error)
        self.log_life = log_files.new_life()
        self.logged = self.config.write_ahead_log and log_files.make_log(directory)
        version = LOG_FORMAT_VERSION if self.logged else files.FORMAT_VERSION
        state = log_files.encode_state(self.log_life, 0).decode()
        self._put_meta({FORMAT: str(version), LOG_STATE: state})
        if not self.logged:
            log_files.remove_log(directory)

    def _distrust_what_may_lack_rows(self) -> None:
        """Rule 3: give up the store's identity if acknowledged rows may be missing.

        After an unclean end under durability=interval any acknowledged rows may be missing, if the
        machine was down since (this is another boot) or a sync failed. Under any durability they
        may be missing if the directory is a copy of one that a process had open: that process may
        have continued in the same node epoch long after the copy was made, so the coordinator
        cannot tell the copy from the original. (A copy of a cleanly closed directory is as good as
        the original until the original is opened again, which begins a node epoch: rule 2.)

        The store then registers under a new store_id, and the coordinator treats the old store as
        lost (out of in_sync; partitions of which it was the only member go offline). Its copies are
        marked as untrusted: the primary's copy replaces each. Until then their data stays on the
        disk for the operator.

        A copied directory is recognised by the identity of its data file. A volume that is rolled
        back below the file system keeps that identity; then the copy is noticed only if the node
        has begun another epoch since (rule 2).

        With durability=commit no such distrust is needed after a crash. A transaction is
        acknowledged after a sync of its pages and then of the meta page that leads to them. If the
        sync of the pages failed, nothing leads to them. If the sync of the meta page failed, this
        process may see a transaction that the disk does not have: complete, of unknown fate, and
        durable with the next commit, which is made here before the node serves.
        """
        cause = self._cause_of_distrust()
        if not cause:
            return
        self.distrusted_for = cause
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
        """Return the reason why acknowledged rows may be missing; '' if none can be."""
        state = self._meta(RUN_STATE).split(" ")
        file_id = files.data_file_id(self.config.directory)
        if state[0] == "open" and state[3:] != [file_id]:
            return COPIED_WHILE_OPEN
        if state[:2] != ["open", "interval"]:
            return ""
        if files.noted_failed_sync(self.config.directory):
            return "sync failed"
        return "machine went down" if state[2] != files.boot_id() else ""

    def claim(self, node_id: str) -> None:
        """Assign a new store to this node; check that another store is this node's.

        Raises:
            DataDirectoryError: the store is another node's. Under this node's id it would pass for
                a replaced disk, and the partitions of its own node would wait for it.
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
        """Release the store. ``clean``: the writer has ended and everything is synced."""
        if clean:
            self._put_meta({FORMAT: str(files.FORMAT_VERSION), RUN_STATE: "clean"})
        self._release()

    def __enter__(self) -> Self:
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

    # --- metadata --------------------------------------------------------------------------

    def identity(self) -> Identity:
        return Identity(
            store_id=self._meta(STORE_ID),
            cluster_id=self._meta(CLUSTER_ID),
            node_epoch=int(self._meta(NODE_EPOCH) or 0),
            registration_id=self._meta(REGISTRATION_ID),
        )

    @property
    def seen_epochs(self) -> dict[int, int]:
        """The highest primary epoch of each partition in the store at its opening."""
        return self._seen_epochs

    def _read_seen_epochs(self) -> dict[int, int]:
        return {
            int.from_bytes(key[:2], "big"): records.newest_epoch(value)
            for key, value in self._partition_entries(_EPOCHS)
        }

    def partition_epochs(self) -> dict[int, PartitionEpochs]:
        """Read the epochs of all partitions that this store has seen."""
        return {
            int.from_bytes(key[:2], "big"): records.decode_epochs(value)
            for key, value in self._partition_entries(_EPOCHS)
        }

    def copies(self) -> Copies:
        """Read the metadata of all copies."""
        complete_through = np.zeros(_ALL_PARTITIONS, np.uint64)
        purge_floors = np.zeros(_ALL_PARTITIONS, np.uint64)
        states = np.zeros(_ALL_PARTITIONS, np.uint8)
        epochs: dict[int, PartitionEpochs] = {}
        for key, value in self._partition_entries(_EPOCHS, _PROGRESS, _DROPPING):  # in this order
            partition_id, kind = int.from_bytes(key[:2], "big"), key[2]
            if kind == _EPOCHS:
                epochs[partition_id] = records.decode_epochs(value)
            elif kind == _PROGRESS:
                through, floor, state = records.decode_progress(value)
                complete_through[partition_id], purge_floors[partition_id] = through, floor
                states[partition_id] = state
            else:
                states[partition_id] |= CopyState.UNUSABLE
        return Copies(complete_through, purge_floors, states, epochs)

    def read_copies(self, partition_ids: Sequence[int]) -> dict[int, Copy]:
        """Read the metadata of these partitions' copies, in one transaction."""
        found: dict[int, Copy] = {}
        keys_of = (records.progress_key, records.dropping_key, records.epochs_key)
        keys = [key_of(p) for p in partition_ids for key_of in keys_of]
        laid_over = self.overlay.find(PARTITIONS_DB, keys) if self.overlay else {}
        with self.env.begin(self._databases[PARTITIONS_DB]) as txn:
            values = [laid_over[key] if key in laid_over else txn.get(key) for key in keys]
        of_each = zip(values[::3], values[1::3], values[2::3], strict=True)
        for partition_id, (progress, dropping, data) in zip(partition_ids, of_each, strict=True):
            through, floor, state = records.decode_progress(progress) if progress else (0, 0, 0)
            if dropping is not None:
                state |= CopyState.UNUSABLE
            epochs = records.decode_epochs(data) if data else PartitionEpochs(primary_epoch=0)
            found[partition_id] = Copy(through, floor, STATES[state], epochs)
        return found

    def dropping(self) -> list[int]:
        """Return the partitions whose data is being deleted."""
        return [int.from_bytes(key[:2], "big") for key, _ in self._partition_entries(_DROPPING)]

    def _partition_entries(self, *kinds: int) -> Iterator[tuple[bytes, bytes]]:
        with self.env.begin(self._databases[PARTITIONS_DB]) as txn:
            for key, value in txn.cursor():
                if key[2] in kinds:
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
        """Make durable the writes that an earlier process with durability=interval left in the page
        cache. A write error that the earlier process missed shows here.
        """
        try:
            self.env.sync(True)
        except lmdb.Error:
            files.note_failed_sync(self.config.directory)
            raise
