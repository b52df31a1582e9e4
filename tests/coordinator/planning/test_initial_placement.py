from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from koinon_coordinator.core.planning.initial_placement import place, rack_alternated
from koinon_proto.contract.errors import ConfigurationError


def test_place_five_nodes_without_racks_reproduces_the_published_example() -> None:
    placed = place(dict.fromkeys(range(5), ""), partition_count=10, replication_factor=3)
    assert placed == (
        (0, 1, 2),
        (1, 2, 3),
        (2, 3, 4),
        (3, 4, 0),
        (4, 0, 1),
        (0, 2, 3),
        (1, 3, 4),
        (2, 4, 0),
        (3, 0, 1),
        (4, 1, 2),
    )


def test_place_six_racked_nodes_reproduces_the_published_example() -> None:
    racks = {0: "r1", 1: "r3", 2: "r3", 3: "r2", 4: "r2", 5: "r1"}
    assert rack_alternated(racks) == [0, 3, 1, 5, 4, 2]
    placed = place(racks, partition_count=7, replication_factor=3)
    assert placed == (
        (0, 3, 1),
        (3, 1, 5),
        (1, 5, 4),
        (5, 4, 2),
        (4, 2, 0),
        (2, 0, 3),
        (0, 4, 2),
    )


def test_place_one_node_holds_everything() -> None:
    assert place({7: ""}, partition_count=3, replication_factor=1) == ((7,), (7,), (7,))


def test_place_more_replicas_than_nodes_is_refused_with_both_values() -> None:
    with pytest.raises(ConfigurationError, match=r"replication_factor 3 .* nodes, 2"):
        place({1: "", 2: ""}, partition_count=4, replication_factor=3)


@pytest.mark.parametrize(("partitions", "replicas"), [(0, 1), (4, 0)])
def test_place_counts_below_one_are_refused(partitions: int, replicas: int) -> None:
    with pytest.raises(ConfigurationError, match="at least 1"):
        place({1: ""}, partition_count=partitions, replication_factor=replicas)


@st.composite
def clusters(draw: st.DrawFn) -> tuple[dict[int, str], int, int]:
    racks = draw(st.lists(st.sampled_from(["a", "b", "c", "d"]), min_size=1, max_size=12))
    numbers = draw(st.permutations(range(1, len(racks) + 1)))
    replicas = draw(st.integers(1, min(5, len(racks))))
    partitions = draw(st.integers(1, 200))
    return dict(zip(numbers, racks, strict=True)), partitions, replicas


@settings(max_examples=150, deadline=None)
@given(clusters())
def test_place_any_cluster_keeps_the_goals(cluster: tuple[dict[int, str], int, int]) -> None:
    racks, partitions, replicas = cluster
    placed = place(racks, partition_count=partitions, replication_factor=replicas)
    again = place(
        dict(reversed(racks.items())), partition_count=partitions, replication_factor=replicas
    )
    assert placed == again  # the order in which nodes are given does not matter
    assert len(placed) == partitions
    wanted_racks = min(replicas, len(set(racks.values())))
    for row in placed:
        assert len(set(row)) == len(row) == replicas
        assert len({racks[node] for node in row}) == wanted_racks
    primaries = Counter(row[0] for row in placed)
    counts = [primaries[node] for node in racks]
    assert max(counts) - min(counts) <= 1


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.integers(1, 5), st.integers(1, 20))
def test_place_whole_turns_without_racks_spread_replicas_evenly(
    nodes: int, replicas: int, turns: int
) -> None:
    replicas = min(nodes, replicas)
    placed = place(
        dict.fromkeys(range(nodes), ""), partition_count=turns * nodes, replication_factor=replicas
    )
    counts = Counter(node for row in placed for node in row)
    assert set(counts.values()) == {turns * replicas}
