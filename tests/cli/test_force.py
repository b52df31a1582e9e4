"""force-primary: what it chooses, shows, asks and refuses."""

from __future__ import annotations

from koinon.cli.operate.force import choose
from koinon.operate.replicas import Checksum
from koinon_proto.contract.table import (
    NodeNumber,
    PartitionId,
    PartitionRow,
    PartitionStatus,
)

N1, N2, N3 = (NodeNumber(n) for n in (1, 2, 3))
FORCED = "ForcePrimariesRequest"
UNASKED = "--yes-i-may-lose-writes"


def row(partition_id: int, *replicas: NodeNumber) -> PartitionRow:
    return PartitionRow(
        partition_id=PartitionId(partition_id),
        replicas=replicas,
        in_sync=(),
        primary=NodeNumber(0),
        primary_epoch=1,
        partition_epoch=1,
        status=PartitionStatus.OFFLINE,
        changed_at=1,
    )


def copy(through: int, *, usable: bool = True) -> Checksum:
    return Checksum(usable=usable, complete_through=through, records=0, bytes=0, digest=0)


# --- the choice ---------------------------------------------------------------------------------


def test_most_complete_usable_copy_is_chosen_of_equal_ones_the_preferred() -> None:
    copies = {
        (N1, 0): copy(5),
        (N2, 0): copy(9),
        (N3, 0): copy(20, usable=False),
        (N3, 1): copy(7),
        (N1, 1): copy(7),
    }
    choice = choose([row(0, N1, N2, N3), row(1, N3, N1, N2)], None, lambda n, p: copies.get((n, p)))
    assert choice.leaders == {0: N2, 1: N3}
    assert choice.silent == {N2: 1}
    assert not choice.skipped
    assert not choice.empty
    assert not choice.behind


def test_without_a_usable_copy_nothing_is_chosen() -> None:
    choice = choose([row(0, N1, N2)], None, lambda n, _: copy(3, usable=False) if n == N1 else None)
    assert not choice.leaders
    assert list(choice.skipped) == [0]
    assert choice.silent == {N2: 1}


def test_named_copies_lead_and_better_ones_are_told_of() -> None:
    copies = {(N1, 0): copy(5), (N2, 0): copy(9), (N2, 1): copy(9), (N1, 2): copy(9)}
    rows = [row(0, N1, N2), row(1, N1, N2), row(2, N1), row(3, N2, N3)]
    choice = choose(rows, N1, lambda n, p: copies.get((n, p)))
    assert choice.leaders == {0: N1, 1: N1, 2: N1}
    assert choice.behind == {N2: 1}
    assert choice.empty == [1]  # n1 does not say what it has there, and n2 has a usable one
    assert choice.usable == {N2: 1}
    assert list(choice.skipped) == [3]


def test_unusable_copy_leads_where_no_other_may_be_better() -> None:
    choice = choose([row(0, N1, N2)], N1, lambda _n, _p: copy(0, usable=False))
    assert choice.leaders == {0: N1}
    assert not choice.empty
