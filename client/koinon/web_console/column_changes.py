"""Encodes columns over partitions for browsers: whole values once, then the changes. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.int64]
JsonObject = dict[str, Any]


class ColumnChanges:
    """Integer columns of one length, with one place for each partition. A place where all columns
    have stayed 0 is not sent.
    """

    def __init__(self) -> None:
        self._columns: dict[str, Column] = {}  # the columns as last sent

    def take(self, columns: Mapping[str, Column]) -> JsonObject | None:
        """Replace the columns; return the changed places as JSON, or None if nothing changed."""
        before, self._columns = self._columns, dict(columns)
        if {n: len(c) for n, c in before.items()} != {n: len(c) for n, c in columns.items()}:
            return self.whole()
        changed = np.zeros(max(map(len, columns.values()), default=0), bool)
        for name, column in columns.items():
            changed |= column != before[name]
        return _places(columns, changed, whole=False) if changed.any() else None

    def whole(self) -> JsonObject:
        """Return all places where a column is not 0."""
        used = np.zeros(max(map(len, self._columns.values()), default=0), bool)
        for column in self._columns.values():
            used |= column != 0
        return _places(self._columns, used, whole=True)


def _places(columns: Mapping[str, Column], chosen: NDArray[np.bool_], *, whole: bool) -> JsonObject:
    places = np.flatnonzero(chosen)
    values = {name: column[places].tolist() for name, column in columns.items()}
    return {"whole": whole, "partitions": places.tolist(), **values}
