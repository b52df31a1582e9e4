"""Tests of how a load's partitions are shared out over the calls that check them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from koinon.core.routing import Router
from koinon.spark.writing import preparing
from koinon.spark.writing.preparing import PARTITIONS_PER_CALL, ROWS_PER_CALL
from tests.client.kit.tables import PARTITIONS, update


@given(
    st.dictionaries(st.integers(0, PARTITIONS - 1), st.integers(1, 2 * ROWS_PER_CALL), min_size=1)
)
def test_calls_are_short_and_every_partition_is_in_one(rows_of: dict[int, int]) -> None:
    router = Router()
    router.on_update(update())
    routing = router.routing
    assert routing is not None
    calls = list(preparing.slices(rows_of, rows_of, routing))
    turns = preparing._turns(rows_of, routing)
    assert sorted(turns) == sorted(part for _, part in calls)
    assert len({routing.owner_of[part[0]] for part in turns[:3]}) == min(
        len({owner for owner, _ in calls}), len(turns[:3])
    )
    assert sorted(p for _, part in calls for p in part) == sorted(rows_of)
    for owner, part in calls:
        assert {routing.owner_of[p] for p in part} == {owner}
        assert 0 < len(part) <= PARTITIONS_PER_CALL
        assert len(part) == 1 or sum(rows_of[p] for p in part) <= ROWS_PER_CALL
