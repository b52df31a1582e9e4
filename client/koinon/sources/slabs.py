"""Slabs: rows of a file as columns of keys and values, and the bad rows among them."""

from __future__ import annotations

from dataclasses import dataclass, field

from koinon.sources.taken import Cells
from koinon_proto.contract.table import MAX_KEY_BYTES

SLAB_ROWS = 10_000
SLAB_BYTES = 8 * 1024 * 1024


@dataclass(kw_only=True)
class BadRow:
    """A row that cannot be stored. ``row`` counts from 1, without a header; ``line`` is the line
    where it begins in the file, 0 if the reader does not know lines (``lines_of`` finds it).
    """

    row: int
    reason: str
    line: int = 0


@dataclass(kw_only=True)
class Slab:
    """Some rows of a file, in its order."""

    keys: list[bytes] = field(default_factory=list)
    values: list[bytes] = field(default_factory=list)
    bad: list[BadRow] = field(default_factory=list)
    position: int = 0
    """Bytes of the file up to the end of these rows (an estimate if the format does not tell)."""


class SlabMaker:
    """Checks rows one by one and cuts them into slabs."""

    def __init__(self, max_value_bytes: int | None = None) -> None:
        self.row = 0
        self.line = 0  # line in the file; 0 if the reader does not know lines
        self._max_value_bytes = max_value_bytes
        self._taken = 0
        self._skip = 0
        self._slab = Slab()
        self._bytes = 0

    def start_again(self) -> None:
        """Prepare for reading the file again from its start: skip the rows that were already
        taken.
        """
        self.row, self._skip = 0, self._taken
        self._slab, self._bytes = Slab(), 0

    def add(self, key: bytes | None, value: bytes | None, beside: Cells = ()) -> None:
        self.row += 1
        if self.row <= self._skip:
            return
        reason = _fault(key, value, self._max_value_bytes)
        if reason is not None:
            self._slab.bad.append(BadRow(row=self.row, reason=reason, line=self.line))
            return
        assert key is not None
        assert value is not None
        self._slab.keys.append(key)
        self._slab.values.append(value)
        self._bytes += len(key) + len(value)

    def refuse(self, reason: str, text: bytes = b"") -> None:
        self.row += 1
        if self.row <= self._skip:
            return
        self._slab.bad.append(BadRow(row=self.row, reason=reason, line=self.line))

    @property
    def full(self) -> bool:
        return (
            len(self._slab.keys) >= SLAB_ROWS
            or self._bytes >= SLAB_BYTES
            or len(self._slab.bad) >= SLAB_ROWS
        )

    def take(self, position: int) -> Slab:
        slab, self._slab, self._bytes = self._slab, Slab(), 0
        self._taken = self.row
        slab.position = position
        return slab


def _fault(key: bytes | None, value: bytes | None, max_value_bytes: int | None) -> str | None:
    if key is None:
        return "the key is null"
    if not key:
        return "the key is empty"
    if len(key) > MAX_KEY_BYTES:
        return f"the key has {len(key)} bytes, the limit is {MAX_KEY_BYTES}"
    if value is None:
        return "the value is null"
    if max_value_bytes is not None and len(value) > max_value_bytes:
        return f"the value has {len(value)} bytes, the limit is {max_value_bytes}"
    return None
