"""Between commands or snapshots and their bytes in the log. The only place for both, but for what
``loads_convert`` does for bulk loads.

Every command and snapshot carries a format version; another one, or a command of a kind that this
build does not know, raises UnsupportedVersionError: the member stops rather than guess.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, cast

from google.protobuf.message import DecodeError

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
    FenceNode,
    FinishMoves,
    ForcePrimary,
    HostedPartition,
    Move,
    OpenLoad,
    PartitionChange,
    PartitionsHosted,
    PartitionsMerged,
    RegisterNode,
    SetMoveSettings,
    SetNodeStatus,
    SetReplicationFactor,
    StartMoves,
    WantPrimaries,
)
from koinon_coordinator.core.cluster.state import NodeRecord, StateImage, StoreLife, Stranded
from koinon_coordinator.wire import loads_convert
from koinon_proto.contract import convert
from koinon_proto.contract.errors import DataDirectoryError, UnsupportedVersionError
from koinon_proto.contract.table import (
    DEFAULT_WEIGHT,
    MoveSettings,
    NodeId,
    NodeNumber,
    NodeStatus,
    PartitionId,
    PartitionRow,
    registration_digest,
)
from koinon_proto.v1 import membership_pb2, state_pb2

COMMAND_FORMAT_VERSION = 1
SNAPSHOT_FORMAT_VERSION = 1

# --- commands ----------------------------------------------------------------------------------


def command_to_bytes(command: Command) -> bytes:
    """Return the command as the log holds it."""
    kind, encode, _ = _CODECS[type(command)]
    message = state_pb2.Command(format_version=COMMAND_FORMAT_VERSION)
    body = getattr(message, kind)
    body.SetInParent()
    body.CopyFrom(encode(command))
    return message.SerializeToString(deterministic=True)


def command_from_bytes(encoded: bytes) -> Command:
    """Return the command.

    Raises:
        UnsupportedVersionError: another format version, or a kind unknown here.
        DataDirectoryError: bytes that are no command at all.
    """
    message = state_pb2.Command()
    _parse(message, encoded, "a log entry")
    if message.format_version != COMMAND_FORMAT_VERSION:
        raise UnsupportedVersionError(
            what="coordinator command",
            version=message.format_version,
            supported=COMMAND_FORMAT_VERSION,
        )
    kind = message.WhichOneof("kind")
    if kind is None:
        raise UnsupportedVersionError(
            what="coordinator command of an unknown kind",
            version=message.format_version,
            supported=COMMAND_FORMAT_VERSION,
        )
    return _DECODERS[kind](getattr(message, kind))


def _register_to_proto(command: RegisterNode) -> state_pb2.RegisterNodeCommand:
    return state_pb2.RegisterNodeCommand(
        node_id=command.node_id,
        address=command.address,
        rack=command.rack,
        store_id=command.store_id,
        last_node_epoch=command.last_node_epoch,
        registration_id=command.registration_id,
        known_node_epoch=command.known_node_epoch,
        weight=command.weight,
        base_epoch_counts=command.base_epoch_counts,
    )


def _register_from_proto(body: state_pb2.RegisterNodeCommand) -> RegisterNode:
    return RegisterNode(
        node_id=NodeId(body.node_id),
        address=body.address,
        rack=body.rack,
        store_id=body.store_id,
        last_node_epoch=body.last_node_epoch,
        registration_id=body.registration_id,
        known_node_epoch=body.known_node_epoch,
        weight=body.weight or DEFAULT_WEIGHT,
        base_epoch_counts=body.base_epoch_counts,
    )


def _assign_to_proto(command: AssignPartitions) -> state_pb2.AssignPartitionsCommand:
    replicas = state_pb2.AssignPartitionsCommand.Replicas
    return state_pb2.AssignPartitionsCommand(
        rows=[replicas(node_numbers=row) for row in command.replicas]
    )


def _assign_from_proto(body: state_pb2.AssignPartitionsCommand) -> AssignPartitions:
    return AssignPartitions(
        replicas=tuple(tuple(NodeNumber(n) for n in row.node_numbers) for row in body.rows)
    )


def _hosted_to_proto(command: PartitionsHosted) -> state_pb2.PartitionsHostedCommand:
    return state_pb2.PartitionsHostedCommand(
        node_number=command.node_number,
        node_epoch=command.node_epoch,
        partition_ids=[h.partition_id for h in command.hosted],
        primary_epochs=[h.primary_epoch for h in command.hosted],
        partition_epochs=[h.partition_epoch for h in command.hosted],
    )


def _hosted_from_proto(body: state_pb2.PartitionsHostedCommand) -> PartitionsHosted:
    columns = zip(body.partition_ids, body.primary_epochs, body.partition_epochs, strict=True)
    return PartitionsHosted(
        node_number=NodeNumber(body.node_number),
        node_epoch=body.node_epoch,
        hosted=tuple(
            HostedPartition(
                partition_id=PartitionId(partition), primary_epoch=primary, partition_epoch=epoch
            )
            for partition, primary, epoch in columns
        ),
    )


def _alter_to_proto(command: AlterPartitions) -> state_pb2.AlterPartitionsCommand:
    change = state_pb2.AlterPartitionsCommand.Change
    return state_pb2.AlterPartitionsCommand(
        node_number=command.node_number,
        node_epoch=command.node_epoch,
        changes=[
            change(
                partition_id=c.partition_id,
                primary_epoch=c.primary_epoch,
                partition_epoch=c.partition_epoch,
                in_sync=c.in_sync,
                hand_over_to=c.hand_over_to,
            )
            for c in command.changes
        ],
    )


def _alter_from_proto(body: state_pb2.AlterPartitionsCommand) -> AlterPartitions:
    return AlterPartitions(
        node_number=NodeNumber(body.node_number),
        node_epoch=body.node_epoch,
        changes=tuple(change_from_proto(c) for c in body.changes),
    )


def change_from_proto(
    message: state_pb2.AlterPartitionsCommand.Change | membership_pb2.PartitionChange,
) -> PartitionChange:
    """Return a primary's proposal; it has the same fields on the wire and in the log."""
    return PartitionChange(
        partition_id=PartitionId(message.partition_id),
        primary_epoch=message.primary_epoch,
        partition_epoch=message.partition_epoch,
        in_sync=_numbers(message.in_sync),
        hand_over_to=NodeNumber(message.hand_over_to),
    )


def _move_to_proto(move: Move) -> state_pb2.Move:
    return state_pb2.Move(
        partition_id=move.partition_id,
        origin=move.origin,
        target=move.target,
        reason=move.reason,
        plan_id=move.plan_id,
        running=move.running,
        cancelled=move.cancelled,
        plan_moves=move.plan_moves,
    )


def _move_from_proto(message: state_pb2.Move) -> Move:
    return Move(
        partition_id=PartitionId(message.partition_id),
        origin=_numbers(message.origin),
        target=_numbers(message.target),
        reason=message.reason,
        plan_id=message.plan_id,
        running=message.running,
        cancelled=message.cancelled,
        plan_moves=message.plan_moves,
    )


def _want_to_proto(command: WantPrimaries) -> state_pb2.WantPrimariesCommand:
    wish = state_pb2.WantPrimariesCommand.Wish
    return state_pb2.WantPrimariesCommand(
        wishes=[wish(partition_id=p, node_number=node) for p, node in command.wishes]
    )


def _want_from_proto(body: state_pb2.WantPrimariesCommand) -> WantPrimaries:
    return WantPrimaries(
        wishes=tuple((PartitionId(w.partition_id), NodeNumber(w.node_number)) for w in body.wishes)
    )


def _force_to_proto(command: ForcePrimary) -> state_pb2.ForcePrimaryCommand:
    return state_pb2.ForcePrimaryCommand(
        partition_id=command.partition_id,
        node_number=command.node_number,
        partition_epoch=command.partition_epoch,
    )


def _force_from_proto(body: state_pb2.ForcePrimaryCommand) -> ForcePrimary:
    return ForcePrimary(
        partition_id=PartitionId(body.partition_id),
        node_number=NodeNumber(body.node_number),
        partition_epoch=body.partition_epoch,
    )


def _status_to_proto(command: SetNodeStatus) -> state_pb2.SetNodeStatusCommand:
    return state_pb2.SetNodeStatusCommand(
        node_number=command.node_number, status=cast(Any, int(command.status))
    )


def _numbers(numbers: Iterable[int]) -> tuple[NodeNumber, ...]:
    return tuple(NodeNumber(n) for n in numbers)


def _partitions_codec(
    message: Any, command: Any
) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """For commands that consist of partitions."""
    return (
        lambda c: message(partition_ids=c.partition_ids),
        lambda m: command(partition_ids=tuple(PartitionId(p) for p in m.partition_ids)),
    )


def _epoch_codec(message: Any, command: Any) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """For commands that consist of a node's number and epoch."""
    return (
        lambda c: message(node_number=c.node_number, node_epoch=c.node_epoch),
        lambda m: command(node_number=NodeNumber(m.node_number), node_epoch=m.node_epoch),
    )


_CODECS: dict[type[Any], tuple[str, Callable[[Any], Any], Callable[[Any], Command]]] = {
    CreateCluster: (
        "create_cluster",
        lambda c: state_pb2.CreateClusterCommand(config=convert.config_to_proto(c.config)),
        lambda m: CreateCluster(config=convert.config_from_proto(m.config)),
    ),
    RegisterNode: ("register_node", _register_to_proto, _register_from_proto),
    ConfirmRegistration: (
        "confirm_registration",
        *_epoch_codec(state_pb2.ConfirmRegistrationCommand, ConfirmRegistration),
    ),
    AssignPartitions: ("assign_partitions", _assign_to_proto, _assign_from_proto),
    FenceNode: ("fence_node", *_epoch_codec(state_pb2.FenceNodeCommand, FenceNode)),
    PartitionsHosted: ("partitions_hosted", _hosted_to_proto, _hosted_from_proto),
    AlterPartitions: ("alter_partitions", _alter_to_proto, _alter_from_proto),
    AcceptPlan: (
        "accept_plan",
        lambda c: state_pb2.AcceptPlanCommand(
            plan_id=c.plan_id, moves=[_move_to_proto(move) for move in c.moves]
        ),
        lambda m: AcceptPlan(
            plan_id=m.plan_id, moves=tuple(_move_from_proto(move) for move in m.moves)
        ),
    ),
    StartMoves: ("start_moves", *_partitions_codec(state_pb2.StartMovesCommand, StartMoves)),
    FinishMoves: ("finish_moves", *_partitions_codec(state_pb2.FinishMovesCommand, FinishMoves)),
    CancelMoves: ("cancel_moves", *_partitions_codec(state_pb2.CancelMovesCommand, CancelMoves)),
    SetMoveSettings: (
        "set_move_settings",
        lambda c: state_pb2.SetMoveSettingsCommand(settings=convert.settings_to_proto(c.settings)),
        lambda m: SetMoveSettings(settings=convert.settings_from_proto(m.settings)),
    ),
    SetNodeStatus: (
        "set_node_status",
        _status_to_proto,
        lambda m: SetNodeStatus(node_number=NodeNumber(m.node_number), status=NodeStatus(m.status)),
    ),
    WantPrimaries: ("want_primaries", _want_to_proto, _want_from_proto),
    ForcePrimary: ("force_primary", _force_to_proto, _force_from_proto),
    SetReplicationFactor: (
        "set_replication_factor",
        lambda c: state_pb2.SetReplicationFactorCommand(replication_factor=c.replication_factor),
        lambda m: SetReplicationFactor(replication_factor=m.replication_factor),
    ),
    OpenLoad: ("open_load", loads_convert.open_to_proto, loads_convert.open_from_proto),
    CommitLoad: ("commit_load", loads_convert.commit_to_proto, loads_convert.commit_from_proto),
    AbortLoad: (
        "abort_load",
        lambda c: state_pb2.AbortLoadCommand(load_id=c.load_id, reason=c.reason),
        lambda m: AbortLoad(load_id=m.load_id, reason=m.reason),
    ),
    PartitionsMerged: (
        "partitions_merged",
        lambda c: state_pb2.PartitionsMergedCommand(
            load_id=c.load_id, partition_ids=c.partition_ids
        ),
        lambda m: PartitionsMerged(
            load_id=m.load_id, partition_ids=tuple(PartitionId(p) for p in m.partition_ids)
        ),
    ),
}
_DECODERS = {kind: decode for kind, _, decode in _CODECS.values()}

# --- snapshots ---------------------------------------------------------------------------------


def image_to_bytes(image: StateImage) -> bytes:
    """Return the snapshot's bytes: the same for equal images on every member."""
    message = state_pb2.StateSnapshot(
        format_version=SNAPSHOT_FORMAT_VERSION,
        table_version=image.table_version,
        last_node_number=image.last_node_number,
        nodes=[_record_to_proto(record) for record in image.nodes],
        rows=[convert.row_to_proto(row) for row in image.rows],
        moves=[_move_to_proto(move) for move in image.moves],
        move_settings=convert.settings_to_proto(image.move_settings),
        stranded=[_stranded_to_proto(entry) for entry in image.stranded],
    )
    loads_convert.image_to_proto(image.loads, message)
    if image.config is not None:
        message.cluster.CopyFrom(convert.config_to_proto(image.config))
    return message.SerializeToString(deterministic=True)


def image_from_bytes(encoded: bytes) -> StateImage:
    """Return the image.

    Raises:
        UnsupportedVersionError: the snapshot has another format version.
        DataDirectoryError: bytes that are no snapshot at all.
    """
    message = state_pb2.StateSnapshot()
    _parse(message, encoded, "a snapshot")
    if message.format_version != SNAPSHOT_FORMAT_VERSION:
        raise UnsupportedVersionError(
            what="coordinator snapshot",
            version=message.format_version,
            supported=SNAPSHOT_FORMAT_VERSION,
        )
    config = convert.config_from_proto(message.cluster) if message.HasField("cluster") else None
    rows = tuple(convert.row_from_proto(row) for row in message.rows)
    has_settings = message.HasField("move_settings")
    return StateImage(
        config=config,
        table_version=message.table_version,
        last_node_number=message.last_node_number,
        nodes=tuple(_record_from_proto(record) for record in message.nodes),
        rows=rows,
        moves=tuple(_move_from_proto(move) for move in message.moves),
        move_settings=convert.settings_from_proto(message.move_settings)
        if has_settings
        else MoveSettings(),
        stranded=tuple(_stranded_from_proto(entry) for entry in message.stranded)
        if has_settings
        else _stranded_of_one_replica(message.nodes, rows),
        loads=loads_convert.image_from_proto(message),
    )


def _record_to_proto(record: NodeRecord) -> state_pb2.NodeRecord:
    return state_pb2.NodeRecord(
        info=convert.node_to_proto(
            replace(record.info, registration_digest=b"")
        ),  # of what follows
        registration_id=record.registration_id,
        base_node_epoch=record.base_node_epoch,
        confirmed=record.confirmed,
        draining=record.draining,
    )


def _record_from_proto(message: state_pb2.NodeRecord) -> NodeRecord:
    info = convert.node_from_proto(message.info)
    digest = registration_digest(message.registration_id)
    return NodeRecord(
        info=replace(info, registration_digest=digest),
        registration_id=message.registration_id,
        base_node_epoch=message.base_node_epoch,
        confirmed=message.confirmed,
        draining=message.draining,
    )


def _stranded_to_proto(entry: Stranded) -> state_pb2.StrandedPartition:
    return state_pb2.StrandedPartition(
        partition_id=entry.partition_id,
        node_number=entry.node,
        store_id=entry.store.store_id,
        node_epoch=entry.store.node_epoch,
        registration_id=entry.registration_id,
        base_node_epoch=entry.base_node_epoch,
    )


def _stranded_from_proto(message: state_pb2.StrandedPartition) -> Stranded:
    return Stranded(
        partition_id=PartitionId(message.partition_id),
        node=NodeNumber(message.node_number),
        store=StoreLife(message.store_id, message.node_epoch),
        registration_id=message.registration_id,
        base_node_epoch=message.base_node_epoch,
    )


def _stranded_of_one_replica(
    records: Iterable[state_pb2.NodeRecord], rows: Iterable[PartitionRow]
) -> tuple[Stranded, ...]:
    """What builds that kept one replica knew of stranded partitions: one store for each node."""
    stores = {
        NodeNumber(record.info.node_number): StoreLife(
            record.left_behind_store_id, record.left_behind_node_epoch
        )
        for record in records
        if record.left_behind_store_id
    }
    return tuple(
        Stranded(partition_id=row.partition_id, node=row.replicas[0], store=stores[row.replicas[0]])
        for row in rows
        if len(row.replicas) == 1 and not row.in_sync and row.replicas[0] in stores
    )


def _parse(message: Any, encoded: bytes, what: str) -> None:
    try:
        message.ParseFromString(encoded)
    except DecodeError as error:
        raise DataDirectoryError(
            path="the Raft log", reason=f"{what} is damaged: {error}"
        ) from error


# --- host commands -----------------------------------------------------------------------------


def hosted_to_proto(hosted: HostedPartition) -> membership_pb2.HostCommand:
    return membership_pb2.HostCommand(
        partition_id=hosted.partition_id,
        primary_epoch=hosted.primary_epoch,
        partition_epoch=hosted.partition_epoch,
    )


def hosted_from_proto(message: membership_pb2.HostCommand) -> HostedPartition:
    return HostedPartition(
        partition_id=PartitionId(message.partition_id),
        primary_epoch=message.primary_epoch,
        partition_epoch=message.partition_epoch,
    )
