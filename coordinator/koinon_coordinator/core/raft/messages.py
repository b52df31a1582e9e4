"""The messages between the members of a group.

Every message names its sender, its receiver and the sender's term; only a vote request has the term
of its campaign, which no member has entered yet in case of a pre-vote. Replies repeat the round,
term or chunk of their request, so that a late reply is never taken for another request's.
"""

from dataclasses import dataclass
from typing import TypeAlias

from koinon_coordinator.core.raft.configuration import Configuration
from koinon_coordinator.core.raft.log import Entry


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """The fields of every message: the sender's term, and the ids of sender and receiver."""

    term: int
    sender: str
    to: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VoteRequest(Envelope):
    """A candidate's request for a vote in `term`. With `pre_vote` it only asks whether the receiver
    would vote for it; no term changes.
    """

    last_index: int
    last_term: int
    pre_vote: bool
    transfer: bool  # the leader asked for this campaign: leader stickiness does not apply


@dataclass(frozen=True, slots=True, kw_only=True)
class VoteReply(Envelope):
    """A voter's answer. The term of the message is the voter's own."""

    request_term: int  # the term of the request
    pre_vote: bool
    granted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendRequest(Envelope):
    previous_index: int
    previous_term: int
    entries: tuple[Entry, ...]
    commit_index: int
    round_id: int  # the newest quorum round begun before the sending


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendReply(Envelope):
    """Success: all entries up to `match_index` equal the leader's, and are durable here.

    Refusal: the logs do not match at `rejected_index`; the leader should continue at or below
    `hint_index`, where the follower's log has `hint_term`.
    """

    round_id: int
    success: bool
    match_index: int = 0
    rejected_index: int = 0
    hint_index: int = 0
    hint_term: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatRequest(Envelope):
    commit_index: int  # never above what the receiver has acknowledged
    round_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatReply(Envelope):
    round_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotChunk(Envelope):
    """A part of a snapshot. Index, term, size and checksum together identify the snapshot."""

    round_id: int
    snapshot_index: int
    snapshot_term: int
    configuration: Configuration
    size_bytes: int
    checksum: int
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotReply(Envelope):
    """`next_offset` is the next offset that the receiver needs; `match_index` > 0 once the snapshot
    is installed.
    """

    round_id: int
    snapshot_index: int
    chunk_offset: int
    next_offset: int
    match_index: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeoutNow(Envelope):
    """Campaign at once: the leader hands over to the receiver."""


LeaderMessage: TypeAlias = AppendRequest | HeartbeatRequest | SnapshotChunk
FollowerReply: TypeAlias = AppendReply | HeartbeatReply | SnapshotReply
Message: TypeAlias = VoteRequest | VoteReply | LeaderMessage | FollowerReply | TimeoutNow
