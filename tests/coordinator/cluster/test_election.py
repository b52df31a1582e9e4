"""Elections row by row: what ``ClusterState`` cannot bring about is held here."""

from __future__ import annotations

from koinon_coordinator.core.cluster.election import elect, with_store_returned, without_fenced
from koinon_proto.contract.table import (
    NO_NODE,
    NodeNumber,
    OfflineReason,
    PartitionId,
    PartitionRow,
)
from koinon_proto.contract.table import PartitionStatus as Status
from tests.coordinator.kit.states import numbers

N1, N2, N3 = numbers(1, 2, 3)


def row(in_sync: tuple[NodeNumber, ...], *, primary: NodeNumber = NO_NODE) -> PartitionRow:
    """A partition on nodes 2, 1 and 3, of which 3 is to be removed."""
    return PartitionRow(
        partition_id=PartitionId(0),
        replicas=(N2, N1, N3),
        in_sync=in_sync,
        primary=primary,
        primary_epoch=5,
        partition_epoch=9,
        removing=(N3,),
        status=Status.OFFLINE if primary == NO_NODE else Status.ONLINE,
        offline_reason=OfflineReason.STORE_LOST if not in_sync else OfflineReason.NONE,
        changed_at=1,
    )


def test_elect_takes_the_first_live_in_sync_replica() -> None:
    everyone = row((N1, N2, N3))
    for in_sync, live, elected in (
        (everyone.in_sync, {N1, N2, N3}, N2),
        (everyone.in_sync, {N1, N3}, N1),
        (everyone.in_sync, {N3}, N3),
        (everyone.in_sync, set(), NO_NODE),
        ((N3,), {N1, N2}, NO_NODE),
    ):
        assert elect(everyone.replicas, in_sync, live) == elected


def test_fence_takes_nobody_from_in_sync_who_is_as_good_as_those_left() -> None:
    """Both hold every acknowledged write, and the one that is left may have lost its disk."""
    for primary in (N1, NO_NODE):
        both_down = without_fenced(
            row((N1, N2), primary=primary), N1, set(), min_in_sync=1, version=2
        )
        assert (both_down.in_sync, both_down.primary) == ((N1, N2), NO_NODE)
    one_down = without_fenced(row((N1, N2), primary=N1), N1, {N2}, min_in_sync=1, version=2)
    assert (one_down.in_sync, one_down.primary) == ((N2,), N2)


def test_store_that_returns_leads_what_nobody_has_led_since() -> None:
    back = with_store_returned(row(()), N1, {N1}, version=2)
    assert (back.in_sync, back.primary, back.primary_epoch) == ((N1,), N1, 6)
    assert (back.status, back.partition_epoch, back.changed_at) == (Status.ASSIGNED, 10, 2)


def test_store_that_returns_to_a_row_that_goes_on_without_it_changes_nothing() -> None:
    for other in (row((N2,), primary=N2), row((N2,))):
        assert with_store_returned(other, N1, {N1, N2}, version=2) is other
    stranded = row(())
    assert with_store_returned(stranded, NodeNumber(9), {NodeNumber(9)}, version=2) is stranded
