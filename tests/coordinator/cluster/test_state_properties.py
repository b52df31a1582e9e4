"""Any sequence of commands, stale and repeated ones among them, keeps the state's invariants.

``copies.Copies`` has the invariants; here is what tries to break them.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from koinon_coordinator.core.cluster.commands import (
    AbortLoad,
    AcceptPlan,
    AlterPartitions,
    AssignPartitions,
    CancelMoves,
    Command,
    CommitLoad,
    ConfirmRegistration,
    CreateCluster,
    CreateGroup,
    DeleteGroup,
    FenceNode,
    FinishMoves,
    ForcePrimary,
    HostedPartition,
    Move,
    OpenLoad,
    PartitionChange,
    PartitionsHosted,
    PartitionsMerged,
    RaiseGeneration,
    SetMoveSettings,
    SetNodeStatus,
    SetReplicationFactor,
    StartMoves,
    WantPrimaries,
)
from koinon_coordinator.core.cluster.group_rules import Group
from koinon_coordinator.core.cluster.state import ClusterState
from koinon_coordinator.core.planning.initial_placement import place
from koinon_coordinator.wire.state_codec import (
    command_from_bytes,
    command_to_bytes,
    image_from_bytes,
    image_to_bytes,
)
from koinon_proto.contract.bulk_loads import LoadMode, StreamBatch
from koinon_proto.contract.groups import GroupStrategy
from koinon_proto.contract.table import (
    NO_NODE,
    MoveSettings,
    NodeNumber,
    NodeStatus,
    PartitionId,
    PartitionRow,
    Table,
    apply_update,
)
from tests.coordinator.kit.copies import Copies
from tests.coordinator.kit.states import next_step
from tests.coordinator.kit.support import cluster_config, hosted_of, register

NODES = ("n1", "n2", "n3", "n4")
PARTITIONS = 2
STICKY = GroupStrategy.STICKY
NO_GROUP = Group(group_id=1, name="none", strategy=STICKY)
KINDS = {
    # How often. "go" is what leader or primary would do next: it is what takes moves to their end.
    "go": 16,
    "register": 4,
    "repeat": 1,
    "lose": 1,
    "return": 1,
    "confirm": 1,
    "fence": 3,
    "host": 1,
    "assign": 1,
    "widen": 2,
    "shrink": 3,
    "hand_over": 2,
    "deliver": 3,
    "queue": 3,
    "start": 1,
    "finish": 1,
    "cancel": 2,
    "status": 1,
    "want": 1,
    "force": 1,
    "settings": 1,
    "factor": 1,
    "noise": 1,
    "open_load": 2,
    "commit_load": 1,
    "abort_load": 1,
    "merged": 1,
    "group": 1,
    "raise": 1,
    "no_group": 1,
}


@dataclass(frozen=True)
class Step:
    """An abstract step; ``concrete`` turns it into a command that fits the state, or nearly."""

    kind: str
    node: int
    partition: int
    skew: int
    variant: int
    late: bool


STEPS = st.lists(
    st.builds(
        Step,
        kind=st.sampled_from([kind for kind, weight in KINDS.items() for _ in range(weight)]),
        node=st.integers(0, len(NODES) - 1),
        partition=st.integers(0, PARTITIONS - 1),
        skew=st.sampled_from([0, 0, 0, -1, 1]),
        variant=st.integers(0, 5),
        late=st.sampled_from([False, False, True]),
    ),
    min_size=20,
    max_size=80,
)


def concrete(copies: Copies, step: Step) -> Command | None:
    """The step's command: of a node, of a partition, or of an operator."""
    if step.kind == "go":
        is_there = copies.state.row(step.partition) is not None
        return next_step(copies.state, step.partition) if is_there else None
    for make in (of_node, of_primary, of_move, of_operator, of_load, of_group):
        command = make(copies, step)
        if command is not None:
            return command
    return None


def of_node(copies: Copies, step: Step) -> Command | None:
    state, node_id = copies.state, NODES[step.node]
    record = state.node_by_id(node_id)
    epoch = record.info.node_epoch if record is not None else 0
    number = record.info.number if record is not None else NodeNumber(step.node + 1)
    store = record.info.store_id if record is not None else f"store-{node_id}"
    past = max(0, epoch + min(step.skew, 0))
    match step.kind:
        case "register":
            known, name = max(0, epoch + step.skew), f"r{epoch + 1}"
            return register(node_id, store=store, last=past, known=known, registration=name)
        case "repeat" if record is not None:
            return register(
                node_id,
                store=store,
                last=record.base_node_epoch,
                known=past,
                registration=record.registration_id,
                address=f"a{step.variant}:1",
            )
        case "lose":
            store, name = f"s{step.variant % 2}", f"l{epoch}-{step.variant}"
            return register(node_id, store=store, known=epoch, registration=name)
        case "return":
            stores = [(s, last) for (n, s), last in copies.epochs.items() if n == node_id]
            if stores:
                store, last = stores[step.variant % len(stores)]
                name = f"b{epoch}"
                return register(node_id, store=store, last=last, known=epoch, registration=name)
        case "confirm":
            return ConfirmRegistration(node_number=number, node_epoch=max(0, epoch + step.skew))
        case "fence":
            return FenceNode(node_number=number, node_epoch=past)
        case "host":
            hosted = hosted_of(state.assigned_to(number))[step.variant // 2 :]
            return PartitionsHosted(node_number=number, node_epoch=epoch, hosted=hosted)
        case "noise":
            noise = HostedPartition(
                partition_id=PartitionId(step.partition),
                primary_epoch=step.variant,
                partition_epoch=step.variant,
            )
            return PartitionsHosted(node_number=number, node_epoch=epoch, hosted=(noise,))
    return None


def of_primary(copies: Copies, step: Step) -> Command | None:
    row = copies.state.row(step.partition)
    if row is None or (primary := copies.state.node(row.primary)) is None:
        return None
    others = [n for n in row.replicas if n != row.primary]
    other = others[step.variant % len(others)] if others else row.primary
    in_sync, to = row.in_sync, NO_NODE
    match step.kind:
        case "widen":
            in_sync = tuple(dict.fromkeys((*row.in_sync, other)))
        case "shrink":
            in_sync = tuple(n for n in row.in_sync if n != other)
        case "hand_over":
            to = row.wanted_primary or other
            if step.late:
                in_sync = tuple(n for n in row.in_sync if n != row.primary)
        case _:
            return None
    change = PartitionChange(
        partition_id=row.partition_id,
        primary_epoch=row.primary_epoch,
        partition_epoch=row.partition_epoch + step.skew,
        in_sync=in_sync,
        hand_over_to=to,
    )
    epoch = primary.info.node_epoch
    return AlterPartitions(node_number=row.primary, node_epoch=epoch, changes=(change,))


def of_move(copies: Copies, step: Step) -> Command | None:
    state = copies.state
    row = state.row(step.partition)
    named = tuple(PartitionId((step.partition + i) % (PARTITIONS + 1)) for i in range(2))
    match step.kind:
        case "queue" if row is not None:
            return AcceptPlan(plan_id="plan", moves=(move_of(state, row, step),))
        case "start":
            return StartMoves(partition_ids=named)
        case "finish":
            return FinishMoves(partition_ids=named)
        case "cancel":
            return CancelMoves(partition_ids=named)
    return None


def move_of(state: ClusterState, row: PartitionRow, step: Step) -> Move:
    """A way to other replicas: as many as now or as planning aims at, in an order of its own."""
    known = [record.info.number for record in state.nodes]
    shift = step.variant + step.node
    order = [known[(shift + i) % len(known)] for i in range(len(known))]
    assert state.config is not None
    size = state.config.replication_factor if step.late else len(row.replicas)
    target = tuple(order[: max(1, size + min(step.skew, 0))])
    return Move(
        partition_id=row.partition_id,
        origin=row.replicas,
        target=target,
        reason="any",
        plan_id="plan",
        plan_moves=1,
        running=step.late,
    )


def of_operator(copies: Copies, step: Step) -> Command | None:
    state, number = copies.state, NodeNumber(step.node + 1)
    row = state.row(step.partition)
    match step.kind:
        case "assign" if (config := state.config) is not None:
            live = {r.info.number: r.info.rack for r in state.live_nodes}
            factor = config.replication_factor
            if len(live) >= factor:
                rows = place(live, partition_count=PARTITIONS, replication_factor=factor)
                return AssignPartitions(replicas=rows)
        case "status":
            status = list(NodeStatus)[step.variant % len(NodeStatus)]
            return SetNodeStatus(node_number=number, status=status)
        case "want":
            wish = NO_NODE if step.late else number
            return WantPrimaries(wishes=((PartitionId(step.partition + max(step.skew, 0)), wish),))
        case "force" if row is not None:
            epoch = row.partition_epoch + step.skew
            return ForcePrimary(
                partition_id=row.partition_id, node_number=number, partition_epoch=epoch
            )
        case "settings":
            settings = MoveSettings(paused=step.late, moves_per_node=step.variant)
            return SetMoveSettings(settings=settings)
        case "factor":
            return SetReplicationFactor(replication_factor=step.variant)
    return None


def of_load(copies: Copies, step: Step) -> Command | None:
    """Return the step's command on a load that is known, or on one that is not."""
    known = [load.load_id for load in copies.state.loads]
    load_id = known[step.variant % len(known)] if known else 1
    match step.kind:
        case "open_load":
            batch = StreamBatch("q", step.variant) if step.late else None
            mode = list(LoadMode)[step.partition]
            return OpenLoad(job_id=f"j{step.node}-{step.variant}", mode=mode, stream_batch=batch)
        case "commit_load":
            ids = tuple(PartitionId(p) for p in range(step.partition + step.skew))
            attempts = tuple(range(1, step.node + 1))
            return CommitLoad(load_id=load_id, attempts=attempts, partition_ids=ids)
        case "abort_load":
            return AbortLoad(load_id=load_id, reason="any")
        case "merged":
            ids = (PartitionId(max(0, step.partition + step.skew)),)
            return PartitionsMerged(load_id=load_id, partition_ids=ids)
    return None


def of_group(copies: Copies, step: Step) -> Command | None:
    """Return the step's command on a group that is known, or on one that is not."""
    known = copies.state.groups.image()
    group = known[step.variant % len(known)] if known else NO_GROUP
    match step.kind:
        case "group":
            return CreateGroup(name=f"g{step.node}", strategy=STICKY, created_at_ms=step.variant)
        case "raise":
            generation = max(0, group.generation + step.skew)
            return RaiseGeneration(group_id=group.group_id, generation=generation, session_ms=9)
        case "no_group":
            return DeleteGroup(group_id=group.group_id)
    return None


@settings(max_examples=250, deadline=None)
@given(STEPS, st.integers(1, 3), st.booleans())
def test_state_any_commands_keep_the_invariants(
    steps: list[Step], replicas: int, assigned_early: bool
) -> None:
    copies, twin = Copies(ClusterState()), Twin()
    config = cluster_config(partitions=PARTITIONS, replicas=replicas)
    twin.follow(copies, CreateCluster(config=config))
    if assigned_early:
        for node_id in NODES:
            twin.follow(copies, register(node_id, registration="r1"))
        steps = [Step("assign", 0, 0, 0, 0, False), *steps]
    for i, step in enumerate(steps):
        command = concrete(copies, step)
        if step.kind == "deliver" and copies.proposed:
            twin.follow(copies, None)
        elif isinstance(command, AlterPartitions) and step.late:
            copies.propose(command)
        elif command is not None:
            twin.follow(copies, command)
        if i % 3 == 0:  # the holder of a table misses some versions
            twin.read(copies.state)
        if i % 7 == 0:
            twin.restart()
    twin.read(copies.state)
    assert twin.table == copies.state.table()


class Twin:
    """Another member, which hears of the commands by the log and of some states by a snapshot, and
    a client that reads the table now and then.
    """

    def __init__(self) -> None:
        self.state = ClusterState()
        self.table: Table | None = None

    def follow(self, copies: Copies, command: Command | None) -> None:
        """Both apply the command, or (None) the oldest proposal that is under way."""
        if command is None:
            command = copies.proposed[0][0]
            result = copies.deliver()
        else:
            result = copies.apply(command)
        decoded = command_from_bytes(command_to_bytes(command))
        assert self.state.apply(decoded, copies.index) == result
        assert self.state.image() == copies.state.image()

    def restart(self) -> None:
        before = self.state.image()
        self.state = ClusterState(image_from_bytes(image_to_bytes(before)))
        assert self.state.image() == before

    def read(self, state: ClusterState) -> None:
        table, held = state.table(), self.table
        assert table is not None
        self.table = apply_update(held, table.since(held.table_version if held is not None else 0))
        assert self.table is not None
        assert self.table.rows == table.rows
        assert dict(self.table.nodes) == dict(table.nodes)
        assert self.table.moves == table.moves
        assert self.table.loads == table.loads
