"""Keeps the wire form of the newest table update and access state, which all nodes and clients are
sent.
"""

from __future__ import annotations

from dataclasses import replace

from koinon_coordinator.wire.rows import RowForms
from koinon_proto.contract import convert
from koinon_proto.contract.access import NO_ACCESS_STATE, AccessState
from koinon_proto.contract.table import Table
from koinon_proto.v1 import access_pb2, table_pb2

CACHED_UPDATES_MAX = 64


class UpdateCache:
    """The wire form of the table's updates, encoded once for each version and base: thousands of
    callers ask for the same few.
    """

    def __init__(self, forms: RowForms) -> None:
        self._forms = forms
        self._table: Table | None = None
        self._updates: dict[int, table_pb2.TableUpdate] = {}

    def update(self, table: Table, known_version: int) -> table_pb2.TableUpdate:
        """Return the changes since ``known_version`` (0: everything). Not to be modified."""
        if table is not self._table:
            self._table = table
            self._updates.clear()
        base = min(known_version, table.table_version + 1)  # from there on all are equally empty
        update = self._updates.get(base)
        if update is None:
            if len(self._updates) >= CACHED_UPDATES_MAX:
                self._updates.pop(next(iter(self._updates)))
            since = table.since(base)
            update = convert.update_to_proto(replace(since, rows=()))
            update.MergeFromString(self._forms.of(since.rows))
            self._updates[base] = update
        return update


class AccessCache:
    """The wire form of the access state, encoded once a version: every node is sent the same."""

    def __init__(self) -> None:
        self._state = NO_ACCESS_STATE
        self._message: access_pb2.AccessState | None = None

    def newer(self, state: AccessState, known_version: int) -> access_pb2.AccessState | None:
        """Return the state for a node; None if the node has it. Not to be modified."""
        if known_version >= state.version:
            return None
        if self._message is None or self._state is not state:
            self._state, self._message = state, convert.ACCESS.encode(state)
        return self._message
