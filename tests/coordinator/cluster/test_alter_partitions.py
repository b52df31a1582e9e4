"""Commands by which primaries change rows, and elections and registrations of many replicas."""

from __future__ import annotations

from dataclasses import replace

import pytest

from koinon_coordinator.core.cluster.commands import (
    AlterPartitions,
    Applied,
    Reason,
)
from koinon_coordinator.core.cluster.election import PRIMARY_EPOCH_MAX
from koinon_coordinator.core.cluster.state import ClusterState
from koinon_proto.contract.table import (
    NO_NODE,
    NodeNumber,
    OfflineReason,
    PartitionId,
    PartitionStatus,
)
from tests.coordinator.kit.states import (
    P0,
    alter,
    applied,
    change_of,
    force,
    moving,
    numbers,
    rejected,
    restart,
    row_of,
    three,
    wish,
)
from tests.coordinator.kit.support import bootstrapped, fence, host_everything, register

N1, N2, N3, N4 = numbers(1, 2, 3, 4)


def at_primary_epoch(state: ClusterState, epoch: int) -> ClusterState:
    image = state.image()
    return ClusterState(replace(image, rows=(replace(image.rows[0], primary_epoch=epoch),)))


# --- in_sync -----------------------------------------------------------------------------------


def test_alter_by_the_primary_sets_in_sync_and_counts_the_change() -> None:
    state = three()
    before, version = row_of(state), state.table_version
    applied(alter(state, 1, 3))
    row = row_of(state)
    assert (row.in_sync, row.primary, row.status) == ((N1, N3), N1, PartitionStatus.ONLINE)
    assert (row.primary_epoch, row.partition_epoch) == (1, before.partition_epoch + 1)
    assert row.changed_at == state.table_version == version + 1


def test_alter_to_the_same_set_counts_a_change() -> None:
    """A primary that serves again after it gave up a hand-over forces a newer row by this."""
    state = three()
    before = row_of(state)
    applied(alter(state))
    assert row_of(state).partition_epoch == before.partition_epoch + 1


def test_alter_repeated_is_rejected_by_its_epoch() -> None:
    state = three()
    command = AlterPartitions(
        node_number=N1, node_epoch=1, changes=(change_of(row_of(state), 1, 2),)
    )
    applied(state.apply(command))
    before = state.image()
    assert state.apply(command) == Applied(rejected=(P0,))
    assert state.image() == before


@pytest.mark.parametrize("skew", [(-1, 0), (1, 0), (0, -1), (0, 1)])
def test_alter_at_another_epoch_is_rejected(skew: tuple[int, int]) -> None:
    state = three()
    change = change_of(row_of(state), 1, 2, skew=skew)
    command = AlterPartitions(node_number=N1, node_epoch=1, changes=(change,))
    assert state.apply(command) == Applied(rejected=(P0,))


@pytest.mark.parametrize(
    "in_sync",
    [
        (1,),  # below the minimum
        (2, 3),  # without its primary
        (1, 2, 2),  # twice
        (1, 2, 4),  # no replica
    ],
)
def test_alter_to_a_set_that_breaks_a_rule_is_rejected(in_sync: tuple[int, ...]) -> None:
    state = three()
    before = state.image()
    assert alter(state, *in_sync) == Applied(rejected=(P0,))
    assert state.image() == before


def test_alter_by_a_backup_is_rejected() -> None:
    state = three()
    assert alter(state, 2, 3, by=2) == Applied(rejected=(P0,))


def test_alter_of_an_epoch_that_is_over_is_rejected_whole() -> None:
    state = three()
    change = change_of(row_of(state), 1, 2)
    for number, epoch, reason in (
        (N1, 2, Reason.STALE_EPOCH),
        (NodeNumber(9), 1, Reason.UNKNOWN_NODE),
    ):
        command = AlterPartitions(node_number=number, node_epoch=epoch, changes=(change,))
        assert rejected(state.apply(command)) is reason
    fence(state, 1)
    command = AlterPartitions(node_number=N1, node_epoch=1, changes=(change,))
    assert rejected(state.apply(command)) is Reason.ALREADY_FENCED


def test_alter_judges_each_row_by_itself() -> None:
    state = bootstrapped([(1, 2), (1, 2), (2, 1)], min_in_sync=1)
    good = change_of(row_of(state, 0), 1)
    stale = change_of(row_of(state, 1), 1, skew=(0, 1))
    others = change_of(row_of(state, 2), 1)
    beyond = replace(good, partition_id=PartitionId(77))
    version = state.table_version
    command = AlterPartitions(
        node_number=N1, node_epoch=1, changes=(stale, good, others, beyond, good)
    )
    assert state.apply(command) == Applied(
        rows_changed=1, rejected=(PartitionId(1), PartitionId(2), PartitionId(77), P0)
    )
    assert [row_of(state, p).in_sync for p in range(3)] == [(N1,), (N1, N2), (N2, N1)]
    assert state.table_version == version + 1


def test_alter_twice_in_one_command_changes_a_row_once() -> None:
    state = three()
    first = change_of(row_of(state), 1, 2)
    second = change_of(row_of(state), 1, 3, skew=(0, 1))
    command = AlterPartitions(node_number=N1, node_epoch=1, changes=(first, second))
    assert state.apply(command) == Applied(rows_changed=1, rejected=(P0,))
    assert row_of(state).in_sync == (N1, N2)


def test_alter_adds_only_live_replicas() -> None:
    state = three()
    fence(state, 3)
    assert row_of(state).in_sync == (N1, N2)
    assert alter(state, 1, 2, 3) == Applied(rejected=(P0,))
    restart(state, 3)
    applied(alter(state, 1, 2, 3))
    assert row_of(state).in_sync == (N1, N2, N3)


def test_alter_keeps_a_member_that_is_fenced_at_the_minimum() -> None:
    """Such a one holds every acknowledged write by name: it need not be live to stay."""
    state = three()
    fence(state, 3)
    fence(state, 2)
    assert row_of(state).in_sync == (N1, N2)
    restart(state, 3)
    applied(alter(state, 1, 2, 3))
    applied(alter(state, 1, 3))  # and is put out once there is another
    assert row_of(state).in_sync == (N1, N3)


def test_alter_below_the_minimum_may_only_grow() -> None:
    state = three()
    restart(state, 2, store="empty2")
    restart(state, 3, store="empty3")
    assert row_of(state).in_sync == (N1,)
    assert alter(state, 2, to=2) == Applied(rejected=(P0,))  # another one of them is a loss
    applied(alter(state, 1))  # the same is none
    applied(alter(state, 1, 2))
    assert row_of(state).in_sync == (N1, N2)


def test_alter_before_the_primary_hosts_it_is_applied() -> None:
    """Taking over may need a set without the one that does not answer."""
    state = three()
    fence(state, 1)
    applied(alter(state, 2, 3))
    row = row_of(state)
    assert (row.status, row.in_sync, row.primary_epoch) == (PartitionStatus.ASSIGNED, (N2, N3), 2)


def test_alter_to_take_in_a_copy_whose_store_was_lost_meanwhile_is_rejected() -> None:
    """The proposal is under way while the replica comes back empty: it would be elected empty."""
    state = three()
    applied(alter(state, 1, 2))
    proposal = change_of(row_of(state), 1, 2, 3)
    restart(state, 3, store="empty")
    command = AlterPartitions(node_number=N1, node_epoch=1, changes=(proposal,))
    assert state.apply(command) == Applied(rejected=(P0,))
    assert row_of(state).in_sync == (N1, N2)


# --- handing over ------------------------------------------------------------------------------


def test_alter_hands_over_to_a_live_member_under_a_new_epoch() -> None:
    state = three()
    before = row_of(state)
    applied(alter(state, to=2))
    row = row_of(state)
    assert (row.primary, row.primary_epoch, row.in_sync) == (N2, 2, (N1, N2, N3))
    assert (row.status, row.partition_epoch) == (
        PartitionStatus.ASSIGNED,
        before.partition_epoch + 1,
    )
    assert [r.partition_id for r in state.assigned_to(N2)] == [0]


def test_alter_hands_over_and_leaves_in_sync() -> None:
    """A primary whose own commit failed resigns and puts itself out in one step."""
    state = three()
    applied(alter(state, 2, 3, to=2))
    assert (row_of(state).primary, row_of(state).in_sync) == (N2, (N2, N3))


def test_alter_hands_over_to_one_that_it_takes_in() -> None:
    state = three()
    fence(state, 3)
    restart(state, 3)
    applied(alter(state, 1, 2, 3, to=3))
    assert row_of(state).primary == N3


@pytest.mark.parametrize(("in_sync", "to"), [((1, 3), 2), ((1, 2, 3), 4), ((1,), 2)])
def test_alter_hand_over_to_one_out_of_sync_is_rejected(in_sync: tuple[int, ...], to: int) -> None:
    state = three()
    assert alter(state, *in_sync, to=to) == Applied(rejected=(P0,))
    assert row_of(state).primary == N1


def test_alter_hand_over_to_a_fenced_member_is_rejected() -> None:
    state = three()
    fence(state, 3)
    fence(state, 2)
    assert N2 in row_of(state).in_sync
    assert alter(state, to=2) == Applied(rejected=(P0,))


def test_alter_hand_over_beyond_the_last_primary_epoch_is_rejected() -> None:
    state = at_primary_epoch(three(), PRIMARY_EPOCH_MAX)
    assert alter(state, to=2) == Applied(rejected=(P0,))
    applied(alter(state, 1, 2))


def test_primary_epoch_that_is_used_up_leaves_the_partition_offline() -> None:
    """It never wraps: sequences would begin again below those that were given."""
    state = at_primary_epoch(three(), PRIMARY_EPOCH_MAX - 1)
    fence(state, 1)
    assert row_of(state).primary_epoch == PRIMARY_EPOCH_MAX
    fence(state, 2)
    for _ in range(2):
        row = row_of(state)
        assert (row.primary, row.primary_epoch) == (NO_NODE, PRIMARY_EPOCH_MAX)
        assert row.status is PartitionStatus.OFFLINE
        restart(state, 2)
    assert rejected(force(state, 2)) is Reason.BAD_VALUE


# --- wanted primaries --------------------------------------------------------------------------


def test_want_primaries_sets_the_wish_and_the_hand_over_clears_it() -> None:
    state = three()
    before = row_of(state)
    applied(wish(state, 3))
    row = row_of(state)
    assert (row.wanted_primary, row.partition_epoch) == (N3, before.partition_epoch + 1)
    applied(wish(state, 3), rows=0)  # the same again
    assert row_of(state) == row
    applied(alter(state, to=3))
    assert (row_of(state).primary, row_of(state).wanted_primary) == (N3, NO_NODE)


def test_want_primaries_election_of_the_wanted_one_clears_the_wish() -> None:
    state = three()
    wish(state, 2)
    fence(state, 1)
    assert (row_of(state).primary, row_of(state).wanted_primary) == (N2, NO_NODE)


def test_want_primaries_election_of_another_keeps_the_wish() -> None:
    state = three()
    wish(state, 3)
    fence(state, 1)
    assert (row_of(state).primary, row_of(state).wanted_primary) == (N2, N3)


def test_want_primaries_of_the_present_one_or_nobody_takes_the_wish_back() -> None:
    state = three()
    for node in (1, NO_NODE):
        wish(state, 2)
        applied(wish(state, node))
        assert row_of(state).wanted_primary == NO_NODE
        applied(wish(state, node), rows=0)


def test_want_primaries_that_cannot_be_is_rejected_row_by_row() -> None:
    state = moving(three(), (1, 2, 4))
    for node, partition in ((9, 0), (3, 0), (1, 77), (1, -1)):  # 3 is being removed
        assert wish(state, node, partition) == Applied(rejected=(PartitionId(partition),))
    assert row_of(state).wanted_primary == NO_NODE


# --- registration with several replicas --------------------------------------------------------


def test_restart_of_a_backup_keeps_the_row_as_it_is() -> None:
    state = three()
    before = row_of(state)
    restart(state, 2)
    assert row_of(state) == before


def test_restart_of_the_primary_elects_under_a_new_epoch_and_keeps_in_sync() -> None:
    state = three()
    applied(alter(state, to=2))
    host_everything(state)
    restart(state, 2)
    row = row_of(state)
    assert (row.primary, row.primary_epoch, row.in_sync) == (N1, 3, (N1, N2, N3))
    assert row.status is PartitionStatus.ASSIGNED


def test_fence_of_a_primary_that_has_not_hosted_yet_elects_anew() -> None:
    state = three(min_in_sync=1)
    fence(state, 1)
    assert row_of(state).status is PartitionStatus.ASSIGNED
    fence(state, 2)
    row = row_of(state)
    assert (row.primary, row.primary_epoch, row.status) == (N3, 3, PartitionStatus.ASSIGNED)


def test_offline_row_is_led_by_the_first_in_sync_member_that_registers() -> None:
    state = three()
    for number in (1, 2, 3):
        fence(state, number)
    assert row_of(state).in_sync == (N2, N3)
    restart(state, 1)
    assert row_of(state).status is PartitionStatus.OFFLINE
    restart(state, 3)
    row = row_of(state)
    assert (row.primary, row.status) == (N3, PartitionStatus.ASSIGNED)
    assert row.offline_reason is OfflineReason.NONE


def test_stranded_row_comes_back_with_the_store_that_was_lost_last() -> None:
    """Node 2 led on alone after node 1's store was gone: node 2's store has everything."""
    state = bootstrapped([(1, 2)], min_in_sync=1)
    restart(state, 1, store="empty1")
    host_everything(state)
    restart(state, 2, store="empty2")
    row = row_of(state)
    assert (row.in_sync, row.offline_reason) == ((), OfflineReason.STORE_LOST)
    state = ClusterState(state.image())
    first = register("n1", store="store-n1", last=1, known=2, registration="r9")
    assert state.apply(first).reclaimed == 0  # type: ignore[union-attr]
    assert row_of(state).status is PartitionStatus.OFFLINE
    last = register("n2", store="store-n2", last=1, known=2, registration="r9")
    assert state.apply(last).reclaimed == 1  # type: ignore[union-attr]
    row = row_of(state)
    assert (row.in_sync, row.primary, row.status) == ((N2,), N2, PartitionStatus.ASSIGNED)
    assert state.image().stranded == ()


def test_stranded_row_that_was_forced_does_not_fall_back_to_the_old_store() -> None:
    """Writes were acknowledged under the forced primary; the lost store knows nothing of them."""
    state = bootstrapped([(1, 2), (1, 2)], min_in_sync=1)
    for partition in (0, 1):
        applied(alter(state, 1, partition_id=partition))
    restart(state, 1, store="empty1")
    applied(force(state, 2))
    host_everything(state)
    result = state.apply(register("n1", store="store-n1", last=1, known=2, registration="r9"))
    assert result.reclaimed == 1  # type: ignore[union-attr]
    assert (row_of(state, 0).in_sync, row_of(state, 0).primary) == ((N2,), N2)
    assert (row_of(state, 1).in_sync, row_of(state, 1).primary) == ((N1,), N1)


def test_stranded_rows_of_one_node_wait_each_for_its_own_store() -> None:
    """The first store returns after the second was lost too: it brings back only its own."""
    state = bootstrapped([(1,), (1,)])
    restart(state, 1, store="second")
    applied(force(state, 1, partition_id=1))
    host_everything(state)  # partition 1 is written on the second store
    restart(state, 1, store="third")
    assert [row_of(state, p).in_sync for p in (0, 1)] == [(), ()]
    first = register("n1", store="store-n1", last=1, known=3, registration="r9")
    assert state.apply(first).reclaimed == 1  # type: ignore[union-attr]
    assert [row_of(state, p).in_sync for p in (0, 1)] == [(N1,), ()]
    assert [entry.partition_id for entry in state.image().stranded] == [1]


def test_stranded_row_does_not_come_back_with_its_store_under_another_node() -> None:
    state = bootstrapped([(1, 2)], min_in_sync=1)
    applied(alter(state, 1))
    restart(state, 1, store="empty1")
    swapped = register("n2", store="store-n1", last=1, known=1, registration="r9")
    assert state.apply(swapped).reclaimed == 0  # type: ignore[union-attr]
    assert row_of(state).status is PartitionStatus.OFFLINE
