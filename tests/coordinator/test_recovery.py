"""What a recovered group begins with."""

from __future__ import annotations

from dataclasses import replace

from koinon_coordinator.core.commands import FenceNode
from koinon_coordinator.core.recovery import copies_at_risk, image_of, newest, recovered
from koinon_coordinator.core.state import ClusterState
from koinon_proto.table import NO_NODE, NodeNumber, NodeStatus, PartitionStatus
from tests.coordinator.support import bootstrapped, register

REPLICAS: list[tuple[int, ...]] = [(1, 2), (2, 3), (3, 1), (1, 3)]


def three_nodes() -> ClusterState:
    return bootstrapped(REPLICAS)


def test_recovered_state_fences_everyone_and_jumps_ahead() -> None:
    state = three_nodes()
    before = state.image()
    after = recovered(before)
    assert after.table_version > before.table_version + 1000
    assert {r.info.status for r in after.nodes} == {NodeStatus.FENCED}
    for old, new in zip(before.rows, after.rows, strict=True):
        assert new.primary == NO_NODE
        assert new.status is PartitionStatus.OFFLINE
        assert new.primary_epoch > old.primary_epoch
        assert new.in_sync == old.in_sync


def test_known_store_registers_in_recovered_state_and_leads_again() -> None:
    state = ClusterState(recovered(three_nodes().image()))
    for record in state.nodes:
        info = record.info
        command = register(
            info.node_id,
            store=info.store_id,
            last=info.node_epoch,
            registration="r2",
            known=info.node_epoch,
        )
        assert state.apply(command).copies_lost == 0  # type: ignore[union-attr]
    for row in state.image().rows:
        assert row.primary in row.in_sync
        assert row.status is PartitionStatus.ASSIGNED


def test_newest_of_a_table_and_an_older_member_wins() -> None:
    state = three_nodes()
    older = state.image()
    state.apply(FenceNode(node_number=NodeNumber(1), node_epoch=1))
    table = state.table()
    assert table is not None
    assert newest([older, image_of(table)]).table_version == table.table_version


def test_move_that_only_a_row_tells_of_goes_on() -> None:
    image = three_nodes().image()
    row = image.rows[0]
    other = next(r.info.number for r in image.nodes if r.info.number not in row.replicas)
    moving = replace(
        row, replicas=(other, *row.replicas), adding=(other,), removing=row.replicas[:1]
    )
    after = recovered(replace(image, rows=(moving, *image.rows[1:]), moves=()))
    (move,) = after.moves
    assert move.running
    assert (move.origin, move.target) == (moving.settled, moving.target)


def test_rows_without_a_reached_copy_are_named() -> None:
    image = three_nodes().image()
    reached = [r.info.number for r in image.nodes][:2]
    missing = {row.partition_id for row in copies_at_risk(image, reached)}
    assert missing == {
        row.partition_id for row in image.rows if not set(row.in_sync) & set(reached)
    }
