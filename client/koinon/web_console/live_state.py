"""The state of the page: receives the poller's results, and adds their changes to the journal.
Pure.

Topics, each a JSON object:

``table``: the nodes, keyspaces and rows; ``whole``, or the changes since ``base_version``, and
    ``steps``: the versions that can be requested (in a change, only its own). A row is the list of:
    partition, state, primary, replicas, in sync, adding, removing, wanted primary, primary epoch,
    partition epoch, reason why it is offline, whether it lacks copies in sync. Nodes are named by
    their numbers.
``moment``: the output of ``koinon top --json`` and ``koinon admin status --json`` at this moment.
``rates``: rows and bytes a second by partition, as ``koinon top`` counts them.
``sizes``: records and bytes of a copy by partition, as ``koinon admin partition`` prints them.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from koinon.operate.json_form import json_of
from koinon.operate.judge.answers import keyspace_answer, status_answer
from koinon.operate.judge.dashboard import View, top_answer
from koinon.operate.judge.health import is_short
from koinon.operate.judge.hotspots import READ_BYTES, READS, WRITES, WRITTEN_BYTES
from koinon.operate.replicas import PartitionSize
from koinon.web_console.column_changes import ColumnChanges
from koinon.web_console.journal import Journal
from koinon.web_console.table_history import TableHistory, TableStep
from koinon_proto.contract.errors import WrongClusterError
from koinon_proto.contract.table import NodeInfo, PartitionRow, Table, TableUpdate

HOTTEST_MAX = 12
EVENTS_MAX = 20


class LiveState:
    """All values that the page shows, and the journal of their changes."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.history = TableHistory()
        self._rates, self._sizes = ColumnChanges(), ColumnChanges()
        # Kept versions' rows as JSON, by partition; versions share the text of a row that did not
        # change.
        self._rows: dict[int, list[str]] = {}

    def apply_update(self, update: TableUpdate, unix_s: float) -> None:
        """Apply an update of the table; ignore an older one, or one of another cluster."""
        before = self.history.table
        # another cluster serves these addresses; the next poll reports it
        with contextlib.suppress(WrongClusterError):
            self._tell_table(before, self.history.take(update, unix_s))

    def apply_view(self, view: View, moment: str) -> None:
        """Apply one view of the cluster, and ``moment``, which ``moment_of`` made of the view."""
        if view.table is not None and view.table.bootstrapped:
            before = self.history.table
            self._tell_table(before, self.history.take_whole(view.table, view.unix_s))
        self.journal.add("moment", moment, lambda: moment)
        if view.rates is not None:
            columns = np.rint(view.rates.partitions).astype(np.int64)
            moved = columns[READ_BYTES] + columns[WRITTEN_BYTES]
            self._tell_columns(
                "rates",
                self._rates,
                {"reads": columns[READS], "writes": columns[WRITES], "bytes": moved},
            )

    def apply_sizes(self, sizes: Mapping[int, PartitionSize]) -> None:
        """Apply the sizes of copies, by partition."""
        count = max(sizes, default=-1) + 1
        records, held = np.zeros(count, np.int64), np.zeros(count, np.int64)
        for partition_id, size in sizes.items():
            records[partition_id], held[partition_id] = size.records, size.bytes
        self._tell_columns("sizes", self._sizes, {"records": records, "bytes": held})

    def table_at(self, version: int) -> str | None:
        """Return the table of exactly this version, as JSON; None: it is not kept."""
        table = self.history.at(version)
        return None if table is None else _table_text(table, self._rows[version], ())

    def _tell_table(self, before: Table | None, step: TableStep | None) -> None:
        table = self.history.table
        if step is None or table is None:
            return
        known = self._rows.get(before.table_version, []) if before is not None else []
        changed = [
            row
            for p, row in enumerate(table.rows)
            if before is None or p >= len(known) or row is not before.rows[p]
        ]
        rows = known + [""] * (len(table.rows) - len(known))
        for row in changed:
            rows[row.partition_id] = _row_text(row)
        kept = {one.version for one in self.history.steps}
        self._rows = {v: texts for v, texts in self._rows.items() if v in kept}
        self._rows[table.table_version] = rows
        told = [rows[row.partition_id] for row in changed]
        self.journal.add("table", _table_text(table, told, [step], before), self._whole_table)

    def _whole_table(self) -> str:
        table = self.history.table
        assert table is not None, "there is news of it"
        return _table_text(table, self._rows[table.table_version], self.history.steps)

    def _tell_columns(self, topic: str, kept: ColumnChanges, columns: Mapping[str, Any]) -> None:
        changed = kept.take(columns)
        if changed is not None:
            self.journal.add(topic, _text(changed), lambda: _text(kept.whole()))


def _table_text(
    table: Table, rows: Iterable[str], steps: Iterable[TableStep], before: Table | None = None
) -> str:
    """Encode a version of the table for the page, with these rows. With ``before`` (an earlier
    version), only the nodes and keyspaces that differ from it.
    """
    nodes, keyspaces = list(table.nodes.values()), None
    if before is not None:
        nodes = [node for node in nodes if before.nodes.get(node.number) is not node]
    same = before is not None and before.keyspace_list == table.keyspace_list
    if before is None or not same or before.cluster != table.cluster:
        keyspaces = [keyspace_answer(keyspace) for keyspace in table.keyspaces]
    rest = {
        "whole": before is None,
        "base_version": before.table_version if before else 0,
        "version": table.table_version,
        "cluster_id": table.cluster.cluster_id,
        "nodes": [_node_form(node) for node in nodes],
        "keyspaces": keyspaces,  # None: unchanged
        "steps": list(steps),
    }
    return f'{_text(rest)[:-1]},"rows":[{",".join(rows)}]}}'


def moment_of(view: View) -> str:
    """Encode the outputs of ``top`` and of ``admin status`` for the page. It judges all partitions,
    which takes some ten milliseconds if there are many.
    """
    status = None if view.status is None else status_answer(view.status, view.loads)
    moment = {
        "top": top_answer(view, hottest_max=HOTTEST_MAX, events_max=EVENTS_MAX),
        "status": status,
        "failure": view.failure or None,
        "rates_known": view.rates is not None,
        "lease_ms": view.status.lease_ms if view.status else 0,
    }
    return _text(moment)


def _node_form(node: NodeInfo) -> dict[str, Any]:
    return {
        "number": node.number,
        "id": node.node_id,
        "address": node.address,
        "rack": node.rack,
        "pool": node.pool,
        "status": node.status,
    }


def _row_text(row: PartitionRow) -> str:
    form = (
        row.partition_id,
        row.status.name.lower(),
        row.primary,
        row.replicas,
        row.in_sync,
        row.adding,
        row.removing,
        row.wanted_primary,
        row.primary_epoch,
        row.partition_epoch,
        row.offline_reason.name.lower().replace("_", " ") if row.offline_reason else "",
        is_short(row),
    )
    return json.dumps(form, separators=(",", ":"))


def _text(value: Any) -> str:
    return json.dumps(json_of(value), separators=(",", ":"), ensure_ascii=False)
