"""The commands of Koinon's own clients: single operations, reads of many rows, and scans, with the
same parameters as over gRPC.

    KOINON.HELLO 2 cluster_id keyspace_id [token]
        -> the node's id, and its time in ms; the commands that follow are in this keyspace
    KOINON.GET key table_version [request_id]
        -> the value, or nil
    KOINON.ENTRY key table_version [request_id]
        -> [value, version, expires_at_ms], or nil
    KOINON.EXISTS key table_version [request_id]
        -> 1; 0: no record
    KOINON.PUT key value table_version ttl_ms if_version durability [request_id [take_by_ms]]
        -> the version
    KOINON.DELETE key table_version if_version durability [request_id [take_by_ms]]
        -> 1; 0: there was no record
    KOINON.INCREMENT key by ttl_ms table_version durability [request_id [take_by_ms]]
        -> the sum
    KOINON.TOUCH key ttl_ms table_version durability [request_id [take_by_ms]]
        -> 1; 0: no record
    KOINON.GETORPUT key value ttl_ms table_version durability [request_id [take_by_ms]]
        -> the existing value, or nil: the given value was written
    KOINON.GETMANY request [request_id]
        -> rows; the messages BatchGetRequest and BatchGetResponse of v1/kv.proto
    KOINON.SCAN request [request_id]
        -> a page; the messages ScanRequest and ScanResponse
    KOINON.FOLLOW 1
        -> +OK; from here on the connection carries the frames of a stream of commit groups
        (koinon_proto.server.framed_stream)

Numbers are decimal, ``by`` with a sign. ``ttl_ms`` 0: the keyspace's default, and with
KOINON.TOUCH never; ``if_version`` '': unconditional; ``durability`` as in v1/kv.proto;
``take_by_ms``: the node's time after which the write is refused ('': none). An error reply carries
the typed error: ``-KOINON <v1.Error, base64> <request id>``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from google.protobuf.message import DecodeError

from koinon_node.core.formats import records
from koinon_node.core.writes.updates import (
    Assign,
    Expire,
    Increment,
    Presence,
    RecordIf,
    Update,
    expires_after,
    parse_integer,
)
from koinon_node.grpc.read_requests import rows_of, rows_reply
from koinon_node.grpc.scan_requests import page_of, page_reply
from koinon_node.partition.batches import Durability
from koinon_node.partition.request_limits import (
    check_expiry,
    check_key,
    check_value,
    expiry_of,
    ttl_of,
)
from koinon_node.ports import FOLLOW
from koinon_node.resp import wire
from koinon_node.resp.commands import replies
from koinon_node.resp.commands.spec import Handler
from koinon_node.resp.outcomes import (
    Arguments,
    Call,
    Encoded,
    Outcome,
    Read,
    Row,
    Switch,
    Write,
    Written,
)
from koinon_node.resp.session import Session
from koinon_proto.contract import request_ids
from koinon_proto.contract.errors import (
    InvalidArgumentError,
    NotANumberError,
    UnsupportedVersionError,
)
from koinon_proto.contract.keyspaces import Keyspace, KeyspaceId
from koinon_proto.security import method_permissions
from koinon_proto.v1 import kv_pb2

_COMMANDS_VERSION = 2
_FRAMES_VERSION = 1
LEAVING = wire.push(b"koinon.leaving")
_U64_DIGITS_MAX, _U64_MAX = 20, 2**64 - 1
M = TypeVar("M", kv_pb2.BatchGetRequest, kv_pb2.ScanRequest)


def _number(text: bytes, field: str) -> int:
    """Parse an unsigned number of 64 bits.

    Raises:
        InvalidArgumentError: the text is no such number.
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
    """Return the request id that the sender gave; '' if it gave none."""
    if len(arguments) <= at:
        return ""
    return request_ids.cleaned(arguments[at].decode("ascii", "replace"))


def _condition(text: bytes) -> int | None:
    return _number(text, "if_version") if text else None


def _durability(text: bytes) -> Durability:
    try:
        return Durability(_number(text, "durability"))
    except ValueError:
        raise InvalidArgumentError(field="durability", reason="no such level") from None


def _check_version(text: bytes, supported: int, what: str) -> None:
    if (version := _number(text, "protocol")) != supported:
        raise UnsupportedVersionError(what=what, version=version, supported=supported)


def hello(session: Session, arguments: Arguments) -> Outcome:
    """Enter a keyspace of the cluster. Before the node stops, it waits for the end of this
    connection. Whether the keyspace exists shows with the next command.
    """
    _, version, cluster_id, *options = arguments
    _check_version(version, _COMMANDS_VERSION, "the protocol of Koinon's commands")
    if not options:
        raise InvalidArgumentError(field="keyspace_id", reason="is missing")
    keyspace_id, *token = options
    entered = KeyspaceId(_number(keyspace_id, "keyspace_id"))
    if token:
        session.authenticate(token[0].decode("ascii", "replace"))
    session.check_known()
    session.service.table().cluster.check_id(cluster_id.decode("utf-8", "replace"))
    session.enter(entered)
    session.attend(lambda: session.tell(LEAVING))
    service = session.service
    return wire.bulk(b"%b %d" % (service.node_id.encode(), service.clock_ms()))


def follow(session: Session, arguments: Arguments) -> Outcome:
    """Stream commit groups to a follower, which must be a node."""
    _check_version(arguments[1], _FRAMES_VERSION, "the frames of KOINON.FOLLOW")
    method_permissions.check(FOLLOW, session.caller)
    followers = session.service.followers
    return Switch(lambda: followers.take_follower(session.caller_that_stays(), session.peer))


# --- reads -------------------------------------------------------------------------------------


def reads(reply: Callable[[Sequence[Encoded]], bytes]) -> Handler:
    """Build the handler of a command that reads one record."""

    def handler(session: Session, arguments: Arguments) -> Outcome:
        key, table_version = arguments[1:3]
        check_key(key)
        version = _number(table_version, "table_version")
        return Read((key,), reply, version, _request_id(arguments, 3), True)

    return handler


def entry_or_nil(found: Sequence[Encoded]) -> bytes:
    """Reply with the record's value, version and expiry."""
    if found[0] is None:
        return wire.NIL_ARRAY
    record = records.decode_record(found[0])
    return wire.bulks((record.value, b"%d" % record.sequence, b"%d" % record.expires_at_ms))


def get_many(session: Session, arguments: Arguments) -> Outcome:
    """Read many rows, like the gRPC method."""
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


def scan(session: Session, arguments: Arguments) -> Outcome:
    """Read a page of a scan, like the gRPC method."""
    request = _message(kv_pb2.ScanRequest, session, arguments)
    page = page_of(request, session.served.keyspace(request.table_version), session.caller)

    async def begin() -> bytes:
        reply = page_reply(await session.service.page(page), want_versions=request.want_versions)
        return wire.bulk(reply.SerializeToString())

    return Call(begin, _request_id(arguments, 2))


def _message(kind: type[M], session: Session, arguments: Arguments) -> M:
    """Parse the protobuf message in a command, and check its cluster and keyspace against the
    connection's.
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


# --- writes ------------------------------------------------------------------------------------


class _Last(NamedTuple):
    """The common last arguments of write commands."""

    table_version: int
    durability: Durability
    request_id: str

    @classmethod
    def of(
        cls, session: Session, arguments: Arguments, version_at: int, durability_at: int
    ) -> _Last:
        """Parse the arguments. After the durability there may be the request id and the time by
        which the node must have started the write.

        Raises:
            DeadlinePassedError: this time has passed.
            InvalidArgumentError: an argument is not valid.
        """
        if len(arguments) > durability_at + 2 and (take_by := arguments[durability_at + 2]):
            session.service.check_in_time(_number(take_by, "take_by_ms"))
        return cls(
            _number(arguments[version_at], "table_version"),
            _durability(arguments[durability_at]),
            _request_id(arguments, durability_at + 1),
        )

    def write(self, row: Row, reply: Callable[[Sequence[Written]], bytes]) -> Write:
        """Build the outcome of a command that writes this row."""
        check_key(row.key)
        version, level, request_id = self
        return Write((row,), reply, level, version, request_id, fails_at_once=True)


def put(session: Session, arguments: Arguments) -> Outcome:
    """Write a record; reply with its version."""
    last = _Last.of(session, arguments, 3, 6)
    _, key, value, _, ttl, if_version, *_ = arguments
    keyspace = session.served.keyspace(last.table_version)
    check_value(len(value), keyspace)
    ttl_ms = ttl_of(keyspace, _number(ttl, "ttl_ms"))
    return last.write(Row(key, value, ttl_ms=ttl_ms, if_version=_condition(if_version)), _version)


def _version(written: Sequence[Written]) -> bytes:
    return wire.bulk(b"%d" % written[0].version)


def delete(session: Session, arguments: Arguments) -> Outcome:
    """Delete a record; reply with 1 if it existed."""
    last = _Last.of(session, arguments, 2, 4)
    row = Row(arguments[1], is_delete=True, if_version=_condition(arguments[3]))
    return last.write(row, replies.count_deleted)


def _increment(keyspace: Keyspace, by: bytes, ttl: bytes) -> Update:
    return Increment(_signed(by, "by"), ttl_of(keyspace, _number(ttl, "ttl_ms")))


def _touch(keyspace: Keyspace, ttl: bytes) -> Update:
    expiry = expires_after(_number(ttl, "ttl_ms"))
    check_expiry(keyspace, expiry, 0)
    return Expire(expiry)


def _get_or_put(keyspace: Keyspace, value: bytes, ttl: bytes) -> Update:
    check_value(len(value), keyspace)
    return Assign(value, expiry_of(keyspace, _number(ttl, "ttl_ms")), RecordIf(Presence.ABSENT))


def _updates(
    make: Callable[..., Update], count: int, reply: Callable[[Sequence[Written]], bytes]
) -> Handler:
    """Build the handler of a command with ``count`` arguments between its key and the table
    version. ``make`` builds the update from these arguments.
    """

    def handler(session: Session, arguments: Arguments) -> Outcome:
        last = _Last.of(session, arguments, 2 + count, 3 + count)
        keyspace = session.served.keyspace(last.table_version)
        update = make(keyspace, *arguments[2 : 2 + count])
        return last.write(Row(arguments[1], update=update), reply)

    return handler


increment = _updates(_increment, 2, replies.result_of)
touch = _updates(_touch, 1, replies.one_if_written)
get_or_put = _updates(_get_or_put, 2, replies.value_before)
