"""Between commands or snapshots and their bytes in the log. The only place for both.

Every command and snapshot carries a format version; another one, or a command of a kind that this
build does not know, raises UnsupportedVersionError: the member stops rather than guess.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from google.protobuf.message import DecodeError

from koinon_proto import convert
from koinon_proto.errors import DataDirectoryError, UnsupportedVersionError
from koinon_proto.table import NodeId, NodeNumber, PartitionId
from koinon_proto.v1 import membership_pb2, state_pb2

from .core.commands import (
    AssignPartitions,
    Command,
    ConfirmRegistration,
    CreateCluster,
    FenceNode,
    HostedPartition,
    PartitionsHosted,
    RegisterNode,
)
from .core.state import NodeRecord, StateImage, StoreLife

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
    )
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
    return StateImage(
        config=config,
        table_version=message.table_version,
        last_node_number=message.last_node_number,
        nodes=tuple(_record_from_proto(record) for record in message.nodes),
        rows=tuple(convert.row_from_proto(row) for row in message.rows),
    )


def _record_to_proto(record: NodeRecord) -> state_pb2.NodeRecord:
    return state_pb2.NodeRecord(
        info=convert.node_to_proto(record.info),
        registration_id=record.registration_id,
        base_node_epoch=record.base_node_epoch,
        confirmed=record.confirmed,
        left_behind_store_id=record.left_behind.store_id if record.left_behind else "",
        left_behind_node_epoch=record.left_behind.node_epoch if record.left_behind else 0,
    )


def _record_from_proto(message: state_pb2.NodeRecord) -> NodeRecord:
    return NodeRecord(
        info=convert.node_from_proto(message.info),
        registration_id=message.registration_id,
        base_node_epoch=message.base_node_epoch,
        confirmed=message.confirmed,
        left_behind=StoreLife(message.left_behind_store_id, message.left_behind_node_epoch)
        if message.left_behind_store_id
        else None,
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
