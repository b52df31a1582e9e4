"""Converts between messages and the types of the cores. No other module does."""

from __future__ import annotations

import contextlib
from collections.abc import MutableSequence
from dataclasses import fields
from typing import Any, cast

from google.protobuf.message import DecodeError
from google.rpc import status_pb2

from koinon_proto.contract import bounds, errors
from koinon_proto.contract.access import AccessState, Role, Token, User
from koinon_proto.contract.codec import codec
from koinon_proto.contract.errors import InvalidArgumentError, KoinonError, UnsupportedVersionError
from koinon_proto.contract.errors_gen import KINDS
from koinon_proto.contract.keyspaces import Keyspace, KeyspaceList
from koinon_proto.contract.table import (
    ClusterConfig,
    MoveSettings,
    NodeInfo,
    Table,
    TableUpdate,
    apply_update,
)
from koinon_proto.v1 import access_pb2, errors_pb2, table_pb2

TABLE_FORMAT_VERSION = 1

# --- errors ------------------------------------------------------------------------------------

STATUS_DETAILS_KEY = "grpc-status-details-bin"

_CLASS_BY_KIND = {kind: error for error, (kind, _) in KINDS.items()}


def error_to_proto(error: BaseException) -> errors_pb2.Error:
    """Return the error's wire form; an error that has none becomes InternalError."""
    kind, _ = KINDS.get(cast("type[KoinonError]", type(error)), ("", ""))
    if not kind:
        reason = f"{type(error).__name__}: {error}"
        return errors_pb2.Error(message=reason, internal=errors_pb2.InternalError(reason=reason))
    message = errors_pb2.Error(message=str(error))
    body = getattr(message, kind)
    body.SetInParent()
    for f in fields(cast(Any, error)):
        value = getattr(error, f.name)
        if isinstance(value, tuple):
            getattr(body, f.name).extend(value)
            continue
        with contextlib.suppress(
            ValueError
        ):  # -1, which the wire has no room for: the text says it
            setattr(body, f.name, value)
    return message


def error_from_proto(message: errors_pb2.Error) -> KoinonError:
    """Return the error; an unknown kind, or invalid fields, become InternalError."""
    kind = message.WhichOneof("kind")
    try:
        bounds.check(message)
    except InvalidArgumentError as error:
        return errors.InternalError(reason=f"an error that makes no sense: {kind}: {error}")
    if kind is None:
        return errors.InternalError(reason=message.message or "an error of an unknown kind")
    body = getattr(message, kind)
    cls = _CLASS_BY_KIND[kind]
    values = {f.name: getattr(body, f.name) for f in fields(cast(Any, cls))}
    for name, value in values.items():
        if isinstance(value, MutableSequence):  # a repeated field
            values[name] = tuple(value)
    return cls(**values)


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

CONFIG = codec(ClusterConfig, table_pb2.ClusterConfig)
NODE = codec(NodeInfo, table_pb2.NodeInfo, names={"number": "node_number"})
KEYSPACE = codec(Keyspace, table_pb2.Keyspace)
KEYSPACES = codec(KeyspaceList, table_pb2.KeyspaceList, values={"keyspaces": KEYSPACE})
MOVE_SETTINGS = codec(MoveSettings, table_pb2.MoveSettings)
UPDATE = codec(
    TableUpdate,
    table_pb2.TableUpdate,
    values={"cluster": CONFIG, "nodes": NODE, "keyspaces": KEYSPACES},
    filled=["format_version"],
)
settings_to_proto = MOVE_SETTINGS.encode
settings_from_proto = MOVE_SETTINGS.decode


def update_to_proto(update: TableUpdate) -> table_pb2.TableUpdate:
    return UPDATE.encode(update, format_version=TABLE_FORMAT_VERSION)


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
    return UPDATE.decode(message)


def table_after(table: Table | None, message: table_pb2.TableUpdate) -> Table | None:
    """Return the table after the update, as ``apply_update`` does. The same update comes by several
    ways, and may have thousands of rows: only one that is news is decoded.

    Raises:
        WrongClusterError: the update belongs to another cluster.
        UnsupportedVersionError, UnavailableError: see ``update_from_proto``.
    """
    if table is not None and message.table_version <= table.table_version:
        table.cluster.check_id(message.cluster.cluster_id, required=True)
        return table
    return apply_update(table, update_from_proto(message))


# --- access ------------------------------------------------------------------------------------

ROLE = codec(Role, access_pb2.Role)
"""A number that names no action or effect raises ValueError when it is decoded."""
USER = codec(User, access_pb2.User)
TOKEN = codec(Token, access_pb2.Token)
ACCESS = codec(
    AccessState,
    access_pb2.AccessState,
    names={"version": "access_version"},
    values={"roles": ROLE, "users": USER, "tokens": TOKEN},
)
