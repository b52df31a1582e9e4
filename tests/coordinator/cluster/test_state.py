"""Directed tests of ``ClusterState.apply``; above all the registrations of every crash point."""

from __future__ import annotations

from dataclasses import replace

import pytest

from koinon_coordinator.core.cluster.commands import (
    Applied,
    AssignPartitions,
    Command,
    ConfirmRegistration,
    CreateCluster,
    FenceNode,
    HostedPartition,
    PartitionsHosted,
    Reason,
    Rejected,
    StoreStanding,
)
from koinon_coordinator.core.cluster.state import ClusterState
from koinon_coordinator.wire.state_codec import image_from_bytes, image_to_bytes
from koinon_proto.contract.table import (
    NO_NODE,
    NodeNumber,
    NodeStatus,
    OfflineReason,
    PartitionId,
    PartitionRow,
    PartitionStatus,
)
from tests.coordinator.kit.support import (
    bootstrapped,
    cluster_config,
    fence,
    host_everything,
    hosted_of,
    register,
    registered,
)

N1, N2, N3 = NodeNumber(1), NodeNumber(2), NodeNumber(3)


def rejected(result: object) -> Reason:
    assert isinstance(result, Rejected), result
    return result.reason


def row_of(state: ClusterState, partition_id: int = 0) -> PartitionRow:
    row = state.row(partition_id)
    assert row is not None
    return row


def epoch_of(state: ClusterState, number: int) -> int:
    record = state.node(NodeNumber(number))
    assert record is not None
    return record.info.node_epoch


def confirm(state: ClusterState, number: int = 1) -> None:
    state.apply(
        ConfirmRegistration(node_number=NodeNumber(number), node_epoch=epoch_of(state, number))
    )


# --- creation and bootstrap --------------------------------------------------------------------


def test_create_cluster_repeated_keeps_the_first() -> None:
    state = ClusterState()
    assert isinstance(state.apply(CreateCluster(config=cluster_config())), Applied)
    other = CreateCluster(config=cluster_config(partitions=99))
    assert rejected(state.apply(other)) is Reason.CLUSTER_EXISTS
    assert state.config == cluster_config()
    assert state.table_version == 1


def test_apply_before_the_cluster_exists_is_rejected() -> None:
    state = ClusterState()
    before = state.image()
    for command, reason in (
        (register("n1"), Reason.NO_CLUSTER),
        (AssignPartitions(replicas=((N1,),)), Reason.NO_CLUSTER),
        (FenceNode(node_number=N1, node_epoch=1), Reason.UNKNOWN_NODE),
        (ConfirmRegistration(node_number=N1, node_epoch=1), Reason.UNKNOWN_NODE),
        (PartitionsHosted(node_number=N1, node_epoch=1, hosted=()), Reason.UNKNOWN_NODE),
    ):
        assert rejected(state.apply(command)) is reason
    assert state.image() == before


def test_assign_partitions_makes_rows_at_epoch_one_led_by_the_first_replica() -> None:
    state = bootstrapped([(2, 1), (1, 3)])
    row = row_of(state)
    assert (row.replicas, row.in_sync, row.primary) == ((N2, N1), (N2, N1), N2)
    assert (row.primary_epoch, row.partition_epoch) == (1, 2)  # 2: it has come online
    assert row.status is PartitionStatus.ONLINE


def test_assign_partitions_repeated_is_rejected() -> None:
    state = bootstrapped([(1,), (2,)])
    before = state.image()
    command = AssignPartitions(replicas=((N2,), (N1,)))
    assert rejected(state.apply(command)) is Reason.ALREADY_ASSIGNED
    assert state.image() == before


@pytest.mark.parametrize(
    "replicas",
    [
        ((N1,),),  # one row of two
        ((N1,), (N3,)),  # a fenced node
        ((N1,), (NodeNumber(9),)),  # not a node
        ((N1, N2), (N1, N2)),  # not the replication factor
        ((), ()),
    ],
)
def test_assign_partitions_that_does_not_fit_is_rejected(
    replicas: tuple[tuple[NodeNumber, ...], ...],
) -> None:
    state = ClusterState()
    state.apply(CreateCluster(config=cluster_config(partitions=2)))
    for node_id in ("n1", "n2", "n3"):
        state.apply(register(node_id))
    fence(state, 3)
    assert rejected(state.apply(AssignPartitions(replicas=replicas))) is Reason.BAD_ASSIGNMENT
    assert not state.bootstrapped


def test_table_unchanged_is_the_same_object() -> None:
    state = bootstrapped([(1,), (2,)])
    table = state.table()
    state.apply(FenceNode(node_number=N1, node_epoch=99))
    assert state.table() is table
    fence(state, 1)
    after = state.table()
    assert after is not None
    assert table is not None
    assert after.table_version == table.table_version + 1
    assert [row.partition_id for row in after.since(table.table_version).rows] == [0]
    assert [node.number for node in after.since(table.table_version).nodes] == [N1]


# --- fences and elections ----------------------------------------------------------------------


def test_fence_with_backups_elects_the_first_live_in_sync_replica() -> None:
    state = bootstrapped([(1, 2, 3), (2, 3, 1)])
    assert fence(state, 1) == Applied(rows_changed=2)
    row, other = row_of(state, 0), row_of(state, 1)
    assert (row.primary, row.primary_epoch, row.in_sync) == (N2, 2, (N2, N3))
    assert row.status is PartitionStatus.ASSIGNED  # until the new primary hosts it
    assert (other.primary, other.primary_epoch, other.in_sync) == (N2, 1, (N2, N3))
    assert other.status is PartitionStatus.ONLINE
    assert other.partition_epoch == 3


def test_fence_never_shrinks_in_sync_below_the_minimum() -> None:
    state = bootstrapped([(1, 2, 3)])
    fence(state, 3)
    fence(state, 1)
    row = row_of(state)
    assert row.in_sync == (N1, N2)  # min_in_sync 2: both hold every acknowledged write
    assert (row.primary, row.status) == (N2, PartitionStatus.ASSIGNED)
    fence(state, 2)
    row = row_of(state)
    assert row.in_sync == (N1, N2)
    assert (row.primary, row.status) == (NO_NODE, PartitionStatus.OFFLINE)
    assert row.offline_reason is OfflineReason.NO_LIVE_REPLICA


def test_fence_offline_partition_is_led_only_by_an_in_sync_member_again() -> None:
    state = bootstrapped([(1, 2, 3)])
    for number in (3, 1, 2):
        fence(state, number)
    epoch = row_of(state).primary_epoch
    state.apply(register("n3", last=1, known=1, registration="r2"))
    assert row_of(state).primary == NO_NODE  # n3 was out of sync: never an unclean election
    state.apply(register("n2", last=1, known=1, registration="r2"))
    row = row_of(state)
    assert (row.primary, row.primary_epoch) == (N2, epoch + 1)
    assert (row.status, row.offline_reason) == (PartitionStatus.ASSIGNED, OfflineReason.NONE)


def test_fence_of_a_single_copy_keeps_it_by_name() -> None:
    state = bootstrapped([(1,)])
    fence(state, 1)
    row = row_of(state)
    assert (row.in_sync, row.primary, row.primary_epoch) == ((N1,), NO_NODE, 2)
    assert row.offline_reason is OfflineReason.NO_LIVE_REPLICA


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (FenceNode(node_number=N1, node_epoch=2), Reason.STALE_EPOCH),
        (FenceNode(node_number=NodeNumber(7), node_epoch=1), Reason.UNKNOWN_NODE),
        (ConfirmRegistration(node_number=N1, node_epoch=1), Reason.ALREADY_CONFIRMED),
        (ConfirmRegistration(node_number=N1, node_epoch=0), Reason.STALE_EPOCH),
    ],
)
def test_apply_stale_command_changes_nothing(command: Command, reason: Reason) -> None:
    state = bootstrapped([(1,)])
    before = state.image()
    assert rejected(state.apply(command)) is reason
    assert state.image() == before


def test_fence_repeated_is_rejected() -> None:
    state = bootstrapped([(1,)])
    fence(state, 1)
    before = state.image()
    assert rejected(fence(state, 1)) is Reason.ALREADY_FENCED
    assert state.image() == before


# --- hosting -----------------------------------------------------------------------------------


def test_partitions_hosted_takes_the_current_rows_and_leaves_the_others() -> None:
    state = bootstrapped([(1,), (1,), (2,)], nodes=2)
    state.apply(register("n1", last=1, known=1, registration="r2"))
    waiting = hosted_of(state.assigned_to(N1))
    stale = HostedPartition(partition_id=PartitionId(1), primary_epoch=1, partition_epoch=1)
    others = HostedPartition(partition_id=PartitionId(2), primary_epoch=1, partition_epoch=2)
    beyond = HostedPartition(partition_id=PartitionId(77), primary_epoch=1, partition_epoch=1)
    version = state.table_version
    command = PartitionsHosted(
        node_number=N1, node_epoch=2, hosted=(waiting[0], waiting[0], stale, others, beyond)
    )
    assert state.apply(command) == Applied(rows_changed=1)
    assert state.table_version == version + 1
    assert row_of(state, 0).status is PartitionStatus.ONLINE
    assert row_of(state, 1).status is PartitionStatus.ASSIGNED
    assert rejected(state.apply(command)) is Reason.NOTHING_CURRENT
    assert state.table_version == version + 1
    assert [row.partition_id for row in state.assigned_to(N1)] == [1]


@pytest.mark.parametrize("epoch", ["primary_epoch", "partition_epoch"])
@pytest.mark.parametrize("skew", [-1, 1])
def test_partitions_hosted_at_one_other_epoch_is_rejected(epoch: str, skew: int) -> None:
    state = bootstrapped([(1,)])
    state.apply(register("n1", last=1, known=1, registration="r2"))
    (current,) = hosted_of(state.assigned_to(N1))
    other = replace(current, **{epoch: getattr(current, epoch) + skew})
    command = PartitionsHosted(node_number=N1, node_epoch=2, hosted=(other,))
    assert rejected(state.apply(command)) is Reason.NOTHING_CURRENT
    assert row_of(state).status is PartitionStatus.ASSIGNED


def test_partitions_hosted_of_a_fenced_epoch_is_rejected() -> None:
    state = bootstrapped([(1,)])
    state.apply(register("n1", last=1, known=1, registration="r2"))
    waiting = hosted_of(state.assigned_to(N1))
    fence(state, 1)
    command = PartitionsHosted(node_number=N1, node_epoch=2, hosted=waiting)
    assert rejected(state.apply(command)) is Reason.ALREADY_FENCED
    state.apply(register("n1", last=2, known=2, registration="r3"))
    assert rejected(state.apply(command)) is Reason.STALE_EPOCH


# --- registration: the crash matrix ------------------------------------------------------------
# A node persists registration_id, sends it, and stores the epoch that answers it. It may die
# between any two of these; the answer may be lost; the leader may die before or after the commit.


def test_register_new_nodes_get_numbers_from_one_and_epoch_one() -> None:
    state = ClusterState()
    state.apply(CreateCluster(config=cluster_config()))
    assert registered(state.apply(register("b"))).node_number == 1
    second = registered(state.apply(register("a")))
    assert (second.node_number, second.node_epoch) == (2, 1)


def test_register_restart_of_the_known_store_begins_a_new_epoch_of_all_it_led() -> None:
    state = bootstrapped([(1,), (2,)])
    result = registered(state.apply(register("n1", last=1, known=1, registration="r2")))
    assert (result.node_epoch, result.copies_lost) == (2, 0)
    row = row_of(state)
    assert (row.primary, row.primary_epoch, row.in_sync) == (N1, 2, (N1,))
    assert row.status is PartitionStatus.ASSIGNED
    assert row_of(state, 1).primary_epoch == 1


def test_register_restart_with_backups_elects_anew() -> None:
    """The old process never was fenced: its unacknowledged tail must not be taken for granted."""
    state = bootstrapped([(1, 2), (2, 1)])
    state.apply(register("n1", last=1, known=1, registration="r2"))
    assert (row_of(state).primary, row_of(state).primary_epoch) == (N1, 2)
    assert (row_of(state, 1).primary, row_of(state, 1).primary_epoch) == (N2, 1)


def test_register_answer_lost_same_id_gets_the_same_epoch() -> None:
    state = bootstrapped([(1,)])
    command = register("n1", last=1, known=1, registration="r2")
    first = registered(state.apply(command))
    before = state.image()
    again = registered(state.apply(command))  # a copy in the log
    assert (again.node_epoch, again.repeated) == (first.node_epoch, True)
    redecided = registered(state.apply(register("n1", last=1, known=2, registration="r2")))
    assert (redecided.node_epoch, redecided.repeated) == (first.node_epoch, True)
    assert state.image() == before


def test_register_answer_lost_and_moved_changes_the_address_only() -> None:
    state = bootstrapped([(1,)])
    state.apply(register("n1", last=1, known=1, registration="r2"))
    rows = state.image().rows
    moved = register("n1", last=1, known=2, registration="r2", address="m:9", rack="r")
    assert registered(state.apply(moved)).node_epoch == 2
    record = state.node(N1)
    assert record is not None
    assert (record.info.address, record.info.rack) == ("m:9", "r")
    assert state.image().rows == rows


def test_register_answer_lost_then_fenced_gets_a_new_epoch_and_keeps_its_copies() -> None:
    """It died before it stored the epoch, and was away for longer than its session."""
    state = bootstrapped([(1,)])
    for epoch in (2, 3, 4):  # and that several times
        result = registered(state.apply(register("n1", last=1, known=epoch - 1, registration="r2")))
        assert (result.node_epoch, result.copies_lost) == (epoch, 0)
        fence(state, 1)
    assert row_of(state).in_sync == (N1,)


def test_register_stored_but_never_heard_the_next_life_keeps_its_copies() -> None:
    """It stored the epoch and died before its first heartbeat."""
    state = bootstrapped([(1,)])
    state.apply(register("n1", last=1, known=1, registration="r2"))
    result = registered(state.apply(register("n1", last=2, known=2, registration="r3")))
    assert (result.node_epoch, result.copies_lost) == (3, 0)
    assert row_of(state).primary == N1


def test_register_stored_but_its_id_not_forgotten_the_next_life_keeps_its_copies() -> None:
    state = bootstrapped([(1,)])
    state.apply(register("n1", last=1, known=1, registration="r2"))
    confirm(state)
    result = registered(state.apply(register("n1", last=2, known=2, registration="r2")))
    assert (result.node_epoch, result.copies_lost) == (3, 0)


def test_register_late_copy_after_the_epoch_was_used_is_rejected() -> None:
    """Two attempts of one registration are in the log; between them the node began to serve."""
    state = bootstrapped([(1,)])
    command = register("n1", last=1, known=1, registration="r2")
    state.apply(command)
    confirm(state)
    host_everything(state)
    before = state.image()
    assert rejected(state.apply(command)) is Reason.STALE_EPOCH
    assert state.image() == before


def test_register_new_node_twice_in_the_log_is_one_node() -> None:
    state = ClusterState()
    state.apply(CreateCluster(config=cluster_config()))
    state.apply(register("n1"))
    assert registered(state.apply(register("n1"))).repeated
    assert rejected(state.apply(register("n1", registration="other"))) is Reason.STALE_EPOCH
    assert len(state.nodes) == 1


def test_register_leader_died_before_the_commit_a_later_leader_applies_it_once() -> None:
    state = bootstrapped([(1,)])
    fence(state, 1)  # meanwhile
    result = registered(state.apply(register("n1", last=1, known=1, registration="r2")))
    assert (result.node_epoch, result.copies_lost) == (2, 0)


def test_register_epoch_that_no_snapshot_could_hold_is_refused() -> None:
    """Applied, it would keep every member from its table and its snapshots for good."""
    state = bootstrapped([(1,)])
    most = (1 << 64) - 1
    for node_id, known in (("n1", 1), ("n9", 0)):
        before = state.image()
        command = register(node_id, last=most, known=known, registration="r2")
        assert rejected(state.apply(command)) is Reason.BAD_VALUE
        assert state.image() == before
    command = register("n1", last=most - 1, known=1, registration="r2")
    assert registered(state.apply(command)).node_epoch == most
    assert image_from_bytes(image_to_bytes(state.image())) == state.image()
    again = register("n1", last=most, known=most, registration="r3")
    assert rejected(state.apply(again)) is Reason.BAD_VALUE


@pytest.mark.parametrize("fenced_first", [False, True])
@pytest.mark.parametrize(
    ("store", "last", "registration"),
    [
        ("store-other", 0, "r9"),  # an empty disk
        ("store-other", 2, "r9"),  # another store that happens to have the epoch
        ("store-n1", 1, "r9"),  # rolled back by one life
        ("store-n1", 1, "r2"),  # rolled back to when r2 was pending, but its epoch was used
        ("store-n1", 0, "r1"),  # rolled back to its beginning
        ("store-n1", 7, "r9"),  # from the future: the coordinators lost something
    ],
)
def test_register_store_that_is_not_the_one_known_leaves_every_in_sync(
    store: str, last: int, registration: str, fenced_first: bool
) -> None:
    state = bootstrapped([(1,), (2,)])
    state.apply(register("n1", last=1, known=1, registration="r2"))
    host_everything(state)  # epoch 2 is confirmed and serves
    if fenced_first:
        fence(state, 1)
    primary_epoch = row_of(state).primary_epoch
    result = registered(
        state.apply(register("n1", store=store, last=last, known=2, registration=registration))
    )
    assert (result.copies_lost, result.stranded, result.known_epoch) == (1, 1, 2)
    is_old = store == "store-n1" and last < 2
    assert result.store is (StoreStanding.OLD if is_old else StoreStanding.OTHER)
    assert result.node_epoch > max(2, last)
    row = row_of(state)
    assert (row.in_sync, row.primary, row.status) == ((), NO_NODE, PartitionStatus.OFFLINE)
    assert row.offline_reason is OfflineReason.STORE_LOST
    assert row.primary_epoch >= primary_epoch
    assert row_of(state, 1).status is PartitionStatus.ONLINE
    record = state.node(N1)
    assert record is not None
    assert (record.info.store_id, record.info.status) == (store, NodeStatus.ACTIVE)


def test_register_lost_store_with_a_backup_leads_there() -> None:
    state = bootstrapped([(1, 2), (2, 1)])
    result = registered(
        state.apply(register("n1", store="new", last=0, known=1, registration="r2"))
    )
    assert (result.copies_lost, result.stranded) == (2, 0)
    row = row_of(state)
    assert (row.primary, row.in_sync, row.primary_epoch) == (N2, (N2,), 2)
    assert (row_of(state, 1).primary, row_of(state, 1).primary_epoch) == (N2, 1)
    assert row_of(state, 1).in_sync == (N2,)


def test_register_lost_store_leaves_in_sync_even_below_the_minimum() -> None:
    """A lost copy in the set could be elected; too few copies only stop writes."""
    state = bootstrapped([(1, 2, 3)])
    fence(state, 3)
    fence(state, 2)
    assert row_of(state).in_sync == (N1, N2)
    state.apply(register("n1", store="new", last=0, known=1, registration="r2"))
    row = row_of(state)
    assert (row.in_sync, row.primary) == ((N2,), NO_NODE)
    assert row.offline_reason is OfflineReason.NO_LIVE_REPLICA
    state.apply(register("n2", last=1, known=1, registration="r2"))
    assert row_of(state).primary == N2


def test_register_lost_store_stays_lost_over_later_registrations() -> None:
    state = bootstrapped([(1,)])
    state.apply(register("n1", store="new", last=0, known=1, registration="r2"))
    copy = register("n1", store="new", last=0, known=2, registration="r2")
    assert registered(state.apply(copy)).repeated
    fence(state, 1)
    state.apply(copy)  # fenced before it was answered
    state.apply(register("n1", store="new", last=3, known=3, registration="r3"))
    host_everything(state)
    row = row_of(state)
    assert (row.status, row.offline_reason) == (PartitionStatus.OFFLINE, OfflineReason.STORE_LOST)
    assert (row.in_sync, row.primary) == ((), NO_NODE)


def test_register_lost_store_that_returns_brings_its_sole_copies_back() -> None:
    """A disk that had not been mounted: two lives on other stores, then the right one again."""
    state = bootstrapped([(1,), (2,)])
    state.apply(register("n1", store="empty", last=0, known=1, registration="r2"))
    host_everything(state)
    state.apply(register("n1", store="other", last=0, known=2, registration="r3"))
    host_everything(state)
    before = row_of(state).primary_epoch
    result = registered(state.apply(register("n1", last=1, known=3, registration="r4")))
    assert (result.reclaimed, result.copies_lost) == (1, 0)
    row = row_of(state)
    assert (row.in_sync, row.primary, row.status) == ((N1,), N1, PartitionStatus.ASSIGNED)
    assert row.primary_epoch > before
    assert state.image().stranded == ()
    assert ClusterState(state.image()).image() == state.image()


@pytest.mark.parametrize("confirmed", [False, True])
@pytest.mark.parametrize(
    ("last", "registration", "comes_back"),
    [
        (1, "r2", True),  # it never heard that it was given epoch 2, and asks again
        (2, "r4", True),  # it did
        (1, "r4", False),  # rolled back to before it asked
        (0, "", False),
    ],
)
def test_register_lost_store_whose_last_answer_may_be_lost_too_brings_its_copies_back(
    last: int, registration: str, comes_back: bool, confirmed: bool
) -> None:
    state = bootstrapped([(1,), (2,)])
    state.apply(register("n1", last=1, known=1, registration="r2"))
    if confirmed:
        host_everything(state)
        comes_back = last == 2
    state.apply(register("n1", store="empty", last=0, known=2, registration="r3"))
    host_everything(state)
    assert len(state.image().stranded) == 1
    state = ClusterState(image_from_bytes(image_to_bytes(state.image())))
    command = register("n1", last=last, known=3, registration=registration)
    assert registered(state.apply(command)).reclaimed == comes_back


@pytest.mark.parametrize(("store", "last"), [("", 0), ("", 2), ("another", 1)])
def test_register_store_other_than_the_one_left_behind_brings_nothing_back(
    store: str, last: int
) -> None:
    state = bootstrapped([(1,)])
    state.apply(register("n1", store="empty", last=0, known=1, registration="r2"))
    host_everything(state)
    command = register("n1", store=store, last=last, known=2, registration="r3")
    assert registered(state.apply(command)).reclaimed == 0
    assert row_of(state).status is PartitionStatus.OFFLINE


def test_register_lost_store_that_returns_brings_back_no_copy_that_had_company() -> None:
    """Its backup led on and may have acknowledged more before it was lost as well."""
    state = bootstrapped([(1, 2)])
    state.apply(register("n1", store="empty", last=0, known=1, registration="r2"))
    host_everything(state)
    state.apply(register("n2", store="empty2", last=0, known=1, registration="r2"))
    host_everything(state)
    assert row_of(state).in_sync == ()
    state.apply(register("n1", last=1, known=2, registration="r3"))
    assert row_of(state).status is PartitionStatus.OFFLINE


def test_register_lost_store_answer_lost_is_not_lost_twice() -> None:
    state = bootstrapped([(1, 2)])
    command = register("n1", store="new", last=0, known=1, registration="r2")
    assert registered(state.apply(command)).copies_lost == 1
    fence(state, 1)
    again = registered(state.apply(register("n1", store="new", last=0, known=2, registration="r2")))
    assert (again.node_epoch, again.copies_lost) == (3, 0)


def test_register_fenced_host_moved_keeps_its_copies_at_the_new_address() -> None:
    state = bootstrapped([(1,)])
    fence(state, 1)
    state.apply(register("n1", last=1, known=1, registration="r2", address="elsewhere:1"))
    record = state.node(N1)
    assert record is not None
    assert record.info.address == "elsewhere:1"
    assert row_of(state).primary == N1


def test_register_store_that_remembers_more_than_the_group_gets_a_higher_epoch() -> None:
    state = ClusterState()
    state.apply(CreateCluster(config=cluster_config()))
    assert registered(state.apply(register("n1", last=41))).node_epoch == 42
