"""The stored bytes: keys, records, the expiry index and the metadata of partitions.

data:       u16 partition_id || u8 kind || key
                                         ->  u64 sequence || u8 flags || [u64 expiry_ms] || value
            kind 0: a user's record under its key
            kind 1: a chunk or mark of a bulk load (core/formats/chunk_keys.py has key and value)
            kind 2: a consumer group's cursor (core/writes/cursor_updates.py has key and value)
expiry:     u64 expiry_ms || data key     ->  (nothing)
            One for each record that expires. Some entries are stale: a write without an expiry
            leaves the entry of the record that it replaces, until that entry is due.
partitions: u16 partition_id || 0x00      ->  u8 1 || u64 primary_epoch || u16 n || n x (u64, u64)
                                              || u64 unchanged_from
            u16 partition_id || 0x01      ->  u8 2 || u64 complete_through || u64 purge_floor
                                              || u8 state (CopyState, copies.py)
            u16 partition_id || 0x02      ->  (nothing): its data is being deleted

The expiry of a tombstone is the time from which it may be purged, so one index serves both.

Only the code that serves clients knows kinds. The code that replicates, moves, drops and compares
copies treats all bytes behind the partition_id as the key.

All numbers are big-endian, so that LMDB's byte order is their order. Hot paths process whole
columns by C-level calls, never row by row.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import starmap
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from koinon_node.core.formats.record_layout import FLAG_EXPIRES as FLAG_EXPIRES
from koinon_node.core.formats.record_layout import FLAG_TOMBSTONE as FLAG_TOMBSTONE
from koinon_node.core.formats.record_layout import FLAGS_AT as FLAGS_AT
from koinon_node.core.formats.record_layout import HEADER_BYTES as HEADER_BYTES
from koinon_node.core.formats.record_layout import (
    HEADER_WITH_EXPIRY_BYTES as HEADER_WITH_EXPIRY_BYTES,
)
from koinon_proto.contract.errors import UnsupportedVersionError
from koinon_proto.contract.table import MAX_KEY_BYTES, first_sequence

KNOWN_FLAGS = FLAG_EXPIRES | FLAG_TOMBSTONE
USER = 0
STAGED = 1
CURSOR = 2
KEY_AT = 3
"""The index in a data key at which the user's key begins."""
REST_BYTES_MAX = MAX_KEY_BYTES + 1
"""The most bytes of a data key behind its partition_id."""
METADATA_VERSION = 1
PROGRESS_VERSION = 2
NO_SEQUENCE = 2**64 - 1
"""Greater than every sequence."""
EPOCH_HISTORY_MAX = 128
"""The most entries of a partition's epoch history; a replica older than them takes a snapshot."""

U64Array = npt.NDArray[np.uint64]
U32Array = npt.NDArray[np.uint32]
U8Array = npt.NDArray[np.uint8]
F64Array = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

_prefix_of_key = operator.itemgetter(slice(0, 2))
_sequence_bytes = operator.itemgetter(slice(0, 8))
_HEADER = struct.Struct(">QB")
_HEADER_WITH_EXPIRY = struct.Struct(">QBQ")
_U64 = struct.Struct(">Q")
_U16 = struct.Struct(">H")
_HEAD = struct.Struct(">HB")
_HEAD_ROW = np.dtype([("partition", ">u2"), ("kind", "u1")])
_EPOCHS_HEAD = struct.Struct(">BQH")
_EPOCH_START = struct.Struct(">QQ")
_PROGRESS = struct.Struct(">BQQB")
_PROGRESS_ROW = np.dtype(
    [("version", "u1"), ("complete_through", ">u8"), ("purge_floor", ">u8"), ("state", "u1")]
)

# --- data keys ---------------------------------------------------------------------------------


def prefix_of(partition_id: int) -> bytes:
    """Return the prefix of all data keys of the partition."""
    return _U16.pack(partition_id)


def head_of(partition_id: int, kind: int = USER) -> bytes:
    """Return the prefix of all data keys of this kind in the partition."""
    return _HEAD.pack(partition_id, kind)


@lru_cache(maxsize=2)
def heads(partition_count: int) -> list[bytes]:
    """Return ``head_of`` for users' records of each partition."""
    return list(map(head_of, range(partition_count)))


def data_keys(
    partition_ids: npt.NDArray[Any], keys: Sequence[bytes], kind: int = USER
) -> list[bytes]:
    """Return the data key of each row."""
    heads = np.empty(len(keys), _HEAD_ROW)
    heads["partition"] = partition_ids
    heads["kind"] = kind
    return list(map(operator.add, struct.unpack("3s" * len(keys), heads.tobytes()), keys))


def partition_of_data_key(data_key: bytes) -> int:
    """Return the partition that a data key belongs to."""
    return int.from_bytes(data_key[:2], "big")


def partitions_of_data_keys(keys: Sequence[bytes]) -> U32Array:
    """Return the partition of each data key."""
    return np.frombuffer(b"".join(map(_prefix_of_key, keys)), ">u2").astype(np.uint32)


# --- records -----------------------------------------------------------------------------------


class Record(NamedTuple):
    """A decoded record. ``expires_at_ms`` 0: never expires."""

    sequence: int
    flags: int
    expires_at_ms: int
    value: bytes

    @property
    def tombstone(self) -> bool:
        return bool(self.flags & FLAG_TOMBSTONE)

    def expired(self, now_ms: int) -> bool:
        return 0 < self.expires_at_ms <= now_ms


def encode_record(sequence: int, value: bytes, expires_at_ms: int = 0) -> bytes:
    """Encode a record."""
    if expires_at_ms:
        return _HEADER_WITH_EXPIRY.pack(sequence, FLAG_EXPIRES, expires_at_ms) + value
    return _HEADER.pack(sequence, 0) + value


def value_of(record: bytes) -> bytes:
    """Return the value of an encoded record."""
    return record[HEADER_WITH_EXPIRY_BYTES if record[FLAGS_AT] & FLAG_EXPIRES else HEADER_BYTES :]


def put_bytes(encoded: Sequence[bytes]) -> int:
    """Return the bytes of the records that are no tombstones; b"" means no record."""
    return sum(len(r) for r in encoded if r and not r[FLAGS_AT] & FLAG_TOMBSTONE)


def encode_records(
    sequences: U64Array, values: Sequence[bytes], expires_at_ms: Sequence[int] | None
) -> list[bytes]:
    """Encode columns of records; an expiry of 0 means never."""
    if expires_at_ms is not None:
        return list(map(encode_record, sequences.tolist(), values, expires_at_ms))
    headers = np.zeros((len(values), HEADER_BYTES), np.uint8)
    headers[:, :8] = sequences.astype(">u8").view(np.uint8).reshape(-1, 8)
    unpacked = struct.unpack("9s" * len(values), headers.tobytes())
    return list(map(operator.add, unpacked, values))


def encode_tombstone(sequence: int, purge_at_ms: int) -> bytes:
    """Encode the tombstone of a delete, which may be purged from ``purge_at_ms`` on."""
    return _HEADER_WITH_EXPIRY.pack(sequence, FLAG_TOMBSTONE | FLAG_EXPIRES, purge_at_ms)


def sequences_of(rows: Sequence[bytes]) -> U64Array:
    """Return the sequences of encoded records."""
    return np.frombuffer(b"".join(map(_sequence_bytes, rows)), ">u8").astype(np.uint64)


def decode_record(record: bytes) -> Record:
    """Decode a record.

    Raises:
        UnsupportedVersionError: the record has flags that this build does not know.
    """
    sequence, flags = _HEADER.unpack_from(record)
    if flags & ~KNOWN_FLAGS:
        raise UnsupportedVersionError(what="record flags", version=flags, supported=KNOWN_FLAGS)
    if flags & FLAG_EXPIRES:
        (expires_at_ms,) = _U64.unpack_from(record, HEADER_BYTES)
        return Record(sequence, flags, expires_at_ms, record[HEADER_WITH_EXPIRY_BYTES:])
    return Record(sequence, flags, 0, record[HEADER_BYTES:])


# --- partition metadata ------------------------------------------------------------------------


class EpochStart(NamedTuple):
    """The start of a primary epoch: ``previous_sequence`` is the last sequence before it (0:
    none).
    """

    primary_epoch: int
    previous_sequence: int


_epoch_start = partial(tuple.__new__, EpochStart)
"""Builds an EpochStart from a pair in C: a node's start reads up to 128 of each partition."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionEpochs:
    """The highest primary epoch that this store has seen of a partition, and the epoch history.

    ``unchanged_from``: this lineage has no write from above this sequence to the beginning of the
    last epoch in ``history``; NO_SEQUENCE if unknown. It is a fact of that epoch: every copy with
    the epoch in its history may store it.
    """

    primary_epoch: int
    history: tuple[EpochStart, ...] = ()
    unchanged_from: int = NO_SEQUENCE

    def adopted(
        self, primary_epoch: int, previous_sequence: int, *, clean: bool
    ) -> PartitionEpochs:
        """Return the metadata after the adoption of ``primary_epoch``. ``clean``: the copy held
        nothing above ``previous_sequence``. Otherwise the records above it belong to the lineage
        from now on.
        """
        history = (*self.history, EpochStart(primary_epoch, previous_sequence))
        return PartitionEpochs(
            primary_epoch=primary_epoch,
            history=history[-EPOCH_HISTORY_MAX:],
            unchanged_from=self.unchanged_before(previous_sequence) if clean else NO_SEQUENCE,
        )

    def unchanged_before(self, complete_through: int) -> int:
        """Return the lowest sequence from which the lineage is known to be unchanged up to
        ``complete_through``, where a copy with this history ends.
        """
        if self.history and complete_through == first_sequence(self.history[-1].primary_epoch):
            return min(complete_through, self.unchanged_from)
        return complete_through


def epochs_key(partition_id: int) -> bytes:
    return prefix_of(partition_id) + b"\x00"


def progress_key(partition_id: int) -> bytes:
    return prefix_of(partition_id) + b"\x01"


def dropping_key(partition_id: int) -> bytes:
    return prefix_of(partition_id) + b"\x02"


def encode_epochs(epochs: PartitionEpochs) -> bytes:
    history = epochs.history
    head = _EPOCHS_HEAD.pack(METADATA_VERSION, epochs.primary_epoch, len(history))
    starts = b"".join(starmap(_EPOCH_START.pack, history))
    return head + starts + _U64.pack(epochs.unchanged_from)


def decode_epochs(data: bytes) -> PartitionEpochs:
    """Decode the epochs of a partition.

    Raises:
        UnsupportedVersionError: its encoding is one that this build does not know.
    """
    _check_version(data, METADATA_VERSION)
    _, primary_epoch, count = _EPOCHS_HEAD.unpack_from(data)
    end = _EPOCHS_HEAD.size + count * _EPOCH_START.size
    numbers = iter(struct.unpack_from(f">{2 * count}Q", data, _EPOCHS_HEAD.size))
    history = tuple(map(_epoch_start, zip(numbers, numbers, strict=True)))
    (unchanged_from,) = _U64.unpack_from(data, end)
    return PartitionEpochs(
        primary_epoch=primary_epoch, history=history, unchanged_from=unchanged_from
    )


def newest_epoch(data: bytes) -> int:
    """Decode only the ``primary_epoch`` of encoded epochs.

    Raises:
        UnsupportedVersionError: see ``decode_epochs``.
    """
    _check_version(data, METADATA_VERSION)
    primary_epoch: int = _EPOCHS_HEAD.unpack_from(data)[1]
    return primary_epoch


def encode_progress(
    complete_through: U64Array, purge_floor: U64Array, states: U8Array | int = 0
) -> list[bytes]:
    """Encode the progress entries of several partitions."""
    rows = np.empty(len(complete_through), _PROGRESS_ROW)
    rows["version"] = PROGRESS_VERSION
    rows["complete_through"] = complete_through
    rows["purge_floor"] = purge_floor
    rows["state"] = states
    return list(struct.unpack("18s" * len(rows), rows.tobytes()))


def encode_one_progress(complete_through: int, purge_floor: int) -> bytes:
    """Encode the progress entry of one partition with a usable copy."""
    return _PROGRESS.pack(PROGRESS_VERSION, complete_through, purge_floor, 0)


def progress_keys(partition_ids: npt.NDArray[Any]) -> list[bytes]:
    """Return the progress keys of several partitions."""
    wide = (partition_ids.astype(np.uint32) << np.uint32(8)) | np.uint32(1)
    quads = struct.unpack("4s" * len(wide), wide.astype(">u4").tobytes())
    return [quad[1:] for quad in quads]


def decode_progress(data: bytes) -> tuple[int, int, int]:
    """Decode a progress entry into (complete_through, purge_floor, state).

    Raises:
        UnsupportedVersionError: its encoding is one that this build does not know.
    """
    _check_version(data, PROGRESS_VERSION)
    _, complete_through, purge_floor, state = _PROGRESS.unpack(data)
    return complete_through, purge_floor, state


def _check_version(data: bytes, supported: int) -> None:
    if data[0] != supported:
        raise UnsupportedVersionError(
            what="partition metadata", version=data[0], supported=supported
        )
