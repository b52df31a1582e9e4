"""Tests of the state that a recovered group of coordinators begins with."""

from __future__ import annotations

from dataclasses import replace

from koinon_coordinator.core.cluster.commands import FenceNode, LoadOutcome, RevokeCertificate
from koinon_coordinator.core.cluster.recovery import (
    LoadsFound,
    copies_at_risk,
    image_of,
    loads_found,
    newest,
    recovered,
)
from koinon_coordinator.core.cluster.state import ClusterState
from koinon_proto.contract.access import NO_ACCESS_STATE
from koinon_proto.contract.bulk_loads import LoadState
from koinon_proto.contract.table import NO_NODE, NodeNumber, NodeStatus, PartitionStatus
from tests.coordinator.kit.load_states import (
    ABORTED,
    DONE,
    MERGING,
    OPEN,
    Log,
    commit_load,
    merged,
    open_load,
    outcome,
)
from tests.coordinator.kit.support import bootstrapped, register, registered

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


def test_access_is_kept_and_newer_than_all_that_the_old_group_gave_out() -> None:
    state = three_nodes()
    state.apply(RevokeCertificate(serial="1f"))
    once = recovered(state.image())
    assert once.access.revoked_serials == ("1f",)
    assert once.access.version > state.access.version + 1000
    lost = recovered(replace(once, access=NO_ACCESS_STATE))  # and once more, of tables only
    assert lost.access.version > once.access.version + 1000


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


def test_registration_under_way_is_no_lost_store_in_recovered_state() -> None:
    """The answer that gave n1 its second epoch was lost: its store still says the first."""
    before = three_nodes()
    command = register("n1", last=1, registration="r2", known=1)
    before.apply(command)
    state = ClusterState(recovered(before.image()))
    again = registered(state.apply(replace(command, known_node_epoch=2)))
    assert (again.node_epoch, again.copies_lost, again.stranded) == (3, 0, 0)


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


# --- bulk loads ---------------------------------------------------------------------------------


def with_loads() -> Log:
    """An open load, one that is being merged, and one of a streaming query that is done."""
    log = Log()
    for state in (OPEN, MERGING, DONE):
        log.in_state(state, job_id=state.name, batch=5 if state is DONE else None)
    return log


def active(found: LoadsFound) -> list[tuple[int, LoadState]]:
    return [(load.load_id, load.state) for load in found.image.active]


def test_loads_that_the_newest_state_knows_go_on_whole() -> None:
    log = with_loads()
    older = log.table()
    log.open("one more")
    image = log.state.image()
    for table in (None, older, log.table()):
        found = loads_found(image, table)
        assert found.image == image.loads
        assert (found.merging, found.open, found.is_whole) == ((), (), True)


def test_loads_that_only_a_table_names_are_given_up_and_told() -> None:
    log = with_loads()
    (opened, merging) = log.table().loads
    found = loads_found(None, log.table())
    assert active(found) == []
    assert (found.merging, found.open) == ((merging.load_id,), (opened.load_id,))
    assert not found.is_whole


def test_loads_that_an_older_member_saw_in_the_same_state_go_on() -> None:
    log = with_loads()
    survivor = log.state.image()
    log.open("later")
    found = loads_found(survivor, log.table())
    assert active(found) == [(load.load_id, load.state) for load in survivor.loads.active]
    assert (found.merging, found.open) == ((), (log.index,))
    assert found.image.batches == survivor.loads.batches


def test_load_that_was_committed_after_the_member_fell_behind_ends_with_a_reason() -> None:
    log = with_loads()
    survivor = log.state.image()
    opened = survivor.loads.active[0].load_id
    log.apply(commit_load(opened))
    found = loads_found(survivor, log.table())
    assert found.merging == (opened,)
    ended = found.image.ended[-1]
    assert (ended.load_id, ended.state) == (opened, ABORTED)
    assert "run its job again" in ended.reason


def test_load_that_ended_after_the_member_fell_behind_does_not_go_on() -> None:
    log = with_loads()
    survivor = log.state.image()
    merging = survivor.loads.active[1].load_id
    log.apply(merged(merging, 0, 2))
    found = loads_found(survivor, log.table())
    assert merging not in [load_id for load_id, _ in active(found)]
    assert found.merging == ()


def test_ids_of_a_recovered_group_are_above_all_that_were_ever_given() -> None:
    image = with_loads().state.image()
    newest_id = 0
    for index in (1, 900_000_000_000):  # the second group has written a long log
        state = ClusterState(recovered(replace(image, loads=replace(image.loads, active=()))))
        opened = state.apply(open_load(f"job {index}"), 1)
        assert isinstance(opened, LoadOutcome)
        assert opened.load_id > newest_id
        last = state.apply(open_load(f"last {index}"), index + 1)
        assert isinstance(last, LoadOutcome)
        newest_id = last.load_id
        table = state.table()
        assert table is not None
        image = image_of(table)  # the next one knows no more than a table


def test_load_that_goes_on_in_a_recovered_group_can_be_committed() -> None:
    image = with_loads().state.image()
    state = ClusterState(recovered(image))
    load_id = image.loads.active[0].load_id
    assert state.apply(commit_load(load_id), 2) == outcome(load_id, MERGING)
