"""Commands of operators: primaries forced by name, statuses of nodes, settings."""

from __future__ import annotations

from dataclasses import replace

import pytest

from koinon_coordinator.core.cluster.commands import (
    AlterPartitions,
    Applied,
    ForcePrimary,
    PartitionChange,
    Reason,
    SetMoveSettings,
    SetNodeStatus,
    SetReplicationFactor,
)
from koinon_coordinator.core.cluster.state import ClusterState
from koinon_proto.contract.table import (
    MoveSettings,
    NodeNumber,
    NodeStatus,
    OfflineReason,
    PartitionId,
    PartitionStatus,
)
from tests.coordinator.kit.states import (
    P0,
    alter,
    applied,
    cancel,
    force,
    numbers,
    plan_of,
    queue,
    record_of,
    rejected,
    restart,
    row_of,
    three,
    wish,
)
from tests.coordinator.kit.support import bootstrapped, fence, register

N1, N2, N3, N4 = numbers(1, 2, 3, 4)


def set_status(state: ClusterState, number: int, status: NodeStatus) -> object:
    return state.apply(SetNodeStatus(node_number=NodeNumber(number), status=status))


# --- forcing a primary -------------------------------------------------------------------------


def offline() -> ClusterState:
    """Partition 0 has lost its last copy; nodes 2 and 3 are there and lack writes."""
    state = three(min_in_sync=1)
    applied(alter(state, 1))
    fence(state, 1)
    assert row_of(state).status is PartitionStatus.OFFLINE
    return state


def test_force_primary_elects_the_named_replica_alone() -> None:
    state = offline()
    before = row_of(state)
    applied(force(state, 3))
    row = row_of(state)
    assert (row.primary, row.in_sync, row.status) == (N3, (N3,), PartitionStatus.ASSIGNED)
    assert row.primary_epoch == before.primary_epoch + 1
    assert row.partition_epoch == before.partition_epoch + 1
    assert row.offline_reason is OfflineReason.NONE
    restart(state, 1)  # it comes back, but no longer counts
    assert (row_of(state).primary, row_of(state).in_sync) == (N3, (N3,))


def test_force_primary_that_may_not_be_is_rejected() -> None:
    state = offline()
    fence(state, 2)
    assert rejected(force(state, 2)) is Reason.NOT_A_REPLICA  # fenced
    assert rejected(force(state, 4)) is Reason.NOT_A_REPLICA
    assert rejected(force(state, 3, skew=1)) is Reason.NOTHING_CURRENT
    command = ForcePrimary(partition_id=PartitionId(9), node_number=N3, partition_epoch=1)
    assert rejected(state.apply(command)) is Reason.UNKNOWN_PARTITION
    applied(force(state, 3))
    assert rejected(force(state, 3)) is Reason.NOT_OFFLINE


# --- node statuses -----------------------------------------------------------------------------


def test_set_node_status_draining_outlives_fence_and_restart() -> None:
    state = three()
    set_status(state, 2, NodeStatus.DRAINING)
    assert record_of(state, 2).info.status is NodeStatus.DRAINING
    assert record_of(state, 2).info.changed_at == state.table_version
    fence(state, 2)
    assert record_of(state, 2).info.status is NodeStatus.FENCED
    assert record_of(state, 2).draining
    restart(state, 2)
    assert record_of(state, 2).info.status is NodeStatus.DRAINING
    set_status(state, 2, NodeStatus.ACTIVE)
    restart(state, 2)
    assert record_of(state, 2).info.status is NodeStatus.ACTIVE


def test_set_node_status_of_a_fenced_node_does_not_unfence_it() -> None:
    state = three()
    fence(state, 2)
    version = state.table_version
    for status, draining in ((NodeStatus.DRAINING, True), (NodeStatus.ACTIVE, False)):
        set_status(state, 2, status)
        assert record_of(state, 2).info.status is NodeStatus.FENCED
        assert record_of(state, 2).draining is draining
        assert N2 not in [record.info.number for record in state.live_nodes]
    assert state.table_version == version


def test_set_node_status_left_is_refused_while_a_row_or_a_move_names_the_node() -> None:
    state = bootstrapped([(1,)], nodes=3)
    assert rejected(set_status(state, 1, NodeStatus.LEFT)) is Reason.NODE_IN_USE
    applied(queue(state, (2,)))
    assert rejected(set_status(state, 2, NodeStatus.LEFT)) is Reason.NODE_IN_USE
    applied(cancel(state))
    assert set_status(state, 2, NodeStatus.LEFT) == Applied()


def test_set_node_status_left_is_final() -> None:
    state = three()
    set_status(state, 4, NodeStatus.LEFT)
    assert set_status(state, 4, NodeStatus.LEFT) == Applied()
    for status in (NodeStatus.ACTIVE, NodeStatus.DRAINING):
        assert rejected(set_status(state, 4, status)) is Reason.NODE_LEFT
    assert N4 not in [record.info.number for record in state.live_nodes]
    command = register("n4", last=1, known=1, registration="r2")
    assert rejected(state.apply(command)) is Reason.NODE_LEFT
    assert rejected(fence(state, 4)) is Reason.ALREADY_FENCED


def test_set_node_status_that_is_no_status_to_set_is_rejected() -> None:
    state = three()
    assert rejected(set_status(state, 1, NodeStatus.FENCED)) is Reason.BAD_VALUE
    assert rejected(set_status(state, 9, NodeStatus.ACTIVE)) is Reason.UNKNOWN_NODE


def test_register_carries_the_weight() -> None:
    state = three()
    heavy = register("n4", last=1, known=1, registration="r2")
    state.apply(replace(heavy, weight=300))
    assert record_of(state, 4).info.weight == 300
    version = state.table_version
    state.apply(replace(heavy, weight=50, known_node_epoch=2))  # a copy, restarted with another
    assert (record_of(state, 4).info.weight, state.table_version) == (50, version + 1)


# --- settings ----------------------------------------------------------------------------------


def test_set_move_settings_are_in_the_table() -> None:
    state = three()
    settings = MoveSettings(paused=True, bytes_per_second=7, moves_per_node=2)
    version = state.table_version
    assert state.apply(SetMoveSettings(settings=settings)) == Applied()
    assert state.move_settings == settings
    table = state.table()
    assert table is not None
    assert (table.moves, table.table_version) == (settings, version + 1)
    state.apply(SetMoveSettings(settings=settings))
    assert state.table_version == version + 1


@pytest.mark.parametrize(
    "settings", [MoveSettings(moves_per_node=0), MoveSettings(bytes_per_second=-1)]
)
def test_set_move_settings_out_of_bounds_are_rejected(settings: MoveSettings) -> None:
    assert rejected(three().apply(SetMoveSettings(settings=settings))) is Reason.BAD_VALUE


def test_set_replication_factor_beyond_the_nodes_is_rejected() -> None:
    state = bootstrapped([(1,)], nodes=3)
    fence(state, 3)  # away, but not gone
    assert state.apply(SetReplicationFactor(replication_factor=3)) == Applied()
    set_status(state, 3, NodeStatus.LEFT)
    for factor in (0, 3):
        command = SetReplicationFactor(replication_factor=factor)
        assert rejected(state.apply(command)) is Reason.BAD_VALUE


def test_commands_before_the_cluster_exists_are_rejected() -> None:
    state = ClusterState()
    before = state.image()
    change = PartitionChange(partition_id=P0, primary_epoch=1, partition_epoch=1, in_sync=(N1,))
    for command, reason in (
        (AlterPartitions(node_number=N1, node_epoch=1, changes=(change,)), Reason.UNKNOWN_NODE),
        (plan_of(((1,), (2,))), Reason.UNKNOWN_PARTITION),
        (SetMoveSettings(settings=MoveSettings(paused=True)), Reason.NO_CLUSTER),
        (SetNodeStatus(node_number=N1, status=NodeStatus.LEFT), Reason.UNKNOWN_NODE),
        (
            ForcePrimary(partition_id=P0, node_number=N1, partition_epoch=1),
            Reason.UNKNOWN_PARTITION,
        ),
        (SetReplicationFactor(replication_factor=1), Reason.NO_CLUSTER),
    ):
        assert rejected(state.apply(command)) is reason
    assert wish(state, 1) == Applied(rejected=(P0,))
    assert state.image() == before
