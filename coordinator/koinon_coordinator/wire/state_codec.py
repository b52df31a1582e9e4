"""Encodes and decodes the commands and snapshots of the log. No other module does.

Every command and snapshot has a format version. An unknown version or kind of command raises
UnsupportedVersionError: the member stops rather than guess.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from google.protobuf.message import DecodeError

from koinon_coordinator.core.cluster import commands
from koinon_coordinator.core.cluster.commands import (
    AlterKeyspace,
    AssignPartitions,
    Command,
    CreateCluster,
    CreateKeyspace,
    HostedPartition,
    PartitionsHosted,
    WantPrimaries,
)
from koinon_coordinator.core.cluster.image import NodeRecord, StateImage, StoreLife, Stranded
from koinon_coordinator.core.cluster.load_rules import Load, LoadsImage
from koinon_coordinator.wire import rows
from koinon_coordinator.wire.rows import RowForms
from koinon_proto.contract import convert
from koinon_proto.contract.access import NO_ACCESS_STATE
from koinon_proto.contract.bulk_loads import StreamBatch
from koinon_proto.contract.cluster_errors import DataDirectoryError
from koinon_proto.contract.codec import Codec, Value, codec
from koinon_proto.contract.errors import UnsupportedVersionError
from koinon_proto.contract.keyspaces import NO_KEYSPACES
from koinon_proto.contract.table import (
    PartitionId,
    registration_digest,
)
from koinon_proto.v1 import loads_pb2, state_pb2

COMMAND_FORMAT_VERSION = 1
SNAPSHOT_FORMAT_VERSION = 1

# --- commands ----------------------------------------------------------------------------------

_HOSTED = codec(
    PartitionsHosted,
    state_pb2.PartitionsHostedCommand,
    given=["hosted"],
    filled=["partition_ids", "primary_epochs", "partition_epochs"],
)


def _hosted_to_proto(command: PartitionsHosted) -> state_pb2.PartitionsHostedCommand:
    return _HOSTED.encode(
        command,
        partition_ids=[h.partition_id for h in command.hosted],
        primary_epochs=[h.primary_epoch for h in command.hosted],
        partition_epochs=[h.partition_epoch for h in command.hosted],
    )


def _hosted_from_proto(body: state_pb2.PartitionsHostedCommand) -> PartitionsHosted:
    columns = zip(body.partition_ids, body.primary_epochs, body.partition_epochs, strict=True)
    hosted = (
        HostedPartition(partition_id=PartitionId(p), primary_epoch=primary, partition_epoch=epoch)
        for p, primary, epoch in columns
    )
    return _HOSTED.decode(body, hosted=tuple(hosted))


_Replicas = state_pb2.AssignPartitionsCommand.Replicas
_REPLICAS = Value(lambda row: _Replicas(node_numbers=row), lambda m: tuple(m.node_numbers))
_Wish = state_pb2.WantPrimariesCommand.Wish
_SPECIAL: dict[type[Any], Codec[Any, Any]] = {
    CreateCluster: codec(
        CreateCluster, state_pb2.CreateClusterCommand, values={"config": convert.CONFIG}
    ),
    AssignPartitions: codec(
        AssignPartitions,
        state_pb2.AssignPartitionsCommand,
        names={"replicas": "rows"},
        values={"replicas": _REPLICAS},
    ),
    CreateKeyspace: codec(
        CreateKeyspace,
        state_pb2.CreateKeyspaceCommand,
        names={"replicas": "rows"},
        values={"keyspace": convert.KEYSPACE, "replicas": _REPLICAS},
    ),
    AlterKeyspace: codec(
        AlterKeyspace, state_pb2.AlterKeyspaceCommand, values={"keyspace": convert.KEYSPACE}
    ),
    PartitionsHosted: Codec(_hosted_to_proto, _hosted_from_proto),
    WantPrimaries: codec(
        WantPrimaries,
        state_pb2.WantPrimariesCommand,
        values={
            "wishes": Value(
                lambda wish: _Wish(partition_id=wish[0], node_number=wish[1]),
                lambda m: (m.partition_id, m.node_number),
            )
        },
    ),
}
_KINDS: dict[type[Any], str] = {}
_CODECS: dict[str, Codec[Any, Any]] = {}
for _field in state_pb2.Command.DESCRIPTOR.oneofs_by_name["kind"].fields:
    _body = cast(Any, _field.message_type).name
    _class = getattr(commands, _body.removesuffix("Command"))
    _KINDS[_class] = _field.name
    _CODECS[_field.name] = _SPECIAL.get(_class) or codec(_class, getattr(state_pb2, _body))


def command_to_bytes(command: Command) -> bytes:
    """Return the command's bytes for the log."""
    kind = _KINDS[type(command)]
    body: Any = {kind: _CODECS[kind].encode(command)}
    message = state_pb2.Command(format_version=COMMAND_FORMAT_VERSION, **body)
    return message.SerializeToString(deterministic=True)


def command_from_bytes(encoded: bytes) -> Command:
    """Return the command.

    Raises:
        UnsupportedVersionError: another format version, or a kind unknown here.
        DataDirectoryError: bytes that are no command at all.
    """
    message = state_pb2.Command()
    _parse(message, encoded, "a log entry")
    _check_version(message, "coordinator command", COMMAND_FORMAT_VERSION)
    kind = message.WhichOneof("kind")
    if kind is None:
        raise UnsupportedVersionError(
            what="coordinator command of an unknown kind",
            version=message.format_version,
            supported=COMMAND_FORMAT_VERSION,
        )
    command: Command = _CODECS[kind].decode(getattr(message, kind))
    return command


# --- snapshots ---------------------------------------------------------------------------------

_BATCH = codec(StreamBatch, loads_pb2.StreamBatch)
_LOAD = codec(Load, state_pb2.Load)
_STRANDED = codec(
    Stranded,
    state_pb2.StrandedPartition,
    names={"node": "node_number"},
    given=["store"],
    filled=["store_id", "node_epoch"],
)
_RECORD = codec(
    NodeRecord,
    state_pb2.NodeRecord,
    values={"info": convert.NODE},
)


def _stranded_to_proto(entry: Stranded) -> state_pb2.StrandedPartition:
    store = entry.store
    return _STRANDED.encode(entry, store_id=store.store_id, node_epoch=store.node_epoch)


def _stranded_from_proto(message: state_pb2.StrandedPartition) -> Stranded:
    return _STRANDED.decode(message, store=StoreLife(message.store_id, message.node_epoch))


def _record_to_proto(record: NodeRecord) -> state_pb2.NodeRecord:
    """The digest is left out: it follows from ``registration_id``."""
    return _RECORD.encode(replace(record, info=replace(record.info, registration_digest=b"")))


def _record_from_proto(message: state_pb2.NodeRecord) -> NodeRecord:
    record = _RECORD.decode(message)
    digest = registration_digest(record.registration_id)
    return replace(record, info=replace(record.info, registration_digest=digest))


_IMAGE = codec(
    StateImage,
    state_pb2.StateSnapshot,
    names={"config": "cluster"},
    values={
        "config": convert.CONFIG,
        "nodes": Value(_record_to_proto, _record_from_proto),
        "stranded": Value(_stranded_to_proto, _stranded_from_proto),
    },
    given=["loads", "access", "keyspaces"],
    filled=[
        *("format_version", "loads", "ended_loads", "stream_batches", "load_id_base", "access"),
        "keyspaces",
    ],
)


def image_to_bytes(
    image: StateImage,
    forms: RowForms | None = None,
    let_go: Callable[[], object] = lambda: None,
) -> bytes:
    """Return the snapshot's bytes: the same for equal images on every member, and the same as
    protobuf writes, whichever rows ``forms`` has. It may run in any thread; ``let_go`` is called
    now and then.
    """
    loads = image.loads
    message = _IMAGE.encode(
        replace(image, rows=()),
        format_version=SNAPSHOT_FORMAT_VERSION,
        loads=map(_LOAD.encode, loads.active),
        ended_loads=map(_LOAD.encode, loads.ended),
        stream_batches=map(_BATCH.encode, loads.batches),
        load_id_base=loads.id_base,
        access=convert.ACCESS.encode(image.access) if image.access != NO_ACCESS_STATE else None,
        keyspaces=convert.KEYSPACES.encode(image.keyspaces)
        if image.keyspaces != NO_KEYSPACES
        else None,
    )
    behind = state_pb2.StateSnapshot()  # what comes behind the rows: fields stand by their numbers
    behind.CopyFrom(message)
    for field, _ in message.ListFields():
        (behind if field.number < rows.FIELD else message).ClearField(cast(Any, field.name))
    return b"".join(
        (
            message.SerializeToString(deterministic=True),
            (forms or RowForms()).of(image.rows, let_go),
            behind.SerializeToString(deterministic=True),
        )
    )


def image_from_bytes(encoded: bytes) -> StateImage:
    """Return the image.

    Raises:
        UnsupportedVersionError: the snapshot has another format version.
        DataDirectoryError: bytes that are no snapshot at all.
    """
    message = state_pb2.StateSnapshot()
    _parse(message, encoded, "a snapshot")
    _check_version(message, "coordinator snapshot", SNAPSHOT_FORMAT_VERSION)
    loads = LoadsImage(
        active=tuple(map(_LOAD.decode, message.loads)),
        ended=tuple(map(_LOAD.decode, message.ended_loads)),
        batches=tuple(map(_BATCH.decode, message.stream_batches)),
        id_base=message.load_id_base,
    )
    return _IMAGE.decode(
        message,
        loads=loads,
        access=convert.ACCESS.decode(message.access),
        keyspaces=convert.KEYSPACES.decode(message.keyspaces),
    )


def _parse(message: Any, encoded: bytes, what: str) -> None:
    try:
        message.ParseFromString(encoded)
    except DecodeError as error:
        raise DataDirectoryError(
            path="the Raft log", reason=f"{what} is damaged: {error}"
        ) from error


def _check_version(message: Any, what: str, supported: int) -> None:
    if message.format_version != supported:
        raise UnsupportedVersionError(
            what=what, version=message.format_version, supported=supported
        )
