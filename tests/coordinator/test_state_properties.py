"""Any sequence of commands, stale and repeated ones among them, keeps the state's invariants."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from koinon_coordinator.convert import (
    command_from_bytes,
    command_to_bytes,
    image_from_bytes,
    image_to_bytes,
)
from koinon_coordinator.core.commands import (
    AssignPartitions,
    Command,
    ConfirmRegistration,
    CreateCluster,
    FenceNode,
    HostedPartition,
    PartitionsHosted,
    Rejected,
)
from koinon_coordinator.core.placement import place
from koinon_coordinator.core.state import ClusterState, StateImage
from koinon_proto.table import (
    NO_NODE,
    NodeNumber,
    OfflineReason,
    PartitionId,
    PartitionStatus,
    Table,
    apply_update,
)

from .support import cluster_config, hosted_of, register

NODES = ("n1", "n2", "n3", "n4")
PARTITIONS = 6


@st.composite
def command_choices(draw: st.DrawFn) -> list[tuple[str, int, int, int]]:
    """Abstract steps; ``concrete`` turns one into a command that fits the state, or nearly."""
    kinds = st.sampled_from(
        ["register", "register", "repeat", "lose", "confirm", "fence", "host", "assign", "noise"]
    )
    step = st.tuples(kinds, st.integers(0, 3), st.integers(-1, 1), st.integers(0, 2))
    return draw(st.lists(step, max_size=60))


def concrete(state: ClusterState, step: tuple[str, int, int, int], replicas: int) -> Command:
    kind, which, skew, variant = step
    node_id = NODES[which]
    record = state.node_by_id(node_id)
    epoch = record.info.node_epoch if record is not None else 0
    number = record.info.number if record is not None else NodeNumber(which + 1)
    store = record.info.store_id if record is not None else f"store-{node_id}"
    last = max(0, epoch + min(skew, 0))
    if kind == "register":
        name = f"r{epoch + 1}"
        return register(
            node_id, store=store, last=last, known=max(0, epoch + skew), registration=name
        )
    if kind == "repeat" and record is not None:
        return register(
            node_id,
            store=store,
            last=record.base_node_epoch,
            known=last,
            registration=record.registration_id,
            address=f"a{variant}:1",
        )
    if kind == "lose":
        return register(
            node_id, store=f"s{variant}", known=epoch, registration=f"l{epoch}-{variant}"
        )
    if kind == "confirm":
        return ConfirmRegistration(node_number=number, node_epoch=max(0, epoch + skew))
    if kind == "fence":
        return FenceNode(node_number=number, node_epoch=last)
    if kind == "assign":
        live = {r.info.number: r.info.rack for r in state.live_nodes}
        if len(live) >= replicas:
            rows = place(live, partition_count=PARTITIONS, replication_factor=replicas)
            return AssignPartitions(replicas=rows)
    if kind == "host":
        hosted = hosted_of(state.assigned_to(number))[variant:]
        return PartitionsHosted(node_number=number, node_epoch=epoch, hosted=hosted)
    noise = HostedPartition(
        partition_id=PartitionId(which), primary_epoch=variant, partition_epoch=variant
    )
    return PartitionsHosted(node_number=number, node_epoch=max(0, epoch + skew), hosted=(noise,))


def check_invariants(image: StateImage) -> None:
    numbers = {record.info.number: record for record in image.nodes}
    for record in image.nodes:
        assert record.info.changed_at <= image.table_version
        assert record.info.number <= image.last_node_number
    for p, row in enumerate(image.rows):
        assert row.partition_id == p
        assert set(row.in_sync) <= set(row.replicas)
        assert row.changed_at <= image.table_version
        if row.primary == NO_NODE:
            assert row.status is PartitionStatus.OFFLINE
            live = [n for n in row.in_sync if numbers[n].live]
            assert not live, "a live in-sync replica must be elected"
            lost = row.offline_reason is OfflineReason.STORE_LOST
            assert lost == (not row.in_sync)
        else:
            assert row.primary in row.in_sync
            assert numbers[row.primary].live
            assert row.status is not PartitionStatus.OFFLINE
            assert row.offline_reason is OfflineReason.NONE


def check_step(before: StateImage, after: StateImage, result: object) -> None:
    """Epochs only grow, and grow when they must; the version counts changes of the table."""
    assert after.table_version - before.table_version in (0, 1)
    changed = (before.config, before.rows, [r.info for r in before.nodes]) != (
        after.config,
        after.rows,
        [r.info for r in after.nodes],
    )
    assert changed == (after.table_version != before.table_version)
    if isinstance(result, Rejected):
        assert not changed
    for old, new in zip(before.nodes, after.nodes, strict=False):
        assert new.info.number == old.info.number
        assert new.info.node_epoch >= old.info.node_epoch
        assert (new.info.changed_at == after.table_version) or new.info == old.info
    for was, row in zip(before.rows, after.rows, strict=False):
        if row == was:
            continue
        assert row.changed_at == after.table_version
        assert row.partition_epoch == was.partition_epoch + 1
        assert row.primary_epoch - was.primary_epoch in (0, 1)
        if row.primary != was.primary:
            assert row.primary_epoch == was.primary_epoch + 1
        newly_in_sync = set(row.in_sync) - set(was.in_sync)
        assert not newly_in_sync  # nothing widens it yet


@settings(max_examples=250, deadline=None)
@given(command_choices(), st.integers(1, 3), st.booleans())
def test_state_any_commands_keep_the_invariants(
    steps: list[tuple[str, int, int, int]], replicas: int, assigned_early: bool
) -> None:
    state, twin = ClusterState(), ClusterState()
    held: Table | None = None
    commands: list[Command] = [
        CreateCluster(config=cluster_config(partitions=PARTITIONS, replicas=replicas))
    ]
    if assigned_early:
        commands += [register(node_id, registration="r1") for node_id in NODES[:3]]
    for command in commands:
        state.apply(command)
        twin.apply(command)
    todo = [("assign", 0, 0, 0), *steps] if assigned_early else steps
    for i, step in enumerate(todo):
        command = concrete(state, step, replicas)
        before = state.image()
        result = state.apply(command)
        after = state.image()
        assert twin.apply(command_from_bytes(command_to_bytes(command))) == result
        assert twin.image() == after
        check_step(before, after, result)
        check_invariants(after)
        if i % 3 == 0:  # the holder of a table misses some versions
            held = follow(held, state)
        if i % 7 == 0:
            twin = ClusterState(image_from_bytes(image_to_bytes(after)))
            assert twin.image() == after
    assert follow(held, state) == state.table()


def follow(held: Table | None, state: ClusterState) -> Table:
    table = state.table()
    assert table is not None
    updated = apply_update(held, table.since(held.table_version if held is not None else 0))
    assert updated is not None
    assert updated.rows == table.rows
    assert dict(updated.nodes) == dict(table.nodes)
    return table if updated == table else updated
