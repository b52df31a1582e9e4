"""Tests of the versions of the table that are kept, and of the words for what changed in them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from koinon.operate.judge.table_changes import table_changes
from koinon.web_console import table_history
from koinon.web_console.journal import Journal
from koinon.web_console.live_state import LiveState
from koinon.web_console.table_history import TableHistory
from koinon_proto.contract.errors import WrongClusterError
from koinon_proto.contract.table import (
    ActiveLoad,
    MoveSettings,
    NodeStatus,
    PartitionStatus,
    Table,
)
from tests.client.operate.test_health import number, table_of, with_node, with_row
from tests.web_console.conftest import changed


def versions(count: int) -> list[Table]:
    """Return a table and the versions after it: partition 0 is led by one node after the other."""
    tables = [table_of()]
    for n in range(count - 1):
        tables.append(changed(tables[-1], 0, number(n)))
    return tables


def test_table_of_each_version_that_was_seen_is_that_table() -> None:
    history = TableHistory()
    for at, table in enumerate(versions(5)):
        history.take_whole(table, float(at))
    for table in versions(5):
        kept = history.at(table.table_version)
        assert kept is not None
        assert list(kept.rows) == list(table.rows)
        assert kept.nodes == table.nodes
    assert [step.base_version for step in history.steps] == [0, 1, 2, 3, 4]
    assert history.steps[2].at_ms == 2_000


def test_versions_share_the_rows_that_did_not_change() -> None:
    history = TableHistory()
    for table in versions(3):
        history.take_whole(replace(table, rows=tuple(replace(row) for row in table.rows)), 0.0)
    first, last = history.at(1), history.at(3)
    assert first is not None
    assert last is not None
    assert first.rows[5] is last.rows[5]
    assert first.rows[0] is not last.rows[0]


def test_deltas_of_a_watch_and_whole_tables_of_looks_give_one_history() -> None:
    one, two, three, four = versions(4)
    history = TableHistory()
    history.take_whole(one, 0.0)
    assert history.take(two.since(1), 1.0) is not None
    assert history.take_whole(two, 2.0) is None  # a look that comes after it
    assert history.take(four.since(2), 3.0) is not None
    assert history.take(three.since(2), 4.0) is None  # late
    assert [step.version for step in history.steps] == [1, 2, 4]
    assert history.at(3) is None


def test_history_is_bounded_by_versions_and_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_history, "VERSIONS_MAX", 4)
    history = TableHistory()
    for table in versions(10):
        history.take_whole(table, 0.0)
    assert [step.version for step in history.steps] == [7, 8, 9, 10]
    monkeypatch.setattr(table_history, "ROW_PLACES_MAX", 3 * len(table_of().rows))
    history.take_whole(changed(versions(10)[-1], 1, number(2)), 0.0)
    assert [step.version for step in history.steps] == [9, 10, 11]


def test_rows_of_versions_that_are_kept_no_more_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_history, "VERSIONS_MAX", 3)
    state = LiveState(Journal("me"))
    first, *others = versions(8)
    for table in (first, *others):
        state.apply_update(table.since(table.table_version - 1), 0.0)
    assert [state.table_at(v) is not None for v in range(4, 9)] == [False, False, True, True, True]
    assert len(state._rows) == 3


def test_table_of_another_cluster_is_refused() -> None:
    history = TableHistory()
    history.take_whole(table_of(), 0.0)
    other = table_of()
    other = replace(other, cluster=replace(other.cluster, cluster_id="two"), table_version=9)
    with pytest.raises(WrongClusterError):
        history.take_whole(other, 0.0)
    assert [step.version for step in history.steps] == [1]


def test_changes_are_told_in_words() -> None:
    before = table_of()
    down = with_node(before, 3, status=NodeStatus.FENCED)
    down = with_row(down, 3, primary=number(1), in_sync=(number(1),))  # n3 led it, n1 follows
    assert table_changes(before, down) == [
        "n3 is down",
        "primaries: n1 leads 1 more",
        "n3: 1 copy out of sync",
    ]
    assert table_changes(down, before)[-1] == "n3: 1 copy in sync again"


def test_moves_and_states_and_settings_are_told_in_words() -> None:
    before = table_of()
    target = (number(3), *before.rows[1].replicas)  # of n1 and n2
    moving = with_row(before, 1, replicas=target, adding=(number(3),), removing=(number(1),))
    assert table_changes(before, moving) == ["1 move begun"]
    done = with_row(before, 1, replicas=(number(3), number(2)), in_sync=(number(3), number(2)))
    assert table_changes(moving, done) == ["1 move done"]
    assert table_changes(moving, before) == ["1 move turned back"]
    asked = with_row(before, 1, wanted_primary=number(2))
    assert table_changes(before, asked) == ["1 partition to be handed over to another leader"]
    offline = with_row(before, 4, status=PartitionStatus.OFFLINE)
    assert table_changes(before, offline) == ["1 partition offline"]
    assert table_changes(before, replace(before, moves=MoveSettings(paused=True))) == [
        "moves are paused"
    ]
    merging = replace(before, loads=(ActiveLoad(load_id=7, merging=True),))
    assert table_changes(before, merging) == ["load 7 is being merged"]
    assert table_changes(merging, before) == ["load 7 is merged"]
