"""Tests of histories: the point where two lineages part."""

from __future__ import annotations

import pytest

from koinon_node.core.formats.records import EpochStart
from koinon_node.core.replication.epoch_history import Lineage, common_point, cut, last_common
from koinon_proto.contract.table import first_sequence

E1, E2, E3, E4 = (first_sequence(n) for n in (1, 2, 3, 4))
START = EpochStart(1, 0)


@pytest.mark.parametrize(
    ("mine", "theirs", "expected"),
    [
        ((((1, 0),), E1 + 9), (((1, 0),), E1 + 5), E1 + 5),
        ((((1, 0),), E1 + 5), (((1, 0),), E1 + 9), E1 + 5),
        # They have a tail that the next primary never had.
        ((((1, 0), (2, E1 + 5)), E2 + 3), (((1, 0),), E1 + 9), E1 + 5),
        # They were behind when the next epoch began.
        ((((1, 0), (2, E1 + 5)), E2 + 3), (((1, 0),), E1 + 2), E1 + 2),
        # Both went on without the other.
        ((((1, 0), (3, E1 + 5)), E3), (((1, 0), (2, E1 + 7)), E2 + 1), E1 + 5),
        # The same epoch from another beginning is of no known lineage.
        ((((1, 0), (2, E1 + 5)), E2), (((1, 0), (2, E1 + 7)), E2), E1 + 5),
        ((((2, 0),), E2), (((1, 0),), E1), 0),
        ((((1, 0),), E1), ((), 0), 0),
        # A history cut above what is complete says no more than what is complete.
        ((((1, 0), (2, E1 + 5)), E2 + 3), (((1, 0), (2, E1 + 5)), E1 + 4), E1 + 4),
    ],
)
def test_common_point_is_where_the_lineages_part(
    mine: tuple[tuple[tuple[int, int], ...], int],
    theirs: tuple[tuple[tuple[int, int], ...], int],
    expected: int,
) -> None:
    first, second = (
        Lineage([EpochStart(*entry) for entry in history], through)
        for history, through in (mine, theirs)
    )
    assert common_point(first, second) == expected
    assert common_point(second, first) == expected


@pytest.mark.parametrize(
    ("sequence", "kept"), [(0, 0), (E1 - 1, 0), (E1, 1), (E2 - 1, 1), (E2, 2), (E4, 3)]
)
def test_cut_keeps_the_epochs_that_had_begun(sequence: int, kept: int) -> None:
    history = (START, EpochStart(2, E1 + 5), EpochStart(3, E2 + 1))
    assert cut(history, sequence) == history[:kept]


@pytest.mark.parametrize(
    ("sequence", "expected"),
    [
        (E1, E1),
        (E1 + 5, E1 + 5),
        (E1 + 6, E1 + 5),  # of a tail that the next primary never had
        (E2, E1 + 5),  # of an epoch that is not in the lineage
        (E3, E3),
        (E3 + 7, E3 + 7),
        (E3 + 8, E3 + 7),  # not written yet: another history has it
        (E4, E3 + 7),
        (5, None),
    ],
)
def test_last_common_is_what_a_reader_of_a_sequence_shares(
    sequence: int, expected: int | None
) -> None:
    lineage = Lineage((START, EpochStart(3, E1 + 5)), E3 + 7)
    assert last_common(lineage, sequence) == expected
