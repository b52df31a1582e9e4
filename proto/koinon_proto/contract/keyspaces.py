"""Keyspaces: named rooms of keys with partitions and rules of their own. Pure.

A keyspace is a contiguous range of partition ids, ``[base, base + partition_count)``, and settings.
Partition ids are the cluster's, so records, replication, moves and loads need nothing more to keep
keyspaces apart: a key lies in a partition, and a partition lies in one keyspace. The keyspace
``default`` is there from the beginning; its range begins with 0 and its count never changes. Its
settings are those of the cluster (``ClusterConfig``).

An id names one keyspace for ever. A name or a range of partitions may come back for another one, so
requests name the id beside the partitions: one that means a keyspace of the past is refused, and
never touches the keyspace that has its partitions now.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import NewType, Protocol

from koinon_proto.contract.errors import (
    InvalidArgumentError,
    UnknownKeyspaceError,
    WrongClusterError,
)

KeyspaceId = NewType("KeyspaceId", int)
"""A keyspace's number: given at its creation, from 1 up, never again; 0 is ``default``."""


def half_of(copies: int) -> int:
    """Return half of the copies, rounded up: the number that a write needs by default."""
    return (copies + 1) // 2


ALTERABLE = (
    "replication_factor",
    "min_in_sync",
    "max_value_bytes",
    "pool",
    "default_ttl_ms",
    "max_ttl_ms",
    "max_rows_per_s",
    "max_bytes_per_s",
)
"""The settings that an operator can change later; the others are chosen once."""
DEFAULT = "default"
DEFAULT_ID = KeyspaceId(0)
KEYSPACES_MAX = 1_000
"""Beside ``default``, those that are being dropped included: everybody is sent all of them."""
NAME_CHARS_MAX = 64
QUOTA_MAX = 10**15
"""Of rows or bytes a second: more is a mistake in the unit."""
_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]*")


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterConfig:
    """Settings that are chosen at bootstrap and replicated with the table. ``partitioner``,
    ``partition_count``, ``replication_factor``, ``min_in_sync`` and ``max_value_bytes`` are those
    of the keyspace ``default``; an operator can change the last three later.
    """

    cluster_id: str
    partitioner: str
    partition_count: int
    replication_factor: int
    min_in_sync: int
    bootstrap_nodes: int
    max_value_bytes: int
    heartbeat_interval_ms: int = 200
    session_timeout_ms: int = 1500
    lease_ms: int = 1000
    check_quorum_ms: int = 400
    replica_timeout_ms: int = 1000
    rereplicate_after_ms: int = 600_000
    partitioner_fingerprint: bytes = b""
    """The fingerprint of the partitioner's answers (``koinon_proto.fingerprint``); empty: not
    compared."""

    def check_id(self, cluster_id: str, *, required: bool = False) -> None:
        """Refuse a caller of another cluster: addresses are reused. "" names none; it is let in
        unless an id is ``required``.

        Raises:
            WrongClusterError
        """
        if cluster_id != self.cluster_id and (cluster_id or required):
            raise WrongClusterError(
                expected_cluster_id=self.cluster_id, actual_cluster_id=cluster_id
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Keyspace:
    """One keyspace. ``min_in_sync`` is for rows that have all their replicas (``min_in_sync_of``).

    ``pool``: its replicas lie on nodes of this pool; "" is a pool as well. ``is_dropping``: it is
    gone for everybody, and nodes still erase its copies. ``default_ttl_ms`` and ``max_ttl_ms``: see
    ``unnamed_ttl_ms``; 0: there is none. ``max_rows_per_s`` and ``max_bytes_per_s`` (of keys and
    values): what its clients may read and write in the whole cluster; 0: no limit.

    ``first_epoch``: the primary epoch with which all of its rows began, above each that a keyspace
    before it had in these partitions. A copy of a lower epoch is of such a keyspace.
    """

    keyspace_id: KeyspaceId
    name: str
    base: int
    partition_count: int
    partitioner: str
    partitioner_fingerprint: bytes = b""
    replication_factor: int
    min_in_sync: int
    max_value_bytes: int
    pool: str = ""
    is_dropping: bool = False
    default_ttl_ms: int = 0
    max_ttl_ms: int = 0
    max_rows_per_s: int = 0
    max_bytes_per_s: int = 0
    first_epoch: int = 0

    @property
    def partition_ids(self) -> range:
        """The ids of its partitions."""
        return range(self.base, self.base + self.partition_count)

    @property
    def unnamed_ttl_ms(self) -> int:
        """The time to live of a record that is written without one: the default, or the maximum,
        which no record may exceed; 0: it never expires.
        """
        return self.default_ttl_ms or self.max_ttl_ms

    def min_in_sync_among(self, replicas: int) -> int:
        """Return how many in-sync replicas a write needs where there are so many replicas.

        ``min_in_sync``, or less where there are fewer replicas than wanted: half of them, rounded
        up, or all but as many as may fail by the settings, if that is more. So a row that is only
        on its way to more replicas, or back from there, is served meanwhile.
        """
        may_fail = self.replication_factor - self.min_in_sync
        return max(1, min(self.min_in_sync, max(half_of(replicas), replicas - may_fail)))


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyspaceList:
    """The keyspaces that the table carries: those beside ``default``, by ``base``, and an entry for
    ``default`` once it has settings that a cluster's configuration has no place for.
    ``changed_at``: the table version of the last change.
    """

    changed_at: int = 0
    keyspaces: tuple[Keyspace, ...] = ()


NO_KEYSPACES = KeyspaceList()


class ReplicatedRow(Protocol):
    """A partition's row, as far as its keyspace needs to know it (``table.PartitionRow``)."""

    @property
    def partition_id(self) -> int: ...
    @property
    def replicas(self) -> Sequence[int]: ...
    @property
    def adding(self) -> Sequence[int]: ...
    @property
    def removing(self) -> Sequence[int]: ...
    @property
    def settled(self) -> Sequence[int]:
        """The replicas that were there before the move under way."""

    @property
    def target(self) -> Sequence[int]:
        """The replicas once the move under way is over."""


class Keyspaces:
    """All keyspaces of a cluster, ``default`` included, by name, id and partition. Immutable."""

    def __init__(self, cluster: ClusterConfig, known: KeyspaceList = NO_KEYSPACES) -> None:
        others = [k for k in known.keyspaces if k.keyspace_id != DEFAULT_ID]
        own = next((k for k in known.keyspaces if k.keyspace_id == DEFAULT_ID), None)
        self.default = default_keyspace(cluster, own)
        self._all = (self.default, *sorted(others, key=lambda k: k.base))
        self._minima: dict[tuple[int, int], int] = {}  # by keyspace and replicas: asked for so far

    def __iter__(self) -> Iterator[Keyspace]:
        """Yield the keyspaces that can be used, by ``base``."""
        return (keyspace for keyspace in self._all if not keyspace.is_dropping)

    def __len__(self) -> int:
        return sum(not keyspace.is_dropping for keyspace in self._all)

    @property
    def all(self) -> tuple[Keyspace, ...]:
        """All keyspaces, those that are being dropped included, by ``base``."""
        return self._all

    @property
    def dropping(self) -> tuple[Keyspace, ...]:
        """Keyspaces of which nodes still erase copies."""
        return tuple(keyspace for keyspace in self._all if keyspace.is_dropping)

    @cached_property
    def _by_name(self) -> dict[str, Keyspace]:
        return {keyspace.name: keyspace for keyspace in self}

    @cached_property
    def _by_id(self) -> dict[int, Keyspace]:
        return {keyspace.keyspace_id: keyspace for keyspace in self._all}

    @cached_property
    def _by_partition(self) -> list[Keyspace | None]:
        """The keyspace of each partition, up to the last that has one: thousands of rows may change
        at once, and each is asked for its own.
        """
        found: list[Keyspace | None] = []
        for keyspace in self._all:
            found += [None] * (keyspace.base - len(found))
            found += [keyspace] * keyspace.partition_count
        return found

    def get(self, name: str) -> Keyspace | None:
        """The keyspace of this name; "" is ``default``. None: there is none, or it is dropped."""
        return self._by_name.get(name) if name else self.default

    def by_id(self, keyspace_id: int) -> Keyspace | None:
        """The keyspace with this id; None if it is forgotten."""
        return self._by_id.get(keyspace_id)

    def name_of(self, keyspace_id: int) -> str:
        """Return the name of the keyspace with this id; '' if it is forgotten."""
        found = self._by_id.get(keyspace_id)
        return found.name if found is not None else ""

    def named(self, name: str) -> Keyspace:
        """Return the keyspace of this name; "" is ``default``.

        Raises:
            UnknownKeyspaceError: there is none.
        """
        found = self.get(name)
        if found is None:
            raise UnknownKeyspaceError(keyspace=name)
        return found

    def of(self, partition_id: int) -> Keyspace | None:
        """Return the partition's keyspace, even if it is being dropped."""
        known = self._by_partition
        return known[partition_id] if 0 <= partition_id < len(known) else None

    def min_in_sync(self, row: ReplicatedRow) -> int:
        """Return how many in-sync replicas a write to the row needs; ``in_sync`` never shrinks
        below. It counts by the replicas that the row had before the move under way, or has after
        it, if these are fewer.
        """
        keyspace = self.of(row.partition_id)
        if keyspace is None:
            return 1
        fewest = len(row.replicas)
        if row.adding or row.removing:
            fewest = min(len(row.settled), len(row.target))
        place = keyspace.keyspace_id, fewest
        known = self._minima.get(place)
        if known is None:
            known = self._minima[place] = keyspace.min_in_sync_among(fewest)
        return known

    def free_base(self, count: int, end: int) -> int | None:
        """Return the first partition of the first free range of ``count`` partitions that ends at
        ``end`` at the latest; None if there is none.
        """
        base = 0
        for keyspace in self._all:
            if keyspace.base - base >= count:
                return base
            base = keyspace.base + keyspace.partition_count
        return base if base + count <= end else None


def default_keyspace(cluster: ClusterConfig, own: Keyspace | None = None) -> Keyspace:
    """Return the keyspace ``default``, with what ``own`` has beyond the cluster's configuration."""
    shared = {
        field.name: getattr(cluster, field.name)
        for field in fields(Keyspace)
        if hasattr(cluster, field.name)
    }
    if own is not None:
        return replace(own, **shared)
    return Keyspace(keyspace_id=DEFAULT_ID, name=DEFAULT, base=0, **shared)


def check_keyspace_name(name: str, field: str = "keyspace") -> None:
    """Raise InvalidArgumentError unless a keyspace may have this name."""
    if len(name) > NAME_CHARS_MAX:
        raise InvalidArgumentError(
            field=field, reason="too long", limit=NAME_CHARS_MAX, actual=len(name)
        )
    if not _NAME.fullmatch(name):
        raise InvalidArgumentError(
            field=field,
            reason=f"{name!r} must begin with a small letter or a digit, and have only these, "
            "'_', '.' and '-'",
        )
