"""force-primary: what it chooses, shows, asks and refuses."""

from __future__ import annotations

import json

from koinon.cli.operate.force import choose
from koinon.operate.replicas import Checksum
from koinon_proto.contract.table import (
    NodeNumber,
    OfflineReason,
    PartitionId,
    PartitionRow,
    PartitionStatus,
)
from tests.cli.conftest import Run, kinds
from tests.cli.fake_operator import LOST, FakeOperator

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


# --- one partition ------------------------------------------------------------------------------


def test_one_partition_shows_its_copies_and_asks_for_its_number(
    operator: FakeOperator, koinon: Run
) -> None:
    operator.change_row(5, **LOST)
    operator.stop_node(2)
    refused = koinon("force-primary", "5", "n1")
    assert refused.exit_code == 2
    assert UNASKED in refused.stderr
    wrong = koinon("force-primary", "5", "n1", typed="4\n")
    assert wrong.exit_code == 1
    shown = koinon("force-primary", "5", "n1", typed="5\n")
    assert shown.exit_code == 0, shown.output
    assert "Partition 5 is offline (store_lost)" in shown.stdout
    assert "not reachable" in shown.stdout
    assert "epoch 1, 5" in shown.stdout
    assert "Not known: what n2 holds of 1 partition" in shown.stdout
    assert "n1 leads partition 5 from epoch 2 on" in shown.stdout
    assert kinds(operator).count(FORCED) == 1


def test_what_is_served_or_unknown_is_refused(operator: FakeOperator, koinon: Run) -> None:
    operator.change_row(5, **LOST)
    served = koinon("force-primary", "0,2-5", "n1", UNASKED)
    assert served.exit_code == 2
    assert "0, 2-4 are served: nothing has to be forced" in served.stderr
    assert koinon("force-primary", "99", "n1", UNASKED).exit_code == 2
    assert koinon("force-primary", "five", UNASKED).exit_code == 2
    assert koinon("force-primary", "5", "n9", UNASKED).exit_code == 1
    elsewhere = koinon("force-primary", "5", "n4", UNASKED)
    assert elsewhere.exit_code == 2
    assert "5: the node has no copy of it" in elsewhere.stderr
    assert FORCED not in kinds(operator)


def test_empty_copy_is_refused_while_another_may_be_better(
    operator: FakeOperator, koinon: Run
) -> None:
    operator.change_row(5, **LOST)
    operator.copies[1].not_usable.add(5)
    refused = koinon("force-primary", "5", "n1", UNASKED)
    assert refused.exit_code == 2
    assert "n1's copy of it is not usable" in refused.stderr
    assert "n2 has a usable one" in refused.stderr
    operator.stop_node(2)
    refused = koinon("force-primary", "5", "n1", UNASKED, "--json")
    assert "n2 does not say what it has: start it first" in json.loads(refused.stdout)["better"]
    assert FORCED not in kinds(operator)
    done = koinon("force-primary", "5", "n1", UNASKED, "--even-if-empty")
    assert done.exit_code == 0, done.output
    assert kinds(operator).count(FORCED) == 1


# --- many ---------------------------------------------------------------------------------------


def test_all_that_are_offline_go_to_their_most_complete_copies(
    operator: FakeOperator, koinon: Run
) -> None:
    nothing = koinon("force-primary", "lost", UNASKED)
    assert nothing.exit_code == 0
    assert "No partition is lost" in nothing.stdout
    for p in (1, 5, 6):
        operator.change_row(p, **LOST)
    operator.change_row(7, **LOST | {"offline_reason": OfflineReason.NO_LIVE_REPLICA})
    operator.copies[3].copies[5] = (1 << 41, 1, 1)
    wrong = koinon("force-primary", "lost", typed="5\n")
    assert wrong.exit_code == 1
    assert FORCED not in kinds(operator)
    done = koinon("force-primary", "lost", typed="3\n")
    assert done.exit_code == 0, done.output
    assert "3 partitions are offline." in done.stdout
    assert "n2 is to lead 1 partition." in done.stdout
    assert "3 partitions forced: n1 leads 1, n2 leads 1, n3 leads 1." in done.stdout
    (asked,) = (r for r in operator.requests if type(r).__name__ == FORCED)
    assert [(p.partition_id, p.node_id) for p in asked.primaries] == [
        (1, "n2"),
        (5, "n3"),
        (6, "n1"),
    ]
    every = koinon("force-primary", "offline", "n2", UNASKED, "--json")
    answer = json.loads(every.stdout)
    assert [one["partition_id"] for one in answer["forced"]] == [1, 5, 6, 7]


def test_one_that_is_led_again_meanwhile_is_passed_over(
    operator: FakeOperator, koinon: Run
) -> None:
    for p in (1, 5, 6):
        operator.change_row(p, **LOST)
    operator.forced_meanwhile.add(5)
    done = koinon("force-primary", "1,5-6", UNASKED, "--json")
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    assert [one["partition_id"] for one in answer["forced"]] == [1, 6]
    assert [one["partition_id"] for one in answer["not_forced"]] == [5]
    assert "not forced: 5: it is led" in done.stderr
    operator.forced_meanwhile = {1, 5}
    done = koinon("force-primary", "1,5", UNASKED)
    assert done.exit_code == 2
    assert "not forced: 1, 5: it is led" in done.stderr
