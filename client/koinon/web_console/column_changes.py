"""Columns over partitions as they are sent: once whole, then what has changed. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.int64]
JsonObject = dict[str, Any]


class ColumnChanges:
    """Columns of integers of one length, a place for each partition; those that are 0 everywhere at
    a place are not sent as long as they stay so.
    """

    def __init__(self) -> None:
        self._columns: dict[str, Column] = {}  # as they were sent last

    def take(self, columns: Mapping[str, Column]) -> JsonObject | None:
        """Take newer columns; return what has changed, as JSON has it; None: nothing has."""
        before, self._columns = self._columns, dict(columns)
        if {n: len(c) for n, c in before.items()} != {n: len(c) for n, c in columns.items()}:
            return self.whole()
        changed = np.zeros(max(map(len, columns.values()), default=0), bool)
        for name, column in columns.items():
            changed |= column != before[name]
        return _places(columns, changed, whole=False) if changed.any() else None

    def whole(self) -> JsonObject:
        """Return all that is not 0."""
        used = np.zeros(max(map(len, self._columns.values()), default=0), bool)
        for column in self._columns.values():
            used |= column != 0
        return _places(self._columns, used, whole=True)


def _places(columns: Mapping[str, Column], chosen: NDArray[np.bool_], *, whole: bool) -> JsonObject:
    places = np.flatnonzero(chosen)
    values = {name: column[places].tolist() for name, column in columns.items()}
    return {"whole": whole, "partitions": places.tolist(), **values}
