"""Raft messages between their core and their wire forms.

The wire form leaves out who sends and to whom: the stream's hello says it for all its messages.
"""

from collections.abc import Callable
from itertools import count

from koinon_coordinator.core.raft import (
    AppendReply,
    AppendRequest,
    Configuration,
    ConfigurationFormatError,
    Entry,
    EntryKind,
    HeartbeatReply,
    HeartbeatRequest,
    Message,
    SnapshotChunk,
    SnapshotReply,
    TimeoutNow,
    VoteReply,
    VoteRequest,
)
from koinon_proto.contract.bounds import check
from koinon_proto.contract.errors import InvalidArgumentError
from koinon_proto.v1.raft_pb2 import RaftMessage

_KIND_BY_NUMBER = {int(kind): kind for kind in EntryKind}


class MalformedMessageError(ValueError):
    """A message that no member of this version sends."""


def to_proto(message: Message) -> RaftMessage:
    """The wire form of `message`."""
    return _ENCODERS[type(message)](message)


def from_proto(wire: RaftMessage, sender: str, to: str) -> Message:
    """The message in `wire`; raises MalformedMessageError if there is none that a member sends.

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
    return _DECODERS[kind](wire, sender, to)


def _greatest_term(wire: RaftMessage, kind: str) -> int:
    """The greatest term that the message names of its sender's log."""
    if kind == "vote_request":
        return wire.vote_request.last_term
    if kind == "append_request":
        request = wire.append_request
        return max(request.previous_term, *request.entry_terms[-1:], 0)
    return wire.snapshot_chunk.snapshot_term if kind == "snapshot_chunk" else 0


# -- elections


def _encode_vote_request(message: VoteRequest) -> RaftMessage:
    body = RaftMessage.VoteRequest(
        last_index=message.last_index,
        last_term=message.last_term,
        pre_vote=message.pre_vote,
        transfer=message.transfer,
    )
    return RaftMessage(term=message.term, vote_request=body)


def _decode_vote_request(wire: RaftMessage, sender: str, to: str) -> VoteRequest:
    body = wire.vote_request
    return VoteRequest(
        term=wire.term,
        sender=sender,
        to=to,
        last_index=body.last_index,
        last_term=body.last_term,
        pre_vote=body.pre_vote,
        transfer=body.transfer,
    )


def _encode_vote_reply(message: VoteReply) -> RaftMessage:
    body = RaftMessage.VoteReply(
        request_term=message.request_term, pre_vote=message.pre_vote, granted=message.granted
    )
    return RaftMessage(term=message.term, vote_reply=body)


def _decode_vote_reply(wire: RaftMessage, sender: str, to: str) -> VoteReply:
    body = wire.vote_reply
    return VoteReply(
        term=wire.term,
        sender=sender,
        to=to,
        request_term=body.request_term,
        pre_vote=body.pre_vote,
        granted=body.granted,
    )


def _encode_timeout_now(message: TimeoutNow) -> RaftMessage:
    return RaftMessage(term=message.term, timeout_now=RaftMessage.TimeoutNow())


def _decode_timeout_now(wire: RaftMessage, sender: str, to: str) -> TimeoutNow:
    return TimeoutNow(term=wire.term, sender=sender, to=to)


# -- replication


def _encode_append_request(message: AppendRequest) -> RaftMessage:
    entries = message.entries
    body = RaftMessage.AppendRequest(
        previous_index=message.previous_index,
        previous_term=message.previous_term,
        entry_terms=[entry.term for entry in entries],
        entry_kinds=[int(entry.kind) for entry in entries],  # type: ignore[misc]
        entry_data=[entry.data for entry in entries],
        commit_index=message.commit_index,
        round_id=message.round_id,
    )
    return RaftMessage(term=message.term, append_request=body)


def _decode_append_request(wire: RaftMessage, sender: str, to: str) -> AppendRequest:
    body = wire.append_request
    terms, kinds, data = body.entry_terms, body.entry_kinds, body.entry_data
    if not len(terms) == len(kinds) == len(data):
        raise MalformedMessageError(
            f"columns of unequal length from {sender}: {len(terms)}, {len(kinds)}, {len(data)}"
        )
    last_term = body.previous_term
    for term in terms:
        if term < last_term:
            raise MalformedMessageError(f"terms of entries that fall, from {sender}")
        last_term = term
    try:
        entry_kinds = [_KIND_BY_NUMBER[kind] for kind in kinds]
    except KeyError as error:
        raise MalformedMessageError(f"unknown entry kind {error} from {sender}") from error
    return AppendRequest(
        term=wire.term,
        sender=sender,
        to=to,
        previous_index=body.previous_index,
        previous_term=body.previous_term,
        entries=tuple(map(Entry, count(body.previous_index + 1), terms, entry_kinds, data)),
        commit_index=body.commit_index,
        round_id=body.round_id,
    )


def _encode_append_reply(message: AppendReply) -> RaftMessage:
    body = RaftMessage.AppendReply(
        round_id=message.round_id,
        success=message.success,
        match_index=message.match_index,
        rejected_index=message.rejected_index,
        hint_index=message.hint_index,
        hint_term=message.hint_term,
    )
    return RaftMessage(term=message.term, append_reply=body)


def _decode_append_reply(wire: RaftMessage, sender: str, to: str) -> AppendReply:
    body = wire.append_reply
    return AppendReply(
        term=wire.term,
        sender=sender,
        to=to,
        round_id=body.round_id,
        success=body.success,
        match_index=body.match_index,
        rejected_index=body.rejected_index,
        hint_index=body.hint_index,
        hint_term=body.hint_term,
    )


def _encode_heartbeat_request(message: HeartbeatRequest) -> RaftMessage:
    body = RaftMessage.HeartbeatRequest(
        commit_index=message.commit_index, round_id=message.round_id
    )
    return RaftMessage(term=message.term, heartbeat_request=body)


def _decode_heartbeat_request(wire: RaftMessage, sender: str, to: str) -> HeartbeatRequest:
    body = wire.heartbeat_request
    return HeartbeatRequest(
        term=wire.term,
        sender=sender,
        to=to,
        commit_index=body.commit_index,
        round_id=body.round_id,
    )


def _encode_heartbeat_reply(message: HeartbeatReply) -> RaftMessage:
    body = RaftMessage.HeartbeatReply(round_id=message.round_id)
    return RaftMessage(term=message.term, heartbeat_reply=body)


def _decode_heartbeat_reply(wire: RaftMessage, sender: str, to: str) -> HeartbeatReply:
    return HeartbeatReply(
        term=wire.term, sender=sender, to=to, round_id=wire.heartbeat_reply.round_id
    )


# -- snapshots


def _encode_snapshot_chunk(message: SnapshotChunk) -> RaftMessage:
    body = RaftMessage.SnapshotChunk(
        round_id=message.round_id,
        snapshot_index=message.snapshot_index,
        snapshot_term=message.snapshot_term,
        configuration=message.configuration.encode(),
        size_bytes=message.size_bytes,
        checksum=message.checksum,
        offset=message.offset,
        data=message.data,
    )
    return RaftMessage(term=message.term, snapshot_chunk=body)


def _decode_snapshot_chunk(wire: RaftMessage, sender: str, to: str) -> SnapshotChunk:
    body = wire.snapshot_chunk
    try:
        configuration = Configuration.decode(body.configuration)
    except ConfigurationFormatError as error:
        raise MalformedMessageError(f"{error} (from {sender})") from error
    return SnapshotChunk(
        term=wire.term,
        sender=sender,
        to=to,
        round_id=body.round_id,
        snapshot_index=body.snapshot_index,
        snapshot_term=body.snapshot_term,
        configuration=configuration,
        size_bytes=body.size_bytes,
        checksum=body.checksum,
        offset=body.offset,
        data=body.data,
    )


def _encode_snapshot_reply(message: SnapshotReply) -> RaftMessage:
    body = RaftMessage.SnapshotReply(
        round_id=message.round_id,
        snapshot_index=message.snapshot_index,
        chunk_offset=message.chunk_offset,
        next_offset=message.next_offset,
        match_index=message.match_index,
    )
    return RaftMessage(term=message.term, snapshot_reply=body)


def _decode_snapshot_reply(wire: RaftMessage, sender: str, to: str) -> SnapshotReply:
    body = wire.snapshot_reply
    return SnapshotReply(
        term=wire.term,
        sender=sender,
        to=to,
        round_id=body.round_id,
        snapshot_index=body.snapshot_index,
        chunk_offset=body.chunk_offset,
        next_offset=body.next_offset,
        match_index=body.match_index,
    )


_ENCODERS: dict[type[Message], Callable[..., RaftMessage]] = {
    VoteRequest: _encode_vote_request,
    VoteReply: _encode_vote_reply,
    AppendRequest: _encode_append_request,
    AppendReply: _encode_append_reply,
    HeartbeatRequest: _encode_heartbeat_request,
    HeartbeatReply: _encode_heartbeat_reply,
    SnapshotChunk: _encode_snapshot_chunk,
    SnapshotReply: _encode_snapshot_reply,
    TimeoutNow: _encode_timeout_now,
}
_DECODERS: dict[str, Callable[[RaftMessage, str, str], Message]] = {
    "vote_request": _decode_vote_request,
    "vote_reply": _decode_vote_reply,
    "append_request": _decode_append_request,
    "append_reply": _decode_append_reply,
    "heartbeat_request": _decode_heartbeat_request,
    "heartbeat_reply": _decode_heartbeat_reply,
    "snapshot_chunk": _decode_snapshot_chunk,
    "snapshot_reply": _decode_snapshot_reply,
    "timeout_now": _decode_timeout_now,
}
