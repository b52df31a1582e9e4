"""Bounds what all reads that are under way hold in memory together."""

from __future__ import annotations

from koinon_node.config import Limits
from koinon_node.serving.batches import (
    ReadAnswer,
)
from koinon_proto.contract.errors import (
    ResourceExhaustedError,
)
from koinon_proto.server import admission


class ReadBudget:
    """Rows that are being read, and bytes of answers under way. What is alone may exceed either."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._rows = 0
        self._bytes = 0

    def take_rows(self, count: int) -> None:
        """Count so many rows as being read, until they are released."""
        if self._rows and self._rows + count > self._limits.reading_rows:
            raise ResourceExhaustedError(
                resource="rows being read", limit=self._limits.reading_rows
            )
        self._rows += count

    def release(self, rows: int, size: int = 0) -> None:
        """The read of so many rows, whose answer held so many bytes, has ended."""
        self._rows -= rows
        self._bytes -= size

    def hold(self, answer: ReadAnswer, size: int) -> None:
        """Count what an answer under way holds in memory against the bound of all of them."""
        others = self._bytes - answer.held_bytes
        self._bytes += size
        answer.held_bytes += size
        admission.hold(size)
        if others and self._bytes > self._limits.reading_bytes:
            raise ResourceExhaustedError(
                resource="bytes being read", limit=self._limits.reading_bytes
            )
