"""The table's updates in their wire form."""

from __future__ import annotations

from koinon_proto.contract import convert
from koinon_proto.contract.table import Table
from koinon_proto.v1 import table_pb2

CACHED_UPDATES_MAX = 64


class UpdateCache:
    """The wire form of the table's updates, made once for each version and base: thousands of
    callers ask for the same few.
    """

    def __init__(self) -> None:
        self._table: Table | None = None
        self._updates: dict[int, table_pb2.TableUpdate] = {}

    def update(self, table: Table, known_version: int) -> table_pb2.TableUpdate:
        """Return what changed since ``known_version`` (0: everything). Not to be modified."""
        if table is not self._table:
            self._table = table
            self._updates.clear()
        base = min(known_version, table.table_version + 1)  # from there on all are equally empty
        update = self._updates.get(base)
        if update is None:
            if len(self._updates) >= CACHED_UPDATES_MAX:
                self._updates.pop(next(iter(self._updates)))
            update = self._updates[base] = convert.update_to_proto(table.since(base))
        return update
