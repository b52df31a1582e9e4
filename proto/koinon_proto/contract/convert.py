"""Between the wire's messages and the types that cores work with. The only place for both."""

from __future__ import annotations

import contextlib
from dataclasses import fields, replace
from typing import Any, cast

from google.protobuf.message import DecodeError
from google.rpc import status_pb2

from koinon_proto.contract import bounds, errors
from koinon_proto.contract.errors import InvalidArgumentError, KoinonError, UnsupportedVersionError
from koinon_proto.contract.table import (
    DEFAULT_WEIGHT,
    ActiveLoad,
    ClusterConfig,
    MoveSettings,
    NodeId,
    NodeInfo,
    NodeNumber,
    NodeStatus,
    OfflineReason,
    PartitionId,
    PartitionRow,
    PartitionStatus,
    TableUpdate,
)
from koinon_proto.v1 import errors_pb2, table_pb2

TABLE_FORMAT_VERSION = 1

# --- errors ------------------------------------------------------------------------------------

STATUS_DETAILS_KEY = "grpc-status-details-bin"

_KIND_BY_CLASS: dict[type[KoinonError], str] = {}
_CLASS_BY_KIND: dict[str, type[KoinonError]] = {}
for _field in errors_pb2.Error.DESCRIPTOR.oneofs_by_name["kind"].fields:
    _class = cast("type[KoinonError]", getattr(errors, cast(Any, _field.message_type).name))
    _KIND_BY_CLASS[_class] = _field.name
    _CLASS_BY_KIND[_field.name] = _class


def error_to_proto(error: BaseException) -> errors_pb2.Error:
    """Return the wire form; an error without one of its own becomes InternalError."""
    kind = _KIND_BY_CLASS.get(cast("type[KoinonError]", type(error)))
    if kind is None:
        reason = f"{type(error).__name__}: {error}"
        return errors_pb2.Error(message=reason, internal=errors_pb2.InternalError(reason=reason))
    message = errors_pb2.Error(message=str(error))
    body = getattr(message, kind)
    body.SetInParent()
    for f in fields(cast(Any, error)):
        with contextlib.suppress(
            ValueError
        ):  # -1, which the wire has no room for: the text says it
            setattr(body, f.name, getattr(error, f.name))
    return message


def error_from_proto(message: errors_pb2.Error) -> KoinonError:
    """Return the error; a kind that this build does not know, or one that makes no sense, becomes
    InternalError.
    """
    kind = message.WhichOneof("kind")
    try:
        bounds.check(message)
    except InvalidArgumentError as error:
        return errors.InternalError(reason=f"an error that makes no sense: {kind}: {error}")
    if kind is None:
        return errors.InternalError(reason=message.message or "an error of an unknown kind")
    body = getattr(message, kind)
    cls = _CLASS_BY_KIND[kind]
    return cls(**{f.name: getattr(body, f.name) for f in fields(cast(Any, cls))})


def error_to_status_details(error: BaseException, code: int) -> bytes:
    """Return the standard ``google.rpc.Status`` bytes that carry ``error`` beside a gRPC status."""
    status = status_pb2.Status(code=code, message=str(error))
    status.details.add().Pack(error_to_proto(error))
    return cast(bytes, status.SerializeToString())


def error_from_status_details(details: bytes) -> KoinonError | None:
    """Return the typed error in a status's details, or None if they hold none."""
    try:
        status = status_pb2.Status.FromString(details)
        message = errors_pb2.Error()
        for detail in status.details:
            if detail.Unpack(message):
                return error_from_proto(message)
    except DecodeError:
        pass
    return None


# --- the table ---------------------------------------------------------------------------------

_CONFIG_FIELDS = tuple(f.name for f in fields(ClusterConfig))
_CONFIG_DEFAULTS: dict[str, Any] = {f.name: f.default for f in fields(ClusterConfig)}


def config_to_proto(config: ClusterConfig) -> table_pb2.ClusterConfig:
    return table_pb2.ClusterConfig(**{name: getattr(config, name) for name in _CONFIG_FIELDS})


def config_from_proto(message: table_pb2.ClusterConfig) -> ClusterConfig:
    config = ClusterConfig(**{name: getattr(message, name) for name in _CONFIG_FIELDS})
    if not config.replica_timeout_ms:  # made by a build that kept one replica
        config = replace(config, replica_timeout_ms=_CONFIG_DEFAULTS["replica_timeout_ms"])
    return config


def node_to_proto(node: NodeInfo) -> table_pb2.NodeInfo:
    return table_pb2.NodeInfo(
        node_number=node.number,
        node_id=node.node_id,
        address=node.address,
        rack=node.rack,
        node_epoch=node.node_epoch,
        status=cast(Any, int(node.status)),
        store_id=node.store_id,
        changed_at=node.changed_at,
        weight=node.weight,
        registration_digest=node.registration_digest,
    )


def node_from_proto(message: table_pb2.NodeInfo) -> NodeInfo:
    return NodeInfo(
        number=NodeNumber(message.node_number),
        node_id=NodeId(message.node_id),
        address=message.address,
        rack=message.rack,
        node_epoch=message.node_epoch,
        status=NodeStatus(message.status),
        store_id=message.store_id,
        changed_at=message.changed_at,
        weight=message.weight or DEFAULT_WEIGHT,
        registration_digest=message.registration_digest,
    )


def row_to_proto(row: PartitionRow) -> table_pb2.PartitionRow:
    return table_pb2.PartitionRow(
        partition_id=row.partition_id,
        replicas=row.replicas,
        in_sync=row.in_sync,
        primary=row.primary,
        primary_epoch=row.primary_epoch,
        partition_epoch=row.partition_epoch,
        adding=row.adding,
        removing=row.removing,
        status=cast(Any, int(row.status)),
        offline_reason=cast(Any, int(row.offline_reason)),
        changed_at=row.changed_at,
        wanted_primary=row.wanted_primary,
    )


def row_from_proto(message: table_pb2.PartitionRow) -> PartitionRow:
    return PartitionRow(
        partition_id=PartitionId(message.partition_id),
        replicas=tuple(NodeNumber(n) for n in message.replicas),
        in_sync=tuple(NodeNumber(n) for n in message.in_sync),
        primary=NodeNumber(message.primary),
        primary_epoch=message.primary_epoch,
        partition_epoch=message.partition_epoch,
        adding=tuple(NodeNumber(n) for n in message.adding),
        removing=tuple(NodeNumber(n) for n in message.removing),
        status=PartitionStatus(message.status),
        offline_reason=OfflineReason(message.offline_reason),
        changed_at=message.changed_at,
        wanted_primary=NodeNumber(message.wanted_primary),
    )


def settings_to_proto(settings: MoveSettings) -> table_pb2.MoveSettings:
    return table_pb2.MoveSettings(
        paused=settings.paused,
        bytes_per_second=settings.bytes_per_second,
        moves_per_node=settings.moves_per_node,
    )


def settings_from_proto(message: table_pb2.MoveSettings) -> MoveSettings:
    return MoveSettings(
        paused=message.paused,
        bytes_per_second=message.bytes_per_second,
        moves_per_node=message.moves_per_node,
    )


def update_to_proto(update: TableUpdate) -> table_pb2.TableUpdate:
    return table_pb2.TableUpdate(
        format_version=TABLE_FORMAT_VERSION,
        cluster=config_to_proto(update.cluster),
        base_version=update.base_version,
        table_version=update.table_version,
        nodes=[node_to_proto(node) for node in update.nodes],
        rows=[row_to_proto(row) for row in update.rows],
        moves=settings_to_proto(update.moves),
        loads=[
            table_pb2.ActiveLoad(
                load_id=load.load_id, merging=load.merging, committed_at=load.committed_at
            )
            for load in update.loads
        ],
    )


def update_from_proto(message: table_pb2.TableUpdate) -> TableUpdate:
    """Return the update.

    Raises:
        UnsupportedVersionError: the update has a format that this build does not know.
        UnavailableError: it makes no sense.
    """
    if message.format_version != TABLE_FORMAT_VERSION:
        raise UnsupportedVersionError(
            what="partition table",
            version=message.format_version,
            supported=TABLE_FORMAT_VERSION,
        )
    bounds.check_reply(message)
    return TableUpdate(
        cluster=config_from_proto(message.cluster),
        base_version=message.base_version,
        table_version=message.table_version,
        nodes=tuple(node_from_proto(node) for node in message.nodes),
        rows=tuple(row_from_proto(row) for row in message.rows),
        moves=settings_from_proto(message.moves),
        loads=tuple(
            ActiveLoad(load_id=a.load_id, merging=a.merging, committed_at=a.committed_at)
            for a in message.loads
        ),
    )
