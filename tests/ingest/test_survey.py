"""Figures of a dry run: skew over partitions, shares of nodes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from koinon.ingest.survey import Survey, per_node, skew_of
from koinon_proto.contract.table import NodeNumber, Table, apply_update
from tests.client.kit.tables import PARTITIONS, update


def table(owners: dict[int, int], copies: int = 1) -> Table:
    made = apply_update(None, update(owners))
    assert made is not None
    rows = []
    for row in made.rows:
        others = [NodeNumber((row.primary - 1 + i) % 3 + 1) for i in range(copies)]
        rows.append(replace(row, replicas=tuple(others)))
    return replace(made, rows=tuple(rows))


def survey(rows: list[int], sizes: list[int]) -> Survey:
    return Survey(
        rows=np.array(rows, np.int64),
        bytes=np.array(sizes, np.int64),
        bad_rows=3,
        duplicate_rows=0,
        repeated=(),
        heaviest=(),
    )


def test_skew_of_even_counts_is_none() -> None:
    skew = skew_of(np.full(8, 5, np.int64))
    assert (skew.mean, skew.most, skew.least, skew.variation) == (5.0, 5, 5, 0.0)
    assert skew.most_to_mean == 1.0


def test_skew_names_the_heaviest_partition() -> None:
    skew = skew_of(np.array([1, 1, 9, 1], np.int64))
    assert (skew.heaviest_partition, skew.most, skew.mean) == (2, 9, 3.0)
    assert skew.most_to_mean == 3.0
    assert skew.variation == pytest.approx(np.sqrt(12) / 3)


def test_skew_of_nothing_divides_by_nothing() -> None:
    skew = skew_of(np.zeros(4, np.int64))
    assert (skew.variation, skew.most_to_mean) == (0.0, 0.0)


def test_nodes_get_what_their_partitions_hold() -> None:
    rows = [0] * PARTITIONS
    sizes = [0] * PARTITIONS
    rows[0], rows[1], rows[2] = 10, 20, 30
    sizes[0], sizes[1], sizes[2] = 100, 200, 300
    found = survey(rows, sizes)
    one_copy = per_node(found, table({0: 1, 1: 1, 2: 2}))
    assert [(s.node_id, s.rows, s.primary_bytes, s.bytes) for s in one_copy] == [
        ("n1", 30, 300, 300),
        ("n2", 30, 300, 300),
        ("n3", 0, 0, 0),
    ]
    two_copies = per_node(found, table({0: 1, 1: 1, 2: 2}, copies=2))
    assert [(s.primary_bytes, s.bytes) for s in two_copies] == [(300, 300), (300, 600), (0, 300)]


def test_figures_of_a_keyspace_are_of_its_own_partitions() -> None:
    """It begins with partition 2: what node 1 leads is another keyspace's."""
    found = replace(survey([10, 30], [100, 300]), base=2)
    shares = per_node(found, table({0: 1, 1: 1, 2: 2, 3: 3}))
    assert [(s.node_id, s.partitions, s.rows, s.bytes) for s in shares] == [
        ("n2", 1, 10, 100),
        ("n3", 1, 30, 300),
    ]
    assert found.skew.heaviest_partition == 3


def test_rows_total_counts_bad_rows_too() -> None:
    assert survey([1] * PARTITIONS, [1] * PARTITIONS).rows_total == PARTITIONS + 3
