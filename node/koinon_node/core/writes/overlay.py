"""The overlay: by key, what is durable in the write-ahead log and not in the store yet.

It lies over the store: a read of a key looks here first. Writes are added in the order of the log,
so of one key the last wins. It consists of layers. The newest takes what comes; when the store is
to catch up with the log, that layer is closed and a new one begun; once the store has all of a
layer, it is dropped whole.

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
    """A stretch of the log."""

    __slots__ = ("databases", "first", "last", "rows", "size")

    def __init__(self, first: int) -> None:
        self.first = first  # positions in the log; ``last`` is below it while there are none
        self.last = first - 1
        self.rows = 0  # as they were written: a key that was written twice counts twice
        self.size = 0  # in the log, bytes
        self.databases: tuple[dict[bytes, bytes | None], ...] = tuple({} for _ in range(DATABASES))

    def forget(self, rows: int) -> bool:
        """Forget up to so many rows; return whether there may be more."""
        for database in self.databases:
            while database and rows:
                database.popitem()
                rows -= 1
        return any(self.databases)


class Overlay:
    """All layers. ``rows`` and ``size`` are those of all of them."""

    def __init__(self) -> None:
        self.rows = 0
        self.size = 0
        self._layers: deque[Layer] = deque((Layer(1),))

    def __bool__(self) -> bool:
        return self.rows > 0

    @property
    def last(self) -> int:
        """The position of the last write that was added; 0: none was."""
        return self._layers[-1].last

    @property
    def last_closed(self) -> int:
        """The last position of the closed layers; that before the first one's if there is none."""
        return self._layers[-1].first - 1

    @property
    def newest(self) -> Layer:
        return self._layers[-1]

    def add(self, position: int, tickets: Iterable[Writes], size: int) -> None:
        """Add what the record at this position writes; ``size`` is the record's."""
        layer = self._layers[-1]
        assert position == layer.last + 1, (position, layer.last)
        rows = 0
        for writes in tickets:
            for database, keys, values in writes:
                if len(keys) == 1:  # of a put alone, in a fifth of the time
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
        """The store has all up to this position, the end of a closed layer: let go of that. Return
        the layers that were let go.
        """
        dropped = []
        while len(self._layers) > 1 and self._layers[0].last <= position:
            layer = self._layers.popleft()
            self.rows -= layer.rows
            self.size -= layer.size
            dropped.append(layer)
        return dropped

    def holds(self, database: int, keys: Iterable[bytes]) -> bool:
        """Return whether any of the keys is here."""
        wanted = keys if isinstance(keys, Sequence) else list(keys)
        layers = tuple(self._layers)
        return any(not layer.databases[database].keys().isdisjoint(wanted) for layer in layers)

    def find(self, database: int, keys: Sequence[bytes]) -> Mapping[bytes, bytes | None]:
        """Return what was written last of those keys that are here; None: the key was deleted."""
        found: dict[bytes, bytes | None] = {}
        for layer in tuple(self._layers):  # other threads read too
            rows = layer.databases[database]
            if rows and not rows.keys().isdisjoint(keys):
                for key in keys:  # a thread may read a layer that is being forgotten
                    row = rows.get(key, _NOT_HERE)
                    if row is not _NOT_HERE:
                        found[key] = row
        return found
