"""The commands of Koinon's own clients: single operations, reads of many rows, and scans, with all
that gRPC's have.

    KOINON.HELLO 1 cluster_id [token]
    KOINON.HELLO 2 cluster_id keyspace_id [token]
        -> the node's id; with 1, what follows is in the keyspace ``default``
    KOINON.GET key table_version [request_id]
        -> the value, or nil
    KOINON.ENTRY key table_version [request_id]
        -> [value, version, expires_at_ms], or nil
    KOINON.EXISTS key table_version [request_id]
        -> 1; 0: there is none
    KOINON.PUT key value table_version ttl_ms if_version durability [request_id]
        -> the version
    KOINON.DELETE key table_version if_version durability [request_id]
        -> 1; 0: there was none
    KOINON.INCREMENT key by ttl_ms table_version durability [request_id]
        -> the sum
    KOINON.TOUCH key ttl_ms table_version durability [request_id]
        -> 1; 0: there is none
    KOINON.GETORPUT key value ttl_ms table_version durability [request_id]
        -> the value that is there, or nil: this one was written
    KOINON.GETMANY request [request_id]
        -> rows; the messages BatchGetRequest and BatchGetResponse of v1/kv.proto
    KOINON.SCAN request [request_id]
        -> a page; the messages ScanRequest and ScanResponse

Numbers are decimal, ``by`` with a sign. ``ttl_ms`` 0: the keyspace's default, and with
KOINON.TOUCH never; ``if_version`` '': unconditional; ``durability`` as in v1/kv.proto. Errors are
whole: ``-KOINON <v1.Error, base64> <request id>``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar, cast

from google.protobuf.message import DecodeError

from koinon_node.core import records
from koinon_node.core.updates import (
    Assign,
    Expire,
    Increment,
    Presence,
    Update,
    expires_after,
    parse_integer,
)
from koinon_node.resp import errors, wire
from koinon_node.resp.commands.table import (
    Arguments,
    Call,
    Encoded,
    Outcome,
    Read,
    Row,
    Write,
    Written,
    command,
)
from koinon_node.resp.session import Session
from koinon_node.serving.batches import Durability
from koinon_node.serving.read_requests import rows_of, rows_reply
from koinon_node.serving.request_limits import (
    check_expiry,
    check_key,
    check_value,
    expiry_of,
    ttl_of,
)
from koinon_node.serving.scan_requests import page_of, page_reply
from koinon_proto.contract import request_ids
from koinon_proto.contract.errors import (
    InvalidArgumentError,
    NotANumberError,
    UnsupportedVersionError,
)
from koinon_proto.contract.keyspaces import DEFAULT_ID, KeyspaceId
from koinon_proto.v1 import kv_pb2

PROTOCOL_VERSION = 2
_DEFAULT_ALONE = 1
"""The version before: its connections are all in the keyspace ``default``."""
LEAVING = wire.push(b"koinon.leaving")
_U64_DIGITS_MAX, _U64_MAX = 20, 2**64 - 1
M = TypeVar("M", kv_pb2.BatchGetRequest, kv_pb2.ScanRequest)


def number(text: bytes, field: str) -> int:
    """Return an unsigned number.

    Raises:
        InvalidArgumentError: it is none.
    """
    if not text.isdigit() or len(text) > _U64_DIGITS_MAX or (value := int(text)) > _U64_MAX:
        raise InvalidArgumentError(field=field, reason="must be decimal, of 64 bits")
    return value


def _signed(text: bytes, field: str) -> int:
    try:
        return parse_integer(text)
    except NotANumberError:
        raise InvalidArgumentError(field=field, reason="must be an integer of 64 bits") from None


def _request_id(arguments: Arguments, at: int) -> str:
    """Return the id that the sender gave the request; '' where it gave none."""
    if len(arguments) <= at:
        return ""
    return request_ids.cleaned(arguments[at].decode("ascii", "replace"))


def _condition(text: bytes) -> int | None:
    return number(text, "if_version") if text else None


def _durability(text: bytes) -> Durability:
    try:
        return Durability(number(text, "durability"))
    except ValueError:
        raise InvalidArgumentError(field="durability", reason="no such level") from None


@command("KOINON.HELLO", -3, errors.own, flags=("no_auth",))
def hello(session: Session, arguments: Arguments) -> Outcome:
    """Say which cluster and which keyspace are meant, and attend. Whether the keyspace is known is
    told to the commands that follow.
    """
    version = number(arguments[1], "protocol")
    if version not in (_DEFAULT_ALONE, PROTOCOL_VERSION):
        raise UnsupportedVersionError(
            what="the protocol of Koinon's commands", version=version, supported=PROTOCOL_VERSION
        )
    keyspace_id, options = DEFAULT_ID, arguments[3:]
    if version != _DEFAULT_ALONE:
        if not options:
            raise InvalidArgumentError(field="keyspace_id", reason="must be there")
        keyspace_id, options = KeyspaceId(number(options[0], "keyspace_id")), options[1:]
    if options:
        session.authenticate(options[0].decode("ascii", "replace"))
    session.check_known()
    session.service.table().cluster.check_id(arguments[2].decode("utf-8", "replace"))
    session.enter(keyspace_id)
    session.attend(lambda: session.tell(LEAVING))
    return wire.bulk(session.service.node_id.encode())


@command("KOINON.GET", -3, errors.own, flags=("readonly", "fast"), keys=(1, 1, 1))
def get(session: Session, arguments: Arguments) -> Outcome:
    """Read a value."""
    check_key(arguments[1])
    version = number(arguments[2], "table_version")
    return Read((arguments[1],), value_or_nil, version, _request_id(arguments, 3))


def value_or_nil(found: Sequence[Encoded]) -> bytes:
    """Return the value of the only record."""
    record = found[0]
    return wire.NIL if record is None else wire.bulk(records.value_of(record))


@command("KOINON.ENTRY", -3, errors.own, flags=("readonly", "fast"), keys=(1, 1, 1))
def entry(session: Session, arguments: Arguments) -> Outcome:
    """Read a value with its version and its expiry."""
    check_key(arguments[1])
    version = number(arguments[2], "table_version")
    return Read((arguments[1],), _entry_or_nil, version, _request_id(arguments, 3))


def _entry_or_nil(found: Sequence[Encoded]) -> bytes:
    if found[0] is None:
        return wire.NIL_ARRAY
    record = records.decode_record(found[0])
    return wire.bulks((record.value, b"%d" % record.sequence, b"%d" % record.expires_at_ms))


@command("KOINON.EXISTS", -3, errors.own, flags=("readonly", "fast"), keys=(1, 1, 1))
def exists(session: Session, arguments: Arguments) -> Outcome:
    """Say whether there is a record."""
    check_key(arguments[1])
    version = number(arguments[2], "table_version")
    return Read((arguments[1],), _is_there, version, _request_id(arguments, 3))


def _is_there(found: Sequence[Encoded]) -> bytes:
    return wire.integer(found[0] is not None)


@command("KOINON.GETMANY", -2, errors.own, flags=("readonly",))
def get_many(session: Session, arguments: Arguments) -> Outcome:
    """Read many rows, as gRPC's method does."""
    request = _message(kv_pb2.BatchGetRequest, session, arguments)
    keyspace = session.served.keyspace(request.table_version)
    keys, partition_ids = rows_of(request, keyspace, session.caller)

    async def begin() -> bytes:
        answer = await session.service.rows(
            keys, partition_ids, request.table_version, want_versions=request.want_versions
        )
        reply = rows_reply(answer, keys_only=request.keys_only)
        return wire.bulk(reply.SerializeToString())

    return Call(begin, _request_id(arguments, 2))


@command("KOINON.SCAN", -2, errors.own, flags=("readonly",))
def scan(session: Session, arguments: Arguments) -> Outcome:
    """Read a page of a scan, as gRPC's method does."""
    request = _message(kv_pb2.ScanRequest, session, arguments)
    page = page_of(request, session.served.keyspace(request.table_version), session.caller)

    async def begin() -> bytes:
        reply = page_reply(await session.service.page(page), want_versions=request.want_versions)
        return wire.bulk(reply.SerializeToString())

    return Call(begin, _request_id(arguments, 2))


def _message(kind: type[M], session: Session, arguments: Arguments) -> M:
    """Return the message that a command brings, meant for this cluster and the connection's
    keyspace.
    """
    try:
        request = kind.FromString(arguments[1])
    except DecodeError:
        reason = f"must be a {kind.DESCRIPTOR.name}"
        raise InvalidArgumentError(field="request", reason=reason) from None
    session.service.table().cluster.check_id(request.cluster_id)
    if request.keyspace_id != session.served.keyspace_id:
        raise InvalidArgumentError(field="keyspace_id", reason="must be the connection's")
    return request


@command("KOINON.PUT", -7, errors.own, flags=("write",), keys=(1, 1, 1))
def put(session: Session, arguments: Arguments) -> Outcome:
    """Write a record."""
    _, key, value, table_version, ttl, if_version, durability, *_ = arguments
    check_key(key)
    version = number(table_version, "table_version")
    keyspace = session.served.keyspace(version)
    check_value(len(value), keyspace)
    ttl_ms = ttl_of(keyspace, number(ttl, "ttl_ms"))
    row = Row(key, value, ttl_ms=ttl_ms, if_version=_condition(if_version))
    return Write(
        (row,),
        _version,
        _durability(durability),
        version,
        _request_id(arguments, 7),
    )


def _version(written: Sequence[Written]) -> bytes:
    return wire.bulk(b"%d" % written[0].version)


@command("KOINON.DELETE", -5, errors.own, flags=("write",), keys=(1, 1, 1))
def delete(session: Session, arguments: Arguments) -> Outcome:
    """Delete a record."""
    _, key, table_version, if_version, durability, *_ = arguments
    check_key(key)
    row = Row(key, is_delete=True, if_version=_condition(if_version))
    return Write(
        (row,),
        was_there,
        _durability(durability),
        number(table_version, "table_version"),
        _request_id(arguments, 5),
    )


def was_there(written: Sequence[Written]) -> bytes:
    """Return how many of the rows that were deleted were there."""
    return wire.integer(sum(row.version > 0 for row in written))


# --- updates -----------------------------------------------------------------------------------


@command("KOINON.INCREMENT", -6, errors.own, flags=("write",), keys=(1, 1, 1))
def increment(session: Session, arguments: Arguments) -> Outcome:
    """Add to an integer."""
    _, key, by, ttl, table_version, durability, *_ = arguments
    version = number(table_version, "table_version")
    ttl_ms = ttl_of(session.served.keyspace(version), number(ttl, "ttl_ms"))
    update = Increment(_signed(by, "by"), ttl_ms)
    return _update(key, update, _number_result, version, durability, _request_id(arguments, 6))


@command("KOINON.TOUCH", -5, errors.own, flags=("write",), keys=(1, 1, 1))
def touch(session: Session, arguments: Arguments) -> Outcome:
    """Change when a record expires."""
    _, key, ttl, table_version, durability, *_ = arguments
    version = number(table_version, "table_version")
    expiry = expires_after(number(ttl, "ttl_ms"))
    check_expiry(session.served.keyspace(version), expiry, 0)
    update = Expire(expiry)
    return _update(key, update, _number_result, version, durability, _request_id(arguments, 5))


@command("KOINON.GETORPUT", -6, errors.own, flags=("write",), keys=(1, 1, 1))
def get_or_put(session: Session, arguments: Arguments) -> Outcome:
    """Read a record, or make it."""
    _, key, value, ttl, table_version, durability, *_ = arguments
    version = number(table_version, "table_version")
    keyspace = session.served.keyspace(version)
    check_value(len(value), keyspace)
    update = Assign(value, expiry_of(keyspace, number(ttl, "ttl_ms")), Presence.ABSENT)
    return _update(key, update, _found_before, version, durability, _request_id(arguments, 6))


def _update(
    key: bytes,
    update: Update,
    reply: Callable[[Sequence[Written]], bytes],
    table_version: int,
    durability: bytes,
    request_id: str,
) -> Write:
    check_key(key)
    row = Row(key, update=update)
    return Write((row,), reply, _durability(durability), table_version, request_id)


def _number_result(written: Sequence[Written]) -> bytes:
    return wire.integer(cast(int, written[0].result))


def _found_before(written: Sequence[Written]) -> bytes:
    _, before = cast(tuple[bool, bytes | None], written[0].result)
    return wire.NIL if before is None else wire.bulk(before)
