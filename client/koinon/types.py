"""The values that clients return."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from koinon_proto.contract.errors import KoinonError, UnknownFateError

BytesLike = bytes | bytearray | memoryview
"""The types in which callers give keys and values. What is not ``bytes`` is copied at the call."""

Durability = Literal["all_in_sync", "primary"]
"""The durability at which a write is acknowledged: on every in-sync replica of its partition, or on
the primary alone. The second is outside the promise that no acknowledged write is lost.
"""


Row = tuple[BytesLike, BytesLike] | tuple[BytesLike, BytesLike, int | None]
"""Key and value; or key, value and the row's own time to live in milliseconds, None: it names none.
"""


class Entry(NamedTuple):
    """One record. ``version`` is what ``if_version`` compares; ``expires_at_ms`` is Unix time."""

    key: bytes
    value: bytes
    version: int
    expires_at_ms: int | None


class Observation(NamedTuple):
    """One operation of a client, once it has ended, as ``observer`` (an option of ``connect``) is
    told of it.
    """

    operation: str
    """The name of the client's method: ``get``, ``put_many``; ``scan``: one page of it."""
    outcome: str
    """``ok``, or what ended it: the error's name, ``condition_failed`` or ``unknown_fate``, or
    ``cancelled``. A write of many rows has the outcome of its first failed row.
    """
    seconds: float
    """From the call to its end, retries included."""
    rows: int
    """Keys that were asked for, rows that were given, or entries of the page; 0 of a call of many
    rows that was refused before they were counted.
    """


Observer = Callable[[Observation], object]
"""Called on the thread that has ended the operation, be it the caller's or the client's own: it
returns quickly, asks the client for nothing (on the client's thread that would never end), and may
be called by several threads at once. What it raises is logged, once.
"""


class BatchResult(NamedTuple):
    """The result of an atomic batch."""

    version: int
    """Of each record that the batch wrote; 0 if it wrote nothing."""
    results: list[int | bool | None]
    """One entry an operation, in their order: the sum of an increment, whether a delete found a
    record, None of checks and puts.
    """


class RowFailure(NamedTuple):
    """One row of a ``*_many`` write that was not applied, or whose fate is unknown."""

    row: int
    """Its position in the input, from 0."""
    key: bytes
    error: KoinonError


@dataclass(slots=True)
class WriteResult:
    """The result of ``put_many`` or ``delete_many``: counts of rows, and the failures whole.

    ``applied + present + len(refused) + len(unknown) == rows``.
    """

    rows: int = 0
    """Rows that were sent or refused here; all of the input if ``complete``."""
    applied: int = 0
    """Rows that were acknowledged (or superseded by a later row with the same key)."""
    absent: int = 0
    """Of the applied rows of ``delete_many``: how many found no record."""
    present: int = 0
    """Rows of ``put_many(if_absent=True)`` that found a record, which stays as it is."""
    refused: list[RowFailure] = field(default_factory=list)
    """Rows that were certainly not applied, and why."""
    unknown: list[RowFailure] = field(default_factory=list)
    """Rows that may or may not have been applied."""
    complete: bool = True
    """False if so many rows failed that the rest of the input was not read."""

    @property
    def ok(self) -> bool:
        return self.complete and not self.refused and not self.unknown

    def raise_for_errors(self) -> None:
        """Raise if any row failed: UnknownFateError if any row's fate is unknown, else the first
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
