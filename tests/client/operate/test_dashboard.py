"""Tests of the changes that a viewer has seen: leaders, primaries, nodes, moves, rates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from koinon.operate.cluster_status import ClusterStatus
from koinon.operate.judge.dashboard import Observation, Overview
from koinon.operate.judge.hotspots import MEASURES, READS, NodeCounters
from koinon.operate.plans import MovesView, MoveView, PlannedMove
from koinon.operate.traffic import Counters
from koinon_proto.contract.table import MoveSettings, NodeStatus
from tests.client.operate.test_health import (
    PARTITIONS,
    number,
    status_of,
    table_of,
    with_node,
    with_row,
)


def seen(at: float, status: ClusterStatus | None, **fields: Any) -> Observation:
    return Observation(at=at, unix_s=1000 + at, status=status, **fields)


def counted(elapsed_s: float, reads: int) -> NodeCounters:
    counts = np.zeros((MEASURES, PARTITIONS))
    counts[READS, 3] = reads
    return NodeCounters(elapsed_s=elapsed_s, counts=counts)


def moving(*partition_ids: int) -> MovesView:
    return MovesView(
        settings=MoveSettings(),
        moves=tuple(
            MoveView(
                move=PlannedMove(partition_id=p, origin=(1, 2), target=(3, 2), reason=""),
                plan_id="plan",
                plan_moves=2,
                running=True,
                cancelled=False,
                progress=(),
                waits_for="",
            )
            for p in partition_ids
        ),
    )


def test_view_has_no_rates_before_the_second_look() -> None:
    overview = Overview()
    first = overview.update(seen(0, status_of(), counters=Counters(nodes={1: counted(5.0, 10)})))
    assert first.rates is None
    assert first.ok
    second = overview.update(seen(2, status_of(), counters=Counters(nodes={1: counted(7.0, 30)})))
    assert [node.rates is not None for node in second.nodes] == [True, False, False]
    assert second.hottest[0].partition_id == 3
    assert second.hottest[0].per_second[READS] == 10.0


def test_changes_of_leader_and_primaries_and_nodes_are_counted_and_told() -> None:
    overview = Overview()
    table = table_of()
    overview.update(seen(0, status_of(table)))
    table = with_node(replace(table, table_version=2), 3, status=NodeStatus.FENCED)
    table = with_row(with_row(table, 2, primary=number(1)), 5, primary=number(3))
    view = overview.update(seen(1, status_of(table, leader_id="c2", term=3)))
    assert (view.leader_changes, view.primary_changes) == (1, 2)
    assert [what for _, what in view.events] == [
        "c2 leads the coordinators, in term 3",
        "n3 is down",
        "primaries: n1 leads 1 more, n3 leads 1 more",
    ]
    view = overview.update(seen(2, status_of(table, leader_id="c2", term=3)))
    assert (view.leader_changes, len(view.events)) == (1, 3)


def test_last_known_cluster_stays_while_no_coordinator_answers() -> None:
    overview = Overview()
    overview.update(seen(0, status_of()))
    view = overview.update(seen(1, None, failure="no coordinator answers"))
    assert not view.ok
    assert view.summary.startswith("Attention: no coordinator answers: start")
    assert [node.info.node_id for node in view.nodes] == ["n1", "n2", "n3"]


def test_silent_node_is_named() -> None:
    view = Overview().update(seen(0, status_of(), counters=Counters(silent={2: "not reachable"})))
    assert [node.silent for node in view.nodes] == ["", "not reachable", ""]


def moved(*partition_ids: int) -> ClusterStatus:
    table = table_of()
    for p in partition_ids:
        table = with_row(table, p, replicas=(number(3), number(2)))
    return status_of(table)


def test_moves_are_followed_to_their_end_and_the_next_ones_count_anew() -> None:
    overview = Overview()
    view = overview.update(seen(0, status_of(), moves=moving(1, 2)))
    assert view.moves is not None
    assert (view.moves.done, view.moves.running) == (0, 2)
    view = overview.update(seen(1, moved(1), moves=moving(2)))
    assert view.moves is not None
    assert (view.moves.done, view.moves.running) == (1, 1)
    view = overview.update(seen(2, moved(1, 2)))  # moves were not asked for
    assert view.moves is not None
    view = overview.update(seen(3, moved(1, 2), moves=moving()))
    assert view.moves is not None
    assert view.moves.ended
    assert view.events[-1][1] == "2 moves done"
    assert overview.update(seen(4, moved(1, 2), moves=moving())).moves is None


def test_move_that_was_dropped_is_not_told_as_done() -> None:
    overview = Overview()
    overview.update(seen(0, status_of(), moves=moving(1, 2)))
    view = overview.update(seen(1, moved(1), moves=moving()))  # partition 2 stayed where it was
    assert view.moves is not None
    assert (view.moves.done, view.moves.turned_back) == (1, 1)
    assert view.events[-1][1] == "1 move done, 1 turned back or dropped"
