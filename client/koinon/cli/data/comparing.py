"""Compares the rows of two keyspaces, for ``koinon copy --verify``.

Reads the source page by page, and the same keys in the target; then counts the target, and if it
has more rows, looks up each of them in the source. So memory holds one slab of each side, and every
row that differs can be named. It reads no snapshot: a write during the comparison may be reported
as a difference.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from koinon.cli.data.writing import EXAMPLES_MAX
from koinon.client import Client, KeyspaceClient
from koinon.sources.slabs import SLAB_BYTES, SLAB_ROWS
from koinon.types import Entry
from koinon_proto.process.printable import printable_bytes

SLACK_MS = 60_000
"""Rows that expire within this time are left out, and expiries that differ by less count as equal:
clocks differ, and a row may expire on one side before the other.
"""
_ASKED_AT_ONCE = 100  # rows read in one request while their sizes are unknown


@dataclass(kw_only=True)
class Comparison:
    """The result for both sides. Rows that expire within a minute were left out
    (``rows_expiring``). ``rows_other_expiry`` counts, among the equal rows, those with another time
    to live.
    """

    rows_from: int = 0
    rows_to: int = 0
    rows_expiring_from: int = 0
    rows_expiring_to: int = 0
    rows_same: int = 0
    rows_missing: int = 0
    rows_different: int = 0
    rows_extra: int = 0
    rows_other_expiry: int = 0
    examples: list[str] = field(default_factory=list)

    @property
    def identical(self) -> bool:
        return not (self.rows_missing or self.rows_different or self.rows_extra)

    def note(self, key: bytes, what: str) -> None:
        """Keep the row as an example, if few are kept yet."""
        if len(self.examples) < EXAMPLES_MAX:
            self.examples.append(f"key {printable_bytes(key[:60])}: {what}")


def slabs_of(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    """Group the records of a scan, by rows and bytes."""
    slab: list[Entry] = []
    size = 0
    for entry in entries:
        slab.append(entry)
        size += len(entry.key) + len(entry.value)
        if len(slab) >= SLAB_ROWS or size >= SLAB_BYTES:
            yield slab
            slab, size = [], 0
    if slab:
        yield slab


def compare(
    source: Client | KeyspaceClient,
    target: Client | KeyspaceClient,
    prefix: bytes,
    *,
    timeout_ms: int,
    compared: Callable[[list[Entry]], object],
    counted: Callable[[list[Entry]], object],
    stopped: Callable[[], bool],
) -> Comparison | None:
    """Compare the rows whose keys begin with ``prefix``; return None if stopped.

    Args:
        timeout_ms: the limit of each page and each batch, not of the whole.
        compared: called with the source's rows after they were compared.
        counted: called with the target's rows after they were counted, once the source is done.
        stopped: asked between two slabs; True ends the comparison.
    """
    found = Comparison()
    for slab in slabs_of(source.scan(prefix=prefix, timeout_ms=timeout_ms)):
        theirs = target.get_entries([entry.key for entry in slab], timeout_ms=timeout_ms)
        latest_ms = _now_ms() + SLACK_MS
        for ours, other in zip(slab, theirs, strict=True):
            if _expires_by(ours, latest_ms):
                found.rows_expiring_from += 1
            else:
                _take(found, ours, other)
        compared(slab)
        if stopped():
            return None
    for slab in slabs_of(target.scan(prefix=prefix, keys_only=True, timeout_ms=timeout_ms)):
        latest_ms = _now_ms() + SLACK_MS
        expiring = sum(_expires_by(entry, latest_ms) for entry in slab)
        found.rows_expiring_to += expiring
        found.rows_to += len(slab) - expiring
        counted(slab)
        if stopped():
            return None
    if found.rows_to <= found.rows_same + found.rows_different:
        return found
    rest = iter(target.scan(prefix=prefix, keys_only=True, timeout_ms=timeout_ms))
    while asked := list(islice(rest, _ASKED_AT_ONCE)):
        latest_ms = _now_ms() + SLACK_MS
        keys = [entry.key for entry in asked if not _expires_by(entry, latest_ms)]
        held = source.get_many(keys, timeout_ms=timeout_ms)
        for key in (key for key, value in zip(keys, held, strict=True) if value is None):
            found.rows_extra += 1
            found.note(key, "only in the target")
        if stopped():
            return None
    return found


def _take(found: Comparison, ours: Entry, other: Entry | None) -> None:
    found.rows_from += 1
    if other is None:
        found.rows_missing += 1
        found.note(ours.key, "not in the target")
    elif other.value != ours.value:
        found.rows_different += 1
        found.note(ours.key, "has another value in the target")
    else:
        found.rows_same += 1
        found.rows_other_expiry += _expiries_differ(ours.expires_at_ms, other.expires_at_ms)


def _expires_by(entry: Entry, latest_ms: int) -> bool:
    return entry.expires_at_ms is not None and entry.expires_at_ms <= latest_ms


def _expiries_differ(ours_ms: int | None, theirs_ms: int | None) -> bool:
    if ours_ms is None or theirs_ms is None:
        return ours_ms is not theirs_ms
    return abs(ours_ms - theirs_ms) >= SLACK_MS


def _now_ms() -> int:
    return int(time.time() * 1000)
