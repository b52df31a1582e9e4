"""Requests to the engine and its answers, as columns in which entry i belongs to row i."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from koinon_node.core.formats.records import USER, U32Array, U64Array
from koinon_node.core.writes.atomic_batch import Step
from koinon_node.core.writes.cursor_updates import CommitCursor
from koinon_node.core.writes.updates import Result, Update
from koinon_proto.contract.errors import KoinonError

IntArray = npt.NDArray[np.int64]


class Durability(IntEnum):
    """The durability at which a write is acknowledged, with its number on the wire."""

    ALL_IN_SYNC = 0
    PRIMARY = 1


@dataclass(kw_only=True, slots=True)
class ReadAnswer:
    """Columns over the requested rows; versions and expiries only if wanted."""

    values: list[bytes] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    expires_at_ms: list[int] = field(default_factory=list)
    refusals: dict[int, KoinonError] = field(default_factory=dict)
    held_bytes: int = 0  # that the ReadBudget counts for this answer during the read


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteBatch:
    """Checked rows to write. ``ttl_ms`` is per row; 0: never expires."""

    table_version: int
    keys: Sequence[bytes]
    values: Sequence[bytes]
    partition_ids: U32Array
    deletes: frozenset[int] = frozenset()
    ttl_ms: Sequence[int] | None = None
    conditions: dict[int, int] = field(default_factory=dict)
    list_present: bool = False
    """Rows that fail their condition "absent" are listed in ``present`` instead of getting
    errors."""
    updates: Mapping[int, Update] = field(default_factory=dict)
    """Updates by row. The value, time to live and condition of such a row are ignored."""
    refused: Mapping[int, KoinonError] = field(default_factory=dict)
    """The errors of rows that were refused before the write, by row; never of all rows. A client's
    message joins rows of several callers, so the other rows are still written.
    """
    durability: Durability = Durability.ALL_IN_SYNC
    kind: int = USER  # of the records
    load_id: int = 0  # 0, or the bulk load that must be open for the write

    @property
    def is_one_put(self) -> bool:
        """True if the batch is a single put of a user's row without a condition."""
        return (
            len(self.keys) == 1
            and self.kind == USER
            and not (self.deletes or self.conditions or self.updates or self.load_id)
        )

    def taking(self, rows: IntArray) -> WriteBatch:
        """Return a batch of only these rows, renumbered."""
        chosen = rows.tolist()
        place = {row: index for index, row in enumerate(chosen)}
        ttl_ms = self.ttl_ms
        return replace(
            self,
            keys=[self.keys[row] for row in chosen],
            values=[self.values[row] for row in chosen],
            partition_ids=self.partition_ids[rows],
            deletes=frozenset(place[row] for row in self.deletes if row in place),
            ttl_ms=None if ttl_ms is None else [ttl_ms[row] for row in chosen],
            conditions={place[r]: v for r, v in self.conditions.items() if r in place},
            updates={place[r]: u for r, u in self.updates.items() if r in place},
            refused={place[r]: e for r, e in self.refused.items() if r in place},
        )


class LonePut(NamedTuple):
    """A checked, unconditional put of one row. ``ttl_ms`` 0: never expires; ``table_version`` 0:
    the sender's version is unknown.
    """

    key: bytes
    value: bytes
    partition_id: int
    ttl_ms: int = 0
    table_version: int = 0
    durability: Durability = Durability.ALL_IN_SYNC


@dataclass(frozen=True, kw_only=True, slots=True)
class AtomicBatch:
    """Checked operations on keys of one partition, which have the same routing bytes unless the
    batch commits a cursor; see core/writes/atomic_batch.py.
    """

    table_version: int
    partition_id: int
    keys: Sequence[bytes]
    steps: Sequence[Step]
    goes_on: bool = False  # whether the steps after a failed one are still executed
    durability: Durability = Durability.ALL_IN_SYNC
    cursor: tuple[bytes, CommitCursor] | None = None
    """The key of a group's cursor and the commit of its position, together with the operations."""


class AtomicAnswer(NamedTuple):
    """The version of all records that the batch wrote (0: none), and one result per step, None for
    checks.
    """

    version: int
    results: Sequence[Result]


@dataclass(kw_only=True, slots=True)
class WriteAnswer:
    """A write's outcome by row. ``versions[i]`` is 0 where row i wrote nothing; another field then
    says why. ``results`` are the results of updates, by row.
    """

    versions: U64Array
    absent: list[int] = field(default_factory=list)
    present: list[int] = field(default_factory=list)
    refusals: dict[int, KoinonError] = field(default_factory=dict)
    row_errors: dict[int, KoinonError] = field(default_factory=dict)
    results: dict[int, Result] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScanPage:
    """A request for a page. ``partition_ids`` ascend; ``after_key`` belongs to the first of them.
    Each partition is read from ``start`` on, downwards with ``reverse``. Without ``counted`` the
    caller counts the rows against the quota itself.
    """

    table_version: int
    partition_ids: Sequence[int]
    prefix: bytes
    after_key: bytes
    limit: int
    keys_only: bool
    start: bytes = b""
    reverse: bool = False
    counted: bool = True


@dataclass(kw_only=True, slots=True)
class ScanAnswer:
    """One page. ``next_cursor`` is (partition_id, after key), None at the end."""

    keys: list[bytes] = field(default_factory=list)
    values: list[bytes] = field(default_factory=list)
    partition_ids: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    expires_at_ms: list[int] = field(default_factory=list)
    next_cursor: tuple[int, bytes] | None = None
    refusals: dict[int, KoinonError] = field(default_factory=dict)
