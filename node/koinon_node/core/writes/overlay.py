"""The overlay: rows that are durable in the write-ahead log but not in the store yet, by key.

A read of a key checks the overlay before the store. Writes are added in the order of the log, so
the last write of a key wins. The overlay consists of layers. New writes go to the newest layer.
When the store should catch up with the log, that layer is closed and a new one begun; once the
store has all of a layer, the layer is dropped.

    log       1 2 3 4 5 6 7 8 9
    store     ------|
    layers           [5 6 7] [8 9]
                      closed  newest

Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from koinon_node.core.formats.writer_frames import Writes

DATABASES = 4
_NOT_HERE: Any = object()


class Layer:
    """The rows of one stretch of the log."""

    __slots__ = ("databases", "first", "last", "rows", "size")

    def __init__(self, first: int) -> None:
        self.first = first  # position of the first record in the log
        self.last = first - 1  # position of the last one; below ``first``: the layer is empty
        self.rows = 0  # written rows: a key that was written twice counts twice
        self.size = 0  # in the log, bytes
        self.databases: tuple[dict[bytes, bytes | None], ...] = tuple({} for _ in range(DATABASES))

    def forget(self, rows: int) -> bool:
        """Drop up to so many rows; return whether there are more."""
        for database in self.databases:
            while database and rows:
                database.popitem()
                rows -= 1
        return any(self.databases)


class Overlay:
    """All layers. ``rows`` and ``size`` are their sums."""

    def __init__(self) -> None:
        self.rows = 0
        self.size = 0
        self._layers: deque[Layer] = deque((Layer(1),))

    def __bool__(self) -> bool:
        return self.rows > 0

    @property
    def last(self) -> int:
        """The position of the last added write; 0: none was added."""
        return self._layers[-1].last

    @property
    def last_closed(self) -> int:
        """The last position of the closed layers, or the position before the first layer if none is
        closed.
        """
        return self._layers[-1].first - 1

    @property
    def newest(self) -> Layer:
        return self._layers[-1]

    def add(self, position: int, tickets: Iterable[Writes], size: int) -> None:
        """Add the writes of the record at this position; ``size`` is the record's bytes."""
        layer = self._layers[-1]
        assert position == layer.last + 1, (position, layer.last)
        rows = 0
        for writes in tickets:
            for database, keys, values in writes:
                if len(keys) == 1:  # a single put takes a fifth of the time this way
                    layer.databases[database][keys[0]] = values[0]
                else:
                    layer.databases[database].update(zip(keys, values, strict=True))
                rows += len(keys)
        rows = max(rows, 1)
        layer.last = position
        layer.rows += rows
        layer.size += size
        self.rows += rows
        self.size += size

    def close_layer(self) -> Layer:
        """Begin a new layer; return the closed one."""
        closed = self._layers[-1]
        self._layers.append(Layer(closed.last + 1))
        return closed

    def drop_through(self, position: int) -> list[Layer]:
        """Drop the closed layers up to this position, the end of one: the store has them. Return
        these layers.
        """
        dropped = []
        while len(self._layers) > 1 and self._layers[0].last <= position:
            layer = self._layers.popleft()
            self.rows -= layer.rows
            self.size -= layer.size
            dropped.append(layer)
        return dropped

    def holds(self, database: int, keys: Iterable[bytes]) -> bool:
        """Return whether any of the keys is in the overlay."""
        wanted = keys if isinstance(keys, Sequence) else list(keys)
        layers = tuple(self._layers)
        return any(not layer.databases[database].keys().isdisjoint(wanted) for layer in layers)

    def find(self, database: int, keys: Sequence[bytes]) -> Mapping[bytes, bytes | None]:
        """Return the last write of each of these keys that is in the overlay; None: the key was
        deleted.
        """
        found: dict[bytes, bytes | None] = {}
        for layer in tuple(self._layers):  # a copy, since other threads read too
            rows = layer.databases[database]
            if rows and not rows.keys().isdisjoint(keys):
                for key in keys:  # a thread may read a layer whose rows are being dropped
                    row = rows.get(key, _NOT_HERE)
                    if row is not _NOT_HERE:
                        found[key] = row
        return found
