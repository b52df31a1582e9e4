"""The last versions of the table that this process has received, with the changes of each. Pure.

Versions share the rows that did not change. A version that this process never received is missing;
the next step names the version that it was compared with (``base_version``).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from koinon.operate.judge.table_changes import table_changes
from koinon_proto.contract.table import Table, TableUpdate, apply_update

VERSIONS_MAX = 500
ROW_PLACES_MAX = 4_000_000
"""The limit on the rows of all versions together, shared or not; each takes 8 bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TableStep:
    """A version of the table, the time when it arrived, and the changes since ``base_version`` (0:
    it is the first version here).
    """

    version: int
    base_version: int
    at_ms: int
    changes: tuple[str, ...]


class TableHistory:
    """The newest table and the versions before it, oldest first. ``changed``: the partitions whose
    rows the last step changed.
    """

    def __init__(self) -> None:
        self._kept: deque[tuple[TableStep, Table]] = deque()

    @property
    def table(self) -> Table | None:
        """The newest version; None: no bootstrapped table has arrived yet."""
        return self._kept[-1][1] if self._kept else None

    @property
    def steps(self) -> list[TableStep]:
        return [step for step, _ in self._kept]

    def at(self, version: int) -> Table | None:
        """Return the table of exactly this version; None: it is not kept."""
        return next((table for step, table in self._kept if step.version == version), None)

    def take(self, update: TableUpdate, unix_s: float) -> TableStep | None:
        """Add a table or a delta; return the step if it brought a newer version.

        Raises:
            WrongClusterError: it belongs to another cluster.
        """
        before = self.table
        after = apply_update(before, update)
        if after is None or after is before or not after.bootstrapped:
            return None
        step = TableStep(
            version=after.table_version,
            base_version=before.table_version if before else 0,
            at_ms=int(unix_s * 1000),
            changes=tuple(table_changes(before, after)) if before else (),
        )
        self._kept.append((step, after))
        most = max(2, min(VERSIONS_MAX, ROW_PLACES_MAX // len(after.rows)))
        while len(self._kept) > most:
            self._kept.popleft()
        return step

    def take_whole(self, table: Table, unix_s: float) -> TableStep | None:
        """Add a whole table from a status reply; rows that did not change are shared with the
        version before.
        """
        held = self.table
        if held is not None:
            table.cluster.check_id(held.cluster.cluster_id, required=True)
        return self.take(table.since(held.table_version if held else 0), unix_s)
