"""Checks requests against limits before they are executed: keys, values, times to live."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from koinon_node.core.formats.records import U32Array, U64Array
from koinon_node.core.writes.updates import Expiry, ExpiryKind, expires_after
from koinon_node.state import NodeState, partitioner_of
from koinon_proto.contract.columns import DELETED
from koinon_proto.contract.errors import (
    InvalidArgumentError,
    TableBehindError,
    UnknownKeyspaceError,
    WrongPartitionError,
)
from koinon_proto.contract.keyspaces import Keyspace
from koinon_proto.contract.table import (
    MAX_BATCH_BYTES,
    MAX_BATCH_ROWS,
    MAX_KEY_BYTES,
    MAX_TTL_MS,
    Table,
)

CLOCK_SLACK_MS = 60_000
"""The most that a loading machine's clock may be ahead of this node's."""


def table_of(state: NodeState, request: Any) -> Table:
    """Check that the request is meant for this cluster; return the table."""
    table = state.table()
    table.cluster.check_id(request.cluster_id)
    return table


def keyspace_of(state: NodeState, request: Any) -> Keyspace:
    """Return the keyspace that a request names by its id.

    Raises:
        UnknownKeyspaceError: the keyspace was dropped.
        TableBehindError: this node does not know the keyspace, and the sender's table is newer.
    """
    return known_keyspace(table_of(state, request), request.keyspace_id, request.table_version)


def known_keyspace(table: Table, keyspace_id: int, table_version: int) -> Keyspace:
    """Return the keyspace with this id, for a sender with this table version. Raises the errors of
    ``keyspace_of``.
    """
    found = table.keyspaces.by_id(keyspace_id)
    if found is None and table_version > table.table_version:
        raise TableBehindError(table_version=table.table_version, required_version=table_version)
    if found is None or found.is_dropping:
        raise UnknownKeyspaceError()
    return found


def check_partitions(keyspace: Keyspace, partition_ids: Collection[int]) -> None:
    """Raise InvalidArgumentError if a partition is not the keyspace's."""
    if not len(partition_ids):
        return
    for partition_id in (int(max(partition_ids)), int(min(partition_ids))):
        if partition_id not in keyspace.partition_ids:
            raise InvalidArgumentError(
                field="partition_ids",
                reason=f"no such partition in keyspace {keyspace.name!r}",
                limit=keyspace.partition_ids[-1],
                actual=partition_id,
            )


def check_key(key: bytes) -> None:
    """Raise InvalidArgumentError unless the key has 1 to 500 bytes."""
    if not 1 <= len(key) <= MAX_KEY_BYTES:
        raise InvalidArgumentError(
            field="key",
            reason="must have 1 to 500 bytes",
            limit=MAX_KEY_BYTES if key else 1,
            actual=len(key),
        )


def check_value(size: int, keyspace: Keyspace, field: str = "value") -> None:
    """Raise InvalidArgumentError if a value of ``size`` bytes is too long for the keyspace."""
    if size > keyspace.max_value_bytes:
        raise InvalidArgumentError(
            field=field, reason="too long", limit=keyspace.max_value_bytes, actual=size
        )


# --- batches -----------------------------------------------------------------------------------


def check_batch_bytes(size: int) -> None:
    """Raise InvalidArgumentError if the keys and values of a batch exceed MAX_BATCH_BYTES."""
    if size > MAX_BATCH_BYTES:
        raise InvalidArgumentError(
            field="batch", reason="too many bytes", limit=MAX_BATCH_BYTES, actual=size
        )


def check_length(field: str, actual: int, rows: int) -> None:
    """Raise InvalidArgumentError unless a column of a batch has an entry for each key."""
    if actual != rows:
        raise InvalidArgumentError(
            field=field, reason="must have one entry a key", limit=rows, actual=actual
        )


def check_rows(keyspace: Keyspace, keys: Sequence[bytes], partition_ids: Sequence[int]) -> U32Array:
    """Check a batch's rows; return their partitions.

    Raises:
        InvalidArgumentError: there are too many rows, or a key or a partition is not valid.
        WrongPartitionError: a key lies in another partition than the sender says.
    """
    rows = len(keys)
    if rows > MAX_BATCH_ROWS:
        raise InvalidArgumentError(
            field="keys", reason="too many rows", limit=MAX_BATCH_ROWS, actual=rows
        )
    check_length("partition_ids", len(partition_ids), rows)
    if not rows:
        return np.zeros(0, np.uint32)
    lengths = list(map(len, keys))
    for row, length in ((lengths.index(n), n) for n in (min(lengths), max(lengths))):
        if not 1 <= length <= MAX_KEY_BYTES:
            raise InvalidArgumentError(
                field=f"keys[{row}]",
                reason="must have 1 to 500 bytes",
                limit=MAX_KEY_BYTES if length else 1,
                actual=length,
            )
    sent = np.fromiter(partition_ids, np.uint32, rows)
    for row in (int(sent.argmax()), int(sent.argmin())):
        if int(sent[row]) not in keyspace.partition_ids:
            raise InvalidArgumentError(
                field=f"partition_ids[{row}]",
                reason=f"no such partition in keyspace {keyspace.name!r}",
                limit=keyspace.partition_ids[-1],
                actual=int(sent[row]),
            )
    right = partitioner_of(keyspace).partitions_of(keys)
    if not np.array_equal(sent, right):
        row = int(np.flatnonzero(sent != right)[0])
        raise WrongPartitionError(
            partition_id=int(sent[row]), expected_partition_id=int(right[row])
        )
    return sent


# --- times to live -----------------------------------------------------------------------------


def check_ttl(ttl_ms: int, field: str = "ttl_ms") -> None:
    """Raise InvalidArgumentError if the time to live exceeds MAX_TTL_MS."""
    if ttl_ms > MAX_TTL_MS:
        raise InvalidArgumentError(
            field=field, reason="more than a hundred years", limit=MAX_TTL_MS, actual=ttl_ms
        )


def ttl_fault(
    keyspace: Keyspace, ttl_ms: int, field: str = "ttl_ms"
) -> InvalidArgumentError | None:
    """Return the error of a time to live that exceeds the keyspace's, or None if it is allowed."""
    if not keyspace.max_ttl_ms or ttl_ms <= keyspace.max_ttl_ms:
        return None
    return InvalidArgumentError(
        field=field,
        reason=f"longer than records of keyspace {keyspace.name!r} may live",
        limit=keyspace.max_ttl_ms,
        actual=ttl_ms,
    )


def never_fault(keyspace: Keyspace, field: str = "ttl_ms") -> InvalidArgumentError | None:
    """Return the error of a record without an expiry, or None if the keyspace allows it."""
    if not keyspace.max_ttl_ms:
        return None
    return InvalidArgumentError(
        field=field,
        reason=f"records of keyspace {keyspace.name!r} cannot live for ever: name a time",
        limit=keyspace.max_ttl_ms,
    )


def ttl_of(keyspace: Keyspace, ttl_ms: int, field: str = "ttl_ms") -> int:
    """Return the time to live of a record in ms, from the time that its write names (0: none); the
    result 0 means that the record never expires.

    Raises:
        InvalidArgumentError: the time is longer than the keyspace allows.
    """
    check_ttl(ttl_ms, field)
    if (fault := ttl_fault(keyspace, ttl_ms, field)) is not None:
        raise fault
    return ttl_ms or keyspace.unnamed_ttl_ms


def expiry_of(keyspace: Keyspace, ttl_ms: int) -> Expiry:
    """Return the expiry of an update with this time to live; see ``ttl_of``."""
    return expires_after(ttl_of(keyspace, ttl_ms))


def check_expiry(keyspace: Keyspace, expiry: Expiry, now_ms: int) -> None:
    """Raise InvalidArgumentError if an update names an expiry that the keyspace does not allow. A
    record may always keep its expiry.
    """
    if expiry.kind is ExpiryKind.NEVER:
        if (fault := never_fault(keyspace)) is not None:
            raise fault
    elif expiry.kind is not ExpiryKind.KEEP:
        ttl_of(keyspace, expiry.ms - (now_ms if expiry.kind is ExpiryKind.AT else 0))


def loaded_expiry(keyspace: Keyspace, expires_at_ms: int, now_ms: int, field: str) -> int:
    """Return the expiry in Unix ms of rows that a bulk load brings with this expiry; 0: none.

    Another machine's clock gave the expiry: an excess of up to ``CLOCK_SLACK_MS`` is cut off.

    Raises:
        InvalidArgumentError: the expiry is later than the keyspace allows.
    """
    return int(_loaded(keyspace, np.array([expires_at_ms], np.uint64), now_ms, field)[0])


def loaded_expiries(
    keyspace: Keyspace, expires_at_ms: U64Array, now_ms: int, field: str
) -> U64Array:
    """Apply ``loaded_expiry`` to rows with expiries of their own; rows that delete their key
    stay.
    """
    deleted = expires_at_ms == DELETED
    found = _loaded(keyspace, np.where(deleted, 0, expires_at_ms), now_ms, field)
    return np.where(deleted, expires_at_ms, found)


def _loaded(keyspace: Keyspace, expires_at_ms: U64Array, now_ms: int, field: str) -> U64Array:
    latest_ms = now_ms + (keyspace.max_ttl_ms or MAX_TTL_MS)
    last_ms = int(expires_at_ms.max(initial=0))
    if last_ms > latest_ms + CLOCK_SLACK_MS:
        named = f"records of keyspace {keyspace.name!r} may live"
        raise InvalidArgumentError(
            field=field,
            reason=f"longer than {named if keyspace.max_ttl_ms else 'a hundred years'}, in ms",
            limit=latest_ms - now_ms,
            actual=last_ms - now_ms,
        )
    unnamed_ms = now_ms + keyspace.unnamed_ttl_ms if keyspace.unnamed_ttl_ms else 0
    times = np.minimum(expires_at_ms, np.uint64(latest_ms))
    return np.where(expires_at_ms == 0, np.uint64(unnamed_ms), times)
