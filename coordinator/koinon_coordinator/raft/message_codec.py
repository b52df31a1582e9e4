"""Raft messages between their core and their wire forms.

The wire form lacks the sender and the receiver: the stream's hello names them for all messages.
"""

from itertools import count
from typing import Any, cast

from koinon_coordinator.core import raft
from koinon_coordinator.core.raft import (
    AppendRequest,
    Configuration,
    ConfigurationFormatError,
    Entry,
    EntryKind,
    Message,
    SnapshotChunk,
)
from koinon_proto.contract.bounds import check
from koinon_proto.contract.codec import Codec, Value, codec
from koinon_proto.contract.errors import InvalidArgumentError
from koinon_proto.v1.raft_pb2 import RaftMessage


class MalformedMessageError(ValueError):
    """A message that no member of this version sends."""


def to_proto(message: Message) -> RaftMessage:
    """Return the wire form of `message`."""
    kind = _KINDS[type(message)]
    body: Any = {kind: _BODIES[kind].encode(message)}
    return RaftMessage(term=message.term, **body)


def from_proto(wire: RaftMessage, sender: str, to: str) -> Message:
    """Return the message in `wire`; raise MalformedMessageError if no member sends such a message.

    Terms never fall along a log, and no member speaks of one above its own.
    """
    kind = wire.WhichOneof("body")
    if kind is None:
        raise MalformedMessageError(f"a message without a known body from {sender}")
    try:
        check(wire)
    except InvalidArgumentError as error:
        raise MalformedMessageError(f"{kind} from {sender}: {error}") from error
    if _greatest_term(wire, kind) > wire.term:
        raise MalformedMessageError(f"{kind} from {sender} names a term above its own")
    body = getattr(wire, kind)
    try:
        message: Message = _BODIES[kind].decode(body, term=wire.term, sender=sender, to=to)
    except ConfigurationFormatError as error:
        raise MalformedMessageError(f"{error} (from {sender})") from error
    return message


def _greatest_term(wire: RaftMessage, kind: str) -> int:
    """Return the greatest term of the sender's log that the message names."""
    if kind == "vote_request":
        return wire.vote_request.last_term
    if kind == "append_request":
        request = wire.append_request
        return max(request.previous_term, *request.entry_terms[-1:], 0)
    return wire.snapshot_chunk.snapshot_term if kind == "snapshot_chunk" else 0


# -- bodies

_ENVELOPE = ["term", "sender", "to"]
_KIND_BY_NUMBER = {int(kind): kind for kind in EntryKind}
_APPEND = codec(
    AppendRequest,
    RaftMessage.AppendRequest,
    given=[*_ENVELOPE, "entries"],
    filled=["entry_terms", "entry_kinds", "entry_data"],
)


def _encode_append_request(message: AppendRequest) -> RaftMessage.AppendRequest:
    entries = message.entries
    return _APPEND.encode(
        message,
        entry_terms=[entry.term for entry in entries],
        entry_kinds=[entry.kind for entry in entries],
        entry_data=[entry.data for entry in entries],
    )


def _decode_append_request(
    body: RaftMessage.AppendRequest, *, term: int, sender: str, to: str
) -> AppendRequest:
    terms, kinds, data = body.entry_terms, body.entry_kinds, body.entry_data
    if not len(terms) == len(kinds) == len(data):
        raise MalformedMessageError(
            f"columns of unequal length from {sender}: {len(terms)}, {len(kinds)}, {len(data)}"
        )
    last_term = body.previous_term
    for entry_term in terms:
        if entry_term < last_term:
            raise MalformedMessageError(f"terms of entries that fall, from {sender}")
        last_term = entry_term
    try:
        entry_kinds = [_KIND_BY_NUMBER[kind] for kind in kinds]
    except KeyError as error:
        raise MalformedMessageError(f"unknown entry kind {error} from {sender}") from error
    entries = tuple(map(Entry, count(body.previous_index + 1), terms, entry_kinds, data))
    return _APPEND.decode(body, term=term, sender=sender, to=to, entries=entries)


_SPECIAL: dict[type[Any], Codec[Any, Any]] = {
    AppendRequest: Codec(_encode_append_request, _decode_append_request),
    SnapshotChunk: codec(
        SnapshotChunk,
        RaftMessage.SnapshotChunk,
        values={"configuration": Value(Configuration.encode, Configuration.decode)},
        given=_ENVELOPE,
    ),
}
_KINDS: dict[type[Any], str] = {}
_BODIES: dict[str, Codec[Any, Any]] = {}
for _field in RaftMessage.DESCRIPTOR.oneofs_by_name["body"].fields:
    _name = cast(Any, _field.message_type).name
    _class = getattr(raft, _name)
    _KINDS[_class] = _field.name
    _BODIES[_field.name] = _SPECIAL.get(_class) or codec(
        _class, getattr(RaftMessage, _name), given=_ENVELOPE
    )
