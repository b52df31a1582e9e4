"""The values that clients return."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from koinon_proto.contract.errors import KoinonError, UnknownFateError

BytesLike = bytes | bytearray | memoryview
"""The types of keys and values in calls. Any type but ``bytes`` is copied at the call."""

Durability = Literal["all_in_sync", "primary"]
"""When a write is acknowledged: once it is durable on every in-sync replica of its partition, or on
the primary alone. The second is outside the promise that no acknowledged write is lost.
"""


Row = tuple[BytesLike, BytesLike] | tuple[BytesLike, BytesLike, int | None]
"""Key and value; or key, value and the row's own time to live in milliseconds; None: the call's."""


class Entry(NamedTuple):
    """One record. ``version`` is what ``if_version`` compares; ``expires_at_ms`` is Unix time."""

    key: bytes
    value: bytes
    version: int
    expires_at_ms: int | None


class Observation(NamedTuple):
    """One ended operation of a client, as the ``observer`` (an option of ``connect``) receives
    it.
    """

    operation: str
    """The name of the client's method: ``get``, ``put_many``; for ``scan`` one page."""
    outcome: str
    """``ok``, or the name of the error that ended it, such as ``condition_failed`` or
    ``unknown_fate``, or ``cancelled``. A write of many rows has the outcome of its first failed
    row.
    """
    seconds: float
    """From the call to its end, retries included."""
    rows: int
    """The number of requested keys, given rows, or records of the page; 0 for a call of many rows
    that was refused before they were counted.
    """


Observer = Callable[[Observation], object]
"""Called on the thread that ended the operation, the caller's or the client's own. It must return
quickly and must not call the client (on the client's thread the call would never end), and may be
called by several threads at once. An exception that it raises is logged once.
"""


class BatchResult(NamedTuple):
    """The result of an atomic batch."""

    version: int
    """The version of each record that the batch wrote; 0 if it wrote none."""
    results: list[int | bool | None]
    """One result for each operation, in their order: the sum of an increment, whether a delete
    found a record, None for checks and puts.
    """


class RowFailure(NamedTuple):
    """One row of a ``*_many`` write that was not applied, or whose fate is unknown."""

    row: int
    """Its position in the input, from 0."""
    key: bytes
    error: KoinonError


@dataclass(slots=True)
class WriteResult:
    """The result of ``put_many`` or ``delete_many``: counts of rows, and every failure.

    ``applied + present + len(refused) + len(unknown) == rows``.
    """

    rows: int = 0
    """Rows that were sent, or refused by the client; all of the input if ``complete``."""
    applied: int = 0
    """Rows that were acknowledged (or superseded by a later row with the same key)."""
    absent: int = 0
    """Applied rows of ``delete_many`` that found no record."""
    present: int = 0
    """Rows of ``put_many(if_absent=True)`` whose key had a record, which is unchanged."""
    refused: list[RowFailure] = field(default_factory=list)
    """Rows that were certainly not applied, with their errors."""
    unknown: list[RowFailure] = field(default_factory=list)
    """Rows that may or may not have been applied."""
    complete: bool = True
    """False if so many rows failed that the rest of the input was not read."""

    @property
    def ok(self) -> bool:
        return self.complete and not self.refused and not self.unknown

    def raise_for_errors(self) -> None:
        """Raise if any row failed: UnknownFateError if a row's fate is unknown, else the first
        refusal.
        """
        if self.unknown:
            first = self.unknown[0]
            raise UnknownFateError(
                reason=f"{len(self.unknown)} of {self.rows} rows, first row {first.row}: "
                f"{first.error}"
            ) from first.error
        if self.refused:
            raise self.refused[0].error


for _shown in (BatchResult, Entry, Observation, RowFailure, WriteResult):
    _shown.__module__ = "koinon"
